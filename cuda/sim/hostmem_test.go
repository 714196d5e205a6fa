package sim

import (
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/stretchr/testify/require"
)

func TestRegisteredMemory(t *testing.T) {
	r := start(t, Options{})
	b, err := osmem.Alloc(8192)
	require.NoError(t, err)
	defer func() { require.NoError(t, osmem.Free(b)) }()
	p := pointer(b)
	_, res := r.MemHostGetDevicePointer(r.ctx, p)
	r.is(driver.InvalidValue, res)
	r.is(driver.HostNotRegistered, r.MemHostUnregister(r.ctx, p))
	r.ok(r.MemHostRegister(r.ctx, p, 8192, driver.HostRegisterPortable))
	r.is(driver.HostRegistered, r.MemHostRegister(r.ctx, unsafe.Add(p, 4096), 4096, 0))
	r.is(driver.InvalidValue, r.MemHostRegister(r.ctx, nil, 4096, 0))
	r.is(driver.InvalidValue, r.MemHostRegister(r.ctx, p, 0, 0))
	if osmem.Linux { // what is no memory of the process, all or in part
		gone, err := osmem.Alloc(1 << 30)
		require.NoError(t, err)
		q := pointer(gone)
		require.NoError(t, osmem.Free(gone))
		r.is(driver.InvalidValue, r.MemHostRegister(r.ctx, q, 1<<30, 0))
		r.is(driver.InvalidValue, r.MemHostRegister(r.ctx, hostPointer(r.mapped(1)), chunk, 0))
	}
	d, res := r.MemHostGetDevicePointer(r.ctx, unsafe.Add(p, 100))
	r.ok(res)
	// The device reaches it by that address, and asynchronously.
	s := r.stream(1)
	r.m.Hold(uintptr(s))
	r.ok(r.MemsetD8Async(r.ctx, d, 'r', 4, s))
	dst := r.mapped(1)
	r.ok(r.MemcpyHtoDAsync(r.ctx, dst, unsafe.Add(p, 100), 4, s))
	require.Zero(t, b[100])
	r.m.Release(uintptr(s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, "rrrr", string(b[100:104]))
	require.Equal(t, "rrrr", string(r.bytes(dst, 4)))
	r.is(driver.HostNotRegistered, r.MemHostUnregister(r.ctx, unsafe.Add(p, 4096)))
	r.is(driver.InvalidValue, r.MemFreeHost(r.ctx, p))
	r.ok(r.MemHostUnregister(r.ctx, p))
}

func TestPinnedMemoryIsLimited(t *testing.T) {
	r := start(t, Options{HostMemory: 1 << 20})
	_, res := r.MemHostAlloc(r.ctx, 2<<20, 0)
	r.is(driver.OutOfMemory, res)
	_, res = r.MemHostAlloc(r.ctx, ^uint64(0), 0)
	r.is(driver.OutOfMemory, res)
	_, res = r.MemHostAlloc(r.ctx, 0, 0)
	r.is(driver.InvalidValue, res)
	_, res = r.MemHostAlloc(r.ctx, 64, 128)
	r.is(driver.InvalidValue, res)
	p, res := r.MemHostAlloc(r.ctx, 1<<20, driver.HostAllocPortable|driver.HostAllocDeviceMap)
	r.ok(res)
	if osmem.Linux {
		_, res = r.MemCreate(chunk, at(driver.LocationHost, 0, 0))
		r.is(driver.OutOfMemory, res)
	}
	r.ok(r.MemFreeHost(r.ctx, p))
}

func TestPoisonedPinnedMemory(t *testing.T) {
	r := start(t, Options{Poison: true})
	require.Equal(t, repeated(PoisonByte, 100), r.pinned(100))
}

func TestPointerAttributes(t *testing.T) {
	r := start(t, Options{Devices: []DeviceOptions{{}, {}}})
	c1, res := r.DevicePrimaryCtxRetain(1)
	r.ok(res)
	d, res := r.MemAlloc(c1, 1000)
	r.ok(res)
	vmm, host, empty := r.mapped(1), r.pinned(64), r.reserve(chunk)
	for _, row := range []struct {
		what string
		p    driver.Ptr
		attr driver.PointerAttribute
		want uint64
		res  driver.Result
	}{
		{"allocation's context", d, driver.PointerContext, uint64(c1), 0},
		{"allocation's device", d + 999, driver.PointerDeviceOrdinal, 1, 0},
		{"allocation's type", d, driver.PointerMemoryType, 2, 0},
		{"allocation's start", d + 999, driver.PointerRangeStart, uint64(d), 0},
		{"allocation's size", d + 999, driver.PointerRangeSize, 1000, 0},
		{"past the allocation", d + 1000, driver.PointerRangeSize, 0, driver.InvalidValue},
		{"mapping's device", vmm, driver.PointerDeviceOrdinal, 0, 0},
		{"mapping's context", vmm, driver.PointerContext, 0, 0},
		{"mapped", vmm + 5, driver.PointerMapped, 1, 0},
		{"managed", vmm, driver.PointerIsManaged, 0, 0},
		{"host's type", driver.Ptr(uintptr(pointer(host))), driver.PointerMemoryType, 1, 0},
		{"host's device", driver.Ptr(uintptr(pointer(host))), driver.PointerDeviceOrdinal, 0, 0},
		{"reserved only", empty, driver.PointerMapped, 0, 0},
		{"reserved only", empty, driver.PointerMemoryType, 0, driver.InvalidValue},
		{"nothing", 4096, driver.PointerMapped, 0, driver.InvalidValue},
		{"unknown attribute", vmm, 999, 0, driver.InvalidValue},
	} {
		got, res := r.PointerGetAttribute(r.ctx, row.attr, row.p)
		require.Equal(t, row.res, res, row.what)
		require.Equal(t, row.want, got, row.what)
	}
	r.ok(r.MemFree(r.ctx, d))
	r.ok(r.MemAddressFree(empty, chunk))
	r.ok(r.DevicePrimaryCtxRelease(1))
}

func TestAbsurdSizes(t *testing.T) {
	r := start(t, Options{})
	s, p, huge := r.stream(1), r.mapped(1), ^uint64(0)
	host := pointer(r.pinned(8))
	_, res := r.MemAlloc(r.ctx, huge)
	r.is(driver.OutOfMemory, res)
	_, res = r.MemAllocAsync(r.ctx, huge, s)
	r.is(driver.OutOfMemory, res)
	_, res = r.MemHostAlloc(r.ctx, huge, 0)
	r.is(driver.OutOfMemory, res)
	_, res = r.MemCreate(huge&^(chunk-1), on(0, 0))
	r.is(driver.OutOfMemory, res)
	_, res = r.MemAddressReserve(huge&^(chunk-1), 1<<63, 0)
	r.is(driver.OutOfMemory, res)
	if osmem.Linux {
		_, res = r.MemGetHandleForAddressRange(r.ctx, p, huge&^(chunk-1), 0)
		r.is(driver.InvalidValue, res)
	}
	for what, res := range map[string]driver.Result{
		"register":    r.MemHostRegister(r.ctx, host, huge, 0),
		"memset":      r.MemsetD8Async(r.ctx, p, 0, huge, s),
		"memset 32":   r.MemsetD32Async(r.ctx, p, 0, huge, s),
		"to device":   r.MemcpyHtoDAsync(r.ctx, p, host, huge, s),
		"to host":     r.MemcpyDtoHAsync(r.ctx, host, p, huge, s),
		"sync":        r.MemcpyHtoD(r.ctx, p, host, huge),
		"no source":   r.MemcpyHtoD(r.ctx, p, nil, 8),
		"no target":   r.MemcpyDtoH(r.ctx, nil, p, 8),
		"on device":   r.MemcpyDtoDAsync(r.ctx, p, p, huge, s),
		"map":         r.MemMap(p, huge, 0, 1),
		"unmap":       r.MemUnmap(p, huge&^(chunk-1)),
		"free":        r.MemAddressFree(p, huge),
		"write value": r.StreamWriteValue64(r.ctx, s, driver.Ptr(huge-7), 0),
	} {
		require.Equal(t, driver.InvalidValue, res, what)
	}
	_, err := r.m.Bytes(cuda.Ptr(huge)-3, 8)
	require.Error(t, err)
}
