package pool

import (
	"math/bits"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// slab is one chunk that is divided into equal slots of a size class. It
// belongs to one shard, and is guarded by its lock. When all of its slots are
// free it is given up, and its chunk serves the next slab, of any class, of the
// shard; another shard may have it when the stream has passed. The slab itself, with its
// headers, later serves another chunk of the same shard and class, so a chunk that goes
// from class to class costs no Go memory.
//
//	chunk: none ──map──► a shard's empty one ──► slab ──all free──► empty
//	                         │  ▲    another shard, after its stream has passed
//	                         └──┴──── trim: unmapped, given back
type slab struct {
	home
	chunk      slabChunk
	class      int
	base       driver.Ptr // of the chunk
	slot       uint64
	slots      []header
	fresh      int    // slots from here on were never used
	free       uint32 // the first free one that was used before: its number, from 1
	used       int
	prev, next *slab // among the shard's slabs of the class that have room
	listed     bool
}

// slabChunk is a chunk that holds a slab, or could.
type slabChunk struct {
	reg   *region
	index int
	// epoch of the last free in it; see shard.
	epoch uint64
}

func (c slabChunk) base() driver.Ptr { return c.reg.at(c.index) }

// mostFormer is how many slabs without a chunk a shard keeps. The headers of one take up to
// 128 KiB.
const mostFormer = 8

// slab makes a slab of an empty chunk.
func (sh *shard) slab(c slabChunk, class int) (s *slab) {
	if at := slices.IndexFunc(sh.former, func(s *slab) bool { return s.class == class }); at >= 0 {
		s = sh.former[at]
		sh.former = slices.Delete(sh.former, at, at+1)
	} else {
		slot := sh.pool.classes.sizes[class]
		s = &slab{class: class, slot: slot, slots: make([]header, c.reg.chunk/slot)}
		s.home = home{shard: sh, slab: s}
	}
	s.chunk, s.base = c, c.base()
	c.reg.chunks[c.index].Load().slab.Store(s)
	sh.slabs++
	return s
}

// full reports whether no slot is free.
func (s *slab) full() bool { return s.free == 0 && s.fresh == len(s.slots) }

// pop takes a slot of one that has room.
func (s *slab) pop() *header {
	var h *header
	if s.free != 0 {
		h = &s.slots[s.free-1]
		s.free = h.link
	} else {
		h = &s.slots[s.fresh]
		h.home, h.slot = &s.home, uint32(s.fresh)
		s.fresh++
	}
	s.used++
	if s.full() {
		s.shard.unlist(s)
	}
	return h
}

// put takes a slot back.
func (s *slab) put(h *header, epoch uint64) {
	sh := s.shard
	h.link = s.free
	s.free = h.slot + 1
	s.used--
	s.chunk.epoch = max(s.chunk.epoch, epoch)
	if !s.listed {
		sh.list(s)
	}
	// One slab without blocks stays for each class, so that a block which comes
	// and goes does not make and unmake slabs.
	if s.used == 0 {
		if s.prev != nil || s.next != nil {
			sh.giveUp(s)
		}
		sh.offerLocked()
	}
}

// list puts a slab that has room in front of those of its class. One without blocks
// is there only if it is alone.
func (sh *shard) list(s *slab) {
	first := sh.partial[s.class]
	if first != nil && first.used == 0 {
		sh.giveUp(first)
		first = nil
	}
	s.prev, s.next, s.listed = nil, first, true
	if first != nil {
		first.prev = s
	}
	sh.partial[s.class] = s
}

func (sh *shard) unlist(s *slab) {
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		sh.partial[s.class] = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	}
	s.prev, s.next, s.listed = nil, nil, false
}

// giveUp turns a slab without blocks into an empty chunk.
func (sh *shard) giveUp(s *slab) {
	sh.unlist(s)
	s.chunk.reg.chunks[s.chunk.index].Load().slab.Store(nil)
	sh.empty = append(sh.empty, s.chunk)
	sh.slabs--
	if len(sh.former) == mostFormer {
		sh.former = slices.Delete(sh.former, 0, 1)
	}
	sh.former = append(sh.former, s)
}

