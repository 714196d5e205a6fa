//go:build linux

package handles

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// A sender that remembers a downgrade which the receiver does not goes on by
// descriptor, and both count that.
func TestTheSenderAloneRemembers(t *testing.T) {
	var devices []*cuda.Device
	folder := t.TempDir()
	for range 2 {
		_, s := sim.Open(t, sim.Options{Folder: folder, Fabric: sim.Fabric{Channels: []int{0}}})
		devices = append(devices, s.Devices()[0])
	}
	near, f, err := Pair(Options{})
	require.NoError(t, err)
	far, err := Inherit(f, Options{})
	require.NoError(t, err)
	near.carried.sent.Reason = "as it was before"
	m, err := vmm.Create(devices[0], 2<<20, vmm.Properties{Handles: vmm.PosixFD | vmm.Fabric})
	require.NoError(t, err)
	var group errgroup.Group
	group.Go(func() error { return SendAllocation(t.Context(), near, m) })
	i, err := ReceiveAllocation(t.Context(), far, devices[1], ImportOptions{})
	require.NoError(t, err)
	require.NoError(t, group.Wait())
	require.Equal(t, Carried{Descriptor: 1, Downgraded: 1, Reason: "as it was before"}, near.Transfers().Sent)
	require.Equal(t, 1, far.Transfers().Received.Downgraded)
	require.Contains(t, far.Transfers().Received.Reason, "the sender went on")
	require.NoError(t, i.Close())
	require.NoError(t, m.Close())
	require.NoError(t, near.Close())
	require.NoError(t, far.Close())
}
