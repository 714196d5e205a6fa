package core

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Stream is the inner state of a cuda.Stream.
type Stream struct {
	Object
	Closer
	Ctx    *Context
	Handle driver.Stream
	// Borrowed streams are not destroyed.
	Borrowed bool
	// Locals are what other packages keep for the stream.
	Locals Locals
	taking taking
	gone   atomic.Bool
	// touched: see Touch.
	touched atomic.Bool
}

// AddStream makes a stream known to its context. The library's own streams are
// not objects that a user could close, so they are not tracked.
func (c *Context) AddStream(h driver.Stream, borrowed, track bool) *Stream {
	s := &Stream{Ctx: c, Handle: h, Borrowed: borrowed}
	s.Object.sys = c.sys
	c.mu.Lock()
	c.streams[s] = struct{}{}
	c.mu.Unlock()
	if track {
		c.sys.Track(&s.Object, KindStream, 0)
	}
	return s
}

// Gone reports whether the stream was closed and its work has passed.
func (s *Stream) Gone() bool { return s.gone.Load() }

// Forget takes the stream, whose work has passed, from the known ones.
func (s *Stream) Forget() {
	s.Expose() // whoever relies on what is known of it asks, and is refused
	s.gone.Store(true)
	s.Ctx.mu.Lock()
	delete(s.Ctx.streams, s)
	s.Ctx.mu.Unlock()
	s.Untrack()
}

// Use holds the stream for an operation of sys, or says why it cannot be used.
// The caller calls Drop.
func (s *Stream) Use(op string, sys *System) error {
	if s.Ctx.sys != sys {
		return ForeignError(op, "stream")
	}
	if !s.Hold() {
		return ClosedError(op, "stream")
	}
	return nil
}

// Capturing asks the driver whether the stream captures a graph. The legacy
// stream counts as capturing while a blocking stream does, since work on it
// would end that capture.
func (s *Stream) Capturing() (bool, driver.Result) {
	status, r := s.Ctx.sys.Drv.StreamIsCapturing(s.Ctx.Handle, s.Handle)
	if r == driver.CaptureImplicit {
		return true, driver.Success
	}
	return status != driver.CaptureNone, s.Ctx.Note(r)
}

// CapturingStream is a known stream that captures a graph, nil where none does.
func (s *System) CapturingStream() (*Stream, driver.Result) {
	for _, c := range s.knownContexts() {
		for _, st := range c.knownStreams() {
			if !st.Hold() {
				continue // closed streams do not capture
			}
			capturing, r := st.Capturing()
			st.Drop()
			if capturing || r != driver.Success {
				return st, r
			}
		}
	}
	return nil, driver.Success
}

// Capture asks the driver which capture the stream takes part in. The id is
// unique in the process, and 0 where there is none or the driver does not tell
// (of a capture that is broken, and of the legacy stream while a blocking
// stream captures).
func (s *Stream) Capture() (status driver.CaptureStatus, id uint64, r driver.Result) {
	last := s.taking.last.Load()
	status, id, r = s.Ctx.sys.Drv.StreamGetCaptureInfo(s.Ctx.Handle, s.Handle)
	switch {
	case r == driver.CaptureImplicit:
		return driver.CaptureActive, 0, driver.Success
	case r != driver.Success || status == driver.CaptureNone:
		id = 0
	}
	if r == driver.Success && status == driver.CaptureNone {
		s.taking.over(last)
	}
	return status, id, s.Ctx.Note(r)
}

// AllocNode puts an allocation into the capture that the stream takes part in.
// The graph owns the memory.
func (s *Stream) AllocNode(bytes uint64) (driver.Ptr, driver.Result) {
	p, r := s.Ctx.sys.Drv.MemAllocAsync(s.Ctx.Handle, bytes, s.Handle)
	return p, s.Ctx.Note(r)
}

// FreeNode puts the free of such an allocation into the capture.
func (s *Stream) FreeNode(p driver.Ptr) driver.Result {
	return s.Ctx.Note(s.Ctx.sys.Drv.MemFreeAsync(s.Ctx.Handle, p, s.Handle))
}

