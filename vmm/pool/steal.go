package pool

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// steal gives the shard memory that lies free in another one, and that has
// passed there, as it is mapped. It reports whether it found what serves the
// request.
func (p *Pool) steal(sh *shard, w *want) bool {
	for _, o := range p.all() {
		if o == sh {
			continue
		}
		o.settle()
		has, passed := p.stealFrom(o, sh, w)
		if has && !passed {
			o.advance()
			_, passed = p.stealFrom(o, sh, w)
		}
		if passed {
			return true
		}
	}
	return false
}

// stealFrom reports whether a shard has what serves the request, and whether it
// was given, since it has passed.
func (p *Pool) stealFrom(o, sh *shard, w *want) (has, given bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o.mu.Lock()
	give := func() {}
	if o.arena == nil || o.arena == sh.arena {
		give, has = p.loot(o, sh, w)
	}
	o.mu.Unlock()
	if give == nil || !has {
		return has, false
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	give()
	return true, true
}

// loot takes what serves a request out of a shard, whose lock is held, and
// answers how another one gets it; nil where the GPU has not passed.
func (p *Pool) loot(o, sh *shard, w *want) (give func(), has bool) {
	passed := o.safe(sh)
	switch w.kind {
	case small:
		o.giveUpAll()
		for i, c := range o.empty {
			if has = true; c.epoch <= passed {
				o.empty = slices.Delete(o.empty, i, i+1)
				return func() {
					c.epoch = 0
					c.reg.chunks[c.index].Load().shard.Store(sh)
					sh.empty = append(sh.empty, c)
				}, true
			}
		}
	case mid:
		o.rest()
		for e := o.free.atLeast(w.size); e != nil; e = o.free.after(e) {
			n := int((w.size + alignRoom(e.reg, w) + e.reg.chunk - 1) / e.reg.chunk)
			if e.whole() < n {
				continue
			}
			if has = true; e.epoch <= passed {
				reg := e.reg
				from := reg.up(e.ptr)
				s := reg.cut(o, e, from, from+driver.Ptr(uint64(n)*reg.chunk))
				return func() { reg.own(sh, s, 0) }, true
			}
		}
	}
	return nil, has
}

// safe is the epoch up to which what lies free in the shard may be another's.
// Between the streams of one arena it is what was free when the capture began:
// the graph orders nothing else.
func (sh *shard) safe(_ *shard) uint64 {
	if sh.arena != nil {
		return sh.sealed
	}
	return sh.passed.Load()
}
