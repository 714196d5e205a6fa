package pool

import "github.com/cuvmm/cuvmm/internal/driver"

// slab is one chunk that is divided into equal slots of a size class. It
// belongs to one shard, and is guarded by its lock. When all of its slots are
// free it is given up, and its chunk serves the next slab, of any class, of the
// shard; another shard may have it when the stream has passed.
//
//	chunk: none ──map──► a shard's empty one ──► slab ──all free──► empty
//	                         │  ▲    another shard, after its stream has passed
//	                         └──┴──── trim: unmapped, given back
type slab struct {
	home
	chunk      slabChunk
	class      int
	base       driver.Ptr
	slot       uint64
	slots      []header
	fresh      int    // slots from here on were never used
	free       uint32 // the first of those that were: its number, from 1
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

func newSlab(sh *shard, c slabChunk, class int) *slab {
	slot := sh.pool.classes.sizes[class]
	s := &slab{chunk: c, class: class, base: c.base(), slot: slot, slots: make([]header, c.reg.chunk/slot)}
	s.home = home{shard: sh, slab: s}
	c.reg.chunks[c.index].Load().slab.Store(s)
	sh.slabs++
	return s
}

// full reports whether no slot is free.
func (s *slab) full() bool { return s.free == 0 && s.fresh == len(s.slots) }

// take takes a slot of one that has room.
func (s *slab) take() *header {
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
		sh.offer()
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

// giveUp makes a slab without blocks an empty chunk.
func (sh *shard) giveUp(s *slab) {
	sh.unlist(s)
	s.chunk.reg.chunks[s.chunk.index].Load().slab.Store(nil)
	sh.empty = append(sh.empty, s.chunk)
	sh.slabs--
}

// giveUpAll makes empty chunks of all slabs without blocks.
func (sh *shard) giveUpAll() {
	for _, s := range sh.partial {
		if s != nil && s.used == 0 {
			sh.giveUp(s)
		}
	}
}

// idleSlab reports whether there is a slab without blocks.
func (sh *shard) idleSlab() bool {
	for _, s := range sh.partial {
		if s != nil && s.used == 0 {
			return true
		}
	}
	return false
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
			sh.empty = sh.empty[1:]
			return c, true
		}
	}
	return slabChunk{}, false
}
