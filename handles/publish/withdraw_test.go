//go:build linux

package publish

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// The stream of a publication whose end could not be marked is closed.
func TestAWithdrawThatFailsGivesEverythingBack(t *testing.T) {
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	s := NewServer(ServerOptions{})
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 << 20})
	require.NoError(t, err)
	p, err := Array(s, "x", a)
	require.NoError(t, err)
	m.Inject(sim.Fault{Call: "cuEventRecord", Result: 1})
	require.Error(t, p.Withdraw())
	m.ClearFaults()
	require.NoError(t, p.Withdraw())
	require.NoError(t, s.Close())
	require.NoError(t, a.Close())
}
