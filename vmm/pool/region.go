package pool

import (
	"errors"
	"slices"
	"sort"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
	"github.com/cuvmm/cuvmm/vmm"
)

// region is a long range of address space that is divided into places for chunks, most
// of them empty. The pool's lock guards its spans, what is vacant, and which chunks there
// are.
type region struct {
	res    *vmm.Reservation
	rng    *vrange.Range
	turn   chan struct{} // has an element while a driver call works on the range
	base   driver.Ptr
	size   uint64
	chunk  uint64 // bytes of a place
	pages  uint64 // bytes of a page: no two blocks begin in the same
	chunks []atomic.Pointer[chunk]
	// kind is what it serves.
	kind kind
	// spans of a mid region are what is mapped, or being mapped or unmapped,
	// sorted by address.
	spans []*span
	// vacant is what is neither, in a region of another kind.
	vacant vacant
}

// chunk is mapped memory at its place.
type chunk struct {
	handle *phys.Handle
	// shard owns all blocks in it. It changes while there are none. A chunk that
	// is on its way has none, nor has one that is lost: unmapping it failed, and
	// it is unknown what is mapped there.
	shard atomic.Pointer[shard]
	slab  atomic.Pointer[slab] // in a slab region
	// starts are the blocks by the page that they begin in, guarded by the
	// shard's lock. What is not live any more may still be named.
	starts []*extent
}

func (r *region) at(index int) driver.Ptr      { return r.base + driver.Ptr(uint64(index)*r.chunk) }
func (r *region) index(p driver.Ptr) int       { return int(uint64(p-r.base) / r.chunk) }
func (r *region) page(p driver.Ptr) int        { return int(uint64(p-r.base) % r.chunk / r.pages) }
func (r *region) end() driver.Ptr              { return r.base + driver.Ptr(r.size) }
func (r *region) off(p driver.Ptr) uint64      { return uint64(p - r.base) }
func (r *region) up(p driver.Ptr) driver.Ptr   { return r.at(int((r.off(p) + r.chunk - 1) / r.chunk)) }
func (r *region) down(p driver.Ptr) driver.Ptr { return r.at(r.index(p)) }

// filled calls f for every chunk, by address. The caller holds the pool's lock.
func (r *region) filled(f func(at int, c *chunk)) {
	holes := r.vacant
	for i := 0; i < len(r.chunks); {
		if len(holes) > 0 && holes[0].from == i {
			i, holes = holes[0].to, holes[1:]
			continue
		}
		c := r.chunks[i].Load()
		if c == nil { // on its way, or nothing in a mid region
			i++
			continue
		}
		f(i, c)
		i++
	}
}

// empty reports whether nothing is mapped there, nor being mapped.
func (r *region) empty() bool {
	if r.kind == mid {
		return len(r.spans) == 0
	}
	return len(r.vacant) == 1 && r.vacant[0] == vacancy{0, len(r.chunks)}
}

// inTurn calls a function that maps or unmaps a piece. Callers take turns in the order in
// which they came. With a mutex alone, which lets its last holder have it again, a large
// request would map piece after piece until another has waited for a millisecond.
func (r *region) inTurn(work func() error) error {
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	return work()
}

// left is how much memory, in bytes, failures left at the place of a chunk.
func (r *region) left(index int) uint64 { return r.rng.Left(r.off(r.at(index)), r.chunk) }

// span is a run of chunks that one shard owns, or that is on its way: then it
// has no shard, and only keeps its place. Its extents lie between two walls.
type span struct {
	from, to   driver.Ptr
	shard      *shard
	head, tail *extent
	// At an old place, freedBy is the shard that freed the chunks before they moved, and
	// epoch is when.
	freedBy *shard
	epoch   uint64
}

func (s *span) bytes() uint64 { return uint64(s.to - s.from) }

// find is the index of the first span that ends behind p.
func (r *region) find(p driver.Ptr) int {
	return sort.Search(len(r.spans), func(i int) bool { return r.spans[i].to > p })
}

func (r *region) add(s *span) {
	r.spans = slices.Insert(r.spans, r.find(s.from), s)
}

func (r *region) remove(s *span) {
	at := r.find(s.from)
	r.spans = slices.Delete(r.spans, at, at+1)
}

// front splits a span that no shard owns, and returns its first n chunks.
func (r *region) front(s *span, n int) *span {
	first := &span{from: s.from, to: s.from + driver.Ptr(uint64(n)*r.chunk)}
	at := r.find(s.from)
	s.from = first.to
	r.spans = slices.Insert(r.spans, at, first)
	return first
}

func newChunks(n int) []atomic.Pointer[chunk] { return make([]atomic.Pointer[chunk], n) }

func newWall() *extent { return &extent{state: wall} }

// own makes a run of mapped chunks a shard's, as one free extent, and joins it
// with the spans beside that are the shard's too. The caller holds the pool's
// and the shard's lock. The span is in the region already.
func (r *region) own(sh *shard, s *span, epoch uint64) {
	s.shard, s.head, s.tail = sh, newWall(), newWall()
	e := sh.newExtent(r, s.from, s.bytes())
	e.epoch = epoch
	link(s.head, e)
	link(e, s.tail)
	for i := r.index(s.from); i < r.index(s.to); i++ {
		c := r.chunks[i].Load()
		if clear(c.starts); c.starts == nil {
			c.starts = make([]*extent, r.chunk/r.pages)
		}
		c.shard.Store(sh)
	}
	at := r.find(s.from)
	if at+1 < len(r.spans) {
		r.join(s, r.spans[at+1])
	}
	if at > 0 {
		r.join(r.spans[at-1], s)
	}
	sh.spanned += e.size
	sh.insert(e)
}

