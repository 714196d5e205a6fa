package sim_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// managedWorld is a machine's driver with a context and a stream on each device.
type managedWorld struct {
	t       require.TestingT
	m       *sim.Machine
	d       driver.Driver
	ctx     []driver.Context
	streams []driver.Stream
}

func newManagedWorld(t require.TestingT, o sim.Options) *managedWorld {
	m, err := sim.New(o)
	require.NoError(t, err)
	w := &managedWorld{t: t, m: m, d: driver.Of(m)}
	w.ok(w.d.Init())
	for i := range max(1, len(o.Devices)) {
		c, r := w.d.DevicePrimaryCtxRetain(driver.Device(i))
		w.ok(r)
		s, r := w.d.StreamCreate(c, driver.StreamNonBlocking)
		w.ok(r)
		w.ctx, w.streams = append(w.ctx, c), append(w.streams, s)
	}
	return w
}

func (w *managedWorld) ok(r driver.Result) { require.Equal(w.t, driver.Success, r) }

func (w *managedWorld) close() {
	for i := range w.ctx {
		w.ok(w.d.StreamDestroy(w.ctx[i], w.streams[i]))
		w.ok(w.d.DevicePrimaryCtxRelease(driver.Device(i)))
	}
	require.NoError(w.t, w.m.Close())
}

func (w *managedWorld) alloc(n uint64) driver.Ptr {
	p, r := w.d.MemAllocManaged(w.ctx[0], n, driver.AttachGlobal)
	w.ok(r)
	return p
}

func (w *managedWorld) memset(device int, p driver.Ptr, n uint64) {
	w.ok(w.d.MemsetD8Async(w.ctx[device], p, 1, n, w.streams[device]))
	w.ok(w.d.StreamSynchronize(w.ctx[device], w.streams[device]))
}

// read has a device read the range, by a copy to pinned memory.
func (w *managedWorld) read(device int, p driver.Ptr, n uint64) {
	h, r := w.d.MemHostAlloc(w.ctx[device], n, driver.HostAllocPortable)
	w.ok(r)
	w.ok(w.d.MemcpyDtoHAsync(w.ctx[device], h, p, n, w.streams[device]))
	w.ok(w.d.StreamSynchronize(w.ctx[device], w.streams[device]))
	w.ok(w.d.MemFreeHost(w.ctx[device], h))
}

func (w *managedWorld) at(p driver.Ptr, n int) (at []int) {
	for i := range w.ctx {
		at = append(at, w.m.Resident(cuda.Ptr(p), n, i))
	}
	return append(at, w.m.Resident(cuda.Ptr(p), n, -1))
}

const unit = 64 << 10 // a multiple of any system's page

func onDevice(i int) driver.Location {
	return driver.Location{Type: driver.LocationDevice, ID: int32(i)}
}

var onHost = driver.Location{Type: driver.LocationHost}

