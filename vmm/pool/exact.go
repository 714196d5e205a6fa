package pool

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/ranges"
	"github.com/cuvmm/cuvmm/vmm"
)

// exact is a chunk of its own for one large request at a time, in a range of
// its own. It is never split and never moves, and is kept for the next request
// of about its size.
//
//	none ──create──► taken ⇄ free ──trim──► none
type exact struct {
	res *vmm.Reservation
	// handle of its memory; nil: only the range is left to be closed.
	handle *phys.Handle
	// left: the memory could not be unmapped. It goes when the range is closed.
	left bool
}

// provideExact makes an exact chunk. Where the pool has much more than was ever
// requested, free ones make room for it first.
func (p *Pool) provideExact(sh *shard, w *want) error {
	if allowed := p.allowance(w); w.size > allowed {
		p.catchUp(sh, w.size-allowed)
		if _, err := trimBy(w.size-allowed, p.trimIdle, p.trimExact, p.trimRegions); err != nil {
			return err
		}
	}
	res, err := vmm.Reserve(p.dev, int(w.size), vmm.ReserveOptions{})
	if err != nil {
		return addressShortage(err, w.size)
	}
	x := &exact{res: res}
	h, err := p.create(w.size)
	if err == nil {
		err = ranges.Of(res).MapRun(allocOp, 0, []*phys.Handle{h}, p.access)
		switch {
		case err == nil:
			x.handle = h
		case ranges.Of(res).Left(0, w.size) > 0:
			x.handle, x.left = h, true
			h.Release() // what was left has a count of its own
		default:
			err = join(err, p.release(h))
		}
	}
	if err != nil {
		_, undo := p.closeExact(x)
		return join(err, undo)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.made.Add(w.size)
	p.ownExact(sh, x, 0)
	return nil
}

// ownExact makes an exact chunk a shard's. The caller holds mu and the shard's
// lock.
func (p *Pool) ownExact(sh *shard, x *exact, epoch uint64) {
	e := sh.newExtent(nil, driver.Ptr(x.res.Ptr()), x.handle.Size)
	e.exact, e.epoch, e.state = x, epoch, free
	sh.exacts.insert(e)
	sh.spanned += e.size
	p.addPlace(place{from: e.ptr, to: e.end(), ext: e})
}

// disownExact takes a free exact chunk from its shard. The caller holds mu and
// the shard's lock.
func (p *Pool) disownExact(e *extent) *exact {
	sh, x := e.home.shard, e.exact
	sh.exacts.remove(e)
	sh.spanned -= e.size
	p.removePlace(e.ptr)
	sh.drop(e)
	return x
}

// trimExact gives back free exact chunks that have passed, the smallest that
// is enough or the largest there is, until need bytes went.
func (p *Pool) trimExact(need uint64) (freed uint64, err error) {
	for freed < need {
		x := p.pickExact(need - freed)
		if x == nil {
			return freed, nil
		}
		n, err := p.closeExact(x)
		if freed += n; err != nil {
			return freed, err
		}
	}
	return freed, nil
}

func (p *Pool) pickExact(need uint64) *exact {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best *extent
	for _, sh := range p.shards {
		sh.mu.Lock()
		if sh.arena == nil {
			for e := sh.exacts.atLeast(0); e != nil; e = sh.exacts.after(e) {
				if e.epoch > sh.passed.Load() {
					continue
				}
				if best == nil || best.size < need && e.size > best.size || e.size >= need && e.size < best.size {
					best = e
				}
			}
		}
		sh.mu.Unlock()
	}
	if best == nil {
		return nil
	}
	// Another goroutine may have taken it since.
	best.home.shard.mu.Lock()
	defer best.home.shard.mu.Unlock()
	if best.state != free || best.exact == nil || best.epoch > best.home.shard.passed.Load() {
		return nil
	}
	return p.disownExact(best)
}

// closeExact gives an exact chunk back to the driver, as far as it is there.
// What cannot be given back is kept for Close.
func (p *Pool) closeExact(x *exact) (freed uint64, err error) {
	gone := func() {
		if x.handle != nil {
			freed = x.handle.Size
			p.reserved.Add(-freed)
			x.handle = nil
		}
	}
	if x.handle != nil && !x.left {
		if err = ranges.Of(x.res).UnmapRun(allocOp, 0, x.handle.Size); err == nil {
			gone()
		}
		x.left = err != nil
	}
	if err == nil {
		if err = x.res.Close(); err == nil {
			gone()
			return freed, nil
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lostExacts = append(p.lostExacts, x)
	return freed, err
}
