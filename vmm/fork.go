package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// ForkOptions describe what Fork makes. The zero value is a range as large as the
// old buffer's.
type ForkOptions struct {
	// Reserve is how far the new buffer can grow, in bytes, rounded up to the
	// granularity. 0 is the size of the old buffer's range.
	Reserve int
	// Hint and Align are those of BufferOptions. An Align of 0 is the old buffer's.
	Hint  cuda.Ptr
	Align int
}

// Fork makes a second buffer that begins with the first n bytes of another, which
// must be in use. From this common prefix on the two grow independently. The caller
// closes both, in any order.
//
// Chunks that lie entirely in the prefix are shared: they take no memory and are not
// copied. The rest of the prefix, less than a chunk, is copied to memory of the new
// buffer's own, as work on the stream; without one (nil) Fork returns when the copy
// has completed. Work that still writes the prefix must be ordered before the copy, by
// streams or events.
//
// Each buffer appends to memory of its own, so that the growth of one never shows in
// the other. To preserve that, neither can be made shorter than what it shares until
// the others are closed (ErrInUse); BufferStats.Shared is the number of bytes shared.
// Explicit copies to the shared bytes show in all.
//
// A fork has the same kind of memory, chunks and access as the old buffer. Memory
// of another process is not forked (ErrNotSupported), nor is a buffer that was
// moved (ErrMoved).
func (b *Buffer) Fork(s *cuda.Stream, n int, o ForkOptions) (*Buffer, error) {
	fork, err := b.inner().fork("vmm.Buffer.Fork", s, n, 1, o)
	if err != nil {
		return nil, err
	}
	return fork.public(), nil
}

// fork forks the first n bytes, in elements of a size.
func (b *buffer) fork(op string, s *cuda.Stream, n, size int, o ForkOptions) (f *buffer, err error) {
	err = b.withRoom(func() error {
		f, err = b.forkOnce(op, s, n, size, o)
		return err
	})
	return f, err
}

func (b *buffer) forkOnce(op string, s *cuda.Stream, n, size int, o ForkOptions) (*buffer, error) {
	if err := b.enter(op, forking); err != nil {
		return nil, err
	}
	defer b.leave()
	if err := b.mayFork(op, n, size, o); err != nil {
		return nil, err
	}
	on, err := b.stream(op, s)
	if err != nil {
		return nil, err
	}
	b.appending = b.copies.begin(on) // leave ends it
	reserve := uint64(o.Reserve)
	if reserve == 0 {
		reserve = b.res.Size
	}
	f, err := b.twin(op, reserve, ReserveOptions{Hint: o.Hint, Align: o.Align})
	if err != nil {
		return nil, err
	}
	f.account = b.account.Twin(f.inUse)
	handles, rest, err := b.prefixLocked(op, f, uint64(n))
	if err != nil {
		return nil, f.res.Abandon(op, err)
	}
	if err := f.mapChunks(op, handles); err != nil {
		return nil, err
	}
	if rest > 0 {
		off := cuda.Ptr(uint64(n) - rest)
		if err := b.copyRest(op, on, f, off, int(rest)); err != nil {
			return nil, f.discard(op, err, nil)
		}
		if err := done(op, s, on); err != nil {
			return nil, f.discard(op, err, core.StreamOf(on))
		}
	}
	f.used.Store(uint64(n))
	f.track(f.committed.Load(), b.Label())
	return f, nil
}

// mayFork refuses a buffer or a prefix that cannot be forked.
func (b *buffer) mayFork(op string, n, size int, o ForkOptions) error {
	if b.imported != nil {
		return b.fail(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: "a prefix of imported memory",
			Hint: "what its owner does with it shows in every prefix: append a Slice of it to a buffer of your own"})
	}
	if n < 0 {
		return errs.Invalid(op, counted(n, size), "lengths are not negative")
	}
	if o.Reserve != 0 && (o.Reserve < n || o.Reserve > memspec.MaxBytes) {
		return errs.Invalid(op, fmt.Sprintf("a range of %s for a prefix of %d", errs.Count(o.Reserve, "byte"), n),
			"reserve 0 for as much as the old buffer has, or at least the prefix")
	}
	return b.checkStill(op, forking, 0, uint64(n), size)
}

// prefixLocked returns the chunks of the first n bytes, each with a reference: those
// that lie entirely in them, and a new one for the rest, which the fork pays for.
func (b *buffer) prefixLocked(op string, f *buffer, n uint64) (handles []*phys.Handle, rest uint64, err error) {
	for _, c := range b.chunks {
		if rest = n - c.Off; rest < c.Memory.Size {
			break
		}
		rest = 0
		c.Memory.Retain()
		handles = append(handles, c.Memory)
	}
	if rest == 0 {
		return handles, 0, nil
	}
	size := min(b.plan.least(rest, b.gran), f.res.Size-(n-rest))
	h, r, short := phys.Create(b.res.System(), size, b.prop, f.account)
	if short != nil || r != driver.Success {
		return nil, 0, phys.Abandon(op, createError(op, b.Called(), b.dev, int(size), size, 0, b.prop, r, short), handles...)
	}
	return append(handles, h), rest, nil
}

// copyRest submits the copy of the bytes that are not shared.
func (b *buffer) copyRest(op string, on *cuda.Stream, f *buffer, off cuda.Ptr, n int) error {
	b.mu.RLock()
	err := b.allowsLocked(op, on, driver.AccessReadWrite)
	if err == nil {
		err = wrap(op, on.Copy(cuda.Ptr(f.res.Base)+off, cuda.Ptr(b.res.Base)+off, n))
	}
	b.mu.RUnlock()
	return err
}

// othersSeeLocked refuses to make the buffer shorter than what another one sees: later
// appends would overwrite those bytes. A fork sees the whole chunks that it shares, and
// a buffer that was moved sees its own length until it is torn down. The caller holds
// changes.
func (b *buffer) othersSeeLocked(op string, n uint64, size int) error {
	refuse := func(end uint64, why, hint string) error {
		return b.fail(errs.Failure{Op: op, Kind: errs.InUse,
			Asked: fmt.Sprintf("a length of %s, with %d that %s", counted(n, size), end/uint64(size), why), Hint: hint})
	}
	for past := b.pastLocked(); past != nil; past = past.pastLocked() {
		end, hint := past.used.Load(), "close that one first"
		if past.closer.Closed() { // work that its CloseAfter named may still read it
			hint = "it is closing: wait for its Released, or call System.Drain"
		}
		if end > n {
			return refuse(end, fmt.Sprintf("the buffer at %#x still sees, from which this one was moved", uint64(past.res.Base)), hint)
		}
	}
	for i := len(b.chunks) - 1; i >= 0; i-- {
		c := b.chunks[i]
		end := c.Off + c.Memory.Size
		if end <= n {
			return nil
		}
		mappings, own := c.Memory.Mappings.Load(), int32(1) // in this order: earlier buffers only unmap meanwhile, so own is never too large
		for past := b.pastLocked(); past != nil; past = past.pastLocked() {
			own += past.res.Count(c.Memory)
		}
		if mappings > own {
			return refuse(end, "are shared with forks", "close the others first, or Fork a shorter prefix and use that")
		}
	}
	return nil
}

// pastLocked returns the buffer that b was moved from, nil once that is torn down. Only
// changes of the last successor follow the chain; the caller holds its changes.
func (b *buffer) pastLocked() *buffer {
	for b.moved != nil && b.moved.gone.Load() {
		b.moved = b.moved.moved
	}
	return b.moved
}
