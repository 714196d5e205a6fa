package vmm

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Clip frees the whole chunks behind the bytes in use, so that at most one chunk is
// left that is not full. It first waits for all work that could use the memory (see
// the package documentation).
func (b *Buffer) Clip() error { return b.inner().clip("vmm.Buffer.Clip") }

func (b *buffer) clip(op string) error {
	keep, err := b.enterClip(op)
	if err != nil {
		return err
	}
	defer b.leave()
	if keep < len(b.chunks) {
		if err := b.mayClip(op, b.chunks[keep].Off); err != nil {
			return err
		}
		// The chunks that ClipAfter took lie behind these and are freed with them: the
		// tail must not have a hole before it.
		if err := b.waitAllLocked(op); err != nil {
			return err
		}
		if err := b.uncommitLocked(op, keep); err != nil {
			return err
		}
	}
	return b.res.Finish(op)
}

// enterClip starts a change that takes the chunks from index keep on.
func (b *buffer) enterClip(op string) (keep int, err error) {
	if err := b.enter(op, clipping); err != nil {
		return 0, err
	}
	if keep = b.chunksInUse(); keep < len(b.chunks) {
		err = b.res.Views.None(op, b.chunks[keep].Off, vrange.End)
	}
	if err != nil {
		b.leave()
	}
	return keep, err
}

// ClipAfter is Clip without waiting: the memory goes out of use at once and is freed when
// the work that is on the streams now is done, and the work of copies from and to the
// buffer that are being submitted during the call. Work that is already on other streams,
// appends of other goroutines included, is not waited for: name every stream that may
// still use the memory. Growth before that takes the same memory back, after waiting
// for those streams. If another goroutine is changing the buffer (an Append that waits for
// the GPU, for example), the clip follows that change, with the length that the buffer
// then has.
//
// Without a stream it returns ErrInvalidArgument; with one that captures a graph it
// returns ErrCapturing and nothing has changed.
func (b *Buffer) ClipAfter(streams ...*cuda.Stream) error {
	return b.inner().clipAfter("vmm.Buffer.ClipAfter", streams)
}

func (b *buffer) clipAfter(op string, streams []*cuda.Stream) error {
	if err := b.acquire(op); err != nil {
		return err
	}
	defer b.closer.Release()
	if err := b.allow(op, clipping); err != nil {
		return err
	}
	b.copies.watch()
	fence := func() (*core.Fence, error) { return core.FenceOf(b.res.System(), op, streams) }
	if !b.changes.TryLock() {
		return b.clipQueued(op, fence)
	}
	defer b.copies.unwatch()
	defer b.changes.Unlock()
	keep := b.chunksInUse()
	if keep < len(b.chunks) {
		if err := b.mayClip(op, b.chunks[keep].Off); err != nil {
			return err
		}
	}
	f, err := fence()
	if err != nil {
		return err
	}
	if keep == len(b.chunks) {
		f.Release()
		return nil
	}
	b.copies.addTo(f)
	b.clipAfterLocked(op, keep, f, false)
	return nil
}

// clipQueued is ClipAfter while a change runs. It ends the watch that ClipAfter began.
func (b *buffer) clipQueued(op string, fence func() (*core.Fence, error)) error {
	if from := b.firstFree(); from < b.committed.Load() {
		if err := b.mayClip(op, from); err != nil {
			b.copies.unwatch()
			return err
		}
	}
	f, err := fence()
	if err != nil {
		b.copies.unwatch()
		return err
	}
	b.runOrQueue(func() {
		defer b.copies.unwatch()
		keep := b.chunksInUse()
		if keep == len(b.chunks) || b.allow(op, catchingUp) != nil || b.holds.check(op, b.chunks[keep].Off) != nil {
			f.Release() // nothing is left to clip, or a publication holds it by now
			return
		}
		b.copies.addTo(f)
		b.clipAfterLocked(op, keep, f, false)
	})
	return nil
}

// mayClip refuses to take the chunks from an offset on, if the state of the buffer does not
// permit it, or while a publication holds them.
func (b *buffer) mayClip(op string, from uint64) error {
	if err := b.allow(op, clipping); err != nil {
		return err
	}
	return b.holds.check(op, from)
}

