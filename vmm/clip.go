package vmm

import (
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
)

// Clip gives back the memory behind the bytes in use: whole chunks, so at most
// one chunk stays that is not full. It first waits for all work that could use
// the memory (see the package documentation).
func (b *Buffer) Clip() error {
	const op = "vmm.Buffer.Clip"
	in := b.b
	if err := in.enter(op); err != nil {
		return err
	}
	defer in.leave()
	if keep := in.full(); keep < len(in.chunks) {
		if err := in.mayClip(op, keep); err != nil {
			return err
		}
		if err := in.wait(op); err != nil {
			return err
		}
		// What ClipAfter took lies behind these chunks and goes in its own time;
		// it must not be left between memory that grows again.
		in.awaitTail(in.res.size)
		in.mu.Lock()
		err := in.uncommit(op, keep)
		in.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return in.res.finish(op)
}

// ClipAfter is Clip without waiting for the GPU (only for copies and changes of
// this buffer that other goroutines have under way): the memory goes out of use
// at once and is given back when the work that is on the streams now is done.
// Growing again
// before that takes the same memory back, after waiting for those streams.
// Without a stream it is ErrInvalidArgument; with one that captures a graph it
// is ErrCapturing and nothing has changed.
func (b *Buffer) ClipAfter(streams ...*cuda.Stream) error {
	const op = "vmm.Buffer.ClipAfter"
	in := b.b
	if err := in.enter(op); err != nil {
		return err
	}
	defer in.leave()
	keep := in.full()
	if err := in.mayClip(op, keep); err != nil {
		return err
	}
	f, err := core.FenceOf(in.res.System(), op, streams)
	if err != nil {
		return err
	}
	if keep == len(in.chunks) {
		f.Drop()
		return nil
	}
	in.clipAfter(op, keep, f, false)
	return nil
}

// mayClip refuses to take the chunks from index keep on while they are held, or
// are another buffer's too.
func (b *buffer) mayClip(op string, keep int) error {
	if keep == len(b.chunks) {
		return nil
	}
	if err := b.holds.check(op, b.chunks[keep].off, nil); err != nil {
		return err
	}
	return b.imported.sole(op)
}

// clipAfter takes the chunks from index keep on, at least one, out of use, to
// be given back when the fence has passed. Final ones are never taken back by
// growth, nor is imported memory.
func (b *buffer) clipAfter(op string, keep int, f *core.Fence, final bool) {
	c := &clip{passed: make(chan struct{}), final: final || b.imported != nil}
	c.life.Close()
	b.mu.Lock()
	for _, m := range b.chunks[keep:] {
		m.clip = c
	}
	b.moveToTail(keep)
	b.mu.Unlock()
	b.later.Add(1) // the buffer is not torn down before the GPU has passed
	b.res.System().Reclaim(f, &c.life, func() error { return b.clipped(op, c) })
}

// clip is one call of ClipAfter, or of a publication's Shrink. Its chunks know
// it.
type clip struct {
	life   core.Life
	passed chan struct{} // closed when the GPU has passed
	final  bool
}

func (c *clip) done() bool {
	select {
	case <-c.passed:
		return true
	default:
		return false
	}
}

// full is how many chunks hold bytes in use. When it answers, every copy that
// was let onto the others before is on its stream, to be waited for.
func (b *buffer) full() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	keep := len(b.chunks)
	for keep > 0 && b.chunks[keep-1].off >= b.used.Load() {
		keep--
	}
	return keep
}

// clipped gives a clip's chunks back, unless they were taken back meanwhile.
func (b *buffer) clipped(op string, c *clip) error {
	if !c.done() {
		close(c.passed)
	}
	if !b.mu.TryLock() {
		return core.ErrAgain // the reclaimer waits for nobody's lock
	}
	defer b.mu.Unlock()
	if b.pinned {
		return core.ErrAgain
	}
	defer b.later.Add(-1)
	return b.trim(op)
}

// awaitTail waits until the GPU has passed the clipped chunks that begin before
// offset n. The caller holds changes, so no further ones appear.
func (b *buffer) awaitTail(n uint64) {
	for {
		b.mu.RLock()
		var wait *clip
		for _, m := range b.tail {
			if m.off < n && !m.clip.done() {
				wait = m.clip
			}
		}
		b.mu.RUnlock()
		if wait == nil {
			return
		}
		<-wait.passed
	}
}

// settleTail sees to it that nothing of the tail is in the way that growth must
// not take back: where there is such a chunk, it waits for the GPU to pass the
// whole tail and gives that back. The caller holds changes.
func (b *buffer) settleTail(op string) error {
	b.mu.RLock()
	final := slices.ContainsFunc(b.tail, func(m *mapping) bool { return m.clip.final })
	b.mu.RUnlock()
	if !final {
		return nil
	}
	b.awaitTail(b.res.size)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.trim(op)
}
