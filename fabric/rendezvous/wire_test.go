package rendezvous

import (
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// An event that is read is written back the same, and no bytes make the reader panic
// or accept an invalid event.
func FuzzEvent(f *testing.F) {
	for _, e := range []Event{
		{Kind: Posted, Rank: 3, Step: Step{7, "bind"}, Contribution: Contribution{Body: []byte("body")}},
		{Kind: Failed, Rank: 1, Step: Step{0, ""}, Reason: "no memory"},
		{Kind: Left}, {Kind: Lost, Rank: MaxSize - 1, Reason: "killed"},
	} {
		f.Add(e.message().Body)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := readEvent(peer.Message{Kind: wire.Event, Body: b})
		if err != nil {
			require.ErrorIs(t, err, peer.ErrProtocol)
			return
		}
		require.Less(t, e.Rank, MaxSize)
		require.LessOrEqual(t, len(e.Step.Name), MaxName)
		require.LessOrEqual(t, len(e.Contribution.Body), MaxBody)
		again, err := readEvent(e.message())
		require.NoError(t, err)
		require.Equal(t, e, again)
	})
}

func TestHello(t *testing.T) {
	want := hello{3, 4}
	h, err := readHello(want.message())
	require.NoError(t, err)
	require.Equal(t, want, h)
	for _, b := range [][]byte{nil, make([]byte, 7), make([]byte, 9)} {
		_, err := readHello(peer.Message{Kind: wire.Hello, Body: b})
		require.ErrorIs(t, err, peer.ErrProtocol)
	}
}
