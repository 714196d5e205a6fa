//go:build linux

package handles_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// One descriptor stays open while there is a connection, so that the driver
// does not set up and take down its exports each time.
func TestOneDescriptorIsKeptWhileMemoryIsShared(t *testing.T) {
	peertest.NoLeak(t)
	m, sys := sim.Open(t)
	d := sys.Devices()[0]
	near, far := peertest.Pair(t, peer.Options{})
	a, b, c := filled(t, d, 6*mib, 1), filled(t, d, 2*mib, 2), filled(t, d, 2*mib, 3)
	pass := func(b *vmm.Buffer) *vmm.Buffer { return passBuffer(t, near, far, b, d, handles.ImportOptions{}) }
	ia := pass(a)
	require.Equal(t, 3+1, peertest.MemoryFiles())
	ib := pass(b)
	require.Equal(t, 4+1, peertest.MemoryFiles(), "one is enough")

	// It pins nothing: it is closed before the memory is given back.
	require.NoError(t, ia.Close())
	atRelease := -1
	m.OnCall(func(call string) {
		if call == "cuMemRelease" && atRelease < 0 {
			atRelease = peertest.MemoryFiles()
		}
	})
	require.NoError(t, a.Close())
	m.OnCall(nil)
	require.Equal(t, 4, atRelease)
	require.Equal(t, 1, peertest.MemoryFiles())

	ic := pass(c)
	require.Equal(t, 2+1, peertest.MemoryFiles(), "the next takes its place")
	require.NoError(t, near.Close())
	require.Equal(t, 2+1, peertest.MemoryFiles())
	require.NoError(t, far.Close())
	require.Equal(t, 2, peertest.MemoryFiles(), "nothing is shared any more")
	require.NoError(t, ib.Close())
	require.NoError(t, ic.Close())
}
