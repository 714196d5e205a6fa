package cuda_test

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

var thread = cuda.CaptureOptions{}

// captured is a graph of what body does, which is closed with the test.
func captured(t testing.TB, s *cuda.Stream, body func() error) *cuda.Graph {
	t.Helper()
	g, err := s.WithCapture(thread, body)
	require.NoError(t, err)
	closed(t, g)
	return g
}

// foreign begins a capture as another library does, on the calling goroutine's
// thread, and returns how that library ends it.
func foreign(t testing.TB, s *cuda.Stream, mode driver.CaptureMode) (end func() driver.Result) {
	t.Helper()
	in := core.StreamOf(s)
	f := core.SystemOf(s.Device().System()).Drv.Foreign()
	runtime.LockOSThread()
	require.Equal(t, driver.Success, f.StreamBeginCapture(in.Ctx.Handle, in.Handle, mode))
	return func() driver.Result {
		defer runtime.UnlockOSThread()
		g, r := f.StreamEndCapture(in.Ctx.Handle, in.Handle)
		if r == driver.Success {
			require.Equal(t, driver.Success, f.GraphDestroy(g))
		}
		return r
	}
}

func TestWithCaptureWritesDownAndLaunchRuns(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		for _, mode := range []cuda.CaptureMode{cuda.CaptureThreadLocal, cuda.CaptureGlobal, cuda.CaptureRelaxed} {
			t.Run(mode.String(), func(t *testing.T) {
				s, p := stream(t, d), memory(t, d, 4096)
				require.NoError(t, s.Memset(p, 1, 4096))
				require.NoError(t, s.Synchronize())
				g, err := s.WithCapture(cuda.CaptureOptions{Mode: mode}, func() error {
					capturing, err := s.Capturing()
					require.True(t, capturing)
					require.NoError(t, err)
					return s.Memset(p, 2, 4096)
				})
				require.NoError(t, err)
				closed(t, g)
				require.Equal(t, byte(1), read(t, s, p, 4096)[0], "captured work does not run")
				for range 3 {
					require.NoError(t, s.Memset(p, 1, 4096))
					require.NoError(t, g.Launch(s))
					require.Equal(t, byte(2), read(t, s, p, 4096)[4095])
				}
			})
		}
	})
}

func TestWithCaptureOfNothing(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		g := captured(t, s, func() error { return nil })
		require.NoError(t, g.Launch(s))
		require.NoError(t, s.Synchronize())
	})
}

func TestWithCaptureEndsWhateverBodyDoes(t *testing.T) {
	broken := errors.New("broken")
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p := stream(t, d), memory(t, d, 64)
		work := func() {
			require.NoError(t, s.Upload(p, pattern(64, 1)))
		}
		usable := func(t *testing.T) {
			capturing, err := s.Capturing()
			require.NoError(t, err)
			require.False(t, capturing)
			require.NoError(t, s.Memset(p, 9, 64))
			require.Equal(t, byte(9), read(t, s, p, 64)[0])
			require.Zero(t, d.System().Stats().Graphs)
		}
		t.Run("error", func(t *testing.T) {
			g, err := s.WithCapture(thread, func() error { work(); return broken })
			require.Nil(t, g)
			require.ErrorIs(t, err, broken)
			require.ErrorContains(t, err, "cuda.Stream.WithCapture")
			usable(t)
		})
		t.Run("panic", func(t *testing.T) {
			require.PanicsWithValue(t, "out", func() {
				_, _ = s.WithCapture(thread, func() error { work(); panic("out") })
			})
			usable(t)
		})
		t.Run("end of the goroutine", func(t *testing.T) {
			var wg sync.WaitGroup
			wg.Go(func() {
				_, _ = s.WithCapture(thread, func() error { work(); runtime.Goexit(); return nil })
			})
			wg.Wait()
			usable(t)
		})
	})
}

