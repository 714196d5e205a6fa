package sim

import (
	"bytes"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/stretchr/testify/require"
)

func TestMemoryLimitIsExact(t *testing.T) {
	r := start(t, Options{Devices: []DeviceOptions{{Memory: 10 * MiB}}})
	var all []driver.MemHandle
	for range 5 {
		all = append(all, r.create(chunk, on(0, 0)))
	}
	require.Zero(t, r.free())
	_, res := r.MemCreate(chunk, on(0, 0))
	r.is(driver.OutOfMemory, res)
	_, res = r.MemAlloc(r.ctx, 1)
	r.is(driver.OutOfMemory, res)
	// Free space in pieces is as good as in one.
	r.ok(r.MemRelease(all[0]))
	r.ok(r.MemRelease(all[2]))
	big := r.create(2*chunk, on(0, 0))
	p := r.reserve(2 * chunk)
	r.ok(r.MemMap(p, 2*chunk, 0, big))
	want := pattern(2 * chunk)
	require.NoError(t, r.m.Poke(cuda.Ptr(p), want))
	require.Equal(t, want, r.bytes(p, 2*chunk))
	r.ok(r.MemUnmap(p, 2*chunk))
	r.ok(r.MemAddressFree(p, 2*chunk))
	for _, h := range []driver.MemHandle{all[1], all[3], all[4], big} {
		r.ok(r.MemRelease(h))
	}
	require.Equal(t, 10*MiB, r.free())
}

func TestFreshMemoryReadsZeroOrPoison(t *testing.T) {
	for _, poison := range []bool{false, true} {
		r := start(t, Options{Poison: poison, Devices: []DeviceOptions{{Memory: chunk}}})
		p := r.reserve(chunk)
		for range 2 {
			h := r.create(chunk, on(0, 0))
			r.ok(r.MemMap(p, chunk, 0, h))
			want := make([]byte, chunk)
			if poison {
				fill(want, PoisonByte)
			}
			require.Equal(t, want, r.bytes(p, chunk))
			require.NoError(t, r.m.Poke(cuda.Ptr(p), pattern(chunk)))
			r.ok(r.MemUnmap(p, chunk))
			r.ok(r.MemRelease(h))
		}
		r.ok(r.MemAddressFree(p, chunk))
	}
}

func TestFreedAddressesAreReusedLastOrFirst(t *testing.T) {
	for _, reuse := range []bool{false, true} {
		r := start(t, Options{ReuseAddresses: reuse})
		p := r.reserve(chunk)
		r.ok(r.MemAddressFree(p, chunk))
		q := r.reserve(chunk)
		require.Equal(t, reuse, p == q)
		r.ok(r.MemAddressFree(q, chunk))
	}
}

