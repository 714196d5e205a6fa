package cuda_test

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// While Close is refused, others go on as if it had not been called.
func TestARefusedSystemCloseDisturbsNothing(t *testing.T) {
	_, d := open(t)
	stream(t, d) // lives
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				e, err := d.NewEvent(cuda.EventOptions{})
				if err != nil {
					t.Error(err)
					return
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 2000 {
		require.ErrorIs(t, d.System().Close(), cuda.ErrInUse)
	}
	cancel()
	wg.Wait()
}

// A System whose Close failed halfway is out of use and is not shared: the next Open
// makes another one, and Close may be called again.
func TestASystemThatFailsToCloseIsNotOpenedAgain(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	closed(t, m)
	var process cuda.Shared
	first, err := cuda.OpenShared(&process, driver.Of(m))
	require.NoError(t, err)
	h, err := first.Devices()[0].NewHostBuffer(10)
	require.NoError(t, err)
	require.NoError(t, h.Close())
	m.Inject(sim.Fault{Call: "cuMemFreeHost", Result: cuda.Code(driver.Unknown), Times: 1})
	require.ErrorContains(t, first.Close(), "idle pinned host memory")
	_, err = first.Device(0)
	require.ErrorIs(t, err, cuda.ErrClosed)

	second, err := cuda.OpenShared(&process, driver.Of(m))
	require.NoError(t, err)
	require.NotSame(t, first, second)
	d, err := second.Device(0)
	require.NoError(t, err)
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	require.NoError(t, first.Close(), "what is left of the first")
	require.NoError(t, first.Close())
	require.NoError(t, e.Close())
	require.NoError(t, second.Close())
}

// A context that the driver did not release is released by the next Close.
func TestCloseAgainReleasesTheContextsThatAreLeft(t *testing.T) {
	m, err := sim.New(sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	for _, d := range sys.Devices() {
		_, err := d.Context()
		require.NoError(t, err)
	}
	m.Inject(sim.Fault{Call: "cuDevicePrimaryCtxRelease", Result: cuda.Code(driver.Unknown), Times: 1})
	require.ErrorContains(t, sys.Close(), "cuDevicePrimaryCtxRelease")
	require.Equal(t, 1, m.Count("cuDevicePrimaryCtxRelease")-1, "the other context was released")
	require.NoError(t, sys.Close())
	require.Equal(t, 3, m.Count("cuDevicePrimaryCtxRelease"))
	require.NoError(t, sys.Close())
	require.Equal(t, 3, m.Count("cuDevicePrimaryCtxRelease"))
}

func TestCloseSaysThatObjectsWereLost(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.Error(t, m.Close(), "the event stays") })
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	func() {
		_, err := sys.Devices()[0].NewEvent(cuda.EventOptions{})
		require.NoError(t, err)
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		return sys.Stats().Lost == 1
	}, time.Minute, time.Millisecond)
	err = sys.Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "1 object lost without Close")
	require.ErrorContains(t, err, "stays until the process ends")
}

func TestASystemIsClosedByItsLastUser(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	closed(t, m)
	var process cuda.Shared
	first, err := cuda.OpenShared(&process, driver.Of(m))
	require.NoError(t, err)
	second, err := cuda.OpenShared(&process, driver.Of(m))
	require.NoError(t, err)
	require.Same(t, first, second)
	require.NoError(t, first.Close())
	_, err = second.Device(0)
	require.NoError(t, err)
	require.NoError(t, second.Close())
	_, err = second.Device(0)
	require.ErrorIs(t, err, cuda.ErrClosed)
}

// A Close that waits for the GPU does not block Open: not while it may still be
// refused, which then finds another user, and not once the System is out of use.
func TestOpenBesideACloseThatStandsStill(t *testing.T) {
	for _, call := range []string{"cuEventQuery", "cuDevicePrimaryCtxRelease"} {
		t.Run(call, func(t *testing.T) {
			m, err := sim.New(sim.Options{})
			require.NoError(t, err)
			closed(t, m)
			var process cuda.Shared
			first, err := cuda.OpenShared(&process, driver.Of(m))
			require.NoError(t, err)
			d := first.Devices()[0]
			s, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(t, err)
			in := core.SystemOf(first)
			f, err := in.NewFence("test", []*core.Stream{core.StreamOf(s)})
			require.NoError(t, err)
			require.NoError(t, s.Close())
			entered, goOn := make(chan struct{}), make(chan struct{})
			var once sync.Once
			m.OnCall(func(c string) {
				if c == call {
					once.Do(func() { close(entered); <-goOn })
				}
			})
			in.Reclaim(f, nil, func() error { return nil })
			done := make(chan error, 1)
			go func() { done <- first.Close() }()
			<-entered
			opened := make(chan *cuda.System)
			go func() {
				next, err := cuda.OpenShared(&process, driver.Of(m))
				if err != nil {
					t.Error(err)
				}
				opened <- next
			}()
			var next *cuda.System
			select {
			case next = <-opened:
			case <-time.After(time.Minute):
				t.Error("Open waits for another's Close")
			}
			close(goOn)
			if next == nil {
				next = <-opened
			}
			require.NoError(t, <-done)
			_, err = next.Device(0)
			require.NoError(t, err, "it is not the one that was closed")
			require.NoError(t, in.Drain(t.Context()))
			require.NoError(t, next.Close())
		})
	}
}

func TestTheBoundOfWaitingAllocations(t *testing.T) {
	for option, bound := range map[time.Duration]time.Duration{0: time.Second, -1: 0, time.Minute: time.Minute} {
		m, err := sim.New(sim.Options{})
		require.NoError(t, err)
		sys, err := m.OpenOwned(cuda.Options{AllocationWait: option})
		require.NoError(t, err)
		require.Equal(t, bound, core.SystemOf(sys).Config.AllocationWait)
		require.NoError(t, sys.Close())
	}
}
