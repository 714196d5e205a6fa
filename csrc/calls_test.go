//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A row makes one call with fixed arguments and says which bytes must reach the
// driver and which values come back from the fake one.
type row struct {
	// do returns the call's values, its result last. It passes c on where the
	// call takes a context.
	do     func(d driver.Driver, c driver.Context) []any
	args   []byte
	values []any
	// takes says that the call takes a context.
	takes bool
	// foreign says that only the foreign form has the call.
	foreign bool
	// bare says that nothing is done to the thread around the call.
	bare bool
	// after are further entry points, once the call succeeded.
	after []string
}

const (
	stream = driver.Stream(0x5100000000000003)
	event  = driver.Event(0x5200000000000005)
	graph  = driver.Graph(0x5300000000000007)
	gexec  = driver.GraphExec(0x5400000000000009)
	module = driver.Module(0x550000000000000b)
	fn     = driver.Function(0x560000000000000d)
	ptr    = driver.Ptr(0x7f1122334455)
	handle = driver.MemHandle(0x4142434445464748)
	device = driver.Device(5)
)

// hostPtr is a number for the fake driver, which does not follow it.
var hostPtr = unsafe.Pointer(unsafe.SliceData(hostMemory))

var hostMemory = func() []byte {
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	return mem
}()

// The bytes of the structs, as the vendor's header lays them out.
var (
	prop = driver.AllocationProp{
		Type: driver.AllocationPinned, RequestedHandleTypes: driver.HandlePosixFD | driver.HandleFabric,
		Location: driver.Location{Type: driver.LocationDevice, ID: 3},
		Flags:    driver.AllocationFlags{CompressionType: driver.CompressionGeneric, GPUDirectRDMACapable: 1, Usage: driver.UsageHWDecompress},
	}
	propBytes = unhex("01000000 09000000 01000000 03000000 0000000000000000 01 01 0200 00000000")

	grants = []driver.AccessDesc{
		{Location: driver.Location{Type: driver.LocationDevice, ID: 6}, Flags: driver.AccessReadWrite},
		{Location: driver.Location{Type: driver.LocationHostNUMA, ID: -2}, Flags: driver.AccessRead},
	}
	grantBytes = unhex("01000000 06000000 03000000  03000000 feffffff 01000000")
)