func TestWithCaptureRefuses(t *testing.T) {
	gputest.Alone(t)
	_, d := open(t)
	s := stream(t, d)
	nothing := func() error { return nil }
	gone, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	legacy, err := d.BorrowStream(0)
	require.NoError(t, err)
	closed(t, legacy)
	own, err := d.Transfer()
	require.NoError(t, err)
	for name, c := range map[string]struct {
		s    *cuda.Stream
		o    cuda.CaptureOptions
		body func() error
		is   error
	}{
		"no body":     {s, thread, nil, cuda.ErrInvalidArgument},
		"no mode":     {s, cuda.CaptureOptions{Mode: 7}, nothing, cuda.ErrInvalidArgument},
		"no stream":   {nil, thread, nothing, cuda.ErrInvalidArgument},
		"closed":      {gone, thread, nothing, cuda.ErrClosed},
		"legacy":      {legacy, thread, nothing, cuda.ErrInvalidArgument},
		"device's":    {own, thread, nothing, cuda.ErrInvalidArgument},
		"in a body":   {s, thread, func() error { _, err := s.WithCapture(thread, nothing); return err }, cuda.ErrCapturing},
		"bad address": {s, thread, func() error { return s.Memset(1, 1, 1) }, cuda.ErrInvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			g, err := c.s.WithCapture(c.o, c.body)
			require.ErrorIs(t, err, c.is)
			require.Nil(t, g)
		})
	}
}

func TestABrokenCaptureSaysWhatToDo(t *testing.T) {
	gputest.Alone(t)
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, other, p := stream(t, d), stream(t, d), memory(t, d, 64)
		e, in := event(t, d), core.StreamOf(s)
		f := core.SystemOf(d.System()).Drv.Foreign()
		query := func() driver.Result { return f.StreamQuery(in.Ctx.Handle, core.StreamOf(other).Handle) }
		for name, c := range map[string]struct {
			mode cuda.CaptureMode
			body func() error
			says string
		}{
			"by another thread": {cuda.CaptureGlobal, func() error {
				var r driver.Result
				var wg sync.WaitGroup
				wg.Go(func() { r = query() })
				wg.Wait()
				require.Equal(t, driver.CaptureUnsupported, r)
				return nil
			}, "capture in thread-local mode"},
			"by the body": {cuda.CaptureThreadLocal, func() error {
				require.Equal(t, driver.CaptureUnsupported, query())
				return nil
			}, "capture in relaxed mode"},
			"by the whole context": {cuda.CaptureRelaxed, func() error {
				require.NotEqual(t, driver.Success, f.CtxSynchronize(in.Ctx.Handle))
				return nil
			}, "whole context"},
			"not joined": {cuda.CaptureThreadLocal, func() error {
				require.NoError(t, e.Record(s))
				require.NoError(t, other.Wait(e))
				require.NoError(t, other.Memset(p, 1, 64))
				return nil
			}, "let the captured stream wait for it"},
			"ended": {cuda.CaptureThreadLocal, func() error {
				g, r := f.StreamEndCapture(in.Ctx.Handle, in.Handle)
				require.Equal(t, driver.Success, r)
				require.Equal(t, driver.Success, f.GraphDestroy(g))
				return nil
			}, "leave the end of the capture to WithCapture"},
		} {
			t.Run(name, func(t *testing.T) {
				g, err := s.WithCapture(cuda.CaptureOptions{Mode: c.mode}, func() error {
					require.NoError(t, s.Upload(p, []byte{1}))
					return c.body()
				})
				require.Nil(t, g)
				require.ErrorIs(t, err, cuda.ErrCapturing)
				require.ErrorContains(t, err, c.says)
				for _, s := range []*cuda.Stream{s, other} {
					require.NoError(t, s.Memset(p, 3, 64))
					require.Equal(t, byte(3), read(t, s, p, 64)[0])
				}
			})
		}
	})
}

