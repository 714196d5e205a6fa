package rendezvous

import (
	"encoding/hex"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// This package writes and reads the vectors of groups.
func TestGroupsAreThoseOfTheVectors(t *testing.T) {
	all := vectors.Read(t)
	kinds := map[uint16]bool{}
	for _, v := range all.Groups {
		kinds[v.Kind] = true
		body, err := hex.DecodeString(v.Body)
		require.NoError(t, err)
		m := peer.Message{Kind: v.Kind, Body: body}
		again := m
		switch v.Kind {
		case wire.Hello:
			var h hello
			h, err = readHello(m)
			again = h.message()
		case wire.OtherSize:
			var size uint32
			size, err = readOtherSize(m)
			again = otherSize(int(size))
		case wire.Event:
			var e Event
			e, err = readEvent(m)
			again = e.message()
		default:
			require.Empty(t, body)
		}
		require.NoError(t, err, v.Message)
		require.Equal(t, v.Body, hex.EncodeToString(again.Body), v.Message)
	}
	for k := wire.Hello; k <= wire.OtherSize; k++ {
		require.True(t, kinds[k], "kind %#x has no vector", k)
	}
}
