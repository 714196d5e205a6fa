package pool

import (
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// run are free chunks that were cut out of a shard. Their place, and the shard,
// are kept until the chunks are put back or unmapped there.
//
//	a shard's ──cut──► run ──put back──► the shard's
//	                    ├──mapped elsewhere──► deferred ──GPU has passed──► unmapped
//	                    ├──trimmed──► unmapped
//	                    └──set apart──► leaving ──GPU has passed──► trimmed
//	                                       └──a request lacks memory──► put back
type run struct {
	shard *shard
	reg   *region
	span  *span
	epoch uint64
}

// moves reports whether chunks move at all: granting a peer access to one that
// moved would take longer than making another.
func (p *Pool) moves() bool { return len(*p.access.Load()) == 1 }

// cutLocked takes free chunks that are of an epoch up to a last one out of a shard, for a
// gap: from the smallest holes first, which serve least as they are. The caller
// holds mu and the shard's lock.
func (p *Pool) cutLocked(sh *shard, g *growth, upTo uint64) {
	runs, n := p.cutHolesLocked(sh, g.n-g.have, upTo)
	g.runs = append(g.runs, runs...)
	g.have += n
}

// cutHolesLocked cuts up to n free chunks out of one shard, to move them, or to give them
// back. The caller holds mu and the shard's lock.
func (p *Pool) cutHolesLocked(sh *shard, n int, upTo uint64) (runs []run, got int) {
	sh.rest()
	var holes []*extent
	for e, found := sh.free.atLeast(p.chunk), 0; e != nil && found < n; e = sh.free.after(e) {
		if k := e.whole(); e.epoch <= upTo && k > 0 {
			holes = append(holes, e)
			found += k
		}
	}
	for _, e := range holes {
		if got >= n {
			break
		}
		from, k := e.loose(n - got)
		reg, epoch := e.reg, e.epoch
		s := reg.cut(sh, e, from, from+driver.Ptr(uint64(k)*reg.chunk))
		runs = append(runs, run{sh, reg, s, epoch})
		sh.kept++ // until the run is unmapped or put back, since prune forgets a shard that has nothing
		got += k
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
func (e *extent) loose(n int) (from driver.Ptr, k int) {
	k = min(n, e.whole())
	if e.prev.state == wall && e.next.state != wall {
		return e.reg.up(e.ptr), k
	}
	return e.reg.down(e.end()) - driver.Ptr(uint64(k)*e.reg.chunk), k
}

func (r run) chunks() int { return r.reg.index(r.span.to) - r.reg.index(r.span.from) }

func (r run) handles() (all []*phys.Handle) {
	for i := r.reg.index(r.span.from); i < r.reg.index(r.span.to); i++ {
		all = append(all, r.reg.chunks[i].Load().handle)
	}
	return all
}

// putBackLocked gives a run back to the shard that it was cut out of. The caller holds mu.
func (p *Pool) putBackLocked(r run) {
	r.shard.mu.Lock()
	defer r.shard.mu.Unlock()
	r.reg.own(r.shard, r.span, r.epoch)
	r.shard.kept--
}

// deferUnmapLocked has the old place of chunks that moved unmapped later. The caller holds mu.
func (p *Pool) deferUnmapLocked(r run) {
	p.addDeferredLocked(r)
	p.missed = time.Now()
	after := firstUpkeep
	if p.crowdedLocked() {
		after = min(after, busyUpkeep)
	}
	p.upkeep.Wake(after, p.tend)
}

// addDeferredLocked lists a run among those whose unmap is deferred. The caller holds mu.
func (p *Pool) addDeferredLocked(r run) {
	r.span.freedBy, r.span.epoch = r.shard, r.epoch
	p.deferred = append(p.deferred, r)
	p.deferredBytes += r.span.bytes()
}

// takeDeferredLocked takes what lies in a range of addresses out of the deferred runs, and out
// of the region's spans. All of them there are clearable. The caller holds mu.
func (p *Pool) takeDeferredLocked(reg *region, from, to driver.Ptr) (old []run) {
	for i := 0; i < len(p.deferred); {
		r := p.deferred[i]
		if r.reg != reg || r.span.to <= from || r.span.from >= to {
			i++
			continue
		}
		p.removeDeferredLocked(i)
		if r.span.from < from {
			outside := p.frontOfLocked(r, reg.index(from)-reg.index(r.span.from))
			p.addDeferredLocked(outside)
		}
		if r.span.to > to {
			inside := p.frontOfLocked(r, reg.index(to)-reg.index(r.span.from))
			p.addDeferredLocked(r)
			r = inside
		}
		reg.remove(r.span)
		old = append(old, r)
	}
	return old
}

// frontOfLocked splits a run, and returns its first n chunks. The caller holds mu.
func (p *Pool) frontOfLocked(r run, n int) run {
	front := r
	front.span = r.reg.front(r.span, n)
	r.shard.mu.Lock()
	r.shard.kept++
	r.shard.mu.Unlock()
	return front
}

// piece is how many chunks are unmapped in one call at most, since a miss that
// maps meanwhile waits for it: a chunk takes some 14 µs.
const piece = 8

// unmapPassed unmaps a piece of a deferred run that has passed, and reports whether
// there was any.
func (p *Pool) unmapPassed(op string) (found bool, err error) {
	p.mu.Lock()
	for i, r := range p.deferred {
		if !r.shard.clock.Passed(r.epoch) {
			continue
		}
		if r.chunks() > piece {
			p.deferredBytes -= piece * r.reg.chunk
			r = p.frontOfLocked(r, piece)
		} else {
			p.removeDeferredLocked(i)
		}
		p.mu.Unlock()
		_, err := p.unmap(op, r)
		return true, err
	}
	p.mu.Unlock()
	return false, nil
}

// removeDeferredLocked takes a run out of the deferred ones. The caller holds mu, and unmaps it.
func (p *Pool) removeDeferredLocked(i int) {
	p.deferred[i].span.freedBy = nil
	p.deferredBytes -= p.deferred[i].span.bytes()
	last := len(p.deferred) - 1
	p.deferred[i] = p.deferred[last]
	p.deferred[last] = run{}
	p.deferred = p.deferred[:last]
}

// otherPlaces takes the old places of some runs' memory out of the deferred runs. The
// caller, which holds mu, unmaps them: the GPU has passed them, because it has passed the
// later places.
func (p *Pool) otherPlaces(of []run) (old []run) {
	if len(p.deferred) == 0 {
		return nil
	}
	have := map[*phys.Handle]bool{}
	for _, r := range of {
		for _, h := range r.handles() {
			have[h] = true
		}
	}
	for i := 0; i < len(p.deferred); {
		r := p.deferred[i]
		if !slices.ContainsFunc(r.handles(), func(h *phys.Handle) bool { return have[h] }) {
			i++
			continue
		}
		p.removeDeferredLocked(i)
		old = append(old, r)
	}
	return old
}

// unmapAll unmaps all deferred runs that have passed.
func (p *Pool) unmapAll(op string) error {
	for {
		if found, err := p.unmapPassed(op); !found || err != nil {
			return err
		}
	}
}

// unmap makes the place of a run a gap, and returns the bytes of memory that went
// with it.
func (p *Pool) unmap(op string, r run) (gone uint64, err error) {
	gone, err = r.reg.vacate(op, r.reg.index(r.span.from), r.reg.index(r.span.to))
	p.gave(gone)
	r.shard.letGo()
	if err != nil {
		return gone, p.loseSpan(op, r.reg, r.span, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r.reg.remove(r.span)
	return gone, nil
}

// vacate unmaps chunks that nothing uses, and returns the bytes of memory that
// went: that of chunks which are mapped nowhere else. It unmaps a piece at a time, so that a miss can map in between.
func (r *region) vacate(op string, from, to int) (gone uint64, err error) {
	for ; from < to; from += piece {
		n, failed := r.vacatePiece(op, from, min(from+piece, to))
		gone, err = gone+n, join(err, failed)
	}
	return gone, err
}

func (r *region) vacatePiece(op string, from, to int) (gone uint64, err error) {
	err = r.inTurn(func() error { return r.rng.UnmapRun(op, r.off(r.at(from)), uint64(to-from)*r.chunk) })
	for i := from; i < to; i++ {
		h := r.chunks[i].Load().handle
		if err == nil || r.left(i) == 0 {
			r.chunks[i].Store(nil)
			if isGone(h) {
				gone += h.Size
			}
		} else {
			r.chunks[i].Store(&chunk{handle: h})
		}
	}
	return gone, err
}

// askDeferred asks how far the streams are that deferred unmaps wait for.
func (p *Pool) askDeferred() {
	p.mu.Lock()
	ask := map[*shard]bool{}
	for _, r := range p.deferred {
		if !r.shard.clock.Passed(r.epoch) {
			ask[r.shard] = true
		}
	}
	p.mu.Unlock()
	for sh := range ask {
		sh.clock.Advance()
	}
}
