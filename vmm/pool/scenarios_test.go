package pool_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// testTimeout bounds what must not hang.
const testTimeout = time.Minute

// code is the result of failing calls, one without a meaning of its own.
const code = cuda.Code(driver.Unknown)

// world is a pool on a machine of its own, and what a scenario did with it.
type world struct {
	t        testing.TB
	m        *sim.Machine
	sys      *cuda.System
	d        *cuda.Device
	s, other *cuda.Stream
	p        *pool.Pool
	base     int // of the device's memory, free beside the pool's
	live     []pool.Block
	graphs   []*cuda.Graph
	ready    []*pool.Workspaces
	ends     []func() error // what else is to be closed, the last first
	struck   []string
	written  []written // whose bytes are as they were written
	asleep   *vmm.Suspension
}

func newWorld(t testing.TB, sc scenario) *world {
	dev := sim.DeviceOptions{Granularity: kib64, Memory: 80 * kib64}
	m, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{dev, dev}})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	w := &world{t: t, m: m, sys: sys, d: sys.Devices()[0]}
	w.s, err = w.d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	w.other, err = w.d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	w.ends = append(w.ends, w.s.Close, w.other.Close)
	_, err = vmm.GranularityOf(w.d, vmm.Properties{})
	require.NoError(t, err)
	w.base = w.free()
	o := pool.Options{Chunk: kib64, Wait: -1, Statistics: true, Track: true}
	if sc.peer {
		o.Access = []vmm.Access{{Location: sys.Devices()[1].Location(), Mode: vmm.ReadWrite}}
	}
	w.p, err = pool.New(w.d, o)
	require.NoError(t, err)
	if sc.setup != nil {
		sc.setup(w)
	}
	return w
}

func (w *world) free() int {
	free, _ := w.m.Memory(0) // a context's own block is less than a granule
	return (free + kib64 - 1) / kib64 * kib64
}

func (w *world) alloc(s *cuda.Stream, bytes int) error {
	b, err := w.p.Alloc(pool.Request{Bytes: bytes, Stream: s})
	if err == nil {
		w.live = append(w.live, b)
	}
	return err
}

// fill allocates, and frees every other one.
func (w *world) fill(s *cuda.Stream, n, bytes int) {
	var gone []pool.Block
	for i := range n {
		require.NoError(w.t, w.alloc(s, bytes))
		if i%2 == 1 {
			gone = append(gone, w.live[len(w.live)-1])
			w.live = w.live[:len(w.live)-1]
		}
	}
	for _, b := range gone {
		require.NoError(w.t, w.p.Free(b))
	}
	require.NoError(w.t, s.Synchronize())
}

// some leaves free memory of every kind.
func (w *world) some() {
	for _, s := range []*cuda.Stream{w.s, w.other} {
		for _, bytes := range []int{100, kib64, 3 * kib64, 16 * kib64} {
			require.NoError(w.t, w.alloc(s, bytes))
		}
	}
	for _, b := range w.live {
		require.NoError(w.t, w.p.Free(b))
	}
	w.live = nil
	require.NoError(w.t, w.s.Synchronize())
	require.NoError(w.t, w.other.Synchronize())
}

// capture makes a graph of requests of every kind.
func (w *world) capture(o pool.CaptureOptions, sizes ...int) error {
	var inside []pool.Block
	g, _, err := w.p.Capture(w.s, o, func() error {
		for i, bytes := range sizes {
			b, err := w.p.Alloc(pool.Request{Bytes: bytes, Stream: w.s})
			if err != nil {
				return err
			}
			if i%2 == 0 {
				if err := w.p.Free(b); err != nil {
					return err
				}
				continue
			}
			if !o.Nodes {
				inside = append(inside, b)
			}
		}
		return nil
	})
	w.live = append(w.live, inside...)
	if err == nil {
		w.graphs = append(w.graphs, g)
	}
	return err
}

func (w *world) drain() error {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	return w.sys.Drain(ctx)
}

// unrest leaves written blocks, free memory and old places of chunks that moved.
func (w *world) unrest() {
	w.fill(w.s, 16, 2*kib64)
	w.written = append(w.written, w.write(w.s, 12*kib64, 1), w.write(w.s, 500, 2), w.write(w.other, 3*kib64, 3))
	require.NoError(w.t, w.s.Synchronize())
	require.NoError(w.t, w.other.Synchronize())
}

