package vmm

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Grow commits memory for n more bytes without changing Len, so that appending them
// creates none. Clip frees memory that is not used. Growing past the reserved range
// returns ErrCapacity. After an error the buffer is unchanged.
func (b *Buffer) Grow(n int) error { return b.inner().grow("vmm.Buffer.Grow", n, 1) }

// AppendUndefined makes the buffer n bytes longer and returns the offset of the first.
// The contents of the new bytes are undefined: kernels can write them. It submits no
// GPU work. Goroutines that call it concurrently get separate parts. Growing past the
// reserved range returns ErrCapacity. After an error the buffer is unchanged.
func (b *Buffer) AppendUndefined(n int) (at int, err error) {
	return b.inner().appendUndefined("vmm.Buffer.AppendUndefined", n, 1)
}

// grow commits memory for n more bytes, in elements of a size.
func (b *buffer) grow(op string, n, size int) error {
	return b.withRoom(func() error {
		if err := b.enterGrowth(op, (*buffer).plus, n); err != nil {
			return err
		}
		defer b.leave()
		to, err := b.longerLocked(op, n, size)
		if err == nil {
			_, err = b.commitLocked(op, to)
		}
		return err
	})
}

// appendUndefined makes the buffer n bytes longer, in elements of a size, and
// returns how many bytes were in use.
func (b *buffer) appendUndefined(op string, n, size int) (at int, err error) {
	err = b.withRoom(func() error {
		if err := b.enterGrowth(op, (*buffer).plus, n); err != nil {
			return err
		}
		defer b.leave()
		to, err := b.longerLocked(op, n, size)
		if err == nil { // no late copy of an append that failed overwrites what the caller writes
			err = b.res.System().AwaitUnsettled(op)
		}
		if err == nil {
			_, err = b.commitLocked(op, to)
		}
		if err != nil {
			return err
		}
		at = int(b.used.Load())
		b.used.Store(to)
		return nil
	})
	return at, err
}

// plus returns the length after n more bytes, for enterGrowth.
func (b *buffer) plus(n int) uint64 { return b.used.Load() + uint64(max(n, 0)) }

// longerLocked returns the length after n more bytes, in elements of a size. The caller
// holds changes.
func (b *buffer) longerLocked(op string, n, size int) (uint64, error) {
	used := b.used.Load()
	if n < 0 {
		return 0, errs.Invalid(op, counted(n, size), "lengths are not negative; Resize makes a buffer shorter")
	}
	if err := checkWhole(op, used, size); err != nil {
		return 0, err
	}
	if err := b.imported.mayGrow(op, used, uint64(n), b.committed.Load(), size); err != nil {
		return 0, err
	}
	if uint64(n) > b.res.Size-used {
		return 0, b.fail(errs.Failure{Op: op, Kind: errs.Capacity,
			Asked: fmt.Sprintf("%s, with %d used of %d reserved", errs.Count(n/size, "more "+noun(size)), used/uint64(size), b.res.Size/uint64(size)),
			Hint:  "reserve more when the buffer is made, or Move it to a larger range, without a copy"})
	}
	return used + uint64(n), nil
}

// counted writes bytes as the caller counts them, in elements of a size.
func counted[N int | uint64](bytes N, size int) string { return errs.Count(bytes/N(size), noun(size)) }

// noun returns what a length counts.
func noun(size int) string {
	if size == 1 {
		return "byte"
	}
	return "element"
}

// checkWhole refuses bytes in use that are not a whole number of elements: the next
// element would not be aligned.
func checkWhole(op string, used uint64, size int) error {
	if used%uint64(size) != 0 {
		return errs.Invalid(op, fmt.Sprintf("%s in use for elements of %d", errs.Count(used, "byte"), size),
			"resize the buffer to a multiple first")
	}
	return nil
}

// enterGrowth starts a change that commits memory for the first to(b, n) bytes, unless a Host
// function uses memory that must be freed first. A closure would be allocated by each append.
func (b *buffer) enterGrowth(op string, to func(b *buffer, n int) uint64, n int) error {
	return b.enterLonger(op, resizing, to, n)
}

