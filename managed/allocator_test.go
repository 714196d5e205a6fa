package managed_test

import (
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

func allocator(t testing.TB, d *cuda.Device, o ...managed.Options) *managed.Allocator {
	t.Helper()
	a, err := managed.NewAllocator(d, append(o, managed.Options{})[0])
	require.NoError(t, err)
	closed(t, a)
	return a
}

// Closing an allocator ends its memory; its buffers say so and crash nothing.
func TestAnAllocatorBoundsItsBuffers(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		a, err := managed.NewAllocator(d, managed.Options{Placement: managed.GPUFirst, Stream: s})
		require.NoError(t, err)
		require.Equal(t, d, a.Device())
		b, err := a.New(nil, mib)
		require.NoError(t, err)
		c, err := b.Clone()
		require.NoError(t, err)
		gone, err := a.New(s, 2*mib)
		require.NoError(t, err)
		later, err := a.New(s, 4*mib)
		require.NoError(t, err)
		require.NoError(t, s.Memset(b.Ptr(), 1, mib))
		require.Equal(t, managed.Stats{Live: 3, Bytes: 7 * mib, PeakBytes: 7 * mib, Made: 3}, a.Stats())

		require.NoError(t, gone.Close())
		require.Equal(t, managed.Stats{Live: 2, Bytes: 5 * mib, PeakBytes: 7 * mib, Made: 3, Freed: 1}, a.Stats())
		require.NoError(t, later.CloseAfter(s))
		require.NoError(t, a.Close())
		require.NoError(t, a.Close(), "idempotent")
		require.NoError(t, d.System().Drain(t.Context()))
		require.Equal(t, managed.Stats{PeakBytes: 7 * mib, Made: 3, Freed: 3}, a.Stats())
		for _, each := range []*managed.Buffer{b, c, gone, later} {
			requireClosed(t, each, s)
		}
		err = b.Prefetch(s, cuda.OnHost())
		require.ErrorContains(t, err, "allocator is closed")
		require.NoError(t, b.Close())
		require.NoError(t, c.CloseAfter(s))
		require.NoError(t, d.System().Drain(t.Context()))
		_, err = a.New(s, mib)
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.Zero(t, d.System().Stats().Managed)
		require.Zero(t, d.System().Stats().Lost)
	})
}

