//go:build linux

package handles

import (
	"encoding/hex"
	"errors"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// This package writes and reads the vectors of transfers.
func TestTransfersAreThoseOfTheVectors(t *testing.T) {
	kinds := map[uint16]bool{}
	for _, v := range vectors.Read(t).Messages {
		if v.Kind <= peer.MaxKind {
			continue // of publishing
		}
		t.Run(v.Message, func(t *testing.T) {
			kinds[v.Kind] = true
			body, err := hex.DecodeString(v.Body)
			require.NoError(t, err)
			if v.Kind == wire.Warning {
				require.Empty(t, body)
				return
			}
			m := peer.Message{Kind: v.Kind, Body: body, FDs: make([]*peer.FD, v.Files)}
			read, err := parse(m)
			require.NoError(t, err)
			require.EqualValues(t, 1, read.transfer)
			require.Equal(t, v.Body, hex.EncodeToString(rewritten(t, read).Body))
		})
	}
	for k := wire.Offer; k <= wire.LastKind; k++ {
		require.True(t, kinds[k], "kind %#x has no vector", k)
	}
}

func TestTransfersOfTheHostileTableAreRefused(t *testing.T) {
	for _, v := range vectors.ReadRefused(t, "receiver", "sender") {
		if v.Kind == wire.Warning {
			continue // package peer takes those
		}
		m := peer.Message{Kind: v.Kind, Body: v.Body, FDs: make([]*peer.FD, v.Files)}
		read, err := parse(m)
		if err == nil && v.Kind == wire.Offer {
			err = new(Descriptor).UnmarshalBinary(read.rest)
		}
		require.Error(t, err, v.Name)
	}
}

// rewritten writes a message again from what it says.
func rewritten(t testing.TB, m message) peer.Message {
	t.Helper()
	switch m.kind {
	case wire.Offer:
		var d Descriptor
		require.NoError(t, d.UnmarshalBinary(m.rest))
		b, err := d.MarshalBinary()
		require.NoError(t, err)
		m.rest = b
	case wire.Withdrawn, wire.Declined:
		m = failed(m.kind, m.transfer, errors.New(string(m.rest)))
	}
	return m.pack()
}

func TestDescriptorsAreThoseOfTheVectors(t *testing.T) {
	v := vectors.Read(t).Descriptor
	b := v.Layout.Encode(t, v.Fields)
	require.Equal(t, v.Packed, hex.EncodeToString(b))
	var d Descriptor
	require.NoError(t, d.UnmarshalBinary(b))
	back, err := d.MarshalBinary()
	require.NoError(t, err)
	require.Equal(t, b, back)
	require.Equal(t, 1000, d.Length)
	require.Equal(t, []int{2 << 20, 4 << 20}, d.Chunks)
}