func TestAccessRules(t *testing.T) {
	r := start(t, Options{Devices: []DeviceOptions{{}, {}, {Unreachable: []int{0}}}})
	p := r.reserve(2 * chunk)
	q, res := r.MemAddressReserve(chunk, 0, p+2*chunk)
	r.ok(res)
	require.Equal(t, p+2*chunk, q)
	big, small, other := r.create(2*chunk, on(0, 0)), r.create(chunk, on(0, 0)), r.create(chunk, on(1, 0))
	r.ok(r.MemMap(p, 2*chunk, 0, big))
	rw := grant(driver.LocationDevice, 0, driver.AccessReadWrite)
	set := func(p driver.Ptr, n uint64, d ...driver.AccessDesc) driver.Result { return r.MemSetAccess(p, n, d) }
	r.is(driver.InvalidValue, set(p, 3*chunk, rw)) // not all is mapped
	r.ok(r.MemMap(q, chunk, 0, small))
	r.ok(set(p, 3*chunk, rw)) // across two reservations
	r.is(driver.InvalidValue, set(p, chunk, rw))
	r.is(driver.InvalidValue, set(p, 2*chunk))
	r.is(driver.NotSupported, set(p, 2*chunk, grant(driver.LocationHost, 0, driver.AccessReadWrite)))
	r.is(driver.NotSupported, set(p, 2*chunk, grant(driver.LocationHostNUMA, 0, driver.AccessReadWrite)))
	r.is(driver.InvalidDevice, set(p, 2*chunk, grant(driver.LocationDevice, 9, driver.AccessReadWrite)))
	r.is(driver.InvalidDevice, set(p, 2*chunk, grant(driver.LocationDevice, 2, driver.AccessReadWrite)))
	r.is(driver.InvalidValue, set(p, 2*chunk, grant(driver.LocationDevice, 0, 2)))
	for _, f := range []driver.AccessFlags{driver.AccessRead, driver.AccessNone, driver.AccessReadWrite} {
		r.ok(set(p, 2*chunk, grant(driver.LocationDevice, 0, f)))
		got, res := r.MemGetAccess(rw.Location, p+chunk)
		r.ok(res)
		require.Equal(t, f, got)
	}
	_, res = r.MemGetAccess(rw.Location, q+chunk)
	r.is(driver.InvalidValue, res)
	// Memory of two devices in one reservation, both granted in one call.
	r.ok(r.MemUnmap(p, 2*chunk))
	r.ok(r.MemRelease(big))
	small2 := r.create(chunk, on(0, 0))
	r.ok(r.MemMap(p, chunk, 0, small2))
	r.ok(r.MemMap(p+chunk, chunk, 0, other))
	r.ok(set(p, 2*chunk, rw, grant(driver.LocationDevice, 1, driver.AccessReadWrite)))
	r.ok(r.MemUnmap(p, 3*chunk))
	r.ok(r.MemAddressFree(p, 2*chunk))
	r.ok(r.MemAddressFree(q, chunk))
	for _, h := range []driver.MemHandle{small, small2, other} {
		r.ok(r.MemRelease(h))
	}
}

func TestHostMemoryIsTheCPUsAtItsAddress(t *testing.T) {
	r := start(t, Options{})
	if !osmem.Linux {
		t.Skip("pages can only be placed on Linux, amd64 and arm64")
	}
	for _, prop := range []driver.AllocationProp{
		at(driver.LocationHost, 0, 0), at(driver.LocationHostNUMA, 0, driver.HandlePosixFD),
	} {
		h := r.create(chunk, prop)
		p := r.reserve(2 * chunk)
		r.ok(r.MemMap(p, chunk, 0, h))
		r.ok(r.MemMap(p+chunk, chunk, 0, h))
		r.ok(r.MemSetAccess(p, 2*chunk, []driver.AccessDesc{
			grant(driver.LocationDevice, 0, driver.AccessReadWrite),
			grant(prop.Location.Type, 0, driver.AccessReadWrite),
		}))
		cpu := unsafe.Slice((*byte)(hostPointer(p)), 2*chunk)
		copy(cpu[chunk:], "from the CPU")
		require.Equal(t, "from the CPU", string(cpu[:12]))
		require.Equal(t, []byte("from the CPU"), r.bytes(p, 12))
		s := r.stream(0)
		r.ok(r.MemsetD8Async(r.ctx, p, 'x', 4, s))
		r.ok(r.StreamSynchronize(r.ctx, s))
		require.Equal(t, "xxxx the CPU", string(cpu[:12]))
		r.ok(r.MemUnmap(p, 2*chunk))
		r.ok(r.MemAddressFree(p, 2*chunk))
		r.ok(r.MemRelease(h))
	}
}

