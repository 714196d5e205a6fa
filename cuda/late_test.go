package cuda_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// Every submission of this package that can fail after the driver has accepted the work
// leaves the stream unsettled, or waits: pinned memory that another owner frees, naming
// another stream, comes back behind the work.
func TestWorkOfUnknownEnd(t *testing.T) {
	for name, submit := range map[string]func(s *cuda.Stream, p cuda.Ptr) error{
		"Upload":      func(s *cuda.Stream, p cuda.Ptr) error { return s.Upload(p, pattern(100, 1)) },
		"Download":    func(s *cuda.Stream, p cuda.Ptr) error { return s.Download(make([]byte, 100), p) },
		"Synchronize": func(s *cuda.Stream, p cuda.Ptr) error { return errors.Join(s.Memset(p, 1, 100), s.Synchronize()) },
	} {
		for _, call := range []string{"cuEventRecord", "cuEventSynchronize", "cuStreamIsCapturing"} {
			t.Run(name+"/"+call, func(t *testing.T) {
				m, d := open(t)
				s, other, p := stream(t, d), stream(t, d), memory(t, d, 4096)
				s.Handle() // so that it is asked whether it captures
				require.NoError(t, s.Upload(p, pattern(100, 1)))
				require.NoError(t, s.Synchronize())
				h, err := d.NewHostBuffer(4096)
				require.NoError(t, err)
				release := sync.OnceFunc(m.Hold(s.Handle()))
				defer release()
				struck := false
				m.OnCall(func(called string) {
					if submits(called) && !struck {
						struck = true
						m.Inject(sim.Fault{Call: call, Times: 2, Result: cuda.Code(driver.Unknown)})
					}
				})
				failed := make(chan error, 1)
				go func() { failed <- submit(s, p) }()
				select {
				case err = <-failed:
				case <-time.After(50 * time.Millisecond):
					release() // it waits for what it submitted
					err = <-failed
				}
				m.OnCall(nil)
				m.ClearFaults()
				if err == nil {
					require.Equal(t, "Upload/cuEventSynchronize", name+"/"+call, "it does not wait")
				}
				require.NoError(t, h.CloseAfter(other))
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				defer cancel()
				behind := d.System().Drain(ctx) != nil
				done, asked := s.Done()
				require.NoError(t, asked)
				require.Equal(t, err != nil && !done, behind)
				release()
				require.NoError(t, s.Synchronize())
				require.NoError(t, d.System().Drain(t.Context()))

				// From then on nothing waits for it.
				release = sync.OnceFunc(m.Hold(s.Handle()))
				defer release()
				h, err = d.NewHostBuffer(4096)
				require.NoError(t, err)
				require.NoError(t, h.CloseAfter(other))
				require.NoError(t, d.System().Drain(t.Context()))
				release()
			})
		}
	}
}

func submits(call string) bool {
	return call == "cuMemcpyHtoDAsync" || call == "cuMemcpyDtoHAsync" || call == "cuMemsetD8Async"
}

// A slot whose event could not be recorded is used again once a wait has succeeded.
func TestStagingAfterRecordsThatFailed(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 4096)
	for i := range 200 {
		m.Inject(sim.Fault{Call: "cuEventRecord", Result: cuda.Code(driver.Unknown)})
		require.Error(t, s.Upload(p, pattern(100, i)))
	}
	require.LessOrEqual(t, m.Live()[sim.KindHostMemory], 8)
	for i := range 50 {
		require.NoError(t, s.Upload(p, pattern(4096, i)))
		require.Equal(t, pattern(4096, i), read(t, s, p, 4096))
	}
	require.NoError(t, s.Close())
	d.System().TrimHost()
	require.Zero(t, m.Live()[sim.KindHostMemory])
}

