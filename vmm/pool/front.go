package pool

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/front"
)

// behind is the pool as a cache in front of it sees it.
type behind Pool

func (b *behind) SetCache(c front.Cache) {
	b.cache.Store(&c)
	if b.o.Track {
		c.Hold(true) // for good: it would serve requests whose stacks nobody records
	}
}

func (b *behind) Classes() (sizes []uint64, of []uint8) {
	return b.classes.sizes[:b.classes.small], b.classes.of
}

func (b *behind) Alloc(bytes int, s *cuda.Stream) (front.Block, int, error) {
	got, err := (*Pool)(b).Alloc(Request{Bytes: bytes, Stream: s})
	if err != nil {
		return front.Block{}, -1, err
	}
	class := -1
	if slab := got.h.home.slab; slab != nil && slab.class < b.classes.small && got.h.capture == 0 {
		class = slab.class
	}
	return front.Block{Ptr: uint64(got.ptr), Gen: got.gen, Bytes: uint64(bytes)}, class, nil
}

// More takes from slabs that have room, and makes none.
func (b *behind) More(class int, s *cuda.Stream, blocks []front.Block) (n int) {
	sh, ok := core.StreamOf(s).Locals.Get(b.local).(*shard)
	if !ok {
		return 0
	}
	w := want{kind: small, class: class, align: quantum}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for n < len(blocks) && !sh.closed && sh.partial[class] != nil {
		h := sh.takeLocked(&w)
		blocks[n] = front.Block{Ptr: uint64(h.at()), Gen: h.gen}
		n++
	}
	return n
}

// Free verifies nothing: Hold calls it, under locks that a Check takes.
func (b *behind) Free(blocks []front.Block) {
	p := (*Pool)(b)
	late := p.sys.Unsettled()
	for _, f := range blocks {
		at, live := p.Find(cuda.Ptr(f.Ptr))
		if !live || at.gen != f.Gen {
			panic(fmt.Sprintf("pool: a cache frees a block at %#x that is not live", f.Ptr))
		}
		free := p.freeAtOnce
		if len(late) > 0 {
			free = func(b Block) error { return p.freeAfter(b, nil, late) }
		}
		if err := free(at); err != nil {
			panic(err)
		}
	}
}

func (b *behind) Resize(blocks []front.Block) {
	for _, f := range blocks {
		if at, live := (*Pool)(b).Find(cuda.Ptr(f.Ptr)); live && at.gen == f.Gen {
			at.h.resize(f)
		}
	}
}

func (h *header) resize(f front.Block) {
	sh := h.home.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if h.gen == f.Gen {
		sh.requested += f.Bytes - h.asked()
		sh.peak = max(sh.peak, sh.requested)
		h.ask(f.Bytes)
	}
}

func (b *behind) NotLive(ptr uint64) error { return notLive(driver.Ptr(ptr)) }

func notLive(ptr driver.Ptr) error {
	return errs.Invalid("pool.FreePtr", fmt.Sprintf("no live block begins at %v", cuda.Ptr(ptr)), "pass the address that Alloc gave, once")
}

// aside has the cache in front of the pool, if there is one, free what it has and pass all
// calls on until back is called. The caller holds none of misses, mu and a shard's lock.
func (p *Pool) aside(exact bool) (back func()) {
	if c := p.cache.Load(); c != nil {
		return (*c).Hold(exact)
	}
	return func() {}
}

// counted makes the counts those of the cache's callers.
func (s *Stats) counted(c front.Counts) {
	s.Counted = true
	s.Requested, s.PeakRequested, s.Blocks, s.PeakBlocks = c.Requested, c.PeakRequested, c.Blocks, c.PeakBlocks
	s.Allocs, s.Frees, s.AllocatedBytes = c.Allocs, c.Frees, c.AllocatedBytes
}
