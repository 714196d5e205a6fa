package phys

import (
	"encoding/binary"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Export makes a descriptor of the memory, which the caller closes. From then on
// somebody else may hold the memory for ever, so it is marked: no cache and no
// pool may give it to another owner.
func (h *Handle) Export(op string) (fd int, err error) {
	asked := core.Bytes(h.Size)
	switch {
	case h.Imported:
		return -1, core.Error(core.Failure{Op: op, Kind: core.NotSupported, Asked: asked + " of imported memory",
			Hint: "only the process that created the memory exports it: let that one share it"})
	case h.Asked.RequestedHandleTypes&driver.HandlePosixFD == 0:
		return -1, core.Error(core.Failure{Op: op, Kind: core.NotSupported, Asked: asked + " that were created without a descriptor as handle type",
			Hint: "create the memory with vmm.Properties.Handles set to vmm.PosixFD (the default, where location and device take it)"})
	}
	sys := h.System()
	h.exported.Store(true)
	s, r := sys.Drv.MemExportToShareableHandle(h.Driver, driver.HandlePosixFD)
	if r != driver.Success {
		return -1, sys.Fail(op, driver.CallMemExportToShareableHandle, r, asked)
	}
	return int(int32(binary.NativeEndian.Uint32(s[:]))), nil
}

// Exported reports whether the memory was ever exported, or is imported:
// somebody else may hold it, so nobody recycles it.
func (h *Handle) Exported() bool { return h.Imported || h.exported.Load() }

// Import takes the memory behind a descriptor, which stays the caller's and may
// be closed at once. The driver does not tell the size, so it is the exporter's
// word, which mapping proves. The properties are the driver's, with no handle
// type, since only the creator exports.
func Import(op string, s *core.System, fd int, size uint64) (*Handle, error) {
	if r := s.DeviceLost(); r != driver.Success {
		return nil, s.Fail(op, driver.CallMemImportFromShareableHandle, r, "")
	}
	s.PollReclaim()
	var from driver.ShareableHandle
	binary.NativeEndian.PutUint32(from[:], uint32(int32(fd)))
	asked := fmt.Sprintf("%s of file descriptor %d", core.Bytes(size), fd)
	d, r := s.Drv.MemImportFromShareableHandle(from, driver.HandlePosixFD)
	if r != driver.Success {
		return nil, s.Fail(op, driver.CallMemImportFromShareableHandle, r, asked)
	}
	h := New(s, d, size, driver.AllocationProp{})
	h.Imported = true
	prop, r := s.Drv.MemGetAllocationPropertiesFromHandle(d)
	if r != driver.Success {
		err := s.Fail(op, driver.CallMemGetAllocationPropertiesFromHandle, r, asked)
		if undo := h.Release(); undo != driver.Success {
			err = fmt.Errorf("%w (and undoing it failed: %w)", err, h.ReleaseError(op, undo))
		}
		return nil, err
	}
	h.Asked = prop
	return h, nil
}

// ReleaseError is the error of a Release that failed.
func (h *Handle) ReleaseError(op string, r driver.Result) error {
	return h.System().Fail(op, driver.CallMemRelease, r, core.Bytes(h.Size))
}
