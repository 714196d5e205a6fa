package pool

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/epoch"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Block is memory that Alloc returned. It is a value, which may be copied and compared.
// Once it is freed every copy is stale, and freeing one again is cuda.ErrClosed, even if
// the memory is another block's by then. The zero Block is no memory.
type Block struct {
	h     *header
	gen   uint64
	ptr   cuda.Ptr
	bytes int
}

// Ptr returns the address of the block, which does not change until Free.
func (b Block) Ptr() cuda.Ptr { return b.ptr }

// Bytes returns the size that was requested.
func (b Block) Bytes() int { return b.bytes }

// header describes a block. It belongs to one shard for life, and that shard's lock
// guards it, except for its home, which never changes.
//
// Its states and transitions:
//
//	free ──Alloc──► live ──Free──► free                 at once: the stream is the block's own
//	                  └───Free──► waiting ──► free       once the streams that were named have passed,
//	                                                     and the capture that was running has ended
//
// The generation is odd while the block is live and grows with each step from
// and to that state, so that a Block fits its header only while it is live. A
// header that serves other memory of its shard later goes on with its generation, so the
// stale blocks of it stay stale.
type header struct {
	home *home
	gen  uint64 // a quick stream would be through 32 bits in minutes
	// link is the requested size of a live slot, in bytes, and of a free one the
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

// asked is the requested size, in bytes.
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

// Free returns a block to the pool. Its memory is reused once the work that is on the
// block's stream now, and on the named streams, is done: name every other stream that used
// the block. Free waits for nothing and makes no driver call.
// Freeing a block twice is cuda.ErrClosed. Free is safe for concurrent use.
//
// If a named stream takes part in a capture, the block waits for the capture's end; see
// Capture.
func (p *Pool) Free(b Block, streams ...*cuda.Stream) error {
	if b.h == nil || b.h.home.shard.pool != p {
		return p.notOurs(b)
	}
	if late := p.sys.Unsettled(); len(streams)+len(late) > 0 {
		return p.freeAfter(b, streams, late)
	}
	err := p.freeAtOnce(b)
	if err == nil {
		p.verify()
	}
	return err
}

// freeAtOnce frees a block that no other stream uses.
func (p *Pool) freeAtOnce(b Block) error {
	h := b.h
	sh := h.home.shard
	sh.mu.Lock()
	if h.gen != b.gen {
		sh.mu.Unlock()
		return p.stale(b)
	}
	if sh.arena != nil {
		sh.mu.Unlock()
		return p.freeCaptured(b)
	}
	sh.retireLocked(h, nil)
	sh.putLocked(h, sh.clock.Now())
	sh.mu.Unlock()
	return nil
}

const freeOp = "pool.Free"

func (p *Pool) notOurs(b Block) error {
	if err := p.made(freeOp); err != nil {
		return err
	}
	if b.h == nil {
		return errs.Invalid(freeOp, "the zero block", "pass a block that Alloc gave")
	}
	return errs.New(errs.Failure{Op: freeOp, Object: p.object.Called(), Kind: errs.Foreign, Asked: fmt.Sprintf("the block at %v is another pool's", b.ptr),
		Hint: "free it where it was allocated"})
}

func otherPool(op, what string) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.Foreign, Asked: what + " another pool's", Hint: "use what this pool made"})
}

// stale returns the error for a block that was freed before. The pool keeps nothing of
// such blocks: only the history has the stack of the first free.
func (p *Pool) stale(b Block) error {
	hint := "free a block once; Pool.StartHistory with Stacks records every free"
	if r := p.history.Load(); r != nil && r.stacks != nil {
		hint = "free a block once; Pool.History has the stack of the first free"
	}
	return errs.New(errs.Failure{Op: freeOp, Object: p.object.Called(), Kind: errs.Closed, Asked: fmt.Sprintf("%s at %v were freed before", errs.Bytes(b.bytes), b.ptr), Hint: hint})
}

// freeAfter frees a block that other streams use, too: those that are named, and the late ones,
// on which an operation on the block may have failed after it was submitted.
func (p *Pool) freeAfter(b Block, streams []*cuda.Stream, late []*core.Stream) error {
	h := b.h
	points := make([]epoch.Point, 0, len(streams)+len(late))
	add := func(st *core.Stream) error {
		if st == h.home.shard.stream || st.Gone() {
			return nil
		}
		sh, err := p.shardOf(freeOp, st)
		if err != nil {
			return err
		}
		sh.mu.Lock()
		points = append(points, epoch.Point{Clock: &sh.clock, Epoch: sh.clock.Touch()})
		sh.mu.Unlock()
		return nil
	}
	for _, s := range streams {
		st := core.StreamOf(s)
		if st == nil {
			return errs.NilStream(freeOp)
		}
		if st.Ctx.System() != p.sys {
			return errs.ForeignError(freeOp, "stream")
		}
		if err := add(st); err != nil {
			return err
		}
	}
	for _, st := range late {
		_ = add(st) // a stream without access to the pool's memory does not use the block
	}
	sh := h.home.shard
	sh.mu.Lock()
	if h.gen != b.gen {
		defer sh.mu.Unlock()
		return p.stale(b)
	}
	if sh.arena != nil {
		sh.mu.Unlock()
		return p.freeCaptured(b, points...)
	}
	sh.retireLocked(h, points)
	if len(points) == 0 {
		sh.putLocked(h, sh.clock.Now())
	} else {
		sh.keepWaitingLocked(waiting{h: h, epoch: sh.clock.Now(), until: points})
	}
	sh.mu.Unlock()
	p.verify()
	return nil
}

// FreePtr is Free for callers that know only the address. The address of anything but
// the first byte of a live block is cuda.ErrInvalidArgument. FreePtr cannot detect that
// a freed address belongs to another block by now.
func (p *Pool) FreePtr(ptr cuda.Ptr, streams ...*cuda.Stream) error {
	if err := p.made("pool.FreePtr"); err != nil {
		return err
	}
	b, ok := p.Find(ptr)
	if !ok {
		return notLive(driver.Ptr(ptr))
	}
	return p.Free(b, streams...)
}

// Find returns the live block that begins at an address, if there is one.
func (p *Pool) Find(ptr cuda.Ptr) (Block, bool) {
	at := driver.Ptr(ptr)
	all := *p.places.Load()
	i, found := slices.BinarySearchFunc(all, at, func(pl place, at driver.Ptr) int {
		switch {
		case at < pl.from:
			return 1
		case at >= pl.to:
			return -1
		}
		return 0
	})
	if !found {
		return p.findNode(at)
	}
	return all[i].find(at)
}
