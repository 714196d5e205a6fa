package vmm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// kib64 is the granularity of the machines in these tests: contents are compared
// byte by byte, so they are small.
const kib64 = 64 << 10

// testTimeout bounds what must not hang.
const testTimeout = time.Minute

// world is a machine of two devices with what a scenario made on it.
type world struct {
	t       require.TestingT
	m       *sim.Machine
	sys     *cuda.System
	d, peer *cuda.Device
	s, far  *cuda.Stream
	owned   []closer
	buffers []*vmm.Buffer
	// what the scenarios name
	a     *vmm.Allocation
	r     *vmm.Reservation
	maps  []*vmm.Mapping
	b     *vmm.Buffer
	host  *cuda.HostBuffer
	slice vmm.Slice[byte]
	sleep *vmm.Suspension
	// ranges have their pages from one source.
	ranges []*vmm.Sparse
	pages  *vmm.Pages
	budget *cuda.Budget
	// struck are the calls that were made to fail, where that is certain.
	struck []string
	async  bool
}

// newWorld makes one. A cold one has no context yet, nor streams.
func newWorld(t require.TestingT, cold bool) *world {
	devices := []sim.DeviceOptions{{Granularity: kib64, Memory: 64 * mib}, {Granularity: kib64, Memory: 64 * mib}}
	m, err := sim.New(sim.Options{Devices: devices})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	w := &world{t: t, m: m, sys: sys, d: sys.Devices()[0], peer: sys.Devices()[1]}
	for _, d := range sys.Devices() {
		_, err := vmm.GranularityOf(d, vmm.Properties{})
		require.NoError(t, err)
	}
	if cold {
		return w
	}
	w.s, err = w.d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	w.far, err = w.peer.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	w.own(w.s)
	w.own(w.far)
	return w
}

// own has the world close c at its end, the last first.
func (w *world) own(c closer) { w.owned = append(w.owned, c) }

// buffer makes a buffer of n chunks that is full but for the last hundred bytes.
func (w *world) buffer(chunks int, access ...vmm.Access) *vmm.Buffer {
	return w.bufferIn(16, chunks, access...)
}

// bufferIn is buffer with room for so many chunks.
func (w *world) bufferIn(room, chunks int, access ...vmm.Access) *vmm.Buffer {
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: room * kib64, Chunks: vmm.FixedChunks(kib64), Access: access})
	require.NoError(w.t, err)
	w.own(b)
	w.buffers = append(w.buffers, b)
	if chunks > 0 {
		require.NoError(w.t, gputest.Err(b.Append(nil, pattern(chunks*kib64-100, 1))))
	}
	w.b = b
	return b
}

// sparse makes a range of eight pages, of which the first are mapped.
func (w *world) sparse(mapped int, access ...vmm.Access) *vmm.Sparse {
	var err error
	if w.pages == nil {
		w.pages, err = vmm.NewPages(w.d, vmm.PagesOptions{Page: kib64})
		require.NoError(w.t, err)
		w.own(w.pages)
	}
	s, err := vmm.NewSparse(w.d, vmm.SparseOptions{Reserve: 8 * kib64, Pages: w.pages, Access: access})
	require.NoError(w.t, err)
	w.own(s)
	w.ranges = append(w.ranges, s)
	require.NoError(w.t, s.Map(w.ctx(), w.s, vmm.Span{First: 0, N: mapped}))
	return s
}

// mappings maps n allocations, of one granule each, side by side.
func (w *world) mappings(n int, access ...vmm.Access) {
	r, err := vmm.Reserve(w.d, 8*kib64, vmm.ReserveOptions{})
	require.NoError(w.t, err)
	w.r = r
	w.own(r)
	for i := range n {
		a, err := vmm.Create(w.d, kib64, vmm.Properties{})
		require.NoError(w.t, err)
		m, err := r.Map(i*kib64, a)
		require.NoError(w.t, err)
		require.NoError(w.t, a.Close())
		w.maps = append(w.maps, m)
		w.own(m)
		if len(access) > 0 {
			require.NoError(w.t, m.SetAccess(access...))
		}
	}
}

func (w *world) drain() error {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	return w.sys.Drain(ctx)
}

// view is all that an operation can change, without addresses.
type view struct {
	free    [2]int
	stats   cuda.Stats
	live    [3]int
	buffers []vmm.BufferStats
	content []uint32 // checksums
	access  [][2]driver.AccessFlags
	charged int // to the budget
}

// look waits for the streams and takes a view.
func (w *world) look() view {
	for _, s := range []*cuda.Stream{w.s, w.far} {
		if s != nil {
			require.NoError(w.t, s.Synchronize())
		}
	}
	v := view{stats: w.sys.Stats()}
	for i := range v.free {
		// The context's own block is less than a granule.
		free, _ := w.m.Memory(i)
		v.free[i] = (free + kib64 - 1) / kib64 * kib64
	}
	live := w.m.Live()
	for i, kind := range []string{sim.KindReservation, sim.KindAllocation, sim.KindMapping} {
		v.live[i] = live[kind]
	}
	grants := func(p cuda.Ptr) {
		var of [2]driver.AccessFlags
		for i := range of {
			var r driver.Result
			of[i], r = driver.Of(w.m).MemGetAccess(driver.Location{Type: driver.LocationDevice, ID: int32(i)}, driver.Ptr(p))
			if r != driver.Success {
				of[i] = 9 // not mapped
			}
		}
		v.access = append(v.access, of)
	}
	for _, b := range w.buffers {
		st := b.Stats()
		v.buffers = append(v.buffers, st)
		if _, err := b.Slice(0, 0); err != nil {
			continue
		}
		if st.Suspended == 0 {
			got, err := w.m.Bytes(b.Ptr(), st.Used)
			require.NoError(w.t, err)
			v.content = append(v.content, crc32.ChecksumIEEE(got))
		}
		for off := 0; off < st.Committed+st.Clipped; off += kib64 {
			grants(b.Ptr() + cuda.Ptr(off))
		}
	}
	for _, m := range w.maps {
		grants(m.Ptr())
	}
	for _, s := range w.ranges {
		grants(s.Ptr())
	}
	if w.budget != nil {
		v.charged = w.budget.Stats().Committed
	}
	return v
}

