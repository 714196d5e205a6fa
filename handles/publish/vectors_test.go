//go:build linux

package publish

import (
	"encoding/hex"
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/stretchr/testify/require"
)

// This package writes and reads what the vectors say of publishing.
func TestMessagesAreThoseOfTheVectors(t *testing.T) {
	kinds := map[uint16]bool{}
	for _, v := range vectors.Read(t).Messages {
		if v.Kind > peer.MaxKind {
			continue // of transfers
		}
		t.Run(v.Message, func(t *testing.T) {
			kinds[v.Kind] = true
			body, err := hex.DecodeString(v.Body)
			require.NoError(t, err)
			said, err := readAny(v.Kind, body, v.Files)
			require.NoError(t, err)
			require.Equal(t, v.Body, hex.EncodeToString(pack(said).Body))
			require.Equal(t, v.Kind, said.kind())
		})
	}
	for _, m := range said {
		require.True(t, kinds[m.kind()], "%T has no vector", m)
	}
}

func TestMessagesOfTheHostileTableAreRefused(t *testing.T) {
	for side, read := range map[string]func(uint16, []byte, int) (message, error){"server": toServer, "client": toClient} {
		for _, m := range vectors.ReadRefused(t, side) {
			_, err := read(m.Kind, m.Body, m.Files)
			require.ErrorIs(t, err, peer.ErrProtocol, m.Name)
		}
	}
}

// A live server closes the connection that such a message came on, and serves the others.
func TestServersRefuseTheHostileTable(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	for _, m := range vectors.ReadRefused(t, "server") {
		if said, ok := refused(t, m); ok {
			c := v.dial()
			require.NoError(t, c.Send(peertest.Context(t), said), m.Name)
			_, err := c.Receive(peertest.Context(t))
			require.ErrorIs(t, err, peer.ErrRefused, m.Name)
			require.NoError(t, c.Close())
		}
	}
	v.served()
}

// A live client closes its connection, and fails its request by the violation.
func TestClientsRefuseTheHostileTable(t *testing.T) {
	for _, m := range vectors.ReadRefused(t, "client") {
		said, ok := refused(t, m)
		if !ok {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			k, d := fake(t, func(c *peer.Conn, _ *cuda.Device, _ uint32) { _ = c.Send(peertest.Context(t), said) })
			_, err := Follow[uint32](peertest.Context(t), k, d, "numbers", FollowOptions{})
			if !errors.Is(err, peer.ErrTooLarge) { // more descriptors than any message brings
				require.ErrorIs(t, err, peer.ErrProtocol)
			}
			require.Error(t, err)
		})
	}
}

// refused is a message of the table with descriptors that are nothing, if it is of a
// kind that programs can send.
func refused(t *testing.T, m vectors.Refused) (peer.Message, bool) {
	said := peer.Message{Kind: m.Kind, Body: m.Body}
	for range m.Files {
		said.FDs = append(said.FDs, peertest.NullFD(t))
	}
	return said, 0 < m.Kind && m.Kind <= peer.MaxKind
}