// clipAfterLocked takes the chunks from index keep on, at least one, out of use. They are
// freed when the fence has passed. Growth never takes back final ones, nor imported
// memory.
func (b *buffer) clipAfterLocked(op string, keep int, f *core.Fence, final bool) {
	c := &clip{fence: f, passed: make(chan struct{}), final: final || b.imported != nil}
	c.life.Close()
	b.mu.Lock()
	for i := range b.chunks[keep:] {
		b.chunks[keep+i].clip = c
	}
	b.moveToTailLocked(keep)
	b.mu.Unlock()
	b.reclaim(f, &c.life, func() error { return b.clippedLocked(op) }, c.pass)
}

// clip is one call of ClipAfter, or of a publication's Shrink. Its chunks refer to it.
type clip struct {
	life   life.Life
	fence  *core.Fence
	once   sync.Once
	passed chan struct{} // closed when the GPU has passed
	final  bool
}

// unused is the clip of chunks that no GPU work has used.
var unused = func() *clip {
	c := &clip{passed: make(chan struct{})}
	c.pass()
	return c
}()

// pass records that the GPU has passed. It is idempotent.
func (c *clip) pass() { c.once.Do(func() { close(c.passed) }) }

// await waits until the GPU has passed. It returns false if only a capture keeps that
// from being known, since the capture may be waiting for the caller, and the error of the
// context if that ends first.
func (c *clip) await(ctx context.Context) (bool, error) {
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for {
		select {
		case <-c.passed:
			return true, nil
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-look.C:
			if c.fence.HeldByCapture() {
				return c.done(), nil
			}
		}
	}
}

func (c *clip) done() bool {
	select {
	case <-c.passed:
		return true
	default:
		return false
	}
}

// clippedLocked frees the chunks of a clip that the GPU has passed, unless growth has
// taken them back. The caller holds changes.
func (b *buffer) clippedLocked(op string) error {
	if err := b.allow(op, reclaiming); err != nil {
		return err
	}
	if _, uses := b.res.Views.Over(b.committed.Load(), vrange.End); uses {
		return life.ErrAgain // a Host function still uses it
	}
	return b.trimLocked(op)
}

// awaitTailLocked waits until the GPU has passed the clipped chunks that begin before
// offset n. If a capture keeps that from being known, it waits for the devices as a whole
// instead. The caller holds changes, so no chunks are added to the tail.
func (b *buffer) awaitTailLocked(ctx context.Context, op string, n uint64) error {
	for {
		b.mu.RLock()
		var wait *clip
		for _, m := range b.tail {
			if m.Off < n && !m.clip.done() {
				wait = m.clip
			}
		}
		b.mu.RUnlock()
		if wait == nil {
			return nil
		}
		if passed, err := wait.await(ctx); err != nil {
			return within(op, err)
		} else if !passed {
			return b.waitAllLocked(op)
		}
	}
}

// waitAllLocked waits for all work that could use the buffer, including its clipped
// chunks. The caller holds changes.
func (b *buffer) waitAllLocked(op string) error {
	if err := b.wait(op); err != nil {
		return err
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, m := range b.tail {
		m.clip.pass()
	}
	return nil
}

// uncommitLocked takes the chunks from index keep on, and the tail, out of use and frees
// them. No GPU work uses them. The caller holds changes.
func (b *buffer) uncommitLocked(op string, keep int) error {
	b.mu.Lock()
	b.chunks, b.tail = append(b.chunks, b.tail...), nil
	gone := b.chunks[keep:]
	b.chunks = b.chunks[:keep]
	if len(gone) > 0 {
		b.committed.Store(gone[0].Off)
		b.SetBytes(gone[0].Off)
	}
	b.mu.Unlock()
	err := b.unmap(op, gone)
	clear(gone)
	return err
}

// moveToTailLocked moves the chunks from index keep on, at least one, to the tail. The
// caller holds mu for writing.
func (b *buffer) moveToTailLocked(keep int) {
	b.tail = append(slices.Clone(b.chunks[keep:]), b.tail...)
	clear(b.chunks[keep:])
	b.chunks = b.chunks[:keep]
	b.committed.Store(b.tail[0].Off)
	b.SetBytes(b.tail[0].Off)
}

// trimLocked frees the end of the tail that the GPU has passed. It frees a chunk only
// with those behind it, so that the tail has no holes. The caller holds changes.
func (b *buffer) trimLocked(op string) error {
	b.mu.Lock()
	first := len(b.tail)
	for first > 0 && b.tail[first-1].clip.done() {
		first--
	}
	gone := b.tail[first:]
	b.tail = b.tail[:first:first]
	b.mu.Unlock()
	return b.unmap(op, gone)
}
