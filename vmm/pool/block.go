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
// and is guarded by that shard's lock, except for what never changes (shard,
// slab, ext).
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
	ptr   driver.Ptr
	bytes uint64 // that were asked for
	gen   uint64
	shard *shard
	slab  *slab   // whose slot it is; or
	ext   *extent // whose first field it is
	next  *header // the next free slot of the slab
	tag   Tag
	// waiting: it was freed and is not free yet.
	waiting bool
	// capture is the serial of the capture that it was allocated in.
	capture uint32
}

func (h *header) live() bool { return h.gen&1 == 1 }

// block is the value for the user.
func (h *header) block() Block {
	return Block{h, h.gen, cuda.Ptr(h.ptr), int(h.bytes)}
}

// size is what the block takes, in bytes.
func (h *header) size() uint64 {
	if h.slab != nil {
		return h.slab.slot
	}
	return h.ext.size
}
