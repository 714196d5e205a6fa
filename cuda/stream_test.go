package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
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

func TestAStreamRunsItsWorkInOrder(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		for _, o := range []cuda.StreamOptions{{}, {Blocking: true}} {
			s, err := d.NewStream(o)
			require.NoError(t, err)
			p := memory(t, d, 1<<20)
			require.NoError(t, s.Memset(p, 1, 1<<20))
			require.NoError(t, s.Memset(p, 2, 1<<19))
			require.NoError(t, s.Copy(p+1<<19, p, 1000))
			require.NoError(t, s.Copy(p, p, 0))
			require.NoError(t, s.Memset(p, 9, 0))
			require.NoError(t, s.Synchronize())
			done, err := s.Done()
			require.NoError(t, err)
			require.True(t, done)
			got := read(t, s, p, 1<<20)
			require.Equal(t, []byte{2, 2, 2, 1}, []byte{got[0], got[1<<19-1], got[1<<19+999], got[1<<19+1000]})
			require.Equal(t, d, s.Device())
			require.NotZero(t, s.Handle())
			require.NoError(t, s.Close())
			require.NoError(t, s.Close())
		}
		require.Zero(t, d.System().Stats().Streams)
	})
}

func TestDoneAndSynchronizeAndCloseMindRunningWork(t *testing.T) {
	m, d := open(t)
	p := memory(t, d, 64)
	for name, wait := range map[string]func(s *cuda.Stream) error{"Synchronize": (*cuda.Stream).Synchronize, "Close": (*cuda.Stream).Close} {
		t.Run(name, func(t *testing.T) {
			s := stream(t, d)
			m.Hold(s.Handle())
			require.NoError(t, s.Memset(p, 1, 64))
			done, err := s.Done()
			require.NoError(t, err)
			require.False(t, done)
			handle := s.Handle()
			waits(t, func() error { return wait(s) }, func() { m.Release(handle) })
		})
	}
}

func TestWaitOrdersTwoStreams(t *testing.T) {
	m, d := open(t)
	a, b, e, p := stream(t, d), stream(t, d), event(t, d), memory(t, d, 128)
	m.Hold(a.Handle())
	require.NoError(t, a.Memset(p, 1, 64))
	require.NoError(t, e.Record(a))
	require.NoError(t, b.Wait(e))
	require.NoError(t, b.Copy(p+64, p, 64))
	waits(t, b.Synchronize, func() { m.Release(a.Handle()) })
	require.Equal(t, byte(1), read(t, b, p+64, 1)[0])
}

func TestBorrowedStreamsAreGivenBackWhole(t *testing.T) {
	gputest.Alone(t)
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		own, p := stream(t, d), memory(t, d, 64)
		for _, handle := range []uintptr{0, 1, own.Handle()} {
			b, err := d.BorrowStream(handle)
			require.NoError(t, err)
			require.Equal(t, handle, b.Handle())
			require.NoError(t, b.Upload(p, pattern(64, 3)))
			require.Equal(t, pattern(64, 3), read(t, b, p, 64))
			require.NoError(t, b.Close())
			require.ErrorIs(t, b.Memset(p, 1, 1), cuda.ErrClosed)
		}
		require.NoError(t, own.Memset(p, 1, 1), "it still lives")
		_, err := d.BorrowStream(uintptr(driver.StreamPerThread))
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "goroutines move")
	})
}

