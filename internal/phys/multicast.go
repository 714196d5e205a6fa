package phys

import (
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// A multicast object is a handle too: it is mapped, exported and released as
// memory is. It lies nowhere and takes no memory, so it is neither counted as
// memory nor as memory that was shared.

// CreateMulticast makes a multicast object.
func CreateMulticast(op string, s *core.System, p driver.MulticastProp) (*Handle, error) {
	s.PollReclaim()
	h, r := s.Drv.MulticastCreate(p)
	if r != driver.Success {
		return nil, s.CallError(op, driver.CallMulticastCreate, r, multicastAsked(p))
	}
	return newMulticast(s, h, p.Size, driver.HandleTypes(p.HandleTypes)), nil
}

func multicastAsked(p driver.MulticastProp) string {
	return errs.Bytes(p.Size) + " for " + errs.Count(uint64(p.NumDevices), "device")
}

func newMulticast(s *core.System, h driver.MemHandle, size uint64, types driver.HandleTypes) *Handle {
	p := &Handle{Size: size}
	p.memory.init(h)
	p.Asked.RequestedHandleTypes = types
	p.refs.Store(1)
	s.Track(p, life.KindMulticast, size)
	return p
}

// ExportMulticast makes a shareable handle of a multicast object, of exactly one
// type. A descriptor is the caller's to close.
func (h *Handle) ExportMulticast(op string, t driver.HandleTypes) (driver.ShareableHandle, error) {
	var none driver.ShareableHandle
	f := errs.Failure{Op: op, Kind: errs.NotSupported}
	switch {
	case h.Imported:
		f.Asked, f.Hint = "an imported multicast object", "only the process that created it shares it: let that one do it"
		return none, errs.New(f)
	case h.Asked.RequestedHandleTypes&t == 0:
		f.Asked, f.Hint = "a multicast object without this handle type", "create it with multicast.Properties.Handles"
		return none, errs.New(f)
	}
	d, err := h.Use(op)
	if err != nil {
		return none, err
	}
	defer h.Done()
	s, r := h.System().Drv.MemExportToShareableHandle(d, t)
	if r != driver.Success {
		return none, h.System().CallError(op, driver.CallMemExportToShareableHandle, r, "a multicast object of "+errs.Bytes(h.Size))
	}
	return s, nil
}

// ImportMulticast takes the multicast object behind a shareable handle, which
// stays the caller's. The driver tells nothing of it, so the size is the
// exporter's word, which mapping proves.
func ImportMulticast(op string, s *core.System, from driver.ShareableHandle, t driver.HandleTypes, size uint64) (*Handle, error) {
	s.PollReclaim()
	d, r := s.Drv.MemImportFromShareableHandle(from, t)
	if r != driver.Success {
		return nil, s.CallError(op, driver.CallMemImportFromShareableHandle, r, "a multicast object of "+errs.Bytes(size))
	}
	h := newMulticast(s, d, size, driver.HandleNone)
	h.Imported = true
	return h, nil
}

// IsMemory reports whether the driver knows the handle as ordinary memory. It tells
// no properties of a multicast object.
func (h *Handle) IsMemory() bool {
	p, r := h.System().Drv.MemGetAllocationPropertiesFromHandle(h.memory.driver) // just imported
	return r == driver.Success && p.Type == driver.AllocationPinned
}