// A foreign library that ends our capture and begins its own on the same stream
// keeps its own.
func TestWithCaptureEndsNoOtherCapture(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		in, f := core.StreamOf(s), core.SystemOf(d.System()).Drv.Foreign()
		_, err := s.WithCapture(thread, func() error {
			g, r := f.StreamEndCapture(in.Ctx.Handle, in.Handle)
			require.Equal(t, driver.Success, r)
			require.Equal(t, driver.Success, f.GraphDestroy(g))
			require.Equal(t, driver.Success, f.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
			return nil
		})
		require.ErrorIs(t, err, cuda.ErrCapturing)
		g, r := f.StreamEndCapture(in.Ctx.Handle, in.Handle)
		require.Equal(t, driver.Success, r, "the other capture is still there")
		require.Equal(t, driver.Success, f.GraphDestroy(g))
	})
}

func TestUploadInACaptureBelongsToTheGraph(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, joined, on := stream(t, d), stream(t, d), stream(t, d)
		fork, join := event(t, d), event(t, d)
		sizes := []int{0, 1, 1000, 64<<10 - 1001, 1, 64 << 10, 100_000, 3 << 20, 7}
		total := 0
		for _, n := range sizes {
			total += n
		}
		p := memory(t, d, 2*total)
		want := pattern(2*total, 5)
		g := captured(t, s, func() error {
			require.NoError(t, fork.Record(s))
			require.NoError(t, joined.Wait(fork))
			src := make([]byte, total)
			at := 0
			for _, n := range sizes {
				for i, to := range []*cuda.Stream{s, joined} {
					at := at + i*total
					copy(src, want[at:at+n])
					require.NoError(t, to.Upload(p+cuda.Ptr(at), src[:n]))
					clear(src[:n])
				}
				at += n
			}
			require.NoError(t, join.Record(joined))
			return s.Wait(join)
		})
		st := d.System().Stats()
		require.Equal(t, 1, st.Graphs)
		require.GreaterOrEqual(t, st.GraphBytes, 2*total)
		require.Less(t, st.GraphBytes, 2*total+1<<20, "small ones share memory")
		for range 3 {
			require.NoError(t, s.Memset(p, 0, 2*total))
			require.NoError(t, s.Upload(p, pattern(500, 9)), "uploads outside are not the graph's")
			require.NoError(t, s.Synchronize())
			require.NoError(t, on.Memset(p, 0, 2*total))
			require.NoError(t, g.Launch(on))
			require.Equal(t, want, read(t, on, p, 2*total))
		}
	})
}

// What the driver does not end or destroy at once, a later Close, WithCapture or Drain does:
// the machine is empty at the end of the test.
func TestACaptureThatTheDriverDoesNotEnd(t *testing.T) {
	for _, fault := range []sim.Fault{
		{Call: "cuStreamEndCapture", Times: 1}, {Call: "cuStreamEndCapture", Times: 2}, {Call: "cuStreamEndCapture", Times: 4},
		{Call: "cuStreamGetCaptureInfo", Times: 1}, {Call: "cuStreamGetCaptureInfo", Times: 2}, {Call: "cuGraphDestroy", Times: 1},
	} {
		for name, next := range map[string]func(s *cuda.Stream) error{
			"Close": (*cuda.Stream).Close,
			"WithCapture": func(s *cuda.Stream) error {
				g, err := s.WithCapture(thread, func() error { return nil })
				if err != nil {
					return err
				}
				return errors.Join(g.Close(), s.Close())
			},
		} {
			t.Run(fmt.Sprintf("%s fails %d times, then %s", fault.Call, fault.Times, name), func(t *testing.T) {
				m, sys := sim.Open(t)
				s, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
				require.NoError(t, err)
				fault.Result = 999
				m.Inject(fault)
				_, err = s.WithCapture(thread, func() error { return errors.New("of the body") })
				require.ErrorContains(t, err, fault.Call)
				for range fault.Times {
					if err = next(s); err == nil {
						break
					}
				}
				require.NoError(t, err)
			})
		}
	}
}

// Its pinned memory goes back to the pool, and no driver call is made for it.
func TestAGraphGivesItsPinnedMemoryBack(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 1<<20)
	for i := range 4 {
		before := m.Count("cuMemHostAlloc")
		g, err := s.WithCapture(thread, func() error { return s.Upload(p, pattern(1<<20, i)) })
		require.NoError(t, err)
		require.NoError(t, g.Launch(s))
		require.NoError(t, g.Close())
		require.Equal(t, i > 0, m.Count("cuMemHostAlloc") == before)
	}
	require.Zero(t, m.Count("cuMemFreeHost"))
	require.Zero(t, d.System().Stats().GraphBytes)
}