// end closes everything; nothing may be left anywhere.
func (w *world) end() {
	t := w.t
	require.NoError(t, w.drain())
	require.Empty(t, w.sys.Leftovers())
	for i := len(w.owned) - 1; i >= 0; i-- {
		require.NoError(t, w.owned[i].Close())
	}
	require.NoError(t, w.drain())
	require.Empty(t, w.sys.Live())
	require.NoError(t, w.sys.Close())
	require.Empty(t, w.m.Fault(), "the GPU touched what was gone")
	require.Empty(t, w.m.Leaks())
	require.Empty(t, w.m.Races())
	_ = w.m.Close() // what it could report was looked at
}

// scenario is one public operation with a small world round it.
type scenario struct {
	name  string
	cold  bool
	setup func(w *world)
	op    func(w *world) error
	// retry is how the operation is taken up after it failed, where that is not
	// op itself: something was taken out of use and could not be given back.
	retry func(w *world) error
	// tears: it takes something away, so after a failure the state is not as
	// before, and it is taken up again.
	tears bool
	// writes: it writes to memory that is in use, which a failure may leave
	// half written.
	writes bool
	// async: other goroutines work beside it, as the reclaimer's does, so the order of the
	// calls is not the same each time, and which ones were struck not certain.
	async bool
	// many: it makes so many calls that of the second failures only some are tried, unless
	// CUVMM_KILL_ROUNDS is set.
	many bool
}

// both gives the devices their access.
func both(w *world, far vmm.AccessMode) []vmm.Access {
	return []vmm.Access{{Location: w.d.Location(), Mode: vmm.ReadWrite}, {Location: w.peer.Location(), Mode: far}}
}

// clipped makes a buffer with three full chunks in use and two clipped ones, whose stream
// has passed. The reclaimer may free those two before the operation begins.
func clipped(w *world) {
	b := w.buffer(5)
	require.NoError(w.t, b.Resize(nil, 3*kib64))
	w.m.Hold(w.s.Handle())
	require.NoError(w.t, w.s.Memset(b.Ptr(), pattern(1, 1)[0], 1))
	require.NoError(w.t, b.ClipAfter(w.s))
	w.m.Release(w.s.Handle())
}