// An event of the library's own that the driver does not destroy is destroyed later.
func TestEventsThatAreRefused(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 4096)
	require.NoError(t, s.Synchronize())
	before := m.Live()[sim.KindEvent]
	m.Inject(sim.Fault{Call: "cuEventDestroy", Times: -1, Result: cuda.Code(driver.Unknown)})
	m.Inject(sim.Fault{Call: "cuEventRecord", Result: cuda.Code(driver.Unknown)})
	require.Error(t, s.Synchronize())
	require.NoError(t, s.Upload(p, pattern(100, 1)))
	require.ErrorContains(t, d.System().Drain(t.Context()), "event is left of an operation that failed")
	require.Len(t, d.System().Leftovers(), 1)
	require.Equal(t, 1, d.System().Stats().Leftovers)
	err := d.System().Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "none of it is yours to close")
	m.ClearFaults()
	require.NoError(t, d.System().Drain(t.Context()))
	require.LessOrEqual(t, m.Live()[sim.KindEvent]-before, 2, "those in use")
}

// What a capture left, and the driver did not take, is no reason for System.Close to fail.
func TestACaptureThatIsDiscardedWhileTheDriverRefuses(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	s, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	m.Inject(sim.Fault{Call: "cuGraphDestroy", Times: -1, Result: cuda.Code(driver.Unknown)})
	mine := errors.New("mine")
	_, err = s.WithCapture(thread, func() error { return mine })
	require.ErrorIs(t, err, mine)
	require.ErrorContains(t, err, "System.Drain tries again")
	require.NoError(t, s.Close())
	require.Error(t, sys.Drain(t.Context()))
	require.ErrorIs(t, sys.Close(), cuda.ErrInUse)
	m.ClearFaults()
	require.NoError(t, sys.Close())
}

// What is not known of a capture counts as one: a query that fails never
// leads to a call that ends the capture.
func TestCapturesThatTheDriverDoesNotTellOf(t *testing.T) {
	refuse := sim.Fault{Call: "cuStreamGetCaptureInfo", Result: cuda.Code(driver.Unknown)}
	t.Run("Event.Record", func(t *testing.T) {
		m, d := open(t)
		s, e := stream(t, d), event(t, d)
		g := captured(t, s, func() error {
			m.Inject(refuse)
			require.ErrorContains(t, e.Record(s), "cuStreamGetCaptureInfo returned")
			_, err := e.Done()
			require.ErrorIs(t, err, cuda.ErrCapturing)
			require.ErrorIs(t, e.Synchronize(), cuda.ErrCapturing)
			return nil
		})
		require.NoError(t, g.Launch(s))
		require.NoError(t, e.Record(s))
		require.NoError(t, e.Synchronize())
	})
	t.Run("Upload", func(t *testing.T) {
		m, d := open(t)
		s, p := stream(t, d), memory(t, d, 4096)
		queries := 0
		captured(t, s, func() error {
			before := m.Count(refuse.Call)
			err := s.Upload(p, pattern(100, 1))
			queries = m.Count(refuse.Call) - before
			return err
		})
		require.Positive(t, queries)
		for after := range queries { // the last is behind the copy
			captured(t, s, func() error {
				f := refuse
				f.After = after
				m.Inject(f)
				err := s.Upload(p, pattern(100, 1))
				m.ClearFaults()
				require.ErrorContains(t, err, "cuStreamGetCaptureInfo returned", "query %d of %d", after, queries)
				require.NotErrorIs(t, err, cuda.ErrCapturing, "it goes on")
				return nil
			})
		}
	})
	for _, call := range []string{"cuEventRecord", "cuMemcpyHtoDAsync"} {
		t.Run("another library's, before "+call, func(t *testing.T) {
			m, d := open(t)
			s, p := stream(t, d), memory(t, d, 4096)
			s.Handle()
			require.NoError(t, s.Upload(p, pattern(100, 1)))
			h, err := d.NewHostBuffer(100)
			require.NoError(t, err)
			closed(t, h)
			in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
			begin := sync.OnceFunc(func() {
				require.Equal(t, driver.Success, drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
				m.Inject(sim.Fault{Call: "cuStreamIsCapturing", Result: cuda.Code(driver.Unknown)})
			})
			m.OnCall(func(called string) {
				if called == call {
					begin()
				}
			})
			if call == "cuEventRecord" {
				err = h.CloseAfter(s)
			} else {
				err = s.Upload(p, pattern(100, 2))
			}
			m.OnCall(nil)
			require.ErrorContains(t, err, "cuStreamIsCapturing returned")
			time.Sleep(5 * time.Millisecond) // the reclaimer looks
			g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
			require.Equal(t, driver.Success, r, "it lives")
			require.Equal(t, driver.Success, drv.GraphDestroy(g))
		})
	}
}

// A copy in pieces whose later piece is refused leaves the earlier ones on the stream, and its
// caller takes it for not done.
func TestPiecesBeforeOneThatIsRefused(t *testing.T) {
	m, d := open(t)
	s, other, p := stream(t, d), stream(t, d), memory(t, d, 4<<20)
	h, err := d.NewHostBuffer(4096)
	require.NoError(t, err)
	release := sync.OnceFunc(m.Hold(s.Handle()))
	defer release()
	m.Inject(sim.Fault{Call: "cuMemcpyHtoDAsync", After: 1, Result: cuda.Code(driver.Unknown)})
	require.ErrorContains(t, s.Upload(p, pattern(4<<20, 1)), "cuMemcpyHtoDAsync returned")
	require.NoError(t, h.CloseAfter(other))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.System().Drain(ctx), cuda.ErrInUse, "the first piece still runs")
	release()
	require.NoError(t, d.System().Drain(t.Context()))
}

