package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A text is clipped between characters, and is UTF-8 afterwards.
func TestClip(t *testing.T) {
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{"häus", 5, "häus"}, {"häus", 3, "hä"}, {"häus", 2, "h"}, {"häus", 0, ""}, {"h\xffus", 9, "h?us"},
	} {
		require.Equal(t, c.want, Clip(c.text, c.most))
	}
}

// The first value that is missing or wrong is the error, and later ones read as zero.
func TestDecoderStopsAtTheFirstError(t *testing.T) {
	d := Decoder{B: []byte{1, 2, 0}}
	require.EqualValues(t, 1, d.Uint8())
	require.Zero(t, d.Uint32())
	first := d.Err()
	require.ErrorContains(t, first, "2 bytes where 4 more are needed")
	require.Zero(t, d.Uint16())
	require.Empty(t, d.Text(9))
	require.Same(t, first, d.End())
}
