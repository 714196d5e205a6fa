package pool

import (
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// place is a range of addresses that the pool's blocks lie in: a region. The list of
// them is replaced, never changed, so that it is read without a lock.
type place struct {
	from, to driver.Ptr
	reg      *region
}

func (p *Pool) addPlace(n place) {
	all := slices.Clone(*p.places.Load())
	at, _ := slices.BinarySearchFunc(all, n.from, func(pl place, from driver.Ptr) int {
		if pl.from < from {
			return -1
		}
		return 1
	})
	all = slices.Insert(all, at, n)
	p.places.Store(&all)
}

func (p *Pool) removePlace(from driver.Ptr) {
	all := slices.DeleteFunc(slices.Clone(*p.places.Load()), func(pl place) bool { return pl.from == from })
	p.places.Store(&all)
}

// find is the live block that begins at an address of the place.
func (pl place) find(at driver.Ptr) (Block, bool) {
	for {
		_, sh := pl.header(at)
		if sh == nil {
			return Block{}, false
		}
		sh.mu.Lock()
		h, now := pl.header(at) // which may be another's meanwhile
		if now != sh {
			sh.mu.Unlock()
			continue
		}
		if h == nil {
			h = pl.start(at)
		}
		found := h != nil && h.live() && h.at() == at
		var b Block
		if found {
			b = h.block()
		}
		sh.mu.Unlock()
		return b, found
	}
}

// header is what can be told without a lock: whose the address is, and, of slabs,
// its header.
func (pl place) header(at driver.Ptr) (*header, *shard) {
	c := pl.reg.chunks[pl.reg.index(at)].Load()
	if c == nil {
		return nil, nil
	}
	if s := c.slab.Load(); s != nil {
		i := uint64(at-s.base) / s.slot
		if i >= uint64(len(s.slots)) {
			return nil, nil
		}
		return &s.slots[i], s.shard
	}
	return nil, c.shard.Load()
}

// start is the block that begins in the page of an address. The caller holds
// the shard's lock.
func (pl place) start(at driver.Ptr) *header {
	c := pl.reg.chunks[pl.reg.index(at)].Load()
	if c == nil || c.starts == nil {
		return nil
	}
	if e := c.starts[pl.reg.page(at)]; e != nil {
		return &e.header
	}
	return nil
}

// each calls f for every live block in the place.
func (pl place) each(p *Pool, f func(h *header)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pl.reg.kind != mid {
		pl.reg.filled(func(_ int, c *chunk) { c.each(f) })
		return
	}
	for _, s := range pl.reg.spans {
		if s.shard == nil {
			continue
		}
		s.shard.mu.Lock()
		for e := s.head.next; e != s.tail; e = e.next {
			if e.live() {
				f(&e.header)
			}
		}
		s.shard.mu.Unlock()
	}
}

// each calls f for every live block in a slab. The caller
// holds the pool's lock.
func (c *chunk) each(f func(h *header)) {
	sh := c.shard.Load()
	if sh == nil {
		return
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if s := c.slab.Load(); s != nil {
		for j := range s.slots[:s.fresh] {
			if h := &s.slots[j]; h.live() {
				f(h)
			}
		}
	}
	for _, e := range c.starts {
		if e.live() {
			f(&e.header)
		}
	}
}