var scenarios = []scenario{
	{name: "Create", op: func(w *world) error { return w.create(kib64, vmm.Properties{}) }},
	{name: "Create without a context", cold: true, op: func(w *world) error { return w.create(kib64, vmm.Properties{}) }},
	{name: "Create on the host", op: func(w *world) error { return w.create(2*mib, vmm.Properties{Location: cuda.OnHost()}) }},
	{name: "Reserve", op: reserveOne},
	{name: "Reserve without a context", cold: true, op: reserveOne},
	{name: "NewBuffer", op: bufferOne},
	{name: "NewBuffer without a context", cold: true, op: bufferOne},
	{name: "Array.Append, the first on the device", setup: func(w *world) { w.buffer(0) },
		op: func(w *world) error {
			a, err := vmm.ArrayOf[uint32](w.b)
			require.NoError(w.t, err)
			_, err = a.Append(nil, make([]uint32, 40_000))
			return err
		}},
	{name: "Granted", setup: func(w *world) { require.NoError(w.t, w.create(kib64, vmm.Properties{})) },
		op: func(w *world) error { _, err := w.a.Granted(); return err }},
	{name: "Buffer.Granted", setup: func(w *world) { w.buffer(2) },
		op: func(w *world) error { _, err := w.b.Granted(); return err }},
	{name: "Reservation.Map", setup: func(w *world) { w.mappings(1); require.NoError(w.t, w.create(kib64, vmm.Properties{})) },
		op: func(w *world) error {
			m, err := w.r.Map(kib64, w.a)
			if err == nil {
				w.own(m)
			}
			return err
		}},
	{name: "Reservation.MapRun", setup: func(w *world) { w.mappings(1); require.NoError(w.t, w.create(kib64, vmm.Properties{})) },
		op: func(w *world) error {
			made, err := w.r.MapRun(kib64, both(w, vmm.ReadWrite), w.a, w.a, w.a)
			for _, m := range made {
				w.own(m)
			}
			return err
		}},
	{name: "Reservation.SetAccess up", setup: func(w *world) { w.mappings(3) },
		op: func(w *world) error { return w.r.SetAccess(0, 3*kib64, both(w, vmm.ReadOnly)...) }},
	{name: "Reservation.SetAccess down", setup: func(w *world) { w.mappings(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error { return w.r.SetAccess(0, 3*kib64, both(w, vmm.NoAccess)...) }},
	{name: "Mapping.SetAccess up", setup: func(w *world) { w.mappings(2) },
		op: func(w *world) error { return w.maps[1].SetAccess(both(w, vmm.ReadWrite)...) }},
	{name: "Mapping.SetAccess down", setup: func(w *world) { w.mappings(2, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error { return w.maps[1].SetAccess(both(w, vmm.ReadOnly)...) }},
	{name: "Mapping.Access", setup: func(w *world) { w.mappings(1) },
		op: func(w *world) error { _, err := w.maps[0].Access(w.d.Location()); return err }},
	{name: "DMABuf", setup: func(w *world) { w.mappings(2, both(w, vmm.NoAccess)...) },
		op: func(w *world) error {
			f, err := w.r.DMABuf(w.d, 0, 2*kib64, vmm.DMABufOptions{})
			if err == nil {
				err = f.Close()
			}
			return err
		}},
	{name: "Buffer.DMABuf", setup: func(w *world) { w.buffer(3) },
		op: func(w *world) error {
			f, err := w.b.DMABuf(0, 2*kib64, vmm.DMABufOptions{})
			if err == nil {
				err = f.Close()
			}
			return err
		}},
	{name: "Buffer.SetAccess up", setup: func(w *world) { w.buffer(3) },
		op: func(w *world) error { return w.b.SetAccess(both(w, vmm.ReadWrite)...) }},
	{name: "Buffer.SetAccess down", setup: func(w *world) { w.buffer(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error { return w.b.SetAccess(both(w, vmm.NoAccess)...) }},
	{name: "Append", setup: func(w *world) { w.buffer(2) },
		op: func(w *world) error { _, err := w.b.Append(w.s, pattern(3*kib64, 2)); return err }},
	{name: "Append and wait", setup: func(w *world) { w.buffer(2) },
		op: func(w *world) error { _, err := w.b.Append(nil, pattern(3*kib64, 2)); return err }},
	{name: "Append without growth", setup: func(w *world) { w.buffer(2) },
		op: func(w *world) error { _, err := w.b.Append(w.s, pattern(100, 2)); return err }},
	{name: "Append to a buffer that two devices see", setup: func(w *world) { w.buffer(1, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error { _, err := w.b.Append(w.far, pattern(3*kib64, 2)); return err }},
	{name: "AppendHost", setup: func(w *world) { w.buffer(2); w.pinned(2*kib64 + 5) },
		op: func(w *world) error { _, err := w.b.AppendHost(w.s, w.host.All()); return err }},
	{name: "AppendSlice", setup: func(w *world) { w.buffer(2); w.part(100, kib64) },
		op: func(w *world) error { _, err := w.b.AppendSlice(w.s, w.slice); return err }},
	{name: "AppendPtr", setup: func(w *world) { w.buffer(2) },
		op: func(w *world) error { _, err := w.b.AppendPtr(nil, w.b.Ptr(), 2*kib64-200); return err }},
	{name: "Grow", setup: func(w *world) { w.buffer(1) }, op: func(w *world) error { return w.b.Grow(3 * kib64) }},
	{name: "AppendUndefined", setup: func(w *world) { w.buffer(1) },
		op: func(w *world) error { _, err := w.b.AppendUndefined(3 * kib64); return err }},
	{name: "Resize longer", setup: func(w *world) { w.buffer(1) },
		op: func(w *world) error { return w.b.Resize(w.s, 3*kib64) }},
	{name: "Resize shorter", setup: func(w *world) { w.buffer(3) },
		op: func(w *world) error { return w.b.Resize(w.s, 10) }},
	{name: "Move", setup: func(w *world) { w.buffer(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error {
			b, err := w.b.Move(vmm.MoveOptions{Reserve: 32 * kib64})
			if err == nil {
				w.own(b)
				w.buffers = append(w.buffers, b)
			}
			return err
		}},
	{name: "Fork", setup: func(w *world) { w.buffer(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error {
			b, err := w.b.Fork(nil, 2*kib64+1000, vmm.ForkOptions{})
			if err == nil {
				w.own(b)
				w.buffers = append(w.buffers, b)
			}
			return err
		}},
	{name: "Slice.CopyFrom", writes: true, setup: func(w *world) { w.buffer(2); w.part(50, 1000) },
		op: func(w *world) error { return w.slice.CopyFrom(w.s, pattern(1000, 9)) }},
	{name: "Slice.CopyFromHost", writes: true, setup: func(w *world) { w.buffer(2); w.part(50, 1000); w.pinned(1000) },
		op: func(w *world) error { return w.slice.CopyFromHost(nil, w.host.All()) }},
	{name: "Slice.CopyFromSlice", writes: true, setup: func(w *world) { w.buffer(2); w.part(50, 1000) },
		op: func(w *world) error {
			src, err := w.b.Slice(2000, 3000)
			if err != nil {
				return err
			}
			return w.slice.CopyFromSlice(nil, src)
		}},
	{name: "Slice.Zero", writes: true, setup: func(w *world) { w.buffer(2); w.part(50, 1000) },
		op: func(w *world) error { return w.slice.Zero(w.s) }},
	{name: "Slice.CopyTo", setup: func(w *world) { w.buffer(2); w.part(50, 1000) },
		op: func(w *world) error {
			got := make([]byte, 1000)
			err := w.slice.CopyTo(w.s, got)
			if err == nil {
				require.Equal(w.t, pattern(2*kib64, 1)[50:1050], got)
			}
			return err
		}},
	{name: "Slice.CopyToHost", setup: func(w *world) { w.buffer(2); w.part(50, 1000); w.pinned(1000) },
		op: func(w *world) error { return w.slice.CopyToHost(nil, w.host.All()) }},
	{name: "Suspend", setup: (*world).family, op: func(w *world) error { return w.suspendFamily(vmm.SuspendOptions{}) }},
	{name: "Suspend to memory that is pinned", setup: func(w *world) {
		w.family()
		require.NoError(w.t, w.suspendFamily(vmm.SuspendOptions{}))
		require.NoError(w.t, w.sleep.Resume(w.ctx()))
	}, op: func(w *world) error { return w.suspendFamily(vmm.SuspendOptions{}) }},
	{name: "Suspend and drop", setup: (*world).family,
		op: func(w *world) error { return w.suspendFamily(vmm.SuspendOptions{Keep: vmm.Drop}) }},
	{name: "SuspendAfter", setup: (*world).family, async: true, op: func(w *world) (err error) {
		w.sleep, err = vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s, w.far}, w.memories()...)
		if err == nil {
			err = w.sleep.Released().Wait(w.ctx())
			if derr := w.drain(); err == nil {
				err = derr
			}
		}
		return err
	}},
	{name: "Resume", setup: func(w *world) { w.family(); require.NoError(w.t, w.suspendFamily(vmm.SuspendOptions{})) },
		op: func(w *world) error { return w.sleep.Resume(w.ctx()) }},
	{name: "Resume of a part", setup: func(w *world) { w.family(); require.NoError(w.t, w.suspendFamily(vmm.SuspendOptions{})) },
		op: func(w *world) error { return w.sleep.Resume(w.ctx(), w.buffers[1]) }},
	{name: "Resume from a source", setup: func(w *world) {
		w.family()
		require.NoError(w.t, w.suspendFamily(vmm.SuspendOptions{Source: vmm.SourceAt(bytes.NewReader(pattern(8*kib64, 3)))}))
	}, op: func(w *world) error { return w.sleep.Resume(w.ctx()) }},
	{name: "Resume of what was dropped", writes: true, setup: func(w *world) {
		w.family()
		require.NoError(w.t, w.suspendFamily(vmm.SuspendOptions{Keep: vmm.Drop}))
	}, op: func(w *world) error { return w.sleep.Resume(w.ctx()) }},
	{name: "Suspend of everything", async: true, many: true, setup: (*world).household, op: func(w *world) error {
		return w.suspendFamily(vmm.SuspendOptions{TrimPools: true})
	}},
	{name: "Resume of everything", async: true, many: true, setup: func(w *world) {
		w.household()
		require.NoError(w.t, w.suspendFamily(vmm.SuspendOptions{}))
	}, op: func(w *world) error { return w.sleep.Resume(w.ctx()) }},
	{name: "Resume of everything from a source", async: true, many: true, setup: func(w *world) {
		w.household()
		require.NoError(w.t, w.suspendFamily(vmm.SuspendOptions{Source: uploads{}}))
	}, op: func(w *world) error { return w.sleep.Resume(w.ctx()) }},
	{name: "NewPages", op: func(w *world) error {
		p, err := vmm.NewPages(w.d, vmm.PagesOptions{})
		if err == nil {
			w.own(p)
		}
		return err
	}},
	{name: "NewSparse", op: func(w *world) error {
		s, err := vmm.NewSparse(w.d, vmm.SparseOptions{})
		if err == nil {
			w.own(s)
		}
		return err
	}},
	{name: "Sparse.Map", setup: func(w *world) { w.sparse(2, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error {
			return w.ranges[0].Map(w.ctx(), w.s, vmm.Span{First: 1, N: 3}, vmm.Span{First: 6, N: 2})
		}},
	{name: "Sparse.Map of a stream's own pages", setup: func(w *world) { w.sparse(3); w.sparse(0); w.freed(3) },
		op: func(w *world) error {
			return w.ranges[1].Map(w.ctx(), w.s, vmm.Span{First: 1, N: 1}, vmm.Span{First: 4, N: 2})
		}},
	{name: "Sparse.Map of recycled pages", tears: true, setup: func(w *world) {
		w.sparse(3)
		w.sparse(0)
		require.NoError(w.t, w.ranges[0].Unmap(w.ctx(), vmm.Span{First: 0, N: 3}))
	}, op: func(w *world) error {
		return w.ranges[1].Map(w.ctx(), w.far, vmm.Span{First: 1, N: 1}, vmm.Span{First: 4, N: 2})
	}},
	{name: "Sparse.Share", setup: func(w *world) { w.sparse(3, both(w, vmm.ReadWrite)...); w.sparse(0) }, op: func(w *world) error {
		return w.ranges[1].Share(w.ctx(), w.ranges[0], 2, vmm.Span{First: 1, N: 2}, vmm.Span{First: 0, N: 1})
	}},
	{name: "Sparse.Replace", async: true, tears: true, setup: func(w *world) {
		w.sparse(2)
		w.sparse(0)
		require.NoError(w.t, w.ranges[1].Share(w.ctx(), w.ranges[0], 0, vmm.Span{First: 0, N: 2}))
	}, op: func(w *world) error { return w.ranges[1].Replace(w.ctx(), w.s, 1) }, retry: func(w *world) error {
		if err := w.drain(); err != nil {
			return err
		}
		// It may be a hole now.
		if err := w.ranges[1].Map(w.ctx(), w.s, vmm.Span{First: 1, N: 1}); err != nil {
			return err
		}
		return w.ranges[1].Replace(w.ctx(), w.s, 1)
	}},
	{name: "NewSparse with a null page", op: func(w *world) error {
		s, err := vmm.NewSparse(w.d, vmm.SparseOptions{Reserve: 4 * kib64, Page: kib64, Null: true})
		if err == nil {
			w.own(s)
		}
		return err
	}},
	{name: "Sparse.Map over the null page", tears: true, setup: (*world).covered, op: func(w *world) error {
		return w.ranges[0].Map(w.ctx(), w.s, vmm.Span{First: 1, N: 2}, vmm.Span{First: 5, N: 1})
	}},
	{name: "Sparse.Close of a range with a null page", tears: true, setup: (*world).covered,
		op: func(w *world) error { return w.ranges[0].Close() }},
	{name: "Sparse.Unmap", setup: func(w *world) { w.sparse(3) }, op: func(w *world) error {
		return w.ranges[0].Unmap(w.ctx(), vmm.Span{First: 1, N: 5})
	}},
	{name: "Sparse.UnmapAfter", setup: func(w *world) { w.sparse(3) }, op: func(w *world) error { return w.freePages(3) }},
	{name: "Reader", setup: func(w *world) { w.buffer(2) },
		op: func(w *world) error { _, err := io.Copy(io.Discard, vmm.NewReader(w.b)); return err }},

	{name: "Allocation.Close", tears: true, setup: func(w *world) { require.NoError(w.t, w.create(kib64, vmm.Properties{})) },
		op: func(w *world) error { return w.a.Close() }},
	{name: "Mapping.Close", tears: true, setup: func(w *world) { w.mappings(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error { return w.maps[1].Close() }},
	{name: "Reservation.Close", tears: true, setup: func(w *world) { w.mappings(0) },
		op: func(w *world) error { return w.r.Close() }},
	{name: "Reservation.CloseAfter", tears: true, setup: func(w *world) { w.mappings(0) },
		op: func(w *world) error {
			if err := w.r.CloseAfter(w.s, w.far); err != nil {
				return err
			}
			return w.drain()
		}, retry: func(w *world) error { return w.r.Close() }},
	{name: "Buffer.Close", tears: true, setup: func(w *world) { w.buffer(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error { return w.b.Close() }},
	{name: "Sparse.Close", tears: true, setup: func(w *world) { w.sparse(3); w.freed(1) },
		op: func(w *world) error { return w.ranges[0].Close() }},
	{name: "Sparse.CloseAfter", tears: true, setup: func(w *world) { w.sparse(3); w.freed(1) },
		op: func(w *world) error {
			if err := w.ranges[0].CloseAfter(w.s, w.far); err != nil {
				return err
			}
			return w.drain()
		}, retry: func(w *world) error { return w.ranges[0].Close() }},
	{name: "Pages.Trim", tears: true, setup: func(w *world) {
		w.sparse(4)
		require.NoError(w.t, w.ranges[0].Unmap(w.ctx(), vmm.Span{First: 1, N: 3}))
	}, op: func(w *world) error { return gputest.Err(w.pages.Trim(0)) }},
	{name: "Pages.Fill", setup: func(w *world) {
		var err error
		w.pages, err = vmm.NewPages(w.d, vmm.PagesOptions{Page: kib64, Budget: cuda.NewBudget(6*kib64, cuda.BudgetOptions{})})
		require.NoError(w.t, err)
		w.own(w.pages)
		w.sparse(2)
	}, op: func(w *world) error {
		_, err := w.pages.Fill(w.ctx(), mib)
		if err != nil { // what it has made is free
			err = errors.Join(err, gputest.Err(w.pages.Trim(0)))
		}
		return err
	}},
	{name: "Pages.Close", tears: true, setup: func(w *world) { w.sparse(2); require.NoError(w.t, w.ranges[0].Close()) },
		op: func(w *world) error { return w.pages.Close() }},
	{name: "Mapping.CloseAfter", tears: true, setup: func(w *world) { w.mappings(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error {
			if err := w.maps[1].CloseAfter(w.s, w.far); err != nil {
				return err
			}
			return w.drain()
		}, retry: func(w *world) error { return w.maps[1].Close() }},
	{name: "Buffer.CloseAfter", tears: true, setup: func(w *world) { w.buffer(3, both(w, vmm.ReadWrite)...) },
		op: func(w *world) error {
			if err := w.b.CloseAfter(w.s, w.far); err != nil {
				return err
			}
			return w.drain()
		}, retry: func(w *world) error { return w.b.Close() }},
	{name: "Buffer.Close after Move", tears: true, setup: func(w *world) {
		old := w.buffer(3)
		b, err := old.Move(vmm.MoveOptions{Reserve: 32 * kib64})
		require.NoError(w.t, err)
		w.own(b)
		w.buffers = append(w.buffers, b)
	}, op: func(w *world) error { return w.b.Close() }},
	{name: "Buffer.Close after Fork", tears: true, setup: func(w *world) {
		b, err := w.buffer(3).Fork(nil, 2*kib64+1000, vmm.ForkOptions{})
		require.NoError(w.t, err)
		w.own(b)
		w.buffers = append(w.buffers, b)
	}, op: func(w *world) error { return w.b.Close() }},
	{name: "Clip", tears: true, setup: func(w *world) { w.buffer(5); require.NoError(w.t, w.b.Resize(nil, kib64)) },
		op: func(w *world) error { return w.b.Clip() }},
	{name: "ClipAfter", tears: true, async: true, setup: func(w *world) { w.buffer(5); require.NoError(w.t, w.b.Resize(nil, kib64)) },
		op: func(w *world) error {
			if err := w.b.ClipAfter(w.s); err != nil {
				return err
			}
			return w.drain()
		}, retry: func(w *world) error { return w.b.Clip() }},
	{name: "Append after ClipAfter", async: true, setup: clipped,
		op: func(w *world) error {
			if err := w.drain(); err != nil {
				return err
			}
			_, err := w.b.Append(nil, pattern(4*kib64, 3))
			return err
		}, tears: true, retry: func(w *world) error {
			if err := w.b.Clip(); err != nil {
				return err
			}
			_, err := w.b.Append(nil, pattern(4*kib64, 3))
			return err
		}},
}

// covered makes a range with a null page, and a page.
func (w *world) covered() {
	s, err := vmm.NewSparse(w.d, vmm.SparseOptions{Reserve: 8 * kib64, Page: kib64, Null: true})
	require.NoError(w.t, err)
	w.own(s)
	w.ranges = append(w.ranges, s)
	require.NoError(w.t, s.Map(w.ctx(), w.s, vmm.Span{First: 0, N: 1}))
}

// freePages unmaps the first pages of the first range behind the work of a stream.
func (w *world) freePages(n int) error {
	return w.ranges[0].UnmapAfter([]*cuda.Stream{w.s}, vmm.Span{First: 0, N: n})
}

// freed has work in flight on pages that are free.
func (w *world) freed(n int) {
	require.NoError(w.t, w.s.Memset(w.ranges[0].Ptr(), 1, n*kib64))
	require.NoError(w.t, w.freePages(n))
}

func (w *world) create(size int, p vmm.Properties) error {
	a, err := vmm.Create(w.d, size, p)
	if err == nil {
		w.own(a)
		w.a = a
	}
	return err
}

func reserveOne(w *world) error {
	r, err := vmm.Reserve(w.d, 4*kib64, vmm.ReserveOptions{Align: 1 << 20})
	if err == nil {
		w.own(r)
	}
	return err
}

func bufferOne(w *world) error {
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Access: []vmm.Access{{Location: w.peer.Location(), Mode: vmm.ReadOnly}}})
	if err == nil {
		w.own(b)
	}
	return err
}

// family makes a buffer with access of its own, its successor, and a mapping.
func (w *world) family() {
	next, err := w.buffer(2, both(w, vmm.ReadWrite)...).Move(vmm.MoveOptions{})
	require.NoError(w.t, err)
	w.own(next)
	w.buffers = append(w.buffers, next)
	w.mappings(1, both(w, vmm.ReadWrite)...)
}

// household makes a family with memory of every kind beside it: a buffer in a budget, one of the other
// device, and pages.
func (w *world) household() {
	w.family()
	w.budget = cuda.NewBudget(64*kib64, cuda.BudgetOptions{Name: "household"})
	for _, d := range []*cuda.Device{w.d, w.peer} {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64), Budget: w.budget})
		require.NoError(w.t, err)
		w.own(b)
		w.buffers = append(w.buffers, b)
		require.NoError(w.t, gputest.Err(b.Append(nil, pattern(kib64, 6))))
	}
	w.sparse(2)
}

// uploads is a Source that fills memory by one copy.
type uploads struct{}

func (uploads) Fill(_ context.Context, s *cuda.Stream, _ vmm.Memory, at cuda.Ptr, n int) error {
	return s.Upload(at, pattern(n, 3))
}

func (w *world) memories() (all []vmm.Memory) {
	for _, b := range w.buffers {
		all = append(all, b)
	}
	for _, m := range w.maps {
		all = append(all, m)
	}
	for _, s := range w.ranges {
		all = append(all, s)
	}
	return all
}

func (w *world) suspendFamily(o vmm.SuspendOptions) (err error) {
	w.sleep, err = vmm.Suspend(w.ctx(), o, w.memories()...)
	return err
}

func (w *world) pinned(n int) {
	h, err := w.d.NewHostBuffer(n)
	require.NoError(w.t, err)
	copy(h.Bytes(), pattern(n, 4))
	w.own(h)
	w.host = h
}

func (w *world) part(off, n int) {
	s, err := w.b.Slice(off, off+n)
	require.NoError(w.t, err)
	w.slice = s
}

// begin makes the scenario's world.
func (sc scenario) begin(t testing.TB) *world {
	w := newWorld(t, sc.cold)
	w.async = sc.async
	if sc.setup != nil {
		sc.setup(w)
	}
	return w
}

// watch runs f and returns the driver calls that were made meanwhile.
func (w *world) watch(f func() error) (calls []string, err error) {
	var mu sync.Mutex
	var made []string
	w.m.OnCall(func(call string) {
		mu.Lock()
		defer mu.Unlock()
		made = append(made, call)
	})
	err = f()
	w.m.OnCall(nil)
	mu.Lock() // the reclaimer may be in a call beside it
	defer mu.Unlock()
	return slices.Clone(made), err
}

// code is the result of failing calls: one without a special meaning.
const code = cuda.Code(driver.Unknown)

// blow is a fault: the k-th call fails, a run call possibly after a few of its
// parts, and then also the j-th of the calls behind it, if j is not negative.
type blow struct{ k, parts, j int }

func (b blow) String() string {
	text := fmt.Sprintf("call %d", b.k)
	if b.parts > 0 {
		text += fmt.Sprintf(" after %d parts", b.parts-1)
	}
	if b.j >= 0 {
		text += fmt.Sprintf(" and then call %d", b.k+1+b.j)
	}
	return text
}

// aim injects the blow into a world whose operation makes those calls, if all
// goes well. The returned function tells which of the calls that were made in
// the end it struck.
func (b blow) aim(m *sim.Machine, clean []string) (struck func(calls []string) []int) {
	first := sim.Fault{After: b.k, Result: code}
	if b.parts > 0 {
		first.Call, first.After, first.Parts = clean[b.k], 0, b.parts
		for _, c := range clean[:b.k] {
			if c == first.Call {
				first.After++
			}
		}
	}
	m.Inject(first)
	if b.j >= 0 { // it does not count the call that the first one strikes
		m.Inject(sim.Fault{After: b.k + b.j, Result: code})
	}
	return func(calls []string) (struck []int) {
		skip, second := first.After, b.k+b.j
		for i, c := range calls {
			if first.Call == "" || c == first.Call {
				if skip--; skip == -1 {
					struck = append(struck, i)
					continue
				}
			}
			if b.j >= 0 && second == 0 {
				struck = append(struck, i)
			}
			second--
		}
		return struck
	}
}

func TestEveryFailureOfEveryOperation(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			clean := sc.begin(t)
			before := clean.look()
			calls, err := clean.watch(func() error { return sc.op(clean) })
			require.NoError(t, err)
			after := clean.look()
			clean.end()
			for k := 0; sc.walk(t, k, 0, calls, before, after); k++ {
				if k < len(calls) && (calls[k] == "cuMemUnmap" || calls[k] == "cuMemSetAccess") {
					for parts := 1; parts <= 4; parts++ {
						sc.walk(t, k, parts, calls, before, after)
					}
				}
			}
		})
	}
}

// walk has the k-th call fail alone, and then with each call behind it. It
// reports whether there is such a call.
func (sc scenario) walk(t *testing.T, k, parts int, clean []string, before, after view) (reached bool) {
	if sc.run(t, blow{k, parts, -1}, clean, before, after) == 0 {
		return false
	}
	stride := 1
	if sc.many && os.Getenv("CUVMM_KILL_ROUNDS") == "" {
		stride = 31
	}
	for j := (k + parts) % stride; sc.run(t, blow{k, parts, j}, clean, before, after) == 2; j += stride {
	}
	return true
}

// run strikes one blow at the operation and returns how many of its faults struck.
func (sc scenario) run(t *testing.T, b blow, clean []string, before, after view) int {
	w := sc.begin(t)
	struckOf := b.aim(w.m, clean)
	calls, err := w.watch(func() error { return sc.op(w) })
	w.m.ClearFaults()
	for _, i := range struckOf(calls) {
		w.struck = append(w.struck, calls[i])
	}
	at := fmt.Sprintf("%s, %v, struck %v: %v", sc.name, b, w.struck, err)
	_ = w.drain() // what an operation left behind is given back by now; a teardown's error was returned
	now := w.look().normal(sc)
	sane(t, w, at)
	once := len(w.struck) < 2
	if err == nil { // struck nothing, or nothing that mattered
		if once {
			require.Equal(t, after.normal(sc), now, at)
		}
		w.end()
		return len(w.struck)
	}
	var typed *cuda.Error
	require.ErrorAs(t, err, &typed, at)
	require.Equal(t, code, typed.Code, at)
	if !sc.async {
		require.Contains(t, w.struck, typed.Call, at)
	}
	if !sc.async && now.stats.Pending > before.stats.Pending { // the undo waits for work in flight
		_ = w.drain()
		now = w.look().normal(sc)
	}
	if !sc.tears && !reflect.DeepEqual(before.normal(sc), now) {
		if once {
			require.Equal(t, before.normal(sc), now, at)
		}
		require.ErrorContains(t, err, "undoing it failed", at)
	}
	if once || sc.tears {
		again := sc.op
		if sc.retry != nil {
			again = sc.retry
		}
		require.NoError(t, again(w), at)
		require.NoError(t, w.drain(), at)
		require.Equal(t, after.normal(sc), w.look().normal(sc), at)
	} else {
		w.wake(at, slices.Concat(before.content, after.content))
		w.goOn(at)
	}
	w.end()
	return len(w.struck)
}

// normal leaves out what is no matter of the scenario.
func (v view) normal(sc scenario) view {
	if sc.cold { // the context takes memory for itself
		v.free = [2]int{}
	}
	if sc.writes {
		v.content = nil
	}
	v.stats.IdleHostBytes = 0       // what was pinned is retained
	if v.stats.LeftoverBytes == 0 { // events of the library's own, of which no error speaks
		v.stats.Leftovers = 0
	}
	for i := range v.buffers {
		v.buffers[i].Grown = 0
	}
	return v
}

// sane checks what holds in every state.
func sane(t testing.TB, w *world, at string) {
	gputest.Accounted(t, w.m, w.sys, at)
	for _, b := range w.buffers {
		s := b.Stats()
		require.LessOrEqual(t, s.Used, s.Committed, at)
		require.LessOrEqual(t, s.Committed, s.Reserved, at)
	}
}

// wake resumes what sleeps after a failure: no byte is lost.
func (w *world) wake(at string, contents []uint32) {
	if w.sleep == nil {
		return
	}
	require.NoError(w.t, w.sleep.Resume(w.ctx()), at)
	for _, sum := range w.look().content {
		require.True(w.t, len(contents) == 0 || slices.Contains(contents, sum), at)
	}
}

// goOn uses the buffers after a failure that could not be undone: what is
// allowed works, and what is out of use is refused.
func (w *world) goOn(at string) {
	for _, b := range w.buffers {
		if _, err := b.Slice(0, 0); err != nil {
			continue
		}
		want := pattern(3*kib64, 5)
		from := b.Len()
		_, err := b.Append(nil, want)
		if errors.Is(err, cuda.ErrMoved) {
			continue
		}
		if err != nil {
			// Only what an undo left is refused, or access that is not known.
			if !errors.Is(err, cuda.ErrInUse) {
				require.ErrorIs(w.t, err, cuda.ErrNotPermitted, at)
				require.NoError(w.t, b.SetAccess(vmm.Access{Location: w.d.Location(), Mode: vmm.ReadWrite}), at)
			}
			require.NoError(w.t, b.Clip(), at)
			require.Zero(w.t, b.Stats().Clipped, at)
			require.NoError(w.t, gputest.Err(b.Append(nil, want)), at)
		}
		part, err := b.Slice(from, from+len(want))
		require.NoError(w.t, err, at)
		got := make([]byte, len(want))
		require.NoError(w.t, part.CopyTo(nil, got), at)
		require.True(w.t, bytes.Equal(want, got), at)
	}
}

// TestEveryLossInEveryOperation has each driver call in turn return that the
// context is gone: then nothing waits, and closing drops the state.
func TestEveryLossInEveryOperation(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			for k := 0; ; k++ {
				w := sc.begin(t)
				w.m.Inject(sim.Fault{After: k, Times: -1, Result: cuda.Code(driver.IllegalAddress)})
				calls, err := w.watch(func() error { return sc.op(w) })
				w.m.ClearFaults()
				if len(calls) <= k && err == nil {
					w.end()
					return
				}
				// Where the reclaimer works beside the operation, the call may
				// be one of its own, after the operation's last.
				call := "the reclaimer"
				if k < len(calls) {
					call = calls[k]
				}
				at := fmt.Sprintf("%s, %s lost the context: %v", sc.name, call, err)
				if err != nil {
					require.ErrorIs(t, err, cuda.ErrDeviceLost, at)
				}
				for i := len(w.owned) - 1; i >= 0; i-- {
					require.NoError(t, w.owned[i].Close(), at)
				}
				require.NoError(t, w.drain(), at)
				require.Empty(t, w.sys.Live(), at)
				require.NoError(t, w.sys.Close(), at)
				_ = w.m.Close() // what was dropped is still there: the driver was not asked any more
			}
		})
	}
}

// lose destroys the context of the first device: a mapping goes while work that
// was not named still needs it.
func (w *world) lose() {
	w.mappings(1, both(w, vmm.NoAccess)...)
	other, err := w.d.NewStream(cuda.StreamOptions{})
	require.NoError(w.t, err)
	w.own(other)
	w.m.Hold(w.s.Handle())
	require.NoError(w.t, w.s.Memset(w.maps[0].Ptr(), 1, 100))
	mapped := w.sys.Stats().Mappings
	require.NoError(w.t, w.maps[0].CloseAfter(other))
	for until := time.Now().Add(testTimeout); w.sys.Stats().Mappings == mapped; time.Sleep(time.Millisecond) {
		require.True(w.t, time.Now().Before(until))
	}
	w.m.Release(w.s.Handle())
	require.ErrorIs(w.t, w.s.Synchronize(), cuda.ErrDeviceLost)
	require.Contains(w.t, w.m.Fault(), "cuMemsetD8Async")
}

func TestALostDeviceWaitsForNothingAndCloses(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(3)
	keep := w.buffer(5)
	w.part(0, 100)
	host, err := w.d.NewHostBuffer(100)
	require.NoError(t, err)
	w.own(host)
	a, err := vmm.Create(w.d, kib64, vmm.Properties{})
	require.NoError(t, err)
	w.own(a)

	// A goroutine waits for a stream that stands still when the device is lost.
	still, err := w.d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	w.own(still)
	w.m.Hold(still.Handle())
	require.NoError(t, still.Memset(b.Ptr(), 1, 1))
	waits := make(chan error, 1)
	go func() { waits <- b.Close() }()
	require.NoError(t, keep.Resize(nil, 200))
	require.NoError(t, keep.ClipAfter(still))
	w.lose()
	select {
	case err := <-waits:
		if err != nil { // the call that notices the loss reports it, once
			require.ErrorIs(t, err, cuda.ErrDeviceLost)
			require.NoError(t, b.Close(), "closing drops the state")
		}
	case <-time.After(testTimeout):
		t.Fatal("Close waits for a device that is gone")
	}

	for what, err := range map[string]error{
		"Append":           gputest.Err(keep.Append(w.s, []byte{1})),
		"Append and wait":  gputest.Err(keep.Append(nil, []byte{1})),
		"Append and grow":  gputest.Err(keep.Append(nil, make([]byte, 8*kib64))),
		"AppendHost":       gputest.Err(keep.AppendHost(w.s, host.All())),
		"Resize":           keep.Resize(w.s, 1000),
		"Slice.CopyTo":     w.slice.CopyTo(w.s, make([]byte, 100)),
		"Slice.CopyFrom":   w.slice.CopyFrom(nil, make([]byte, 100)),
		"Slice.Zero":       w.slice.Zero(w.s),
		"Slice.CopyToHost": w.slice.CopyToHost(w.s, host.All()),
	} {
		require.ErrorIs(t, err, cuda.ErrDeviceLost, what)
	}
	require.NoError(t, keep.Clip(), "nothing runs any more")
	require.NoError(t, keep.CloseAfter(w.s), "the streams pass")
	require.NoError(t, w.drain())
	for i := len(w.owned) - 1; i >= 0; i-- {
		require.NoError(t, w.owned[i].Close())
	}
	require.Empty(t, w.sys.Live())
	require.NoError(t, w.sys.Close())
	_ = w.m.Close()
}

func TestWhatAnUndoLeftIsOutOfUseUntilClipOrClose(t *testing.T) {
	for _, moves := range []bool{false, true} {
		t.Run(fmt.Sprintf("moves: %v", moves), func(t *testing.T) { anUndoLeftSomething(t, moves) })
	}
}

func anUndoLeftSomething(t *testing.T, moves bool) {
	w := newWorld(t, false)
	b := w.buffer(2)
	free, _ := w.m.Memory(0)
	w.m.Inject(sim.Fault{Call: "cuMemSetAccess", Result: code, Parts: 2})
	w.m.Inject(sim.Fault{Call: "cuMemUnmap", Result: code, Parts: 2})
	_, err := b.AppendUndefined(3 * kib64)
	require.ErrorContains(t, err, "cuMemSetAccess returned")
	require.ErrorContains(t, err, fmt.Sprintf("undoing it failed: cuMemUnmap returned CUDA_ERROR_UNKNOWN (999), so 192 KiB at %#x are out of use", uint64(b.Ptr())+2*kib64))
	st := b.Stats()
	require.Equal(t, []int{2 * kib64, 2, 3 * kib64, 1}, []int{st.Committed, st.Chunks, st.Clipped, st.Grown})
	require.Equal(t, 5, w.sys.Stats().Allocations, "it is accounted for")

	calls := w.m.Count("cuMemMap")
	_, err = b.AppendUndefined(2 * kib64)
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "could not be unmapped after an earlier failure")
	require.Equal(t, calls, w.m.Count("cuMemMap"), "its addresses are not used")
	require.NoError(t, gputest.Err(b.Append(nil, pattern(100, 1))), "the rest is as it was")
	if moves {
		moved, err := b.Move(vmm.MoveOptions{Reserve: 32 * kib64})
		require.NoError(t, err)
		w.own(moved)
		require.NoError(t, gputest.Err(moved.AppendUndefined(3*kib64)))
		w.m.Inject(sim.Fault{Call: "cuMemUnmap", Result: code, After: 1})
		require.ErrorContains(t, b.Close(), "cuMemUnmap returned")
		require.Equal(t, 3*kib64, b.Stats().Clipped)
		require.NoError(t, b.Close())
		require.Zero(t, b.Stats().Clipped)
		b = moved
	} else {
		w.m.Inject(sim.Fault{Call: "cuMemUnmap", Result: code})
		require.ErrorContains(t, b.Clip(), "cuMemUnmap returned")
		require.Equal(t, 3*kib64, b.Stats().Clipped)
		require.NoError(t, b.Clip())
		require.Zero(t, b.Stats().Clipped)
		require.NoError(t, gputest.Err(b.AppendUndefined(2*kib64)))
	}
	require.NoError(t, b.Resize(nil, 2*kib64))
	require.NoError(t, b.Clip())
	now, _ := w.m.Memory(0)
	require.Equal(t, free, now)
	w.end()
}

func TestAFailedClipTakesChunksOutOfUse(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(6)
	require.NoError(t, b.Resize(nil, kib64))
	w.m.Inject(sim.Fault{Call: "cuMemUnmap", Result: code, Parts: 3})
	require.ErrorContains(t, b.Clip(), "cuMemUnmap returned")
	st := b.Stats()
	require.Equal(t, []int{kib64, 1, 5 * kib64}, []int{st.Committed, st.Chunks, st.Clipped})
	// Two of them are unmapped by now: using them would lose the device.
	require.ErrorIs(t, gputest.Err(b.Append(nil, pattern(2*kib64, 1))), cuda.ErrInUse)
	require.NoError(t, b.SetAccess(both(w, vmm.ReadWrite)...), "what is in use can be granted")
	w.m.Inject(sim.Fault{Call: "cuMemRelease", Result: code, After: 2})
	require.ErrorContains(t, b.Clip(), "cuMemRelease returned")
	require.NoError(t, b.Clip())
	require.NoError(t, gputest.Err(b.Append(nil, pattern(2*kib64, 1))))
	w.end()
}

func TestAccessThatIsNotKnownIsRefusedAndWaitedFor(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(3)
	// The first two chunks are granted to the peer, and cannot be taken back.
	w.m.Inject(sim.Fault{Call: "cuMemSetAccess", Result: code, Parts: 3})
	w.m.Inject(sim.Fault{Call: "cuMemSetAccess", Result: code, Times: 3})
	grant := vmm.Access{Location: w.peer.Location(), Mode: vmm.ReadWrite}
	err := b.SetAccess(grant)
	require.ErrorContains(t, err, "undoing it failed: cuMemSetAccess returned")
	require.ErrorContains(t, err, "the access to 192 KiB of it is not known")
	require.ErrorIs(t, gputest.Err(b.Append(w.far, []byte{1})), cuda.ErrNotPermitted, "the library does not count on it")

	// GPU work may have been using it nevertheless, so closing waits for that.
	w.m.Hold(w.far.Handle())
	require.NoError(t, w.far.Memset(b.Ptr(), 1, 1))
	closing := make(chan error)
	go func() { closing <- b.Close() }()
	select {
	case err := <-closing:
		t.Fatalf("closed while a device that may have access works: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	w.m.Release(w.far.Handle())
	require.NoError(t, <-closing)

	b = w.buffer(3)
	w.m.Inject(sim.Fault{Call: "cuMemSetAccess", Result: code, Parts: 2})
	w.m.Inject(sim.Fault{Call: "cuMemSetAccess", Result: code, Times: 3})
	require.Error(t, b.SetAccess(grant))
	require.NoError(t, b.SetAccess(grant), "a change that succeeds settles it")
	require.NoError(t, gputest.Err(b.Append(w.far, []byte{1})))
	require.NoError(t, w.far.Synchronize())
	w.end()
}

func TestHostMemoryOfUnknownAccessIsNotShown(t *testing.T) {
	w := newWorld(t, false)
	require.NoError(t, w.create(2*mib, vmm.Properties{Location: cuda.OnHostNUMA(0)}))
	r, err := vmm.Reserve(w.d, 2*mib, vmm.ReserveOptions{Align: 2 * mib})
	require.NoError(t, err)
	w.own(r)
	m, err := r.Map(0, w.a)
	require.NoError(t, err)
	w.own(m)
	grant := vmm.Access{Location: cuda.OnHostNUMA(0), Mode: vmm.ReadWrite}
	w.m.Inject(sim.Fault{Call: "cuMemSetAccess", Result: code, Times: 2})
	require.ErrorContains(t, m.SetAccess(grant), "undoing it failed")
	require.ErrorIs(t, m.Host(func([]byte) error { return nil }), cuda.ErrNotPermitted)
	require.NoError(t, m.SetAccess(grant))
	require.NoError(t, m.Host(func(data []byte) error { data[0] = 1; return nil }))
	w.end()
}
