package cuda

import (
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Capabilities are what a device's attributes claim. They are cheap to read, but some need
// permissions or services that only a trial can check; see [Device.Probe].
type Capabilities struct {
	// ComputeMajor and ComputeMinor are the compute capability: 9 and 0.
	ComputeMajor, ComputeMinor int
	// VirtualMemory: the device has the virtual memory management calls,
	// without which this library cannot use it.
	VirtualMemory bool
	// PosixFD and Fabric: the handle types by which memory can be shared.
	PosixFD, Fabric bool
	// Compression: compressible memory can be requested.
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
	if number < 0 || number > math.MaxInt32 {
		return 0, errs.Invalid(op, fmt.Sprintf("attribute %d of %v", number, d), attributeHint)
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
		bytes, r := d.sys.core.Drv.MemGetAllocationGranularity(d.plainMemory(), g.option)
		if r != driver.Success {
			return c, d.sys.core.CallError(op, driver.CallMemGetAllocationGranularity, r, d.String(), d.dev)
		}
		*g.to = int(bytes)
	}
	return c, nil
}

// plainMemory are the properties of plain device memory.
func (d *Device) plainMemory() driver.AllocationProp {
	return driver.AllocationProp{
		Type:     driver.AllocationPinned,
		Location: driver.Location{Type: driver.LocationDevice, ID: int32(d.dev)},
	}
}
