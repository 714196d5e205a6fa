package vmm

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// A chunk of a buffer is in one of these states. Only a change of the buffer (which
// holds changes) moves a chunk from one to another, and it edits the lists under mu, so
// that a copy sees a chunk either in use or not.
//
//	(none)     no memory at this place
//	committed  in chunks: mapped and granted; its bytes may be in use
//	clipped    in tail: out of use, still mapped and granted, and the GPU may still
//	           use it; clip is the call that took it
//	passed     in tail, and the GPU has passed the work that its clip fenced
//	stuck      in the range: a teardown or an undo failed, so it is not known
//	           whether it is mapped; its addresses are not used again
//
//	none      -> committed  commitLocked (createLocked), attachLocked, Move, Fork
//	committed -> clipped    ClipAfter, a publication's Shrink (clipAfterLocked)
//	clipped   -> passed     the reclaimer, or a caller that waits for the devices (clip.pass)
//	clipped,
//	passed    -> committed  commitLocked takes it back after its clip has passed,
//	                        unless the clip is final
//	passed    -> none       trimLocked, from the end of the tail, which has no holes
//	committed -> passed     rollbackLocked
//	committed -> none       Clip, Close (uncommitLocked)
//	any       -> stuck      an unmap or an undo fails
//	stuck     -> none       Clip or Close tries again (Range.Finish)
//
// The memory itself lives as long as its reference count (phys.Handle) is above zero:
// another buffer after Move or Fork may hold a reference, or a view that is being
// exported.

// chunk is memory of a buffer at its place.
type chunk struct {
	*vrange.Mapping
	clip *clip // the last one that took it
}

// addLocked puts mapped memory behind the committed chunks. The caller holds mu for
// writing.
func (b *buffer) addLocked(run []*vrange.Mapping) {
	b.chunks = slices.Grow(b.chunks, len(run))
	for _, m := range run {
		b.chunks = append(b.chunks, chunk{Mapping: m})
	}
	last := run[len(run)-1]
	b.committed.Store(last.Off + last.Memory.Size)
}

// unmap unmaps a run of chunks that are in no list any more.
func (b *buffer) unmap(op string, gone []chunk) error {
	var few [8]*vrange.Mapping
	maps := few[:0]
	for _, c := range gone {
		maps = append(maps, c.Mapping)
	}
	err := b.res.Unmap(op, maps...)
	b.status.Unmapped()
	return err
}

// mappedLocked returns where the mapped part of the range ends: behind the clipped
// chunks that wait. The caller holds mu or changes.
func (b *buffer) mappedLocked() uint64 {
	if n := len(b.tail); n > 0 {
		last := b.tail[n-1]
		return last.Off + last.Memory.Size
	}
	return b.committed.Load()
}

// chunksInUse returns how many chunks hold bytes in use. When it returns, every earlier copy
// to or from the other chunks has been submitted to its stream, so it can be fenced.
func (b *buffer) chunksInUse() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	keep := len(b.chunks)
	for keep > 0 && b.chunks[keep-1].Off >= b.used.Load() {
		keep--
	}
	return keep
}

// firstFree returns where the first chunk begins that holds no bytes in use.
func (b *buffer) firstFree() uint64 {
	b.mu.RLock()
	defer b.mu.RUnlock()
	used, at := b.used.Load(), b.committed.Load()
	for i := len(b.chunks) - 1; i >= 0 && b.chunks[i].Off >= used; i-- {
		at = b.chunks[i].Off
	}
	return at
}

// finalTail reports whether the tail holds a chunk that growth must not take back.
func (b *buffer) finalTail() bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return slices.ContainsFunc(b.tail, func(m chunk) bool { return m.clip.final })
}

// sharedLocked returns how many bytes of the chunks other buffers share. The caller
// holds mu.
func (b *buffer) sharedLocked() (bytes uint64) {
	for _, c := range b.chunks {
		if c.Memory.Mappings.Load() > 1 {
			bytes += c.Memory.Size
		}
	}
	return bytes
}

// awayLocked returns how many bytes of the chunks are not mapped, because they were suspended.
// The caller holds mu.
func (b *buffer) awayLocked() (bytes uint64) {
	if b.status.State() == suspend.Awake {
		return 0
	}
	for _, c := range b.chunks {
		if c.Away() {
			bytes += c.Memory.Size
		}
	}
	return bytes
}

// checkStill refuses an operation that the state of the buffer does not permit, and one on n
// bytes at an offset that are no longer in use. The error counts elements of a size.
func (b *buffer) checkStill(op string, o operation, off, n uint64, size int) error {
	if err := b.allow(op, o); err != nil {
		return err
	}
	if used := b.used.Load(); off+n > used {
		each := uint64(size)
		return b.fail(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%ss %d to %d, with %d in use", noun(size), off/each, (off+n)/each, used/each),
			Hint:  "append or resize first; if this was in use before, the buffer has become shorter since"})
	}
	return nil
}

// retained returns all chunks, each with a reference.
func (b *buffer) retained() (v share.View) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, m := range b.chunks {
		v.Chunks = append(v.Chunks, share.ChunkOf(m.Memory, m.Off))
	}
	return v
}