// IsLegacy reports whether it is the legacy default stream.
func (s *Stream) IsLegacy() bool {
	return s.Handle == driver.StreamNull || s.Handle == driver.StreamLegacy
}

// Touch says that there is work of this library on the stream.
func (s *Stream) Touch() {
	if !s.touched.Load() {
		s.touched.Store(true)
	}
}

// others reports whether all work on the stream is other people's. It is kept
// for the legacy stream alone, where an event is not free: it orders itself with
// every blocking stream.
func (s *Stream) others() bool { return s.IsLegacy() && !s.touched.Load() }

// wait waits for the work that is on the stream now. A stream that captures
// cannot be asked for the work from before, which may still run: then waited is
// false.
func (s *Stream) wait(op string) (waited bool, err error) {
	if !s.Hold() {
		return false, nil // its Close runs, and has perhaps not waited yet
	}
	defer s.Drop()
	m, capturing, err := s.Mark(op)
	if err != nil || capturing {
		return false, err
	}
	return true, m.Wait(op)
}

// A Mark is an event behind the work that was on a stream. Its owner ends it
// with Wait, or gives it to a Fence.
type Mark struct {
	ctx   *Context
	event driver.Event
}

// Mark records an event on the stream, unless it captures: asked before, and
// again after the record, since another goroutine may have begun a capture in
// between; then the event is part of that capture, and is destroyed without
// being queried, which would end the capture.
func (s *Stream) Mark(op string) (m Mark, capturing bool, err error) {
	c, d := s.Ctx, s.Ctx.sys.Drv
	asked := func() string { return fmt.Sprintf("stream %#x", uintptr(s.Handle)) }
	if capturing, r := s.Capturing(); capturing || r != driver.Success {
		if r != driver.Success {
			err = c.Fail(op, driver.CallStreamIsCapturing, r, asked())
		}
		return Mark{}, capturing, err
	}
	e, r := c.event()
	if r != driver.Success {
		return Mark{}, false, c.Fail(op, driver.CallEventCreate, r, asked())
	}
	if r := d.EventRecord(c.Handle, e, s.Handle); r != driver.Success {
		c.destroy(e)
		return Mark{}, false, c.Fail(op, driver.CallEventRecord, r, asked())
	}
	if capturing, _ := s.Capturing(); capturing {
		c.destroy(e)
		return Mark{}, true, nil
	}
	return Mark{c, e}, false, nil
}

// After makes later work of the stream wait for the mark, which stays its
// owner's and may be dropped at once. The call itself does not wait. The stream
// must not capture a graph.
func (s *Stream) After(op string, m Mark) error {
	if m.over() {
		return nil
	}
	if r := s.Ctx.sys.Drv.StreamWaitEvent(s.Ctx.Handle, s.Handle, m.event); r != driver.Success {
		return s.Ctx.Fail(op, driver.CallStreamWaitEvent, r, fmt.Sprintf("stream %#x", uintptr(s.Handle)))
	}
	return nil
}

// over reports whether the mark has passed as far as that is known without the
// driver: in a lost context nothing runs any more, and one that is gone was
// waited for.
func (m Mark) over() bool { return m.ctx.Lost() != driver.Success || m.ctx.gone.Load() }

// passed asks whether the work before the mark is done.
func (m Mark) passed() bool {
	if m.over() {
		return true
	}
	switch r := m.ctx.Note(m.ctx.sys.Drv.EventQuery(m.ctx.Handle, m.event)); {
	case r == driver.Success || r.Lost():
		return true
	case r == driver.NotReady:
		return false
	default:
		// The event cannot tell (it was recorded into a capture that began
		// and ended between two of our calls): wait for everything.
		return m.ctx.waitWork("reclaim") == nil
	}
}

// Wait blocks until the mark has passed, and gives the event back. A capture
// that runs is not harmed. A lost context is no error: nothing of it runs.
func (m Mark) Wait(op string) error {
	if m.over() {
		return nil
	}
	if r := m.Synchronize(); r != driver.Success && !r.Lost() {
		return m.ctx.Fail(op, driver.CallEventSynchronize, r, "wait for a stream")
	}
	return nil
}

