package pool

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

// Check compares the pool's lists, trees and counters with each other and with the
// driver's mappings, and returns every disagreement. It is for tests: it takes long and
// blocks all requests. With the build tag invariants every operation ends with it, and
// panics on an error.
func (p *Pool) Check() error {
	if err := p.made("pool.Check"); err != nil {
		return err
	}
	p.misses.Lock()
	defer p.misses.Unlock()
	p.pressing.Lock()
	defer p.pressing.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	c := &checker{p: p, known: map[*shard]bool{nil: true}, owned: map[*phys.Handle]bool{}, away: map[driver.Ptr]bool{}}
	if state := p.status.State(); state == suspend.Suspending || state == suspend.Resuming {
		c.moving = true
	}
	for _, sh := range p.shards {
		c.known[sh] = true
	}
	for _, r := range slices.Concat(p.regions[:]...) {
		for _, m := range r.rng.All() {
			if m.Away() {
				c.away[m.Ptr()] = true
			}
		}
		r.filled(func(at int, ch *chunk) {
			c.must(c.known[ch.shard.Load()], "the chunk at %#x belongs to a shard that the pool forgot", r.at(at))
		})
	}
	for _, r := range p.regions[mid] {
		c.spans(r)
	}
	for _, r := range p.regions[small] {
		c.vacant(r)
	}
	for _, sh := range p.shards {
		sh.mu.Lock()
		c.shard(sh)
		sh.mu.Unlock()
	}
	c.memory()
	return errors.Join(c.errs...)
}

type checker struct {
	p     *Pool
	known map[*shard]bool
	owned map[*phys.Handle]bool // memory of spans that shards own
	away  map[driver.Ptr]bool   // places whose memory is suspended
	// moving: a Suspension maps or unmaps just now.
	moving bool
	errs   []error
	found  uint64 // bytes of memory
}

func (c *checker) must(ok bool, format string, args ...any) {
	if !ok {
		c.errs = append(c.errs, fmt.Errorf("pool: "+format, args...))
	}
}

// spans are sorted, apart, and made of mapped chunks.
func (c *checker) spans(r *region) {
	at := r.base
	listed := map[*span]bool{}
	for _, l := range slices.Concat(c.p.deferred, c.p.leaving) {
		listed[l.span] = true
	}
	for _, s := range r.spans {
		c.must(s.shard != nil || listed[s] || r.rng.Left(r.off(s.from), s.bytes()) > 0, "the place %#x to %#x is no shard's, and nothing unmaps it", s.from, s.to)
		c.must(s.from >= at && s.from < s.to && s.to <= r.end(), "span %#x to %#x after %#x in region %#x", s.from, s.to, at, r.base)
		c.must(r.off(s.from)%r.chunk == 0 && s.bytes()%r.chunk == 0, "span %#x to %#x is not of whole chunks", s.from, s.to)
		for i := r.index(at); i < r.index(s.from); i++ {
			c.must(r.chunks[i].Load() == nil, "a chunk at %#x in no span", r.at(i))
		}
		for i := r.index(s.from); s.shard != nil && i < r.index(s.to); i++ {
			ch := r.chunks[i].Load()
			c.must(ch != nil, "no chunk at %#x", r.at(i))
			if ch != nil {
				c.must(ch.shard.Load() == s.shard, "the chunk at %#x is another shard's", r.at(i))
				c.must(!c.owned[ch.handle], "the memory at %#x is a shard's at another address, too", r.at(i))
				c.owned[ch.handle] = true
				c.mapped(r.at(i))
			}
		}
		at = s.to
	}
}

// vacant places are sorted and apart, and what is not vacant is a chunk's.
func (c *checker) vacant(r *region) {
	at := 0
	filled := func(to int) {
		for at < to {
			ch := r.chunks[at].Load()
			if ch == nil {
				c.must(false, "nothing at %#x, which is not vacant", r.at(at))
				return
			}
			at++
		}
		c.must(at == to, "a chunk that ends at %#x, where all is vacant from %#x on", r.at(at), r.at(to))
	}
	for i, v := range r.vacant {
		c.must(v.from < v.to && v.to <= len(r.chunks) && (i == 0 || r.vacant[i-1].to < v.from), "vacant from %d to %d in region %#x", v.from, v.to, r.base)
		filled(v.from)
		for at = v.from; at < v.to; at++ {
			c.must(r.chunks[at].Load() == nil, "a chunk at %#x, which is vacant", r.at(at))
		}
	}
	filled(len(r.chunks))
}

