package wait

import (
	"runtime"
	"time"
)

// Spinner polls briefly for a message of another process before its caller blocks: waking
// a process costs more than importing and mapping a chunk. After a poll in vain it skips
// the next occasions, twice as many each time: the other process takes longer, or lacks a
// processor, which this one then must not occupy. The zero value is ready. One goroutine
// at a time may use it.
type Spinner struct{ vain, rest int }

const (
	spinTime = time.Millisecond
	// spinProcessors is how many processors spinning needs: with fewer the other
	// process needs them more.
	spinProcessors = 4
	// mostRest bounds the skipped occasions, as a power of two.
	mostRest = 6
)

// CanSpin reports whether there are enough processors to spin, which callers check first.
func CanSpin() bool { return min(runtime.NumCPU(), runtime.GOMAXPROCS(0)) >= spinProcessors }

// Spin polls for up to spinTime until came returns true.
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