func TestAllocatorsAreChecked(t *testing.T) {
	_, d := open(t)
	_, err := managed.NewAllocator(nil, managed.Options{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = managed.NewAllocator(d, managed.Options{Stream: stream(t, another(t, d))})
	require.ErrorIs(t, err, cuda.ErrForeign)
	a := allocator(t, d)
	for _, n := range []int{0, -1, 1 << 60} {
		_, err = a.New(nil, n)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	require.Zero(t, a.Stats())
}

// A buffer that the program does not keep is its allocator's, and lost with it
// alone; one that is kept keeps it.
func TestWhatAnAllocatorMadeIsNotLost(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	collect := func() {
		for range 5 { // a loss is noticed some collections later
			var seen atomic.Bool
			runtime.AddCleanup(new(*int), func(seen *atomic.Bool) { seen.Store(true) }, &seen)
			require.Eventually(t, func() bool { runtime.GC(); return seen.Load() }, time.Minute, time.Millisecond)
		}
	}
	make2 := func(a *managed.Allocator) *managed.Buffer {
		b, err := a.New(nil, mib)
		require.NoError(t, err)
		c, err := b.Clone()
		require.NoError(t, err)
		_, err = a.New(nil, mib)
		require.NoError(t, err)
		return c
	}
	a, err := managed.NewAllocator(d, managed.Options{})
	require.NoError(t, err)
	make2(a)
	kept := func() *managed.Buffer {
		b, err := managed.NewAllocator(d, managed.Options{})
		require.NoError(t, err)
		return make2(b)
	}()
	collect()
	require.Zero(t, sys.Stats().Lost)
	require.NoError(t, kept.Prefetch(nil, cuda.OnHost()))
	require.NoError(t, a.Close())
	require.Equal(t, 2, sys.Stats().Managed)

	runtime.KeepAlive(kept) // and not alive from here on
	require.Eventually(t, func() bool { runtime.GC(); return sys.Stats().Lost == 2 }, time.Minute, time.Millisecond)
	require.ErrorIs(t, sys.Close(), cuda.ErrInUse)
	require.ErrorContains(t, m.Close(), "managed memory")
}

// What the driver does not take back stays, and Close can be called again.
func TestAnAllocatorThatCannotFreeAll(t *testing.T) {
	m, d := open(t)
	a, err := managed.NewAllocator(d, managed.Options{})
	require.NoError(t, err)
	var all []*managed.Buffer
	for range 3 {
		b, err := a.New(nil, mib)
		require.NoError(t, err)
		all = append(all, b)
	}
	// The first free is that of the block which waits for the context's work.
	remove := m.Inject(sim.Fault{Call: "cuMemFree", After: 2, Result: 999})
	require.ErrorContains(t, a.Close(), "cuMemFree")
	remove()
	require.Equal(t, 1, a.Stats().Live, "the others went")
	for _, b := range all {
		require.False(t, b.Valid())
	}
	require.NoError(t, a.Close())
	require.Zero(t, a.Stats().Live)
	require.Zero(t, m.Live()[sim.KindManagedMemory])
}

func TestPlacements(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		first := buffer(t, d, 2*mib, managed.Options{Placement: managed.GPUFirst, Stream: s})
		l, err := first.Preferred()
		require.NoError(t, err)
		require.Equal(t, d.Location(), l)
		l, err = first.LastPrefetch()
		require.NoError(t, err)
		require.Equal(t, d.Location(), l)
		by, err := first.AccessedBy().All()
		require.NoError(t, err)
		require.Equal(t, []cuda.Location{cuda.OnHost()}, by)
		require.NoError(t, s.Synchronize())

		mostly, err := buffer(t, d, mib, managed.Options{Placement: managed.ReadMostly}).ReadMostly()
		require.NoError(t, err)
		require.True(t, mostly)

		boom := errors.New("boom")
		_, err = managed.New(d, mib, managed.Options{Stream: s, Placement: func(on *cuda.Stream, r managed.Range) error {
			require.Equal(t, s, on)
			require.Equal(t, mib, r.Len())
			return boom
		}})
		require.ErrorIs(t, err, boom)
		require.Panics(t, func() {
			_, _ = managed.New(d, mib, managed.Options{Placement: func(*cuda.Stream, managed.Range) error { panic("in the middle") }})
		})
		require.Equal(t, 2, d.System().Stats().Managed)
	})
}

// A failed prefetch is a warning; a failed advice is an error.
func TestAFailedPrefetchIsAWarning(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	var log strings.Builder
	sys, err := m.OpenOwned(cuda.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	d := sys.Devices()[0]
	remove := m.Inject(sim.Fault{Call: "cuMemPrefetchAsync", Result: 2})
	b, err := managed.New(d, mib, managed.Options{Placement: managed.GPUFirst})
	remove()
	require.NoError(t, err)
	require.Contains(t, log.String(), "level=WARN")
	require.Contains(t, log.String(), "cuMemPrefetchAsync returned CUDA_ERROR_OUT_OF_MEMORY")
	l, err := b.Preferred()
	require.NoError(t, err)
	require.Equal(t, cuda.OnDevice(0), l, "the advice is there")
	require.NoError(t, b.Close())
	require.NoError(t, sys.Close())
}

// A prefetch may fail, but not for a stream that is wrong.
func TestGPUFirstOnAStreamOfAnotherSystem(t *testing.T) {
	m, d := open(t)
	_, other := open(t)
	b := buffer(t, d, mib)
	require.ErrorIs(t, managed.GPUFirst(stream(t, other), b.Range), cuda.ErrForeign)
	require.Zero(t, m.Count("cuMemAdvise"))
}

// A device that takes neither advice nor prefetches has the memory anyway.
func TestGPUFirstWithoutConcurrentAccess(t *testing.T) {
	m, d := open(t, sim.WithoutConcurrentManagedAccess())
	b := buffer(t, d, mib, managed.Options{Placement: managed.GPUFirst})
	require.Equal(t, []int{mib, 0}, resident(m, b.Range, 1))
	require.Zero(t, m.Count("cuMemAdvise"))
}

// On memory that has advice already, a placement that fails leaves it.
func TestAFailedPlacementLeavesAdvice(t *testing.T) {
	m, d := open(t)
	b, s := buffer(t, d, mib), stream(t, d)
	require.NoError(t, b.SetPreferred(cuda.OnHost()))
	for after := range 2 {
		remove := m.Inject(sim.Fault{Call: "cuMemAdvise", After: after, Result: 999})
		require.Error(t, managed.GPUFirst(s, b.Range))
		remove()
		l, err := b.Preferred()
		require.NoError(t, err)
		require.Equal(t, cuda.OnHost(), l)
		by, err := b.AccessedBy().All()
		require.NoError(t, err)
		require.Empty(t, by)
	}
	require.NoError(t, managed.GPUFirst(s, b.Range))
	require.NoError(t, s.Synchronize())
}

func TestArraysOfAllTypes(t *testing.T) {
	_, d := open(t)
	a, s := allocator(t, d), stream(t, d)
	arrayOf[bool](t, a, s, true)
	arrayOf[int8](t, a, s, -5)
	arrayOf[uint16](t, a, s, 60000)
	arrayOf[int32](t, a, s, -1<<31)
	arrayOf[uint64](t, a, s, 1<<63)
	arrayOf[float32](t, a, s, 1.5)
	arrayOf[float64](t, a, s, -2.25)
	arrayOf[complex64](t, a, s, 1+2i)
	arrayOf[complex128](t, a, s, 3-4i)
	arrayOf(t, a, s, [3]uint8{1, 2, 3})
	arrayOf(t, a, s, struct {
		A uint8
		B [2]float64
	}{7, [2]float64{1, 2}})

	_, err := managed.NewArray[*int](s, a, 1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = managed.NewArray[struct{}](s, a, 1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = managed.NewArray[string](s, a, 1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	for _, n := range []int{0, -1, 1 << 62} {
		_, err = managed.NewArray[uint64](s, a, n)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err = managed.NewArray[int8](s, nil, 1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = managed.ArrayOf[int64](nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = managed.ArrayOf[int64](buffer(t, d, 100))
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

func arrayOf[T comparable](t *testing.T, a *managed.Allocator, s *cuda.Stream, v T) {
	t.Helper()
	const n = 1000
	arr, err := managed.NewArray[T](s, a, n)
	require.NoError(t, err)
	require.Equal(t, n, arr.Len())
	require.Equal(t, n*int(unsafe.Sizeof(v)), arr.Buffer().Len())
	require.Equal(t, arr.Buffer().Ptr(), arr.Ptr())
	require.NoError(t, arr.Host(s, func(data []T) error {
		require.Len(t, data, n)
		data[n-1] = v
		return nil
	}))
	last, err := arr.Slice(n-1, n)
	require.NoError(t, err)
	got := make([]byte, last.Len())
	require.NoError(t, s.Download(got, last.Ptr()))
	landed := *(*T)(unsafe.Pointer(&got[0]))
	require.Equal(t, v, landed)
	for _, at := range [][2]int{{-1, 1}, {1, 1}, {2, 1}, {0, n + 1}} {
		_, err = arr.Slice(at[0], at[1])
		require.ErrorIs(t, err, cuda.ErrOutOfRange)
	}
	require.ErrorIs(t, arr.Host(s, nil), cuda.ErrInvalidArgument)
	again, err := managed.ArrayOf[T](arr.Buffer())
	require.NoError(t, err)
	require.NoError(t, again.Close())
	require.ErrorIs(t, arr.Host(s, func([]T) error { return nil }), cuda.ErrClosed)
	require.NoError(t, arr.CloseAfter(s))
}

// Allocators, buffers and the end of it all from many goroutines.
func TestACrowdOnAnAllocator(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	for range 20 {
		a, err := managed.NewAllocator(d, managed.Options{})
		require.NoError(t, err)
		var all sync.WaitGroup
		for i := range 6 {
			all.Go(func() {
				for range 10 {
					b, err := a.New(s, 4096)
					if err != nil {
						if !errors.Is(err, cuda.ErrClosed) {
							t.Errorf("New: %v", err)
						}
						return
					}
					if err := b.Host(s, func(data []byte) error { data[0]++; return nil }); err != nil && !errors.Is(err, cuda.ErrClosed) {
						t.Errorf("Host: %v", err)
					}
					switch i % 3 {
					case 0:
						err = b.Close()
					case 1:
						err = b.CloseAfter(s)
					}
					if err != nil {
						t.Errorf("closing: %v", err)
					}
				}
			})
		}
		all.Go(func() {
			err := a.Close()
			for errors.Is(err, cuda.ErrInUse) { // a function looks
				err = a.Close()
			}
			if err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		all.Wait()
		require.NoError(t, d.System().Drain(t.Context()))
		st := a.Stats()
		require.Zero(t, st.Live)
		require.Zero(t, st.Bytes)
		require.Equal(t, st.Made, st.Freed)
		require.Zero(t, m.Live()[sim.KindManagedMemory])
	}
}
