package vmm

import (
	"fmt"
	"slices"

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
	if err := b.settleTail(op); err != nil {
		return before, err
	}
	if err := b.awaitTail(op, n); err != nil {
		return before, err
	}
	back := 0
	at := committed
	for back < len(b.tail) && at < n {
		at += b.tail[back].phys.Size
		back++
	}
	var maps []*mapping
	if at < n {
		if maps, err = b.create(op, at, n); err != nil {
			return before, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(maps) > 0 {
		last := maps[len(maps)-1]
		at = last.off + last.phys.Size
	}
	b.chunks = append(append(b.chunks, b.tail[:back]...), maps...)
	b.tail = b.tail[back:]
	b.committed.Store(at)
	b.grown.Add(1)
	b.Resize(at)
	b.added = span{committed, at}
	return before, nil
}

// create makes and maps the chunks from offset at to at least n. No lock but
// changes is held while memory is made, which may take long.
func (b *buffer) create(op string, at, n uint64) ([]*mapping, error) {
	if b.imported != nil {
		return nil, b.imported.full(op, at, n)
	}
	sys := b.res.System()
	var handles []*phys.Handle
	var err error
	for end := at; end < n; {
		size := b.plan.next(end, b.res.size-end)
		h, r := phys.Create(sys, size, b.prop)
		if least := b.plan.least(n-end, b.gran); r == driver.OutOfMemory && least < size {
			size = least
			h, r = phys.TryCreate(sys, size, b.prop) // what could be had was asked for
		}
		if r != driver.Success {
			err = createError(op, b.dev, int(size), roundUp(n-at, b.gran), b.prop, r)
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
	return nil, b.res.release(err, handles...)
}

// rollback undoes a commit: the chunks from index keep on go back, to the driver
// or to the tail that they were taken from. Nobody uses them.
func (b *buffer) rollback(op string, keep int) error {
	b.grown.Add(^uint64(0))
	b.added = span{}
	if len(b.tail) == 0 {
		return b.uncommit(op, keep)
	}
	b.mu.Lock()
	b.moveToTail(keep)
	b.mu.Unlock()
	return b.trim(op)
}

// uncommit takes the chunks from index keep on, and the tail, out of use and
// gives them back. Nobody uses them. The caller holds changes.
func (b *buffer) uncommit(op string, keep int) error {
	b.mu.Lock()
	b.chunks, b.tail = append(b.chunks, b.tail...), nil
	gone := b.chunks[keep:]
	b.chunks = b.chunks[:keep]
	if len(gone) > 0 {
		b.committed.Store(gone[0].off)
		b.Resize(gone[0].off)
	}
	b.mu.Unlock()
	err := b.res.unmapRun(op, gone)
	clear(gone)
	return err
}

// moveToTail takes the chunks from index keep on, at least one, out of use. The
// caller holds mu for writing.
func (b *buffer) moveToTail(keep int) {
	b.tail = append(slices.Clone(b.chunks[keep:]), b.tail...)
	clear(b.chunks[keep:])
	b.chunks = b.chunks[:keep]
	b.committed.Store(b.tail[0].off)
	b.Resize(b.tail[0].off)
}

// trim gives back the end of the tail that the GPU has passed. A chunk goes only
// when those behind it do: the tail has no holes. The caller holds changes.
func (b *buffer) trim(op string) error {
	b.mu.Lock()
	first := len(b.tail)
	for first > 0 && b.tail[first-1].clip.done() {
		first--
	}
	gone := b.tail[first:]
	b.tail = b.tail[:first:first]
	b.mu.Unlock()
	return b.res.unmapRun(op, gone)
}

// mapped is where the mapped part of the range ends: behind what was clipped
// and waits. The caller holds mu or changes.
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
			Hint:  "append or resize first; if this was in use before, the buffer became shorter since"})
	}
	return nil
}