// A processor that touches a page gets it, unless advice lets it stay where it is.
func TestPagesGoToWhoTouchesThem(t *testing.T) {
	for name, row := range map[string]struct {
		advise func(w *managedWorld, p driver.Ptr)
		touch  func(w *managedWorld, p driver.Ptr)
		want   []int // device 0, device 1, host
	}{
		"a write of the first device": {nil, func(w *managedWorld, p driver.Ptr) { w.memset(0, p, unit) }, []int{unit, 0, 0}},
		"then of the second":          {nil, func(w *managedWorld, p driver.Ptr) { w.memset(0, p, unit); w.memset(1, p, unit) }, []int{0, unit, 0}},
		"then of the CPU": {nil, func(w *managedWorld, p driver.Ptr) {
			w.memset(0, p, unit)
			w.ok(w.d.(driver.HostTouched).HostTouch(p, unit, true))
		}, []int{0, 0, unit}},
		"a first touch, another place preferred": {func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetPreferredLocation, onDevice(1)))
		}, func(w *managedWorld, p driver.Ptr) { w.memset(0, p, unit) }, []int{0, unit, 0}},
		"a first touch of the CPU, a device preferred": {func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetPreferredLocation, onDevice(1)))
		}, func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.(driver.HostTouched).HostTouch(p, unit, true)) // which the CPU cannot reach there
		}, []int{0, 0, unit}},
		"the host preferred": {func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetPreferredLocation, onHost))
		}, func(w *managedWorld, p driver.Ptr) { w.memset(0, p, unit); w.memset(1, p, unit) }, []int{0, 0, unit}},
		"accessed by the second device": {func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetAccessedBy, onDevice(1)))
		}, func(w *managedWorld, p driver.Ptr) { w.memset(0, p, unit); w.memset(1, p, unit) }, []int{unit, 0, 0}},
		"accessed by the CPU, which has no way to a device": {func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetAccessedBy, onHost))
		}, func(w *managedWorld, p driver.Ptr) {
			w.memset(0, p, unit)
			w.ok(w.d.(driver.HostTouched).HostTouch(p, unit, false))
		}, []int{0, 0, unit}},
		"read by all, read mostly": {func(w *managedWorld, p driver.Ptr) {
			w.memset(0, p, unit)
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetReadMostly, onHost))
		}, func(w *managedWorld, p driver.Ptr) {
			w.read(1, p, unit)
			w.ok(w.d.(driver.HostTouched).HostTouch(p, unit, false))
		}, []int{unit, unit, unit}},
		"then written": {func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetReadMostly, onHost))
		}, func(w *managedWorld, p driver.Ptr) { w.memset(0, p, unit); w.read(1, p, unit); w.memset(1, p, unit) }, []int{0, unit, 0}},
		"read mostly no more": {func(w *managedWorld, p driver.Ptr) {
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseSetReadMostly, onHost))
		}, func(w *managedWorld, p driver.Ptr) {
			w.memset(0, p, unit)
			w.read(1, p, unit)
			w.ok(w.d.MemAdvise(w.ctx[0], p, unit, driver.AdviseUnsetReadMostly, onHost))
		}, []int{unit, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newManagedWorld(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
			defer w.close()
			p := w.alloc(unit)
			if row.advise != nil {
				row.advise(w, p)
			}
			row.touch(w, p)
			require.Equal(t, row.want, w.at(p, unit))
			w.ok(w.d.MemFree(w.ctx[0], p))
			for i := range 2 {
				free, total := w.m.Memory(i)
				require.Equal(t, total, free, "device %d has all back", i)
			}
		})
	}
}

