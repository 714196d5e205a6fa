package sim

import (
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/stretchr/testify/require"
)

func TestNothingWorksBeforeInit(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	d := driver.Of(m)
	v, res := d.DriverGetVersion()
	require.Zero(t, res)
	require.EqualValues(t, 13000, v)
	_, res = d.DeviceGetCount()
	require.Equal(t, driver.NotInitialized, res)
	require.Zero(t, d.Init())
	n, res := d.DeviceGetCount()
	require.Zero(t, res)
	require.EqualValues(t, 1, n)
	require.NoError(t, m.Close())
	require.Equal(t, driver.Deinitialized, d.Init())
}

func TestContextOfACall(t *testing.T) {
	r := start(t, Options{})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_, res := r.MemAlloc(0, 256)
	r.is(driver.InvalidContext, res) // none is current
	_, res = r.MemAlloc(12345, 256)
	r.is(driver.InvalidContext, res)
	r.is(driver.InvalidContext, r.CtxSetCurrent(12345))
	r.ok(r.CtxSetCurrent(r.ctx))
	cur, res := r.CtxGetCurrent()
	r.ok(res)
	require.Equal(t, r.ctx, cur)
	p, res := r.MemAlloc(0, 256)
	r.ok(res)
	r.ok(r.MemFree(0, p))

	other, res := r.CtxCreate(0, 0)
	r.ok(res)
	cur, _ = r.CtxGetCurrent()
	require.Equal(t, r.ctx, cur, "creating a context leaves the current one")
	done := make(chan driver.Context)
	go func() {
		runtime.LockOSThread() // and ends with its thread
		c, _ := r.CtxGetCurrent()
		done <- c
	}()
	if theirs := <-done; osmem.Linux {
		require.Zero(t, theirs, "the current context belongs to the thread")
	}
	r.ok(r.CtxDestroy(other))
	r.is(driver.InvalidContext, r.CtxDestroy(other))
	r.is(driver.InvalidContext, r.CtxDestroy(r.ctx)) // it is the primary one
	_, res = r.CtxGetDevice(other)
	r.is(driver.InvalidContext, res)
	r.ok(r.CtxSetCurrent(0))
}

func TestPrimaryContextIsCounted(t *testing.T) {
	r := start(t, Options{Devices: []DeviceOptions{{}, {ContextMemory: 100 << 20}}})
	_, active, res := r.DevicePrimaryCtxGetState(1)
	r.ok(res)
	require.False(t, active)
	before, _ := r.m.Memory(1)
	a, res := r.DevicePrimaryCtxRetain(1)
	r.ok(res)
	b, res := r.DevicePrimaryCtxRetain(1)
	r.ok(res)
	require.Equal(t, a, b)
	during, _ := r.m.Memory(1)
	require.Equal(t, 100<<20, before-during)
	r.ok(r.DevicePrimaryCtxRelease(1))
	_, active, _ = r.DevicePrimaryCtxGetState(1)
	require.True(t, active)
	r.ok(r.DevicePrimaryCtxRelease(1))
	r.is(driver.InvalidContext, r.DevicePrimaryCtxRelease(1))
	_, _, res = r.MemGetInfo(a)
	r.is(driver.InvalidContext, res)
	after, _ := r.m.Memory(1)
	require.Equal(t, before, after)
}

// stalled runs f and requires that it waits while a stream is held, and that
// meanwhile no call can submit to the context, but to another.
func stalled(t *testing.T, r *rig, wait func() driver.Result) {
	p, s, other := r.mapped(1), r.stream(driver.StreamNonBlocking), r.stream(driver.StreamNonBlocking)
	second, res := r.CtxCreate(0, 0)
	r.ok(res)
	defer func() { r.ok(r.CtxDestroy(second)) }()
	r.m.Hold(uintptr(s))
	r.ok(r.MemsetD8Async(r.ctx, p, 1, 8, s))
	waited, submitted := make(chan driver.Result, 1), make(chan driver.Result, 1)
	go func() { waited <- wait() }()
	time.Sleep(20 * time.Millisecond)
	go func() { submitted <- r.MemsetD8Async(r.ctx, p, 1, 8, other) }()
	time.Sleep(20 * time.Millisecond)
	require.Empty(t, waited)
	require.Empty(t, submitted)
	r.ok(r.MemsetD8Async(second, p, 1, 8, driver.StreamNull))
	r.ok(r.StreamSynchronize(second, driver.StreamNull))
	r.allow(p, chunk, 0) // virtual memory does not wait
	r.m.Release(uintptr(s))
	r.ok(<-waited)
	r.ok(<-submitted)
	r.ok(r.CtxSynchronize(r.ctx))
}

func TestFreeingWaitsForTheContextAndStallsIt(t *testing.T) {
	r := start(t, Options{})
	t.Run("device memory", func(t *testing.T) {
		p, res := r.MemAlloc(r.ctx, 256)
		r.ok(res)
		stalled(t, r, func() driver.Result { return r.MemFree(r.ctx, p) })
		r.is(driver.InvalidValue, r.MemFree(r.ctx, p))
	})
	t.Run("pinned memory", func(t *testing.T) {
		p, res := r.MemHostAlloc(r.ctx, 256, 0)
		r.ok(res)
		stalled(t, r, func() driver.Result { return r.MemFreeHost(r.ctx, p) })
		r.is(driver.InvalidValue, r.MemFreeHost(r.ctx, p))
	})
}

func TestDestroyingAContextTakesItsThingsAlong(t *testing.T) {
	m, err := New(Options{})
	require.NoError(t, err)
	d := driver.Of(m).Foreign()
	require.Zero(t, d.Init())
	c, _ := d.CtxCreate(0, 0)
	_, _ = d.StreamCreate(c, 0)
	_, _ = d.EventCreate(c, 0)
	_, _ = d.MemAlloc(c, 100)
	_, _ = d.MemHostAlloc(c, 100, 0)
	require.Zero(t, d.CtxDestroy(c))
	require.Empty(t, m.Live())
	free, total := m.Memory(0)
	require.Equal(t, total, free)
	leaks := m.Leaks()
	require.Len(t, leaks, 4)
	for i, kind := range []string{KindStream, KindEvent, KindDeviceMemory, KindHostMemory} {
		require.Equal(t, kind, leaks[i].Kind)
		require.Equal(t, "destroyed with its context", leaks[i].Note)
	}
	require.Error(t, m.Close())
}
