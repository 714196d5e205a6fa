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

// mostAsked are how many streams a request asks at a time.
const mostAsked = 32

// offering returns shards that have something free, or waiting, that the GPU has not
// passed as far as is known.
func (p *Pool) offering(sh *shard) (behind []*shard) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.eachOffer(func(o *shard) bool {
		if o.waiting.n > 0 || o != sh && o.touched > o.passed.Load() {
			behind = append(behind, o)
		}
		return len(behind) < mostAsked
	})
	return behind
}

// look asks streams how far they are, and reports whether any has moved on.
func (p *Pool) look(behind []*shard) bool {
	before := p.passes.Load()
	for _, o := range behind {
		o.settle()
		o.advance()
		o.settle()
	}
	return p.passes.Load() != before
}

// lag returns the shards that the GPU is about to pass, and that chunks wait for which
// the shard could have: free ones of others, or those of waiting blocks.
func (p *Pool) lag(sh *shard) (behind []*shard) {
	for _, o := range p.offering(sh) {
		o.mu.Lock()
		if o.waiting.bytes >= p.chunk {
			behind = slices.AppendSeq(behind, maps.Keys(o.waiting.streams))
		}
		for e := o.free.atLeast(p.chunk); o != sh && e != nil; e = o.free.after(e) {
			if e.whole() > 0 {
				behind = append(behind, o)
				break
			}
		}
		o.mu.Unlock()
	}
	return slices.DeleteFunc(behind, func(o *shard) bool { return !o.promises() })
}

// catchUp waits until another stream has moved on whose memory the shard could have;
// false: none does within mostLag.
func (r *relief) catchUp() bool {
	p := r.p
	for {
		if p.look(p.offering(r.sh)) {
			return true
		}
		behind := p.lag(r.sh)
		if len(behind) == 0 {
			return false
		}
		if !r.lagging.pause(mostLag, p.sleep) {
			for _, o := range behind {
				o.inVain()
			}
			return false
		}
	}
}

// promises reports whether an event is in flight that has not been waited for in
// vain.
func (sh *shard) promises() bool {
	inFlight := sh.advance()
	sh.markMu.Lock()
	defer sh.markMu.Unlock()
	return inFlight && sh.fence != nil && sh.vain != sh.fenced
}

// inVain notes that the event in flight was waited for in vain.
func (sh *shard) inVain() {
	sh.markMu.Lock()
	defer sh.markMu.Unlock()
	if sh.fence != nil {
		sh.vain = sh.fenced
	}
}
