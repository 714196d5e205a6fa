//go:build linux

package publish

import (
	"encoding/hex"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/vectors"
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
