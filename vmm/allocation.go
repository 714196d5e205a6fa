package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
)

type (
	sealed = phys.Sealed
	holder = phys.Holder
)

// Physical is memory that can be mapped: an Allocation, or what the packages
// on top of this one make of the same kind. Only this library implements it.
type Physical interface {
	sealed
	// Size in bytes.
	Size() int
}

// Allocation is physical memory without an address. It is mapped whole, as
// often as wanted.
type Allocation struct {
	holder
	closer  life.Closer
	h       *phys.Handle
	chosen  Granularity
	watched life.Watched
}

// maxBytes is more than any device has address space for; sizes above it would
// overflow the rounding.
const maxBytes = 1 << 60

// Create makes size bytes of physical memory, a multiple of the granularity.
// The caller closes it. Its contents are undefined: the driver has been seen to
// give zeros, but promises nothing.
func Create(d *cuda.Device, size int, p Properties) (*Allocation, error) {
	const op = "vmm.Create"
	prop, gran, err := p.resolve(op, d)
	if err != nil {
		return nil, err
	}
	if err := checkSize(op, size, gran); err != nil {
		return nil, err
	}
	if _, err := core.ContextOf(d); err != nil {
		return nil, err
	}
	sys := core.SystemOf(d)
	h, r := phys.Create(sys, uint64(size), prop)
	if r != driver.Success {
		return nil, createError(op, d, size, uint64(size), prop, r)
	}
	return newAllocation(h, p.Granularity), nil
}

// newAllocation takes over a count of the handle.
func newAllocation(h *phys.Handle, g Granularity) *Allocation {
	a := &Allocation{h: h, chosen: g}
	a.holder = phys.NewHolder(h, &a.closer.Life)
	h.Watch(&a.watched)
	return a
}

// checkSize refuses sizes that are no positive multiple of the granularity.
func checkSize(op string, size int, gran uint64) error {
	g := int(gran)
	switch {
	case size <= 0:
		return errs.Invalid(op, fmt.Sprintf("a size of %d bytes", size), fmt.Sprintf("ask for a multiple of %s", errs.Bytes(g)))
	case size > maxBytes:
		return errs.Invalid(op, fmt.Sprintf("a size of %s", errs.Bytes(size)), "no device has that much: ask for less")
	case size%g != 0:
		return errs.Invalid(op, fmt.Sprintf("a size of %s", errs.Bytes(size)),
			fmt.Sprintf("ask for a multiple of the granularity, %s: %s", errs.Bytes(g), errs.Bytes((size/g+1)*g)))
	}
	return nil
}

// refused asks, after a creation that the driver would not make, whether memory
// shared in that way can be had at all. Where a trial says no, that is the
// error; where it says nothing, the answer is nil.
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

// createError is the refusal to create memory of a size, one of the pieces of all
// that was asked for.
func createError(op string, d *cuda.Device, size int, all uint64, prop driver.AllocationProp, r driver.Result) error {
	loc := cuda.Location{Type: cuda.LocationType(prop.Location.Type), ID: int(prop.Location.ID)}
	asked := fmt.Sprintf("%s on %v", errs.Bytes(size), loc)
	if all > uint64(size) {
		asked = fmt.Sprintf("%s more on %v, of which %s were being created", errs.Bytes(all), loc, errs.Bytes(size))
	}
	if why := refused(d, prop, r); why != nil {
		return fmt.Errorf("%s: %s: %w", op, asked, why)
	}
	f := errs.Failure{Op: op, Call: driver.CallMemCreate, Result: r, Asked: asked, Err: diagnose.Creation(core.SystemOf(d), prop, r)}
	if r == driver.OutOfMemory {
		if free, total, err := d.MemoryInfo(); err == nil && loc == d.Location() {
			f.Asked += fmt.Sprintf(", with %s free of %s", errs.Bytes(free), errs.Bytes(total))
			f.Hint = core.SystemOf(d).Withheld(uint64(size), free)
		}
		if n := core.SystemOf(d).PendingReclaims(); n > 0 {
			f.Hint = core.SystemOf(d).Waiting() + ": call Drain and try again"
		}
	}
	return errs.New(f)
}

// Size in bytes.
func (a *Allocation) Size() int { return int(a.made("vmm.Allocation.Size").Size) }

// inner returns the handle, or an error for an Allocation that no function made.
func (a *Allocation) inner(op string) (*phys.Handle, error) {
	if a == nil || a.h == nil {
		return nil, errs.Invalid(op, "a nil allocation", "make one with Create")
	}
	return a.h, nil
}

// made is inner for methods that return no error: they panic with one.
func (a *Allocation) made(op string) *phys.Handle {
	h, err := a.inner(op)
	if err != nil {
		panic(err)
	}
	return h
}

// Requested is what the memory was created with, every default decided.
func (a *Allocation) Requested() Properties {
	return properties(a.made("vmm.Allocation.Requested").Asked, a.chosen)
}

// Close gives the memory up. What is mapped stays: the memory lives until its
// last mapping is closed.
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
