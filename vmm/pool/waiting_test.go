package pool_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// done waits until the stream has nothing to do, as a program finds out.
func done(t *testing.T, d *cuda.Device, s *cuda.Stream) {
	t.Helper()
	require.NoError(t, s.Synchronize())
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	require.NoError(t, e.Record(s))
	require.Eventually(t, func() bool { ok, err := e.Done(); return err == nil && ok }, testTimeout, time.Millisecond)
	require.NoError(t, e.Close())
}

// Trim gives back all that is free once the GPU has nothing to do, at the first
// call.
func TestTrimOnAnIdleGPUGivesAllBack(t *testing.T) {
	for range 20 {
		_, d := open(t)
		s, other := stream(t, d), stream(t, d)
		p := newPool(t, d, pool.Options{})
		b := alloc(t, p, s, 128*mib)
		small := alloc(t, p, s, 100)
		require.NoError(t, other.Memset(b.Ptr(), 1, 100))
		free(t, p, b, other)
		free(t, p, small)
		done(t, d, s)
		done(t, d, other)
		freed, err := p.Trim(0)
		require.NoError(t, err)
		require.Equal(t, 130*mib, freed)
	}
}

// Memory that an idle pool holds serves any allocation, at the first try.
func TestABufferHasWhatAnIdlePoolHolds(t *testing.T) {
	for range 20 {
		_, d := openSmall(t)
		s := stream(t, d)
		p := newPool(t, d, pool.Options{})
		b := alloc(t, p, s, 60*mib)
		require.NoError(t, s.Memset(b.Ptr(), 1, mib))
		free(t, p, b)
		done(t, d, s)
		buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{})
		require.NoError(t, err)
		require.NoError(t, buffer.Grow(50*mib))
		require.NoError(t, buffer.Close())
	}
}

// A request that does not wait for work gets memory whose work is done, whatever stream
// it was on.
func TestARequestThatDoesNotWaitHasWhatIsDone(t *testing.T) {
	for range 20 {
		_, d := openSmall(t)
		s, other := stream(t, d), stream(t, d)
		p := newPool(t, d, pool.Options{Wait: -1})
		b := alloc(t, p, s, 60*mib)
		require.NoError(t, s.Memset(b.Ptr(), 1, mib))
		free(t, p, b)
		done(t, d, s)
		free(t, p, alloc(t, p, other, 50*mib))
	}
}

// A request waits for memory of graphs that are closed with CloseAfter as it does
// for freed blocks.
func TestARequestWaitsForTheMemoryOfGraphs(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	p := newPool(t, d, pool.Options{Limit: 16 * mib, Wait: testTimeout})
	g, _ := captured(t, p, s, pool.CaptureOptions{}, func() error {
		b, err := p.Alloc(pool.Request{Bytes: 16 * mib, Stream: s})
		return errors.Join(err, s.Memset(b.Ptr(), 1, 100), p.Free(b))
	})
	hold(t, m, s)
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.CloseAfter(s))
	time.AfterFunc(50*time.Millisecond, func() { m.Release(s.Handle()) })
	require.Zero(t, p.Waited(other))
	free(t, p, alloc(t, p, other, 16*mib))
	require.Positive(t, p.Waited(other))
	require.Zero(t, p.Waited(s))
	require.Zero(t, p.Waited(nil))
	require.NoError(t, d.System().Drain(t.Context()))
}

// A request waits for memory of objects that were closed while the GPU used them, within
// the bound of either the pool or the System.
func TestChunksWaitForWhatOthersGiveBack(t *testing.T) {
	for name, bound := range map[string]struct {
		pool, system time.Duration
	}{"the pool's bound": {testTimeout, 0}, "the System's bound": {-1, testTimeout}} {
		t.Run(name, func(t *testing.T) {
			m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Memory: 66 * mib}}})
			require.NoError(t, err)
			sys, err := m.Open(cuda.Options{AllocationWait: bound.system})
			require.NoError(t, err)
			d := sys.Devices()[0]
			s, err := d.NewStream(cuda.StreamOptions{})
			require.NoError(t, err)
			p, err := pool.New(d, pool.Options{Wait: bound.pool})
			require.NoError(t, err)
			buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{})
			require.NoError(t, err)
			require.NoError(t, buffer.Grow(60*mib))
			m.Hold(s.Handle())
			require.NoError(t, s.Memset(buffer.Ptr(), 1, 100))
			require.NoError(t, buffer.CloseAfter(s))
			timer := time.AfterFunc(50*time.Millisecond, func() { m.Release(s.Handle()) })
			free(t, p, alloc(t, p, s, mib))
			timer.Stop()
			m.Release(s.Handle())
			require.NoError(t, p.Close())
			require.NoError(t, s.Close())
			require.NoError(t, sys.Close())
			require.NoError(t, m.Close())
		})
	}
}

