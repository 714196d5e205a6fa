package managed_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// resident is how many bytes lie on each device, the host last.
func resident(m *sim.Machine, r managed.Range, devices int) (at []int) {
	for i := range devices {
		at = append(at, m.Resident(r.Ptr(), r.Len(), i))
	}
	return append(at, m.Resident(r.Ptr(), r.Len(), -1))
}

func TestPrefetchMovesPages(t *testing.T) {
	m, d := open(t, devices(2))
	b, s := buffer(t, d, 4*mib), stream(t, d)
	require.Equal(t, []int{0, 0, 0}, resident(m, b.Range, 2), "untouched memory lies nowhere")
	free := func(i int) int { f, _ := m.Memory(i); return f }
	before := [2]int{free(0), free(1)}

	require.NoError(t, s.Upload(b.Ptr(), pattern(4*mib, 1)))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []int{4 * mib, 0, 0}, resident(m, b.Range, 2), "the first device touched it")
	half, err := b.Slice(0, 2*mib)
	require.NoError(t, err)
	require.NoError(t, half.Prefetch(s, cuda.OnDevice(1)))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []int{2 * mib, 2 * mib, 0}, resident(m, b.Range, 2))
	require.Equal(t, [2]int{before[0] - 2*mib, before[1] - 2*mib}, [2]int{free(0), free(1)})

	require.NoError(t, b.SetReadMostly(true))
	require.NoError(t, b.Prefetch(s, cuda.OnHost()))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []int{2 * mib, 2 * mib, 4 * mib}, resident(m, b.Range, 2), "what is read mostly is copied")
	got := make([]byte, 4*mib)
	require.NoError(t, s.Download(got, b.Ptr()))
	require.Equal(t, pattern(4*mib, 1), got)
	require.NoError(t, s.Memset(b.Ptr(), 9, 4*mib))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []int{4 * mib, 0, 0}, resident(m, b.Range, 2), "a write takes the copies away")

	require.NoError(t, b.SetReadMostly(false))
	require.NoError(t, b.DiscardPrefetch(s, cuda.OnDevice(1)))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []int{0, 4 * mib, 0}, resident(m, b.Range, 2))
	require.NoError(t, b.Discard(s))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []int{4 * mib, 0, 0}, resident(m, b.Range, 2), "to the stream's device")
	require.Equal(t, [2]int{before[0] - 4*mib, before[1]}, [2]int{free(0), free(1)})
}

// Kernels bring the pages that they touch, and no more.
func TestKernelsBringPages(t *testing.T) {
	m, d := open(t)
	b, s := buffer(t, d, 4*mib), stream(t, d)
	module, err := d.LoadModule(kernels.Basic)
	require.NoError(t, err)
	closed(t, module)
	fill, err := module.Kernel(kernels.Fill)
	require.NoError(t, err)
	require.NoError(t, b.Host(s, func(data []byte) error { clear(data); return nil }))
	require.Equal(t, []int{0, 4 * mib}, resident(m, b.Range, 1))
	require.NoError(t, fill.Launch(s, cuda.Threads(1024), b.Ptr()+mib, uint64(mib/4), uint32(7), uint32(0)))
	require.NoError(t, s.Synchronize())
	require.Equal(t, []int{mib, 3 * mib}, resident(m, b.Range, 1))
	require.NoError(t, b.Host(s, func(data []byte) error {
		require.Equal(t, []byte{0, 7, 0, 0}, data[mib-1:][:4])
		return nil
	}))
}

// Without a stream it is done when the call returns.
func TestPrefetchWithoutAStreamWaits(t *testing.T) {
	m, d := open(t)
	b := buffer(t, d, mib)
	require.NoError(t, b.Prefetch(nil, cuda.OnDevice(0)))
	require.Equal(t, []int{mib, 0}, resident(m, b.Range, 1))
	require.NoError(t, managed.PrefetchBatch(nil, []managed.Range{b.Range}, cuda.OnHost()))
	require.Equal(t, []int{0, mib}, resident(m, b.Range, 1))
	require.NoError(t, b.Discard(nil))
	require.Equal(t, []int{mib, 0}, resident(m, b.Range, 1))
}

