package phys

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Export makes a descriptor of the memory, which the caller closes, before it
// gives up its count. From then on other processes may hold the memory for ever,
// so it is marked (see Exported). Memory that another owner had is refused, and so is
// imported memory without a kept descriptor.
func (h *Handle) Export(op string) (fd int, err error) { return h.exportFD(op, exported) }

// ExportFollowed is Export for processes that unmap the memory when they are told, and say so. It
// counts as followed as long as nothing else exports it.
func (h *Handle) ExportFollowed(op string) (fd int, err error) { return h.exportFD(op, followed) }

func (h *Handle) exportFD(op string, to int32) (fd int, err error) {
	if h.Imported {
		return h.passOn(op)
	}
	s, err := h.export(op, driver.HandlePosixFD, to)
	if err != nil {
		return -1, err
	}
	return int(int32(binary.NativeEndian.Uint32(s[:]))), nil
}

// ExportFabric makes a fabric handle of the memory, otherwise as Export does. It
// pins nothing: the caller keeps its count until the receivers have imported the
// memory.
func (h *Handle) ExportFabric(op string) (driver.ShareableHandle, error) {
	return h.export(op, driver.HandleFabric, exported)
}

func (h *Handle) export(op string, t driver.HandleTypes, to int32) (s driver.ShareableHandle, err error) {
	asked := errs.Bytes(h.Size)
	if err := Exportable(op, t, h.Asked, h.Imported, h.Size); err != nil {
		return s, err
	}
	d, err := h.Use(op) // before the memory is marked: other memory would not be
	if err != nil {
		return s, err
	}
	defer h.Done()
	if !h.share(to) {
		return s, errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted, Asked: asked + " with what an earlier owner left in them",
			Hint: "export memory of your own: what a pool recycles is never exported"})
	}
	if r := h.Lost(); r != driver.Success {
		return s, errs.New(errs.Failure{Op: op, Call: driver.CallMemExportToShareableHandle, Result: r, Asked: asked})
	}
	sys := h.System()
	s, r := sys.Drv.MemExportToShareableHandle(d, t)
	if r != driver.Success {
		return s, sys.CallError(op, driver.CallMemExportToShareableHandle, r, asked, h.Devices()...)
	}
	return s, nil
}

// Exportable says why memory cannot be exported by any of the handle types,
// without asking the driver.
func Exportable(op string, by driver.HandleTypes, asked driver.AllocationProp, imported bool, size uint64) error {
	f := errs.Failure{Op: op, Kind: errs.NotSupported}
	switch {
	case asked.RequestedHandleTypes&by != 0:
		return nil
	case imported:
		f.Asked, f.Hint = errs.Bytes(size)+" of imported memory", passOnHint
		if asked.RequestedHandleTypes != driver.HandleNone {
			f.Asked += " by fabric handle"
			f.Hint = "memory is passed on by descriptor: set the handle type to vmm.PosixFD"
		}
	case asked.Location.Type == driver.LocationHost:
		f.Asked = errs.Bytes(size) + " of host memory"
		f.Hint = "create it on a NUMA node (cuda.OnHostNUMA), whose memory can be shared"
	case by == driver.HandleFabric:
		f.Asked = errs.Bytes(size) + " that were created without the fabric as handle type"
		f.Hint = "create the memory with vmm.Properties.Handles set to vmm.Fabric, alone or with vmm.PosixFD, or to vmm.PreferFabric"
		if asked.RequestedHandleTypes&driver.HandlePosixFD != 0 {
			f.Hint = "within one host share it by descriptor (vmm.PosixFD); otherwise " + f.Hint
		}
	default:
		f.Asked = errs.Bytes(size) + " that were created without the descriptor as handle type"
		f.Hint = "create the memory with vmm.Properties.Handles set to vmm.PosixFD, which is the default where location and device take it"
	}
	return errs.New(f)
}

// The states of memory that matter to sharing, in the order in which one replaces another.
const (
	private int32 = iota
	// followed memory is held by followers of publications alone, which give it back.
	followed
	// exported memory may be held by others for ever.
	exported
	// stale memory may hold what an earlier owner left. It is never exported, and exported memory
	// never becomes stale.
	stale
)

// share marks the memory as followed or exported, unless it is stale.
func (h *Handle) share(to int32) bool {
	for {
		switch now := h.sharing.Load(); {
		case now == stale:
			return false
		case now >= to || h.sharing.CompareAndSwap(now, to):
			return true
		}
	}
}

// Exported reports whether the memory was ever exported, or is imported. Another
// process may hold it, so no cache and no pool gives it to another owner.
func (h *Handle) Exported() bool { return h.Imported || shared(h.sharing.Load()) }

func shared(state int32) bool { return state == followed || state == exported }

