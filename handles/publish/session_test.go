//go:build linux

package publish

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// While a change of one publication waits, a request for it delays no replies to
// the same client about another.
func TestOnePublicationHoldsUpAnother(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	b, err := vmm.NewArray[uint32](v.dev, vmm.BufferOptions{Reserve: 64 << 20, Chunks: vmm.FixedChunks(2 << 20)})
	require.NoError(t, err)
	other, err := Array(v.server, "other", b)
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Withdraw()); require.NoError(t, b.Close()) }()
	k := NewClient(v.dial())
	defer func() { require.NoError(t, k.Close()) }()
	f, err := Follow[uint32](peertest.Context(t), k, v.dev, "other", FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()

	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer s.Close()
	v.p.changes <- struct{}{} // a change that waits
	over := make(chan struct{})
	go func() {
		defer close(over)
		if g, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{}); err == nil {
			_ = g.Close()
		}
	}()
	time.Sleep(100 * time.Millisecond)
	require.NoError(t, b.Resize(nil, 10))
	require.NoError(t, other.Announce(peertest.Context(t), 10, nil))
	err = other.Settle(peertest.Context(t))
	v.p.changes.Give()
	<-over
	require.NoError(t, err, "the other publication")
}
