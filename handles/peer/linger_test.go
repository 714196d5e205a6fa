//go:build linux

package peer_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// Files whose close takes as long as their sender likes hold up nothing, received or
// unread.
func TestFilesThatAreLongInClosing(t *testing.T) {
	t.Run("unread", func(t *testing.T) {
		near, far := peertest.Pair(t, peer.Options{})
		peertest.SendLingering(t, far, peer.Message{Kind: 1})
		peertest.InTime(t, "Conn.Close", near.Close)
	})
	t.Run("taken by the program", func(t *testing.T) {
		near, far := peertest.Pair(t, peer.Options{})
		peertest.SendLingering(t, far, peer.Message{Kind: 1})
		m, err := near.Receive(peertest.Context(t))
		require.NoError(t, err)
		require.Len(t, m.FDs, 1)
		peertest.InTime(t, "Message.Close", m.Close)
	})
	t.Run("duplicated", func(t *testing.T) {
		near, far := peertest.Pair(t, peer.Options{})
		peertest.SendLingering(t, far, peer.Message{Kind: 1})
		m, err := near.Receive(peertest.Context(t))
		require.NoError(t, err)
		d, err := m.FDs[0].Dup()
		require.NoError(t, err)
		require.NoError(t, m.Close())
		peertest.InTime(t, "FD.Close", d.Close) // the last one of the file
	})
}
