package phys

import (
	"encoding/binary"
	"errors"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/fd"
)

// ProbeHandleType makes memory with one handle type, exports it, and imports it into this
// process: the only proof that the type works. It returns the call that the driver
// refused, and its result; what it made is given back. The error says that this failed,
// and that the reclaimer tries it again.
func ProbeHandleType(op string, s *core.System, size uint64, prop driver.AllocationProp) (at driver.Call, r driver.Result, left error) {
	on, t := core.DevicesOf(prop.Location), prop.RequestedHandleTypes
	give := func(h *Handle) { left = errors.Join(left, ReleaseAll(op, h)) }
	h, r, _ := Create(s, size, prop, nil)
	if r != driver.Success {
		return driver.CallMemCreate, r, nil
	}
	defer give(h)
	handle, r := s.Drv.MemExportToShareableHandle(h.memory.driver, t)
	if s.Observe(r, on...) != driver.Success {
		return driver.CallMemExportToShareableHandle, r, nil
	}
	if t == driver.HandlePosixFD { // closed before the memory is released, which it pins
		defer func() { _ = fd.Close(int(int32(binary.NativeEndian.Uint32(handle[:])))) }()
	}
	imported, r := s.Drv.MemImportFromShareableHandle(handle, t)
	if s.Observe(r, on...) != driver.Success {
		return driver.CallMemImportFromShareableHandle, r, nil
	}
	give(New(s, imported, size, prop))
	return driver.CallMemImportFromShareableHandle, r, left
}
