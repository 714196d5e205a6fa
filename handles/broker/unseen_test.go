//go:build linux

package broker

import (
	"context"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A publisher that cannot be watched may come back before its last connection is known to have ended.
func TestAPublisherThatIsBackIsSeen(t *testing.T) {
	peertest.NoLeak(t)
	b, d := newBroker(t)
	inherited := func() *Client {
		near, far := peertest.Pair(t, peer.Options{})
		go func() { _ = b.ServeConn(context.Background(), far) }()
		k, err := NewClient(peertest.Context(t), near)
		require.NoError(t, err)
		return k
	}
	k, other, ctx := inherited(), inherited(), peertest.Context(t)
	w, err := k.Keep(ctx, d, "weights", KeepOptions{Bytes: 1})
	require.NoError(t, err)
	b.unpublish(k.number, counter)
	_, err = other.Keep(ctx, d, "weights", KeepOptions{Bytes: 1})
	require.ErrorIs(t, err, ErrWriting)
	require.NoError(t, w.Close())
	w, err = other.Keep(ctx, d, "weights", KeepOptions{Bytes: 1})
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.NoError(t, other.Remove(ctx, "weights", 0))
	require.NoError(t, k.Close())
	require.NoError(t, other.Close())
}
