package core

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// unsettled are the streams with work of unknown end: an operation put it there and failed
// afterwards, so its caller takes it for not done, and names the stream in no fence. Each
// such stream counts for every fence (NewFence) and for new work in place of the old
// (AfterUnsettled), until a wait for it succeeds. Waits for devices wait for it in any case.
type unsettled struct {
	count atomic.Int64
	mu    sync.Mutex         // a leaf
	from  map[*Stream]uint64 // the number of the first mark that is behind the work
}

// Unsettle says that work which is on the stream has no known end. The operation that put
// it there calls it before it returns its error.
func (s *Stream) Unsettle() {
	s.touch()
	u := &s.Ctx.sys.unsettled
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.from == nil {
		u.from = map[*Stream]uint64{}
	}
	u.from[s] = s.marks.Load() + 1
	u.count.Store(int64(len(u.from)))
}

// settle says that the stream has done what was on it before the mark with that number.
func (u *unsettled) settle(s *Stream, number uint64) {
	if u.count.Load() == 0 {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if first, ok := u.from[s]; ok && number >= first {
		delete(u.from, s)
		u.count.Store(int64(len(u.from)))
	}
}

// streams returns those that still run, as far as that is known.
func (u *unsettled) streams() (all []*Stream) {
	if u.count.Load() == 0 {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for s := range u.from {
		if !s.Gone() && s.Ctx.Lost() == driver.Success {
			all = append(all, s)
		}
	}
	return all
}

// AfterUnsettled orders later work of the stream behind work of unknown end, for an operation
// that writes where an operation that failed may still write. It does not wait.
func (s *Stream) AfterUnsettled(op string) error {
	behind := s.Ctx.sys.unsettled.streams()
	if len(behind) == 0 {
		return nil
	}
	if err := s.Use(op, s.Ctx.sys); err != nil {
		return err
	}
	defer s.Release()
	for _, o := range behind {
		if o == s {
			continue
		}
		if !o.Peek() {
			return fmt.Errorf("%s: stream %#x has work of an operation that failed, and is closing: wait for its Released", op, uintptr(o.Handle))
		}
		m, capturing, err := o.Mark(op)
		o.Release()
		if capturing {
			err = CapturingError(op, o)
		}
		if err != nil {
			return err
		}
		err = s.After(op, m)
		m.Release()
		if err != nil {
			return err
		}
	}
	return nil
}
