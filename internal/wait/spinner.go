package wait

import (
	"runtime"
	"time"
)

// Spinner polls for what is about to come from another process before its caller
// waits: waking a process costs more than importing and mapping a chunk. After a poll
// in vain it skips the next occasions, twice as many each time: the other side takes
// longer than that, or has no processor, and then this one is in its way. The zero
// value is ready. Its owner admits one goroutine at a time.
type Spinner struct{ vain, rest int }

const (
	spinTime = time.Millisecond
	// spinProcessors is how many there must be: with fewer the other side needs them
	// more.
	spinProcessors = 4
	// mostRest is how many occasions it skips at most, as a power of two.
	mostRest = 6
)

// CanSpin reports whether there are processors for it, which callers ask first.
func CanSpin() bool { return min(runtime.NumCPU(), runtime.GOMAXPROCS(0)) >= spinProcessors }

// Spin waits a moment for something to come.
func (s *Spinner) Spin(came func() bool) {
	if s.rest > 0 {
		s.rest--
		return
	}
	for start := time.Now(); ; runtime.Gosched() {
		if came() {
			s.vain = 0
			return
		}
		if time.Since(start) >= spinTime {
			break
		}
	}
	s.vain = min(s.vain+1, mostRest)
	s.rest = 1 << s.vain
}
