//go:build linux

package broker

import (
	"encoding/hex"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// This package writes and reads the vectors of objects.
func TestMessagesAreThoseOfTheVectors(t *testing.T) {
	kinds := map[uint16]bool{}
	for _, v := range vectors.Read(t).Objects {
		kinds[v.Kind] = true
		body, err := hex.DecodeString(v.Body)
		require.NoError(t, err)
		m := peer.Message{Kind: v.Kind, Body: body, FDs: make([]*peer.FD, v.Files)}
		again := m
		switch {
		case v.Kind == wire.BrokerHello:
			require.Len(t, body, len(holder{}))
		case v.To == "broker":
			r, e := parseRequest(m)
			again, err = r.pack(), e
		default:
			r, e := parseReply(m)
			again, err = r.pack(), e
		}
		require.NoError(t, err, v.Message)
		require.Equal(t, v.Body, hex.EncodeToString(again.Body), v.Message)
	}
	for k := wire.BrokerHello; k <= wire.BrokerKeep; k++ {
		require.True(t, kinds[k], "kind %#x has no vector", k)
	}
	for k := wire.BrokerDone; k <= wire.BrokerStatus; k++ {
		require.True(t, kinds[k], "kind %#x has no vector", k)
	}
}