// However pages are touched, advised, prefetched and paged out, the account is
// right: what lies on a device is what the device lacks, and no more than it
// has.
func TestTheAccountOfPages(t *testing.T) {
	const room, pages, count = 8 * unit, 12, 2
	rapid.Check(t, func(t *rapid.T) {
		w := newManagedWorld(t, sim.Options{HostMemory: 64 * unit, Devices: []sim.DeviceOptions{{Memory: room}, {Memory: room}}})
		defer w.close()
		ranges := []driver.Ptr{w.alloc(pages * unit), w.alloc(pages * unit)}
		defer func() {
			for _, p := range ranges {
				w.ok(w.d.MemFree(w.ctx[0], p))
			}
			for i := range count {
				free, _ := w.m.Memory(i)
				require.Equal(t, room, free)
			}
		}()
		some := func(t *rapid.T) (driver.Ptr, uint64) {
			lo := rapid.IntRange(0, pages-1).Draw(t, "first")
			n := rapid.IntRange(1, pages-lo).Draw(t, "pages")
			return rapid.SampledFrom(ranges).Draw(t, "range") + driver.Ptr(lo*unit), uint64(n * unit)
		}
		device := func(t *rapid.T) int { return rapid.IntRange(0, count-1).Draw(t, "device") }
		place := func(t *rapid.T) driver.Location {
			return rapid.SampledFrom([]driver.Location{onHost, onDevice(0), onDevice(1)}).Draw(t, "place")
		}
		t.Repeat(map[string]func(*rapid.T){
			"write": func(t *rapid.T) { p, n := some(t); w.memset(device(t), p, n) },
			"read":  func(t *rapid.T) { p, n := some(t); w.read(device(t), p, min(n, 4*unit)) },
			"host": func(t *rapid.T) {
				p, n := some(t)
				w.ok(w.d.(driver.HostTouched).HostTouch(p, n, rapid.Bool().Draw(t, "write")))
			},
			"advise": func(t *rapid.T) {
				p, n := some(t)
				w.ok(w.d.MemAdvise(w.ctx[0], p, n, driver.Advice(rapid.IntRange(1, 6).Draw(t, "advice")), place(t)))
			},
			"prefetch": func(t *rapid.T) {
				p, n := some(t)
				w.ok(w.d.MemPrefetchAsync(w.ctx[0], p, n, place(t), w.streams[0]))
				w.ok(w.d.StreamSynchronize(w.ctx[0], w.streams[0]))
			},
			"discard": func(t *rapid.T) {
				p, n := some(t)
				w.ok(w.d.Foreign().MemDiscardBatchAsync(w.ctx[0], []driver.Ptr{p}, []uint64{n}, w.streams[0]))
				w.ok(w.d.StreamSynchronize(w.ctx[0], w.streams[0]))
			},
			"": func(t *rapid.T) {
				for i := range count {
					var sum int
					for _, p := range ranges {
						sum += w.m.Resident(cuda.Ptr(p), pages*unit, i)
					}
					free, total := w.m.Memory(i)
					require.Equal(t, int(total-free), sum, "device %d", i)
					require.LessOrEqual(t, sum, room)
				}
			},
		})
	})
}

// Work touches what it touches, and no more.
func TestWorkBringsPages(t *testing.T) {
	w := newManagedWorld(t, sim.Options{})
	defer w.close()
	p := w.alloc(4 * unit)
	w.memset(0, p+unit, unit)
	require.Equal(t, []int{unit, 0}, w.at(p, 4*unit))
	b, err := w.m.Bytes(cuda.Ptr(p)+unit, 10)
	require.NoError(t, err)
	require.Equal(t, byte(1), b[0])
	w.ok(w.d.MemFree(w.ctx[0], p))
}

// Plain allocations find room where managed pages lie.
func TestPlainMemoryPagesOut(t *testing.T) {
	const room = 16 * 2 << 20
	w := newManagedWorld(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: room}}})
	defer w.close()
	p := w.alloc(room)
	w.memset(0, p, room)
	require.Equal(t, []int{room, 0}, w.at(p, room))
	q, r := w.d.MemAlloc(w.ctx[0], room/2)
	w.ok(r)
	require.Equal(t, []int{room / 2, room / 2}, w.at(p, room))
	_, r = w.d.MemAlloc(w.ctx[0], room)
	require.Equal(t, driver.OutOfMemory, r)
	w.ok(w.d.MemFree(w.ctx[0], q))
	w.ok(w.d.MemFree(w.ctx[0], p))
}

