package vmm_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A hint is never an error: neither one that the driver refuses, nor one inside of
// what is taken.
func TestHintsOfReservations(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		taken, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
		require.NoError(t, err)
		closed(t, taken)
		for _, align := range []int{0, 1 << 30} {
			for _, hint := range []cuda.Ptr{1, 0xfff, 0x1000, 0x200000, 0x300000001, 0x300200000, 0x7f0000000000, 0x7fffffe00000, 1 << 47, 1 << 63, 1<<64 - 1, taken.Ptr() + 2*mib} {
				r, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{Align: align, Hint: hint})
				require.NoError(t, err, "hint %v, alignment %d", hint, align)
				require.Zero(t, uint64(r.Ptr())%uint64(max(align, 2*mib)))
				require.NoError(t, r.Close())
			}
		}

		// One that is free is granted, from wherever within it the hint points.
		free, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
		require.NoError(t, err)
		at := free.Ptr()
		require.NoError(t, free.Close())
		r, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{Hint: at + mib + 7})
		require.NoError(t, err)
		closed(t, r)
		require.Equal(t, at, r.Ptr())

		// What has no room fails for that, with a hint too.
		_, err = vmm.Reserve(d, 1<<47, vmm.ReserveOptions{Hint: at})
		require.ErrorIs(t, err, cuda.ErrOutOfAddressSpace)
	})
}

// A range that takes closing mappings with it first waits for the operations that
// still run on them.
func TestARangeWaitsForOperationsOnItsClosingMappings(t *testing.T) {
	m, d := open(t)
	s := stream(t, d)
	space, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	memory, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	closed(t, memory)
	mapping, err := space.Map(0, memory)
	require.NoError(t, err)
	asking, goOn := make(chan struct{}), make(chan struct{})
	m.OnCall(func(call string) {
		if call == "cuMemGetAccess" {
			close(asking)
			<-goOn
		}
	})
	asked, over := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := mapping.Access(d.Location())
		asked <- err
	}()
	<-asking
	t.Cleanup(m.Hold(s.Handle()))
	require.NoError(t, mapping.CloseAfter(s))
	go func() { over <- space.Close() }()
	require.Never(t, func() bool { return len(over) > 0 }, 20*time.Millisecond, time.Millisecond, "it is in use")
	close(goOn)
	require.NoError(t, <-asked)
	m.OnCall(nil)
	m.Release(s.Handle())
	require.NoError(t, <-over)
	require.NoError(t, d.System().Drain(t.Context()))
}
