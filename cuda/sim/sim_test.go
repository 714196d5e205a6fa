package sim

import (
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	MiB   = 1 << 20
	chunk = 2 * MiB
)

// rig is a machine under test, with its driver in both forms and a primary
// context on device 0.
type rig struct {
	driver.Foreign
	t   testing.TB
	m   *Machine
	lib driver.Driver
	ctx driver.Context
}

// start makes a machine and checks at the end that nothing was leaked on it.
func start(t testing.TB, o Options) *rig {
	t.Helper()
	m, err := New(o)
	require.NoError(t, err)
	lib := driver.Of(m)
	r := &rig{Foreign: lib.Foreign(), t: t, m: m, lib: lib}
	r.ok(r.Init())
	ctx, res := r.DevicePrimaryCtxRetain(0)
	r.ok(res)
	r.ctx = ctx
	t.Cleanup(func() {
		r.ok(r.DevicePrimaryCtxRelease(0))
		require.NoError(t, m.Close())
	})
	return r
}

func (r *rig) ok(res driver.Result) {
	r.t.Helper()
	if res != driver.Success {
		require.FailNow(r.t, res.String(), r.m.Log())
	}
}

func (r *rig) is(want, got driver.Result) {
	r.t.Helper()
	require.Equal(r.t, want.String(), got.String())
}

// on describes memory on a device.
func on(device int32, types driver.HandleTypes) driver.AllocationProp {
	p := driver.AllocationProp{Type: driver.AllocationPinned, RequestedHandleTypes: types}
	p.Location = driver.Location{Type: driver.LocationDevice, ID: device}
	return p
}

// at describes memory at a location.
func at(l driver.LocationType, id int32, types driver.HandleTypes) driver.AllocationProp {
	p := on(id, types)
	p.Location.Type = l
	return p
}

func grant(l driver.LocationType, id int32, f driver.AccessFlags) driver.AccessDesc {
	return driver.AccessDesc{Location: driver.Location{Type: l, ID: id}, Flags: f}
}

func (r *rig) create(size uint64, p driver.AllocationProp) driver.MemHandle {
	r.t.Helper()
	h, res := r.MemCreate(size, p)
	r.ok(res)
	return h
}

func (r *rig) reserve(size uint64) driver.Ptr {
	r.t.Helper()
	p, res := r.MemAddressReserve(size, 0, 0)
	r.ok(res)
	return p
}

func (r *rig) allow(p driver.Ptr, size uint64, device int32) {
	r.t.Helper()
	r.ok(r.MemSetAccess(p, size, []driver.AccessDesc{grant(driver.LocationDevice, device, driver.AccessReadWrite)}))
}

// mapped makes chunks of device memory that only their mappings keep, at
// addresses of their own, and takes all away at the end of the test.
func (r *rig) mapped(chunks int) driver.Ptr {
	r.t.Helper()
	size := uint64(chunks) * chunk
	p := r.reserve(size)
	for i := range uint64(chunks) {
		h := r.create(chunk, on(0, 0))
		r.ok(r.MemMap(p+driver.Ptr(i*chunk), chunk, 0, h))
		r.ok(r.MemRelease(h))
	}
	r.allow(p, size, 0)
	r.t.Cleanup(func() {
		r.ok(r.MemUnmap(p, size))
		r.ok(r.MemAddressFree(p, size))
	})
	return p
}

func (r *rig) stream(flags driver.StreamFlags) driver.Stream {
	r.t.Helper()
	s, res := r.StreamCreate(r.ctx, flags)
	r.ok(res)
	r.t.Cleanup(func() { r.StreamDestroy(r.ctx, s) })
	return s
}

func (r *rig) event() driver.Event {
	r.t.Helper()
	e, res := r.EventCreate(r.ctx, 0)
	r.ok(res)
	r.t.Cleanup(func() { r.EventDestroy(r.ctx, e) })
	return e
}

// pinned is host memory that the driver knows, until the end of the test.
func (r *rig) pinned(n int) []byte {
	r.t.Helper()
	p, res := r.MemHostAlloc(r.ctx, uint64(n), 0)
	r.ok(res)
	r.t.Cleanup(func() { r.MemFreeHost(r.ctx, p) })
	return unsafe.Slice((*byte)(p), n)
}

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

func (r *rig) bytes(p driver.Ptr, n int) []byte {
	r.t.Helper()
	b, err := r.m.Bytes(cuda.Ptr(p), n)
	require.NoError(r.t, err)
	return b
}

func (r *rig) free() int {
	free, _ := r.m.Memory(0)
	return free
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

func repeated(v byte, n int) []byte {
	b := make([]byte, n)
	fill(b, v)
	return b
}

func TestBytesOfNegativeLength(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	_, err = m.Bytes(0x1000, -5)
	require.ErrorContains(t, err, "-5 bytes at 0x1000; lengths are not negative")
	require.NoError(t, m.Close())
}
