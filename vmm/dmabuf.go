package vmm

import (
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// DMABufOptions say how other devices reach the memory of a DMA-BUF. The zero value leaves
// that to the driver.
type DMABufOptions struct {
	// PCIe has them reach it by PCIe, also where the GPU has a faster way to the host, which
	// not all of them can use: on systems with Grace. It needs a driver for CUDA 12.8.
	PCIe bool
}

func (o DMABufOptions) flags() driver.RangeHandleFlags {
	if o.PCIe {
		return driver.RangeHandlePCIe
	}
	return 0
}

// DMABuf makes a DMA-BUF descriptor of a part of the range, for network cards
// and other devices. The part must be mapped throughout, with memory of one
// device and one kind; after mapping something else there, make a new one. The
// caller closes the file. The memory is not freed while the descriptor is open, in
// this process or in one that it was sent to.
func (r *Reservation) DMABuf(d *cuda.Device, off, size int, o DMABufOptions) (*os.File, error) {
	const op = "vmm.Reservation.DMABuf"
	in, err := r.acquire(op)
	if err != nil {
		return nil, err
	}
	defer in.Closer.Release()
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
	return in.DMABuf(op, c, uint64(off), uint64(size), o.flags())
}

// DMABuf makes a DMA-BUF descriptor of the bytes in use from byte from up to, not
// including, byte to, for network cards and other devices, as Reservation.DMABuf
// does. It refers to the memory that is there now: after Clip, growth may map other
// memory at the same place.
func (b *Buffer) DMABuf(from, to int, o DMABufOptions) (*os.File, error) {
	const op = "vmm.Buffer.DMABuf"
	in := b.inner()
	if err := in.enter(op, exporting); err != nil {
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
	return in.res.DMABuf(op, c, part.off, uint64(to-from), o.flags())
}
