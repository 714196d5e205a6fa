package pool

import (
	"maps"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/epoch"
)

// Memory that changes its stream waits for the GPU. A pool that made new memory
// instead would grow by as much as the GPU is behind, and stay so. So a request
// waits as long as other streams have enough free memory that the GPU is about to
// pass: the GPU has work meanwhile, and what it does last is what was submitted
// before. A stream whose work does not end within mostLag, since it waits for the
// program, say, is not waited for again until it has moved on.

// mostLag is how long a request waits for the GPU before it makes new memory
// although enough is free on other streams. It is a variable for tests.
var mostLag = 100 * time.Millisecond

// lag returns clocks that the GPU is about to move on, and that chunks wait for which
// the shard could have: free ones of others, or those of waiting blocks. Of many such
// clocks it returns some.
func (p *Pool) lag(sh *shard) (promise []*epoch.Clock) {
	var behind []*epoch.Clock
	p.mu.Lock()
	p.eachOfferLocked(func(o *shard) bool {
		if o.waiting.bytes >= p.chunk {
			behind = slices.AppendSeq(behind, maps.Keys(o.waiting.streams))
		}
		if o != sh && o.clock.Behind() && o.hasChunkLocked() {
			behind = append(behind, &o.clock)
		}
		return true
	})
	p.mu.Unlock()
	behind = slices.DeleteFunc(behind, (*epoch.Clock).Stalled)
	for len(promise) == 0 && len(behind) > 0 {
		n := min(len(behind), mostAsked)
		for _, c := range behind[:n] {
			if c.Promises() {
				promise = append(promise, c)
			}
		}
		behind = behind[n:]
	}
	return promise
}

// hasChunkLocked reports whether a whole chunk is free. The caller holds mu.
func (sh *shard) hasChunkLocked() bool {
	for e := sh.free.atLeast(sh.pool.chunk); e != nil; e = sh.free.after(e) {
		if e.whole() > 0 {
			return true
		}
	}
	return false
}

// catchUp waits until another stream has moved on whose memory the shard could have. It
// returns false if none does within mostLag, or if other requests took the memory each
// time.
func (r *escalation) catchUp() bool {
	p := r.p
	if r.lagged.IsZero() {
		r.lagged = time.Now()
	}
	for {
		if time.Since(r.lagged) >= max(mostLag, p.wait) {
			return false
		}
		if p.passes.Load() != r.seen {
			r.sleep(firstPause) // another miss saw it, and may have taken what passed
			r.lagging = backoff{}
			return true
		}
		if p.pollStreams(p.offering(r.sh)) {
			r.lagging = backoff{}
			return true
		}
		behind := p.lag(r.sh)
		if len(behind) == 0 {
			return false
		}
		if !r.lagging.pause(mostLag, r.sleep) {
			for _, c := range behind {
				c.Stall()
			}
			return false
		}
	}
}