func TestUploadInAForeignCaptureIsRefusedBeforeTheDriverIsAsked(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 64)
	for _, mode := range []driver.CaptureMode{driver.CaptureGlobal, driver.CaptureThreadLocal, driver.CaptureRelaxed} {
		end := foreign(t, s, mode)
		before := m.Counts()
		err := s.Upload(p, []byte{1})
		require.ErrorIs(t, err, cuda.ErrCapturing)
		require.ErrorContains(t, err, "WithCapture")
		require.ErrorContains(t, err, "HostBuffer")
		for _, call := range []string{"cuMemcpyHtoDAsync", "cuMemHostAlloc", "cuEventRecord"} {
			require.Equal(t, before[call], m.Count(call), call)
		}
		require.NoError(t, s.Upload(p, nil), "an empty one is fine")
		require.Equal(t, driver.Success, end())
	}
}

func TestWhatWouldBreakACaptureIsRefusedBeforeTheDriverIsAsked(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 64)
	other := captured(t, s, func() error { return nil })
	e, clean := event(t, d), event(t, d)
	require.NoError(t, clean.Record(s))
	end := foreign(t, s, driver.CaptureGlobal)
	require.NoError(t, e.Record(s))
	before := m.Counts()
	for name, f := range map[string]func() error{
		"Stream.Synchronize": s.Synchronize,
		"Stream.Done":        func() error { _, err := s.Done(); return err },
		"Stream.Download":    func() error { return s.Download(make([]byte, 1), p) },
		"Stream.Close":       s.Close,
		"Stream.WithCapture": func() error { _, err := s.WithCapture(thread, func() error { return nil }); return err },
		"Stream.Wait":        func() error { return s.Wait(clean) },
		"Event.Done":         func() error { _, err := e.Done(); return err },
		"Event.Synchronize":  e.Synchronize,
		"Event.Since":        func() error { _, err := e.Since(clean); return err },
		"Event.Since, start": func() error { _, err := clean.Since(e); return err },
		"Graph.Launch":       func() error { return other.Launch(s) },
		"Graph.CloseAfter":   func() error { return other.CloseAfter(s) },
		"HostBuffer.CloseAfter": func() error {
			h, err := d.NewHostBuffer(1)
			require.NoError(t, err)
			defer func() { require.NoError(t, h.Close()) }()
			return h.CloseAfter(s)
		},
	} {
		err := f()
		require.ErrorIs(t, err, cuda.ErrCapturing, name)
		var e *cuda.Error
		require.ErrorAs(t, err, &e)
		require.Empty(t, e.Call, name)
		require.NotEmpty(t, e.Hint, name)
	}
	for _, call := range []string{"cuStreamSynchronize", "cuStreamQuery", "cuEventQuery", "cuEventElapsedTime", "cuStreamWaitEvent",
		"cuGraphLaunch", "cuStreamBeginCapture", "cuStreamDestroy"} {
		require.Equal(t, before[call], m.Count(call), call)
	}
	require.Equal(t, driver.Success, end(), "the capture has survived")

	// The event still stands for a place in a graph, until it is recorded.
	_, err := e.Done()
	require.ErrorIs(t, err, cuda.ErrCapturing)
	require.NoError(t, e.Record(s))
	require.NoError(t, e.Synchronize())
	done, err := e.Done()
	require.NoError(t, err)
	require.True(t, done)
}

