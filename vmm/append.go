package vmm

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Append copies src behind the bytes in use and returns the offset of its first
// byte. On a stream it returns once src is staged, and the copy is work on that
// stream; without one (nil) it returns when the bytes have arrived. Growing past the
// reserved range returns ErrCapacity. After an error the buffer is unchanged.
//
// Goroutines may append concurrently: each gets a part of its own, in the order
// of their calls. Appends on different streams complete in no particular order.
//
// On a stream that captures a graph the buffer becomes longer at once, and every
// launch of the graph writes the same bytes at the same place. After an error there
// nothing of the append is in the graph, and new memory stays until Clip or Close.
func (b *Buffer) Append(s *cuda.Stream, src []byte) (at int, err error) {
	return b.inner().append("vmm.Buffer.Append", s, len(src), 1, func(s *cuda.Stream, at cuda.Ptr) error {
		return s.Upload(at, src)
	})
}

// AppendHost copies pinned host memory behind the bytes in use and returns the
// offset of its first byte. On a stream it returns at once, and src must not change
// until the copy has run; without one (nil) it returns when the bytes have arrived.
// See Append.
func (b *Buffer) AppendHost(s *cuda.Stream, src cuda.HostSlice) (at int, err error) {
	return b.inner().appendHost("vmm.Buffer.AppendHost", s, src, 1)
}

func (b *buffer) appendHost(op string, s *cuda.Stream, src cuda.HostSlice, size int) (at int, err error) {
	return b.append(op, s, src.Len(), size, func(s *cuda.Stream, at cuda.Ptr) error {
		return s.CopyFromHost(at, src)
	})
}

// AppendSlice copies device memory behind the bytes in use, as work on the
// stream, and returns the offset of its first byte; without a stream (nil) it
// returns when the bytes have arrived. The source may be a part of the buffer
// itself. See Append.
func (b *Buffer) AppendSlice(s *cuda.Stream, src Slice[byte]) (at int, err error) {
	return appendSlice("vmm.Buffer.AppendSlice", b.inner(), s, src)
}

// AppendPtr copies n bytes at a device address behind the bytes in use, as work
// on the stream, and returns the offset of the first; without a stream (nil) it
// returns when the bytes have arrived. The address is not checked.
// See Append.
func (b *Buffer) AppendPtr(s *cuda.Stream, src cuda.Ptr, n int) (at int, err error) {
	return b.inner().append("vmm.Buffer.AppendPtr", s, n, 1, func(s *cuda.Stream, at cuda.Ptr) error {
		return s.Copy(at, src, n)
	})
}

// Resize makes the buffer n bytes long. New bytes are set to zero, as work on the
// stream; without one (nil) Resize returns when they are. A shorter buffer keeps its
// memory until Clip. The next append writes there at once: order its stream behind work on
// other streams that still uses those bytes, earlier appends included.
func (b *Buffer) Resize(s *cuda.Stream, n int) error {
	return b.inner().resize("vmm.Buffer.Resize", s, n, 1)
}

// resize makes the buffer n bytes long, in elements of a size.
func (b *buffer) resize(op string, s *cuda.Stream, n, size int) error {
	return b.withRoom(func() error { return b.resizeOnce(op, s, n, size) })
}

func (b *buffer) resizeOnce(op string, s *cuda.Stream, n, size int) error {
	if n < 0 {
		return errs.Invalid(op, counted(n, size), "lengths are not negative")
	}
	o := resizing
	if b != nil && uint64(n) <= b.used.Load() {
		o = shortening
	}
	if err := b.enterLonger(op, o, func(_ *buffer, n int) uint64 { return uint64(n) }, n); err != nil {
		return err
	}
	defer b.leave()
	if used := b.used.Load(); uint64(n) > used {
		if err := b.allow(op, resizing); err != nil {
			return err // it was longer before this change began
		}
		more := n - int(used)
		_, err := b.appendLocked(op, s, more, size, func(s *cuda.Stream, at cuda.Ptr) error { return s.Memset(at, 0, more) })
		return err
	}
	if s != nil {
		if _, err := b.stream(op, s); err != nil {
			return err
		}
	}
	if err := b.imported.mayGrow(op, b.used.Load(), 0, b.committed.Load(), size); err != nil {
		return err
	}
	if err := b.othersSeeLocked(op, uint64(n), size); err != nil {
		return err
	}
	b.used.Store(uint64(n))
	return nil
}

