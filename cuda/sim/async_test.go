package sim

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestStreamOrderedMemory(t *testing.T) {
	r := start(t, Options{})
	before, s := r.free(), r.stream(1)
	r.m.Hold(uintptr(s))
	p, res := r.MemAllocAsync(r.ctx, chunk, s)
	r.ok(res)
	r.ok(r.MemsetD8Async(r.ctx, p, 8, chunk, s))
	dst := r.mapped(1)
	r.ok(r.MemcpyDtoDAsync(r.ctx, dst, p, chunk, s))
	r.ok(r.MemFreeAsync(r.ctx, p, s))
	r.is(driver.InvalidValue, r.MemFreeAsync(r.ctx, p, s))
	r.is(driver.InvalidValue, r.MemFree(r.ctx, p))
	require.Equal(t, before-2*chunk, r.free())
	r.m.Release(uintptr(s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, repeated(8, chunk), r.bytes(dst, chunk))
	require.Equal(t, before-chunk, r.free())
	r.is(driver.InvalidValue, r.MemsetD8Async(r.ctx, p, 8, 1, s))
}

func TestStreamOrderedMemoryCanBeFreedAtOnce(t *testing.T) {
	r := start(t, Options{})
	before, s := r.free(), r.stream(1)
	p, res := r.MemAllocAsync(r.ctx, 100, s)
	r.ok(res)
	r.ok(r.MemFree(r.ctx, p))
	require.Equal(t, before, r.free())
	d, res := r.MemAlloc(r.ctx, 100)
	r.ok(res)
	r.is(driver.InvalidValue, r.MemFreeAsync(r.ctx, d, s))
	r.ok(r.MemFree(r.ctx, d))
}

func TestALossBeforeAFreeIsDoneLeaksNothing(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	d := driver.Of(m).Foreign()
	require.Zero(t, d.Init())
	c, r := d.CtxCreate(0, 0)
	require.Zero(t, r)
	s, r := d.StreamCreate(c, driver.StreamNonBlocking)
	require.Zero(t, r)
	p, r := d.MemAllocAsync(c, 100, s)
	require.Zero(t, r)
	m.Hold(uintptr(s))
	require.Zero(t, d.MemFreeAsync(c, p, s))
	m.Inject(Fault{Result: 700})
	require.Equal(t, driver.IllegalAddress, d.CtxSynchronize(c))
	_ = d.StreamDestroy(c, s)
	require.Zero(t, d.CtxDestroy(c))
	require.Empty(t, m.Leaks())
	free, total := m.Memory(0)
	require.Equal(t, total, free)
	require.NoError(t, m.Close())
}

func TestStreamOrderedMemoryUsedTooEarlyOrTooLate(t *testing.T) {
	faulty(t, driver.IllegalAddress, "put this work behind it", func(r *rig, c driver.Context, s driver.Stream) {
		other, res := r.StreamCreate(c, 1)
		r.ok(res)
		r.m.Hold(uintptr(other))
		p, res := r.MemAllocAsync(c, 8, other)
		r.ok(res)
		r.ok(r.MemsetD8Async(c, p, 1, 8, s)) // not ordered behind the allocation
		r.is(driver.IllegalAddress, r.StreamSynchronize(c, s))
		r.is(driver.IllegalAddress, r.StreamDestroy(c, other))
		r.is(driver.IllegalAddress, r.MemFree(c, p))
	})
	faulty(t, driver.IllegalAddress, "was it freed before the work was done", func(r *rig, c driver.Context, s driver.Stream) {
		other, res := r.StreamCreate(c, 1)
		r.ok(res)
		p, res := r.MemAllocAsync(c, 8, other)
		r.ok(res)
		r.ok(r.StreamSynchronize(c, other))
		r.m.Hold(uintptr(s))
		r.ok(r.MemsetD8Async(c, p, 1, 8, s))
		r.ok(r.MemFreeAsync(c, p, other)) // not ordered behind the work
		r.ok(r.StreamSynchronize(c, other))
		r.m.Release(uintptr(s))
		r.is(driver.IllegalAddress, r.StreamSynchronize(c, s))
		r.is(driver.IllegalAddress, r.StreamDestroy(c, other))
	})
}

func TestDeviceWithoutPools(t *testing.T) {
	r := start(t, Options{Devices: []DeviceOptions{{Attributes: map[int]int{
		int(driver.AttrMemoryPools): 0, int(driver.AttrStreamMemOps64): 0, int(driver.AttrDMABuf): 0,
	}}}})
	_, res := r.MemAllocAsync(r.ctx, 8, 0)
	r.is(driver.NotSupported, res)
	p := r.mapped(1)
	r.is(driver.NotSupported, r.StreamWriteValue64(r.ctx, 0, p, 1))
	r.is(driver.NotSupported, r.StreamWaitValue64(r.ctx, 0, p, 1))
	_, res = r.MemGetHandleForAddressRange(r.ctx, p, chunk, 0)
	r.is(driver.NotSupported, res)
}

func TestStreamMemoryOperations(t *testing.T) {
	r := start(t, Options{})
	p, a, b := r.mapped(1), r.stream(1), r.stream(1)
	r.ok(r.StreamWaitValue64(r.ctx, a, p, 5))
	r.ok(r.MemcpyDtoDAsync(r.ctx, p+8, p, 8, a))
	r.ok(r.StreamWriteValue64(r.ctx, b, p, 4))
	r.ok(r.StreamSynchronize(r.ctx, b))
	r.is(driver.NotReady, r.StreamQuery(r.ctx, a))
	r.ok(r.StreamWriteValue64(r.ctx, b, p, 6)) // at least 5
	r.ok(r.StreamSynchronize(r.ctx, a))
	require.Equal(t, byte(6), r.bytes(p+8, 1)[0])
	r.ok(r.StreamWriteValue64(r.ctx, b, p, 3))
	r.ok(r.StreamWaitValue64(r.ctx, b, p, ^uint64(0)-3)) // cyclically, 3 is later
	r.ok(r.StreamSynchronize(r.ctx, b))
	r.is(driver.InvalidValue, r.StreamWriteValue64(r.ctx, a, p+4, 1))
	r.is(driver.InvalidValue, r.StreamWaitValue64(r.ctx, a, p+chunk, 1))
	faulty(t, driver.IllegalAddress, "cuStreamWaitValue64", func(r *rig, c driver.Context, s driver.Stream) {
		p := r.mapped(1)
		r.ok(r.StreamWaitValue64(c, s, p, 1))
		r.ok(r.MemSetAccess(p, chunk, []driver.AccessDesc{grant(driver.LocationDevice, 0, driver.AccessNone)}))
	})
}
