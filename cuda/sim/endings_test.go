package sim

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// busyMachine is a machine of whose context one stream is held with work on it.
func busyMachine(t *testing.T, o Options) (m *Machine, d driver.Driver, c driver.Context, held driver.Stream) {
	t.Helper()
	m, err := New(o)
	require.NoError(t, err)
	d = driver.Of(m)
	require.Zero(t, d.Init())
	c, res := d.DevicePrimaryCtxRetain(0)
	require.Zero(t, res)
	held, res = d.StreamCreate(c, driver.StreamNonBlocking)
	require.Zero(t, res)
	p, res := d.MemAlloc(c, 64)
	require.Zero(t, res)
	m.Hold(uintptr(held))
	require.Zero(t, d.MemsetD8Async(c, p, 1, 64, held))
	return m, d, c, held
}

// stalledBy has a call wait for the whole context, so that no other call can submit to
// it.
func stalledBy(t *testing.T, m *Machine, d driver.Driver, c driver.Context) (freed chan driver.Result) {
	t.Helper()
	q, res := d.MemAlloc(c, 64)
	require.Zero(t, res)
	freed = make(chan driver.Result, 1)
	go func() { freed <- d.MemFree(c, q) }()
	eventually(t, m, func() bool { return m.contexts[c].stalls == 1 })
	return freed
}

// eventually waits for something that is under the machine's lock.
func eventually(t *testing.T, m *Machine, f func() bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return f()
	}, time.Minute, time.Millisecond)
}

func TestCloseWhileAnAllocationWaitsForItsStream(t *testing.T) {
	m, d, c, _ := busyMachine(t, Options{})
	s, res := d.StreamCreate(c, driver.StreamNonBlocking)
	require.Zero(t, res)
	freed, allocated := stalledBy(t, m, d, c), make(chan driver.Result, 1)
	go func() {
		_, r := d.MemAllocAsync(c, 64, s)
		allocated <- r
	}()
	eventually(t, m, func() bool { return m.backing.len() == 3 })
	require.Error(t, m.Close())
	require.Equal(t, driver.Deinitialized, <-allocated)
	require.Equal(t, driver.Deinitialized, <-freed)
}

// A call that waits for a copy to leave host memory finds the machine gone.
func TestCloseWhileHostMemoryIsBeingLeft(t *testing.T) {
	for name, end := range map[string]func(d driver.Foreign, c driver.Context, p []byte) driver.Result{
		"freed":         func(d driver.Foreign, c driver.Context, p []byte) driver.Result { return d.MemFreeHost(c, pointer(p)) },
		"its context's": func(d driver.Foreign, c driver.Context, p []byte) driver.Result { return d.CtxDestroy(c) },
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{}
			if runtime.GOOS == "linux" {
				o.Folder = t.TempDir()
			}
			m, err := New(o)
			require.NoError(t, err)
			d := driver.Of(m).Foreign()
			require.Zero(t, d.Init())
			c, res := d.CtxCreate(0, 0)
			require.Zero(t, res)
			p, res := d.MemHostAlloc(c, 64, 0)
			require.Zero(t, res)
			m.mu.Lock()
			r := m.hostRange(KindHostMemory, p)
			r.busy++ // a copy of another context
			m.mu.Unlock()
			ended := make(chan driver.Result, 1)
			go func() { ended <- end(d, c, r.host) }()
			eventually(t, m, func() bool { return m.backing.len() == 0 })
			_ = m.Close()
			m.mu.Lock()
			r.busy--
			m.changed.Broadcast()
			m.mu.Unlock()
			<-ended
		})
	}
}

// An executable graph that is destroyed while its launch waits to be submitted
// lives until the launch is done.
func TestGraphDestroyedWhileItsLaunchWaits(t *testing.T) {
	m, d, c, held := busyMachine(t, Options{})
	before, _ := m.Memory(0)
	s, _ := d.StreamCreate(c, driver.StreamNonBlocking)
	require.Zero(t, d.StreamBeginCapture(c, s, driver.CaptureRelaxed))
	p, res := d.MemAllocAsync(c, 64, s)
	require.Zero(t, res)
	require.Zero(t, d.MemsetD8Async(c, p, 1, 64, s))
	require.Zero(t, d.MemFreeAsync(c, p, s))
	g, res := d.StreamEndCapture(c, s)
	require.Zero(t, res)
	e, res := d.GraphInstantiate(c, g)
	require.Zero(t, res)
	require.Zero(t, d.GraphDestroy(g))
	freed, launched := stalledBy(t, m, d, c), make(chan driver.Result, 1)
	go func() { launched <- d.GraphLaunch(c, e, s) }()
	eventually(t, m, func() bool { return m.execs[e].leases[0].refs == 2 })
	require.Zero(t, d.GraphExecDestroy(e))
	m.Release(uintptr(held))
	require.Zero(t, <-freed)
	require.Zero(t, <-launched)
	require.Zero(t, d.StreamSynchronize(c, s))
	after, _ := m.Memory(0)
	require.Equal(t, before, after)
	require.Zero(t, m.leased.len())
	require.Empty(t, m.Fault())
	require.Error(t, m.Close())
}

func TestKernelThatEndsItsGoroutine(t *testing.T) {
	faulty(t, driver.LaunchFailed, "kernel sim_test_goexit: its Go function ended its goroutine", func(r *rig, c driver.Context, s driver.Stream) {
		r.ok(r.LaunchKernel(c, r.function(c, "sim_test_goexit"), one, nil, s))
	})
}

