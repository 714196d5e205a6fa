package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

// Without graphs the body is not run in vain.
func TestCaptureByADriverWithoutGraphs(t *testing.T) {
	_, d := open(t, sim.OlderDriver(11030))
	s := stream(t, d)
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { t.Error("it was run"); return nil })
	require.Nil(t, g)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorContains(t, err, "CUDA 11.4 or later")
}

// glance is how long a call is watched that must wait.
const glance = 20 * time.Millisecond

// waits requires that f does not return before release was called.
func waits(t *testing.T, f func() error, release func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(glance):
	}
	release()
	require.NoError(t, <-done)
}

func TestLaunchesOfAGraphOnManyStreams(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p := stream(t, d), memory(t, d, 4096)
		g := captured(t, s, func() error { return s.Upload(p, pattern(4096, 3)) })
		var wg sync.WaitGroup
		for range 6 {
			on := stream(t, d)
			wg.Go(func() {
				for range 20 {
					if err := g.Launch(on); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, g.Close())
		require.Equal(t, pattern(4096, 3), read(t, s, p, 4096))
	})
}

func TestCloseOfAGraphWaitsForItsLastLaunch(t *testing.T) {
	m, d := open(t)
	made, on, p := stream(t, d), stream(t, d), memory(t, d, 64)
	for name, during := range map[string]func(){
		"": func() {},
		"while the stream captures": func() {
			in := core.StreamOf(on)
			require.Equal(t, driver.Success, core.SystemOf(d.System()).Drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g, err := made.WithCapture(thread, func() error { return made.Upload(p, pattern(64, 1)) })
			require.NoError(t, err)
			require.NoError(t, g.Launch(made))
			m.Hold(on.Handle())
			require.NoError(t, g.Launch(on))
			during()
			var gone atomic.Bool
			require.NoError(t, g.OnClose(func() { gone.Store(true) }))
			waits(t, g.Close, func() {
				require.False(t, gone.Load())
				m.Release(on.Handle())
			})
			require.True(t, gone.Load())
			if capturing, _ := on.Capturing(); capturing {
				in, drv := core.StreamOf(on), core.SystemOf(d.System()).Drv
				graph, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
				require.Equal(t, driver.Success, r, "and the capture has survived")
				require.Equal(t, driver.Success, drv.GraphDestroy(graph))
			}
			require.Equal(t, pattern(64, 1), read(t, on, p, 64))
		})
	}
}

// The launch is never waited for by what is not told of it: the streams that
// are named are not the one that it runs on.
func TestCloseAfterOfAGraphMindsItsLastLaunchToo(t *testing.T) {
	m, d := open(t)
	s, on, p := stream(t, d), stream(t, d), memory(t, d, 64)
	g, err := s.WithCapture(thread, func() error { return s.Upload(p, pattern(64, 1)) })
	require.NoError(t, err)
	var order []string
	destroyed := m.Count("cuGraphExecDestroy")
	require.NoError(t, g.OnClose(func() {
		require.Equal(t, destroyed+1, m.Count("cuGraphExecDestroy"))
		order = append(order, "first")
	}))
	require.NoError(t, g.OnClose(func() { order = append(order, "second") }))
	require.ErrorIs(t, g.OnClose(nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, g.CloseAfter(), cuda.ErrInvalidArgument)
	m.Hold(on.Handle())
	require.NoError(t, g.Launch(on))
	require.NoError(t, g.CloseAfter(s))

	require.ErrorIs(t, g.Launch(s), cuda.ErrClosed)
	require.ErrorIs(t, g.OnClose(func() {}), cuda.ErrClosed)
	require.NoError(t, g.Close(), "closing again does nothing")
	require.NoError(t, g.CloseAfter(s), "closing again does nothing")
	ctx, cancel := context.WithTimeout(t.Context(), glance)
	defer cancel()
	require.ErrorIs(t, d.System().Drain(ctx), context.DeadlineExceeded)
	require.Equal(t, 1, d.System().Stats().Graphs)
	m.Release(on.Handle())
	require.NoError(t, d.System().Drain(t.Context()))
	require.Equal(t, []string{"first", "second"}, order)
	require.Zero(t, d.System().Stats().Graphs)
	require.Equal(t, pattern(64, 1), read(t, on, p, 64))
}

func TestClosingAGraphFromManyGoroutinesRunsItsHooksOnce(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		g, err := s.WithCapture(thread, func() error { return nil })
		require.NoError(t, err)
		var ran atomic.Int64
		require.NoError(t, g.OnClose(func() { ran.Add(1) }))
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				closing := g.Close
				if i%2 == 0 {
					closing = func() error { return g.CloseAfter(s) }
				}
				if err := closing(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.NoError(t, d.System().Drain(t.Context()))
		require.Equal(t, int64(1), ran.Load())
	})
}

func TestLaunchRefuses(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, strange := stream(t, d), stream(t, another(t, d))
		g := captured(t, s, func() error { return nil })
		gone, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		require.NoError(t, gone.Close())
		require.ErrorIs(t, g.Launch(nil), cuda.ErrInvalidArgument)
		require.ErrorIs(t, (*cuda.Graph)(nil).Launch(s), cuda.ErrInvalidArgument)
		require.ErrorIs(t, g.Launch(strange), cuda.ErrForeign)
		require.ErrorIs(t, g.Launch(gone), cuda.ErrClosed)
		require.ErrorIs(t, g.CloseAfter(strange), cuda.ErrForeign)
		captured(t, s, func() error {
			require.ErrorIs(t, g.Launch(s), cuda.ErrCapturing)
			return nil
		})
		require.NoError(t, g.Launch(s))
	})
}

