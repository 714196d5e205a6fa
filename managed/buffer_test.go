package managed_test

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

func TestNewIsChecked(t *testing.T) {
	gputest.Alone(t)
	m, d := open(t)
	s, foreign := stream(t, d), stream(t, another(t, d))
	gone, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	for name, row := range map[string]struct {
		d    *cuda.Device
		n    int
		o    managed.Options
		want error
	}{
		"no device":               {nil, mib, managed.Options{}, cuda.ErrInvalidArgument},
		"no bytes":                {d, 0, managed.Options{}, cuda.ErrInvalidArgument},
		"less than none":          {d, -5, managed.Options{}, cuda.ErrInvalidArgument},
		"more than there is":      {d, 1 << 60, managed.Options{}, cuda.ErrInvalidArgument},
		"an attachment of a kind": {d, mib, managed.Options{Attach: 9}, cuda.ErrInvalidArgument},
		"a stream that is nil":    {d, mib, managed.Options{Attach: managed.AttachStream}, cuda.ErrInvalidArgument},
		"the legacy stream":       {d, mib, managed.Options{Attach: managed.AttachStream, Stream: legacy(t, d)}, cuda.ErrInvalidArgument},
		"a foreign stream":        {d, mib, managed.Options{Stream: foreign}, cuda.ErrForeign},
		"a closed stream":         {d, mib, managed.Options{Stream: gone}, cuda.ErrClosed},
	} {
		_, err := managed.New(row.d, row.n, row.o)
		require.ErrorIs(t, err, row.want, name)
	}
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		_, err := managed.New(d, mib, managed.Options{Attach: managed.AttachStream, Stream: s})
		require.ErrorIs(t, err, cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.Zero(t, m.Count("cuMemAllocManaged"), "nothing was made, so nothing has to be freed, which would hold up others")
	b := buffer(t, d, 100, managed.Options{Attach: managed.AttachStream, Stream: s})
	require.Equal(t, 100, b.Len())
	require.Equal(t, d, b.Device())
	require.Equal(t, 1, d.System().Stats().Managed)
	require.Equal(t, 100, d.System().Stats().ManagedBytes)
}

func TestADeviceWithoutManagedMemory(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{83: 0}}}})
	_, err := managed.New(d, mib, managed.Options{})
	require.ErrorIs(t, err, cuda.ErrNotSupported)
}

