package vmm

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Append copies src behind the bytes in use. On a stream it returns when src
// was staged, and the copy is work on that stream; without one (nil) it
// returns when the bytes have landed. Beyond the reserved range it is
// ErrCapacity. Where it fails the buffer is as it was.
func (b *Buffer) Append(s *cuda.Stream, src []byte) error {
	return b.b.append("vmm.Buffer.Append", s, len(src), func(s *cuda.Stream, at cuda.Ptr) error {
		return s.Upload(at, src)
	})
}

// AppendHost copies pinned host memory behind the bytes in use. On a stream it
// returns at once, and src must stay as it is until the copy has run; without
// one (nil) it returns when the bytes have landed.
func (b *Buffer) AppendHost(s *cuda.Stream, src cuda.HostSlice) error {
	return b.b.append("vmm.Buffer.AppendHost", s, src.Len(), func(s *cuda.Stream, at cuda.Ptr) error {
		return s.CopyFromHost(at, src)
	})
}

// AppendSlice copies device memory behind the bytes in use, as work on the
// stream; without one (nil) it returns when the bytes have landed. The source
// may be a part of the buffer itself.
func (b *Buffer) AppendSlice(s *cuda.Stream, src Slice[byte]) error {
	return appendSlice("vmm.Buffer.AppendSlice", b.b, s, src)
}

// AppendPtr copies n bytes at a device address behind the bytes in use, as work
// on the stream; without one (nil) it returns when the bytes have landed. The
// address is the caller's responsibility.
func (b *Buffer) AppendPtr(s *cuda.Stream, src cuda.Ptr, n int) error {
	if n < 0 {
		return core.Invalid("vmm.Buffer.AppendPtr", fmt.Sprintf("%d bytes", n), "lengths are not negative")
	}
	return b.b.append("vmm.Buffer.AppendPtr", s, n, func(s *cuda.Stream, at cuda.Ptr) error {
		return s.Copy(at, src, n)
	})
}

// Resize makes the buffer n bytes long. New bytes are zero, set as work on the
// stream; without one (nil) they are when it returns. A shorter buffer keeps
// its memory until Clip.
func (b *Buffer) Resize(s *cuda.Stream, n int) error {
	return b.b.resize("vmm.Buffer.Resize", s, n)
}

func (b *buffer) resize(op string, s *cuda.Stream, n int) error {
	if n < 0 {
		return core.Invalid(op, fmt.Sprintf("%d bytes", n), "lengths are not negative")
	}
	if err := b.enterGrowth(op, func() uint64 { return uint64(n) }); err != nil {
		return err
	}
	defer b.leave()
	if used := b.used.Load(); uint64(n) > used {
		more := n - int(used)
		return b.appendLocked(op, s, more, func(s *cuda.Stream, at cuda.Ptr) error { return s.Memset(at, 0, more) })
	}
	if err := b.imported.mayGrow(op, b.used.Load(), 0, b.committed.Load()); err != nil {
		return err
	}
	b.used.Store(uint64(n))
	return nil
}

func (b *buffer) append(op string, s *cuda.Stream, n int, fill func(*cuda.Stream, cuda.Ptr) error) error {
	if err := b.enterGrowth(op, b.by(n)); err != nil {
		return err
	}
	defer b.leave()
	return b.appendLocked(op, s, n, fill)
}

// appendLocked sees to the memory for n more bytes and has them filled as work
// on a stream. Where that fails the new memory goes again, after what came under
// way: nothing may land later where the next bytes go.
func (b *buffer) appendLocked(op string, s *cuda.Stream, n int, fill func(*cuda.Stream, cuda.Ptr) error) error {
	to, err := b.longer(op, n)
	if err != nil {
		return err
	}
	on, err := b.stream(op, s)
	if err == nil {
		b.appending = b.copies.begin(on) // leave ends it
		b.mu.RLock()
		err = b.allows(op, on, driver.AccessReadWrite)
		b.mu.RUnlock()
	}
	if err != nil || n == 0 {
		return err
	}
	before, err := b.commit(op, to)
	if err != nil {
		return err
	}
	at := cuda.Ptr(b.res.base) + cuda.Ptr(b.used.Load())
	err = fill(on, at)
	if err == nil && s == nil {
		err = on.Synchronize()
	}
	if err == nil {
		b.used.Store(to)
		return nil
	}
	err = within(op, err)
	undo := on.Synchronize()
	if errors.Is(undo, cuda.ErrClosed) {
		undo = nil // its Close has waited
	}
	if undo == nil && before < len(b.chunks) {
		undo = b.rollback(op, before)
	}
	if undo != nil {
		err = fmt.Errorf("%w (and undoing it failed, so that new memory stays until Clip or Close: %w)", err, undo)
	}
	return err
}

// stream is the stream that an operation runs on: the caller's, or the device's
// own where none was named.
func (b *buffer) stream(op string, s *cuda.Stream) (*cuda.Stream, error) {
	if s == nil {
		t, err := b.dev.Transfer()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		s = t
	}
	if s.Device().System() != b.dev.System() {
		return nil, core.ForeignError(op, "stream")
	}
	if core.StreamOf(s).Closed() {
		return nil, core.ClosedError(op, "stream")
	}
	return s, nil
}

// allows refuses a stream whose device has no such access to the buffer. The
// caller holds mu.
func (b *buffer) allows(op string, s *cuda.Stream, need driver.AccessFlags) error {
	have := b.mode(driver.Location{Type: driver.LocationDevice, ID: int32(s.Device().Ordinal())})
	if have < need {
		return core.Error(core.Failure{Op: op, Kind: core.NotPermitted,
			Asked: fmt.Sprintf("a stream of %v, which has %v to the buffer", s.Device(), AccessMode(have)),
			Hint:  "grant the access with SetAccess, or use a stream of another device"})
	}
	return nil
}
