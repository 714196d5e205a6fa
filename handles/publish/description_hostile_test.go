//go:build linux

package publish

import (
	"crypto/sha256"
	"fmt"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

func textFile(t testing.TB, text []byte) *peer.FD {
	f, err := exchange.TextFile("test", "a text", text)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// What a server sends for a description is read only if nothing can change it, and taken only if
// it is what was declared.
func TestHostileDescriptionsAreRefused(t *testing.T) {
	const no = `{"bytes":-1}`
	for what, row := range map[string]struct {
		file  func(t *testing.T) *peer.FD
		about described
	}{
		"another digest":         {func(t *testing.T) *peer.FD { return textFile(t, []byte("x")) }, described{textForm, sha256.Sum256([]byte("y"))}},
		"the null device":        {func(t *testing.T) *peer.FD { return peertest.NullFD(t) }, described{textForm, sha256.Sum256(nil)}},
		"a file that may change": {func(t *testing.T) *peer.FD { return memoryFile(t, 0, sealed) }, described{textForm, sha256.Sum256(nil)}},
		"an endless text": {func(t *testing.T) *peer.FD {
			return memoryFile(t, exchange.MaxText+1, sealed|0x8) // F_SEAL_WRITE
		}, described{textForm, [32]byte{1}}},
		"a manifest that is none": {func(t *testing.T) *peer.FD { return textFile(t, []byte(no)) }, described{manifestForm, sha256.Sum256([]byte(no))}},
	} {
		t.Run(what, func(t *testing.T) {
			k, d := fake(t, func(c *peer.Conn, d *cuda.Device, n uint32) {
				_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: token{1}, reserved: 64 << 20, about: about(d), described: row.about},
					memoryFile(t, int64(os.Getpagesize()), sealed), row.file(t)))
			})
			_, err := Follow[uint32](peertest.Context(t), k, d, "numbers", FollowOptions{})
			require.ErrorIs(t, err, peer.ErrProtocol)
			require.ErrorContains(t, err, "a description of publication")
			_, err = k.List(peertest.Context(t))
			require.Error(t, err, "the connection is over")
		})
	}
}

// Whatever a server sends is refused, or is what it declared.
func FuzzDescriptions(f *testing.F) {
	text, err := (&handles.Manifest{Bytes: 8, Tensors: []handles.Tensor{{Name: "x", Element: handles.Int8, Shape: []int{8}}}}).MarshalBinary()
	require.NoError(f, err)
	f.Add(uint8(manifestForm), text)
	f.Add(uint8(textForm), []byte("text"))
	f.Fuzz(func(t *testing.T, is uint8, text []byte) {
		said := &accepted{described: described{form(is % uint8(forms)), sha256.Sum256(text)}}
		d, err := readDescription("test", said, textFile(t, text))
		if err != nil {
			require.Equal(t, manifestForm, said.form, "text of the program is taken as it is")
			require.ErrorIs(t, err, handles.ErrManifest)
			return
		}
		if said.form != noDescription {
			require.Equal(t, said.described, d.described)
			require.Equal(t, fmt.Sprintf("%q", text), fmt.Sprintf("%q", d.text))
		}
		require.Equal(t, said.form == manifestForm, d.manifest != nil)
		if d.manifest != nil {
			require.NoError(t, d.manifest.Validate())
			require.Len(t, d.tensors, len(d.manifest.Tensors))
		}
	})
}
