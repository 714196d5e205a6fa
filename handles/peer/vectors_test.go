//go:build linux

package peer

import (
	"encoding/hex"
	"testing"

	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

func TestPacketsAreThoseOfTheVectors(t *testing.T) {
	v := vectors.Read(t)
	var packets [][]byte
	for _, p := range v.Packets {
		b := p.Layout.Encode(t, p.Fields)
		require.Equal(t, p.Packed, hex.EncodeToString(b), p.Packet)
		packets = append(packets, b)
	}
	require.Equal(t, v.Packets[0].Packed, hex.EncodeToString(greeting(sender, ownVersions)))
	in := &inbound{own: receiver, versions: ownVersions, limits: &link.Limits{MaxFDs: 8}}
	for i, p := range packets[:3] {
		m, err := in.receive(p, someFDs(t, min(i, 1)), false)
		require.NoError(t, err)
		require.Equal(t, i == 2, m != nil)
		if m != nil {
			require.Equal(t, "abcdef", string(m.Body))
			require.Len(t, m.FDs, 2)
			require.NoError(t, m.Close())
		}
	}
	_, err := in.receive(packets[3], nil, false)
	require.ErrorIs(t, err, ErrRefused)
	out := &outbound{version: latestVersion, peer: receiver, sequence: 1}
	p, body, with := out.packet(&Message{Kind: 5, Body: []byte("abcd"), FDs: make([]*FD, 1)}, 0, 0, 1)
	require.Len(t, p, packetHeader+4)
	require.Equal(t, []int{4, 1}, []int{body, with})
	require.Equal(t, packets[1][:28], p[:28], "all but what the whole message has")
}

func TestWarningsOfTheHostileTableAreRefused(t *testing.T) {
	n, open := 0, OpenFDs()
	for _, m := range vectors.ReadRefused(t, "receiver") {
		if m.Kind == wire.Warning {
			n++
			b := mailbox{changed: make(chan struct{})}
			require.ErrorIs(t, b.put(Message{Kind: m.Kind, Body: m.Body, FDs: someFDs(t, m.Files)}), ErrProtocol, m.Name)
			require.Equal(t, open, OpenFDs(), "%s: its files are closed", m.Name)
		}
	}
	require.Positive(t, n)
}
