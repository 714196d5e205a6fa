package cuda

import (
	"fmt"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

type hostBufferHolder = core.HostBufferHolder

// HostBuffer is pinned host memory: the GPU copies from and to it without help of the
// CPU, at full speed and asynchronously. It comes from a pool, and Close returns it
// there, so a new buffer has the contents that the last user left.
type HostBuffer struct {
	hostBufferHolder
	obj     *core.Object
	closer  life.Closer
	sys     *System
	block   pinnedBlock
	losses  int64 // the System's, when it was made
	bytes   []byte
	watched life.Watched
}

// NewHostBuffer takes n bytes of pinned host memory, usable by every device of
// the System. The caller closes it.
func (d *Device) NewHostBuffer(n int) (*HostBuffer, error) {
	const op = "cuda.Device.NewHostBuffer"
	if err := d.open(op); err != nil {
		return nil, err
	}
	if n <= 0 {
		return nil, errs.Invalid(op, errs.Count(n, "byte"), "ask for at least one byte")
	}
	if uint64(n) > maxHostBytes {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.OutOfMemory,
			Asked: fmt.Sprintf("%s of pinned host memory", errs.Bytes(n)),
			Hint:  "ask for less than " + errs.Bytes(uint64(maxHostBytes))})
	}
	c, err := d.context(op)
	if err != nil {
		return nil, err
	}
	d.sys.core.PollReclaim()
	losses := d.sys.core.Losses()
	b, err := d.sys.pinned.get(op, c, n)
	if err != nil {
		return nil, err
	}
	h := &HostBuffer{obj: new(core.Object), sys: d.sys, block: b, losses: losses, bytes: unsafe.Slice((*byte)(b.mem), n)}
	d.sys.core.Track(h.obj, life.KindHostBuffer, uint64(n))
	h.hostBufferHolder = core.NewHostBufferHolder(h.closeNow)
	h.obj.Watch(&h.watched)
	return h, nil
}

// maxHostBytes is more than any host has; sizes above it would overflow the
// rounding.
const maxHostBytes = 1 << 50

// Bytes returns the memory itself, and nil after Close or CloseAfter. A slice that it
// returned must not be used after that, and neither read nor written while the GPU's
// work on it runs.
func (h *HostBuffer) Bytes() []byte {
	if h.closer.Closed() {
		return nil // the memory is the pool's by now, or another buffer's
	}
	return h.bytes
}

// Ptr returns the address by which kernels of every device reach the memory, and 0
// after Close or CloseAfter.
func (h *HostBuffer) Ptr() Ptr {
	if h.closer.Closed() {
		return 0
	}
	return Ptr(uintptr(h.block.mem))
}

// Len returns the size in bytes.
func (h *HostBuffer) Len() int { return len(h.bytes) }

// inner returns the buffer, or an error for one that no function made.
func (h *HostBuffer) inner(op string) (*HostBuffer, error) {
	if h == nil || h.sys == nil {
		return nil, errs.Invalid(op, "a nil host buffer", "make one with Device.NewHostBuffer")
	}
	return h, nil
}

// Slice returns the part from byte from up to, not including, byte to, for a
// copy. It owns nothing: after Close operations on it return ErrClosed. Of a closed
// buffer it is ErrClosed.
func (h *HostBuffer) Slice(from, to int) (HostSlice, error) {
	const op = "cuda.HostBuffer.Slice"
	if _, err := h.inner(op); err != nil {
		return HostSlice{}, err
	}
	if h.closer.Closed() {
		return HostSlice{}, errs.ClosedError(op, "host buffer")
	}
	if err := errs.CheckSlice(op, from, to, len(h.bytes), "stay inside the buffer"); err != nil {
		return HostSlice{}, err
	}
	return HostSlice{h, from, to - from}, nil
}

// All returns the whole buffer.
func (h *HostBuffer) All() HostSlice {
	return HostSlice{h, 0, len(h.bytes)}
}

// HostSlice is a part of a HostBuffer.
type HostSlice struct {
	buf      *HostBuffer
	off, len int
}

// Len returns the length in bytes.
func (s HostSlice) Len() int { return s.len }

// Bytes returns the memory, under the rules of HostBuffer.Bytes.
func (s HostSlice) Bytes() []byte {
	if s.buf == nil || s.buf.closer.Closed() {
		return nil
	}
	return s.buf.bytes[s.off : s.off+s.len]
}

// use holds the buffer for an operation; the caller calls buf.closer.Release.
func (s HostSlice) use(op string, sys *core.System) error {
	switch {
	case s.buf == nil:
		return errs.Invalid(op, "a zero HostSlice", "take it from HostBuffer.Slice or All")
	case s.buf.sys.core != sys:
		return errs.ForeignError(op, "host buffer")
	case !s.buf.closer.Acquire():
		return errs.ClosedError(op, "host buffer")
	}
	return nil
}

func (s HostSlice) pointer() unsafe.Pointer { return unsafe.Pointer(&s.buf.bytes[s.off]) }

// Close waits for all GPU work that could use the buffer and returns it to the pool.
// What it waits for, and what that costs, is as in the vmm package; CloseAfter is the
// fast way.
func (h *HostBuffer) Close() error {
	const op = "cuda.HostBuffer.Close"
	if _, err := h.inner(op); err != nil {
		return err
	}
	return h.closer.Close(func() error {
		if err := h.sys.waitAll(op); err != nil {
			return err
		}
		return h.release()
	})
}

// CloseAfter takes the buffer out of use at once and gives it back to the pool
// when the work that is on the streams now is done. It never blocks. Without a
// stream it is ErrInvalidArgument; with one that captures a graph it is
// ErrCapturing and nothing has changed.
func (h *HostBuffer) CloseAfter(streams ...*Stream) error {
	const op = "cuda.HostBuffer.CloseAfter"
	if _, err := h.inner(op); err != nil {
		return err
	}
	return life.CloseAfter(&h.closer, h.sys.core, func() (*core.Fence, error) {
		return core.FenceOf(h.sys.core, op, streams)
	}, h.release)
}

// Released returns the end of the buffer's closing: of the one in progress, of the next
// one, or of the one that has ended. From then on its memory is back in the pool.
func (h *HostBuffer) Released() Completion {
	return h.closer.Completion()
}

// closeNow is Close without the wait, for a caller that knows that no work uses
// the buffer.
func (h *HostBuffer) closeNow() error { return h.closer.Close(h.release) }

func (h *HostBuffer) release() error {
	h.sys.pinned.giveBack(h.block, h.losses)
	h.obj.Untrack()
	h.watched.Stop()
	return nil
}
