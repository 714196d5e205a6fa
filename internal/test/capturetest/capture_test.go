package capturetest

import (
	"context"
	"errors"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mib = 1 << 20

// place is where an operation runs: a System that has done nothing yet, with a stream. It
// closes what the operation could not close.
type place struct {
	*testing.T
	within context.Context
	dev    *cuda.Device
	stream *cuda.Stream
}

type operation func(w place) error

// closed closes an object when the test ends, if it is still open.
func (w place) closed(c interface{ Close() error }) {
	w.Cleanup(func() { require.NoError(w, c.Close()) })
}

// operations reach the driver's calls that end captures.
var operations = map[string]operation{
	"events": func(w place) error {
		e, err := w.dev.NewEvent(cuda.EventOptions{})
		if err != nil {
			return err
		}
		w.closed(e)
		err = errors.Join(e.Record(w.stream), e.Synchronize())
		_, done := e.Done()
		return errors.Join(err, done, e.Close())
	},
	"streams": func(w place) error {
		_, err := w.stream.Done()
		return errors.Join(err, w.stream.Synchronize())
	},
	"pinned memory": func(w place) error {
		h, err := w.dev.NewHostBuffer(100_000)
		if err != nil {
			return err
		}
		w.closed(h)
		err = h.Close()
		if w.dev.System().TrimHost() == 0 {
			return errors.Join(err, errors.New("nothing was trimmed"))
		}
		return err
	},
	"managed memory": func(w place) error {
		b, err := managed.New(w.dev, 2*mib, managed.Options{Placement: managed.GPUFirst})
		if err != nil {
			return err
		}
		w.closed(b)
		return errors.Join(b.Host(w.stream, func([]byte) error { return nil }), b.Close())
	},
	// More than is staged at a time, so that the copies wait; and access is taken away, which
	// waits for the device, as clipping and closing do.
	"a buffer": func(w place) error {
		b, err := vmm.NewBuffer(w.dev, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		if err != nil {
			return err
		}
		w.closed(b)
		data := make([]byte, 20*mib)
		_, err = b.Append(w.stream, data)
		if err == nil {
			var all vmm.Slice[byte]
			all, err = b.Slice(0, len(data))
			err = errors.Join(err, all.CopyTo(w.stream, data))
		}
		return errors.Join(err, b.SetAccess(vmm.Access{Location: w.dev.Location(), Mode: vmm.ReadOnly}),
			b.Resize(nil, mib), b.Clip(), b.Close())
	},
	"a sparse range": func(w place) error {
		p, err := vmm.NewPages(w.dev, vmm.PagesOptions{Zero: true, Budget: cuda.NewBudget(64*mib, cuda.BudgetOptions{})})
		if err != nil {
			return err
		}
		w.closed(p)
		s, err := vmm.NewSparse(w.dev, vmm.SparseOptions{Reserve: 64 * mib, Pages: p})
		if err != nil {
			return err
		}
		w.closed(s)
		part, one := vmm.Span{First: 3, N: 2}, vmm.Span{First: 9, N: 1}
		err = errors.Join(s.Map(w.within, w.stream, part), s.UnmapAfter([]*cuda.Stream{w.stream}, part), s.Map(w.within, nil, part),
			s.Share(w.within, s, 9, vmm.Span{First: 3, N: 1}), s.Replace(w.within, w.stream, 9), s.Share(w.within, s, 10, one), s.Replace(w.within, nil, 10),
			gputest.Err(p.Fill(w.within, mib)))
		for _, on := range []*cuda.Stream{w.stream, nil} {
			v, failed := vmm.ViewOf[byte](s, 3*s.Page(), s.Page())
			err = errors.Join(err, failed, v.Zero(on), v.CopyFrom(on, make([]byte, v.Len())), v.CopyTo(on, make([]byte, v.Len())))
		}
		return errors.Join(err, s.Unmap(w.within, part), gputest.Err(p.Trim(0)), s.Close(), p.Close())
	},
	"a sparse range with a null page": func(w place) error {
		s, err := vmm.NewSparse(w.dev, vmm.SparseOptions{Reserve: 16 * mib, Null: true})
		if err != nil {
			return err
		}
		w.closed(s)
		part := vmm.Span{First: 3, N: 2}
		return errors.Join(s.Map(w.within, w.stream, part), s.UnmapAfter([]*cuda.Stream{w.stream}, part), s.Map(w.within, nil, part),
			s.Unmap(w.within, part), s.Close())
	},
	"suspended memory": func(w place) error {
		b, err := vmm.NewBuffer(w.dev, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		if err != nil {
			return err
		}
		w.closed(b)
		_, err = b.Append(w.stream, make([]byte, 20*mib))
		if err != nil {
			return err
		}
		s, err := vmm.Suspend(w.within, vmm.SuspendOptions{}, b)
		if err != nil {
			return err
		}
		if err = s.Resume(w.within); err != nil {
			return err
		}
		if s, err = vmm.SuspendAfter(vmm.SuspendOptions{Keep: vmm.Drop, TrimPools: true}, []*cuda.Stream{w.stream}, b); err != nil {
			return err
		}
		if err = errors.Join(s.Released().Wait(w.within), s.Resume(w.within)); err != nil {
			return err
		}
		if s, err = vmm.Suspend(w.within, vmm.SuspendOptions{Guard: true}, b); err != nil {
			return err
		}
		return errors.Join(s.Forget(w.within), s.Resume(w.within), b.Close())
	},
	"a pool": func(w place) error {
		p, err := pool.New(w.dev, pool.Options{Chunk: 2 * mib})
		if err != nil {
			return err
		}
		w.closed(p)
		for _, n := range []int{100, 20 * mib} {
			b, failed := p.Alloc(pool.Request{Bytes: n, Stream: w.stream})
			err = errors.Join(err, failed, p.Free(b))
		}
		return errors.Join(err, p.Close())
	},
	"a suspended pool": func(w place) error {
		p, err := pool.New(w.dev, pool.Options{Chunk: 2 * mib})
		if err != nil {
			return err
		}
		w.closed(p)
		b, err := p.Alloc(pool.Request{Bytes: 6 * mib, Stream: w.stream})
		if err != nil {
			return err
		}
		s, err := vmm.Suspend(w.within, vmm.SuspendOptions{}, p)
		if err != nil {
			return errors.Join(err, p.Free(b))
		}
		if err = s.Resume(w.within); err == nil {
			s, err = vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.stream}, p)
		}
		if err == nil {
			err = errors.Join(s.Released().Wait(w.within), p.Free(b), s.Resume(w.within))
		}
		return errors.Join(err, p.Close())
	},
	"a publication and its follower": func(w place) error {
		a, err := vmm.NewArray[uint32](w.dev, vmm.BufferOptions{Reserve: 16 * mib, Chunks: vmm.FixedChunks(2 * mib)})
		if err != nil {
			return err
		}
		w.closed(a)
		l, err := peer.Listen(filepath.Join(w.TempDir(), "d"), "s", peer.Options{})
		if err != nil {
			return err
		}
		server := publish.NewServer(publish.ServerOptions{})
		over := make(chan error, 1)
		go func() { over <- server.Serve(context.Background(), l) }()
		w.Cleanup(func() { require.NoError(w, errors.Join(server.Close(), <-over, l.Close())) })
		p, err := publish.Array(server, "numbers", a)
		if err != nil {
			return err
		}
		if err := errors.Join(a.Resize(w.stream, 2*mib), p.Announce(w.within, mib, w.stream)); err != nil {
			return err
		}
		k, err := publish.Dial(w.within, l.Path(), publish.DialOptions{})
		if err != nil {
			return err
		}
		w.closed(k)
		f, err := publish.Follow[uint32](w.within, k, w.dev, "numbers", publish.FollowOptions{
			Quiesce: func(int) []*cuda.Stream { return []*cuda.Stream{w.stream} }, // or it waits until the capture has ended
		})
		if err != nil {
			return err
		}
		w.closed(f)
		err = errors.Join(f.Next(w.within, w.stream), f.Release(w.stream), f.Order(w.stream), f.Release(w.stream),
			p.Rewrite(w.within, publish.RewriteOptions{}), p.Announce(w.within, 2*mib, w.stream), f.Next(w.within))
		if err == nil && !f.Intact(f.Generation()) {
			err = errors.New("what is held is not intact")
		}
		err = errors.Join(err, f.Release(), p.Rewrite(w.within, publish.RewriteOptions{Turn: true}), p.Announce(w.within, 2*mib, w.stream),
			p.Rewrite(w.within, publish.RewriteOptions{}), p.Announce(w.within, 2*mib), p.Shrink(mib, w.stream), p.Settle(w.within))
		if err != nil {
			return err
		}
		s, err := vmm.Suspend(w.within, vmm.SuspendOptions{}, a) // which recalls it
		if err != nil {
			return err
		}
		if err := errors.Join(s.Resume(w.within), f.Next(w.within, w.stream), f.Release(w.stream)); err != nil {
			return err
		}
		o, err := publish.Open[uint32](w.within, k, w.dev, "numbers", handles.ImportOptions{})
		return errors.Join(err, o.Close(), p.Withdraw(), f.CloseAfter(w.stream))
	},
	"what waits in the background": func(w place) error {
		b, err := vmm.NewBuffer(w.dev, vmm.BufferOptions{})
		if err != nil {
			return err
		}
		w.closed(b)
		_, err = b.Append(w.stream, make([]byte, mib))
		return errors.Join(err, b.CloseAfter(w.stream), w.stream.Callback(func(error) {}), w.dev.System().Drain(w.within))
	},
}

// situation is a foreign capture in global mode.
type situation struct {
	flags    driver.StreamFlags // of the stream that captures
	borrowed bool               // the System knows the stream
	same     bool               // the operation runs on the thread that began the capture
}

func TestAForeignCaptureSurvives(t *testing.T) {
	for name, s := range map[string]situation{
		"a borrowed stream":          {flags: driver.StreamNonBlocking, borrowed: true},
		"a borrowed blocking stream": {flags: driver.StreamDefault, borrowed: true},
		"the same thread":            {flags: driver.StreamDefault, same: true},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, drv driver.Driver, o operation) {
				end, err := s.during(t.Context(), t, drv, o)
				require.NoError(t, err)
				require.Equal(t, driver.Success, end, "the operation ended the capture")
			})
		})
	}
}