// hostPointer reads an address of the device as one of the CPU.
func hostPointer(p driver.Ptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

func TestManyAllocationsExhaustNothing(t *testing.T) {
	const n = 70_000 // more than the mappings and the descriptors that a process may have
	r := start(t, Options{Devices: []DeviceOptions{{Memory: n * chunk}}})
	var types driver.HandleTypes
	if osmem.Linux {
		types = driver.HandlePosixFD
	}
	before := kernelMappings(t)
	p := r.reserve(n * chunk)
	for i := range driver.Ptr(n) {
		h := r.create(chunk, on(0, types))
		r.ok(r.MemMap(p+i*chunk, chunk, 0, h))
		r.ok(r.MemRelease(h))
		if i%1000 == 0 {
			require.NoError(t, r.m.Poke(cuda.Ptr(p+i*chunk), []byte{1}))
		}
	}
	require.Zero(t, r.free())
	require.Less(t, kernelMappings(t), before+100)
	r.allow(p, n*chunk, 0)
	r.ok(r.MemUnmap(p, n*chunk))
	require.Equal(t, n*chunk, r.free())
	r.ok(r.MemAddressFree(p, n*chunk))
}

// kernelMappings is how many the process has, where that can be read.
func kernelMappings(t *testing.T) int {
	maps, err := os.ReadFile("/proc/self/maps")
	if runtime.GOOS != "linux" {
		return 0
	}
	require.NoError(t, err)
	return bytes.Count(maps, []byte{'\n'})
}

func TestStrayCPUAccessFaults(t *testing.T) {
	if !osmem.Linux {
		t.Skip("the address window needs Linux on amd64 or arm64")
	}
	r := start(t, Options{})
	d, res := r.MemAlloc(r.ctx, 64)
	r.ok(res)
	h := r.create(chunk, at(driver.LocationHost, 0, 0))
	host := r.reserve(chunk)
	r.ok(r.MemMap(host, chunk, 0, h))
	for what, p := range map[string]driver.Ptr{
		"mapped device memory":          r.mapped(1),
		"allocated device memory":       d,
		"host memory without access":    host,
		"a reservation":                 host + chunk - 1,
		"what follows the reservations": host + 2*chunk,
	} {
		require.True(t, touchFaults(p), what)
	}
	r.ok(r.MemSetAccess(host, chunk, []driver.AccessDesc{grant(driver.LocationHost, 0, driver.AccessRead)}))
	require.False(t, touchFaults(host))
	r.ok(r.MemUnmap(host, chunk))
	require.True(t, touchFaults(host))
	r.ok(r.MemAddressFree(host, chunk))
	r.ok(r.MemRelease(h))
	r.ok(r.MemFree(r.ctx, d))
}

var touched byte

func touchFaults(p driver.Ptr) (faulted bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { faulted = recover() != nil }()
	touched = *(*byte)(hostPointer(p))
	return false
}

func BenchmarkChunkCycle(b *testing.B) {
	r := start(b, Options{})
	p := r.reserve(chunk)
	rw := []driver.AccessDesc{grant(driver.LocationDevice, 0, driver.AccessReadWrite)}
	for b.Loop() {
		h, _ := r.MemCreate(chunk, on(0, 0))
		r.MemMap(p, chunk, 0, h)
		r.MemSetAccess(p, chunk, rw)
		r.MemUnmap(p, chunk)
		r.MemRelease(h)
	}
	r.ok(r.MemAddressFree(p, chunk))
}

func TestReleaseOfAJunkHandlePanics(t *testing.T) {
	r := start(t, Options{})
	require.Panics(t, func() { r.MemRelease(12345) })
}

func TestOtherGranularities(t *testing.T) {
	r := start(t, WithGranularity(64<<10))
	g, res := r.MemGetAllocationGranularity(on(0, 0), driver.GranularityMinimum)
	r.ok(res)
	require.EqualValues(t, 64<<10, g)
	h := r.create(64<<10, on(0, 0))
	p := r.reserve(128 << 10)
	r.ok(r.MemMap(p+64<<10, 64<<10, 0, h))
	r.allow(p+64<<10, 64<<10, 0)
	r.ok(r.MemUnmap(p, 128<<10))
	r.ok(r.MemRelease(h))
	r.ok(r.MemAddressFree(p, 128<<10))
}