var rows = map[driver.Call]row{
	driver.CallInit: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.Init()} },
		args: le(uint32(0)), bare: true,
	},
	driver.CallDriverGetVersion: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DriverGetVersion()
			return []any{v, r}
		},
		values: []any{int32(13010)}, bare: true,
	},
	driver.CallDeviceGetCount: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceGetCount()
			return []any{v, r}
		},
		values: []any{int32(3)},
	},
	driver.CallDeviceGet: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceGet(2)
			return []any{v, r}
		},
		args: le(int32(2)), values: []any{driver.Device(42)},
	},
	driver.CallDeviceGetName: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceGetName(device)
			return []any{v, r}
		},
		args: le(int32(256), int32(5)), values: []any{"Fake GPU 5"},
	},
	driver.CallDeviceGetUUID: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceGetUUID(device)
			return []any{v, r}
		},
		args: le(int32(5)), values: []any{driver.UUID(unhex("e0e1e2e3e4e5e6e7e8e9eaebecedeeef"))},
	},
	driver.CallDeviceTotalMem: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceTotalMem(device)
			return []any{v, r}
		},
		args: le(int32(5)), values: []any{uint64(0x2300000000)},
	},
	driver.CallDeviceGetAttribute: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceGetAttribute(driver.AttrHandleFabric, device)
			return []any{v, r}
		},
		args: le(int32(128), int32(5)), values: []any{int32(-1128)},
	},
	driver.CallDeviceCanAccessPeer: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceCanAccessPeer(device, 6)
			return []any{v, r}
		},
		args: le(int32(5), int32(6)), values: []any{true},
	},
	driver.CallDevicePrimaryCtxRetain: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DevicePrimaryCtxRetain(device)
			return []any{v, r}
		},
		args: le(int32(5)), values: []any{driver.Context(0xc0de0001)},
	},
	driver.CallDevicePrimaryCtxRelease: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.DevicePrimaryCtxRelease(device)} },
		args: le(int32(5)),
	},
	driver.CallDevicePrimaryCtxGetState: {
		do: func(d driver.Driver, _ driver.Context) []any {
			flags, active, r := d.(driver.Foreign).DevicePrimaryCtxGetState(device)
			return []any{flags, active, r}
		},
		args: le(int32(5)), values: []any{uint32(0x18), true},
		foreign: true,
	},
	driver.CallCtxCreate: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.(driver.Foreign).CtxCreate(8, device)
			return []any{v, r}
		},
		args: le(uint32(8), int32(5)), values: []any{driver.Context(0xc0de0002)},
		after:   []string{"cuCtxPopCurrent"},
		foreign: true,
	},
	driver.CallCtxDestroy: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.(driver.Foreign).CtxDestroy(0xdead)} },
		args: le(uint64(0xdead)), foreign: true,
	},
	driver.CallCtxGetCurrent: {
		do: func(d driver.Driver, _ driver.Context) []any {
			_, r := d.(driver.Foreign).CtxGetCurrent() // the value is the thread's, which its own test reads
			return []any{r}
		},
		foreign: true,
	},
	driver.CallCtxSetCurrent: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.(driver.Foreign).CtxSetCurrent(c)} },
		args: le(ours), foreign: true,
	},
	driver.CallCtxGetDevice: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.CtxGetDevice(c)
			return []any{v, r}
		},
		values: []any{driver.Device(41)}, takes: true,
	},
	driver.CallCtxSynchronize: {
		do:    func(d driver.Driver, c driver.Context) []any { return []any{d.(driver.Foreign).CtxSynchronize(c)} },
		takes: true, foreign: true,
	},
	driver.CallStreamCreate: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.StreamCreate(c, driver.StreamNonBlocking)
			return []any{v, r}
		},
		args: le(uint32(1)), values: []any{driver.Stream(0x5000000001)}, takes: true,
	},
	driver.CallStreamDestroy: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.StreamDestroy(c, stream)} },
		args: le(stream), takes: true,
	},
	driver.CallStreamQuery: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.StreamQuery(c, stream)} },
		args: le(stream), takes: true,
	},
	driver.CallStreamSynchronize: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.StreamSynchronize(c, stream)} },
		args: le(stream), takes: true,
	},
	driver.CallStreamWaitEvent: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.StreamWaitEvent(c, stream, event)} },
		args: le(stream, event, uint32(0)), takes: true,
	},
	driver.CallStreamGetCtx: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.StreamGetCtx(c, stream)
			return []any{v, r}
		},
		args: le(stream), values: []any{driver.Context(0xc0de0003)}, takes: true,
	},
	driver.CallStreamGetFlags: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.(driver.Foreign).StreamGetFlags(c, stream)
			return []any{v, r}
		},
		args: le(stream), values: []any{driver.StreamNonBlocking}, takes: true, foreign: true,
	},
	driver.CallStreamGetID: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.(driver.Foreign).StreamGetID(c, stream)
			return []any{v, r}
		},
		args: le(stream), values: []any{uint64(0x1d00000000000007)}, takes: true, foreign: true,
	},
	driver.CallLaunchHostFunc: {
		do: func(d driver.Driver, c driver.Context) []any {
			f := d.NewHostFunc(func() {})
			defer d.ReleaseHostFunc(f, func() {})
			return []any{d.LaunchHostFunc(c, stream, f)}
		},
		args: le(stream), takes: true,
	},
	driver.CallStreamWriteValue64: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.StreamWriteValue64(c, stream, ptr, 0xf1f2f3f4f5f6f7f8)}
		},
		args: le(stream, ptr, uint64(0xf1f2f3f4f5f6f7f8), uint32(0)), takes: true,
	},
	driver.CallStreamWaitValue64: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.StreamWaitValue64(c, stream, ptr, 0xf1f2f3f4f5f6f7f8)}
		},
		args: le(stream, ptr, uint64(0xf1f2f3f4f5f6f7f8), uint32(0)), takes: true,
	},
	driver.CallStreamIsCapturing: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.StreamIsCapturing(c, stream)
			return []any{v, r}
		},
		args: le(stream), values: []any{driver.CaptureActive}, bare: true,
	},
	driver.CallStreamGetCaptureInfo: {
		do: func(d driver.Driver, c driver.Context) []any {
			status, id, r := d.StreamGetCaptureInfo(c, stream)
			return []any{status, id, r}
		},
		args: le(stream), values: []any{driver.CaptureInvalidated, uint64(0xca00000000000009)}, takes: true,
	},
	driver.CallStreamBeginCapture: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.StreamBeginCapture(c, stream, driver.CaptureThreadLocal)}
		},
		args: le(stream, uint32(1)), takes: true,
	},
	driver.CallStreamEndCapture: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.StreamEndCapture(c, stream)
			return []any{v, r}
		},
		args: le(stream), values: []any{driver.Graph(0x6000000001)}, takes: true,
	},
	driver.CallThreadExchangeStreamCaptureMode: {
		do: func(d driver.Driver, _ driver.Context) []any {
			_, r := d.(driver.Foreign).ThreadExchangeStreamCaptureMode(driver.CaptureThreadLocal)
			return []any{r} // the value is the thread's, which its own test reads
		},
		args: le(uint32(1)), foreign: true, bare: true,
	},
	driver.CallGraphInstantiate: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.GraphInstantiate(c, graph)
			return []any{v, r}
		},
		args: le(graph, uint64(0)), values: []any{driver.GraphExec(0x6000000002)}, takes: true,
	},
	driver.CallGraphLaunch: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.GraphLaunch(c, gexec, stream)} },
		args: le(gexec, stream), takes: true,
	},
	driver.CallGraphDestroy: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.GraphDestroy(graph)} },
		args: le(graph),
	},
	driver.CallGraphExecDestroy: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.GraphExecDestroy(gexec)} },
		args: le(gexec),
	},
	driver.CallGraphGetNodeCount: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.(driver.Foreign).GraphGetNodeCount(graph)
			return []any{v, r}
		},
		args: le(graph, uint64(0)), values: []any{uint64(0x100000005)},
		foreign: true,
	},
	driver.CallEventCreate: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.EventCreate(c, driver.EventDisableTiming)
			return []any{v, r}
		},
		args: le(uint32(2)), values: []any{driver.Event(0xe000000001)}, takes: true,
	},
	driver.CallEventRecord: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.EventRecord(c, event, stream)} },
		args: le(event, stream), takes: true,
	},
	driver.CallEventQuery: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.EventQuery(c, event)} },
		args: le(event), takes: true,
	},
	driver.CallEventSynchronize: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.EventSynchronize(c, event)} },
		args: le(event), takes: true,
	},
	driver.CallEventElapsedTime: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.EventElapsedTime(c, event, event+1)
			return []any{v, r}
		},
		args: le(event, event+1), values: []any{float32(1.5)}, takes: true,
	},
	driver.CallEventDestroy: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.EventDestroy(c, event)} },
		args: le(event), takes: true,
	},
	driver.CallMemcpyHtoDAsync: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.MemcpyHtoDAsync(c, ptr, hostPtr, 1<<33, stream)}
		},
		args: le(ptr, hostPtr, uint64(1<<33), stream), takes: true,
	},
	driver.CallMemcpyDtoHAsync: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.MemcpyDtoHAsync(c, hostPtr, ptr, 1<<33, stream)}
		},
		args: le(hostPtr, ptr, uint64(1<<33), stream), takes: true,
	},
	driver.CallMemcpyDtoDAsync: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.MemcpyDtoDAsync(c, ptr, ptr+1, 1<<33, stream)}
		},
		args: le(ptr, ptr+1, uint64(1<<33), stream), takes: true,
	},
	driver.CallMemsetD8Async: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.MemsetD8Async(c, ptr, 0xfe, 1<<33, stream)}
		},
		args: le(ptr, uint8(0xfe), uint64(1<<33), stream), takes: true,
	},
	driver.CallMemsetD32Async: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.(driver.Foreign).MemsetD32Async(c, ptr, 0xfedcba98, 1<<33, stream)}
		},
		args: le(ptr, uint32(0xfedcba98), uint64(1<<33), stream), takes: true, foreign: true,
	},
	driver.CallMemcpyHtoD: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.(driver.Foreign).MemcpyHtoD(c, ptr, hostPtr, 1<<33)}
		},
		args: le(ptr, hostPtr, uint64(1<<33)), takes: true, foreign: true,
	},
	driver.CallMemcpyDtoH: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.(driver.Foreign).MemcpyDtoH(c, hostPtr, ptr, 1<<33)}
		},
		args: le(hostPtr, ptr, uint64(1<<33)), takes: true, foreign: true,
	},
	driver.CallMemcpyDtoD: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.(driver.Foreign).MemcpyDtoD(c, ptr, ptr+1, 1<<33)}
		},
		args: le(ptr, ptr+1, uint64(1<<33)), takes: true, foreign: true,
	},
	driver.CallMemsetD8: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.(driver.Foreign).MemsetD8(c, ptr, 0xfe, 1<<33)}
		},
		args: le(ptr, uint8(0xfe), uint64(1<<33)), takes: true, foreign: true,
	},
	driver.CallMemAlloc: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.MemAlloc(c, 1<<33)
			return []any{v, r}
		},
		args: le(uint64(1 << 33)), values: []any{driver.Ptr(0x7f00000000a0)}, takes: true,
	},
	driver.CallMemFree: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.MemFree(c, ptr)} },
		args: le(ptr), takes: true,
	},
	driver.CallMemAllocAsync: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.MemAllocAsync(c, 1<<33, stream)
			return []any{v, r}
		},
		args: le(uint64(1<<33), stream), values: []any{driver.Ptr(0x7f00000000b0)}, takes: true,
	},
	driver.CallMemFreeAsync: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.MemFreeAsync(c, ptr, stream)} },
		args: le(ptr, stream), takes: true,
	},
	driver.CallDeviceGetDefaultMemPool: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.DeviceGetDefaultMemPool(device)
			return []any{v, r}
		},
		args: le(int32(5)), values: []any{driver.MemPool(0x5000000007)},
	},
	driver.CallMemPoolGetAttribute: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemPoolGetAttribute(1<<40, driver.MemPoolUsed)
			return []any{v, r}
		},
		args: le(uint64(1<<40), int32(7)), values: []any{uint64(0x1300000000)},
	},
	driver.CallMemPoolTrimTo: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.MemPoolTrimTo(1<<40, 1<<33)} },
		args: le(uint64(1<<40), uint64(1<<33)),
	},
	driver.CallMemGetInfo: {
		do: func(d driver.Driver, c driver.Context) []any {
			free, total, r := d.MemGetInfo(c)
			return []any{free, total, r}
		},
		values: []any{uint64(0x1100000000), uint64(0x2300000000)}, takes: true,
	},
	driver.CallMemHostAlloc: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.MemHostAlloc(c, 1<<33, driver.HostAllocPortable|driver.HostAllocDeviceMap)
			return []any{uintptr(v), r}
		},
		args: le(uint64(1<<33), uint32(3)), values: []any{uintptr(0x7e0000000000)}, takes: true,
	},
	driver.CallMemFreeHost: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.MemFreeHost(c, hostPtr)} },
		args: le(hostPtr), takes: true,
	},
	driver.CallMemHostRegister: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.MemHostRegister(c, hostPtr, 1<<33, driver.HostRegisterDeviceMap)}
		},
		args: le(hostPtr, uint64(1<<33), uint32(2)), takes: true,
	},
	driver.CallMemHostUnregister: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.MemHostUnregister(c, hostPtr)} },
		args: le(hostPtr), takes: true,
	},
	driver.CallMemHostGetDevicePointer: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.MemHostGetDevicePointer(c, hostPtr)
			return []any{v, r}
		},
		args: le(hostPtr, uint32(0)), values: []any{driver.Ptr(0x7f00000000c0)}, takes: true,
	},
	driver.CallPointerGetAttribute: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.PointerGetAttribute(c, driver.PointerRangeSize, ptr)
			return []any{v, r}
		},
		args: le(int32(12), ptr), values: []any{uint64(0x7f00000000d0 + 12)}, takes: true,
	},
	driver.CallMemAddressReserve: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemAddressReserve(1<<40, 1<<30, ptr)
			return []any{v, r}
		},
		args: le(uint64(1<<40), uint64(1<<30), ptr, uint64(0)), values: []any{driver.Ptr(0x7f0000000000)},
	},
	driver.CallMemAddressFree: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.MemAddressFree(ptr, 1<<40)} },
		args: le(ptr, uint64(1<<40)),
	},
	driver.CallMemCreate: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemCreate(1<<33, prop)
			return []any{v, r}
		},
		args: le(uint64(1<<33), propBytes, uint64(0)), values: []any{driver.MemHandle(0x4000000000000001)},
	},
	driver.CallMemRelease: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.MemRelease(handle)} },
		args: le(handle),
	},
	driver.CallMemMap: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.MemMap(ptr, 1<<33, 1<<21, handle)} },
		args: le(ptr, uint64(1<<33), uint64(1<<21), handle, uint64(0)),
	},
	driver.CallMemUnmap: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.MemUnmap(ptr, 1<<33)} },
		args: le(ptr, uint64(1<<33)),
	},
	driver.CallMemSetAccess: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.MemSetAccess(ptr, 1<<33, grants)} },
		args: le(ptr, uint64(1<<33), grantBytes, uint64(2)),
	},
	driver.CallMemGetAccess: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemGetAccess(driver.Location{Type: driver.LocationHostNUMA, ID: -2}, ptr)
			return []any{v, r}
		},
		args: le(unhex("03000000 feffffff"), ptr), values: []any{driver.AccessReadWrite},
	},
	driver.CallMemGetAllocationGranularity: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemGetAllocationGranularity(prop, driver.GranularityRecommended)
			return []any{v, r}
		},
		args: le(propBytes, uint32(1)), values: []any{uint64(0x200000)},
	},
	driver.CallMemGetAllocationPropertiesFromHandle: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemGetAllocationPropertiesFromHandle(handle)
			return []any{v, r}
		},
		args: le(handle), values: []any{prop},
	},
	driver.CallMemRetainAllocationHandle: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.(driver.Foreign).MemRetainAllocationHandle(ptr)
			return []any{v, r}
		},
		args: le(ptr), values: []any{driver.MemHandle(0x4000000000000002)},
		foreign: true,
	},
	driver.CallMemExportToShareableHandle: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemExportToShareableHandle(handle, driver.HandleFabric)
			return []any{v, r}
		},
		args: le(handle, uint32(8), uint64(0)), values: []any{fabricHandle()},
	},
	driver.CallMemImportFromShareableHandle: {
		do: func(d driver.Driver, _ driver.Context) []any {
			v, r := d.MemImportFromShareableHandle(fabricHandle(), driver.HandleFabric)
			return []any{v, r}
		},
		args: le(fabricHandle(), uint32(8)), values: []any{driver.MemHandle(0x4000000000000003)},
	},
	driver.CallMemGetHandleForAddressRange: {
		do: func(d driver.Driver, c driver.Context) []any {
			fd, r := d.MemGetHandleForAddressRange(c, ptr, 1<<33, driver.RangeHandlePCIe)
			return []any{closedOnExec(int(fd)), r}
		},
		args: le(ptr, uint64(1<<33), uint32(1), uint64(1)), values: []any{true}, takes: true,
	},
	driver.CallModuleLoadData: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.ModuleLoadData(c, []byte(".version 8.0"))
			return []any{v, r}
		},
		args: []byte(".version 8.0\x00"), values: []any{driver.Module(0x3000000001)}, takes: true,
	},
	driver.CallModuleLoadDataEx: {
		do: func(d driver.Driver, c driver.Context) []any {
			log := make([]byte, 8)
			v, r := d.ModuleLoadDataEx(c, []byte(".version 8.0"), log)
			return []any{v, r}
		},
		args: le([]byte(".version 8.0\x00"), uint32(2), uint32(5), uint32(6), uint64(8)), values: []any{driver.Module(0x3000000001)}, takes: true,
	},
	driver.CallModuleUnload: {
		do:   func(d driver.Driver, c driver.Context) []any { return []any{d.ModuleUnload(c, module)} },
		args: le(module), takes: true,
	},
	driver.CallModuleGetFunction: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.ModuleGetFunction(c, module, "fill_u32"[:4])
			return []any{v, r}
		},
		args: le(module, []byte("fill\x00")), values: []any{driver.Function(0x3000000002)}, takes: true,
	},
	driver.CallFuncGetParamInfo: {
		do: func(d driver.Driver, c driver.Context) []any {
			offset, size, r := d.FuncGetParamInfo(c, fn, 1<<33)
			return []any{offset, size, r}
		},
		args: le(fn, uint64(1<<33)), values: []any{uint64(16), uint64(8)}, takes: true,
	},
	driver.CallLaunchKernel: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.LaunchKernel(c, fn, launch, []byte("packed parameters"), stream)}
		},
		args: le(fn, uint32(11), uint32(12), uint32(13), uint32(21), uint32(22), uint32(23), uint32(31), stream, uint64(0),
			uint64(1), []byte("packed parameters"), uint64(2), uint64(17), uint64(0)),
		takes: true,
	},
	driver.CallLaunchKernelEx: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.LaunchKernelEx(c, fn, launch, []byte("packed parameters"), stream)}
		},
		args: le(uint32(11), uint32(12), uint32(13), uint32(21), uint32(22), uint32(23), uint32(31), stream, uint32(1),
			uint32(2), uint32(1), fn, []byte("packed parameters"), uint64(0)),
		takes: true,
	},
	driver.CallFuncGetAttribute: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.FuncGetAttribute(c, driver.FuncSharedBytes, fn)
			return []any{v, r}
		},
		args: le(int32(1), fn), values: []any{int32(4711)}, takes: true,
	},
	driver.CallFuncSetAttribute: {
		do: func(d driver.Driver, c driver.Context) []any {
			return []any{d.FuncSetAttribute(c, fn, driver.FuncMaxDynamicSharedBytes, 100<<10)}
		},
		args: le(fn, int32(8), int32(100<<10)), takes: true,
	},
	driver.CallOccupancyMaxActiveBlocksPerMultiprocessor: {
		do: func(d driver.Driver, c driver.Context) []any {
			n, r := d.OccupancyMaxActiveBlocksPerMultiprocessor(c, fn, 256, 100<<10)
			return []any{n, r}
		},
		args: le(fn, int32(256), uint64(100<<10)), values: []any{int32(7)}, takes: true,
	},
	driver.CallModuleGetGlobal: {
		do: func(d driver.Driver, c driver.Context) []any {
			p, n, r := d.ModuleGetGlobal(c, module, "table")
			return []any{p, n, r}
		},
		args: le(module, []byte("table\x00")), values: []any{driver.Ptr(0x7f1200000000), uint64(24)}, takes: true,
	},
	driver.CallLogsCurrent: {
		do: func(d driver.Driver, _ driver.Context) []any {
			end, r := d.LogsCurrent()
			return []any{end, r}
		},
		args: le(uint32(0)), values: []any{driver.LogPosition(41)}, bare: true,
	},
	driver.CallLogsDumpToMemory: {
		do: func(d driver.Driver, _ driver.Context) []any {
			end, n, r := d.LogsDumpToMemory(7, make([]byte, 20))
			return []any{end, n, r}
		},
		args: le(uint32(7), uint64(20), uint32(0)), values: []any{driver.LogPosition(9), uint64(6)}, bare: true,
	},
	driver.CallCheckpointProcessGetState: {
		do: func(d driver.Driver, _ driver.Context) []any {
			state, r := d.CheckpointProcessGetState(4711)
			return []any{state, r}
		},
		args: le(int32(4711)), values: []any{driver.ProcessCheckpointed}, bare: true,
	},
	driver.CallCheckpointProcessLock: {
		do: func(d driver.Driver, _ driver.Context) []any {
			return []any{d.CheckpointProcessLock(4711, driver.LockArgs{TimeoutMS: 250})}
		},
		args: le(int32(4711), uint32(250), make([]byte, 60)), bare: true,
	},
	driver.CallCheckpointProcessCheckpoint: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.CheckpointProcessCheckpoint(4711)} },
		args: le(int32(4711), uint64(0)), bare: true,
	},
	driver.CallCheckpointProcessRestore: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.CheckpointProcessRestore(4711)} },
		args: le(int32(4711), uint64(0)), bare: true,
	},
	driver.CallCheckpointProcessUnlock: {
		do:   func(d driver.Driver, _ driver.Context) []any { return []any{d.CheckpointProcessUnlock(4711)} },
		args: le(int32(4711), uint64(0)), bare: true,
	},
	driver.CallStreamCreateWithPriority: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.StreamCreateWithPriority(c, driver.StreamNonBlocking, -3)
			return []any{v, r}
		},
		args: le(uint32(1), int32(-3)), values: []any{driver.Stream(0x5000000002)}, takes: true,
	},
	driver.CallCtxGetStreamPriorityRange: {
		do: func(d driver.Driver, c driver.Context) []any {
			least, greatest, r := d.CtxGetStreamPriorityRange(c)
			return []any{least, greatest, r}
		},
		values: []any{int32(0), int32(-5)}, takes: true,
	},
	driver.CallStreamGetPriority: {
		do: func(d driver.Driver, c driver.Context) []any {
			v, r := d.StreamGetPriority(c, stream)
			return []any{v, r}
		},
		args: le(stream), values: []any{int32(-3)}, takes: true,
	},
}

