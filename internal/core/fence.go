package core

import (
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Fence stands for the work that was on some streams at one moment.
type Fence struct {
	marks []Mark
	// later are streams that a Reclaim marks; all stands for every known stream.
	later []*Stream
	all   bool
	held  atomic.Bool
}

// HeldByCapture reports whether the fence has not passed only because some of its
// streams capture: an event cannot mark what such a stream did before its capture
// began. A caller that the capture may be waiting for must not wait for the fence then.
func (f *Fence) HeldByCapture() bool { return f.held.Load() }

// AddAllStreams makes the fence cover the work on every known stream, too, when it is
// used in a Reclaim: for work of which it is not known where it runs.
func (f *Fence) AddAllStreams() { f.all = true }

// AddStreams makes the fence cover the work that is on the streams now, too, when it is
// used in a Reclaim. The reclaimer marks them, so the caller does not wait for driver
// calls of other goroutines.
func (f *Fence) AddStreams(streams []*Stream) { f.later = append(f.later, streams...) }

// Add makes the fence cover the mark, which it takes over.
func (f *Fence) Add(m Mark) { f.marks = append(f.marks, m) }

// join makes the fence cover what another one does, which it takes over.
func (f *Fence) join(o *Fence) {
	f.marks = append(f.marks, o.marks...)
	f.later = append(f.later, o.later...)
	f.all = f.all || o.all
}

// FenceOf marks the streams of public stream objects. No streams is an error:
// naming none is not the same as nothing running.
func FenceOf[S interface {
	comparable
	stream() *Stream
}](s *System, op string, streams []S) (*Fence, error) {
	if len(streams) == 0 {
		return nil, errs.Invalid(op, "no streams", "name the streams whose work uses the memory, or use the form without streams (Close, Clip, SetAccess), which waits for all of it")
	}
	in := make([]*Stream, len(streams))
	for i, st := range streams {
		if in[i] = StreamOf(st); in[i] == nil {
			return nil, errs.NilStream(op)
		}
	}
	return s.NewFence(op, in)
}

// NewFence marks the streams. If one of them captures a graph nothing is changed and
// the error says so. The fence covers streams with work of unknown end, too, when it is
// used in a Reclaim.
func (s *System) NewFence(op string, streams []*Stream) (*Fence, error) {
	f := &Fence{marks: make([]Mark, 0, len(streams)), later: s.Unsettled()}
	for _, st := range streams {
		err := st.UseWithoutWork(op, s)
		if err == nil {
			var m Mark
			var capturing bool
			m, capturing, err = st.Mark(op)
			st.Release()
			if err == nil && capturing {
				err = CapturingError(op, st)
			}
			if err == nil {
				f.marks = append(f.marks, m)
				continue
			}
		}
		if st.Ctx.sys == s && st.Ctx.Lost() != driver.Success {
			continue // nothing runs there any more
		}
		f.Release()
		return nil, err
	}
	return f, nil
}

// everyStream returns the streams that can have late work of this library.
func (s *System) everyStream() (all []*Stream) {
	for _, c := range s.knownContexts() {
		all = append(all, c.busyStreams()...)
	}
	return all
}

// addEach marks the streams, and returns those that cannot be marked yet: they
// capture, or their Close runs and has perhaps not waited. Work that was on a stream
// before a capture of it is marked once the capture is over.
func (f *Fence) addEach(streams []*Stream) (unmarked []*Stream) {
	return slices.DeleteFunc(streams, func(st *Stream) bool {
		if st.Gone() || st.Ctx.Lost() != driver.Success {
			return true // nothing runs there any more
		}
		if !st.Peek() {
			return false
		}
		defer st.Release()
		m, capturing, err := st.Mark("reclaim")
		if err != nil || capturing {
			return st.Ctx.Lost() != driver.Success
		}
		f.Add(m)
		return true
	})
}

// Passed reports whether all of the work is done. A mark that has passed is released
// at once, even if others have not: its context may go.
func (f *Fence) Passed() bool {
	remaining := f.marks[:0]
	for _, m := range f.marks {
		if m.Passed() {
			m.Release()
		} else {
			remaining = append(remaining, m)
		}
	}
	clear(f.marks[len(remaining):])
	f.marks = remaining
	return len(remaining) == 0
}

// Release releases the events without waiting.
func (f *Fence) Release() {
	for _, m := range f.marks {
		m.Release()
	}
	f.marks = nil
}
