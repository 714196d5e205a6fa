package vmm

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// holds are the publications of a buffer. Its lock is a leaf: operations that never
// wait take it, and no driver call is made under it.
type holds struct {
	mu  lock.Mutex[lock.Leaf]
	all []*claim
	// closing is set while CloseAfter takes the buffer out of use.
	closing bool
}

// claim is one publication's hold on the chunks of the first bytes.
type claim struct {
	b  *buffer
	by string
	// Guarded by holds.mu. recall is nil if the memory cannot be suspended.
	cover  uint64
	recall suspend.Publication
}

// Hold implements share.Memory.
func (b *buffer) Hold(op, by string, n uint64) (share.Hold, error) {
	h := &claim{b: b, by: by}
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if b.holds.closing || b.closer.Closed() {
		return nil, b.errClosed(op)
	}
	if err := b.checkStill(op, holding, 0, n, 1); err != nil {
		return nil, err
	}
	h.cover = n
	b.holds.all = append(b.holds.all, h)
	return h, nil
}

// Cover changes how much is held. A clip meanwhile takes only chunks behind the bytes
// in use, and so behind all that can be covered.
func (h *claim) Cover(op string, n uint64) error {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	if !slices.Contains(h.b.holds.all, h) {
		return errs.ClosedError(op, "publication")
	}
	if err := h.b.checkStill(op, holding, 0, n, 1); err != nil {
		return err
	}
	h.cover = n
	return nil
}

// RecallBy implements share.Hold.
func (h *claim) RecallBy(p suspend.Publication) {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	h.recall = p
}

// Release ends the hold. It is idempotent.
func (h *claim) Release() {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	h.b.holds.all = slices.DeleteFunc(h.b.holds.all, func(o *claim) bool { return o == h })
}

// check refuses to take the memory from an offset on away while a publication holds
// any of it.
func (hs *holds) check(op string, from uint64) error {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, h := range hs.all {
		if h.cover > from {
			return h.inUse(op)
		}
	}
	return nil
}

// any refuses an operation while any publication holds the buffer.
func (hs *holds) any(op string) error {
	return hs.refuse(op, func(*claim) bool { return true })
}

// unrecalled refuses a suspension while the buffer is held and the memory cannot be recalled.
func (hs *holds) unrecalled(op string) error {
	return hs.refuse(op, func(h *claim) bool { return h.recall == nil })
}

// refuse refuses an operation because of the first hold for which that is right.
func (hs *holds) refuse(op string, which func(*claim) bool) error {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if i := slices.IndexFunc(hs.all, which); i >= 0 {
		return hs.all[i].inUse(op)
	}
	return nil
}

// publications returns those that recall the memory.
func (hs *holds) publications() (all []suspend.Publication) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, h := range hs.all {
		if h.recall != nil {
			all = append(all, h.recall)
		}
	}
	return all
}

func (h *claim) inUse(op string) error {
	if i := h.b.imported; i != nil && i.followed.Load() {
		return h.b.fail(errs.Failure{Op: op, Kind: errs.InUse, Asked: "memory of " + h.by, Hint: "close the follower, which closes its array"})
	}
	hint := "withdraw it first, or shrink it there"
	if i := h.b.imported; i != nil && i.kept.Load() {
		hint = "close its server first: a withdrawal leaves nothing whole"
	}
	return h.b.fail(errs.Failure{Op: op, Kind: errs.InUse,
		Asked: fmt.Sprintf("%s of the buffer are held by %s", errs.Bytes(h.cover), h.by), Hint: hint})
}

// shrinking is a change that takes chunks out of a buffer that is held.
type shrinking struct {
	h  *claim
	op string
	// keep is how many chunks stay. With waits set End waits for the GPU and unmaps
	// the others; otherwise they are in the tail already.
	keep  int
	waits bool
}

// Begin implements share.Hold.
func (h *claim) Begin(op string) (share.Shrinking, error) {
	if err := h.b.enter(op, following); err != nil {
		return nil, err
	}
	return &shrinking{h: h, op: op}, nil
}

// Shrink implements share.Shrinking.
func (c *shrinking) Shrink(n uint64, streams []*cuda.Stream) (gone share.View, err error) {
	b, op := c.h.b, c.op
	b.copies.watch()
	defer b.copies.unwatch()
	before := b.used.Load()
	if b.imported == nil || n > b.committed.Load() {
		if err := b.checkStill(op, following, 0, n, 1); err != nil {
			return gone, err
		}
	}
	if n < before {
		if err := b.othersSeeLocked(op, n, 1); err != nil {
			return gone, err
		}
	}
	keep := 0
	for keep < len(b.chunks) && b.chunks[keep].Off < n {
		keep++
	}
	// A refusal changes nothing, not even for a moment.
	if keep < len(b.chunks) {
		if err := b.mayLeave(op, b.chunks[keep].Off, streams); err != nil {
			return gone, err
		}
	}
	// Copies are refused first: those that were let through are on their streams.
	if err := c.h.less(op, n); err != nil {
		return gone, err
	}
	b.chunksInUse() // waits until they are submitted
	var f *core.Fence
	if keep < len(b.chunks) {
		if f, err = b.leaving(op, b.chunks[keep].Off, streams); err != nil {
			b.used.Store(before)
			return gone, err
		}
	}
	c.h.lower(n)
	if keep == len(b.chunks) {
		return gone, nil
	}
	for _, m := range b.chunks[keep:] {
		gone.Chunks = append(gone.Chunks, share.ChunkOf(m.Memory, m.Off))
	}
	if c.keep, c.waits = keep, len(streams) == 0; !c.waits {
		b.copies.addTo(f)
		b.clipAfterLocked(op, keep, f, true)
	}
	return gone, nil
}

// End implements share.Shrinking.
func (c *shrinking) End() error {
	b := c.h.b
	defer b.leave()
	if !c.waits {
		return nil
	}
	if err := b.waitAllLocked(c.op); err != nil {
		return err
	}
	return b.uncommitLocked(c.op, c.keep)
}

// mayLeave refuses to take the chunks from an offset on if they are in use.
func (b *buffer) mayLeave(op string, from uint64, streams []*cuda.Stream) error {
	if len(streams) == 0 {
		return b.res.Views.None(op, from, vrange.End)
	}
	return nil
}

// leaving fences the streams, if there are any, unless a Host function has begun to use
// the chunks from an offset on meanwhile.
func (b *buffer) leaving(op string, from uint64, streams []*cuda.Stream) (*core.Fence, error) {
	if err := b.mayLeave(op, from, streams); err != nil {
		return nil, err
	}
	if len(streams) == 0 {
		return nil, nil
	}
	return core.FenceOf(b.res.System(), op, streams)
}

// less makes the buffer shorter, unless another publication covers more: its followers
// see those bytes, whether or not whole chunks go.
func (h *claim) less(op string, n uint64) error {
	b := h.b
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	for _, o := range b.holds.all {
		if o != h && o.cover > n {
			return o.inUse(op)
		}
	}
	b.used.Store(min(b.used.Load(), n))
	return nil
}

func (h *claim) lower(n uint64) {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	h.cover = min(h.cover, n)
}