// mapped asks the driver.
func (c *checker) mapped(at driver.Ptr) {
	if c.p.lost() != driver.Success || c.moving || c.away[at] {
		return
	}
	flags, r := c.p.sys.Drv.MemGetAccess(driver.Location{Type: driver.LocationDevice, ID: int32(c.p.dev.Ordinal())}, at)
	c.must(r == driver.Success && flags == driver.AccessReadWrite, "the driver says %v, access %d, of %#x", r, flags, at)
}

// shard checks what one shard has; its lock is held.
func (c *checker) shard(sh *shard) {
	s := &shardCheck{checker: c, sh: sh, tree: map[*extent]bool{}}
	s.walk(&sh.free)
	for _, r := range c.p.regions[mid] {
		for _, sp := range r.spans {
			if sp.shard == sh {
				s.span(r, sp)
			}
		}
	}
	for e := range s.tree {
		c.must(false, "an extent at %#x is in the tree and in no span", e.ptr)
	}
	s.nodes()
	s.slabs()
	c.must(s.live == sh.live && s.requested == sh.requested,
		"a shard counts %d blocks of %d bytes and has %d of %d", sh.live, sh.requested, s.live, s.requested)
	c.must(s.spanned == sh.spanned, "a shard counts %d bytes of spans and has %d", sh.spanned, s.spanned)
	c.must(s.waiting == sh.waiting.n, "%d blocks wait, %d are listed", s.waiting, sh.waiting.n)
	listed, bytes := 0, uint64(0)
	sh.waiting.each(func(w waiting) {
		listed++
		bytes += w.h.size()
		c.must(w.h.waiting && !w.h.live(), "a block that is listed as waiting is not")
	})
	c.must(listed == sh.waiting.n, "a shard counts %d waiting blocks and lists %d", sh.waiting.n, listed)
	c.must(bytes == sh.waiting.bytes, "a shard counts %d bytes of waiting blocks and has %d", sh.waiting.bytes, bytes)
	c.must(sh.offers || sh.arena != nil || !sh.hasLocked(), "a shard has what others could use, and does not say so")
	c.must(sh.offers == slices.Contains(c.p.offers, sh), "a shard offers: %t, and is listed otherwise", sh.offers)
	if err := sh.clock.Check(); err != nil {
		c.must(false, "%v", err)
	}
	if sh.watch != nil && sh.watch.sites != nil {
		c.must(len(sh.watch.sites) == int(sh.live), "%d stacks of %d blocks", len(sh.watch.sites), sh.live)
	}
}

type shardCheck struct {
	*checker
	sh                       *shard
	tree                     map[*extent]bool
	live, requested, spanned uint64
	waiting                  int
}

// walk collects a tree, which must be sorted.
func (s *shardCheck) walk(t *tree) {
	var last *extent
	var visit func(e *extent)
	visit = func(e *extent) {
		if e == nil {
			return
		}
		visit(e.left)
		s.must(last == nil || less(last, e), "the tree is not sorted at %#x", e.ptr)
		s.must(e.state == free, "a %v extent at %#x is in a tree", e.state, e.ptr)
		s.must((e.left == nil || e.left.prio <= e.prio) && (e.right == nil || e.right.prio <= e.prio), "the tree's heap is broken at %#x", e.ptr)
		last = e
		s.tree[e] = true
		visit(e.right)
	}
	visit(t.root)
	s.must(len(s.tree) == t.n, "a tree counts %d and has %d", t.n, len(s.tree))
}

