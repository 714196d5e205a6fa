package vmm_test

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// ended reports whether a closing has ended.
func ended(c cuda.Completion) bool {
	select {
	case <-c.Done():
		return true
	default:
		return false
	}
}

func TestReleasedIsTheEndOfOneObjectsClosing(t *testing.T) {
	m, d := open(t)
	s, other := stream(t, d), stream(t, d)
	buffers := make([]*vmm.Buffer, 2)
	for i, on := range []*cuda.Stream{s, other} {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
		require.NoError(t, err)
		defer m.Hold(on.Handle())()
		require.NoError(t, gputest.Err(b.Append(on, []byte{1})))
		buffers[i] = b
	}
	first := buffers[0].Released()
	require.False(t, ended(first))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, first.Wait(ctx), context.Canceled)
	require.NoError(t, buffers[0].CloseAfter(s))
	require.NoError(t, buffers[1].CloseAfter(other))
	second := buffers[1].Released()
	require.False(t, ended(first))
	m.Release(s.Handle())
	require.NoError(t, first.Wait(t.Context()))
	require.True(t, ended(first))
	require.False(t, ended(second), "another's stream still works")
	require.Equal(t, 2*mib, d.System().Stats().AllocatedBytes)
	m.Release(other.Handle())
	require.NoError(t, second.Wait(t.Context()))
	require.Zero(t, d.System().Stats().AllocatedBytes)
	require.True(t, ended(buffers[0].Released()), "also when asked for afterwards")
	require.NoError(t, first.Wait(ctx), "what has ended needs no time")
}

func TestReleasedSaysWhatFailed(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	for name, end := range map[string]func(b *vmm.Buffer) error{
		"Close":      (*vmm.Buffer).Close,
		"CloseAfter": func(b *vmm.Buffer) error { return b.CloseAfter(s) },
	} {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 * mib})
		require.NoError(t, err)
		require.NoError(t, gputest.Err(b.AppendUndefined(1)))
		m.Inject(sim.Fault{Call: "cuMemUnmap", Result: 999})
		first := b.Released()
		err = end(b)
		require.ErrorContains(t, first.Wait(t.Context()), "cuMemUnmap returned", name)
		require.Equal(t, name == "Close", err != nil)
		again := b.Released()
		require.False(t, ended(again))
		require.NoError(t, b.Close())
		require.NoError(t, again.Wait(t.Context()))
		require.Equal(t, name == "CloseAfter", d.System().Drain(t.Context()) != nil, "the log of teardowns that failed")
	}
}

// mappedAt is a mapping of a granule at an offset.
func mappedAt(t *testing.T, d *cuda.Device, r *vmm.Reservation, off int) *vmm.Mapping {
	a, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	m, err := r.Map(off, a)
	require.NoError(t, err)
	require.NoError(t, a.Close())
	require.NoError(t, m.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}))
	return m
}