// join makes one span of two that touch and are of one shard.
func (r *region) join(a, b *span) {
	if a.to != b.from || a.shard == nil || a.shard != b.shard {
		return
	}
	r.remove(b)
	link(a.tail.prev, b.head.next)
	a.to, a.tail = b.to, b.tail
}

// cut takes whole chunks out of a free extent, and returns the span that keeps
// their place and has no owner. The caller holds the pool's and the
// shard's lock.
func (r *region) cut(sh *shard, e *extent, from, to driver.Ptr) *span {
	at := r.find(from)
	s := r.spans[at]
	sh.unfree(e)
	if n := uint64(from - e.ptr); n > 0 {
		front := sh.split(e, n)
		sh.remain(front)
	}
	before, after := e.prev, e.next
	if n := uint64(e.end() - to); n > 0 {
		back := sh.newExtent(r, to, n)
		back.epoch = e.epoch
		link(back, after)
		sh.remain(back)
		after = back
	}
	sh.drop(e)
	sh.spanned -= uint64(to - from)
	for i := r.index(from); i < r.index(to); i++ {
		r.chunks[i].Load().shard.Store(nil) // a search for a block there must not read what own clears
	}
	gone := &span{from: from, to: to}
	tail := s.tail
	var around []*span
	if s.from < from {
		left := s
		left.tail = newWall()
		link(before, left.tail)
		around = append(around, left)
	}
	around = append(around, gone)
	if to < s.to {
		right := &span{from: to, to: s.to, shard: sh, head: newWall(), tail: tail}
		link(right.head, after)
		around = append(around, right)
	}
	s.to = from
	r.spans = slices.Replace(r.spans, at, at+1, around...)
	return gone
}

// remain makes what is left of a free extent a free one again.
func (sh *shard) remain(e *extent) {
	e.state = free
	if e.size >= sh.pool.smallMax {
		sh.free.insert(e)
		if e.size >= sh.pool.chunk {
			sh.offerLocked()
		}
	}
}

// reserve makes a region of the size, or a shorter one if address space is short. The
// caller holds addresses.
func (p *Pool) reserve(k kind, size, least, chunk, pages uint64) (*region, error) {
	for {
		size = max(size, least)
		res, err := vmm.Reserve(p.dev, int(size), vmm.ReserveOptions{Align: int(max(maxAlign, p.gran))})
		if err == nil {
			r := &region{res: res, rng: vrange.Of(res), base: driver.Ptr(res.Ptr()), size: size, chunk: chunk, pages: pages, kind: k,
				turn: make(chan struct{}, 1)}
			r.chunks = newChunks(int(size / chunk))
			if k != mid {
				r.vacant = vacant{{0, len(r.chunks)}}
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.regions[k] = append(p.regions[k], r)
			p.addPlace(place{from: r.base, to: r.end(), reg: r})
			return r, nil
		}
		if !errors.Is(err, cuda.ErrOutOfAddressSpace) || size == least && !p.closeEmpty() {
			return nil, addressShortage(err, size)
		}
		size = (size/4 + chunk - 1) / chunk * chunk
	}
}

// closeEmpty gives back the ranges of empty regions, and reports whether there were any.
// The caller holds addresses.
func (p *Pool) closeEmpty() (closed bool) {
	p.mu.Lock()
	empty := slices.DeleteFunc(slices.Concat(p.regions[:]...), func(r *region) bool { return !r.empty() })
	for _, r := range empty {
		p.forgetLocked(r)
	}
	p.mu.Unlock()
	for _, r := range empty {
		err := r.res.Close()
		if closed = closed || err == nil; err != nil {
			p.sys.Left("address range", 0, core.NoDevice, err, r.res.Close)
		}
	}
	return closed
}

// forgetLocked takes a region out of the pool. The caller holds mu.
func (p *Pool) forgetLocked(r *region) {
	p.regions[r.kind] = slices.DeleteFunc(p.regions[r.kind], func(o *region) bool { return o == r })
	p.removePlace(r.base)
}

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
		c := pl.reg.chunks[pl.reg.index(at)].Load()
		if c == nil {
			return Block{}, false
		}
		sh := c.shard.Load()
		if sh == nil {
			return Block{}, false
		}
		sh.mu.Lock()
		s := c.slab.Load()
		if c.shard.Load() != sh { // it is another's meanwhile, and so may be the slab
			sh.mu.Unlock()
			continue
		}
		h := pl.reg.header(c, s, at)
		found := h != nil && h.live() && h.at() == at
		var b Block
		if found {
			b = h.block()
		}
		sh.mu.Unlock()
		return b, found
	}
}

// header returns the slot at an address of a chunk, or the block that begins in the page
// of the address, or nil. The caller holds the shard's lock.
func (r *region) header(c *chunk, s *slab, at driver.Ptr) *header {
	if s != nil {
		if i := uint64(at-s.base) / s.slot; i < uint64(len(s.slots)) {
			return &s.slots[i]
		}
		return nil
	}
	if c.starts != nil {
		if e := c.starts[r.page(at)]; e != nil {
			return &e.header
		}
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
