package core

import "sync/atomic"

// taking is what is known without the driver of whether a stream takes part in
// a capture. Of a stream that only this library can reach it is known: a
// capture of it begins in Stream.WithCapture, or by a wait for an event of one.
// What it takes part in ends unseen, so the driver is asked then.
type taking struct {
	exposed atomic.Bool
	last    atomic.Uint64 // the last beginning, 0 once it is known to be over
}

var beginnings atomic.Uint64

// Expose says that others have the stream's handle.
func (s *Stream) Expose() {
	if !s.taking.exposed.Load() {
		s.taking.exposed.Store(true)
	}
}

// TakePart says that the stream takes part in a capture from now on.
func (s *Stream) TakePart() { s.taking.last.Store(beginnings.Add(1)) }

// over says that what began last, or earlier, is over.
func (t *taking) over(last uint64) {
	if last != 0 {
		t.last.CompareAndSwap(last, 0)
	}
}

// MayCapture reports whether the driver must be asked (Capture, Capturing)
// whether the stream takes part in a capture. It makes no driver call.
func (s *Stream) MayCapture() bool {
	return s.Borrowed || s.taking.exposed.Load() || s.taking.last.Load() != 0
}