// A launch whose end could not be marked is waited for all the same.
func TestCloseWaitsForALaunchThatWasNotMarked(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 64)
	for _, call := range []string{"cuEventRecord", "cuEventCreate"} {
		g, err := s.WithCapture(thread, func() error { return s.Upload(p, pattern(64, 1)) })
		require.NoError(t, err)
		m.Hold(s.Handle())
		m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.OutOfMemory)})
		require.NoError(t, g.Launch(s))
		m.ClearFaults()
		waits(t, g.Close, func() { m.Release(s.Handle()) })
	}
}

func TestALaunchThatFailsIsAnErrorAndNothingElse(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	g := captured(t, s, func() error { return nil })
	m.Inject(sim.Fault{Call: "cuGraphLaunch", Result: cuda.Code(driver.OutOfMemory)})
	require.ErrorIs(t, g.Launch(s), cuda.ErrOutOfMemory)
	require.NoError(t, g.Launch(s))
}

func TestCloseOfAGraphGoesOnWhereItFailed(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	for _, call := range []string{"cuGraphExecDestroy", "cuGraphDestroy", "cuEventSynchronize"} {
		if call == "cuGraphDestroy" { // WithCapture tries it first
			m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.InvalidValue)})
		}
		g, err := s.WithCapture(thread, func() error { return nil })
		require.NoError(t, err)
		require.NoError(t, g.Launch(s))
		ran := 0
		require.NoError(t, g.OnClose(func() { ran++ }))
		m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.InvalidValue)})
		require.Error(t, g.Close(), call)
		require.ErrorIs(t, g.Launch(s), cuda.ErrClosed)
		require.Zero(t, ran)
		require.NoError(t, g.Close())
		require.NoError(t, g.Close())
		require.Equal(t, 1, ran)
	}
}

func TestALostGraphIsReportedAndStays(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.Error(t, m.Close(), "it is leaked") })
	s := stream(t, sys.Devices()[0])
	func() {
		_, err := s.WithCapture(thread, func() error { return nil })
		require.NoError(t, err)
	}()
	for range 100 {
		runtime.GC()
		if sys.Stats().Lost > 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	require.Equal(t, 1, sys.Stats().Lost)
	require.Equal(t, 1, sys.Stats().Graphs)
	err = sys.Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "graph")
}

// Once the device is lost closing drops what there is, and runs the hooks.
func TestAGraphOnALostDeviceCloses(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	p := memory(t, another(t, d), 64)
	g, err := s.WithCapture(thread, func() error { return s.Upload(p, []byte{1}) })
	require.NoError(t, err)
	ran := 0
	require.NoError(t, g.OnClose(func() { ran++ }))
	require.NoError(t, g.Launch(s))
	m.Inject(sim.Fault{Call: "cuEventSynchronize", Result: cuda.Code(driver.IllegalAddress)})
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	require.NoError(t, g.Close())
	require.Equal(t, 1, ran)
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
}

func TestALaunchAllocatesNothing(t *testing.T) {
	d := gputest.Real(t)
	s := stream(t, d)
	g := captured(t, s, func() error { return nil })
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := g.Launch(s); err != nil {
			t.Error(err)
		}
	}))
	require.NoError(t, s.Synchronize())
}

