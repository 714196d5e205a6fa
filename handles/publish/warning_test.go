//go:build linux

package publish

import (
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A follower takes what it was warned of, and what it was not.
func TestFollowersAreWarned(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	for range 3 {
		v.p.warn()
		v.announce(1 << 19) // one chunk
		for v.honest.Len() != v.array.Len() {
			require.NoError(t, v.honest.Next(peertest.Context(t)))
		}
	}
	v.served()
}