// The operations reach the calls that end captures: made in the thread's own mode,
// as other libraries make them, they do end one.
func TestTheSameOperationsEndACaptureInTheThreadsOwnMode(t *testing.T) {
	each(t, func(t *testing.T, drv driver.Driver, o operation) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second) // Drain asks for ever
		defer cancel()
		end, _ := situation{flags: driver.StreamNonBlocking}.during(ctx, t, drv.Foreign(), o)
		require.Equal(t, driver.CaptureInvalid, end)
	})
}

// each runs a test with each operation on each driver.
func each(t *testing.T, test func(*testing.T, driver.Driver, operation)) {
	gputest.Alone(t)
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		for name, o := range operations {
			t.Run(name, func(t *testing.T) { test(t, core.SystemOf(d.System()).Drv, o) })
		}
	})
}

// during captures as another library in the process does, with the operation meanwhile,
// and returns how the capture ended. A graph that it made works.
func (s situation) during(within context.Context, t *testing.T, drv driver.Driver, o operation) (end driver.Result, err error) {
	ok := func(r driver.Result) {
		t.Helper()
		require.Equal(t, driver.Success, r)
	}
	sys, err := gputest.Wrap(drv, nil)
	require.NoError(t, err)
	t.Cleanup(func() { // what waited for the capture may be given back only now
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, sys.Drain(ctx))
		require.NoError(t, sys.Close())
	})
	d, f := sys.Devices()[0], drv.Foreign()
	ctx, r := f.DevicePrimaryCtxRetain(driver.Device(d.Ordinal()))
	ok(r)
	t.Cleanup(func() { ok(f.DevicePrimaryCtxRelease(driver.Device(d.Ordinal()))) })
	scratch, r := f.MemAlloc(ctx, 64)
	ok(r)
	t.Cleanup(func() { ok(f.MemFree(ctx, scratch)) })
	theirs, r := f.StreamCreate(ctx, s.flags)
	ok(r)
	t.Cleanup(func() { ok(f.StreamDestroy(ctx, theirs)) })
	if s.borrowed {
		b, err := d.BorrowStream(uintptr(theirs))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Close()) })
	}
	ours, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, ours.Close()) })

	ok(f.MemsetD8Async(ctx, scratch, 1, 64, theirs))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ok(f.StreamBeginCapture(ctx, theirs, driver.CaptureGlobal))
	captured := f.MemsetD8Async(ctx, scratch, 2, 64, theirs)
	if s.same {
		err = o(place{t, within, d, ours})
	} else {
		var wg sync.WaitGroup
		wg.Go(func() { err = o(place{t, within, d, ours}) })
		wg.Wait()
	}
	g, end := f.StreamEndCapture(ctx, theirs)
	ok(captured)
	if end != driver.Success {
		return end, err
	}
	exec, r := f.GraphInstantiate(ctx, g)
	ok(r)
	ok(f.GraphDestroy(g))
	read := func() byte {
		ok(f.StreamSynchronize(ctx, theirs))
		b := make([]byte, 1)
		require.NoError(t, ours.Download(b, cuda.Ptr(scratch)))
		return b[0]
	}
	require.Equal(t, byte(1), read(), "captured work does not run")
	ok(f.GraphLaunch(ctx, exec, theirs))
	require.Equal(t, byte(2), read(), "the graph works")
	ok(f.GraphExecDestroy(exec))
	return end, err
}