var launch = driver.LaunchConfig{GridX: 11, GridY: 12, GridZ: 13, BlockX: 21, BlockY: 22, BlockZ: 23, SharedBytes: 31}

// The contexts of the tests: ours is passed to calls, theirs is what a thread
// has current when we come.
const ours, theirs driver.Context = 0xc0000000000000aa, 0xc0000000000000bb

func TestCalls(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for call := range driver.Call(driver.CallCount) {
		r, ok := rows[call]
		require.True(t, ok, "%v has no row", call)
		for _, form := range []string{"own", "foreign"} {
			d := driver.Driver(d)
			switch {
			case form == "foreign":
				d = d.Foreign()
			case r.foreign:
				continue
			}
			for _, current := range []driver.Context{0, ours, theirs} {
				for mode := driver.CaptureGlobal; mode <= driver.CaptureRelaxed; mode++ {
					for _, result := range []driver.Result{driver.Success, driver.InvalidImage} {
						name := fmt.Sprintf("%v/%s/current=%#x/mode=%d/%v", call, form, current, mode, result)
						t.Run(name, func(t *testing.T) {
							checkCall(t, f, d, call, r, form == "own", current, mode, result)
						})
					}
				}
			}
		}
	}
}

func checkCall(t *testing.T, f *fake, d driver.Driver, call driver.Call, r row, own bool, current driver.Context, mode driver.CaptureMode, result driver.Result) {
	th := enterThread(t, f, d.Foreign(), current, mode)
	defer th.leave()
	entry := call.String()
	if result != driver.Success {
		f.returns(entry, result)
		defer f.returns("", driver.Success)
	}
	values := r.do(d, ours)
	calls := f.calls(t)

	require.Equal(t, result, values[len(values)-1], "the result")
	if result == driver.Success {
		require.Equal(t, append(r.values, driver.Success), values, "the values")
	}

	// What is called, in which order.
	const exchange, get, set = "cuThreadExchangeStreamCaptureMode", "cuCtxGetCurrent", "cuCtxSetCurrent"
	want := []string{entry}
	switches := r.takes && current != ours
	if switches {
		want = []string{set, entry, set}
	}
	if r.takes {
		want = append([]string{get}, want...)
	}
	if own && !r.bare {
		want = append(append([]string{exchange}, want...), exchange)
	}
	if result == driver.Success {
		want = append(want, r.after...)
	}
	require.Equal(t, want, entries(calls))

	// What the call itself was given, and where it ran.
	made := calls[indexOf(want, entry, r)]
	require.Equal(t, hex.EncodeToString(r.args), hex.EncodeToString(made.Args), "the arguments' bytes")
	if r.takes {
		require.Equal(t, ours, made.Context, "the current context at the call")
	} else {
		require.Equal(t, current, made.Context, "the current context at the call")
	}
	if own && !r.bare {
		require.Equal(t, driver.CaptureRelaxed, made.Mode, "the capture mode at the call")
	} else {
		require.Equal(t, mode, made.Mode, "the capture mode at the call")
	}
	for _, c := range calls {
		require.Equal(t, unix.Gettid(), c.Thread, "the thread of %s", c.Entry)
	}

	// What it left behind. Two calls are there to change the thread.
	switch {
	case result != driver.Success:
	case call == driver.CallThreadExchangeStreamCaptureMode:
		mode = driver.CaptureThreadLocal
	case call == driver.CallCtxSetCurrent:
		current = ours
	}
	th.requireLeft(current, mode)
}

