package phys

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Clean sets the memory to zero and waits until it is, as work on a stream of
// the device that it lies on, at an address of its own for that time. Memory
// that Recycle gave to its owner may be exported then. The caller has the memory
// alone: nobody has written to it what is to be kept.
func (h *Handle) Clean(op string, on *core.Stream) (err error) {
	c, sys := on.Ctx, h.System()
	p, r := sys.Drv.MemAddressReserve(h.Size, 0, 0)
	if r != driver.Success {
		return sys.Fail(op, driver.CallMemAddressReserve, r, core.Bytes(h.Size)+" of address space")
	}
	undo := func(call driver.Call, r driver.Result) {
		if r == driver.Success || sys.Note(r, h.Devices()...).Lost() {
			return
		}
		failed := sys.Fail(op, call, r, fmt.Sprintf("%s at %#x", core.Bytes(h.Size), uint64(p)))
		if err == nil {
			err = failed
		} else {
			err = fmt.Errorf("%w (and undoing it failed: %w)", err, failed)
		}
	}
	defer func() { undo(driver.CallMemAddressFree, sys.Drv.MemAddressFree(p, h.Size)) }()
	if r := sys.Drv.MemMap(p, h.Size, 0, h.Driver); r != driver.Success {
		return sys.Fail(op, driver.CallMemMap, r, core.Bytes(h.Size), h.Devices()...)
	}
	defer func() { undo(driver.CallMemUnmap, sys.Drv.MemUnmap(p, h.Size)) }()
	access := []driver.AccessDesc{{Location: driver.Location{Type: driver.LocationDevice, ID: int32(c.Device)}, Flags: driver.AccessReadWrite}}
	if r := sys.Drv.MemSetAccess(p, h.Size, access); r != driver.Success {
		return sys.Fail(op, driver.CallMemSetAccess, r, core.Bytes(h.Size), c.Device)
	}
	if r := sys.Drv.MemsetD8Async(c.Handle, p, 0, h.Size, on.Handle); r != driver.Success {
		return c.Fail(op, driver.CallMemsetD8Async, r, core.Bytes(h.Size))
	}
	m, capturing, err := on.Mark(op)
	if err == nil && capturing {
		err = core.CapturingError(op, on)
	}
	if err != nil {
		// The work is under way, and must not find the address unmapped.
		if r := c.Note(sys.Drv.StreamSynchronize(c.Handle, on.Handle)); r != driver.Success && !r.Lost() {
			return fmt.Errorf("%w (and waiting for it failed: %w)", err, c.Fail(op, driver.CallStreamSynchronize, r, ""))
		}
		return err
	}
	if err := m.Wait(op); err != nil {
		return err
	}
	h.sharing.CompareAndSwap(stale, private)
	return nil
}
