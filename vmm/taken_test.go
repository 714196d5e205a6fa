package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Memory is not taken while it is being mapped, until its new mapping counts, and is not
// mapped while it is taken.
func TestMappingMemoryThatIsTaken(t *testing.T) {
	m, sys := sim.Open(t, sim.Options{})
	d := sys.Devices()[0]
	r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	var all []vmm.Physical
	var handles []*phys.Handle
	for range 2 {
		a, err := vmm.Create(d, 2*mib, vmm.Properties{})
		require.NoError(t, err)
		closed(t, a)
		all, handles = append(all, a), append(handles, phys.Of(a))
	}
	closed(t, r)
	access := []vmm.Access{{Location: d.Location(), Mode: vmm.ReadWrite}}
	granted := 0
	m.OnCall(func(call string) {
		if call == "cuMemSetAccess" { // both are mapped, and neither counts
			granted++
			for _, h := range handles {
				require.Zero(t, h.Mappings.Load())
				require.ErrorIs(t, h.Take("test"), cuda.ErrInUse)
			}
		}
	})
	mapped, err := r.MapRun(0, access, all...)
	require.NoError(t, err)
	require.Equal(t, 1, granted)
	for i, h := range handles {
		require.EqualValues(t, 1, h.Mappings.Load())
		require.NoError(t, mapped[i].Close())
	}

	require.NoError(t, handles[1].Take("test"))
	calls := m.Count("cuMemUnmap")
	_, err = r.MapRun(0, access, all...)
	require.ErrorIs(t, err, cuda.ErrSuspended)
	require.Equal(t, calls+1, m.Count("cuMemUnmap"), "the first is mapped no longer")
	require.NoError(t, handles[0].Take("test"), "a run that failed uses nothing")
	require.Equal(t, driver.Success, handles[0].Drop())
	handles[1].Return()
	m.OnCall(nil)
	one, err := r.Map(0, all[1])
	require.NoError(t, err)
	require.NoError(t, one.Close())
}
