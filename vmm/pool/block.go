package pool

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Block is memory that Alloc gave: a value, which may be copied and compared.
// Once it was freed, every copy of it is stale, and freeing one is
// cuda.ErrClosed, whoever has the memory then. The zero Block is no memory.
type Block struct {
	h     *header
	gen   uint64
	ptr   cuda.Ptr
	bytes int
}

// Ptr is the address of the block. It stays what it is until Free.
func (b Block) Ptr() cuda.Ptr { return b.ptr }

// Bytes is what was asked for.
func (b Block) Bytes() int { return b.bytes }

// header is what the pool knows of a block. It belongs to one shard for life,
// and is guarded by that shard's lock, except for its home, which never changes.
//
// Its states, and what leads from one to the other:
//
//	free ──Alloc──► live ──Free──► free                 at once: the stream is the block's own
//	                  └───Free──► waiting ──► free       once the streams that were named have passed,
//	                                                     and the capture that was running has ended
//
// The generation is odd while the block is live and grows with each step from
// and to that state, so that a Block fits its header only while it is live. A
// header of memory that goes to another shard, or back to the driver, is never
// used again, so the stale blocks of it stay stale.
type header struct {
	home *home
	gen  uint64 // a quick stream would be through 32 bits in minutes
	// link is what a live slot was asked for, in bytes, and of a free one the
	// number of the next.
	link    uint32
	slot    uint32 // which of the slab
	capture uint32 // the serial of the capture that it was allocated in
	tag     Tag
	// waiting: it was freed and is not free yet.
	waiting bool
}

// home is what headers belong to, for life: the slots of a slab share theirs,
// and an extent has its own. So the header of a small block takes half a cache
// line.
type home struct {
	shard *shard
	slab  *slab
	ext   *extent
}

func (h *header) live() bool { return h.gen&1 == 1 }

// block is the value for the user.
func (h *header) block() Block {
	return Block{h: h, gen: h.gen, ptr: cuda.Ptr(h.at()), bytes: int(h.asked())}
}

// at is the address.
func (h *header) at() driver.Ptr {
	if s := h.home.slab; s != nil {
		return s.base + driver.Ptr(uint64(h.slot)*s.slot)
	}
	return h.home.ext.ptr
}

// asked is what the block was asked for, in bytes.
func (h *header) asked() uint64 {
	if e := h.home.ext; e != nil {
		return e.asked
	}
	return uint64(h.link)
}

func (h *header) ask(bytes uint64) {
	if e := h.home.ext; e != nil {
		e.asked = bytes
		return
	}
	h.link = uint32(bytes)
}

// size is what the block takes, in bytes.
func (h *header) size() uint64 {
	if e := h.home.ext; e != nil {
		return e.size
	}
	return h.home.slab.slot
}