// indexOf finds the call under test among the calls around it, which may be of
// the same entry point.
func indexOf(names []string, entry string, r row) int {
	for i, n := range names {
		if n == entry && (!r.takes || i > 0) {
			return i
		}
	}
	return -1
}

// thread is an operating system thread in a state that a call must leave alone.
type thread struct {
	t *testing.T
	f *fake
	d driver.Foreign
}

// enterThread locks the goroutine to its thread and sets the state that belongs
// to the thread, unrecorded.
func enterThread(t *testing.T, f *fake, d driver.Foreign, c driver.Context, m driver.CaptureMode) *thread {
	t.Helper()
	runtime.LockOSThread()
	th := &thread{t, f, d}
	f.quiet(true)
	defer f.quiet(false)
	require.Equal(t, driver.Success, d.CtxSetCurrent(c))
	_, r := d.ThreadExchangeStreamCaptureMode(m)
	require.Equal(t, driver.Success, r)
	return th
}

// requireLeft requires the thread's state, down to the stack of contexts having
// nothing under the current one.
func (th *thread) requireLeft(c driver.Context, m driver.CaptureMode) {
	th.t.Helper()
	th.f.quiet(true)
	defer th.f.quiet(false)
	got, r := th.d.CtxGetCurrent()
	require.Equal(th.t, driver.Success, r)
	require.Equal(th.t, c, got, "the current context that the call left")
	mode, r := th.d.ThreadExchangeStreamCaptureMode(m)
	require.Equal(th.t, driver.Success, r)
	require.Equal(th.t, m, mode, "the capture mode that the call left")
	require.Equal(th.t, driver.Success, th.d.CtxSetCurrent(0))
	got, r = th.d.CtxGetCurrent()
	require.Equal(th.t, driver.Success, r)
	require.Zero(th.t, got, "the call left the stack of contexts deeper")
	require.Equal(th.t, driver.Success, th.d.CtxSetCurrent(c))
}