func TestWaitJoinsACaptureAndRefusesWhatWouldEndIt(t *testing.T) {
	gputest.Alone(t)
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		a, b, c := stream(t, d), stream(t, d), stream(t, d)
		never, outside, inA, inB, back := event(t, d), event(t, d), event(t, d), event(t, d), event(t, d)
		legacy, err := d.BorrowStream(0)
		require.NoError(t, err)
		closed(t, legacy)
		require.NoError(t, outside.Record(c))
		g := captured(t, a, func() error {
			require.NoError(t, inA.Record(a))
			gb, err := b.WithCapture(thread, func() error {
				require.NoError(t, inB.Record(b))
				require.ErrorIs(t, a.Wait(inB), cuda.ErrCapturing, "of another capture")
				require.ErrorIs(t, b.Wait(inA), cuda.ErrCapturing, "of another capture")
				return nil
			})
			require.NoError(t, err)
			require.NoError(t, gb.Close())
			require.ErrorIs(t, a.Wait(outside), cuda.ErrCapturing)
			require.ErrorIs(t, legacy.Wait(inA), cuda.ErrCapturing)
			require.NoError(t, a.Wait(never))
			require.NoError(t, a.Wait(inA))
			require.NoError(t, c.Wait(inA))
			capturing, err := c.Capturing()
			require.NoError(t, err)
			require.True(t, capturing)
			require.ErrorIs(t, c.Synchronize(), cuda.ErrCapturing)
			require.NoError(t, back.Record(c))
			return a.Wait(back)
		})
		require.NoError(t, g.Launch(a))
		require.NoError(t, a.Synchronize())
	})
}

// The driver gives no id for a broken capture.
func TestABrokenCaptureIsNamed(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p, inside, next := stream(t, d), memory(t, d, 64), event(t, d), event(t, d)
		_, err := s.WithCapture(thread, func() error {
			require.NoError(t, inside.Record(s))
			in := core.StreamOf(s)
			require.Equal(t, driver.CaptureUnsupported, in.Ctx.System().Drv.StreamQuery(in.Ctx.Handle, in.Handle))
			for _, err := range []error{s.Wait(inside), s.Upload(p, make([]byte, 64))} {
				require.ErrorIs(t, err, cuda.ErrCapturing)
				require.ErrorContains(t, err, "takes part in a capture that is broken")
				require.ErrorContains(t, err, "end the capture and capture again")
			}
			require.Error(t, next.Record(s))
			return nil
		})
		require.ErrorContains(t, err, "a call of another library in the body broke it")
	})
}

// breaking is a driver that breaks a capture when it is first asked about it, and does not end
// it at once.
type breaking struct {
	driver.Driver
	asked, ended *int
}

func (b breaking) StreamGetCaptureInfo(c driver.Context, s driver.Stream) (driver.CaptureStatus, uint64, driver.Result) {
	if *b.asked++; *b.asked == 1 {
		b.StreamQuery(c, s)
		return 0, 0, 999
	}
	return b.Driver.StreamGetCaptureInfo(c, s)
}

func (b breaking) StreamEndCapture(c driver.Context, s driver.Stream) (driver.Graph, driver.Result) {
	if *b.ended++; *b.ended <= 2 {
		return 0, 999
	}
	return b.Driver.StreamEndCapture(c, s)
}

func TestACaptureThatBreaksAsItBeginsIsEndedLater(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := gputest.Wrap(breaking{driver.Of(m), new(int), new(int)}, m.Close)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
	s := stream(t, sys.Devices()[0])
	_, err = s.WithCapture(thread, func() error { return nil })
	require.ErrorContains(t, err, "cuStreamGetCaptureInfo")
	capturing, err := s.Capturing()
	require.NoError(t, err)
	require.True(t, capturing)
	g, err := s.WithCapture(thread, func() error { return nil })
	require.NoError(t, err)
	require.NoError(t, g.Close())
}

