package pool

import (
	"math"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// offerLocked lists the shard among those that may have memory for others: free chunks, slabs
// without blocks, or waiting blocks. Shards of arenas offerLocked nothing until their graphs
// are gone. The caller holds the shard's lock.
func (sh *shard) offerLocked() {
	if sh.offers || sh.arena != nil {
		return
	}
	sh.offers = true
	p := sh.pool
	p.offersMu.Lock()
	p.offers = append(p.offers, sh)
	p.offersMu.Unlock()
}

// hasLocked reports whether the shard hasLocked memory for others. The caller holds its lock.
func (sh *shard) hasLocked() bool {
	return sh.hot != nil || sh.waiting.n > 0 || len(sh.empty) > 0 || sh.idleSlab() != nil || sh.free.atLeast(sh.pool.chunk) != nil
}

// eachOfferLocked calls f for shards that may have memory for others, with their lock
// held, until it returns false. Shards that have nothing left are delisted. The
// caller holds mu.
func (p *Pool) eachOfferLocked(f func(o *shard) bool) {
	at := func(i int) *shard {
		p.offersMu.Lock()
		defer p.offersMu.Unlock()
		if i < len(p.offers) {
			return p.offers[i]
		}
		return nil
	}
	for i := 0; ; {
		o := at(i)
		if o == nil {
			return
		}
		o.mu.Lock()
		o.rest()
		if !o.hasLocked() {
			o.offers = false
			o.mu.Unlock()
			p.offersMu.Lock()
			last := len(p.offers) - 1
			p.offers[i] = p.offers[last]
			p.offers[last] = nil
			p.offers = p.offers[:last]
			p.offersMu.Unlock()
			continue
		}
		more := f(o)
		o.mu.Unlock()
		if !more {
			return
		}
		i++
	}
}

// withdrawLocked takes a shard from the list of offers. The caller holds mu and the
// shard's lock.
func (p *Pool) withdrawLocked(sh *shard) {
	if !sh.offers {
		return
	}
	sh.offers = false
	p.offersMu.Lock()
	defer p.offersMu.Unlock()
	p.offers = slices.DeleteFunc(p.offers, func(o *shard) bool { return o == sh })
}

// steal gives the shard free memory of another one that the GPU has passed, as it is
// mapped. It reports whether it found any that serves the request.
func (p *Pool) steal(sh *shard, w *want) bool {
	if p.stealAny(sh, w) {
		return true
	}
	return p.pollStreams(p.offering(sh)) && p.stealAny(sh, w)
}

// stealSlab is steal for a request that a slot of a slab serves, although it is larger
// than the small ones.
func (p *Pool) stealSlab(sh *shard, w *want) bool {
	if w.kind == small || p.classes.above(w.size, w.align) < 0 {
		return false
	}
	chunk := *w
	chunk.kind = small
	return p.steal(sh, &chunk)
}

// stealAny reports whether a shard had what serves the request.
func (p *Pool) stealAny(sh *shard, w *want) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	var give func()
	p.eachOfferLocked(func(o *shard) bool {
		if o != sh {
			give = p.takeFrom(o, sh, w)
		}
		return give == nil
	})
	if sh.arena != nil && give == nil {
		for _, o := range sh.arena.shards {
			if o != sh && give == nil {
				o.mu.Lock()
				o.rest()
				give = p.takeFrom(o, sh, w)
				o.mu.Unlock()
			}
		}
	}
	if give == nil {
		return false
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	give()
	return true
}

// takeFrom takes free memory that serves a request, and that the GPU has passed, out of a
// shard, whose lock is held. It returns a function that gives it to another shard, or nil.
func (p *Pool) takeFrom(o, sh *shard, w *want) (give func()) {
	passed := o.safe()
	if w.kind == small {
		c, ok := o.spareSlab(passed)
		if !ok {
			return nil
		}
		return func() {
			c.epoch = 0
			c.reg.chunks[c.index].Load().shard.Store(sh)
			sh.empty = append(sh.empty, c)
			sh.offerLocked()
		}
	}
	for e := o.free.atLeast(max(w.size, p.chunk)); e != nil; e = o.free.after(e) {
		n := int((w.size + alignRoom(e.reg, w) + e.reg.chunk - 1) / e.reg.chunk)
		if e.whole() < n || e.epoch > passed {
			continue
		}
		reg := e.reg
		from := reg.up(e.ptr)
		s := reg.cut(o, e, from, from+driver.Ptr(uint64(n)*reg.chunk))
		return func() { reg.own(sh, s, 0) }
	}
	return nil
}

// safe is the epoch up to which free memory of the shard may go to another one.
// Between the streams of one arena it is what was free when the capture began:
// the graph orders nothing else.
func (sh *shard) safe() uint64 {
	if sh.arena != nil {
		return sh.sealed
	}
	return sh.clock.Last()
}

// passed is the epoch up to which free memory of the shard may be unmapped: all of it while the
// pool sleeps, since its suspension waited for the GPU, and nothing has used it since. The caller
// holds the shard's lock.
func (sh *shard) passed() uint64 {
	if sh.sleep != nil {
		return math.MaxUint64
	}
	return sh.clock.Last()
}

// mostAsked are how many streams a request asks at a time.
const mostAsked = 32

// offering returns shards with free memory or waiting blocks that the GPU has not passed
// as far as is known: at most mostAsked, and the next ones each time.
func (p *Pool) offering(sh *shard) (behind []*shard) {
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := 0
	p.eachOfferLocked(func(o *shard) bool {
		seen++
		if o.waiting.n > 0 || o != sh && o.clock.Behind() {
			behind = append(behind, o)
		}
		return len(behind) < mostAsked
	})
	if len(behind) == mostAsked {
		p.offersMu.Lock()
		p.offers = slices.Concat(p.offers[seen:], p.offers[:seen])
		p.offersMu.Unlock()
	}
	return behind
}

// pollStreams asks streams how far they are, and reports whether any has moved on.
func (p *Pool) pollStreams(behind []*shard) bool {
	before := p.passes.Load()
	for _, o := range behind {
		o.settle()
		o.clock.Advance()
		o.settle()
	}
	return p.passes.Load() != before
}