func TestBatches(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s := stream(t, d)
		all := []managed.Range{buffer(t, d, 2*mib).Range, buffer(t, d, 3*mib).Range, buffer(t, d, mib).Range}
		read := func(want ...cuda.Location) {
			t.Helper()
			for i, r := range all {
				l, err := r.LastPrefetch()
				require.NoError(t, err)
				require.Equal(t, want[min(i, len(want)-1)], l)
			}
		}
		for i, r := range all {
			require.NoError(t, s.Upload(r.Ptr(), pattern(r.Len(), i)))
		}
		require.NoError(t, managed.PrefetchBatch(s, all, d.Location()))
		read(d.Location())
		require.NoError(t, managed.PrefetchBatch(s, all, cuda.OnHost(), cuda.OnHost(), d.Location()))
		read(cuda.OnHost(), cuda.OnHost(), d.Location())
		for i, r := range all {
			got := make([]byte, r.Len())
			require.NoError(t, s.Download(got, r.Ptr()))
			require.Equal(t, pattern(r.Len(), i), got)
		}
		require.NoError(t, managed.DiscardPrefetchBatch(s, all, d.Location(), cuda.OnHost(), d.Location()))
		read(d.Location(), cuda.OnHost(), d.Location())
		require.NoError(t, managed.DiscardBatch(s, all))
		read(d.Location())
		require.NoError(t, s.Synchronize())
	})
}

func TestBatchesAreOneCall(t *testing.T) {
	m, d := open(t)
	b, s := buffer(t, d, 4*mib), stream(t, d)
	var parts []managed.Range
	for i := range 100 {
		r, err := b.Slice(i*16384, i*16384+4096)
		require.NoError(t, err)
		parts = append(parts, r)
	}
	m.ResetCounts()
	require.NoError(t, managed.PrefetchBatch(s, parts, cuda.OnHost()))
	require.Equal(t, 1, m.Count("cuMemPrefetchBatchAsync"))
	require.Zero(t, m.Count("cuMemPrefetchAsync"))
}

// The driver discards whole pages: bytes that share a page with a range are not
// the range's, and stay.
func TestDiscardLeavesWhatIsNotItsOwn(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		page := int(host.PageSize())
		whole, other, s := buffer(t, d, 8*page), buffer(t, d, page), stream(t, d)
		view, err := managed.View(d, whole.Ptr(), 3*page+9, managed.ViewOptions{})
		require.NoError(t, err)
		closed(t, view)
		for name, at := range map[string]struct{ off, n int }{
			"in one page":             {100, 7},
			"across two pages":        {page - 1, 2},
			"a page and parts of two": {page - 1, page + 2},
			"pages to the end":        {5*page + 1, 3*page - 1},
			"pages from the start":    {0, 2*page + 1},
			"whole pages":             {page, 2 * page},
			"a view's":                {0, view.Len()},
		} {
			r, err := whole.Slice(at.off, at.off+at.n)
			require.NoError(t, err)
			if name == "a view's" {
				r = view.Range
			}
			for kind, discard := range map[string]func() error{
				"discard": func() error { return r.Discard(s) },
				"both":    func() error { return r.DiscardPrefetch(s, d.Location()) },
				"batch": func() error {
					return managed.DiscardPrefetchBatch(s, []managed.Range{other.Range, r}, cuda.OnHost(), d.Location())
				},
			} {
				want := pattern(whole.Len(), 5)
				require.NoError(t, s.Upload(whole.Ptr(), want))
				require.NoError(t, whole.Prefetch(s, cuda.OnHost()))
				require.NoError(t, discard(), "%s: %s", name, kind)
				got := make([]byte, whole.Len())
				require.NoError(t, s.Download(got, whole.Ptr()))
				end := at.off + at.n
				require.True(t, bytes.Equal(want[:at.off], got[:at.off]), "%s: %s: what lies before it", name, kind)
				require.True(t, bytes.Equal(want[end:], got[end:]), "%s: %s: what lies behind it", name, kind)
				if kind == "discard" {
					continue
				}
				l, err := r.LastPrefetch()
				require.NoError(t, err)
				require.Equal(t, d.Location(), l, "%s: %s: all of it goes there", name, kind)
			}
		}
	})
}

