package cuda

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Probe is the result of trials, which alone prove that memory can be made and shared.
type Probe struct {
	// Memory: plain memory could be created. If it is false the rest means nothing.
	Memory bool
	// Compressible memory was requested and granted.
	Compressible bool
	// PosixFD: memory with a descriptor type could be created, exported and
	// imported.
	PosixFD bool
	// Fabric: memory with a fabric handle type could be created, exported and
	// imported. FabricError is why not; it matches ErrNotPermitted where no
	// IMEX channel is open to this process, and ErrNotSupported where there is
	// no fabric.
	Fabric      bool
	FabricError error
}

// Probe tries what the attributes only claim, each time with as little device memory as
// there can be, one [Capabilities].MinimumGranularity. A definite result is cached. If a
// trial is inconclusive, because there is no memory for it or the process may open no
// more files, that is the error, or the FabricError if a fabric is not ready, and the
// next call tries again.
func (d *Device) Probe() (Probe, error) {
	const op = "cuda.Device.Probe"
	caps, err := d.Capabilities()
	if err != nil {
		return Probe{}, err
	}
	if !caps.VirtualMemory {
		return Probe{}, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
			Asked: d.String() + " has no virtual memory management", Hint: "it needs a Pascal GPU or later, and Linux or Windows in TCC/WDDM mode"})
	}
	if _, err := d.context(op); err != nil {
		return Probe{}, err
	}
	d.probing.Lock()
	defer d.probing.Unlock()
	if d.probed != nil {
		return *d.probed, nil
	}
	t := trial{op, d, uint64(caps.MinimumGranularity)}
	var p Probe
	_, err = t.create(driver.CompressionNone)
	if inconclusive(err) {
		return p, err
	}
	p.Memory = err == nil
	granted, err := t.create(driver.CompressionGeneric)
	if inconclusive(err) {
		return p, err
	}
	p.Compressible = err == nil && granted.Flags.CompressionType == driver.CompressionGeneric
	err = t.share(driver.HandlePosixFD)
	if inconclusive(err) {
		return p, err
	}
	p.PosixFD = err == nil
	p.FabricError = t.share(driver.HandleFabric)
	p.Fabric = p.FabricError == nil
	switch {
	case errors.Is(p.FabricError, ErrOutOfMemory) || errors.Is(p.FabricError, ErrDeviceLost):
		return p, p.FabricError
	case !inconclusive(p.FabricError):
		d.probed = &p
	}
	return p, nil
}

// trial tries what a device can do, with the least memory that can be created.
type trial struct {
	op    string
	d     *Device
	least uint64
}

// create makes memory and returns its properties as they were granted.
func (t trial) create(compression driver.CompressionType) (driver.AllocationProp, error) {
	prop := t.d.plainMemory()
	prop.Flags.CompressionType = compression
	h, r, _ := phys.TryCreate(t.d.sys.core, t.least, prop, nil)
	if r != driver.Success {
		return prop, t.failed(driver.CallMemCreate, r, prop)
	}
	granted, err := h.Granted(t.op)
	_ = phys.ReleaseAll(t.op, h) // what fails is tried again, and says nothing of the memory
	return granted, err
}

// share makes memory with a handle type, exports it and imports it.
func (t trial) share(as driver.HandleTypes) error {
	prop := t.d.plainMemory()
	prop.RequestedHandleTypes = as
	at, r, _ := phys.ProbeHandleType(t.op, t.d.sys.core, t.least, prop)
	if r == driver.Success {
		return nil
	}
	return t.failed(at, r, prop)
}

func (t trial) failed(at driver.Call, r driver.Result, prop driver.AllocationProp) error {
	sys := t.d.sys.core
	f := errs.Failure{Op: t.op, Call: at, Result: r, Asked: fmt.Sprintf("a trial on %v", t.d), Err: diagnose.Creation(sys, prop, r)}
	if r == driver.OutOfMemory {
		if free, _, err := t.d.MemoryInfo(); err == nil {
			f.Hint = sys.Withheld(t.least, free)
		}
	}
	return errs.New(f)
}