func TestAReservationIsClosedAfterItsStreams(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	require.ErrorIs(t, r.CloseAfter(), cuda.ErrInvalidArgument)
	mapping := mappedAt(t, d, r, 2*mib)
	require.ErrorIs(t, r.CloseAfter(s), cuda.ErrInUse)
	g, err := s.WithCapture(cuda.CaptureOptions{}, func() error {
		require.ErrorIs(t, r.CloseAfter(s), cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())

	defer m.Hold(s.Handle())()
	require.NoError(t, s.Memset(mapping.Ptr(), 1, 100))
	require.NoError(t, mapping.CloseAfter(s))
	released := r.Released()
	require.NoError(t, r.CloseAfter(s))
	require.NoError(t, r.CloseAfter(s), "again does nothing")
	a, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	closed(t, a)
	_, err = r.Map(0, a)
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.False(t, ended(released))
	require.Equal(t, 1, d.System().Stats().Reservations)
	m.Release(s.Handle())
	require.NoError(t, released.Wait(t.Context()))
	require.True(t, ended(mapping.Released()))
	require.Zero(t, d.System().Stats().Reservations)
	require.Empty(t, m.Fault())
}

func TestAReservationWhoseMappingsAreClosingCanBeClosed(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	first, second := mappedAt(t, d, r, 0), mappedAt(t, d, r, 4*mib)
	release := m.Hold(s.Handle())
	require.NoError(t, s.Memset(first.Ptr(), 1, 100))
	require.NoError(t, first.CloseAfter(s))
	require.ErrorIs(t, r.Close(), cuda.ErrInUse, "one is open")
	require.ErrorContains(t, r.Close(), "1 mapping, the first 2 MiB")
	require.NoError(t, second.CloseAfter(s))
	done := make(chan error, 1)
	go func() { done <- r.Close() }()
	require.Never(t, func() bool { return len(done) > 0 }, 20*time.Millisecond, time.Millisecond, "the GPU works on it")
	release()
	require.NoError(t, <-done)
	require.Zero(t, d.System().Stats().Reservations)
	require.NoError(t, d.System().Drain(t.Context()))
	require.Zero(t, d.System().Stats().AllocatedBytes)
	require.Empty(t, m.Fault())
}

// It does not wait for the capture that it is called in, though the reclaimer does.
func TestClosingAReservationInACapture(t *testing.T) {
	m, d := open(t)
	s, capturing := stream(t, d), stream(t, d)
	r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	mapping := mappedAt(t, d, r, 0)
	looking, goOn := make(chan struct{}), make(chan struct{})
	used := make(chan error, 1)
	m.OnCall(func(call string) { // an operation that runs when CloseAfter is called: its work may lie behind the fence
		if call == "cuMemGetAccess" {
			m.OnCall(nil)
			close(looking)
			<-goOn
		}
	})
	go func() { _, err := mapping.Access(d.Location()); used <- err }()
	<-looking
	require.NoError(t, mapping.CloseAfter(s))
	within(t, func() {
		g, err := capturing.WithCapture(cuda.CaptureOptions{}, func() error {
			close(goOn)
			check(t, <-used)
			return r.Close()
		})
		check(t, err)
		check(t, g.Close())
	})
	require.NoError(t, d.System().Drain(t.Context()))
}

func TestAFailedCloseOfAReservationGoesOn(t *testing.T) {
	for _, call := range []string{"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"} {
		m, d := open(t)
		s := stream(t, d)
		r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
		require.NoError(t, err)
		mapping := mappedAt(t, d, r, 0)
		release := m.Hold(s.Handle())
		require.NoError(t, mapping.CloseAfter(s))
		m.Inject(sim.Fault{Call: call, Result: 999})
		require.NoError(t, r.CloseAfter(s))
		release()
		require.ErrorContains(t, d.System().Drain(t.Context()), call+" returned")
		require.NoError(t, r.Close())
		require.NoError(t, mapping.Close())
		require.Zero(t, d.System().Stats().Reservations)
		require.Zero(t, d.System().Stats().AllocatedBytes)
	}
}

// An operation that began before CloseAfter may come to the memory when Close of the
// range has looked for functions and waits for the GPU, or has unmapped it.
func TestNoFunctionLooksIntoAClosedRange(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	home := cuda.OnHostNUMA(0)
	a, err := vmm.Create(d, 2*mib, vmm.Properties{Location: home})
	require.NoError(t, err)
	closed(t, a)
	r, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	mapping, err := r.Map(0, a)
	require.NoError(t, err)
	require.NoError(t, mapping.SetAccess(vmm.Access{Location: home, Mode: vmm.ReadWrite}))
	require.NoError(t, vmm.Look(mapping))
	require.NoError(t, mapping.CloseAfter(s))
	require.NoError(t, r.Close())
	require.ErrorIs(t, vmm.Look(mapping), cuda.ErrClosed)
}

// Where a mapping is closing, Map says what tells of its end, and not to close it.
func TestMapWhereAMappingIsClosing(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	r, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	closed(t, r)
	mapping := mappedAt(t, d, r, 0)
	a, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	closed(t, a)
	_, err = r.Map(0, a)
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "close that mapping first")
	release := m.Hold(s.Handle())
	require.NoError(t, s.Memset(mapping.Ptr(), 1, 100))
	require.NoError(t, mapping.CloseAfter(s))
	_, err = r.Map(0, a)
	require.ErrorIs(t, err, cuda.ErrInUse)
	require.ErrorContains(t, err, "wait for its Released")
	release()
	require.NoError(t, mapping.Released().Wait(t.Context()))
	again, err := r.Map(0, a)
	require.NoError(t, err)
	require.NoError(t, again.Close())
}