// A program discards and writes on, without waiting in between: what it writes is
// kept, on whichever stream it does either.
func TestWritesBehindADiscardAreKept(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, s, other, scratch := buffer(t, d, 8*mib), stream(t, d), stream(t, d), buffer(t, d, mib)
		e, err := d.NewEvent(cuda.EventOptions{})
		require.NoError(t, err)
		closed(t, e)
		behind := func(first, then *cuda.Stream) {
			require.NoError(t, e.Record(first))
			require.NoError(t, then.Wait(e))
		}
		for name, discard := range map[string]func() error{
			"Discard":                 func() error { return b.Discard(s) },
			"DiscardBatch":            func() error { return managed.DiscardBatch(s, []managed.Range{scratch.Range, b.Range}) },
			"DiscardPrefetch, device": func() error { return b.DiscardPrefetch(s, d.Location()) },
			"DiscardPrefetch, host":   func() error { return b.DiscardPrefetch(s, cuda.OnHost()) },
			"on another stream": func() error {
				behind(s, other)
				err := b.Discard(other)
				behind(other, s)
				return err
			},
			"twice":             func() error { return errors.Join(b.Discard(s), b.Discard(s)) },
			"without a stream":  func() error { return errors.Join(s.Synchronize(), b.Discard(nil)) },
			"behind a prefetch": func() error { return errors.Join(b.Prefetch(s, cuda.OnHost()), b.Discard(s)) },
		} {
			for i := range 5 {
				v := byte(2*i + 1)
				require.NoError(t, s.Memset(b.Ptr(), v, b.Len()))
				require.NoError(t, discard(), name)
				require.NoError(t, s.Memset(b.Ptr(), v+1, b.Len()))
				require.NoError(t, s.Synchronize())
				time.Sleep(3 * time.Millisecond) // for what nothing waits for
				require.NoError(t, b.Host(s, func(data []byte) error {
					require.Equal(t, b.Len(), bytes.Count(data, []byte{v + 1}), "%s, round %d", name, i)
					return nil
				}))
			}
		}
	})
}

// What is whole pages is discarded, up to the end of a buffer that has none.
func TestDiscardTakesWholePages(t *testing.T) {
	m, d := open(t)
	page := int(host.PageSize())
	s := stream(t, d)
	b := buffer(t, d, 3*page+5)
	for _, row := range []struct{ off, n, left int }{
		{0, 3*page + 5, 0}, {1, 3*page + 4, page}, {0, 3*page + 4, page}, {page, page, 3 * page}, {page + 1, page, 4 * page},
	} {
		require.NoError(t, b.Prefetch(s, cuda.OnHost()))
		r, err := b.Slice(row.off, row.off+row.n)
		require.NoError(t, err)
		require.NoError(t, r.Discard(s))
		require.NoError(t, s.Synchronize())
		require.Equal(t, row.left, m.Resident(b.Ptr(), 4*page, -1), "%d bytes at %d", row.n, row.off)
	}
}

// Where the edges cannot be prefetched nothing is discarded.
func TestAFailedPrefetchOfEdgesDiscardsNothing(t *testing.T) {
	m, d := open(t)
	b, s := buffer(t, d, mib), stream(t, d)
	want := pattern(mib, 5)
	require.NoError(t, s.Upload(b.Ptr(), want))
	r, err := b.Slice(1, mib/2+1)
	require.NoError(t, err)
	m.Inject(sim.Fault{Call: "cuMemPrefetchBatchAsync", Result: 2, Times: 1})
	require.ErrorIs(t, r.DiscardPrefetch(s, cuda.OnHost()), cuda.ErrOutOfMemory)
	got := make([]byte, mib)
	require.NoError(t, s.Download(got, b.Ptr()))
	require.True(t, bytes.Equal(want, got))
}

