package pool

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// run are free chunks that were cut out of a shard: their place, and the shard,
// are kept until they are unmapped or put back.
type run struct {
	shard *shard
	reg   *region
	span  *span
	epoch uint64
}

// gather cuts up to n free chunks, which the GPU has passed, out of the shard,
// then out of others: from the smallest holes first, which serve least as they
// are. Chunks of arenas stay, and those that peers were granted or others may
// hold. The caller holds mu.
func (p *Pool) gather(sh *shard, n int) (runs []run, got int) {
	if !p.moves() {
		return nil, 0
	}
	from := append([]*shard{sh}, p.shards...)
	for i, o := range from {
		if got >= n {
			break
		}
		if i > 0 && o == sh {
			continue
		}
		o.mu.Lock()
		if o.arena == nil {
			more, k := p.cutHoles(o, n-got, true)
			runs = append(runs, more...)
			got += k
		}
		o.mu.Unlock()
	}
	return runs, got
}

// moves reports whether chunks move at all: granting a peer access to one that
// moved would take longer than making another.
func (p *Pool) moves() bool { return len(p.access) == 1 }

// cutHoles cuts up to n free chunks out of one shard, whose lock the caller
// holds too: to move them, or to give them back.
func (p *Pool) cutHoles(sh *shard, n int, move bool) (runs []run, got int) {
	sh.rest()
	passed := sh.passed.Load()
	var holes []*extent
	for e := sh.free.atLeast(p.chunk); e != nil; e = sh.free.after(e) {
		if e.epoch <= passed && e.whole() > 0 {
			holes = append(holes, e)
		}
	}
	for _, e := range holes {
		from, k := e.loose(n-got, move)
		if k == 0 {
			continue
		}
		reg, epoch := e.reg, e.epoch
		s := reg.cut(sh, e, from, from+driver.Ptr(uint64(k)*reg.chunk))
		runs = append(runs, run{sh, reg, s, epoch})
		sh.kept++ // until the run is unmapped or put back, since prune forgets a shard that has nothing
		if got += k; got >= n {
			break
		}
	}
	return runs, got
}

// whole is how many whole chunks lie in the extent.
func (e *extent) whole() int {
	from, to := e.reg.up(e.ptr), e.reg.down(e.end())
	if from >= to {
		return 0
	}
	return int(uint64(to-from) / e.reg.chunk)
}

// loose is the run of at most n chunks that goes from the extent: at the end
// that has nothing behind it, so that the hole does not become two.
func (e *extent) loose(n int, move bool) (from driver.Ptr, k int) {
	r := e.reg
	lo, hi := r.index(r.up(e.ptr)), r.index(r.up(e.ptr))+e.whole()
	may := func(i int) bool {
		return !move || !r.chunks[i].Load().handle.Exported()
	}
	if e.prev.state == wall && e.next.state != wall {
		for k = 0; k < n && lo+k < hi && may(lo+k); k++ {
		}
		return r.at(lo), k
	}
	for k = 0; k < n && hi-k > lo && may(hi-k-1); k++ {
	}
	return r.at(hi - k), k
}

// lift unmaps a run and answers its chunks, which are then mapped nowhere.
func (p *Pool) lift(r run) ([]*phys.Handle, error) {
	handles := r.handles()
	for _, h := range handles {
		h.Retain()
	}
	if _, err := p.unmap(allocOp, r); err != nil {
		for _, h := range handles {
			h.Release() // the mapping's count stays
		}
		return nil, err
	}
	return handles, nil
}

// unmap makes the place of a run a gap, and answers the bytes that went. Where it
// fails nobody knows what is mapped there: the place is lost, and what is left of
// its memory goes with the region.
func (p *Pool) unmap(op string, r run) (gone uint64, err error) {
	gone, err = r.reg.vacate(op, r.reg.index(r.span.from), r.reg.index(r.span.to))
	r.shard.keep(-1)
	if err == nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		r.reg.remove(r.span)
	}
	return gone, err
}

// vacate unmaps chunks that nobody uses, and answers the bytes that went. What
// is left after a failure is lost.
func (r *region) vacate(op string, from, to int) (gone uint64, err error) {
	err = r.rng.UnmapRun(op, r.off(r.at(from)), uint64(to-from)*r.chunk)
	for i := from; i < to; {
		h := r.chunks[i].Load().handle
		if err == nil || r.left(i) == 0 {
			r.chunks[i].Store(nil)
			gone += h.Size
		} else {
			r.chunks[i].Store(&chunk{handle: h})
		}
		i += r.count(h.Size)
	}
	return gone, err
}

func (r run) handles() (all []*phys.Handle) {
	for i := r.reg.index(r.span.from); i < r.reg.index(r.span.to); i++ {
		all = append(all, r.reg.chunks[i].Load().handle)
	}
	return all
}

// putBack gives a run back to the shard that it was cut out of.
func (p *Pool) putBack(r run) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.shard.mu.Lock()
	defer r.shard.mu.Unlock()
	r.reg.own(r.shard, r.span, r.epoch)
	r.shard.kept--
}

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
	case large:
		e := o.exacts.atLeast(w.size)
		if e == nil || e.size > w.size+w.size/exactWaste {
			return nil, false
		}
		if has = true; e.epoch <= passed {
			reg, at := disownExact(e)
			return func() { reg.ownExact(sh, at, 0) }, true
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
