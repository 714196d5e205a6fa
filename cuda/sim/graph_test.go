package sim

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestLaunchesOfOneGraphDoNotOverlap(t *testing.T) {
	r := start(t, Options{})
	p, a, b := r.mapped(1), r.stream(1), r.stream(1)
	r.begin(a)
	r.ok(r.MemcpyDtoDAsync(r.ctx, p+4, p, 4, a))
	e := r.end(a)
	r.m.Hold(uintptr(a))
	r.ok(r.GraphLaunch(r.ctx, e, a))
	r.ok(r.GraphLaunch(r.ctx, e, b)) // behind the first, on another stream
	time.Sleep(3 * laziness)
	r.is(driver.NotReady, r.StreamQuery(r.ctx, b))
	r.m.Release(uintptr(a))
	r.ok(r.CtxSynchronize(r.ctx))
	r.is(driver.InvalidValue, r.GraphLaunch(r.ctx, 99, a))
}

func TestReplayOverNothingLosesTheContext(t *testing.T) {
	faulty(t, driver.LaunchFailed, "in a launched graph: cuMemsetD8Async", func(r *rig, c driver.Context, s driver.Stream) {
		p := r.reserve(chunk)
		h := r.create(chunk, on(0, 0))
		r.ok(r.MemMap(p, chunk, 0, h))
		r.allow(p, chunk, 0)
		r.ok(r.lib.StreamBeginCapture(c, s, driver.CaptureRelaxed))
		r.ok(r.MemsetD8Async(c, p, 1, chunk, s))
		g, res := r.lib.StreamEndCapture(c, s)
		r.ok(res)
		e, res := r.GraphInstantiate(c, g)
		r.ok(res)
		r.ok(r.GraphLaunch(c, e, s))
		r.ok(r.StreamSynchronize(c, s))
		r.ok(r.MemUnmap(p, chunk))
		r.ok(r.GraphLaunch(c, e, s))
		r.t.Cleanup(func() {
			r.ok(r.GraphExecDestroy(e))
			r.ok(r.GraphDestroy(g))
			r.is(driver.InvalidValue, r.GraphDestroy(g))
			r.ok(r.MemRelease(h))
			r.ok(r.MemAddressFree(p, chunk))
		})
	})
}

func TestGraphOwnsTheMemoryThatItAllocates(t *testing.T) {
	r := start(t, Options{})
	before := r.free()
	p, s := r.mapped(1), r.stream(1)
	r.begin(s)
	tmp, res := r.MemAllocAsync(r.ctx, chunk, s)
	r.ok(res)
	r.ok(r.MemsetD8Async(r.ctx, tmp, 6, chunk, s))
	r.ok(r.MemcpyDtoDAsync(r.ctx, p, tmp, chunk, s))
	r.ok(r.MemFreeAsync(r.ctx, tmp, s))
	g, res := r.lib.StreamEndCapture(r.ctx, s)
	r.ok(res)
	n, res := r.GraphGetNodeCount(g)
	r.ok(res)
	require.EqualValues(t, 4, n)
	e, res := r.GraphInstantiate(r.ctx, g)
	r.ok(res)
	for range 3 {
		r.ok(r.GraphLaunch(r.ctx, e, s))
	}
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, repeated(6, chunk), r.bytes(p, chunk))
	_, err := r.m.Bytes(cuda.Ptr(tmp), 1)
	require.Error(t, err) // the graph has freed it
	require.Zero(t, r.m.Live()[KindDeviceMemory])
	require.Equal(t, before-2*chunk, r.free())
	r.ok(r.GraphDestroy(g))
	r.ok(r.GraphExecDestroy(e))
	require.Equal(t, before-chunk, r.free())
	r.is(driver.InvalidValue, r.MemsetD8Async(r.ctx, tmp, 6, 1, s))
	r.is(driver.InvalidValue, r.GraphExecDestroy(e))
}

// A graph's own memory is as new at every launch.
func TestGraphMemoryIsPoisonedAtEveryLaunch(t *testing.T) {
	r := start(t, Options{Poison: true})
	p, s := r.mapped(1), r.stream(1)
	r.begin(s)
	tmp, res := r.MemAllocAsync(r.ctx, 64, s)
	r.ok(res)
	r.ok(r.MemcpyDtoDAsync(r.ctx, p, tmp, 64, s)) // before anything is there
	r.ok(r.MemsetD8Async(r.ctx, tmp, 6, 64, s))
	r.ok(r.MemFreeAsync(r.ctx, tmp, s))
	e := r.end(s)
	for range 3 {
		require.NoError(t, r.m.Poke(cuda.Ptr(p), make([]byte, 64)))
		r.ok(r.GraphLaunch(r.ctx, e, s))
		r.ok(r.StreamSynchronize(r.ctx, s))
		require.Equal(t, repeated(PoisonByte, 64), r.bytes(p, 64))
	}
}

