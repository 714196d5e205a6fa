package cuda

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Capabilities are what a device's attributes say. They are cheap to read, and
// not the whole truth: some need permissions or services that only a trial
// finds; see [Device.Probe].
type Capabilities struct {
	// ComputeMajor and ComputeMinor are the compute capability: 9 and 0.
	ComputeMajor, ComputeMinor int
	// VirtualMemory: the device has the virtual memory management calls,
	// without which this library cannot use it.
	VirtualMemory bool
	// PosixFD and Fabric: the handle types by which memory can be shared.
	PosixFD, Fabric bool
	// Compression: memory can be asked to be compressible.
	Compression bool
	// RDMA: network cards can reach memory that was made RDMA-capable.
	RDMA bool
	// DMABuf: DMA-BUF descriptors can be made of mapped ranges.
	DMABuf bool
	// Multicast: multicast objects.
	Multicast bool
	// HostVirtualMemory and HostNUMAVirtualMemory: physical host memory can be
	// created and mapped.
	HostVirtualMemory, HostNUMAVirtualMemory bool
	// HostNUMANode is the node closest to the device.
	HostNUMANode int
	// ManagedMemory and ConcurrentManagedAccess: whether managed memory
	// exists, and whether the CPU may touch it while the GPU does.
	ManagedMemory, ConcurrentManagedAccess bool
	// PageableMemoryAccess: the device reads ordinary host memory.
	PageableMemoryAccess bool
	// MinimumGranularity and RecommendedGranularity, in bytes, of device
	// memory: sizes are multiples of the first.
	MinimumGranularity, RecommendedGranularity int
}

// Attribute reads a device attribute by the driver's number for it
// (CU_DEVICE_ATTRIBUTE_...).
func (d *Device) Attribute(number int) (int, error) {
	const op = "cuda.Device.Attribute"
	if err := d.open(op); err != nil {
		return 0, err
	}
	v, r := d.sys.core.Drv.DeviceGetAttribute(driver.DeviceAttribute(number), d.dev)
	if r != driver.Success {
		return 0, d.sys.core.CallError(op, driver.CallDeviceGetAttribute, r,
			fmt.Sprintf("attribute %d of %v", number, d), d.dev)
	}
	return int(v), nil
}

// Capabilities reads the device's attributes. An attribute that the running
// driver does not know yet reads as false.
func (d *Device) Capabilities() (Capabilities, error) {
	const op = "cuda.Device.Capabilities"
	if err := d.open(op); err != nil {
		return Capabilities{}, err
	}
	read := func(a driver.DeviceAttribute) int {
		v, r := d.sys.core.Drv.DeviceGetAttribute(a, d.dev)
		if r != driver.Success {
			return 0
		}
		return int(v)
	}
	has := func(a driver.DeviceAttribute) bool { return read(a) > 0 }
	c := Capabilities{
		ComputeMajor:            read(driver.AttrComputeMajor),
		ComputeMinor:            read(driver.AttrComputeMinor),
		VirtualMemory:           has(driver.AttrVirtualMemoryManagement),
		PosixFD:                 has(driver.AttrHandlePosixFD),
		Fabric:                  has(driver.AttrHandleFabric),
		Compression:             has(driver.AttrGenericCompression),
		RDMA:                    has(driver.AttrRDMAWithVMM),
		DMABuf:                  has(driver.AttrDMABuf),
		Multicast:               has(driver.AttrMulticast),
		HostVirtualMemory:       has(driver.AttrHostVirtualMemory),
		HostNUMAVirtualMemory:   has(driver.AttrHostNUMAVirtualMemory),
		HostNUMANode:            read(driver.AttrHostNUMAID),
		ManagedMemory:           has(driver.AttrManagedMemory),
		ConcurrentManagedAccess: has(driver.AttrConcurrentManagedAccess),
		PageableMemoryAccess:    has(driver.AttrPageableMemoryAccess),
	}
	if !c.VirtualMemory {
		return c, nil
	}
	for _, g := range []struct {
		option driver.GranularityOption
		to     *int
	}{
		{driver.GranularityMinimum, &c.MinimumGranularity},
		{driver.GranularityRecommended, &c.RecommendedGranularity},
	} {
		bytes, r := d.sys.core.Drv.MemGetAllocationGranularity(d.granule(), g.option)
		if r != driver.Success {
			return c, d.sys.core.CallError(op, driver.CallMemGetAllocationGranularity, r, d.String(), d.dev)
		}
		*g.to = int(bytes)
	}
	return c, nil
}

// granule are the properties of plain device memory.
func (d *Device) granule() driver.AllocationProp {
	return driver.AllocationProp{
		Type:     driver.AllocationPinned,
		Location: driver.Location{Type: driver.LocationDevice, ID: int32(d.dev)},
	}
}

// Probe is what only a trial tells.
type Probe struct {
	// Memory: plain memory could be created. Without it the rest says nothing.
	Memory bool
	// Compressible memory was asked for and granted.
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

// Probe tries, with one granule of device memory each, what the attributes
// only claim. A definite result is cached. If a trial is inconclusive, because there is
// no memory for it or the process may open no more files, that is the error, or the
// FabricError if a fabric is not ready, and the next call tries again.
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
	if _, err := d.context(); err != nil {
		return Probe{}, err
	}
	d.probing.Lock()
	defer d.probing.Unlock()
	if d.probed != nil {
		return *d.probed, nil
	}
	failed := func(at driver.Call, r driver.Result, prop driver.AllocationProp) error {
		f := errs.Failure{Op: op, Call: at, Result: r, Asked: fmt.Sprintf("a trial on %v", d), Err: diagnose.Creation(d.sys.core, prop, r)}
		if r == driver.OutOfMemory {
			if free, _, err := d.MemoryInfo(); err == nil {
				f.Hint = d.sys.core.Withheld(uint64(caps.MinimumGranularity), free)
			}
		}
		return errs.New(f)
	}
	var p Probe
	try := func(change func(*driver.AllocationProp)) (driver.AllocationProp, error) {
		prop := d.granule()
		change(&prop)
		h, r := phys.TryCreate(d.sys.core, uint64(caps.MinimumGranularity), prop)
		if r != driver.Success {
			return prop, failed(driver.CallMemCreate, r, prop)
		}
		granted, err := h.Granted(op)
		_ = phys.Abandon(op, nil, h) // what fails is tried again, and says nothing of the memory
		return granted, err
	}
	_, err = try(func(*driver.AllocationProp) {})
	if inconclusive(err) {
		return p, err
	}
	p.Memory = err == nil
	granted, err := try(func(a *driver.AllocationProp) { a.Flags.CompressionType = driver.CompressionGeneric })
	if inconclusive(err) {
		return p, err
	}
	p.Compressible = err == nil && granted.Flags.CompressionType == driver.CompressionGeneric
	share := func(t driver.HandleTypes) error {
		prop := d.granule()
		prop.RequestedHandleTypes = t
		at, r, _ := phys.ProbeHandleType(op, d.sys.core, uint64(caps.MinimumGranularity), prop)
		if r == driver.Success {
			return nil
		}
		return failed(at, r, prop)
	}
	err = share(driver.HandlePosixFD)
	if inconclusive(err) {
		return p, err
	}
	p.PosixFD = err == nil
	p.FabricError = share(driver.HandleFabric)
	p.Fabric = p.FabricError == nil
	switch {
	case errors.Is(p.FabricError, ErrOutOfMemory) || errors.Is(p.FabricError, ErrDeviceLost):
		return p, p.FabricError
	case !inconclusive(p.FabricError):
		d.probed = &p
	}
	return p, nil
}
