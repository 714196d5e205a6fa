package vmm

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/share"
)

// A chunk of a buffer is in one of these states. What moves it is a change of the
// buffer (changes is held), and the lists are edited under mu, so that a copy sees
// a chunk either in use or not.
//
//	(none)     no memory at this place
//	committed  in chunks: mapped and granted; its bytes may be in use
//	clipped    in tail: out of use, still mapped and granted, and the GPU may still
//	           use it; clip says which call took it
//	passed     in tail, and the GPU has passed what its clip named
//	left       in reservation.left: a teardown or an undo failed, and whether it is
//	           mapped is not known; its addresses are not used
//
//	none      -> committed  commitLocked (createLocked), attachLocked, Move, Fork
//	committed -> clipped    ClipAfter, a publication's Shrink (clipAfterLocked)
//	clipped   -> passed     the reclaimer, or a caller that waits for the devices (clip.pass)
//	clipped,
//	passed    -> committed  commitLocked takes it back after its clip has passed,
//	                        unless the clip is final
//	passed    -> none       trimLocked, from the end of the tail, which has no holes
//	committed -> none       Clip, Close, rollbackLocked (uncommitLocked)
//	any       -> left       unmapRun or an undo fails
//	left      -> none       Clip or Close tries again (finish)
//
// The memory itself lives as long as anything counts it (phys.Handle): another
// buffer after Move or Fork, a view that is being exported.

// mappedLocked is where the mapped part of the range ends: behind what was clipped
// and waits. The caller holds mu or changes.
func (b *buffer) mappedLocked() uint64 {
	if n := len(b.tail); n > 0 {
		last := b.tail[n-1]
		return last.off + last.phys.Size
	}
	return b.committed.Load()
}

// full is how many chunks hold bytes in use. When it returns, every copy that
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

// firstFree is where the first chunk begins that holds no bytes in use.
func (b *buffer) firstFree() uint64 {
	b.mu.RLock()
	defer b.mu.RUnlock()
	used, at := b.used.Load(), b.committed.Load()
	for i := len(b.chunks) - 1; i >= 0 && b.chunks[i].off >= used; i-- {
		at = b.chunks[i].off
	}
	return at
}

// finalTail reports whether there is anything in the tail that growth must not
// take back.
func (b *buffer) finalTail() bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return slices.ContainsFunc(b.tail, func(m *mapping) bool { return m.clip.final })
}

// sharedLocked is how many bytes of the chunks other buffers have too. The caller holds
// mu.
func (b *buffer) sharedLocked() (bytes uint64) {
	for _, c := range b.chunks {
		if c.phys.Mappings.Load() > 1 {
			bytes += c.phys.Size
		}
	}
	return bytes
}

// checkStill refuses n bytes at an offset that are no longer in use. The error counts
// elements of a size.
func (b *buffer) checkStill(op string, off, n uint64, size int) error {
	if used := b.used.Load(); off+n > used {
		each := uint64(size)
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%ss %d to %d, with %d in use", noun(size), off/each, (off+n)/each, used/each),
			Hint:  "append or resize first; if this was in use before, the buffer became shorter since"})
	}
	return nil
}

// retained are all chunks, with counts.
func (b *buffer) retained() (v share.View) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, m := range b.chunks {
		m.phys.Retain()
		v.Chunks = append(v.Chunks, share.Chunk{Handle: m.phys, Offset: m.off})
	}
	return v
}