// Where a driver has no batches, prefetching loops, in the form that it has.
func TestBatchesOnOlderDrivers(t *testing.T) {
	for version, call := range map[int]string{12010: "cuMemPrefetchAsync_v1", 12090: "cuMemPrefetchAsync"} {
		m, d := open(t, sim.OlderDriver(version))
		s := stream(t, d)
		all := []managed.Range{buffer(t, d, mib).Range, buffer(t, d, mib).Range}
		require.NoError(t, managed.PrefetchBatch(s, all, cuda.OnHost(), cuda.OnDevice(0)))
		require.NoError(t, s.Synchronize())
		require.Equal(t, 2, m.Count(call))
		require.Equal(t, []int{0, mib}, resident(m, all[0], 1))
		require.Equal(t, []int{mib, 0}, resident(m, all[1], 1))
		require.ErrorIs(t, managed.DiscardBatch(s, all), cuda.ErrNotSupported)
		require.ErrorIs(t, managed.DiscardPrefetchBatch(s, all, cuda.OnHost()), cuda.ErrNotSupported)
	}
}

// What a batch cannot be is said before any call.
func TestBatchesAreCheckedFirst(t *testing.T) {
	gputest.Alone(t)
	m, d := open(t)
	s := stream(t, d)
	good := buffer(t, d, mib)
	gone, err := managed.New(d, mib, managed.Options{})
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	foreign := another(t, d)
	theirs := buffer(t, foreign, mib)
	hint := hinted(t, d)
	busy := stream(t, d)
	for name, row := range map[string]struct {
		ranges []managed.Range
		to     []cuda.Location
		on     *cuda.Stream
		want   error
		says   string
	}{
		"no ranges":          {nil, []cuda.Location{cuda.OnHost()}, s, cuda.ErrInvalidArgument, "no ranges"},
		"no locations":       {[]managed.Range{good.Range}, nil, s, cuda.ErrInvalidArgument, "0 locations for 1 range;"},
		"too many locations": {[]managed.Range{good.Range}, []cuda.Location{cuda.OnHost(), cuda.OnHost()}, s, cuda.ErrInvalidArgument, "2 locations for 1"},
		"too few locations":  {[]managed.Range{good.Range, good.Range, good.Range}, []cuda.Location{cuda.OnHost(), cuda.OnHost()}, s, cuda.ErrInvalidArgument, "2 locations for 3"},
		"a bad location":     {[]managed.Range{good.Range, good.Range}, []cuda.Location{cuda.OnHost(), cuda.OnDevice(7)}, s, cuda.ErrInvalidArgument, "device 7"},
		"a zero range":       {[]managed.Range{good.Range, {}}, []cuda.Location{cuda.OnHost()}, s, cuda.ErrInvalidArgument, "range 1 of 2"},
		"a closed buffer":    {[]managed.Range{good.Range, gone.Range}, []cuda.Location{cuda.OnHost()}, s, cuda.ErrClosed, "range 1 of 2"},
		"another System":     {[]managed.Range{good.Range, theirs.Range}, []cuda.Location{cuda.OnHost()}, s, cuda.ErrForeign, "range 1 of 2"},
		"another's stream":   {[]managed.Range{good.Range}, []cuda.Location{cuda.OnHost()}, stream(t, foreign), cuda.ErrForeign, "stream"},
		"memory not managed": {[]managed.Range{good.Range, hint.Range}, []cuda.Location{cuda.OnHost()}, s, cuda.ErrInvalidArgument, "only managed memory"},
		"the legacy stream":  {[]managed.Range{good.Range}, []cuda.Location{cuda.OnHost()}, legacy(t, d), cuda.ErrInvalidArgument, "legacy"},
	} {
		m.ResetCounts()
		for kind, err := range map[string]error{
			"prefetch": managed.PrefetchBatch(row.on, row.ranges, row.to...),
			"both":     managed.DiscardPrefetchBatch(row.on, row.ranges, row.to...),
		} {
			require.ErrorIs(t, err, row.want, "%s: %s", name, kind)
			require.ErrorContains(t, err, row.says, "%s: %s", name, kind)
		}
		if len(row.to) == 1 {
			require.ErrorIs(t, managed.DiscardBatch(row.on, row.ranges), row.want, name)
		}
		for _, call := range []string{"cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync", "cuMemPrefetchAsync"} {
			require.Zero(t, m.Count(call), "%s: %s", name, call)
		}
	}
	g, err := busy.WithCapture(cuda.CaptureOptions{}, func() error {
		for _, err := range []error{
			good.Prefetch(busy, cuda.OnHost()), good.Discard(busy), good.DiscardPrefetch(busy, cuda.OnHost()),
			managed.PrefetchBatch(busy, []managed.Range{good.Range}, cuda.OnHost()), good.Attach(busy, managed.AttachGlobal),
		} {
			require.ErrorIs(t, err, cuda.ErrCapturing)
		}
		return nil
	})
	require.NoError(t, err, "the capture lives")
	require.NoError(t, g.Close())
}