func TestRangesStayInside(t *testing.T) {
	_, d := open(t)
	b := buffer(t, d, 1000)
	r, err := b.Slice(100, 300)
	require.NoError(t, err)
	require.Equal(t, b.Ptr()+100, r.Ptr())
	inner, err := r.Slice(50, 200)
	require.NoError(t, err)
	require.Equal(t, b.Ptr()+150, inner.Ptr())
	for _, at := range [][2]int{{-1, 1}, {0, 0}, {5, 3}, {0, -1}, {0, 201}, {200, 201}, {201, 201}, {201, 202}, {1 << 62, 1 << 62}, {1, 1 << 62}} {
		_, err := r.Slice(at[0], at[1])
		require.ErrorIs(t, err, cuda.ErrOutOfRange, "%v", at)
	}
	var none managed.Range
	require.Zero(t, none.Ptr())
	require.Zero(t, none.Len())
	_, err = none.Slice(0, 1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

// every operation of a buffer that needs its memory.
func everything(b *managed.Buffer, s *cuda.Stream) map[string]error {
	all := map[string]error{
		"SetReadMostly":   b.SetReadMostly(true),
		"SetPreferred":    b.SetPreferred(cuda.OnHost()),
		"Add":             b.AccessedBy().Add(cuda.OnHost()),
		"Remove":          b.AccessedBy().Remove(cuda.OnHost()),
		"Assign":          b.AccessedBy().Assign(),
		"Prefetch":        b.Prefetch(s, cuda.OnHost()),
		"Discard":         b.Discard(s),
		"DiscardPrefetch": b.DiscardPrefetch(s, cuda.OnHost()),
		"PrefetchBatch":   managed.PrefetchBatch(s, []managed.Range{b.Range}, cuda.OnHost()),
		"DiscardBatch":    managed.DiscardBatch(s, []managed.Range{b.Range}),
		"Host":            b.Host(s, func([]byte) error { return nil }),
		"Attach":          b.Attach(s, managed.AttachGlobal),
		"GPUFirst":        managed.GPUFirst(s, b.Range),
	}
	_, all["ReadMostly"] = b.ReadMostly()
	_, all["Preferred"] = b.Preferred()
	_, all["LastPrefetch"] = b.LastPrefetch()
	_, all["Contains"] = b.AccessedBy().Contains(cuda.OnHost())
	_, all["All"] = b.AccessedBy().All()
	_, all["Slice"] = b.Slice(0, 1)
	_, all["Bytes"] = b.Bytes()
	c, err := b.Clone()
	if err == nil {
		err = c.Close()
	}
	all["Clone"] = err
	return all
}

func requireClosed(t *testing.T, b *managed.Buffer, s *cuda.Stream) {
	t.Helper()
	require.False(t, b.Valid())
	for name, err := range everything(b, s) {
		require.ErrorIs(t, err, cuda.ErrClosed, name)
	}
}

func TestClosedBuffersSaySo(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	for name, closing := range map[string]func(b *managed.Buffer) error{
		"Close":      (*managed.Buffer).Close,
		"CloseAfter": func(b *managed.Buffer) error { return b.CloseAfter(s) },
	} {
		b, err := managed.New(d, mib, managed.Options{})
		require.NoError(t, err)
		require.True(t, b.Valid())
		require.NoError(t, closing(b))
		requireClosed(t, b, s)
		require.NoError(t, closing(b), "idempotent")
		require.NoError(t, b.Close())
		require.NoError(t, d.System().Drain(t.Context()))
		require.Zero(t, m.Live()[sim.KindManagedMemory], name)
		require.Zero(t, d.System().Stats().Managed)
	}
}

// The memory goes with the last of its buffers, however each is closed and in
// whichever order.
func TestClones(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	closings := []func(b *managed.Buffer) error{(*managed.Buffer).Close, func(b *managed.Buffer) error { return b.CloseAfter(s) }}
	for mask := range 8 {
		b, err := managed.New(d, mib, managed.Options{})
		require.NoError(t, err)
		c1, err := b.Clone()
		require.NoError(t, err)
		c2, err := c1.Clone()
		require.NoError(t, err)
		require.Equal(t, b.Ptr(), c2.Ptr())
		for i, each := range []*managed.Buffer{c1, b, c2} {
			require.Equal(t, 1, m.Live()[sim.KindManagedMemory])
			require.True(t, each.Valid())
			require.NoError(t, each.SetReadMostly(i%2 == 0))
			require.NoError(t, closings[mask>>i&1](each))
			require.NoError(t, d.System().Drain(t.Context()))
			require.False(t, each.Valid())
		}
		require.Zero(t, m.Live()[sim.KindManagedMemory], "mask %d", mask)
	}
}

// A free waits for the work, by the streams that are named.
func TestCloseAfterWaitsForItsStreams(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	b, err := managed.New(d, mib, managed.Options{})
	require.NoError(t, err)
	require.ErrorIs(t, b.CloseAfter(), cuda.ErrInvalidArgument)
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		require.ErrorIs(t, b.CloseAfter(s), cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.True(t, b.Valid(), "nothing has changed")

	release := m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, mib))
	require.NoError(t, b.CloseAfter(s))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.Error(t, d.System().Drain(ctx))
	require.Equal(t, 1, m.Live()[sim.KindManagedMemory])
	release()
	require.NoError(t, d.System().Drain(t.Context()))
	require.Zero(t, m.Live()[sim.KindManagedMemory])
	require.Empty(t, m.Fault())
}

// The free of managed memory waits for its whole context, but holds up neither
// the reclaimer nor another CloseAfter.
func TestAFreeThatWaitsBlocksNoOther(t *testing.T) {
	m, d := open(t)
	s, busy := stream(t, d), stream(t, d)
	b, err := managed.New(d, mib, managed.Options{})
	require.NoError(t, err)
	h, err := d.NewHostBuffer(mib)
	require.NoError(t, err)
	scratch := buffer(t, d, mib)
	goOn, release := m.Hold(s.Handle()), m.Hold(busy.Handle())
	defer release()
	defer goOn()
	require.NoError(t, busy.Memset(scratch.Ptr(), 1, mib/2))
	require.NoError(t, s.Memset(scratch.Ptr()+mib/2, 1, mib/2))
	require.NoError(t, b.CloseAfter(s))
	require.NoError(t, h.CloseAfter(s))
	goOn()
	require.Eventually(t, func() bool { return d.System().Stats().HostBuffers == 0 }, time.Minute, time.Millisecond,
		"another teardown goes on")
	require.Equal(t, 2, m.Live()[sim.KindManagedMemory], "the free waits")
	release()
	require.NoError(t, d.System().Drain(t.Context()))
	require.Equal(t, 1, m.Live()[sim.KindManagedMemory])
}

// Whatever call fails while memory is made or closed, nothing is lost.
func TestFailuresWhileMakingAndClosing(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	for name, row := range map[string]struct {
		o     managed.Options
		calls []string
	}{
		"plain":     {managed.Options{}, []string{"cuMemAllocManaged"}},
		"attached":  {managed.Options{Attach: managed.AttachStream, Stream: s}, []string{"cuMemAllocManaged", "cuStreamAttachMemAsync", "cuStreamIsCapturing"}},
		"GPU first": {managed.Options{Placement: managed.GPUFirst, Stream: s}, []string{"cuMemAllocManaged", "cuMemAdvise", "cuMemRangeGetAttributes"}},
		"read":      {managed.Options{Placement: managed.ReadMostly}, []string{"cuMemAllocManaged", "cuMemAdvise"}},
		"callback": {managed.Options{Placement: func(s *cuda.Stream, r managed.Range) error {
			_, err := r.Preferred()
			return err
		}}, []string{"cuMemAllocManaged", "cuMemRangeGetAttributes"}},
	} {
		for _, call := range row.calls {
			for after := 0; ; after++ {
				remove := m.Inject(sim.Fault{Call: call, After: after, Result: 999})
				b, err := managed.New(d, mib, row.o)
				remove()
				if err == nil {
					require.NoError(t, b.Close())
					require.NotZero(t, after, "%s: %s was never called", name, call)
					break
				}
				var e *cuda.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, cuda.Code(999), e.Code, "%s: %s: the code is kept", name, call)
				require.Zero(t, m.Live()[sim.KindManagedMemory], "%s: %s after %d", name, call, after)
				require.Zero(t, d.System().Stats().Managed)
			}
		}
	}
	// Where the undo fails too, the System has the memory, and gives it back once the
	// driver takes it; an allocator may do so before.
	boom := errors.New("boom")
	a := allocator(t, d, managed.Options{Placement: func(*cuda.Stream, managed.Range) error { return boom }})
	for _, closes := range []bool{false, true} {
		remove := m.Inject(sim.Fault{Call: "cuMemFree", Times: -1, Result: 999})
		_, err := a.New(nil, mib)
		require.ErrorIs(t, err, boom)
		require.ErrorContains(t, err, "undoing it failed, which System.Drain tries again")
		require.ErrorContains(t, d.System().Drain(t.Context()), "1 MiB of managed memory is left of an operation that failed")
		require.Equal(t, 1, d.System().Stats().Leftovers)
		remove()
		if closes {
			require.NoError(t, a.Close())
			require.Zero(t, m.Live()[sim.KindManagedMemory])
		}
		require.NoError(t, d.System().Drain(t.Context()))
		require.Zero(t, d.System().Stats().Leftovers)
		require.Zero(t, m.Live()[sim.KindManagedMemory])
	}
	// A free that fails can be done again, by either form.
	for _, first := range []bool{true, false} {
		b, err := managed.New(d, mib, managed.Options{})
		require.NoError(t, err)
		remove := m.Inject(sim.Fault{Call: "cuMemFree", Times: -1, Result: 999})
		if first {
			require.ErrorContains(t, b.Close(), "cuMemFree")
		} else {
			require.NoError(t, b.CloseAfter(s))
			require.ErrorContains(t, d.System().Drain(t.Context()), "cuMemFree")
		}
		remove()
		requireClosed(t, b, s)
		require.Equal(t, 1, d.System().Stats().Managed)
		require.NoError(t, b.Close())
		require.Zero(t, d.System().Stats().Managed)
	}
}

