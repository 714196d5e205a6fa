package pool

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/front"
)

// behind is the pool as a cache in front of it sees it.
type behind Pool

func (b *behind) SetCache(c front.Cache) {
	b.kept, _, b.keptOf = b.Classes()
	b.cache.Store(&c)
	if b.o.Track {
		c.Hold(true) // for good: it would serve requests whose stacks nobody records
	}
}

// A cache may also keep blocks of requests up to mostKept times as large as small ones, in
// keptSteps classes to each power of two. Such a request takes more than it needs, so that it can have
// a block that another like it freed: caches of keys and values that grow by concatenation
// request a bit more with each step. It takes up to half more, in coarseSteps classes to each
// power of two, as long as live blocks exceed their requests by little in all, and else up to an eighth. Programs
// that have much memory wait for the GPU, and not for requests; theirs are not rounded up, since
// free memory would be in more pieces: 6 % more in the training of a transformer, 2 % in the trace speech.
const mostKept, keptSteps, coarseSteps = 16, 8, 2

func (b *behind) Classes() (sizes []uint64, large int, of []uint8) {
	large = b.classes.small
	sizes, of = slices.Clone(b.classes.sizes[:large]), slices.Clone(b.classes.of)
	for size := b.smallMax; size < mostKept*b.smallMax; {
		size += uint64(1) << (bits.Len64(size) - 1) / keptSteps
		sizes = append(sizes, size)
		for uint64(len(of)) <= size/quantum {
			of = append(of, uint8(len(sizes)-1))
		}
	}
	return sizes, large, of
}

// roundUp returns the class of a request, or -1, and makes a large request one for all of its class.
func (b *behind) roundUp(w *want, round int) (class int) {
	if w.kind == small {
		return w.class
	}
	if round < 0 || w.bytes > mostKept*b.smallMax {
		return -1
	}
	step := uint64(1) << (bits.Len64(w.bytes-1) - 1) / coarseSteps
	size := (w.bytes + step - 1) / step * step
	if size-w.bytes > uint64(round) {
		size = w.bytes
	}
	class = int(b.keptOf[(size+quantum-1)/quantum])
	w.size = b.kept[class]
	return class
}

func (b *behind) Alloc(bytes int, s *cuda.Stream, round int) (front.Block, int, error) {
	p := (*Pool)(b)
	var w want
	if err := p.want(&w, Request{Bytes: bytes, Stream: s}); err != nil {
		return front.Block{}, -1, err
	}
	exact := w
	class := b.roundUp(&w, round)
	got, err := p.allocWant(core.StreamOf(s), &w)
	if w.size != exact.size && (errors.Is(err, cuda.ErrOutOfMemory) || errors.Is(err, cuda.ErrBudget)) {
		got, err = p.allocWant(core.StreamOf(s), &exact)
		class = -1
	}
	if err != nil {
		return front.Block{}, -1, err
	}
	if got.h.capture != 0 || w.kind == mid && got.h.home.slab != nil {
		class = -1 // of an arena; in a slab that serves larger requests because memory is short
	}
	return front.Block{Ptr: uint64(got.ptr), Gen: got.gen, Bytes: uint64(bytes)}, class, nil
}

// More takes from slabs that have room and from free extents, and makes none.
func (b *behind) More(class int, s *cuda.Stream, blocks []front.Block) (n int) {
	sh, ok := core.StreamOf(s).Locals.Get(b.local).(*shard)
	if !ok {
		return 0
	}
	w := want{kind: small, class: class, align: quantum}
	if class >= b.classes.small {
		w = want{kind: mid, size: b.kept[class], align: quantum}
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for n < len(blocks) && !sh.closed && (w.kind == mid || sh.partial[class] != nil) {
		h := sh.takeLocked(&w)
		if h == nil {
			break
		}
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

// The phases of a program request different classes, and a cache that gave everything back
// whenever one of them lacks a slot would be empty at the next. So after mostEmptied requests
// for which it gave back what served them, the next one gets a new slab instead, until these
// are mostSpared bytes.
const mostEmptied, mostSpared = 16, 8 << 20

// beforeMiss has the cache give back what may serve a request, and for a small one stand aside
// until back is called. It reports whether it does.
func (p *Pool) beforeMiss(w *want) (back func(), emptied bool) {
	c := p.cache.Load()
	switch {
	case c == nil || (*c).Bytes() == 0:
	case w.kind != small:
		(*c).GiveLarge()
	case p.emptied.Load() >= mostEmptied && p.spared.Add(p.gran) <= mostSpared:
		p.emptied.Store(0)
	default:
		return (*c).Hold(false), true
	}
	return func() {}, false
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