// A stream is borrowed in the context and from the device that it was made in.
func TestBorrowedStreamsOfOtherContexts(t *testing.T) {
	m, err := sim.New(sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	require.NoError(t, err)
	closed(t, m)
	drv := driver.Of(m).Foreign()
	require.Equal(t, driver.Success, drv.Init())
	c, r := drv.CtxCreate(0, 0)
	require.Equal(t, driver.Success, r)
	// Whoever made the context keeps it until the System is closed.
	t.Cleanup(func() { require.Equal(t, driver.Success, drv.CtxDestroy(c)) })
	h, r := drv.StreamCreate(c, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	t.Cleanup(func() { require.Equal(t, driver.Success, drv.StreamDestroy(c, h)) })
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	closed(t, sys)
	d, other := sys.Devices()[0], sys.Devices()[1]

	_, err = other.BorrowStream(uintptr(h))
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "of device 0 on device 1")
	s, err := d.BorrowStream(uintptr(h))
	require.NoError(t, err)
	closed(t, s)
	require.Equal(t, c, core.StreamOf(s).Ctx.Handle)
	_, err = other.WithContext(uintptr(c))
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = d.WithContext(0)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	with, err := d.WithContext(uintptr(c))
	require.NoError(t, err)
	handle, err := with.Context()
	require.NoError(t, err)
	require.Equal(t, uintptr(c), handle)
	require.Equal(t, c, core.StreamOf(stream(t, with)).Ctx.Handle)

	p := memory(t, with, 64)
	require.NoError(t, s.Upload(p, pattern(64, 1)))
	require.Equal(t, pattern(64, 1), read(t, s, p, 64))
	// Closing waits for the work of that context too.
	host, err := d.NewHostBuffer(64)
	require.NoError(t, err)
	m.Hold(uintptr(h))
	require.NoError(t, s.CopyFromHost(p, host.All()))
	waits(t, host.Close, func() { m.Release(uintptr(h)) })
}

func TestWhatAStreamRefuses(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		gone, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		require.NoError(t, gone.Close())
		host, err := d.NewHostBuffer(64)
		require.NoError(t, err)
		closed(t, host)
		p, e := memory(t, d, 64), event(t, d)
		for name, f := range map[string]func(s *cuda.Stream) error{
			"Synchronize":  (*cuda.Stream).Synchronize,
			"Done":         func(s *cuda.Stream) error { _, err := s.Done(); return err },
			"Capturing":    func(s *cuda.Stream) error { _, err := s.Capturing(); return err },
			"Wait":         func(s *cuda.Stream) error { return s.Wait(e) },
			"Record":       func(s *cuda.Stream) error { return e.Record(s) },
			"Copy":         func(s *cuda.Stream) error { return s.Copy(p, p, 1) },
			"Memset":       func(s *cuda.Stream) error { return s.Memset(p, 1, 1) },
			"CopyFromHost": func(s *cuda.Stream) error { return s.CopyFromHost(p, host.All()) },
			"CopyToHost":   func(s *cuda.Stream) error { return s.CopyToHost(host.All(), p) },
			"Upload":       func(s *cuda.Stream) error { return s.Upload(p, []byte{1}) },
			"Download":     func(s *cuda.Stream) error { return s.Download(make([]byte, 1), p) },
			"CloseAfter":   func(s *cuda.Stream) error { return host.CloseAfter(s) },
		} {
			require.ErrorIs(t, f(gone), cuda.ErrClosed, name)
			require.ErrorIs(t, f(nil), cuda.ErrInvalidArgument, name)
		}
		s := stream(t, d)
		require.ErrorIs(t, s.Copy(p, p, -1), cuda.ErrInvalidArgument)
		require.ErrorIs(t, s.Memset(p, 1, -1), cuda.ErrInvalidArgument)
		require.ErrorIs(t, s.CopyFromHost(p, cuda.HostSlice{}), cuda.ErrInvalidArgument)
		require.ErrorIs(t, s.Wait(nil), cuda.ErrInvalidArgument)
		strange := another(t, d)
		require.ErrorIs(t, s.Wait(event(t, strange)), cuda.ErrForeign)
		require.ErrorIs(t, stream(t, strange).CopyFromHost(p, host.All()), cuda.ErrForeign)
		require.ErrorIs(t, host.CloseAfter(stream(t, strange)), cuda.ErrForeign)
	})
}

// The driver crashes on a handle that is gone: of many that close and use a
// stream at the same time one destroys it, and none touches it afterwards.
func TestClosingAStreamFromManyGoroutines(t *testing.T) {
	m, d := open(t)
	p := memory(t, d, 64)
	for range 30 {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		m.ResetCounts()
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				if err := s.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
			wg.Go(func() {
				for range 5 {
					if err := s.Memset(p, 1, 64); err != nil && !errors.Is(err, cuda.ErrClosed) {
						t.Errorf("memset: %v", err)
					}
				}
			})
		}
		wg.Wait()
		require.Equal(t, 1, m.Count("cuStreamDestroy"))
	}
}

// A Close that runs while another queries the stream must not destroy the stream
// beneath that query.
func TestCloseDuringClose(t *testing.T) {
	m, d := open(t)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	other := make(chan error, 1)
	begin := sync.OnceFunc(func() {
		done := make(chan struct{})
		go func() {
			other <- s.Close()
			close(done)
		}()
		select {
		case <-done:
		case <-time.After(glance):
		}
	})
	m.OnCall(func(call string) {
		if call == "cuStreamIsCapturing" {
			begin()
		}
	})
	require.NoError(t, s.Close())
	require.NoError(t, <-other)
	m.OnCall(nil)
	require.Equal(t, 1, m.Count("cuStreamDestroy"))
}

func TestCloseOfAStreamGoesOnWhereItFailed(t *testing.T) {
	m, d := open(t)
	for _, call := range []string{"cuStreamIsCapturing", "cuEventRecord", "cuEventSynchronize", "cuStreamDestroy"} {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		require.NoError(t, s.Upload(memory(t, d, 64), pattern(64, 1)))
		m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.Unknown)})
		require.Error(t, s.Close(), call)
		require.NoError(t, s.Close(), call)
		require.ErrorIs(t, s.Synchronize(), cuda.ErrClosed)
	}
	require.Zero(t, d.System().Stats().Streams)
}

