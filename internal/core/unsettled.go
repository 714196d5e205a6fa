package core

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// unsettled are the streams with work of unknown end: an operation put it there and failed
// afterwards, so its caller assumes that it was not done, and names the stream in no fence. Each
// such stream counts for every fence (NewFence) and for new work in place of the old
// (AfterUnsettled), until a wait for it succeeds. Waits for devices wait for it in any case.
type unsettled struct {
	count atomic.Int64
	mu    lock.Mutex[lock.Leaf]
	from  map[*Stream]uint64 // the number of the first mark that is behind the work
}

// Unsettle says that the end of work on the stream is not known. The operation that put
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

// settle says that all work before the mark with that number is done.
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

// Unsettled returns the streams with work of unknown end, as far as that is known.
func (s *System) Unsettled() []*Stream {
	if s.unsettled.count.Load() == 0 {
		return nil
	}
	return s.unsettled.streams()
}

func (u *unsettled) streams() (all []*Stream) {
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
// that writes where an operation that failed may still write. It waits only if the stream
// captures: a graph holds no such order.
func (s *Stream) AfterUnsettled(op string) error {
	sys := s.Ctx.sys
	behind := slices.DeleteFunc(sys.Unsettled(), func(o *Stream) bool { return o == s })
	if len(behind) == 0 {
		return nil
	}
	if err := s.Use(op, sys); err != nil {
		return err
	}
	defer s.Release()
	capturing, r := s.Capturing()
	switch {
	case r != driver.Success:
		return s.Ctx.CallError(op, driver.CallStreamIsCapturing, r, fmt.Sprintf("stream %#x", uintptr(s.Handle)))
	case capturing:
		return afterEach(op, behind, func(m Mark) error { return m.Wait(op) })
	}
	return afterEach(op, behind, func(m Mark) error {
		defer m.Release()
		return s.After(op, m)
	})
}

// AwaitUnsettled waits for work of unknown end, for an operation that lets its caller write
// where an operation that failed may still write.
func (s *System) AwaitUnsettled(op string) error {
	return afterEach(op, s.Unsettled(), func(m Mark) error { return m.Wait(op) })
}

// afterEach passes a mark behind the work of each stream to do, which ends the mark.
func afterEach(op string, streams []*Stream, do func(m Mark) error) error {
	for _, s := range streams {
		if !s.Peek() {
			return fmt.Errorf("%s: stream %#x has work of an operation that failed, and is closing: wait for its Released", op, uintptr(s.Handle))
		}
		m, capturing, err := s.Mark(op)
		s.Release()
		if capturing {
			err = CapturingError(op, s)
		}
		if err == nil {
			err = do(m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
