package core

import (
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// captureState is what is known, without asking the driver, of whether a stream takes
// part in a capture. For a stream that only this library can reach it is known: a
// capture of it begins in Stream.WithCapture, or by a wait for an event of one. A
// capture that it takes part in ends unseen, so callers query the driver then.
type captureState struct {
	// mu is held for writing while a capture of the stream begins, and for
	// reading over what must not meet that: the query whether the stream is done,
	// which would end the capture, and submissions that no graph may contain.
	mu      lock.RWMutex[lock.Captures]
	exposed atomic.Bool
	last    atomic.Uint64 // the last beginning, 0 once it is known to be over
}

var beginnings atomic.Uint64

// Expose says that other libraries have the stream's handle.
func (s *Stream) Expose() {
	if s.capture.exposed.Load() {
		return
	}
	s.capture.exposed.Store(true)
	if s.foreignWork() {
		s.touch()
	}
}

// TakePart says that the stream takes part in a capture from now on.
func (s *Stream) TakePart() { s.capture.last.Store(beginnings.Add(1)) }

// Joining runs begin, which makes the stream take part in a capture if it succeeds.
func (s *Stream) Joining(begin func() driver.Result) driver.Result {
	s.capture.mu.Lock()
	defer s.capture.mu.Unlock()
	r := begin()
	if r == driver.Success {
		s.TakePart()
	}
	return r
}

// Query reports whether the stream's work is done: Success, or NotReady. While it
// captures it reports that instead, and does not ask the driver, which would end the
// capture. A capture that another library begins in between is not detected.
func (s *Stream) Query() (capturing bool, call driver.Call, r driver.Result) {
	s.capture.mu.RLock()
	defer s.capture.mu.RUnlock()
	if capturing, r := s.Capturing(); capturing || r != driver.Success {
		return capturing, driver.CallStreamIsCapturing, r
	}
	number := s.marks.Add(1)
	r = s.Ctx.Observe(s.Ctx.sys.Drv.StreamQuery(s.Ctx.Handle, s.Handle))
	if r == driver.Success {
		s.Ctx.sys.unsettled.settle(s, number)
	}
	return false, driver.CallStreamQuery, r
}

// Uncaptured submits work that no graph can hold. While it does, no capture of this
// library begins on the stream; if the stream captures already nothing is submitted.
// A capture that another library begins meanwhile is not prevented.
func (s *Stream) Uncaptured(op string, submit func() error) error {
	s.capture.mu.RLock()
	defer s.capture.mu.RUnlock()
	if s.MayCapture() {
		if capturing, r := s.Capturing(); r != driver.Success {
			return s.Ctx.CallError(op, driver.CallStreamIsCapturing, r, fmt.Sprintf("stream %#x", uintptr(s.Handle)))
		} else if capturing {
			return CapturingError(op, s)
		}
	}
	return submit()
}

// ended records that captures up to the one with the number last have ended.
func (t *captureState) ended(last uint64) {
	if last != 0 {
		t.last.CompareAndSwap(last, 0)
	}
}

// MayCapture reports whether the driver must be asked (Capture, Capturing)
// whether the stream takes part in a capture. It makes no driver call.
func (s *Stream) MayCapture() bool {
	return s.Borrowed || s.capture.exposed.Load() || s.capture.last.Load() != 0
}
