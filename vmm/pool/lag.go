package pool

import (
	"maps"
	"slices"
	"time"
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

// lag returns shards that the GPU is about to pass, and that chunks wait for which
// the shard could have: free ones of others, or those of waiting blocks. Of many such
// shards it returns some.
func (p *Pool) lag(sh *shard) (promise []*shard) {
	var behind []*shard
	p.mu.Lock()
	p.eachOffer(func(o *shard) bool {
		if o.waiting.bytes >= p.chunk {
			behind = slices.AppendSeq(behind, maps.Keys(o.waiting.streams))
		}
		if o != sh && o.touched > o.passed.Load() && o.hasChunk() {
			behind = append(behind, o)
		}
		return true
	})
	p.mu.Unlock()
	behind = slices.DeleteFunc(behind, (*shard).stalled)
	for len(promise) == 0 && len(behind) > 0 {
		n := min(len(behind), mostAsked)
		for _, o := range behind[:n] {
			if o.promises() {
				promise = append(promise, o)
			}
		}
		behind = behind[n:]
	}
	return promise
}

// hasChunk reports whether a whole chunk is free. The caller holds mu.
func (sh *shard) hasChunk() bool {
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
			r.lagging = patience{}
			return true
		}
		if p.look(p.offering(r.sh)) {
			r.lagging = patience{}
			return true
		}
		behind := p.lag(r.sh)
		if len(behind) == 0 {
			return false
		}
		if !r.lagging.pause(mostLag, r.sleep) {
			for _, o := range behind {
				o.stall()
			}
			return false
		}
	}
}

// promises reports whether an event is in flight, and records one if there is none. It does
// not ask about the one in flight: the request that waits for it does.
func (sh *shard) promises() bool {
	sh.markMu.Lock()
	inFlight := sh.fence != nil
	sh.markMu.Unlock()
	return inFlight || sh.advance()
}

// stalled reports whether a request has waited for the event in flight in vain.
func (sh *shard) stalled() bool {
	sh.markMu.Lock()
	defer sh.markMu.Unlock()
	return sh.fence != nil && sh.stalledAt == sh.fenced
}

// stall notes that a request has waited for the event in flight in vain.
func (sh *shard) stall() {
	sh.markMu.Lock()
	defer sh.markMu.Unlock()
	if sh.fence != nil {
		sh.stalledAt = sh.fenced
	}
}