// Where the host is full nothing is paged out to it, and work that would need
// it ends; copies of what lies on the host already make room all the same.
func TestPagingOutToAFullHost(t *testing.T) {
	const room = 8 * unit
	w := newManagedWorld(t, sim.Options{HostMemory: room, Devices: []sim.DeviceOptions{{Memory: room}}})
	defer w.close()
	prefetch := func(p driver.Ptr, n uint64, to driver.Location) {
		w.ok(w.d.MemPrefetchAsync(w.ctx[0], p, n, to, w.streams[0]))
		w.ok(w.d.StreamSynchronize(w.ctx[0], w.streams[0]))
	}
	p, q := w.alloc(room), w.alloc(2*unit)
	for off := driver.Ptr(0); off < room; off += 2 * unit { // so that its pages are in several runs
		w.ok(w.d.MemAdvise(w.ctx[0], p+off, unit, driver.AdviseSetAccessedBy, onHost))
	}
	prefetch(p, room, onDevice(0))
	h, r := w.d.MemHostAlloc(w.ctx[0], room, driver.HostAllocPortable)
	w.ok(r)
	prefetch(q, 2*unit, onDevice(0))
	require.Equal(t, []int{room, 0}, w.at(p, room))
	require.Equal(t, []int{0, 0}, w.at(q, 2*unit))
	require.Contains(t, w.m.Log()[0], "ended before its end: no room")
	w.ok(w.d.MemFreeHost(w.ctx[0], h))

	prefetch(p+room/2, room/2, onHost)
	w.ok(w.d.MemAdvise(w.ctx[0], p+room/2, room/2, driver.AdviseSetReadMostly, onHost))
	prefetch(p+room/2, room/2, onDevice(0))
	require.Equal(t, []int{room, room / 2}, w.at(p, room))
	h, r = w.d.MemHostAlloc(w.ctx[0], room/2, driver.HostAllocPortable)
	w.ok(r)
	prefetch(q, 2*unit, onDevice(0))
	require.Equal(t, []int{room - 2*unit, room / 2}, w.at(p, room))
	require.Equal(t, []int{2 * unit, 0}, w.at(q, 2*unit))
	w.ok(w.d.MemFreeHost(w.ctx[0], h))
	w.ok(w.d.MemFree(w.ctx[0], p))
	w.ok(w.d.MemFree(w.ctx[0], q))
}

// What was discarded reads as poison.
func TestDiscardedMemoryReadsAsPoison(t *testing.T) {
	w := newManagedWorld(t, sim.Options{})
	defer w.close()
	p := w.alloc(2 * unit)
	w.memset(0, p, 2*unit)
	w.ok(w.d.Foreign().MemDiscardBatchAsync(w.ctx[0], []driver.Ptr{p}, []uint64{unit}, w.streams[0]))
	w.ok(w.d.StreamSynchronize(w.ctx[0], w.streams[0]))
	b, err := w.m.Bytes(cuda.Ptr(p), 2*unit)
	require.NoError(t, err)
	require.Equal(t, byte(sim.PoisonByte), b[unit-1])
	require.Equal(t, byte(1), b[unit])
	w.ok(w.d.MemFree(w.ctx[0], p))
}

