package pool_test

import (
	"bytes"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// A device that is granted a pool's memory later reaches what the pool has and what it makes,
// with one driver call for each run of chunks.
func TestGrantReachesOldAndNewMemory(t *testing.T) {
	m, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	d, peer := sys.Devices()[0], sys.Devices()[1]
	s, theirs := stream(t, d), stream(t, peer)
	p := newPool(t, d, pool.Options{})
	access := vmm.Access{Location: peer.Location(), Mode: vmm.ReadWrite}
	var blocks []pool.Block
	for _, n := range []int{kib, 3 * mib, 64 * mib} {
		blocks = append(blocks, alloc(t, p, s, n))
	}
	_, err := p.Alloc(pool.Request{Bytes: kib, Stream: theirs})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)

	m.Inject(sim.Fault{Call: "cuMemSetAccess", After: 1, Result: 999})
	require.Error(t, p.Grant(access))
	m.ClearFaults()
	m.ResetCounts()
	require.NoError(t, p.Grant(access))
	require.LessOrEqual(t, m.Count("cuMemSetAccess"), 3, "a call covers a run of chunks")
	m.ResetCounts()
	require.NoError(t, p.Grant(access))
	require.Zero(t, m.Count("cuMemSetAccess"), "it has it")

	blocks = append(blocks, alloc(t, p, s, 128*mib), alloc(t, p, theirs, 5*mib))
	back := newPool(t, peer, pool.Options{})
	to := alloc(t, back, theirs, mib)
	for i, b := range blocks {
		n := min(b.Bytes(), mib)
		require.NoError(t, s.Memset(b.Ptr(), byte(i+1), n))
		require.NoError(t, s.Synchronize())
		require.NoError(t, theirs.Copy(to.Ptr(), b.Ptr(), n))
		got := make([]byte, n)
		require.NoError(t, theirs.Download(got, to.Ptr()))
		require.Equal(t, bytes.Repeat([]byte{byte(i + 1)}, n), got)
	}
	require.NoError(t, s.Synchronize())
	require.NoError(t, theirs.Synchronize())
	free(t, back, to)
	for _, b := range blocks {
		free(t, p, b)
	}
}
