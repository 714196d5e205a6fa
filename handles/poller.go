package handles

import (
	"runtime"
	"time"
)

// poller polls for what is about to come from another process before it is
// waited for, since being woken takes longer than importing and mapping a chunk.
// Where nothing came it lets some of the next occasions pass, twice as many each
// time: the other side takes longer than that, or has no processor, and then this
// one is in its way. Its owner lets one in at a time.
type poller struct{ vain, rest int }

const (
	pollTime = time.Millisecond
	// pollProcessors is how many there must be: with fewer the other side needs
	// them more.
	pollProcessors = 4
	// mostRest is how many occasions pass at most, as a power of two.
	mostRest = 6
)

// canPoll reports whether there are processors for it, which callers ask first.
func canPoll() bool { return min(runtime.NumCPU(), runtime.GOMAXPROCS(0)) >= pollProcessors }

// poll waits a moment for something to come.
func (p *poller) poll(came func() bool) {
	if p.rest > 0 {
		p.rest--
		return
	}
	for start := time.Now(); ; runtime.Gosched() {
		if came() {
			p.vain = 0
			return
		}
		if time.Since(start) >= pollTime {
			break
		}
	}
	p.vain = min(p.vain+1, mostRest)
	p.rest = 1 << p.vain
}