func (b *buffer) append(op string, s *cuda.Stream, n, size int, fill func(*cuda.Stream, cuda.Ptr) error) (at int, err error) {
	err = b.withRoom(func() error {
		if err := b.enterGrowth(op, (*buffer).plus, n); err != nil {
			return err
		}
		defer b.leave()
		at, err = b.appendLocked(op, s, n, size, fill)
		return err
	})
	return at, err
}

// appendLocked commits memory for n more bytes, in elements of a size, and calls fill
// to submit their contents. It returns how many bytes were in use before. If anything
// fails it waits for what was submitted and then gives the new memory back. If that wait
// fails, too, the next append is ordered behind the stream. The caller holds changes.
func (b *buffer) appendLocked(op string, s *cuda.Stream, n, size int, fill func(*cuda.Stream, cuda.Ptr) error) (at int, err error) {
	to, err := b.longerLocked(op, n, size)
	if err != nil {
		return 0, err
	}
	on, err := b.stream(op, s)
	if err == nil { // no late copy of an append that failed overwrites this one
		err = core.StreamOf(on).AfterUnsettled(op)
	}
	if err == nil {
		b.appending = b.copies.begin(on) // leave ends it
		b.mu.RLock()
		err = b.allowsLocked(op, on, driver.AccessReadWrite)
		b.mu.RUnlock()
	}
	if err != nil {
		return 0, err
	}
	at = int(b.used.Load())
	if n == 0 {
		return at, nil
	}
	before, err := b.commitLocked(op, to)
	if err != nil {
		return 0, err
	}
	err = fill(on, cuda.Ptr(b.res.Base)+cuda.Ptr(at))
	if err == nil && s == nil {
		err = on.Synchronize()
	}
	if err == nil {
		b.used.Store(to)
		return at, nil
	}
	err = within(op, err)
	undo := on.Synchronize()
	if errors.Is(undo, cuda.ErrClosed) {
		undo = nil // its Close has waited
	}
	if undo == nil && before < len(b.chunks) {
		undo = b.rollbackLocked(op, before)
	}
	switch {
	case undo == nil:
	case errors.Is(undo, cuda.ErrCapturing): // the stream cannot be waited for
		err = fmt.Errorf("%w (new memory stays until Clip or Close)", err)
	case errors.Is(err, cuda.ErrDeviceLost) && errors.Is(undo, cuda.ErrDeviceLost): // it says the same
		err = fmt.Errorf("%w (new memory stays until Clip or Close)", err)
	default:
		err = fmt.Errorf("%w (and undoing it failed, so that new memory stays until Clip or Close: %w)", err, undo)
	}
	return 0, err
}

// stream returns the stream that an operation runs on: the caller's, or the device's
// own if the caller named none.
func (b *buffer) stream(op string, s *cuda.Stream) (*cuda.Stream, error) {
	if s == nil {
		t, err := b.dev.Transfer()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		if err := core.StreamOf(t).Uncaptured(op, func() error { return nil }); err != nil {
			return nil, err // another library captures it: its work could not be waited for
		}
		s = t
	}
	in := core.StreamOf(s)
	if err := in.UseWithoutWork(op, b.res.System()); err != nil {
		return nil, err
	}
	in.Release()
	return s, nil
}

// allowsLocked refuses a stream whose device has no such access to the buffer. The
// caller holds mu.
func (b *buffer) allowsLocked(op string, s *cuda.Stream, need driver.AccessFlags) error {
	have := b.access.Mode(driver.Location{Type: driver.LocationDevice, ID: int32(s.Device().Ordinal())})
	if have < need {
		hint := "grant the access with SetAccess, or use a stream of another device"
		if b.imported != nil && need > b.imported.most {
			hint = b.imported.readOnlyHint()
		}
		return b.fail(errs.Failure{Op: op, Kind: errs.NotPermitted,
			Asked: fmt.Sprintf("a stream of %v, whose access to the buffer is %v", s.Device(), AccessMode(have)), Hint: hint})
	}
	return nil
}
