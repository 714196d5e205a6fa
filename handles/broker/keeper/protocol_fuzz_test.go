package keeper

import (
	"context"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// Whatever a broker sends as an entry is refused, or means the same when it is written again.
func FuzzEntries(f *testing.F) {
	body := func(key Key, files uint32, record string) []byte {
		e := wire.Encoder{}
		e.Raw(key[:])
		e.Uint32(files)
		e.Blob([]byte(record))
		return e.B
	}
	f.Add(body(Key{1}, 0, "{}"), uint8(0), uint8(0))
	f.Add(body(Key{2}, 3, "a record"), uint8(1), uint8(2))
	f.Add(body(Key{}, 1<<31, ""), uint8(1), uint8(0))
	f.Fuzz(func(t *testing.T, text []byte, files, more uint8) {
		some := func(n uint8) []*peer.FD { return make([]*peer.FD, n%8) }
		rest := func(context.Context) (peer.Message, error) {
			m := peer.Message{Kind: wire.KeepFiles, FDs: some(more)}
			more = 0
			return m, nil
		}
		e, err := receiveEntry(t.Context(), rest, peer.Message{Kind: wire.KeepWrite, Body: text, FDs: some(files)})
		if err != nil {
			require.ErrorIs(t, err, peer.ErrProtocol)
			return
		}
		require.Equal(t, text, body(e.Key, uint32(len(e.Files)), string(e.Record)))
	})
}