// Work that comes to memory which was freed meanwhile loses the context.
func TestPrefetchOfFreedMemory(t *testing.T) {
	w := newManagedWorld(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	p := w.alloc(unit)
	release := w.m.Hold(uintptr(w.streams[1]))
	w.ok(w.d.MemPrefetchAsync(w.ctx[1], p, unit, onDevice(1), w.streams[1]))
	w.ok(w.d.MemFree(w.ctx[0], p)) // waits for its own context alone
	release()
	require.Equal(t, driver.IllegalAddress, w.d.StreamSynchronize(w.ctx[1], w.streams[1]))
	require.Contains(t, w.m.Fault(), "cuMemPrefetchAsync")
	_ = w.m.Close()
}

func TestManagedMemoryIsReportedWhenLeaked(t *testing.T) {
	w := newManagedWorld(t, sim.Options{})
	w.alloc(unit)
	require.Equal(t, 1, w.m.Live()[sim.KindManagedMemory])
	w.ok(w.d.DevicePrimaryCtxRelease(0))
	require.ErrorContains(t, w.m.Close(), "managed memory")
}

// Without concurrent managed access, memory that is attached to one stream is
// that stream's alone, until the stream goes.
func TestMemoryAttachedToAStreamIsForThatOne(t *testing.T) {
	open := func(t *testing.T) (*managedWorld, driver.Ptr, driver.Stream) {
		w := newManagedWorld(t, sim.WithoutConcurrentManagedAccess())
		other, r := w.d.StreamCreate(w.ctx[0], driver.StreamNonBlocking)
		w.ok(r)
		p := w.alloc(unit)
		w.ok(w.d.StreamAttachMemAsync(w.ctx[0], w.streams[0], p, 0, driver.AttachSingle))
		w.memset(0, p, unit)
		return w, p, other
	}
	t.Run("another stream's work", func(t *testing.T) {
		w, p, other := open(t)
		w.ok(w.d.MemsetD8Async(w.ctx[0], p, 2, unit, other))
		require.Equal(t, driver.IllegalAddress, w.d.StreamSynchronize(w.ctx[0], other))
		require.Contains(t, w.m.Fault(), "attached to stream")
		require.Error(t, w.m.Close(), "the rest of the world is left")
	})
	t.Run("once the stream is gone", func(t *testing.T) {
		w, p, other := open(t)
		w.ok(w.d.StreamDestroy(w.ctx[0], w.streams[0]))
		w.streams[0] = other
		w.memset(0, p, unit)
		w.ok(w.d.MemFree(w.ctx[0], p))
		w.close()
	})
	t.Run("a graph that is launched on it", func(t *testing.T) {
		w, p, other := open(t)
		c, s := w.ctx[0], w.streams[0]
		w.ok(w.d.StreamBeginCapture(c, other, driver.CaptureRelaxed))
		w.ok(w.d.MemsetD8Async(c, p, 3, unit, other))
		g, r := w.d.StreamEndCapture(c, other)
		w.ok(r)
		e, r := w.d.GraphInstantiate(c, g)
		w.ok(r)
		w.ok(w.d.GraphLaunch(c, e, s))
		w.ok(w.d.StreamSynchronize(c, s))
		w.ok(w.d.GraphExecDestroy(e))
		w.ok(w.d.GraphDestroy(g))
		w.ok(w.d.StreamDestroy(c, other))
		w.ok(w.d.MemFree(c, p))
		w.close()
	})
}

// A plain discard behind work is done when it likes: nothing waits for it, and it
// harms no memory that took the place of what it was for.
func TestPlainDiscardsBehindWorkAreLate(t *testing.T) {
	w := newManagedWorld(t, sim.Options{ReuseAddresses: true})
	defer w.close()
	c, s := w.ctx[0], w.streams[0]
	p := w.alloc(unit)
	release := w.m.Hold(uintptr(s))
	w.ok(w.d.MemsetD8Async(c, p, 1, unit, s))
	w.ok(w.d.Foreign().MemDiscardBatchAsync(c, []driver.Ptr{p}, []uint64{unit}, s))
	w.ok(w.d.MemsetD8Async(c, p, 2, unit, s))
	release()
	w.ok(w.d.StreamSynchronize(c, s))
	require.Eventually(t, func() bool {
		b, err := w.m.Bytes(cuda.Ptr(p), unit)
		require.NoError(t, err)
		return b[0] == sim.PoisonByte
	}, time.Minute, time.Millisecond)

	// Freed before the discard came to be done.
	defer w.m.Hold(uintptr(s))()
	w.ok(w.d.MemsetD8Async(c, p, 1, unit, s))
	w.ok(w.d.Foreign().MemDiscardBatchAsync(c, []driver.Ptr{p}, []uint64{unit}, s))
	w.m.Release(uintptr(s))
	w.ok(w.d.MemFree(c, p))
	q := w.alloc(unit)
	require.Equal(t, p, q)
	w.memset(0, q, unit)
	time.Sleep(5 * time.Millisecond)
	b, err := w.m.Bytes(cuda.Ptr(q), unit)
	require.NoError(t, err)
	require.Equal(t, byte(1), b[0])
	w.ok(w.d.MemFree(c, q))
}