// span is filled with extents without a gap; no two free ones touch.
func (s *shardCheck) span(r *region, sp *span) {
	at := sp.from
	s.must(sp.head.state == wall && sp.tail.state == wall, "a span without walls")
	for e := sp.head.next; e != sp.tail; e = e.next {
		s.must(e != nil && e.prev.next == e && e.next.prev == e, "broken links at %#x", at)
		s.must(e.ptr == at && e.size > 0 && e.reg == r && e.home.shard == s.sh, "an extent at %#x of %d bytes, expected at %#x", e.ptr, e.size, at)
		at = e.end()
		switch e.state {
		case free:
			s.must(e.prev.state != free, "two free extents touch at %#x", e.ptr)
			s.must(s.tree[e] == (e.size >= s.p.smallMax), "the tree has the free extent at %#x: %t", e.ptr, s.tree[e])
			delete(s.tree, e)
		case resting:
			s.must(s.sh.hot == e, "an extent at %#x rests and is not the last", e.ptr)
		case taken:
			s.must(e.live() || e.waiting, "an extent at %#x is taken and not live", e.ptr)
			c := r.chunks[r.index(e.ptr)].Load()
			s.must(!e.live() || c != nil && c.starts[r.page(e.ptr)] == e, "the block at %#x cannot be found by its address", e.ptr)
		case held:
		default:
			s.must(false, "a %v extent at %#x in a span", e.state, e.ptr)
		}
		s.block(&e.header)
	}
	s.must(at == sp.to, "a span ends at %#x, its extents at %#x", sp.to, at)
	s.spanned += sp.bytes()
}

func (s *shardCheck) block(h *header) {
	if h.live() {
		s.live++
		s.requested += h.asked()
		s.must(h.asked() <= h.size(), "the block at %#x of %d bytes has a requested size of %d", h.at(), h.size(), h.asked())
	}
	if h.waiting {
		s.waiting++
	}
}

// nodes are what graphs allocate.
func (s *shardCheck) nodes() {
	for _, e := range s.p.nodes {
		if e.home.shard == s.sh {
			s.block(&e.header)
		}
	}
}

// slabs of the shard: counts and lists agree.
func (s *shardCheck) slabs() {
	listed := map[*slab]bool{}
	for class, first := range s.sh.partial {
		for sl := first; sl != nil; sl = sl.next {
			s.must(sl.class == class && sl.listed && !sl.full() && (sl.next == nil || sl.next.prev == sl), "a slab of class %d in the list of %d", sl.class, class)
			listed[sl] = true
		}
	}
	empty := map[slabChunk]bool{}
	for _, c := range s.sh.empty {
		c.epoch = 0
		s.must(!empty[c], "an empty slab chunk is listed twice")
		empty[c] = true
	}
	n := 0
	for _, r := range s.p.regions[small] {
		r.filled(func(i int, c *chunk) {
			if c.shard.Load() != s.sh {
				return
			}
			s.mapped(r.at(i))
			sl := c.slab.Load()
			s.must(empty[slabChunk{reg: r, index: i}] == (sl == nil), "the slab chunk at %#x is empty and in use, or neither", r.at(i))
			if sl != nil {
				n++
				s.slab(sl, listed[sl])
			}
		})
	}
	for _, sl := range s.sh.former {
		s.must(!listed[sl] && !sl.listed && sl.used == 0, "a slab of class %d that lost its chunk is in use", sl.class)
	}
	s.must(n == s.sh.slabs, "a shard counts %d slabs and has %d", s.sh.slabs, n)
}

func (s *shardCheck) slab(sl *slab, listed bool) {
	s.must(listed == !sl.full() && listed == sl.listed, "a slab with room is listed: %t", listed)
	isFree := map[*header]bool{}
	for n := sl.free; n != 0; n = sl.slots[n-1].link {
		isFree[&sl.slots[n-1]] = true
	}
	used := 0
	for i := range sl.slots[:sl.fresh] {
		h := &sl.slots[i]
		if !isFree[h] {
			used++
		}
		s.must(isFree[h] == (!h.live() && !h.waiting), "the slot at %#x is free and in use, or neither", h.at())
		s.block(h)
	}
	s.must(used == sl.used, "a slab counts %d blocks and has %d", sl.used, used)
}

// memory adds up, also that which is mapped at two addresses.
func (c *checker) memory() {
	p := c.p
	have := map[*phys.Handle]bool{}
	for _, r := range slices.Concat(p.regions[:]...) {
		r.filled(func(_ int, ch *chunk) { have[ch.handle] = true })
	}
	for _, h := range p.idle {
		have[h] = true
	}
	for h := range have {
		c.found += h.Size
	}
	c.must(c.found == p.reserved.Load(), "the pool counts %d bytes of memory and has %d", p.reserved.Load(), c.found)
}