// leave clears the thread's state and unlocks.
func (th *thread) leave() {
	th.f.quiet(true)
	defer th.f.quiet(false)
	th.d.CtxSetCurrent(0)
	th.d.ThreadExchangeStreamCaptureMode(driver.CaptureGlobal)
	runtime.UnlockOSThread()
}

// le is the values' bytes, one after the other, as a little-endian machine has
// them in memory.
func le(values ...any) []byte {
	var b bytes.Buffer
	for _, v := range values {
		if r := reflect.ValueOf(v); r.Kind() == reflect.Uintptr || r.Kind() == reflect.UnsafePointer {
			v = uintptrOf(r)
		}
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	return b.Bytes()
}

// uintptrOf widens a handle or a pointer, which encoding/binary does not take.
func uintptrOf(v reflect.Value) uint64 {
	if v.Kind() == reflect.UnsafePointer {
		return uint64(v.Pointer())
	}
	return v.Uint()
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

func fabricHandle() (s driver.ShareableHandle) {
	for i := range s {
		s[i] = byte(0x80 + i)
	}
	return s
}

// closedOnExec reports the descriptor's flag, and closes it.
func closedOnExec(fd int) bool {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return err == nil && flags&unix.FD_CLOEXEC != 0 && unix.Close(fd) == nil
}
