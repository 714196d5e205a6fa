package phys

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Clean sets the memory to zero and waits until it is, as work on a stream of
// the device that it lies on, at an address of its own for that time. Memory
// that Recycle marked may be exported then. The caller has the memory alone, and loses
// its contents.
//
// What the temporary address needs to be given back is tried once more by the
// reclaimer where it fails; the error says so.
func (h *Handle) Clean(op string, on *core.Stream) error {
	sys := h.System()
	if err := on.Use(op, sys); err != nil {
		return err
	}
	defer on.Release()
	p, r := sys.Drv.MemAddressReserve(h.Size, 0, 0)
	if r != driver.Success {
		return sys.CallError(op, driver.CallMemAddressReserve, r, errs.Bytes(h.Size)+" of address space")
	}
	mapped, underWay := false, false
	err := h.zero(op, on, p, &mapped, &underWay)
	if err == nil {
		h.sharing.CompareAndSwap(stale, private)
	}
	giveBack := func() error {
		if h.Lost() != driver.Success {
			return nil // closing drops what lies on a lost device
		}
		if mapped {
			if r := sys.Drv.MemUnmap(p, h.Size); r != driver.Success {
				return sys.CallError(op, driver.CallMemUnmap, r, errs.Bytes(h.Size), h.Devices()...)
			}
			mapped = false
		}
		if r := sys.Drv.MemAddressFree(p, h.Size); r != driver.Success {
			return sys.CallError(op, driver.CallMemAddressFree, r, errs.Bytes(h.Size))
		}
		return nil
	}
	if underWay { // it must not find the address unmapped
		f := new(core.Fence)
		f.AddAllStreams()
		retry(sys, f, giveBack)
		return err
	}
	undo := giveBack()
	if undo == nil || h.Lost() != driver.Success {
		return err
	}
	retry(sys, new(core.Fence), giveBack)
	if err == nil {
		return fmt.Errorf("%w (System.Drain tries it again)", undo)
	}
	return fmt.Errorf("%w (and undoing it failed, which System.Drain tries again: %w)", err, undo)
}

// zero maps the memory at an address, sets it to zero there, and waits.
// underWay says that the waiting failed.
func (h *Handle) zero(op string, on *core.Stream, p driver.Ptr, mapped, underWay *bool) error {
	c, sys := on.Ctx, h.System()
	if r := sys.Drv.MemMap(p, h.Size, 0, h.Driver); r != driver.Success {
		return sys.CallError(op, driver.CallMemMap, r, errs.Bytes(h.Size), h.Devices()...)
	}
	*mapped = true
	access := []driver.AccessDesc{{Location: driver.Location{Type: driver.LocationDevice, ID: int32(c.Device)}, Flags: driver.AccessReadWrite}}
	if r := sys.Drv.MemSetAccess(p, h.Size, access); r != driver.Success {
		return sys.CallError(op, driver.CallMemSetAccess, r, errs.Bytes(h.Size), c.Device)
	}
	if r := sys.Drv.MemsetD8Async(c.Handle, p, 0, h.Size, on.Handle); r != driver.Success {
		return c.CallError(op, driver.CallMemsetD8Async, r, errs.Bytes(h.Size))
	}
	if r := c.Observe(sys.Drv.StreamSynchronize(c.Handle, on.Handle)); r != driver.Success {
		*underWay = true
		return c.CallError(op, driver.CallStreamSynchronize, r, errs.Bytes(h.Size))
	}
	return nil
}