// An out-of-memory error says so, and others say what they are.
func TestErrorsKeepTheirCodes(t *testing.T) {
	m, d := open(t)
	for code, want := range map[cuda.Code]error{2: cuda.ErrOutOfMemory, 801: cuda.ErrNotSupported, 1: cuda.ErrInvalidArgument} {
		remove := m.Inject(sim.Fault{Call: "cuMemAllocManaged", Times: -1, Result: code})
		_, err := managed.New(d, mib, managed.Options{})
		remove()
		require.ErrorIs(t, err, want)
		var e *cuda.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, cuda.Code(code), e.Code)
		require.Equal(t, "cuMemAllocManaged", e.Call)
		require.Contains(t, e.Asked, "1 MiB of managed memory on device 0")
		if code == 2 {
			require.Contains(t, e.Hint, "ulimit -v")
		}
	}
}

// Memory that was closed and waits makes room for what is asked.
func TestAllocationTakesWhatPasses(t *testing.T) {
	m, err := sim.New(sim.Options{HostMemory: 64 * mib, Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{AllocationWait: time.Minute})
	require.NoError(t, err)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	b, err := managed.New(d, 100*mib, managed.Options{})
	require.NoError(t, err)
	release := m.Hold(s.Handle())
	require.NoError(t, s.Memset(b.Ptr(), 1, 4096))
	require.NoError(t, b.CloseAfter(s))
	timer := time.AfterFunc(20*time.Millisecond, release)
	defer timer.Stop()
	b, err = managed.New(d, 100*mib, managed.Options{})
	require.NoError(t, err)
	require.NoError(t, b.Close())
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
}

// The streams that were named have passed: then the memory is free for any code that
// asks, though it is freed on a goroutine of its own.
func TestAllocationTakesWhatHasPassed(t *testing.T) {
	_, d := open(t, sim.Options{HostMemory: 4 * mib, Devices: []sim.DeviceOptions{{Memory: 4 * mib}}})
	s := stream(t, d)
	for range 20 {
		b, err := managed.New(d, 6*mib, managed.Options{})
		require.NoError(t, err)
		require.NoError(t, s.Memset(b.Ptr(), 1, 4096))
		require.NoError(t, b.CloseAfter(s))
		require.NoError(t, s.Synchronize())
	}
	require.NoError(t, d.System().Drain(t.Context()))
}

func TestALostBufferIsReported(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	var log strings.Builder
	var mu sync.Mutex
	sys, err := m.Open(cuda.Options{TraceLeaks: true, Logger: slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(p)
	}), nil))})
	require.NoError(t, err)
	func() {
		b, err := managed.New(sys.Devices()[0], mib, managed.Options{})
		require.NoError(t, err)
		require.True(t, b.Valid())
	}()
	require.Eventually(t, func() bool { runtime.GC(); return sys.Stats().Lost == 1 }, time.Minute, time.Millisecond)
	require.Equal(t, 1, sys.Stats().Managed, "it stays")
	err = sys.Close()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "managed memory of 1 MiB")
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Contains(log.String(), "managed memory of 1 MiB")
	}, time.Minute, time.Millisecond)
	require.ErrorContains(t, m.Close(), "managed memory")
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// Memory on a lost device is given back, as far as the driver takes it.
func TestClosingAfterALoss(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	b, err := managed.New(d, mib, managed.Options{})
	require.NoError(t, err)
	a, err := managed.NewAllocator(d, managed.Options{})
	require.NoError(t, err)
	_, err = a.New(nil, mib)
	require.NoError(t, err)
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	m.Inject(sim.Fault{Call: "cuStreamQuery", Result: 700})
	_, err = s.Done()
	require.ErrorIs(t, err, cuda.ErrDeviceLost)
	require.NoError(t, b.Close())
	require.NoError(t, a.Close())
	require.Zero(t, m.Live()[sim.KindManagedMemory])
	_, err = managed.New(d, mib, managed.Options{})
	require.ErrorIs(t, err, cuda.ErrDeviceLost)
	require.NoError(t, s.Close())
	require.NoError(t, sys.Close())
}

