package vmm_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestCloseAfterThatFailedIsTakenUpByClose(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(3)
	w.m.Inject(sim.Fault{Call: "cuMemUnmap", Result: code})
	require.NoError(t, b.CloseAfter(w.s))
	require.ErrorContains(t, w.drain(), "cuMemUnmap returned")
	require.NoError(t, b.Close())
	w.end()
}

// An operation that runs when CloseAfter is called may put its work on a named
// stream behind the fence.
func TestCloseAfterDoesNotOutrunAnOperationThatRuns(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(1)
	inside, submit := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.m.OnCall(func(call string) {
		if call == "cuMemsetD8Async" {
			once.Do(func() { close(inside); <-submit })
		}
	})
	part, err := b.Slice(0, 1000)
	require.NoError(t, err)
	zeroed := make(chan error, 1)
	go func() { zeroed <- part.Zero(w.s) }()
	<-inside
	require.NoError(t, b.CloseAfter(w.s))
	time.Sleep(10 * time.Millisecond) // the fence passes
	w.m.Hold(w.s.Handle())
	close(submit)
	require.NoError(t, <-zeroed)
	time.Sleep(20 * time.Millisecond)
	w.m.Release(w.s.Handle())
	require.NoError(t, w.s.Synchronize(), w.m.Fault())
	w.end()
}

func TestCloseThatNoticesTheLossIsDone(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(1)
	w.m.Inject(sim.Fault{Call: "cuStreamIsCapturing", Times: -1, Result: cuda.Code(driver.IllegalAddress)})
	require.NoError(t, b.Close())
}

func TestAFailedAttributeIsAskedAgain(t *testing.T) {
	m, s := sim.Open(t)
	d := s.Devices()[0]
	m.Inject(sim.Fault{Call: "cuDeviceGetAttribute", Result: code})
	_, err := vmm.GranularityOf(d, vmm.Properties{})
	require.Error(t, err)
	_, err = vmm.GranularityOf(d, vmm.Properties{})
	require.NoError(t, err)
}

// An operation that begins and ends while CloseAfter runs, behind its mark and
// before the object goes out of use, counts too.
func TestCloseAfterMindsAnOperationBehindItsMark(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(1)
	part, err := b.Slice(0, 1000)
	require.NoError(t, err)
	drv, s := driver.Of(w.m), core.StreamOf(w.s)
	marked := false
	var once sync.Once
	w.m.OnCall(func(call string) {
		switch call {
		case "cuEventRecord":
			marked = true
		case "cuStreamIsCapturing":
			if marked {
				once.Do(func() {
					require.Equal(t, driver.Success, drv.StreamSynchronize(s.Ctx.Handle, s.Handle), "the mark has passed")
					w.m.Hold(w.s.Handle())
					require.NoError(t, part.Zero(w.s))
				})
			}
		}
	})
	require.NoError(t, b.CloseAfter(w.s))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, w.sys.Drain(ctx), context.DeadlineExceeded, "the operation has not passed")
	w.m.Release(w.s.Handle())
	require.NoError(t, w.drain())
	require.NoError(t, w.s.Synchronize(), w.m.Fault())
	w.end()
}

// Drain tells of a teardown that failed as what it is, also when its context
// has ended meanwhile.
func TestDrainOfAFailureAfterItsTime(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(1)
	w.m.Inject(sim.Fault{Call: "cuMemUnmap", Result: code})
	require.NoError(t, b.CloseAfter(w.s))
	require.Eventually(t, func() bool { return w.sys.Stats().Pending == 0 }, testTimeout, time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := w.sys.Drain(ctx)
	require.ErrorContains(t, err, "cuMemUnmap returned")
	require.NotContains(t, err.Error(), "has not passed")
	require.NotErrorIs(t, err, cuda.ErrInUse)
	require.NoError(t, b.Close())
	w.end()
}

func TestASystemIsClosedOnce(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	_, err = sys.Devices()[0].Context()
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := sys.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	_, err = vmm.Reserve(sys.Devices()[0], 2*mib, vmm.ReserveOptions{})
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.NoError(t, sys.Drain(t.Context()))
	require.Zero(t, sys.TrimHost())
	_, err = sys.Devices()[0].WithContext(1)
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = vmm.GranularityOf(sys.Devices()[0], vmm.Properties{})
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = sys.Devices()[0].Attribute(1)
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = sys.Devices()[0].CanAccess(sys.Devices()[0])
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = sys.Devices()[0].Transfer()
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = sys.Devices()[0].Probe()
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, _, err = sys.Devices()[0].MemoryInfo()
	require.ErrorIs(t, err, cuda.ErrClosed)
}