func (b *buffer) enterLonger(op string, o operation, to func(b *buffer, n int) uint64, n int) error {
	if err := b.enter(op, o); err != nil {
		return err
	}
	if at := b.committed.Load(); to(b, n) > at && b.finalTail() {
		if err := b.res.Views.None(op, at, vrange.End); err != nil {
			b.leave()
			return err
		}
	}
	return nil
}

// commitLocked commits memory for the first n bytes, and returns how many chunks there
// were before, for rollbackLocked. After an error nothing has changed. The caller holds
// changes.
//
// Clipped chunks that are still mapped are taken back first, which costs no driver
// call; if the GPU has not passed them yet, commitLocked waits until it has.
func (b *buffer) commitLocked(op string, n uint64) (before int, err error) {
	before = len(b.chunks)
	committed := b.committed.Load()
	if n <= committed {
		return before, nil
	}
	if err := b.settleTailLocked(op); err != nil {
		return before, err
	}
	if err := b.awaitTailLocked(context.Background(), op, n); err != nil {
		return before, err
	}
	back := 0
	at := committed
	for back < len(b.tail) && at < n {
		at += b.tail[back].Memory.Size
		back++
	}
	var maps []*vrange.Mapping
	if at < n {
		if maps, err = b.createLocked(op, at, n); err != nil {
			return before, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.chunks = append(b.chunks, b.tail[:back]...)
	b.tail = b.tail[back:]
	b.committed.Store(at)
	if len(maps) > 0 {
		b.addLocked(maps)
	}
	b.grown.Add(1)
	b.SetBytes(b.committed.Load())
	return before, nil
}

// createLocked creates and maps the chunks from offset at to at least n. It holds no
// lock but changes while it creates memory, which may take long.
func (b *buffer) createLocked(op string, at, n uint64) ([]*vrange.Mapping, error) {
	if b.imported != nil && !b.imported.own.Load() {
		return nil, b.imported.full(op, at, n, 1)
	}
	sys := b.res.System()
	var handles []*phys.Handle
	var err error
	for end := at; end < n; {
		size := b.plan.next(end, b.res.Size-end)
		h, r, short := phys.Create(sys, size, b.prop, b.account)
		if least := b.plan.least(n-end, b.gran); (r == driver.OutOfMemory || short != nil) && least < size {
			size = least
			h, r, short = phys.TryCreate(sys, size, b.prop, b.account) // Create has freed all that it could
		}
		if short != nil || r != driver.Success {
			err = createError(op, b.Called(), b.dev, int(size), roundUp(n-at, b.gran), end-at, b.prop, r, short)
			break
		}
		handles = append(handles, h)
		end += size
	}
	if err == nil {
		var maps []*vrange.Mapping
		if maps, err = b.res.Map(op, nil, at, handles, b.access); err == nil {
			return maps, nil
		}
	}
	return nil, phys.Abandon(op, err, handles...)
}

// rollbackLocked undoes a commit: the chunks from index keep on, at least one, go to the
// tail, which most of them were taken from, and from there to the driver. No GPU work uses
// them. If a Host function still uses clipped memory, they stay in the tail until the clip
// that waits for the function frees it.
func (b *buffer) rollbackLocked(op string, keep int) error {
	b.grown.Add(^uint64(0))
	b.mu.Lock()
	for i := range b.chunks[keep:] {
		if c := &b.chunks[keep+i]; c.clip == nil {
			c.clip = unused
		}
	}
	b.moveToTailLocked(keep)
	b.mu.Unlock()
	if _, uses := b.res.Views.Over(b.committed.Load(), vrange.End); uses {
		return nil
	}
	return b.trimLocked(op)
}

// settleTailLocked removes a tail that growth must not take back: it waits until the GPU
// has passed the whole tail and frees it. No Host function uses it: enterGrowth has
// looked. The caller holds changes.
func (b *buffer) settleTailLocked(op string) error {
	if !b.finalTail() {
		return nil
	}
	if err := b.awaitTailLocked(context.Background(), op, b.res.Size); err != nil {
		return err
	}
	return b.trimLocked(op)
}
