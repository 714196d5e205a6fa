package managed_test

import (
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

func nothing([]byte) error { return nil }

// Host waits for the work that it is told of, or for all of it.
func TestHostWaits(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	b, second := buffer(t, d, mib), buffer(t, d, mib)
	for _, on := range []*cuda.Stream{s, nil} {
		release := m.Hold(s.Handle())
		require.NoError(t, s.Memset(b.Ptr(), 5, mib))
		done := make(chan byte, 1)
		go func() {
			var got byte
			_ = b.Host(on, func(data []byte) error { got = data[mib-1]; return nil })
			done <- got
		}()
		select {
		case <-done:
			t.Fatal("Host did not wait")
		case <-time.After(20 * time.Millisecond):
		}
		if on != nil {
			require.NoError(t, second.Host(other, nothing), "another stream has no work")
		}
		release()
		require.Equal(t, byte(5), <-done)
		require.NoError(t, s.Memset(b.Ptr(), 0, mib))
		require.NoError(t, s.Synchronize())
	}
}

func TestHostIsChecked(t *testing.T) {
	_, d := open(t)
	b, s := buffer(t, d, mib), stream(t, d)
	require.ErrorIs(t, b.Host(s, nil), cuda.ErrInvalidArgument)
	require.ErrorIs(t, b.Host(stream(t, another(t, d)), nothing), cuda.ErrForeign)
	boom := errors.New("boom")
	require.ErrorIs(t, b.Host(s, func([]byte) error { return boom }), boom)
	require.Panics(t, func() { _ = b.Host(s, func([]byte) error { panic("in the middle") }) })
	require.NoError(t, b.Host(s, nothing), "the panic left nothing locked")

	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		require.ErrorIs(t, b.Host(s, nothing), cuda.ErrCapturing)
		require.ErrorIs(t, b.Host(nil, nothing), cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
}

// While Host runs no other function works on the memory from the CPU, nothing discards
// it, and it stays: whatever would take it away returns ErrInUse, on every goroutine.
func TestHostExcludes(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	a := allocator(t, d)
	b, err := a.New(s, mib)
	require.NoError(t, err)
	c, err := b.Clone()
	require.NoError(t, err)
	other, err := a.New(s, mib)
	require.NoError(t, err)
	require.NoError(t, b.Host(s, func(data []byte) error {
		elsewhere := make(chan error, 1)
		for what, take := range map[string]func() error{
			"Discard":              func() error { return c.Discard(s) },
			"DiscardPrefetchBatch": func() error { return managed.DiscardPrefetchBatch(s, []managed.Range{c.Range}, cuda.OnHost()) },
			"Host":                 func() error { return c.Host(s, nothing) },
			"Close":                b.Close,
			"Allocator.Close":      a.Close,
		} {
			require.ErrorIs(t, take(), cuda.ErrInUse, what)
			go func() { elsewhere <- take() }()
			require.ErrorIs(t, <-elsewhere, cuda.ErrInUse, what)
		}
		require.NoError(t, c.Prefetch(s, cuda.OnHost()))
		require.NoError(t, other.Host(s, nothing), "of other memory")
		require.NoError(t, c.Close(), "the function's buffer keeps the memory")
		require.NoError(t, b.CloseAfter(s))
		data[0] = 1
		return nil
	}))
	require.NoError(t, a.Close())
	require.Zero(t, m.Live()[sim.KindManagedMemory])
}

func TestHostBringsPages(t *testing.T) {
	m, d := open(t)
	b, s := buffer(t, d, 4*mib), stream(t, d)
	require.NoError(t, b.Prefetch(s, cuda.OnDevice(0)))
	half, err := b.Slice(mib, 2*mib)
	require.NoError(t, err)
	require.NoError(t, half.Host(s, nothing))
	require.Equal(t, []int{3 * mib, mib}, resident(m, b.Range, 1))
	data, err := b.Bytes()
	require.NoError(t, err)
	require.Len(t, data, 4*mib)
	require.Equal(t, []int{0, 4 * mib}, resident(m, b.Range, 1))
	data[4*mib-1] = 9
	got := make([]byte, 1)
	require.NoError(t, s.Download(got, b.Ptr()+4*mib-1))
	require.Equal(t, byte(9), got[0])
}

// Without concurrent managed access all work of the device counts, and a touch
// while it works is reported where a real process would crash.
func TestHostWithoutConcurrentAccess(t *testing.T) {
	m, d := open(t, sim.WithoutConcurrentManagedAccess())
	s, busy := stream(t, d), stream(t, d)
	b, other := buffer(t, d, mib), buffer(t, d, mib)
	require.Equal(t, []int{mib, 0}, resident(m, b.Range, 1), "it lies on the device from the beginning")
	release := m.Hold(busy.Handle())
	defer release()
	require.NoError(t, busy.Memset(other.Ptr(), 1, mib))
	_, err := b.Bytes()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "would crash")
	require.Contains(t, m.Log()[0], "while device 0, which has no concurrent managed access, works")

	done := make(chan error, 1)
	go func() { done <- b.Host(s, nothing) }()
	select {
	case <-done:
		t.Fatal("Host did not wait for the device's other stream")
	case <-time.After(20 * time.Millisecond):
	}
	release()
	require.NoError(t, <-done)

	// Memory that is attached to the host is the CPU's alone, and that of one
	// stream is the CPU's while that stream has no work.
	mine := buffer(t, d, mib, managed.Options{Attach: managed.AttachHost})
	streams := buffer(t, d, mib, managed.Options{Attach: managed.AttachStream, Stream: s})
	require.NoError(t, s.Synchronize())
	again := m.Hold(busy.Handle())
	defer again()
	require.NoError(t, busy.Memset(other.Ptr(), 1, mib))
	for _, b := range []*managed.Buffer{mine, streams} {
		_, err = b.Bytes()
		require.NoError(t, err)
	}
	again()
	require.NoError(t, busy.Synchronize())
	require.NoError(t, mine.Attach(s, managed.AttachGlobal))
	require.NoError(t, s.Memset(mine.Ptr(), 1, mib))
	require.NoError(t, s.Synchronize())
}

// A device without concurrent access could touch the memory of one that has it.
func TestHostBesideADeviceWithoutConcurrentAccess(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{}, sim.WithoutConcurrentManagedAccess().Devices[0]}})
	s, busy := stream(t, d), stream(t, d.System().Devices()[1])
	b, other := buffer(t, d, mib), buffer(t, d.System().Devices()[1], mib)
	release := m.Hold(busy.Handle())
	defer release()
	require.NoError(t, busy.Memset(other.Ptr(), 1, mib))
	_, err := b.Bytes()
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.Contains(t, m.Log()[0], "while device 1, which has no concurrent managed access, works")
	_, err = buffer(t, d, mib, managed.Options{Attach: managed.AttachHost}).Bytes()
	require.NoError(t, err)

	done := make(chan error, 1)
	go func() { done <- b.Host(s, nothing) }()
	select {
	case <-done:
		t.Fatal("Host did not wait for the other device")
	case <-time.After(20 * time.Millisecond):
	}
	release()
	require.NoError(t, <-done)
}

// A kernel on memory that is attached to the host loses the context, as on a
// device that cannot fault.
func TestWorkOnMemoryOfTheHost(t *testing.T) {
	m, err := sim.New(sim.WithoutConcurrentManagedAccess())
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	b, err := managed.New(d, mib, managed.Options{Attach: managed.AttachHost})
	require.NoError(t, err)
	require.NoError(t, s.Memset(b.Ptr(), 1, mib))
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	require.Contains(t, m.Fault(), "attached to the host")
	require.NoError(t, b.Close())
	require.NoError(t, s.Close())
	_ = sys.Close()
}
