//go:build linux

package broker

import (
	"context"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A publisher may come back before its last connection is known to have ended, whether or not its process is watched.
func TestAPublisherThatIsBackIsSeen(t *testing.T) {
	for name, dial := range map[string]func(t *testing.T, b *Broker) *Client{
		"inherited": clientOf,
		"watched": func(t *testing.T, b *Broker) *Client {
			l, err := peer.Listen(t.TempDir()+"/sockets", "broker", peer.Options{})
			require.NoError(t, err)
			go func() { _ = b.Serve(context.Background(), l) }()
			t.Cleanup(func() { require.NoError(t, l.Close()) })
			k, err := Dial(peertest.Context(t), l.Path(), DialOptions{})
			require.NoError(t, err)
			return k
		},
	} {
		t.Run(name, func(t *testing.T) {
			peertest.NoLeak(t)
			b, d := newBroker(t)
			k, other, ctx := dial(t, b), dial(t, b), peertest.Context(t)
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
		})
	}
}