// A user's function that panics harms no other.
func TestAPanicInOnCloseIsLogged(t *testing.T) {
	var log bytes.Buffer
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	s, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	for _, after := range []bool{false, true} {
		log.Reset()
		g, err := s.WithCapture(thread, func() error { return nil })
		require.NoError(t, err)
		ran := 0
		require.NoError(t, g.OnClose(func() { panic("of the user") }))
		require.NoError(t, g.OnClose(func() { ran++ }))
		if after {
			require.NoError(t, g.CloseAfter(s))
			require.NoError(t, sys.Drain(t.Context()))
		} else {
			require.NoError(t, g.Close())
		}
		require.Equal(t, 1, ran)
		require.Contains(t, log.String(), "of the user")
		require.Contains(t, log.String(), "Graph.OnClose")
	}
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
	require.NoError(t, m.Close())
}

// Released comes after the functions of OnClose, so that what they free can be used.
func TestReleasedOfAGraphComesAfterItsFunctions(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	capture := func() *cuda.Graph {
		g, err := s.WithCapture(thread, func() error { return nil })
		require.NoError(t, err)
		return g
	}
	for _, end := range []func(g *cuda.Graph) error{(*cuda.Graph).Close, func(g *cuda.Graph) error { return g.CloseAfter(s) }} {
		g, next := capture(), capture()
		released := g.Released()
		require.NoError(t, g.OnClose(func() {
			// Its teardown comes after that of g, which has returned.
			err := errors.Join(next.CloseAfter(s), next.Released().Wait(t.Context()))
			select {
			case <-released.Done():
				t.Error("released before its function returned")
			default:
				if err != nil {
					t.Error(err)
				}
			}
		}))
		require.NoError(t, end(g))
		require.NoError(t, released.Wait(t.Context()))
		require.NoError(t, g.Released().Wait(t.Context()), "closed for good")
	}
}

// The end of a Close that fails is reported before another Close can begin: later it would
// take back what that one reported.
func TestReleasedOfAGraphWhoseCloseFailed(t *testing.T) {
	m, sys := sim.Open(t)
	s := stream(t, sys.Devices()[0])
	for range 300 {
		g, err := s.WithCapture(thread, func() error { return nil })
		require.NoError(t, err)
		m.Inject(sim.Fault{Call: "cuGraphExecDestroy", Result: 999})
		closing, released := cuda.ClosingOf(g), g.Released()
		var wg sync.WaitGroup
		wg.Go(func() { _ = g.Close() })
		for ended := false; !ended; {
			select {
			case <-closing.Done(): // the lock over the closing is still held
				ended = true
			default:
			}
		}
		select {
		case <-released.Done():
		default:
			t.Error("the closing has ended, and its end is not reported")
		}
		wg.Wait()
		require.Error(t, released.Wait(t.Context()))
		require.NoError(t, g.Close())
		require.NoError(t, g.Released().Wait(t.Context()))
	}
}

// The rest of the functions run even if one ends the goroutine that calls them.
func TestOnCloseMayEndTheGoroutine(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	for _, end := range []func(g *cuda.Graph) error{(*cuda.Graph).Close, func(g *cuda.Graph) error { return g.CloseAfter(s) }} {
		g, err := s.WithCapture(thread, func() error { return nil })
		require.NoError(t, err)
		var ran atomic.Int64
		require.NoError(t, g.OnClose(runtime.Goexit))
		require.NoError(t, g.OnClose(runtime.Goexit))
		require.NoError(t, g.OnClose(func() { ran.Add(1) }))
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := end(g); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		require.NoError(t, d.System().Drain(t.Context()))
		require.Equal(t, int64(1), ran.Load())
	}
}

// A launch that is under way when the graph is closed gives its mark back too.
func TestMarksOfLateLaunchesComeBack(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, p := stream(t, d), words(t, d, 64)
	events := 0
	for i := range 10 {
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Memset(p, 1, 64) })
		require.NoError(t, err)
		closed := false
		m.OnCall(func(call string) {
			if call == "cuStreamIsCapturing" && !closed {
				closed = true
				require.NoError(t, g.CloseAfter(s))
			}
		})
		require.NoError(t, g.Launch(s))
		m.OnCall(nil)
		require.NoError(t, sys.Drain(t.Context()))
		if i == 4 {
			events = m.Count("cuEventCreate")
		}
	}
	require.Equal(t, events, m.Count("cuEventCreate"))
}