// giveUpAll makes empty chunks of all slabs without blocks.
func (sh *shard) giveUpAll() {
	for _, s := range sh.partial {
		if s != nil && s.used == 0 {
			sh.giveUp(s)
		}
	}
}

// idleSlab returns a slab without blocks, of the largest class that has one, or nil.
func (sh *shard) idleSlab() *slab {
	for _, s := range slices.Backward(sh.partial) {
		if s != nil && s.used == 0 {
			return s
		}
	}
	return nil
}

// spareTries are how many empty chunks are looked at for one that has passed: those
// that were given up first come first.
const spareTries = 8

// spareSlab takes an empty chunk that was freed up to an epoch.
func (sh *shard) spareSlab(upTo uint64) (slabChunk, bool) {
	sh.giveUpAll()
	for i, c := range sh.empty[:min(len(sh.empty), spareTries)] {
		if c.epoch <= upTo {
			sh.empty[i] = sh.empty[0]
			if sh.empty = sh.empty[1:]; len(sh.empty) == 0 && sh.slabs == 0 {
				sh.former = nil
			}
			return c, true
		}
	}
	return slabChunk{}, false
}

// Small requests are rounded up to a size class: 4 to each power of two below
// 16 quanta, 8 above. What is wasted is at most a fifth of a small request, and
// an eighth of a larger one.

// quantum is what every block is a multiple of, and aligned to: a line of the
// GPU's memory four times over, and what frameworks expect of an allocator.
const quantum = 512

// classes are the size classes: small ones up to a limit, and a few above it up to the
// granularity. Those serve larger requests only if there is no other memory: slots of
// empty slab chunks, which would be of no use to them.
type classes struct {
	sizes []uint64
	small int     // how many are up to the limit
	of    []uint8 // the class, by the size in quanta, rounded up
}

func newClasses(limit, gran uint64) classes {
	var c classes
	for size := uint64(quantum); ; {
		c.sizes = append(c.sizes, size)
		if size >= limit {
			break
		}
		steps := uint64(4)
		if size >= 16*quantum {
			steps = 8
		}
		floor := uint64(1) << (bits.Len64(size) - 1)
		size = min(limit, size+max(quantum, floor/steps))
	}
	class := 0
	for q := range limit/quantum + 1 {
		if q*quantum > c.sizes[class] {
			class++
		}
		c.of = append(c.of, uint8(class))
	}
	c.small = len(c.sizes)
	for size := gran >> (bits.Len64(gran/limit) - 1); size <= gran; size *= 2 {
		if size > limit {
			c.sizes = append(c.sizes, size)
		}
	}
	return c
}

// find is the least class for so many bytes, which are within the limit.
func (c *classes) find(bytes uint64) int { return int(c.of[(bytes+quantum-1)/quantum]) }

// aligned is the least class for so many bytes whose slots are multiples of an
// alignment, or -1.
func (c *classes) aligned(bytes, align uint64) int {
	for class := c.find(bytes); class < c.small; class++ {
		if c.sizes[class]%align == 0 {
			return class
		}
	}
	return -1
}

// above is the least class above the limit for so many bytes and an alignment, or -1.
func (c *classes) above(bytes, align uint64) int {
	for class := c.small; class < len(c.sizes); class++ {
		if c.sizes[class] >= bytes && c.sizes[class]%align == 0 {
			return class
		}
	}
	return -1
}

// takeAboveLocked serves a request above the small ones from a slab, or returns nil. The
// caller holds mu.
func (sh *shard) takeAboveLocked(w *want) *header {
	class := sh.pool.classes.above(w.size, w.align)
	if class < 0 {
		return nil
	}
	s := sh.partial[class]
	if s == nil {
		if s = sh.another(class); s == nil {
			return nil
		}
	}
	h := s.pop()
	sh.giveLocked(h, w)
	return h
}

