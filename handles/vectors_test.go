//go:build linux

package handles

import (
	"encoding/hex"
	"fmt"
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
			n, err := transferOf(m)
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
			require.Equal(t, v.Body, hex.EncodeToString(rewritten(t, m).Body))
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
		_, err := transferOf(m)
		if err == nil && v.Kind == wire.Offer {
			_, err = parseOffer(m)
		}
		require.Error(t, err, v.Name)
	}
}

// rewritten reads a message of a transfer and writes it again.
func rewritten(t *testing.T, m peer.Message) peer.Message {
	t.Helper()
	n, err := transferOf(m)
	require.NoError(t, err)
	switch m.Kind {
	case wire.Offer:
		d, err := parseOffer(m)
		require.NoError(t, err)
		back, err := offerMessage(n, &d)
		require.NoError(t, err)
		return back
	case wire.Chunks, wire.Taken:
		return countMessage(m.Kind, n, int(countOf(m)))
	case wire.Fabric:
		back := countMessage(m.Kind, n, int(countOf(m)))
		back.Body = append(back.Body, m.Body[transferHeader+4:]...)
		return back
	case wire.Withdrawn, wire.Declined:
		return reasonMessage(m.Kind, n, fmt.Errorf("%s", m.Body[transferHeader:]))
	}
	return transferMessage(m.Kind, n)
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