func TestKernelAtTheEndOfAllAddresses(t *testing.T) {
	faulty(t, driver.IllegalAddress, "kernel sim_test_scale: cuLaunchKernel on [0xfffffffffffffff8", func(r *rig, c driver.Context, s driver.Stream) {
		r.ok(r.LaunchKernel(c, r.function(c, "sim_test_scale"), one, scaleParams(^driver.Ptr(7), 16, floatTwo), s))
	})
}

// The loss of a context ends what it runs, as on a GPU.
func TestALostContextEndsItsKernels(t *testing.T) {
	faulty(t, driver.IllegalAddress, "cuMemsetD8Async", func(r *rig, c driver.Context, s driver.Stream) {
		p, res := r.MemHostAlloc(r.ctx, 16, 0)
		r.ok(res)
		r.t.Cleanup(func() { r.ok(r.MemFreeHost(r.ctx, p)) })
		word := binary.NativeEndian.AppendUint64(nil, uint64(uintptr(p)))
		f := r.function(c, "sim_test_gate")
		other, res := r.StreamCreate(c, driver.StreamNonBlocking)
		r.ok(res)
		r.ok(r.LaunchKernel(c, f, one, word, other))
		require.Eventually(r.t, func() bool { return gate.Load() == 1 }, time.Minute, time.Millisecond)
		r.ok(r.MemsetD8Async(c, r.denied(), 1, 8, s))
		r.is(driver.IllegalAddress, r.StreamSynchronize(c, s))
		require.Eventually(r.t, func() bool { return gate.Load() == 0 }, time.Minute, time.Millisecond)
		r.is(driver.IllegalAddress, r.StreamDestroy(c, other))
	})
}

func TestALostContextEndsItsGraphs(t *testing.T) {
	faulty(t, driver.IllegalAddress, "cuMemsetD8Async", func(r *rig, c driver.Context, s driver.Stream) {
		p := r.mapped(1)
		other, res := r.StreamCreate(c, driver.StreamNonBlocking)
		r.ok(res)
		r.ok(r.lib.StreamBeginCapture(c, other, driver.CaptureRelaxed))
		r.ok(r.StreamWaitValue64(c, other, p, 1))
		r.ok(r.MemsetD8Async(c, p+8, 1, 1, other))
		g, res := r.lib.StreamEndCapture(c, other)
		r.ok(res)
		e, res := r.GraphInstantiate(c, g)
		r.ok(res)
		r.ok(r.GraphDestroy(g))
		r.ok(r.GraphLaunch(c, e, other))
		eventually(t, r.m, func() bool { return r.m.engine.long == 1 })
		r.ok(r.MemsetD8Async(c, r.denied(), 1, 8, s))
		r.is(driver.IllegalAddress, r.StreamSynchronize(c, s))
		eventually(t, r.m, func() bool { return r.m.engine.long == 0 })
		require.Zero(t, r.bytes(p+8, 1)[0], "what waited in the graph was dropped")
		r.ok(r.GraphExecDestroy(e))
		r.is(driver.IllegalAddress, r.StreamDestroy(c, other))
	})
}

// No call can end a capture in a context that was lost: it is in no one's way.
func TestALostContextEndsItsCaptures(t *testing.T) {
	needThreads(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	faulty(t, driver.IllegalAddress, "cuMemsetD8Async", func(r *rig, c driver.Context, s driver.Stream) {
		other, res := r.StreamCreate(c, driver.StreamNonBlocking)
		r.ok(res)
		r.ok(r.StreamBeginCapture(c, other, driver.CaptureGlobal))
		p, res := r.MemAllocAsync(c, 64, other)
		r.ok(res)
		require.NotZero(t, p)
		r.ok(r.MemsetD8Async(c, r.denied(), 1, 8, s))
		r.is(driver.IllegalAddress, r.lib.StreamSynchronize(c, s))
		_, res = r.StreamEndCapture(c, other)
		r.is(driver.IllegalAddress, res)
		d, res := r.MemAlloc(r.ctx, 64)
		r.ok(res)
		r.ok(r.MemFree(r.ctx, d))
		require.Zero(t, r.m.leased.len())
		r.is(driver.IllegalAddress, r.StreamDestroy(c, other))
	})
}

// denied is memory that no device may touch.
func (r *rig) denied() driver.Ptr {
	p := r.mapped(1)
	r.ok(r.MemSetAccess(p, chunk, []driver.AccessDesc{grant(driver.LocationDevice, 0, driver.AccessNone)}))
	return p
}

func TestAskingAClosedMachine(t *testing.T) {
	for _, folder := range []string{"", t.TempDir()} {
		if folder != "" && runtime.GOOS != "linux" {
			continue
		}
		m, err := New(Options{Folder: folder})
		require.NoError(t, err)
		d := driver.Of(m)
		require.Zero(t, d.Init())
		c, _ := d.DevicePrimaryCtxRetain(0)
		p, res := d.MemAlloc(c, 64)
		require.Zero(t, res)
		require.Error(t, m.Close())
		_, err = m.Bytes(cuda.Ptr(p), 64)
		require.ErrorContains(t, err, "was closed")
		require.ErrorContains(t, m.Poke(cuda.Ptr(p), []byte{1}), "was closed")
		panicsWith(t, "was closed", func() { m.Memory(0) })
		require.NotEmpty(t, m.Leaks())
		require.Empty(t, m.Fault())
	}
}

func TestAskingForWhatIsNotThere(t *testing.T) {
	r := start(t, Options{})
	panicsWith(t, "Memory of device 1: the machine has 1", func() { r.m.Memory(1) })
	panicsWith(t, "Memory of device -1: the machine has 1", func() { r.m.Memory(-1) })
	_, err := r.m.Bytes(cuda.Ptr(r.mapped(1)), 1<<50)
	require.ErrorContains(t, err, "map it, or ask for less")
}
