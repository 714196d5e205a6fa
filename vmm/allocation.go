package vmm

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
)

type (
	sealed = phys.Sealed
	holder = phys.Holder
)

// Physical is memory that can be mapped: an Allocation, or an object of a package on
// top of this one, such as multicast.Object. Only this library implements it.
type Physical interface {
	sealed
	// Size in bytes.
	Size() int
}

// Allocation is physical memory without an address. It is always mapped as a whole,
// any number of times. All methods are safe for concurrent use.
type Allocation struct {
	holder
	closer  life.Closer
	h       *phys.Handle
	chosen  Granularity
	watched life.Watched
}

// Create creates size bytes of physical memory, a multiple of the granularity. The
// caller closes it. Its contents are undefined: drivers have returned zeros, but do
// not promise them.
func Create(d *cuda.Device, size int, p Properties) (*Allocation, error) {
	return create("vmm.Create", d, size, p, nil)
}

// CreateWithin is Create within a budget, which may be nil: memory that it has no room for is
// refused with cuda.ErrBudget, after the functions of its OnPressure were called.
func CreateWithin(b *cuda.Budget, d *cuda.Device, size int, p Properties) (*Allocation, error) {
	const op = "vmm.CreateWithin"
	within, err := budget.Of(op, b)
	if err != nil {
		return nil, err
	}
	return create(op, d, size, p, within.Account(life.KindAllocation, life.Label{}, func() uint64 { return uint64(size) }))
}

func create(op string, d *cuda.Device, size int, p Properties, account *budget.Account) (a *Allocation, err error) {
	prop, gran, err := p.resolve(op, d)
	if err != nil {
		return nil, err
	}
	if err := memspec.CheckSize(op, size, gran); err != nil {
		return nil, err
	}
	if _, err := core.ContextOf(op, d); err != nil {
		return nil, err
	}
	sys := core.SystemOf(d)
	err = withRoom(sys, account, func() error {
		h, r, short := phys.Create(sys, uint64(size), prop, account)
		if short != nil || r != driver.Success {
			return createError(op, "", d, size, uint64(size), 0, prop, r, short)
		}
		a = newAllocation(h, p.Granularity)
		return nil
	})
	return a, err
}

// withRoom makes something, and again for as long as the account's budget refuses it and can
// make room. The caller holds no lock.
func withRoom(sys *core.System, account *budget.Account, try func() error) error {
	for {
		err := try()
		if account == nil || err == nil {
			return err
		}
		var short *budget.Shortage
		if !errors.As(err, &short) || !sys.MakeRoom(context.Background(), short) {
			return err
		}
	}
}

// newAllocation takes over one reference to the handle.
func newAllocation(h *phys.Handle, g Granularity) *Allocation {
	a := &Allocation{h: h, chosen: g}
	a.holder = phys.NewHolder(h, &a.closer.Life)
	h.Watch(&a.watched)
	return a
}

// refused probes, after the driver refused to create memory, whether the device has
// memory that can be shared in that way at all. It returns the probe's error, or nil
// if the probe explains nothing.
func refused(d *cuda.Device, prop driver.AllocationProp, r driver.Result) error {
	switch r {
	case driver.InvalidValue, driver.NotSupported, driver.NotPermitted:
	default:
		return nil
	}
	if prop.RequestedHandleTypes == 0 || prop.Location.Type != driver.LocationDevice || int(prop.Location.ID) != d.Ordinal() {
		return nil
	}
	p, err := d.Probe()
	switch {
	case err != nil || !p.Memory:
		return nil
	case prop.RequestedHandleTypes&driver.HandleFabric != 0 && !p.Fabric:
		return p.FabricError
	case prop.RequestedHandleTypes&driver.HandlePosixFD != 0 && !p.PosixFD:
		return errs.New(errs.Failure{Op: "cuda.Device.Probe", Kind: errs.NotSupported,
			Asked: fmt.Sprintf("memory of %v with a descriptor, which the driver does not make there", d),
			Hint:  "ask for NoHandles, or for Fabric where the device has it"})
	}
	return nil
}

// createError returns the error of a creation of size bytes, one of the pieces of all
// bytes that the caller requested for an object and of which made are there. short is the
// budget's refusal, if that is the reason.
func createError(op, object string, d *cuda.Device, size int, all, made uint64, prop driver.AllocationProp, r driver.Result, short error) error {
	var s *budget.Shortage
	if errors.As(short, &s) {
		s.Extend(made+uint64(size), all)
		f := s.Failure(op)
		f.Object = object
		return errs.New(f)
	}
	loc := cuda.Location{Type: cuda.LocationType(prop.Location.Type), ID: int(prop.Location.ID)}
	asked := fmt.Sprintf("%s on %v", errs.Bytes(size), loc)
	if all > uint64(size) {
		asked = fmt.Sprintf("%s more on %v, in pieces of %s", errs.Bytes(all), loc, errs.Bytes(size))
	}
	if why := refused(d, prop, r); why != nil {
		return fmt.Errorf("%s: %s: %w", op, asked, why)
	}
	f := errs.Failure{Op: op, Object: object, Call: driver.CallMemCreate, Result: r, Asked: asked, Err: diagnose.Creation(core.SystemOf(d), prop, r)}
	if r == driver.OutOfMemory {
		var lack core.Lack
		if free, total, err := d.MemoryInfo(); err == nil && loc == d.Location() {
			f.Asked += fmt.Sprintf(", with %s free of %s", errs.Bytes(free), errs.Bytes(total))
			f.Hint = core.SystemOf(d).Withheld(uint64(size), free)
			lack = core.Lack{Bytes: all - made, Free: uint64(free), Total: uint64(total)}
		}
		// If the device has the memory, nothing that it lacks explains the error.
		f.Hint = cmp.Or(f.Hint, core.SystemOf(d).Missing(core.DeviceOf(prop.Location), lack))
	}
	return errs.New(f)
}

// Size in bytes.
func (a *Allocation) Size() int { return int(a.h.Size) }

// inner returns the handle, or an error for an Allocation that no function made.
func (a *Allocation) inner(op string) (*phys.Handle, error) {
	if a == nil || a.h == nil {
		return nil, errs.Invalid(op, "a nil allocation", "make one with Create")
	}
	return a.h, nil
}

// Requested returns the properties that the memory was created with, every default
// resolved.
func (a *Allocation) Requested() Properties {
	return properties(a.h.Asked, a.chosen)
}

// Close releases the memory. Mappings of it stay valid: the memory is freed when the
// last of them is closed. Close is idempotent.
func (a *Allocation) Close() error {
	const op = "vmm.Allocation.Close"
	if _, err := a.inner(op); err != nil {
		return err
	}
	return a.closer.Close(func() error {
		if r := a.h.Release(); r != driver.Success {
			return a.h.System().CallError(op, driver.CallMemRelease, r, errs.Bytes(a.h.Size), a.h.Devices()...)
		}
		a.watched.Stop()
		return nil
	})
}
