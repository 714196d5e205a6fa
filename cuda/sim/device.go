package sim

import (
	"maps"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

type device struct {
	ordinal    int
	options    DeviceOptions
	uuid       driver.UUID
	pool       *pool
	attributes map[driver.DeviceAttribute]int32
	primary    *gpuContext
	retained   int // how often the primary context was

	primaryFlags uint32
}

// The attributes of the device on which the driver was measured. Those without a name are
// what programs read and this library does not. By CUDA's numbers: the limits of launches,
// which are the threads and the extents of a block, the extents of a grid, the threads of
// a warp, and what a multiprocessor holds; then the time limit of kernels, mapped host
// memory, the compute mode, kernels side by side, a driver mode of another system, and how
// much faster single precision is than double.
var defaultAttributes = map[driver.DeviceAttribute]int32{
	1: maxBlockThreads, 2: maxBlockXY, 3: maxBlockXY, 4: maxBlockZ, 5: maxGridX, 6: maxGridYZ, 7: maxGridYZ, 10: 32,
	39: residentThreads, 81: residentShared, 106: residentBlocks, 111: reservedShared,
	17: 0, 19: 1, 20: 0, 31: 1, 35: 0, 87: 2,
	driver.AttrMultiprocessorCount: 132, driver.AttrIntegrated: 0,
	driver.AttrSharedPerBlock: 48 << 10, driver.AttrSharedPerBlockOptIn: 227 << 10, driver.AttrCooperativeLaunch: 1,
	driver.AttrPCIDeviceID: 0, driver.AttrPCIDomainID: 0, driver.AttrUnifiedAddressing: 1,
	driver.AttrComputeMajor: 9, driver.AttrComputeMinor: 0,
	driver.AttrManagedMemory: 1, driver.AttrPageableMemoryAccess: 0,
	driver.AttrConcurrentManagedAccess: 1, driver.AttrStreamMemOps64: 1,
	driver.AttrDirectManagedFromHost: 0, driver.AttrVirtualMemoryManagement: 1,
	driver.AttrHandlePosixFD: 1, driver.AttrGenericCompression: 1, driver.AttrRDMAWithVMM: 1,
	driver.AttrMemoryPools: 1, driver.AttrRDMA: 1, driver.AttrDMABuf: 1,
	driver.AttrHandleFabric: 1, driver.AttrMulticast: 0, driver.AttrHostNUMAID: 0,
	driver.AttrHostNUMAVirtualMemory: 1, driver.AttrHostVirtualMemory: 1,
}

func newDevice(ordinal int, o DeviceOptions) *device {
	d := &device{ordinal: ordinal, options: o, uuid: o.UUID, pool: newPool(uint64(o.Memory), false)}
	d.attributes = maps.Clone(defaultAttributes)
	d.attributes[driver.AttrPCIBusID] = int32(ordinal + 1)
	if !osmem.Linux {
		for _, a := range []driver.DeviceAttribute{
			driver.AttrHandlePosixFD, driver.AttrDMABuf,
			driver.AttrHostVirtualMemory, driver.AttrHostNUMAVirtualMemory,
		} {
			d.attributes[a] = 0
		}
	}
	for a, v := range o.Attributes {
		d.attributes[driver.DeviceAttribute(a)] = int32(v)
	}
	return d
}

// reaches reports whether the device can be given access to memory of another.
func (d *device) reaches(peer *device) bool {
	return d != peer && !slices.Contains(d.options.Unreachable, peer.ordinal)
}

// prop describes plain memory on the device.
func (d *device) prop() driver.AllocationProp {
	p := driver.AllocationProp{Type: driver.AllocationPinned}
	p.Location = driver.Location{Type: driver.LocationDevice, ID: int32(d.ordinal)}
	return p
}

func (m *Machine) device(d driver.Device) *device {
	if d < 0 || int(d) >= len(m.devices) {
		return nil
	}
	return m.devices[d]
}

func (m *Machine) deviceByUUID(u driver.UUID) *device {
	for _, d := range m.devices {
		if d.uuid == u {
			return d
		}
	}
	return nil
}

func (a *api) DeviceGetCount() (int32, driver.Result) {
	if r := a.enter(driver.CallDeviceGetCount); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return int32(len(a.m.devices)), driver.Success
}

func (a *api) DeviceGet(ordinal int32) (driver.Device, driver.Result) {
	d, r := a.enterDevice(driver.CallDeviceGet, driver.Device(ordinal))
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return driver.Device(d.ordinal), driver.Success
}

func (a *api) DeviceGetName(d driver.Device) (string, driver.Result) {
	dev, r := a.enterDevice(driver.CallDeviceGetName, d)
	if r != driver.Success {
		return "", r
	}
	defer a.leave()
	return dev.options.Name, driver.Success
}

func (a *api) DeviceGetUUID(d driver.Device) (driver.UUID, driver.Result) {
	dev, r := a.enterDevice(driver.CallDeviceGetUUID, d)
	if r != driver.Success {
		return driver.UUID{}, r
	}
	defer a.leave()
	return dev.uuid, driver.Success
}

func (a *api) DeviceTotalMem(d driver.Device) (uint64, driver.Result) {
	dev, r := a.enterDevice(driver.CallDeviceTotalMem, d)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return dev.pool.limit, driver.Success
}

func (a *api) DeviceGetAttribute(attr driver.DeviceAttribute, d driver.Device) (int32, driver.Result) {
	dev, r := a.enterDevice(driver.CallDeviceGetAttribute, d)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	v, ok := dev.attributes[attr]
	if !ok {
		return 0, driver.InvalidValue
	}
	return v, driver.Success
}

func (a *api) DeviceCanAccessPeer(d, peer driver.Device) (bool, driver.Result) {
	dev, r := a.enterDevice(driver.CallDeviceCanAccessPeer, d)
	if r != driver.Success {
		return false, r
	}
	defer a.leave()
	other := a.m.device(peer)
	if other == nil {
		return false, driver.InvalidDevice
	}
	return dev.reaches(other), driver.Success
}

// enterDevice is enter for a call on a device.
func (a *api) enterDevice(c driver.Call, d driver.Device) (*device, driver.Result) {
	if r := a.enter(c); r != driver.Success {
		return nil, r
	}
	dev := a.m.device(d)
	if dev == nil {
		a.leave()
		return nil, driver.InvalidDevice
	}
	return dev, driver.Success
}
