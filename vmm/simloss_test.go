package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A test on the software driver may destroy a context: once everything is closed,
// no leak is reported.
func TestADeviceFaultCanBeTested(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	e, err := d.NewEvent(cuda.EventOptions{})
	require.NoError(t, err)
	h, err := d.NewHostBuffer(4096)
	require.NoError(t, err)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	_, err = b.Append(nil, make([]byte, 100))
	require.NoError(t, err)
	r, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	a, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	mapped, err := r.Map(0, a)
	require.NoError(t, err)

	require.NoError(t, s.Memset(mapped.Ptr(), 1, 10), "no access was granted")
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	require.Contains(t, m.Fault(), "grant it with cuMemSetAccess")
	for _, c := range []closer{mapped, r, a, b, s, e, h} {
		require.NoError(t, c.Close())
	}
	require.Empty(t, sys.Live())
}