// Work on the legacy stream would end the capture of a blocking stream.
func TestTheLegacyStreamIsRefusedWhileABlockingStreamCaptures(t *testing.T) {
	gputest.Alone(t)
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		p, e := memory(t, d, 64), event(t, d)
		host, err := d.NewHostBuffer(64)
		require.NoError(t, err)
		closed(t, host)
		blocking, err := d.NewStream(cuda.StreamOptions{Blocking: true})
		require.NoError(t, err)
		closed(t, blocking)
		for _, handle := range []uintptr{0, 1} {
			legacy, err := d.BorrowStream(handle)
			require.NoError(t, err)
			closed(t, legacy)
			g := captured(t, blocking, func() error {
				for name, f := range map[string]func() error{
					"Copy":         func() error { return legacy.Copy(p, p+32, 32) },
					"CopyFromHost": func() error { return legacy.CopyFromHost(p, host.All()) },
					"CopyToHost":   func() error { return legacy.CopyToHost(host.All(), p) },
					"Memset":       func() error { return legacy.Memset(p, 1, 64) },
					"Upload":       func() error { return legacy.Upload(p, []byte{1}) },
					"Download":     func() error { return legacy.Download(make([]byte, 1), p) },
					"Record":       func() error { return e.Record(legacy) },
					"Wait":         func() error { return legacy.Wait(e) },
					"Synchronize":  legacy.Synchronize,
					"Close":        legacy.Close,
					"CloseAfter":   func() error { return host.CloseAfter(legacy) },
				} {
					require.ErrorIs(t, f(), cuda.ErrCapturing, name)
				}
				capturing, err := legacy.Capturing()
				require.NoError(t, err)
				require.True(t, capturing)
				return nil
			})
			require.NoError(t, g.Launch(blocking))
			require.NoError(t, legacy.Memset(p, 6, 64))
			require.Equal(t, byte(6), read(t, legacy, p, 64)[0])
		}
	})
}

// Whatever call fails, WithCapture leaves nothing: no capture, no graph, no
// pinned memory in use. The machine's leak check says so too.
func TestWithCaptureRollsBackWhateverFails(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 1<<20)
	capture := func() (*cuda.Graph, error) {
		return s.WithCapture(thread, func() error {
			if err := s.Upload(p, pattern(1<<20, 1)); err != nil {
				return err
			}
			return s.Memset(p, 1, 64)
		})
	}
	g, err := capture()
	require.NoError(t, err)
	require.NoError(t, g.Close())
	failed := 0
	for after := 0; ; after++ {
		m.ResetCounts()
		remove := m.Inject(sim.Fault{After: after, Result: cuda.Code(driver.OutOfMemory)})
		g, err := capture()
		calls := 0
		for _, n := range m.Counts() {
			calls += n
		}
		remove()
		if err == nil {
			require.NoError(t, g.Launch(s))
			require.NoError(t, g.Close())
		} else {
			require.ErrorIs(t, err, cuda.ErrOutOfMemory, "after %d calls", after)
			failed++
		}
		st := d.System().Stats()
		require.Zero(t, st.Graphs)
		capturing, err := s.Capturing()
		require.NoError(t, err)
		require.False(t, capturing, "after %d calls", after)
		require.NoError(t, s.Memset(p, 7, 64))
		require.Equal(t, byte(7), read(t, s, p, 64)[0])
		if calls <= after {
			break
		}
	}
	require.Greater(t, failed, 6)
}

// Another goroutine begins a capture between the question and the copy: the
// copy is in the graph, so its memory is never used again, and the caller hears
// of it.
func TestACaptureThatBeginsDuringAnUploadIsNoticed(t *testing.T) {
	for name, copies := range map[string]func(s *cuda.Stream, p cuda.Ptr) error{
		"cuMemcpyHtoDAsync": func(s *cuda.Stream, p cuda.Ptr) error { return s.Upload(p, pattern(100, 1)) },
		"cuMemcpyDtoHAsync": func(s *cuda.Stream, p cuda.Ptr) error { return s.Download(make([]byte, 100), p) },
	} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			s, p := stream(t, d), memory(t, d, 4096)
			in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
			require.NoError(t, s.Upload(p, pattern(100, 7)))
			begin := sync.OnceFunc(func() {
				require.Equal(t, driver.Success, drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
			})
			m.OnCall(func(call string) {
				if call == name {
					begin()
				}
			})
			err := copies(s, p)
			m.OnCall(nil)
			require.ErrorIs(t, err, cuda.ErrCapturing)
			require.ErrorContains(t, err, "during a copy")
			g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
			require.Equal(t, driver.Success, r, "and the capture lives")
			exec, r := drv.GraphInstantiate(in.Ctx.Handle, g)
			require.Equal(t, driver.Success, r)
			// What is staged from now on does not show in the graph.
			for i := range 20 {
				require.NoError(t, s.Upload(p+1024, pattern(1000, i)))
			}
			require.NoError(t, s.Synchronize())
			require.Equal(t, driver.Success, drv.GraphLaunch(in.Ctx.Handle, exec, in.Handle))
			want := pattern(100, 7)
			if name == "cuMemcpyHtoDAsync" {
				want = pattern(100, 1)
			}
			require.Equal(t, want, read(t, s, p, 100))
			require.Equal(t, driver.Success, drv.GraphExecDestroy(exec))
			require.Equal(t, driver.Success, drv.GraphDestroy(g))
		})
	}
}

