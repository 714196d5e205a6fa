package cuda_test

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
)

var errBody = errors.New("the body fails")

func drained(t *testing.T, d *cuda.Device) {
	t.Helper()
	require.NoError(t, d.System().Drain(t.Context()))
}

func TestCallbacksOfAStreamAreCalledInOrderBehindItsWork(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p := stream(t, d), memory(t, d, 1<<20)
		h, err := d.NewHostBuffer(1 << 20)
		require.NoError(t, err)
		closed(t, h)
		const rounds = 50
		var got []int // the functions run one at a time
		for i := range rounds {
			require.NoError(t, s.Memset(p, byte(i), 1<<20))
			require.NoError(t, s.CopyToHost(h.All(), p))
			require.NoError(t, s.Callback(func(err error) {
				if err != nil || h.Bytes()[1<<20-1] < byte(i) {
					t.Errorf("round %d: %v, byte %d", i, err, h.Bytes()[1<<20-1])
				}
				got = append(got, i)
			}))
		}
		drained(t, d)
		require.Len(t, got, rounds)
		for i, n := range got {
			require.Equal(t, i, n)
		}
	})
}

func TestACallbackWaitsForTheWorkBeforeIt(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 64)
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(p, 1, 64))
	called := make(chan error, 1)
	require.NoError(t, s.Callback(func(err error) { called <- err }))
	select {
	case <-called:
		t.Fatal("it was called before the work was done")
	case <-time.After(10 * time.Millisecond):
	}
	require.ErrorIs(t, d.System().Close(), cuda.ErrInUse)
	m.Release(s.Handle())
	require.NoError(t, <-called)
	drained(t, d)
}

// A function may use the library, wait for the GPU and end what called it.
func TestACallbackMayUseTheLibrary(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		p := memory(t, d, 64)
		done := make(chan error, 1)
		require.NoError(t, s.Callback(func(err error) {
			err = errors.Join(err, s.Upload(p, []byte("hello")), s.Synchronize())
			err = errors.Join(err, s.Callback(func(err error) { done <- err }))
			if err := errors.Join(err, s.Close()); err != nil {
				t.Error(err)
			}
		}))
		require.NoError(t, <-done)
		drained(t, d)
	})
}

// System.Close and Drain count a function until it has returned.
func TestTheSystemWaitsForCallbacks(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	begun, end := make(chan struct{}), make(chan struct{})
	require.NoError(t, s.Callback(func(error) { close(begun); <-end }))
	<-begun
	require.NoError(t, s.Close(), "the stream does not wait")
	err := d.System().Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "callback")
	close(end)
	drained(t, d)
}

func TestAGraphCallsForEachLaunch(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p := stream(t, d), memory(t, d, 64)
		var called, also atomic.Int64
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
			return errors.Join(
				s.Memset(p, 1, 64),
				s.Callback(func(err error) {
					if err != nil {
						t.Error(err)
					}
					called.Add(1)
				}),
				s.Callback(func(error) { also.Add(1) }),
			)
		})
		require.NoError(t, err)
		drained(t, d)
		require.Zero(t, called.Load(), "the capture calls nothing")
		for range 7 {
			require.NoError(t, g.Launch(s))
		}
		require.NoError(t, g.Close())
		drained(t, d)
		require.EqualValues(t, 7, called.Load())
		require.EqualValues(t, 7, also.Load())

		_, err = s.WithCapture(cuda.CaptureOptions{}, func() error {
			return errors.Join(s.Callback(func(error) { t.Error("there is no graph") }), errBody)
		})
		require.ErrorIs(t, err, errBody)
		drained(t, d)
	})
}

func TestACallbackLearnsOfALostContext(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
	d := sys.Devices()[0]
	k, faulty := kernel(t, d, countKernel)
	s := stream(t, d)
	release := m.Hold(s.Handle())
	t.Cleanup(release)
	results := make(chan error, 10)
	for range 3 {
		require.NoError(t, s.Callback(func(err error) { results <- err }))
	}
	require.NoError(t, k.Launch(faulty, cuda.Threads(1), cuda.Ptr(0x1000)), "it goes wrong later")
	require.ErrorIs(t, faulty.Synchronize(), cuda.ErrDeviceLost)
	require.NoError(t, sys.Drain(t.Context()))
	require.Len(t, results, 3)
	for range 3 {
		require.ErrorIs(t, <-results, cuda.ErrDeviceLost)
	}
	require.ErrorIs(t, s.Callback(func(err error) { results <- err }), cuda.ErrDeviceLost)
	require.NoError(t, sys.Drain(t.Context()))
	require.Empty(t, results, "a function that was refused is not called")
}

func TestCallbacksThatAreRefused(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	never := func(error) { t.Error("it was called") }
	require.ErrorIs(t, s.Callback(nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, (*cuda.Stream)(nil).Callback(never), cuda.ErrInvalidArgument)
	in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
	require.Equal(t, driver.Success, drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
	err := s.Callback(never)
	require.ErrorIs(t, err, cuda.ErrCapturing)
	require.ErrorContains(t, err, "whose graph keeps the function")
	g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.Success, drv.GraphDestroy(g))
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Callback(never), cuda.ErrClosed)
	drained(t, d)
}

