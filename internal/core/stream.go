package core

import (
	"fmt"
	"math"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Stream is the inner state of a cuda.Stream.
type Stream struct {
	Object
	life.Closer
	Ctx    *Context
	Handle driver.Stream
	// Borrowed streams are not destroyed.
	Borrowed bool
	// Locals are what other packages keep for the stream.
	Locals  StreamLocals
	capture captureState
	gone    atomic.Bool
	marks   atomic.Uint64 // how many were recorded
	// touched: it is in its context's list of busy streams.
	touched atomic.Bool
}

// AddStream makes a stream known to its context. The library's own streams are not
// objects that a user could close, so they are not tracked.
func (c *Context) AddStream(h driver.Stream, borrowed, track bool) *Stream {
	s := &Stream{Ctx: c, Handle: h, Borrowed: borrowed}
	s.Object.sys = c.sys
	c.mu.Lock()
	c.streams[s] = struct{}{}
	c.mu.Unlock()
	if s.foreignWork() {
		s.touch()
	}
	if track {
		c.sys.Track(s, life.KindStream, 0)
	}
	return s
}

// Gone reports whether the stream was closed and its work has passed.
func (s *Stream) Gone() bool { return s.gone.Load() }

// Forget takes the stream, whose work has passed, from the known ones.
func (s *Stream) Forget() {
	s.Expose() // callers that rely on what is known of it ask the driver instead, and are refused
	s.gone.Store(true)
	s.Ctx.mu.Lock()
	delete(s.Ctx.streams, s)
	delete(s.Ctx.busy, s)
	s.Ctx.mu.Unlock()
	s.Ctx.sys.unsettled.settle(s, math.MaxUint64)
	s.Untrack()
}

// Use holds the stream for an operation of sys that may put work on it, or says
// why it cannot be used. The caller calls Release.
func (s *Stream) Use(op string, sys *System) error { return s.use(op, sys, (*Stream).Acquire) }

// UseWithoutWork is Use for an operation that puts no work on the stream.
func (s *Stream) UseWithoutWork(op string, sys *System) error { return s.use(op, sys, (*Stream).Peek) }

func (s *Stream) use(op string, sys *System, hold func(*Stream) bool) error {
	if s == nil {
		return errs.NilStream(op)
	}
	if s.Ctx.sys != sys {
		return errs.ForeignError(op, "stream")
	}
	if !hold(s) {
		return errs.ClosedError(op, "stream")
	}
	return nil
}

// Acquire holds the stream for an operation that may put work on it; Peek does for
// one that does not.
func (s *Stream) Acquire() bool {
	if !s.Life.Acquire() {
		return false
	}
	s.touch()
	return true
}

// touch puts the stream on its context's list of busy ones. It follows the Acquire:
// Settled takes the stream from the list and then looks for operations, so one of
// the two sees the other.
func (s *Stream) touch() {
	if s.touched.Load() {
		return
	}
	s.Ctx.mu.Lock()
	defer s.Ctx.mu.Unlock()
	s.touched.Store(true)
	s.Ctx.busy[s] = struct{}{}
}

// Settled says that the work which was on the stream at the moment is done. If no
// operation has run since, the stream is idle as far as this library goes, and
// waits for it make no driver call. The caller holds the stream no more.
func (s *Stream) Settled(at life.Moment) {
	if !at.Quiet() || s.foreignWork() {
		return
	}
	s.Ctx.mu.Lock()
	defer s.Ctx.mu.Unlock()
	s.touched.Store(false)
	if s.Now() != at {
		s.touched.Store(true)
		return
	}
	delete(s.Ctx.busy, s)
}

// foreignWork reports whether work that other libraries put on the stream is waited for
// by events of the stream, because work on the whole context is not waited for.
func (s *Stream) foreignWork() bool {
	return s.Ctx.sys.Config.NamedStreamsOnly && (s.Borrowed || s.capture.exposed.Load())
}

// Capturing reports, by asking the driver, whether the stream captures a graph. The legacy
// stream counts as capturing while a blocking stream does, since work on it
// would end that capture.
func (s *Stream) Capturing() (bool, driver.Result) {
	last := s.capture.last.Load()
	status, r := s.Ctx.sys.Drv.StreamIsCapturing(s.Ctx.Handle, s.Handle)
	if r == driver.CaptureImplicit {
		return true, driver.Success
	}
	if r == driver.Success && status == driver.CaptureNone {
		s.capture.ended(last)
	}
	return status != driver.CaptureNone, s.Ctx.Observe(r)
}

// CapturingStream returns a known stream that captures a graph, or nil.
func (s *System) CapturingStream() (*Stream, driver.Result) {
	for _, c := range s.knownContexts() {
		for _, st := range c.knownStreams() {
			if !st.Peek() {
				continue // closed streams do not capture
			}
			capturing, r := st.Capturing()
			st.Release()
			if capturing || r != driver.Success {
				return st, r
			}
		}
	}
	return nil, driver.Success
}

// Capture asks the driver which capture the stream takes part in. The id is unique in
// the process, and 0 if there is none or the driver does not tell (for a capture that
// is broken, and for the legacy stream while a blocking stream captures).
func (s *Stream) Capture() (status driver.CaptureStatus, id uint64, r driver.Result) {
	last := s.capture.last.Load()
	status, id, r = s.Ctx.sys.Drv.StreamGetCaptureInfo(s.Ctx.Handle, s.Handle)
	switch {
	case r == driver.CaptureImplicit:
		return driver.CaptureActive, 0, driver.Success
	case r != driver.Success || status == driver.CaptureNone:
		id = 0
	}
	if r == driver.Success && status == driver.CaptureNone {
		s.capture.ended(last)
	}
	return status, id, s.Ctx.Observe(r)
}

// AllocNode puts an allocation into the capture that the stream takes part in.
// The graph owns the memory.
func (s *Stream) AllocNode(bytes uint64) (driver.Ptr, driver.Result) {
	p, r := s.Ctx.sys.Drv.MemAllocAsync(s.Ctx.Handle, bytes, s.Handle)
	return p, s.Ctx.Observe(r)
}

// FreeNode puts the free of such an allocation into the capture.
func (s *Stream) FreeNode(p driver.Ptr) driver.Result {
	return s.Ctx.Observe(s.Ctx.sys.Drv.MemFreeAsync(s.Ctx.Handle, p, s.Handle))
}

// IsLegacy reports whether it is the legacy default stream.
func (s *Stream) IsLegacy() bool {
	return s.Handle == driver.StreamNull || s.Handle == driver.StreamLegacy
}

// wait waits for the work that is on the stream now. For a stream that captures waited
// is false: work from before the capture may still run, and the driver does not tell.
func (s *Stream) wait(op string) (waited bool, err error) {
	at := s.Now()
	if !s.Peek() {
		return false, nil // its Close runs, and has perhaps not waited yet
	}
	m, capturing, err := s.Mark(op)
	if err == nil && !capturing {
		err = m.Wait(op)
	}
	s.Release()
	if err != nil || capturing {
		return false, err
	}
	s.Settled(at)
	return true, nil
}

// CapturingError returns the error for an operation that a capture does not allow.
func CapturingError(op string, s *Stream) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.Capturing, Asked: fmt.Sprintf("stream %#x captures a graph", uintptr(s.Handle)),
		Hint: "end the capture first, or name a stream that does not capture"})
}
