package vmm

import (
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
	sys := in.res.System()
	f, err := core.FenceOf(sys, op, streams)
	if err != nil {
		return err
	}
	if keep == len(in.chunks) {
		f.Drop()
		return nil
	}
	c := &clip{passed: make(chan struct{})}
	c.life.Close()
	in.mu.Lock()
	for _, m := range in.chunks[keep:] {
		m.clip = c
	}
	in.moveToTail(keep)
	in.mu.Unlock()
	in.later.Add(1) // the buffer is not torn down before the GPU has passed
	sys.Reclaim(f, &c.life, func() error { return in.clipped(op, c) })
	return nil
}

// clip is one call of ClipAfter. Its chunks know it.
type clip struct {
	life   core.Life
	passed chan struct{} // closed when the GPU has passed
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
