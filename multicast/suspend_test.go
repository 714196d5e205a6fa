package multicast_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Memory that is bound stays, and the report names the binding.
func TestAReportNamesBindings(t *testing.T) {
	_, devices := open(t, 2)
	o := complete(t, devices, unit)
	r := made[*vmm.Reservation](t)(vmm.Reserve(devices[0], unit, vmm.ReserveOptions{}))
	a, err := vmm.Create(devices[0], unit, vmm.Properties{})
	require.NoError(t, err)
	m := made[*vmm.Mapping](t)(r.Map(0, a))
	require.NoError(t, a.Close())
	require.NoError(t, r.SetAccess(0, unit, vmm.Access{Location: devices[0].Location(), Mode: vmm.ReadWrite}))
	rest := func() []vmm.Rest {
		preview, err := vmm.Preview(vmm.SuspendOptions{}, m)
		require.NoError(t, err)
		s, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, m)
		require.NoError(t, err)
		require.NoError(t, s.Resume(t.Context()))
		require.Equal(t, preview.Memory[0].Rest, s.Report().Memory[0].Rest)
		return s.Report().Memory[0].Rest
	}
	b, err := o.BindMapping(devices[0], 0, m, 0, unit)
	require.NoError(t, err)
	require.Equal(t, []vmm.Rest{{Bytes: unit, Why: "a multicast binding of 2 MiB on device 0 has it"}}, rest())
	require.NoError(t, b.Close())
	require.Empty(t, rest())
}