// Another goroutine begins a capture on the stream while it is waited for, at
// whatever moment: the capture lives, and the wait says what it found.
func TestACaptureThatBeginsDuringAWaitLives(t *testing.T) {
	// A capture is ended on the thread that it began on.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for name, wait := range map[string]func(s *cuda.Stream) error{
		"Synchronize": func(s *cuda.Stream) error { return s.Synchronize() },
		"Close":       func(s *cuda.Stream) error { return s.Close() },
	} {
		for k := range 6 {
			m, d := open(t)
			s, p := stream(t, d), memory(t, d, 64)
			require.NoError(t, s.Memset(p, 1, 64))
			in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
			calls, began := 0, false
			m.OnCall(func(call string) {
				if calls++; calls == k+1 {
					m.OnCall(nil)
					began = drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureGlobal) == driver.Success
				}
			})
			err := wait(s)
			m.OnCall(nil)
			at := fmt.Sprintf("%s, call %d: %v", name, k, err)
			if began {
				if err != nil {
					require.ErrorIs(t, err, cuda.ErrCapturing, at)
				}
				g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
				if r != driver.InvalidHandle { // it was destroyed with its capture
					require.Equal(t, driver.Success, r, at)
					require.Equal(t, driver.Success, drv.GraphDestroy(g))
				}
			}
			require.NoError(t, s.Close())
		}
	}
}

// Asking whether a stream is done never meets the beginning of a capture.
func TestDoneBesideCaptures(t *testing.T) {
	_, d := open(t)
	s, p := stream(t, d), memory(t, d, 64)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				if _, err := s.Done(); err != nil && !errors.Is(err, cuda.ErrCapturing) {
					t.Error(err)
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for range 200 {
		g, err := s.WithCapture(cuda.CaptureOptions{Mode: cuda.CaptureGlobal}, func() error { return s.Memset(p, 1, 64) })
		require.NoError(t, err)
		require.NoError(t, g.Close())
	}
	close(stop)
	wg.Wait()
}

// Nothing is put on the legacy stream where all work on it is other people's.
func TestClosingLeavesABorrowedLegacyStreamAlone(t *testing.T) {
	gputest.Alone(t)
	for _, named := range []bool{false, true} {
		m, err := sim.New(sim.Options{})
		require.NoError(t, err)
		sys, err := m.Open(cuda.Options{NamedStreamsOnly: named})
		require.NoError(t, err)
		d := sys.Devices()[0]
		legacy, err := d.BorrowStream(0)
		require.NoError(t, err)
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		closes := func() int {
			host, err := d.NewHostBuffer(10)
			require.NoError(t, err)
			before := m.Count("cuEventRecord")
			require.NoError(t, host.Close())
			return m.Count("cuEventRecord") - before
		}
		if named {
			require.Equal(t, 1, closes(), "the caller says that work is on named streams: on this one too")
		} else {
			require.Zero(t, closes(), "the context is waited for as a whole")
			p, r := core.SystemOf(sys).Drv.MemAlloc(core.StreamOf(s).Ctx.Handle, 64)
			require.Equal(t, driver.Success, r)
			require.NoError(t, legacy.Memset(cuda.Ptr(p), 1, 64))
			require.Equal(t, 1, closes(), "and with work of ours by its event")
			require.Equal(t, driver.Success, core.SystemOf(sys).Drv.MemFree(core.StreamOf(s).Ctx.Handle, p))
		}
		require.NoError(t, legacy.Close())
		require.NoError(t, s.Close())
		require.NoError(t, sys.Close())
		require.NoError(t, m.Close())
	}
}

// The error says what lost the context, where the driver knows it, and so does the
// log: not everybody has the machine at hand to ask.
func TestALostContextNamesTheCulprit(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	var log bytes.Buffer
	sys, err := m.OpenOwned(cuda.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	b, err := d.NewHostBuffer(64)
	require.NoError(t, err)
	require.NoError(t, s.Copy(b.Ptr()+1, b.Ptr(), 8))
	const culprit = "the two ranges share memory"
	for range 2 {
		err = s.Synchronize()
		require.ErrorIs(t, err, cuda.ErrDeviceLost)
		require.ErrorContains(t, err, culprit)
	}
	_, err = d.LoadModule([]byte(testText))
	require.ErrorIs(t, err, cuda.ErrDeviceLost)
	require.ErrorContains(t, err, culprit)
	require.Equal(t, 1, strings.Count(log.String(), culprit), log.String())
	require.NoError(t, b.Close())
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
}

// An operation on the legacy stream that was refused has put no work there, so a
// plain Close still leaves that stream alone.
func TestARefusedOperationIsNoWork(t *testing.T) {
	gputest.Alone(t)
	m, d := open(t)
	legacy, err := d.BorrowStream(0)
	require.NoError(t, err)
	closed(t, legacy)
	s, err := d.NewStream(cuda.StreamOptions{Blocking: true})
	require.NoError(t, err)
	closed(t, s)
	p := memory(t, d, 64)
	_, err = s.WithCapture(cuda.CaptureOptions{}, func() error { return legacy.Memset(p, 1, 64) })
	require.ErrorIs(t, err, cuda.ErrCapturing)
	require.NoError(t, s.Synchronize())
	host, err := d.NewHostBuffer(10)
	require.NoError(t, err)
	before := m.Count("cuEventRecord")
	require.NoError(t, host.Close())
	require.Equal(t, before, m.Count("cuEventRecord"))
}
