package drivertest

import (
	"fmt"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// creation are the rules of granularity and cuMemCreate.
var creation = []Case{
	{
		Name: "granularity, minimum and recommended, of device memory (plain, by descriptor, fabric, compressible, RDMA) and of host NUMA memory",
		Says: "one and the same, 2 MiB on an H200",
		Run: func(t *T) {
			compressed, rdma := onDevice(t.Device), onDevice(t.Device)
			compressed.Flags.CompressionType = driver.CompressionGeneric
			rdma.Flags.GPUDirectRDMACapable = 1
			for _, kind := range []struct {
				name string
				prop driver.AllocationProp
				has  driver.DeviceAttribute
				want uint64
			}{
				{"plain", onDevice(t.Device), driver.AttrVirtualMemoryManagement, t.env.Machine.Granularity},
				{"by descriptor", shared(onDevice(t.Device), driver.HandlePosixFD), driver.AttrHandlePosixFD, t.env.Machine.Granularity},
				{"fabric", shared(onDevice(t.Device), driver.HandleFabric), driver.AttrHandleFabric, t.env.Machine.Granularity},
				{"compressible", compressed, driver.AttrGenericCompression, t.env.Machine.Granularity},
				{"RDMA", rdma, driver.AttrRDMAWithVMM, t.env.Machine.Granularity},
				{"host NUMA", onNode(0), driver.AttrHostNUMAVirtualMemory, t.env.Machine.HostGranularity},
			} {
				if !t.attribute(kind.has) {
					t.Logf("no %s memory: attribute %d reads 0", kind.name, kind.has)
					continue
				}
				want := kind.want
				if want == 0 {
					want = t.granularity(kind.prop)
				}
				for _, o := range []driver.GranularityOption{driver.GranularityMinimum, driver.GranularityRecommended} {
					got, r := t.D.MemGetAllocationGranularity(kind.prop, o)
					t.ok(r, "granularity of %s memory", kind.name)
					if got != want {
						t.Errorf("granularity %d of %s memory is %d bytes, want %d", o, kind.name, got, want)
					}
				}
			}
		},
	},
	{
		Name: "cuMemCreate of 0 bytes, or of a size that is not a multiple of the granularity",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			for _, size := range []uint64{0, 1, t.chunk - 1, t.chunk + 1, t.chunk + t.chunk/2} {
				_, r := t.D.MemCreate(size, onDevice(t.Device))
				t.returns(driver.InvalidValue, r, "create %d bytes", size)
			}
		},
	},
	{
		Name:  "cuMemCreate of 1 TiB",
		Says:  "OUT_OF_MEMORY",
		Needs: needs(lessThanOneTiB),
		Run: func(t *T) {
			_, r := t.D.MemCreate(1<<40, onDevice(t.Device))
			t.returns(driver.OutOfMemory, r, "create 1 TiB")
		},
	},
	{
		Name: "cuMemCreate on device 99",
		Says: "INVALID_DEVICE",
		Run: func(t *T) {
			_, r := t.D.MemCreate(t.chunk, onDevice(99))
			t.returns(driver.InvalidDevice, r, "create on device 99")
		},
	},
	{
		Name:  "cuMemCreate located on HOST with the descriptor handle type",
		Says:  "INVALID_VALUE",
		Needs: needs(hostMemory),
		Run: func(t *T) {
			_, r := t.D.MemCreate(t.granularity(onHost()), shared(onHost(), driver.HandlePosixFD))
			t.returns(driver.InvalidValue, r, "create on HOST")
		},
	},
	{
		Name:  "cuMemCreate located on HOST without a handle type",
		Says:  "success; access can be granted to the device and to HOST",
		Needs: needs(hostMemory),
		Run: func(t *T) {
			size := t.granularity(onHost())
			h := t.create(size, onHost())
			p := t.reserve(size, size)
			t.bind(p, size, h)
			t.ok(t.D.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(t.Device), onHost().Location)), "grant the device and HOST")
			t.works(t.device, p, size)
		},
	},
	{
		Name:  "cuMemCreate located on HOST_NUMA_CURRENT in any form, on HOST_NUMA node -1 or on an absent node",
		Says:  "INVALID_VALUE",
		Needs: needs(hostNUMAMemory),
		Run: func(t *T) {
			current := onNode(0)
			current.Location.Type = driver.LocationHostNUMACurrent
			size := t.granularity(onNode(0))
			forms := []driver.AllocationProp{current, onNode(-1), onNode(1000)}
			if t.attribute(driver.AttrHandlePosixFD) {
				forms = append(forms, shared(current, driver.HandlePosixFD))
			}
			for _, prop := range forms {
				_, r := t.D.MemCreate(size, prop)
				t.returns(driver.InvalidValue, r, "create with %+v", prop)
			}
		},
	},
	{
		Name:  "cuMemCreate located on HOST_NUMA node 0 with the descriptor handle type",
		Says:  "success; once access is granted to the device and to HOST_NUMA 0, the CPU reads and writes it at the mapped address",
		Needs: needs(hostNUMAMemory, shareableByFD),
		Run: func(t *T) {
			size := t.granularity(onNode(0))
			h := t.create(size, shared(onNode(0), driver.HandlePosixFD))
			p := t.reserve(size, size)
			t.bind(p, size, h)
			t.ok(t.D.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(t.Device), onNode(0).Location)), "grant the device and HOST_NUMA 0")
			t.fill(t.device, p, size, 0x11)
			bytes := unsafe.Slice((*byte)(hostPointer(p)), size)
			for _, i := range []uint64{0, size - 1} {
				if bytes[i] != 0x11 {
					t.Errorf("the CPU reads %#x at byte %d, the device wrote 0x11", bytes[i], i)
				}
			}
			for i := range bytes {
				bytes[i] = 0x22
			}
			t.reads(t.device, p, size, 0x22)
		},
	},
	{
		Name:  "cuMemCreate with the FABRIC handle type, alone or with the descriptor's, while the process has no open IMEX channel",
		Says:  "NOT_PERMITTED, although the attribute for fabric handles reads 1",
		Needs: needs(fabricHandles, noFabricChannel),
		Run: func(t *T) {
			forms := []driver.HandleTypes{driver.HandleFabric}
			if t.attribute(driver.AttrHandlePosixFD) {
				forms = append(forms, driver.HandleFabric|driver.HandlePosixFD)
			}
			for _, types := range forms {
				_, r := t.D.MemCreate(t.chunk, shared(onDevice(t.Device), types))
				t.returns(driver.NotPermitted, r, "create with handle types %d", types)
			}
		},
	},
	{
		Name:  "cuMemCreate of compressible memory",
		Says:  "success, and the properties read back say that compression was granted",
		Needs: needs(compressible),
		Run: func(t *T) {
			prop := onDevice(t.Device)
			prop.Flags.CompressionType = driver.CompressionGeneric
			got, r := t.D.MemGetAllocationPropertiesFromHandle(t.create(t.chunk, prop))
			t.ok(r, "properties")
			if got.Flags.CompressionType != driver.CompressionGeneric {
				t.Errorf("compression reads %d, want %d", got.Flags.CompressionType, driver.CompressionGeneric)
			}
		},
	},
	{
		Name:  "cuMemCreate of memory that is compressible and RDMA-capable",
		Says:  "success, and the properties read back say that RDMA was granted and compression was not",
		Needs: needs(compressible, rdmaMemory),
		Run: func(t *T) {
			prop := onDevice(t.Device)
			prop.Flags.CompressionType = driver.CompressionGeneric
			prop.Flags.GPUDirectRDMACapable = 1
			got, r := t.D.MemGetAllocationPropertiesFromHandle(t.create(t.chunk, prop))
			t.ok(r, "properties")
			if got.Flags.CompressionType != driver.CompressionNone || got.Flags.GPUDirectRDMACapable != 1 {
				t.Errorf("compression reads %d and RDMA %d, want %d and 1",
					got.Flags.CompressionType, got.Flags.GPUDirectRDMACapable, driver.CompressionNone)
			}
		},
	},
	{
		Name: "contents of a new allocation, also right after the same process released written memory",
		Says: "zero, 200 of 200 times",
		Run: func(t *T) {
			rounds := 200
			if t.software {
				rounds = 8
			}
			p := t.reserve(t.chunk)
			for i := range rounds {
				h := t.create(t.chunk)
				t.bind(p, t.chunk, h)
				t.allow(p, t.chunk)
				t.reads(t.device, p, t.chunk, 0)
				written := byte(0x80 | i)
				t.fill(t.device, p, t.chunk, written)
				t.reads(t.device, p, pageSize, written)
				t.unmap(p)
				t.release(h)
			}
		},
	},
	{
		Name: "cuMemGetAllocationPropertiesFromHandle",
		Says: "the properties that the memory was created with",
		Run: func(t *T) {
			want := onDevice(t.Device)
			if t.attribute(driver.AttrHandlePosixFD) {
				want = shared(want, driver.HandlePosixFD)
			}
			got, r := t.D.MemGetAllocationPropertiesFromHandle(t.create(t.chunk, want))
			t.ok(r, "properties")
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("properties read %+v, want %+v", got, want)
			}
		},
	},
}
