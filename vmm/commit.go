package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// commit sees to it that there is memory for the first n bytes, and answers
// how many chunks there were before, for rollback. Where it fails everything is
// as it was. The caller holds changes.
//
// Clipped chunks that are still mapped are taken back first, which costs no
// driver call; where the GPU has not passed them yet, commit waits for it.
func (b *buffer) commit(op string, n uint64) (before int, err error) {
	before = len(b.chunks)
	committed := b.committed.Load()
	if n <= committed {
		return before, nil
	}
	b.awaitTail(n)
	b.mu.RLock()
	back := 0
	at := committed
	for back < len(b.tail) && at < n {
		at += b.tail[back].phys.Size
		back++
	}
	b.mu.RUnlock()
	var maps []*mapping
	if at < n {
		if maps, err = b.create(op, at, n); err != nil {
			return before, err
		}
		last := maps[len(maps)-1]
		at = last.off + last.phys.Size
	}
	b.mu.Lock()
	b.chunks = append(append(b.chunks, b.tail[:back]...), maps...)
	b.tail = b.tail[back:]
	b.mu.Unlock()
	b.committed.Store(at)
	b.grown.Add(1)
	b.Resize(at)
	return before, nil
}

// create makes and maps the chunks from offset at to at least n. No lock but
// changes is held while memory is made, which may take long.
func (b *buffer) create(op string, at, n uint64) ([]*mapping, error) {
	sys := b.res.System()
	var handles []*phys.Handle
	var err error
	for end := at; end < n; {
		size := b.plan.next(end, b.res.size-end)
		h, r := phys.Create(sys, size, b.prop)
		if r != driver.Success {
			err = createError(op, b.dev, int(size), b.prop, r)
			break
		}
		handles = append(handles, h)
		end += size
	}
	if err == nil {
		var maps []*mapping
		if maps, err = b.res.mapRun(op, nil, at, handles, b.access); err == nil {
			return maps, nil
		}
	}
	for _, h := range handles {
		if r := h.Release(); r != driver.Success {
			err = fmt.Errorf("%w (and undoing it failed: cuMemRelease answered %v)", err, r)
		}
	}
	return nil, err
}

// rollback undoes a commit: the chunks from index keep on go back. Nobody uses
// them.
func (b *buffer) rollback(op string, keep int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.uncommit(op, keep)
}

// uncommit gives the chunks from index keep on back. Nobody uses them. The
// caller holds mu for writing.
func (b *buffer) uncommit(op string, keep int) error {
	gone := b.chunks[keep:]
	if len(gone) == 0 {
		return nil
	}
	if err := b.res.unmapRun(op, gone); err != nil {
		return err
	}
	b.committed.Store(gone[0].off)
	b.chunks = b.chunks[:keep]
	clear(gone)
	b.Resize(b.committed.Load())
	return nil
}

// mapped is where the mapped part of the range ends: behind what was clipped
// and waits. The caller holds mu.
func (b *buffer) mapped() uint64 {
	if n := len(b.tail); n > 0 {
		last := b.tail[n-1]
		return last.off + last.phys.Size
	}
	return b.committed.Load()
}

// checkStill refuses a slice of what is no longer in use.
func (b *buffer) checkStill(op string, off, size uint64) error {
	if used := b.used.Load(); off+size > used {
		return core.Error(core.Failure{Op: op, Kind: core.OutOfRange,
			Asked: fmt.Sprintf("bytes %d to %d, with %d in use", off, off+size, used),
			Hint:  "the buffer became shorter since the slice was taken"})
	}
	return nil
}