func TestAPanicOfACallbackIsLogged(t *testing.T) {
	var log testlog.Log
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	closed(t, sys)
	s := stream(t, sys.Devices()[0])
	next := make(chan struct{})
	require.NoError(t, s.Callback(func(error) { panic("ouch") }))
	require.NoError(t, s.Callback(func(error) { close(next) }))
	<-next
	require.NoError(t, sys.Drain(t.Context()))
	require.Contains(t, log.String(), "ouch")
}

func TestACallbackThatEndsItsGoroutine(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	require.NoError(t, s.Callback(func(error) { runtime.Goexit() }))
	called := make(chan error, 1)
	require.NoError(t, s.Callback(func(err error) { called <- err }))
	drained(t, d)
	require.NoError(t, <-called)
}

// A launch of a graph is a launch of the functions in it.
func TestTheSystemWaitsForTheCallbacksOfALaunch(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	var called atomic.Int64
	g := captured(t, s, func() error { return s.Callback(func(error) { called.Add(1) }) })
	m.Hold(s.Handle())
	require.NoError(t, g.Launch(s))
	over, cancel := context.WithTimeout(t.Context(), glance)
	defer cancel()
	err := d.System().Drain(over)
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "callback")
	require.ErrorIs(t, d.System().Close(), cuda.ErrInUse)
	m.Release(s.Handle())
	drained(t, d)
	require.EqualValues(t, 1, called.Load())
}

// Callback returns an error if and only if the function is not called, even if another
// library begins or ends a capture during the call.
func TestCallbacksBesideAForeignCapture(t *testing.T) {
	for _, ends := range []bool{false, true} {
		for _, reached := range []bool{false, true} {
			t.Run(fmt.Sprintf("the capture ends: %v, the stream comes to the function: %v", ends, reached), func(t *testing.T) {
				m, d := open(t)
				s := stream(t, d)
				in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
				release := func() {}
				if !reached {
					release = m.Hold(s.Handle())
				}
				end := func() {
					g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
					require.Equal(t, driver.Success, r)
					require.Equal(t, driver.Success, drv.GraphDestroy(g))
				}
				var calls atomic.Int64
				called, launched := make(chan struct{}), false
				callback := func() error {
					m.OnCall(func(call string) {
						switch {
						case call == "cuLaunchHostFunc":
							if launched = true; ends {
								end()
							}
						case launched && (call == "cuStreamIsCapturing" || call == "cuStreamGetCaptureInfo"):
							launched = false
							if reached {
								<-called
							}
							if !ends {
								require.Equal(t, driver.Success, drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
							}
						}
					})
					defer m.OnCall(nil)
					return s.Callback(func(error) { calls.Add(1); close(called) })
				}
				var err error
				if ends {
					_, failed := s.WithCapture(cuda.CaptureOptions{Mode: cuda.CaptureRelaxed}, func() error { err = callback(); return nil })
					require.ErrorIs(t, failed, cuda.ErrCapturing)
				} else {
					err = callback()
					end()
				}
				release()
				require.NoError(t, s.Synchronize())
				drained(t, d)
				if reached {
					require.NoError(t, err)
					require.EqualValues(t, 1, calls.Load())
				} else {
					require.ErrorIs(t, err, cuda.ErrCapturing)
					require.Zero(t, calls.Load())
				}
			})
		}
	}
}

// Whichever driver call fails, the function is called once, or the error says that it
// is not.
func TestCallbacksWhereADriverCallFails(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 64)
	for _, call := range []string{"cuLaunchHostFunc", "cuStreamIsCapturing", "cuStreamGetCaptureInfo", "cuEventCreate", "cuEventRecord", "cuEventQuery"} {
		for after := range 3 {
			for _, captured := range []bool{false, true} {
				var called atomic.Int64
				count := func(error) { called.Add(1) }
				remove := m.Inject(sim.Fault{Call: call, After: after, Times: 1, Result: cuda.Code(driver.OutOfMemory)})
				var g *cuda.Graph
				var err error
				if captured {
					g, err = s.WithCapture(cuda.CaptureOptions{}, func() error { return errors.Join(s.Memset(p, 1, 64), s.Callback(count)) })
				} else {
					err = s.Callback(count)
				}
				drained(t, d)
				remove()
				want := int64(0)
				if err == nil {
					want = 1
				}
				if g != nil {
					require.NoError(t, g.Launch(s))
					require.NoError(t, g.Close())
				}
				drained(t, d)
				require.Equal(t, want, called.Load(), "%s, after %d, captured %v: %v", call, after, captured, err)
			}
		}
	}
}

func TestCallbacksFromManyGoroutines(t *testing.T) {
	_, d := open(t)
	var called atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		s := stream(t, d)
		for range 2 {
			wg.Go(func() {
				for range 50 {
					if err := s.Callback(func(error) { called.Add(1) }); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	drained(t, d)
	require.EqualValues(t, 400, called.Load())
}

func BenchmarkCallback(b *testing.B) {
	run := func(b *testing.B, d *cuda.Device) {
		s := stream(b, d)
		done := make(chan struct{})
		for b.Loop() {
			if err := s.Callback(func(error) { done <- struct{}{} }); err != nil {
				b.Fatal(err)
			}
			<-done
		}
		require.NoError(b, d.System().Drain(b.Context()))
	}
	b.Run("software", func(b *testing.B) { run(b, gputest.Software(b)) })
	b.Run("real", func(b *testing.B) { run(b, gputest.RealWith(b, cuda.Options{})) })
}
