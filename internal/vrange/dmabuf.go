package vrange

import (
	"fmt"
	"os"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// DMABuf makes a DMA-BUF descriptor of a part of the range, which must be mapped
// throughout. The caller closes the file.
func (r *Range) DMABuf(op string, c *core.Context, off, size uint64) (*os.File, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.mappedThroughout(op, off, size); err != nil {
		return nil, err
	}
	fd, res := r.System().Drv.MemGetHandleForAddressRange(c.Handle, r.Base+driver.Ptr(off), size)
	if res != driver.Success {
		return nil, c.CallError(op, driver.CallMemGetHandleForAddressRange, res,
			fmt.Sprintf("%s at offset %s", errs.Bytes(size), errs.Bytes(off)))
	}
	return os.NewFile(uintptr(fd), "dmabuf"), nil
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