// A Close that is refused disturbs no concurrent request.
func TestARefusedCloseDisturbsNoRequest(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	p := newPool(t, d, pool.Options{})
	kept := alloc(t, p, s, 100)
	var g errgroup.Group
	var running atomic.Int32
	for range 2 {
		running.Add(1)
		g.Go(func() error {
			defer running.Add(-1)
			for range 1000 {
				fresh, err := d.NewStream(cuda.StreamOptions{})
				if err != nil {
					return err
				}
				for _, on := range []*cuda.Stream{s, fresh} {
					b, err := p.Alloc(pool.Request{Bytes: 1000, Stream: on})
					if err == nil {
						err = p.Free(b)
					}
					if err != nil {
						return err
					}
				}
				a, err := p.NewArena()
				if err != nil {
					return err
				}
				if err := errors.Join(a.Close(), fresh.Close()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for running.Load() > 0 {
		require.ErrorIs(t, p.Close(), cuda.ErrInUse)
	}
	require.NoError(t, g.Wait())
	free(t, p, kept)
}

// Workspaces that could not be planned are empty, and can be closed.
func TestWorkspacesOfABadPlan(t *testing.T) {
	_, d := open(t)
	p := newPool(t, d, pool.Options{})
	ws, err := p.Prepare(stream(t, d), pool.Workspace{Name: "a"}, pool.Workspace{Name: "a"})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, ok := ws.Get("a")
	require.False(t, ok)
	require.NoError(t, ws.Close())
}

// A capture that ends while a node is made leaves no memory behind: End waits for
// the call, and a capture that ended without End has the request refused.
func TestACaptureEndsWhileANodeIsMade(t *testing.T) {
	for _, said := range []bool{true, false} {
		m, d := open(t)
		s := stream(t, d)
		p := newPool(t, d, pool.Options{})
		var c *pool.Capture
		g, err := s.WithCapture(cuda.CaptureOptions{}, func() (err error) {
			c, err = p.BeginCapture(s, pool.CaptureOptions{Nodes: true})
			return err
		})
		require.NoError(t, err)
		_, err = c.End()
		require.NoError(t, err)
		require.NoError(t, errors.Join(c.Close(), g.Close()))

		// The goroutine that allocates stands before the driver's call.
		entered, goOn := make(chan struct{}), make(chan struct{})
		var once sync.Once
		m.OnCall(func(call string) {
			if call == "cuMemAllocAsync" {
				once.Do(func() { close(entered); <-goOn })
			}
		})
		type result struct {
			b   pool.Block
			err error
		}
		came := make(chan result, 1)
		ended := make(chan error, 1)
		g, err = s.WithCapture(cuda.CaptureOptions{Mode: cuda.CaptureRelaxed}, func() (err error) {
			if c, err = p.BeginCapture(s, pool.CaptureOptions{Nodes: true}); err != nil {
				return err
			}
			go func() {
				b, err := p.Alloc(pool.Request{Bytes: mib, Stream: s})
				came <- result{b, err}
			}()
			<-entered
			if !said {
				return nil
			}
			go func() { _, err := c.End(); ended <- err }()
			time.Sleep(20 * time.Millisecond)
			require.Empty(t, ended, "End did not wait for the node")
			close(goOn)
			return <-ended
		})
		require.NoError(t, err)
		if !said {
			close(goOn)
		}
		r := <-came
		m.OnCall(nil)
		if said {
			require.NoError(t, r.err)
		} else {
			require.ErrorIs(t, r.err, cuda.ErrCapturing)
			_, err := c.End()
			require.NoError(t, err)
		}
		require.NoError(t, errors.Join(c.Close(), g.Close()))
	}
}

// gone counts what the driver is asked about events, or contexts, that are destroyed.
type gone struct {
	driver.Driver
	asked  atomic.Int32
	before func(c driver.Context)
}

func (g *gone) EventQuery(c driver.Context, e driver.Event) driver.Result {
	g.before(c)
	r := g.Driver.EventQuery(c, e)
	if r != driver.Success && r != driver.NotReady {
		g.asked.Add(1)
	}
	return r
}

// A miss that asks a stream's event, while the last borrowed stream of its context is
// closed, asks about nothing that is gone.
func TestAMissAsksNoEventThatIsDestroyed(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	spy := &gone{Driver: driver.Of(m), before: func(driver.Context) {}}
	sys, err := gputest.Wrap(spy, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.Close()); require.NoError(t, m.Close()) })
	d, drv := sys.Devices()[0], driver.Of(m)
	c, r := drv.Foreign().CtxCreate(0, driver.Device(d.Ordinal()))
	require.Equal(t, driver.Success, r)
	h, r := drv.StreamCreate(c, driver.StreamNonBlocking)
	require.Equal(t, driver.Success, r)
	s, err := d.BorrowStream(uintptr(h))
	require.NoError(t, err)
	other := stream(t, d)
	p := newPool(t, d, pool.Options{Wait: -1})

	b := alloc(t, p, s, 4*mib)
	m.Hold(uintptr(h))
	require.NoError(t, s.Memset(b.Ptr(), 1, 100))
	free(t, p, b)
	free(t, p, alloc(t, p, other, 4*mib)) // the miss records an event on s, which does not pass
	m.Release(uintptr(h))

	entered, goOn := make(chan struct{}, 1), make(chan struct{})
	var once atomic.Bool
	spy.before = func(in driver.Context) { // as if the goroutine were descheduled before the call
		if in == c && once.CompareAndSwap(false, true) {
			entered <- struct{}{}
			<-goOn
		}
	}
	done := make(chan pool.Block, 1)
	go func() {
		b, err := p.Alloc(pool.Request{Bytes: 8 * mib, Stream: other})
		if err != nil {
			panic(err)
		}
		done <- b
	}()
	<-entered
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		require.NoError(t, err)
		require.Equal(t, driver.Success, drv.StreamDestroy(c, h))
		require.Equal(t, driver.Success, drv.Foreign().CtxDestroy(c))
		close(goOn)
	case <-time.After(100 * time.Millisecond): // it waits for the call
		close(goOn)
		require.NoError(t, <-closed)
		require.Equal(t, driver.Success, drv.StreamDestroy(c, h))
		require.Equal(t, driver.Success, drv.Foreign().CtxDestroy(c))
	}
	free(t, p, <-done)
	require.NoError(t, other.Synchronize())
	require.Zero(t, spy.asked.Load(), "the driver was asked about an event, and a context, that are gone")
}