// The chunks of slabs stay where they are, in regions of granules, as long as they
// are mapped. Chunks that move are in move.go.

// provideSlab makes an empty slab chunk.
func (p *Pool) provideSlab(sh *shard) error {
	reg, at, err := p.takeRoom()
	if err != nil {
		return err
	}
	h, err := p.newChunk(p.gran)
	if err != nil {
		p.giveRoom(reg, at)
		return err
	}
	err = reg.inTurn(func() error { return reg.rng.MapRun(allocOp, reg.off(reg.at(at)), []*phys.Handle{h}, *p.access.Load()) })
	if err != nil {
		var undo error
		if reg.left(at) == 0 {
			p.giveRoom(reg, at)
			undo = p.drop(allocOp, h)
		} else { // its memory is used no more, so this is tried twice
			reg.chunks[at].Store(&chunk{handle: h})
			h.Release() // what was left has a count of its own
			_, undo = p.discard(allocOp, reg, at)
		}
		return join(err, undo)
	}
	reg.chunks[at].Store(&chunk{handle: h})
	reg.chunks[at].Load().shard.Store(sh)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.made.Add(p.gran)
	sh.empty = append(sh.empty, slabChunk{reg: reg, index: at})
	sh.offerLocked()
	return nil
}

// takeRoom takes the place for a chunk, and reserves another region if there is none.
func (p *Pool) takeRoom() (reg *region, at int, err error) {
	take := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, r := range p.regions[small] {
			if i, ok := r.vacant.pop(1); ok {
				reg, at = r, i
				return true
			}
		}
		return false
	}
	if take() {
		return reg, at, nil
	}
	p.addresses.Lock()
	defer p.addresses.Unlock()
	for !take() { // or another miss reserved meanwhile
		total := (p.addressed() + p.gran - 1) / p.gran * p.gran
		if _, err := p.reserve(small, total, p.gran, p.gran, p.gran); err != nil {
			return nil, 0, err
		}
	}
	return reg, at, nil
}

// discard gives back a slab chunk that is not in use, and its place.
func (p *Pool) discard(op string, reg *region, at int) (gone uint64, err error) {
	gone, err = reg.vacate(op, at, at+1)
	p.gave(gone)
	if err != nil {
		return gone, p.lose(op, reg, at, at+1, err, func() { p.giveRoom(reg, at) })
	}
	p.giveRoom(reg, at)
	return gone, nil
}

// giveRoom gives back the place of a chunk. Nothing is mapped there.
func (p *Pool) giveRoom(reg *region, at int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	reg.vacant.give(at, 1)
}

// vacant are the places of a region that hold nothing: runs of chunks, sorted,
// that do not touch. The first that is long enough serves, so that what is used
// stays at the region's beginning, and with the memory how far it spreads is
// bounded, too.
type vacant []vacancy

type vacancy struct{ from, to int }

// pop takes the place of n chunks.
func (v *vacant) pop(n int) (at int, ok bool) {
	for i := range *v {
		r := &(*v)[i]
		if r.to-r.from < n {
			continue
		}
		at = r.from
		if r.from += n; r.from == r.to {
			*v = slices.Delete(*v, i, i+1)
		}
		return at, true
	}
	return 0, false
}

// give gives the place of n chunks back.
func (v *vacant) give(at, n int) {
	i, _ := slices.BinarySearchFunc(*v, at, func(r vacancy, at int) int { return r.from - at })
	before := i > 0 && (*v)[i-1].to == at
	after := i < len(*v) && (*v)[i].from == at+n
	switch {
	case before && after:
		(*v)[i-1].to = (*v)[i].to
		*v = slices.Delete(*v, i, i+1)
	case before:
		(*v)[i-1].to += n
	case after:
		(*v)[i].from = at
	default:
		*v = slices.Insert(*v, i, vacancy{at, at + n})
	}
}