// Synchronize is Wait with the driver's answer, a loss too.
func (m Mark) Synchronize() driver.Result {
	defer m.Drop()
	return m.ctx.Note(m.ctx.sys.Drv.EventSynchronize(m.ctx.Handle, m.event))
}

// Drop gives the event back without waiting: it may be recorded anew while an
// earlier record is pending.
func (m Mark) Drop() { m.ctx.recycle(m.event) }

// Fence stands for the work that was on some streams at one moment.
type Fence struct {
	marks []Mark
	// later are streams that a Reclaim marks, or everyone that is known.
	later []*Stream
	all   bool
	held  atomic.Bool
}

// HeldByCapture reports whether a Reclaim keeps the fence from passing only
// because some of its streams capture: an event cannot mark what such a stream
// did before its capture began. A caller that may itself be what the capture is
// waiting for must not wait for the fence then.
func (f *Fence) HeldByCapture() bool { return f.held.Load() }

// MindAll lets the fence pass only after the work that is on every known stream
// too, as far as a Reclaim goes: for work of which it is not known where it is.
func (f *Fence) MindAll() { f.all = true }

// Mind lets the fence pass only after the work that is on the streams now too, as
// far as a Reclaim goes: that marks them, so that the caller waits for no driver
// call that somebody else is in.
func (f *Fence) Mind(streams []*Stream) { f.later = append(f.later, streams...) }

// Add lets the fence pass only after the mark has, and takes the mark over.
func (f *Fence) Add(m Mark) { f.marks = append(f.marks, m) }

// NewFence marks the streams. Where one of them captures a graph nothing is
// changed and the error says so.
func (s *System) NewFence(op string, streams []*Stream) (*Fence, error) {
	f := &Fence{marks: make([]Mark, 0, len(streams))}
	for _, st := range streams {
		err := st.Use(op, s)
		if err == nil {
			var m Mark
			var capturing bool
			m, capturing, err = st.Mark(op)
			st.Drop()
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
		f.Drop()
		return nil, err
	}
	return f, nil
}

// everyStream are the streams that can have late work of this library.
func (s *System) everyStream() (all []*Stream) {
	for _, c := range s.knownContexts() {
		all = append(all, c.knownStreams()...)
	}
	return slices.DeleteFunc(all, (*Stream).others)
}

// addEach marks the streams, and answers those that cannot be marked yet: they
// capture, or their Close runs and has perhaps not waited. What lies on a stream
// before a capture of it is marked once that is over.
func (f *Fence) addEach(streams []*Stream) (rest []*Stream) {
	return slices.DeleteFunc(streams, func(st *Stream) bool {
		if st.Gone() || st.Ctx.Lost() != driver.Success {
			return true // nothing runs there any more
		}
		if !st.Hold() {
			return false
		}
		defer st.Drop()
		m, capturing, err := st.Mark("reclaim")
		if err != nil || capturing {
			return st.Ctx.Lost() != driver.Success
		}
		f.Add(m)
		return true
	})
}

// CapturingError is the refusal of an operation that a capture does not allow.
func CapturingError(op string, s *Stream) error {
	return Error(Failure{Op: op, Kind: Capturing, Asked: fmt.Sprintf("stream %#x captures a graph", uintptr(s.Handle)),
		Hint: "end the capture first, or name a stream that does not capture"})
}

// Passed asks whether all of the work is done. Marks that have passed are given
// back at once, whatever the others do: their context may go.
func (f *Fence) Passed() bool {
	f.marks = slices.DeleteFunc(f.marks, func(m Mark) bool {
		passed := m.passed()
		if passed {
			m.Drop()
		}
		return passed
	})
	return len(f.marks) == 0
}

// Drop gives the events back without waiting.
func (f *Fence) Drop() {
	for _, m := range f.marks {
		m.Drop()
	}
	f.marks = nil
}
