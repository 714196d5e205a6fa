package vrange

import (
	"fmt"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// flagsSince is the first version of the driver that takes flags.
const flagsSince = 12080

// DMABuf makes a DMA-BUF descriptor of a part of the range, which must be mapped
// throughout. The caller closes the file.
func (r *Range) DMABuf(op string, c *core.Context, off, size uint64, flags driver.RangeHandleFlags) (*os.File, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.mappedThroughout(op, off, size); err != nil {
		return nil, err
	}
	fd, res := r.System().Drv.MemGetHandleForAddressRange(c.Handle, r.Base+driver.Ptr(off), size, flags)
	if res == driver.InvalidValue && flags != 0 {
		if version, _ := r.System().Drv.DriverGetVersion(); version < flagsSince {
			return nil, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: "a DMA-BUF that is reached by PCIe",
				Hint: fmt.Sprintf("it needs a driver for CUDA 12.8, and this one is for %d.%d: do without PCIe", version/1000, version%1000/10)})
		}
	}
	if res != driver.Success {
		return nil, c.CallError(op, driver.CallMemGetHandleForAddressRange, res,
			fmt.Sprintf("%s at offset %s", errs.Bytes(size), errs.Bytes(off)))
	}
	f, now := os.NewFile(uintptr(fd), "dmabuf"), time.Now()
	for m := range r.maps.from(off) {
		if m.Off >= off+size {
			break
		}
		m.Memory.NoteDMABuf(f, now)
	}
	return f, nil
}

// mappedThroughout refuses a part with a gap, or beyond the range.
func (r *Range) mappedThroughout(op string, off, size uint64) error {
	end := off
	for m := range r.maps.from(off) {
		if m.Off > end || end-off >= size {
			break
		}
		if err := m.hereLocked(op); err != nil {
			return err
		}
		end = m.end()
	}
	if end < off || end-off < size {
		return errs.New(errs.Failure{Op: op, Kind: errs.OutOfRange,
			Asked: fmt.Sprintf("%s at offset %s, of which not all is mapped", errs.Bytes(size), errs.Bytes(off)),
			Hint:  "map memory there first"})
	}
	return nil
}