// A launch beside which another library begins a capture may have come before it, and then it
// runs although the error says that the graph is to be thrown away.
func TestALaunchBesideACaptureOfAnotherLibrary(t *testing.T) {
	m, d := open(t)
	s, other, p := stream(t, d), stream(t, d), memory(t, d, 4096)
	g := captured(t, s, func() error { return s.Memset(p, 1, 4096) })
	h, err := d.NewHostBuffer(4096)
	require.NoError(t, err)
	in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
	s.Handle()
	release := sync.OnceFunc(m.Hold(uintptr(in.Handle)))
	defer release()
	m.OnCall(func(called string) {
		if called == "cuEventRecord" {
			require.Equal(t, driver.Success, drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
		}
	})
	require.ErrorIs(t, g.Launch(s), cuda.ErrCapturing)
	m.OnCall(nil)
	theirs, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.Success, drv.GraphDestroy(theirs))
	require.NoError(t, h.CloseAfter(other))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.System().Drain(ctx), cuda.ErrInUse, "the launch still runs")
	release()
	require.NoError(t, d.System().Drain(t.Context()))
}

// An event that cannot tell whether it has passed makes the reclaimer ask again, and never wait:
// what other streams have passed is given back meanwhile.
func TestTheReclaimerDoesNotWaitForAnEventThatCannotTell(t *testing.T) {
	m, d := open(t)
	busy, idle := stream(t, d), stream(t, d)
	p := memory(t, d, 4096)
	var behind [2]*cuda.HostBuffer
	for i := range behind {
		var err error
		behind[i], err = d.NewHostBuffer(4096)
		require.NoError(t, err)
	}
	release := sync.OnceFunc(m.Hold(busy.Handle()))
	defer release()
	require.NoError(t, busy.Memset(p, 1, 4096))
	require.NoError(t, behind[0].CloseAfter(busy))
	m.Inject(sim.Fault{Call: "cuEventQuery", Times: 3, Result: cuda.Code(driver.InvalidValue)})
	require.NoError(t, behind[1].CloseAfter(idle))
	drained := make(chan error, 1)
	go func() { drained <- behind[1].Released().Wait(t.Context()) }()
	select {
	case err := <-drained:
		require.NoError(t, err)
	case <-time.After(time.Minute):
		release()
		<-drained
		require.Fail(t, "the reclaimer waits for the busy stream")
	}
	select {
	case <-behind[0].Released().Done():
		require.Fail(t, "the busy stream has not passed")
	default:
	}
	release()
	require.NoError(t, d.System().Drain(t.Context()))
}
