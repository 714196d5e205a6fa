//go:build linux

package peer

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// A reason is cut behind a whole character.
func TestReasonsAreCutBetweenCharacters(t *testing.T) {
	for n := range 4 {
		reason := strings.Repeat("x", wire.MaxReason-n) + "€€€"
		near, far := linkedPair(t)
		_ = near.fail(errs.Peer("x", ErrProtocol, reason, ""))
		_, err := far.Receive(moment(t))
		require.ErrorIs(t, err, ErrRefused)
		require.NotContains(t, err.Error(), `\x`)
		require.True(t, utf8.ValidString(wire.Clip(reason, wire.MaxReason)))
	}
}
