package vmm

import (
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/share"
)

// holds are the publications of a buffer. Its lock is a leaf: it is taken by
// operations that never wait, and nothing is called under it.
type holds struct {
	mu  sync.Mutex
	all []*claim
	// closing: CloseAfter is taking the buffer out of use.
	closing bool
}

// claim keeps the chunks of the first bytes.
type claim struct {
	b     *buffer
	by    string
	cover uint64 // guarded by holds.mu
}

// Hold keeps chunks in the buffer: see share.Memory.
func (b *buffer) Hold(op, by string, n uint64) (share.Hold, error) {
	h := &claim{b: b, by: by}
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if b.holds.closing || b.closer.Closed() {
		return nil, core.ClosedError(op, "buffer")
	}
	if err := b.checkStill(op, 0, n); err != nil {
		return nil, err
	}
	h.cover = n
	b.holds.all = append(b.holds.all, h)
	return h, nil
}

// Cover changes how much is held. What clips meanwhile clips behind the bytes
// that are in use, and so behind all that can be covered.
func (h *claim) Cover(op string, n uint64) error {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	if !slices.Contains(h.b.holds.all, h) {
		return core.ClosedError(op, "publication")
	}
	if err := h.b.checkStill(op, 0, n); err != nil {
		return err
	}
	h.cover = n
	return nil
}

// Release lets go.
func (h *claim) Release() {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	h.b.holds.all = slices.DeleteFunc(h.b.holds.all, func(o *claim) bool { return o == h })
}

// check refuses to take away what begins at an offset while anybody but one
// holds it.
func (hs *holds) check(op string, from uint64, but *claim) error {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, h := range hs.all {
		if h != but && h.cover > from {
			return h.inUse(op)
		}
	}
	return nil
}

func (h *claim) inUse(op string) error {
	return core.Error(core.Failure{Op: op, Kind: core.InUse,
		Asked: fmt.Sprintf("%s of the buffer are held by %s", core.Bytes(h.cover), h.by),
		Hint:  "withdraw it first, or shrink it there"})
}

// close takes the buffer out of use, unless somebody holds it.
func (b *buffer) close(op string) error {
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if len(b.holds.all) > 0 {
		return b.holds.all[0].inUse(op)
	}
	b.closer.Life.Close()
	return nil
}

// closeAfter makes the fence for taking the buffer out of use, unless somebody
// holds it. From then on nobody can.
func (b *buffer) closeAfter(op string, streams []*cuda.Stream) (*core.Fence, error) {
	set := func(closing bool) error {
		b.holds.mu.Lock()
		defer b.holds.mu.Unlock()
		if closing && len(b.holds.all) > 0 {
			return b.holds.all[0].inUse(op)
		}
		b.holds.closing = closing
		return nil
	}
	if err := set(true); err != nil {
		return nil, err
	}
	f, err := core.FenceOf(b.res.System(), op, streams)
	if err != nil {
		_ = set(false)
	}
	return f, err
}

// Shrink makes the buffer shorter and takes the chunks behind out of it: see
// share.Hold.
func (h *claim) Shrink(op string, n uint64, streams []*cuda.Stream) (gone share.View, err error) {
	b := h.b
	if err := b.enter(op); err != nil {
		return gone, err
	}
	defer b.leave()
	before := b.used.Load()
	if b.imported == nil || n > b.committed.Load() {
		if err := b.checkStill(op, 0, n); err != nil {
			return gone, err
		}
	}
	// Refused to copies first: those that were let through are on their streams.
	b.used.Store(min(before, n))
	keep := b.full()
	for keep < len(b.chunks) && b.chunks[keep].off < n {
		keep++ // imported, and not yet in use
	}
	var f *core.Fence
	if keep < len(b.chunks) {
		if f, err = b.leaving(op, h, b.chunks[keep].off, streams); err != nil {
			b.used.Store(before)
			return gone, err
		}
	}
	h.lower(n)
	if keep == len(b.chunks) {
		return gone, nil
	}
	for _, m := range b.chunks[keep:] {
		m.phys.Retain()
		gone.Chunks = append(gone.Chunks, share.Chunk{Handle: m.phys, Offset: m.off})
	}
	if len(streams) > 0 {
		b.clipAfter(op, keep, f, true)
		return gone, nil
	}
	b.awaitTail(b.res.size)
	return gone, b.uncommit(op, keep)
}

// leaving asks whether the chunks from an offset on may go from one hold, and
// waits for the work that could use them, or marks the streams.
func (b *buffer) leaving(op string, h *claim, from uint64, streams []*cuda.Stream) (*core.Fence, error) {
	if err := b.holds.check(op, from, h); err != nil {
		return nil, err
	}
	if err := b.imported.sole(op); err != nil {
		return nil, err
	}
	if len(streams) > 0 {
		return core.FenceOf(b.res.System(), op, streams)
	}
	if v := b.res.views.over(from, rest); v != nil {
		return nil, v.inUse(op)
	}
	return nil, b.wait(op)
}

func (h *claim) lower(n uint64) {
	h.b.holds.mu.Lock()
	defer h.b.holds.mu.Unlock()
	h.cover = min(h.cover, n)
}
