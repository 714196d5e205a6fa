package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
)

// Grow makes room for n more bytes without changing Len: appending that many
// takes no memory then. Clip gives room that is not used back. Past the reserved
// range the error is ErrCapacity. After an error the buffer is as it was.
func (b *Buffer) Grow(n int) error { return b.b.grow("vmm.Buffer.Grow", n) }

// AppendUndefined makes the buffer n bytes longer, without defining what is in
// them, and returns the offset of the first. It puts no work on any stream.
// Goroutines that call it concurrently get parts of their own, for kernels to
// fill. Past the reserved range the error is ErrCapacity. After an error the
// buffer is as it was.
func (b *Buffer) AppendUndefined(n int) (at int, err error) {
	return b.b.appendUndefined("vmm.Buffer.AppendUndefined", n, 1)
}

// grow makes room for n more bytes.
func (b *buffer) grow(op string, n int) error {
	if err := b.enterGrowth(op, b.by(n)); err != nil {
		return err
	}
	defer b.leave()
	to, err := b.longer(op, n, 1)
	if err == nil {
		_, err = b.commit(op, to)
	}
	return err
}

// appendUndefined makes the buffer n bytes longer, in elements of a size, and
// returns how many bytes were in use.
func (b *buffer) appendUndefined(op string, n, size int) (at int, err error) {
	if err := b.enterGrowth(op, b.by(n)); err != nil {
		return 0, err
	}
	defer b.leave()
	to, err := b.longer(op, n, size)
	if err != nil {
		return 0, err
	}
	if _, err := b.commit(op, to); err != nil {
		return 0, err
	}
	at = int(b.used.Load())
	b.used.Store(to)
	return at, nil
}

// by is for enterGrowth: n more bytes, if that many can be.
func (b *buffer) by(n int) func() uint64 {
	return func() uint64 { return b.used.Load() + uint64(max(n, 0)) }
}

// longer returns the length after n more bytes, in elements of a size. The caller
// holds changes.
func (b *buffer) longer(op string, n, size int) (uint64, error) {
	used := b.used.Load()
	if n < 0 {
		return 0, core.Invalid(op, core.Count(n/size, noun(size)), "lengths are not negative; Resize makes a buffer shorter")
	}
	if err := checkWhole(op, used, size); err != nil {
		return 0, err
	}
	if err := b.imported.mayGrow(op, used, uint64(n), b.committed.Load()); err != nil {
		return 0, err
	}
	if uint64(n) > b.res.size-used {
		return 0, core.Error(core.Failure{Op: op, Kind: core.Capacity,
			Asked: fmt.Sprintf("%s, with %d used of %d reserved", core.Count(n, "more byte"), used, b.res.size),
			Hint:  "reserve more when the buffer is made, or vmm.Move it to a larger range without copying"})
	}
	return used + uint64(n), nil
}

// noun is what a length counts.
func noun(size int) string {
	if size == 1 {
		return "byte"
	}
	return "element"
}

// checkWhole refuses bytes in use that are no whole number of elements: what
// came behind them would lie between two elements.
func checkWhole(op string, used uint64, size int) error {
	if used%uint64(size) != 0 {
		return core.Invalid(op, fmt.Sprintf("%s in use for elements of %d", core.Count(used, "byte"), size),
			"resize the buffer to a multiple first")
	}
	return nil
}
