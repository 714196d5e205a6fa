package vmm

import (
	"fmt"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// DMABuf makes a DMA-BUF descriptor of a part of the range, for network cards
// and other devices. The part must be mapped throughout, with memory of one
// device and one kind; after mapping something else there, make a new one. The
// caller closes the file. The memory is not freed while the descriptor is open, in
// this process or in one that it was sent to.
func (r *Reservation) DMABuf(d *cuda.Device, off, size int) (*os.File, error) {
	const op = "vmm.Reservation.DMABuf"
	in, err := r.acquire(op)
	if err != nil {
		return nil, err
	}
	defer in.closer.Release()
	if off < 0 || size <= 0 {
		return nil, errPart(op, off, size)
	}
	if core.SystemOf(d) == nil {
		return nil, errs.NilDevice(op)
	}
	c, err := core.ContextOf(op, d)
	if err != nil {
		return nil, err
	}
	if c.System() != in.System() {
		return nil, errs.ForeignError(op, "device")
	}
	return in.dmabuf(op, c, uint64(off), uint64(size))
}

// DMABuf makes a DMA-BUF descriptor of the bytes in use from byte from up to, not
// including, byte to, for network cards and other devices, as Reservation.DMABuf
// does. It refers to the memory that is there now: after Clip, growth may map other
// memory at the same place.
func (b *Buffer) DMABuf(from, to int) (*os.File, error) {
	const op = "vmm.Buffer.DMABuf"
	in := b.inner()
	if err := in.enter(op); err != nil {
		return nil, err
	}
	defer in.leave()
	part, err := slice[byte](op, in, from, to)
	if err != nil {
		return nil, err
	}
	if from == to {
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange, Asked: "0 bytes", Hint: "name a part of the buffer"})
	}
	c, err := core.ContextOf(op, in.dev)
	if err != nil {
		return nil, err
	}
	return in.res.dmabuf(op, c, part.off, uint64(to-from))
}

func (r *reservation) dmabuf(op string, c *core.Context, off, size uint64) (*os.File, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.mappedThroughout(op, off, size); err != nil {
		return nil, err
	}
	fd, res := r.System().Drv.MemGetHandleForAddressRange(c.Handle, r.base+driver.Ptr(off), size)
	if res != driver.Success {
		return nil, c.CallError(op, driver.CallMemGetHandleForAddressRange, res,
			fmt.Sprintf("%s at offset %s", errs.Bytes(size), errs.Bytes(off)))
	}
	return os.NewFile(uintptr(fd), "dmabuf"), nil
}

// mappedThroughout refuses a part with a gap, or beyond the range.
func (r *reservation) mappedThroughout(op string, off, size uint64) error {
	end := off
	for i := r.findLocked(off); i < len(r.maps) && r.maps[i].off <= end && end-off < size; i++ {
		end = r.maps[i].off + r.maps[i].phys.Size
	}
	if end < off || end-off < size {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s, of which not all is mapped", errs.Bytes(size), errs.Bytes(off)),
			Hint:  "map memory there first"})
	}
	return nil
}