// A batch that fails leaves advice as it was, whichever call it was.
func TestAFailedBatchLeavesAdvice(t *testing.T) {
	for _, options := range []sim.Options{{}, sim.OlderDriver(12090)} {
		m, d := open(t, options)
		s := stream(t, d)
		all := []managed.Range{buffer(t, d, mib).Range, buffer(t, d, mib).Range, buffer(t, d, mib).Range}
		for _, r := range all {
			require.NoError(t, r.SetPreferred(cuda.OnHost()))
			require.NoError(t, r.AccessedBy().Add(cuda.OnDevice(0)))
		}
		for _, call := range []string{"cuMemPrefetchBatchAsync", "cuMemPrefetchAsync", "cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync", "cuStreamIsCapturing"} {
			for after := range 3 {
				for _, do := range []func() error{
					func() error { return managed.PrefetchBatch(s, all, cuda.OnDevice(0)) },
					func() error { return managed.DiscardBatch(s, all) },
					func() error { return managed.DiscardPrefetchBatch(s, all, cuda.OnDevice(0)) },
				} {
					remove := m.Inject(sim.Fault{Call: call, After: after, Result: 2})
					err := do()
					remove()
					if err != nil && options.DriverVersion == 0 {
						require.ErrorIs(t, err, cuda.ErrOutOfMemory, "the code is kept")
					}
					for _, r := range all {
						l, err := r.Preferred()
						require.NoError(t, err)
						require.Equal(t, cuda.OnHost(), l)
						by, err := r.AccessedBy().All()
						require.NoError(t, err)
						require.Equal(t, []cuda.Location{cuda.OnDevice(0)}, by)
					}
				}
			}
		}
		require.NoError(t, s.Synchronize())
	}
}

// More than the device has works by paging; it is tested here alone.
func TestOversubscription(t *testing.T) {
	const room = 64 * mib
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: room}}})
	b, s := buffer(t, d, 3*room), stream(t, d)
	const piece = 16 * mib
	for at := 0; at < 3*room; at += piece {
		require.NoError(t, s.Memset(b.Ptr()+cuda.Ptr(at), byte(at/piece+1), piece))
	}
	require.NoError(t, s.Synchronize())
	at := resident(m, b.Range, 1)
	require.Equal(t, 3*room, at[0]+at[1], "each page lies somewhere")
	require.Greater(t, at[0], room/2, "the device is used")
	for at := 0; at < 3*room; at += piece {
		got := make([]byte, 4096)
		require.NoError(t, s.Download(got, b.Ptr()+cuda.Ptr(at+piece-4096)))
		require.Equal(t, byte(at/piece+1), got[0])
	}
	// Plain memory finds room too: managed pages make it.
	other := buffer(t, d, room)
	require.NoError(t, other.Prefetch(s, cuda.OnDevice(0)))
	require.NoError(t, s.Synchronize())

	_, err := managed.New(d, 1<<49, managed.Options{})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
}
