package pool

import (
	"fmt"
	"math/bits"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// create makes a chunk, within the limit. The error of one that cannot be had
// is a *shortage.
func (p *Pool) create(size uint64) (*phys.Handle, error) {
	for {
		n := p.reserved.Load()
		if l := p.limit.Load(); l > 0 && (n > l || size > l-n) {
			return nil, &shortage{kind: core.Budget, size: size}
		}
		if p.reserved.CompareAndSwap(n, n+size) {
			break
		}
	}
	h, r := phys.TryCreate(p.sys, size, p.prop)
	if r == driver.Success {
		raise(&p.mostHeld, p.reserved.Load())
		h.Recycle() // its blocks change owners: nobody exports it as it is
		return h, nil
	}
	p.reserved.Add(-size)
	if r == driver.OutOfMemory {
		return nil, &shortage{kind: core.OutOfMemory, size: size, call: driver.CallMemCreate, result: r}
	}
	return nil, p.sys.Fail(allocOp, driver.CallMemCreate, r, fmt.Sprintf("a chunk of %s on %v", core.Bytes(size), p.dev), p.on...)
}

// release gives up a chunk that is mapped nowhere. Where that fails it is idle,
// and the next trim tries again.
func (p *Pool) release(op string, h *phys.Handle) error {
	if r := h.Release(); r != driver.Success {
		p.setAside(h)
		return h.ReleaseError(op, r)
	}
	p.reserved.Add(-h.Size)
	return nil
}

// provide makes memory for a request that nothing free serves. Afterwards take
// finds it, unless another goroutine was quicker.
func (p *Pool) provide(sh *shard, w *want, frugal bool) error {
	switch w.kind {
	case small:
		return p.provideSlab(sh)
	case mid:
		return p.provideMid(sh, w, frugal)
	}
	return p.provideExact(sh, w)
}

// spread is how many times the device's memory a region is long: streams grow
// at their own places in it, far from each other.
const spread = 8

func (p *Pool) provideSlab(sh *shard) error {
	reg, at, err := p.makeChunk(small, p.gran)
	if err != nil {
		return err
	}
	reg.chunks[at].Load().shard.Store(sh)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.made.Add(p.gran)
	sh.empty = append(sh.empty, slabChunk{reg: reg, index: at})
	return nil
}

// provideMid fills a gap of a region: with new chunks as long as the pool has
// not much more than was ever requested, with free ones that move there beyond
// that. The frugal way prefers those that move.
func (p *Pool) provideMid(sh *shard, w *want, frugal bool) error {
	allowed := p.allowance(w)
	if frugal {
		allowed = 0
	}
	if lacks := p.lacking(w); lacks > allowed {
		p.catchUp(sh, lacks-allowed)
	}
	p.mu.Lock()
	sh.mu.Lock()
	sh.rest()
	t := p.target(sh, w)
	if t.reg == nil {
		sh.mu.Unlock()
		p.mu.Unlock()
		return p.addRegion(w)
	}
	for _, e := range []*extent{t.left, t.right} {
		if e != nil {
			sh.unfree(e)
			e.state = held
		}
	}
	sh.mu.Unlock()
	s := &span{from: t.from, to: t.from + driver.Ptr(uint64(t.n)*t.reg.chunk)}
	t.reg.add(s)
	fresh := min(t.n, int(allowed/t.reg.chunk))
	idle := p.takeIdle(t.n, t.reg.chunk)
	fresh = min(fresh, t.n-len(idle))
	runs, moved := p.gather(sh, t.n-len(idle)-fresh)
	p.mu.Unlock()
	fresh = t.n - len(idle) - moved
	p.moved += uint64(moved) * t.reg.chunk

	var err error
	if more := uint64(fresh) * t.reg.chunk; more > allowed {
		_, err = p.trimExact(allocOp, more-allowed)
	}
	chunks, err := p.fetch(err, fresh, t.reg.chunk, idle, runs)
	lost := false
	if err == nil {
		lost, err = p.mapAt(t.reg, t.reg.index(s.from), chunks)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if err == nil {
		sh.made.Add(uint64(fresh) * t.reg.chunk)
		for i, h := range chunks {
			t.reg.chunks[t.reg.index(s.from)+i].Store(&chunk{handle: h})
		}
		t.reg.own(sh, s, 0)
	} else if !lost {
		t.reg.remove(s)
	}
	for _, e := range []*extent{t.left, t.right} {
		if e != nil {
			sh.insert(e)
		}
	}
	return err
}

// fetch makes n chunks, takes what moves from where it is, and answers all. An
// error, also an earlier one, leaves everything as it was, as far as the driver
// lets it.
func (p *Pool) fetch(err error, n int, size uint64, idle []*phys.Handle, runs []run) ([]*phys.Handle, error) {
	chunks := idle
	for i := 0; i < n && err == nil; i++ {
		var h *phys.Handle
		if h, err = p.create(size); err != nil {
			break
		}
		chunks = append(chunks, h)
	}
	for i := range runs {
		if err != nil {
			p.putBack(runs[i])
			continue
		}
		var from []*phys.Handle
		if from, err = p.lift(runs[i]); err == nil {
			chunks = append(chunks, from...)
		}
	}
	if err != nil {
		p.setAside(chunks...)
		return nil, err
	}
	return chunks, nil
}

// mapAt maps chunks into a region, from an index on. Where that fails they are
// idle, except where it could not be undone: then the place is lost, and what is
// mapped there goes with the region.
func (p *Pool) mapAt(reg *region, at int, chunks []*phys.Handle) (lost bool, err error) {
	err = reg.rng.MapRun(allocOp, reg.off(reg.at(at)), chunks, p.access)
	for i := 0; err != nil && i < len(chunks); i++ {
		if reg.left(at+i) == 0 {
			p.setAside(chunks[i])
			continue
		}
		lost = true
		reg.chunks[at+i].Store(&chunk{handle: chunks[i]})
		chunks[i].Release() // what was left has a count of its own
	}
	return lost, err
}

// setAside keeps chunks that are mapped nowhere.
func (p *Pool) setAside(chunks ...*phys.Handle) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, chunks...)
}

// addRegion reserves another region, wide enough for the request.
func (p *Pool) addRegion(w *want) error {
	total := spread * ((p.dev.TotalMemory() + p.chunk - 1) / p.chunk * p.chunk)
	least := (w.size + w.align + 2*p.chunk - 1) / p.chunk * p.chunk
	if _, err := p.reserve(mid, total, least, p.chunk, uint64(1)<<(bits.Len64(p.smallMax)-1)); err != nil {
		return err
	}
	return errAgain
}

// takeIdle takes chunks that are mapped nowhere. The caller holds mu.
func (p *Pool) takeIdle(n int, size uint64) (chunks []*phys.Handle) {
	kept := p.idle[:0]
	for _, h := range p.idle {
		if len(chunks) < n && h.Size == size {
			chunks = append(chunks, h)
		} else {
			kept = append(kept, h)
		}
	}
	p.idle = kept
	return chunks
}