// Many goroutines on clones of one memory, while they are closed one by one.
func TestACrowdOnClones(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	for round := range 20 {
		b, err := managed.New(d, mib, managed.Options{})
		require.NoError(t, err)
		var all sync.WaitGroup
		for i := range 4 {
			c, err := b.Clone()
			require.NoError(t, err)
			all.Go(func() {
				for range 5 {
					for name, err := range everything(c, s) {
						if err != nil && !errors.Is(err, cuda.ErrClosed) && !errors.Is(err, cuda.ErrInUse) {
							t.Errorf("%s: %v", name, err)
						}
					}
				}
			})
			all.Go(func() {
				if i%2 == 0 {
					require.NoError(t, c.CloseAfter(s))
				} else {
					err := c.Close()
					for errors.Is(err, cuda.ErrInUse) { // a function looks
						err = c.Close()
					}
					require.NoError(t, err)
				}
			})
		}
		require.NoError(t, b.Close(), "round %d", round)
		all.Wait()
	}
	require.NoError(t, d.System().Drain(t.Context()))
}

func TestMemoryIsShared(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, s := buffer(t, d, 3*mib), stream(t, d)
		require.NoError(t, s.Upload(b.Ptr(), pattern(3*mib, 5)))
		require.NoError(t, b.Host(s, func(data []byte) error {
			require.Equal(t, pattern(3*mib, 5), data)
			copy(data, pattern(3*mib, 6))
			return nil
		}))
		require.NoError(t, b.Prefetch(s, d.Location()))
		got := make([]byte, 3*mib)
		require.NoError(t, s.Download(got, b.Ptr()))
		require.Equal(t, pattern(3*mib, 6), got)
	})
}

func TestAttachmentsHaveNames(t *testing.T) {
	for a, want := range map[managed.Attachment]string{managed.AttachGlobal: "global", managed.AttachHost: "host", managed.AttachStream: "stream", 9: "Attachment(9)"} {
		require.Equal(t, want, a.String())
	}
}
