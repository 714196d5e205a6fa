//go:build linux

package publish_test

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A publication without followers keeps one for later followers.
func TestAPublicationKeepsADescriptor(t *testing.T) {
	peertest.NoLeak(t)
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	s := publish.NewServer(publish.ServerOptions{})
	a, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	p, err := publish.Array(s, "x", a)
	require.NoError(t, err)
	require.NoError(t, gputest.Err(a.AppendUndefined(4*mib)))
	require.NoError(t, p.Announce(peertest.Context(t), a.Len(), nil))
	require.Zero(t, peertest.MemoryFiles(), "no follower was sent anything")

	near, far := peertest.Pair(t, peer.Options{})
	served := make(chan error, 1)
	go func() { served <- s.ServeConn(context.Background(), near) }()
	k := publish.NewClient(far)
	got, err := publish.Open[byte](peertest.Context(t), k, d, "x", handles.ImportOptions{})
	require.NoError(t, err)
	require.NoError(t, got.Close())
	require.NoError(t, k.Close())
	require.NoError(t, near.Close())
	<-served
	// The sender closes its own descriptor in its own time.
	require.Eventually(t, func() bool { return peertest.MemoryFiles() == 2+1 }, peertest.Guard, time.Millisecond)
	require.Never(t, func() bool { return peertest.MemoryFiles() != 2+1 }, 20*time.Millisecond, time.Millisecond)
	require.NoError(t, p.Withdraw())
	require.Equal(t, 2, peertest.MemoryFiles())
	require.NoError(t, s.Close())
	require.NoError(t, a.Close())
}