// wake suspends the pool, unless it is, and resumes it.
func (w *world) wake(suspend func() (*vmm.Suspension, error)) error {
	if w.asleep == nil {
		z, err := suspend()
		if err == nil {
			err = z.Released().Wait(context.Background())
		}
		if err != nil {
			return err
		}
		w.asleep = z
	}
	if err := w.asleep.Resume(context.Background()); err != nil {
		return err
	}
	w.asleep = nil
	w.holds(w.written...)
	return nil
}

// scenario is an operation in a small world. Called again after a failure, it completes.
type scenario struct {
	name  string
	peer  bool
	setup func(w *world)
	op    func(w *world) error
}

var scenarios = []scenario{
	{name: "New", op: func(w *world) error {
		p, err := pool.New(w.d, pool.Options{})
		if err == nil {
			w.ends = append(w.ends, p.Close)
		}
		return err
	}},
	{name: "Alloc small, the first", op: func(w *world) error { return w.alloc(w.s, 100) }},
	{name: "Alloc small", setup: func(w *world) { require.NoError(w.t, w.alloc(w.s, 100)) },
		op: func(w *world) error { return w.alloc(w.s, 8*kib) }},
	{name: "Alloc on a stream that others know", setup: func(w *world) { w.s.Handle() },
		op: func(w *world) error { return w.alloc(w.s, 100) }},
	{name: "Alloc of several chunks", op: func(w *world) error { return w.alloc(w.s, 16*kib64) }},
	{name: "Alloc of many chunks, which others make room for", setup: func(w *world) {
		w.fill(w.s, 4, 16*kib64)
		w.fill(w.other, 14, kib64)
	}, op: func(w *world) error { return w.alloc(w.s, 20*kib64) }},
	{name: "Alloc of several chunks, in a smaller range", setup: func(w *world) {
		w.m.Inject(sim.Fault{Call: "cuMemAddressReserve", Result: cuda.Code(driver.OutOfMemory)})
		require.NoError(w.t, w.alloc(w.s, 16*kib64)) // in a quarter of the first
	}, op: func(w *world) error { return w.alloc(w.s, 16*kib64) }},
	{name: "Alloc between, the first", op: func(w *world) error { return w.alloc(w.s, 3*kib64) }},
	{name: "Alloc between", setup: func(w *world) { require.NoError(w.t, w.alloc(w.s, 3*kib64+100)) },
		op: func(w *world) error { return w.alloc(w.s, 3*kib64) }},
	{name: "Alloc between, for a peer too", peer: true, op: func(w *world) error { return w.alloc(w.s, 3*kib64) }},
	{name: "Alloc stitched", setup: func(w *world) { w.fill(w.s, 16, 2*kib64) },
		op: func(w *world) error { return w.alloc(w.s, 12*kib64) }},
	{name: "Alloc stitched in a full pool", setup: func(w *world) {
		w.fill(w.s, 16, 2*kib64)
		w.fill(w.other, 20, 2*kib64)
		require.NoError(w.t, w.p.SetLimit(int(w.p.Stats().Reserved)))
	}, op: func(w *world) error { return w.alloc(w.s, 14*kib64) }},
	{name: "Alloc over old places", setup: func(w *world) {
		w.live = append(w.live, oldPlaces(w.t, w.p, w.s, kib64)...)
		for w.p.Ask() {
		}
	}, op: func(w *world) error { return w.alloc(w.s, 16*kib64) }},
	{name: "Alloc of what was another stream's", setup: func(w *world) { w.some() },
		op: func(w *world) error {
			for _, bytes := range []int{100, 3 * kib64, 16 * kib64} {
				if err := errors.Join(w.alloc(w.s, bytes), w.alloc(w.s, bytes)); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: "Alloc in a full pool whose chunks stay", peer: true, setup: func(w *world) {
		w.fill(w.s, 16, 2*kib64)
		require.NoError(w.t, w.p.SetLimit(int(w.p.Stats().Reserved)))
	}, op: func(w *world) error { return w.alloc(w.s, 12*kib64) }},
	{name: "Alloc after frees that named streams", setup: func(w *world) {
		w.some()
		require.NoError(w.t, w.alloc(w.s, 3*kib64))
		require.NoError(w.t, w.p.Free(w.live[0], w.other))
		w.live = nil
	}, op: func(w *world) error { return w.alloc(w.s, 4*kib64) }},
	{name: "Free", setup: func(w *world) { w.fill(w.s, 4, 3*kib64) },
		op: func(w *world) error {
			err := errors.Join(w.p.Free(w.live[0], w.other), w.p.FreePtr(w.live[1].Ptr()))
			w.live = w.live[2:]
			return err
		}},
	{name: "Trim", setup: (*world).some, op: func(w *world) error { _, err := w.p.Trim(0); return err }},
	{name: "SetLimit", setup: (*world).some, op: func(w *world) error { return w.p.SetLimit(4 * kib64) }},
	{name: "Upkeep after stitching", setup: func(w *world) {
		w.fill(w.s, 16, 2*kib64)
		require.NoError(w.t, w.alloc(w.s, 12*kib64))
		require.NoError(w.t, w.s.Synchronize())
	}, op: func(w *world) error { w.p.Tend(0); return nil }},
	{name: "Upkeep of what is not needed", setup: (*world).some,
		op: func(w *world) error { w.p.Tend(8 * kib64); return nil }},
	{name: "Prepare", op: func(w *world) error {
		ws, err := w.p.Prepare(w.s, pool.Workspace{Name: "a", Bytes: 100}, pool.Workspace{Name: "b", Bytes: 3 * kib64}, pool.Workspace{Name: "c", Bytes: 16 * kib64})
		w.ready = append(w.ready, ws)
		return err
	}},
	{name: "Capture", setup: func(w *world) { require.NoError(w.t, w.alloc(w.s, 3*kib64)) },
		op: func(w *world) error {
			return w.capture(pool.CaptureOptions{}, 100, 200, 3*kib64, 2*kib64, 16*kib64, 17*kib64)
		}},
	{name: "Capture, the first use of the pool", op: func(w *world) error { return w.capture(pool.CaptureOptions{}, 3*kib64, 100) }},
	{name: "Capture as nodes", op: func(w *world) error { return w.capture(pool.CaptureOptions{Nodes: true}, 100, 3*kib64, 16*kib64) }},
	{name: "A capture of others", setup: func(w *world) { w.some() },
		op: func(w *world) error {
			s, err := w.d.NewStream(cuda.StreamOptions{})
			if err != nil {
				return err
			}
			w.ends = append(w.ends, s.Close)
			var c *pool.Capture
			g, err := s.WithCapture(cuda.CaptureOptions{}, func() (err error) {
				if c, err = w.p.BeginCapture(s, pool.CaptureOptions{}); err != nil {
					return err
				}
				b, err := w.p.Alloc(pool.Request{Bytes: 3 * kib64, Stream: s})
				if err == nil {
					err = w.p.Free(b)
				}
				_, end := c.End()
				return errors.Join(err, end)
			})
			if err == nil {
				w.ends = append(w.ends, g.Close)
				err = g.Close()
			}
			if c != nil {
				if after := c.CloseAfter(s); after != nil {
					err = errors.Join(err, after)
					require.NoError(w.t, c.Close())
				}
			}
			return errors.Join(err, w.drain())
		}},
	{name: "Memory of a graph that is gone", setup: func(w *world) {
		require.NoError(w.t, w.capture(pool.CaptureOptions{}, 3*kib64, 2*kib64, 100, 200))
		require.NoError(w.t, w.graphs[0].Launch(w.s))
	}, op: func(w *world) error {
		if err := w.graphs[0].Close(); err != nil {
			return err
		}
		return w.alloc(w.other, 3*kib64)
	}},
	{name: "Suspend and Resume", setup: (*world).unrest, op: func(w *world) error {
		return w.wake(func() (*vmm.Suspension, error) {
			return vmm.Suspend(context.Background(), vmm.SuspendOptions{}, w.p)
		})
	}},
	{name: "SuspendAfter and Resume, dropped", setup: func(w *world) {
		w.unrest()
		w.written = nil // its bytes are lost
	}, op: func(w *world) error {
		return w.wake(func() (*vmm.Suspension, error) {
			return vmm.SuspendAfter(vmm.SuspendOptions{Keep: vmm.Drop}, []*cuda.Stream{w.s, w.other}, w.p)
		})
	}},
	{name: "Close", setup: (*world).some, op: func(w *world) error { return w.p.Close() }},
	{name: "Close after stitching", setup: func(w *world) {
		w.fill(w.s, 16, 2*kib64)
		require.NoError(w.t, w.alloc(w.s, 12*kib64))
		for _, b := range w.live {
			require.NoError(w.t, w.p.Free(b, w.other))
		}
		w.live = nil
	}, op: func(w *world) error { return w.p.Close() }},
}