func TestGraphMemoryThatOutlivesItsLaunch(t *testing.T) {
	r := start(t, Options{})
	before := r.free()
	s := r.stream(1)
	r.begin(s)
	p, res := r.MemAllocAsync(r.ctx, 4096, s)
	r.ok(res)
	r.ok(r.MemsetD8Async(r.ctx, p, 4, 4096, s))
	g, res := r.lib.StreamEndCapture(r.ctx, s)
	r.ok(res)
	e, res := r.GraphInstantiate(r.ctx, g)
	r.ok(res)
	r.ok(r.GraphLaunch(r.ctx, e, s))
	r.ok(r.MemsetD8Async(r.ctx, p, 5, 1, s)) // behind the launch it is there
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, []byte{5, 4}, r.bytes(p, 2))
	r.is(driver.InvalidValue, r.GraphLaunch(r.ctx, e, s)) // it was not freed
	r.ok(r.MemFreeAsync(r.ctx, p, s))
	r.ok(r.GraphLaunch(r.ctx, e, s))
	r.ok(r.GraphDestroy(g))
	r.ok(r.GraphExecDestroy(e))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, []byte{4, 4}, r.bytes(p, 2))
	r.ok(r.MemFree(r.ctx, p))
	require.Equal(t, before, r.free())
}

func TestGraphAbandonedInCaptureGivesItsAddressesBack(t *testing.T) {
	r := start(t, Options{})
	s := r.stream(1)
	r.begin(s)
	p, res := r.MemAllocAsync(r.ctx, 4096, s)
	r.ok(res)
	r.is(driver.CaptureUnsupported, r.StreamSynchronize(r.ctx, s))
	r.endsWith(driver.CaptureInvalid, s)
	r.is(driver.InvalidValue, r.MemFreeAsync(r.ctx, p, s))
	require.Zero(t, r.m.leased.len())
}

func TestGraphWaitsForAValue(t *testing.T) {
	r := start(t, Options{})
	p, s := r.mapped(1), r.stream(1)
	r.begin(s)
	r.ok(r.StreamWaitValue64(r.ctx, s, p, 1))
	r.ok(r.StreamWriteValue64(r.ctx, s, p+8, 2))
	e := r.end(s)
	r.ok(r.GraphLaunch(r.ctx, e, s))
	time.Sleep(3 * laziness)
	r.is(driver.NotReady, r.StreamQuery(r.ctx, s))
	other := r.stream(1)
	r.ok(r.StreamWriteValue64(r.ctx, other, p, 1))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, byte(2), r.bytes(p+8, 1)[0])
}

// A launch that was submitted before its module was unloaded is done; a later one is not,
// of a graph in a graph either.
func TestAGraphOutlivesNoModule(t *testing.T) {
	for _, nested := range []bool{false, true} {
		r := start(t, Options{})
		m, res := r.ModuleLoadData(r.ctx, []byte(testPTX))
		r.ok(res)
		f, res := r.ModuleGetFunction(r.ctx, m, "sim_test_scale")
		r.ok(res)
		p, s := r.mapped(1), r.stream(driver.StreamNonBlocking)
		r.begin(s)
		r.ok(r.LaunchKernel(r.ctx, f, one, scaleParams(p, 1, floatTwo), s))
		exec := r.end(s)
		if nested {
			r.begin(s)
			r.ok(r.GraphLaunch(r.ctx, exec, s))
			exec = r.end(s)
		}
		release := r.m.Hold(uintptr(s))
		r.ok(r.GraphLaunch(r.ctx, exec, s))
		r.ok(r.ModuleUnload(r.ctx, m))
		release()
		r.ok(r.StreamSynchronize(r.ctx, s))
		r.ok(r.GraphLaunch(r.ctx, exec, s))
		r.is(driver.LaunchFailed, r.StreamSynchronize(r.ctx, s))
		require.Contains(t, r.m.Fault(), "after the module of its kernel sim_test_scale was unloaded")
	}
}