// A capture of this library's waits for the copy instead.
func TestNoCaptureBeginsDuringACopy(t *testing.T) {
	for name, copies := range map[string]func(s *cuda.Stream, p cuda.Ptr) error{
		"cuMemcpyHtoDAsync": func(s *cuda.Stream, p cuda.Ptr) error { return s.Upload(p, pattern(100, 1)) },
		"cuMemcpyDtoHAsync": func(s *cuda.Stream, p cuda.Ptr) error { return s.Download(make([]byte, 100), p) },
	} {
		t.Run(name, func(t *testing.T) {
			m, d := open(t)
			s, p := stream(t, d), memory(t, d, 4096)
			began, copied := make(chan error, 1), make(chan struct{})
			begin := sync.OnceFunc(func() {
				go func() {
					g, err := s.WithCapture(thread, func() error { <-copied; return nil })
					if err == nil {
						err = g.Close()
					}
					began <- err
				}()
				time.Sleep(10 * time.Millisecond) // let it come as far as it can
			})
			m.OnCall(func(call string) {
				if call == name {
					begin()
				}
			})
			err := copies(s, p)
			close(copied)
			require.NoError(t, <-began)
			require.NoError(t, err)
			m.OnCall(nil)
		})
	}
}

func TestACaptureThatEndsDuringAnUploadIsNoticed(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 4096)
	in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
	end := sync.OnceFunc(func() {
		g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
		require.Equal(t, driver.Success, r)
		require.Equal(t, driver.Success, drv.GraphDestroy(g))
	})
	m.Hold(s.Handle())
	_, err := s.WithCapture(cuda.CaptureOptions{Mode: cuda.CaptureRelaxed}, func() error {
		m.OnCall(func(call string) {
			if call == "cuMemcpyHtoDAsync" {
				end()
			}
		})
		defer m.OnCall(nil)
		return s.Upload(p, pattern(100, 1))
	})
	require.ErrorIs(t, err, cuda.ErrCapturing)
	// The copy has still to run, and its memory is not given to the next one.
	g := captured(t, s, func() error { return s.Upload(p+1024, pattern(100, 2)) })
	m.Release(s.Handle())
	require.NoError(t, g.Launch(s))
	require.Equal(t, pattern(100, 1), read(t, s, p, 100))
	require.Equal(t, pattern(100, 2), read(t, s, p+1024, 100))
}

func TestCapturesOnManyGoroutines(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		p := memory(t, d, 8*4096)
		var wg sync.WaitGroup
		for i := range 8 {
			s, at := stream(t, d), p+cuda.Ptr(i*4096)
			wg.Go(func() {
				for round := range 8 {
					mode := cuda.CaptureMode(round % 3)
					g, err := s.WithCapture(cuda.CaptureOptions{Mode: mode}, func() error { return s.Upload(at, pattern(4096, i+round)) })
					if err == nil {
						err = errors.Join(g.Launch(s), g.Close())
					}
					got := make([]byte, 4096)
					if err = errors.Join(err, s.Download(got, at)); err != nil || string(got) != string(pattern(4096, i+round)) {
						t.Errorf("goroutine %d, round %d: %v", i, round, err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}