// Followed reports whether the memory was exported to followers alone.
func (h *Handle) Followed() bool { return h.sharing.Load() == followed }

// Unfollowed notes that followers to which the memory was exported, of a publication, are not told any more.
func (h *Handle) Unfollowed(publication string) {
	if h.sharing.CompareAndSwap(followed, exported) {
		h.NoteSent(fmt.Sprintf("published as %q, until it was taken out of that", publication), time.Now())
	}
}

// Recycle is what a cache or a pool calls when the memory goes to another owner
// as it is. False means that another process may hold the memory: it must be
// released instead. From then on Export refuses it.
func (h *Handle) Recycle() bool {
	return !h.Imported && (h.sharing.CompareAndSwap(private, stale) || h.sharing.Load() == stale)
}

// Import takes the memory behind a descriptor, which stays the caller's and may
// be closed at once. The driver does not tell the size, so it is the exporter's
// word, which mapping proves. The properties are the driver's, with no handle
// type, since only the creator exports.
func Import(op string, s *core.System, fd int, size uint64) (*Handle, error) {
	var from driver.ShareableHandle
	binary.NativeEndian.PutUint32(from[:], uint32(int32(fd)))
	return take(op, s, from, driver.HandlePosixFD, size)
}

// ImportFabric takes the memory that a fabric handle names, otherwise as Import
// does. Its exporter must still have it.
func ImportFabric(op string, s *core.System, from driver.ShareableHandle, size uint64) (*Handle, error) {
	return take(op, s, from, driver.HandleFabric, size)
}

func take(op string, s *core.System, from driver.ShareableHandle, t driver.HandleTypes, size uint64) (*Handle, error) {
	s.PollReclaim()
	d, r := s.Drv.MemImportFromShareableHandle(from, t)
	if r != driver.Success {
		return nil, s.CallError(op, driver.CallMemImportFromShareableHandle, r, errs.Bytes(size))
	}
	prop, r := s.Drv.MemGetAllocationPropertiesFromHandle(d)
	h := New(s, d, size, prop)
	h.Imported = true
	if r != driver.Success {
		return nil, Abandon(op, s.CallError(op, driver.CallMemGetAllocationPropertiesFromHandle, r, errs.Bytes(size)), h)
	}
	return h, nil
}

// Granted returns the properties that the memory was created with in fact, of imported
// memory those that it is known to have.
func (h *Handle) Granted(op string) (driver.AllocationProp, error) {
	if h.Imported {
		return h.Asked, nil
	}
	return h.Reported(op)
}

// Reported returns the properties that the driver reports for the memory.
func (h *Handle) Reported(op string) (prop driver.AllocationProp, err error) {
	d, err := h.Use(op)
	if err != nil {
		return prop, err
	}
	defer h.Done()
	sys := h.System()
	prop, r := sys.Drv.MemGetAllocationPropertiesFromHandle(d)
	if r != driver.Success {
		return prop, sys.CallError(op, driver.CallMemGetAllocationPropertiesFromHandle, r, errs.Bytes(h.Size), h.Devices()...)
	}
	return prop, nil
}

// ReleaseError is the error of a Release that failed.
func (h *Handle) ReleaseError(op string, r driver.Result) error {
	return h.System().CallError(op, driver.CallMemRelease, r, errs.Bytes(h.Size), h.Devices()...)
}

// Let gives up the caller's count. If that fails the memory is one of the System's
// leftovers, which release it later, and the error is the driver's.
func (h *Handle) Let(op string) error {
	r := h.Release()
	if r == driver.Success {
		return nil // without an allocation, which counts for thousands of chunks
	}
	return h.left(op, h.ReleaseError(op, r))
}

func (h *Handle) left(op string, err error) error {
	what, bytes := "memory", int(h.Size)
	if h.Kind() == life.KindMulticast {
		what, bytes = h.Kind().String(), 0
	}
	h.System().Left(what, bytes, core.DeviceOf(h.Asked.Location), err, func() error {
		if r := h.Release(); r != driver.Success {
			return h.ReleaseError(op, r)
		}
		return nil
	})
	return err
}

// ReleaseAll gives up the caller's counts, as Let does. The error says which failed.
func ReleaseAll(op string, handles ...*Handle) error {
	if err := releaseAll(op, handles); err != nil {
		return fmt.Errorf("memory could not be released at once, which System.Drain tries again: %w", err)
	}
	return nil
}

func releaseAll(op string, handles []*Handle) error {
	var failed []error
	for _, h := range handles {
		if err := h.Let(op); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// Abandon is ReleaseAll after an operation that failed with cause.
func Abandon(op string, cause error, handles ...*Handle) error {
	if err := releaseAll(op, handles); err != nil {
		return core.UndoError(cause, err)
	}
	return cause
}
