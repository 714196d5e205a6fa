//go:build linux

package publish

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// waitsFor reports whether a Rewrite waits for a follower, and ends one that does not.
func waitsFor(t *testing.T, p *Publication) bool {
	ctx, cancel := context.WithTimeout(peertest.Context(t), 30*time.Millisecond)
	defer cancel()
	if err := p.Rewrite(ctx, RewriteOptions{}); err != nil {
		require.ErrorIs(t, err, peer.ErrTimeout)
		return true
	}
	require.NoError(t, p.Announce(peertest.Context(t), int(p.Stats().Length)))
	return false
}

// What is held early for a Next that waits is shown although the publisher wants to rewrite
// it, and ends with a Next that shows nothing.
func TestWhatIsHeldForANextThatWaits(t *testing.T) {
	r, follower := comingBack(t)
	f, ctx := follower.f, peertest.Context(t)
	clear(f.holds.streams) // its stream has read
	require.NoError(t, follower.Release())
	require.False(t, waitsFor(t, r.p))

	// As in a Next whose goroutine does not run yet.
	arrives := func() {
		f.noteWaiting()
		require.NoError(t, r.p.Announce(ctx, r.array.Len()))
		require.NoError(t, r.p.Settle(ctx))
		require.True(t, waitsFor(t, r.p))
	}
	arrives()
	require.NoError(t, f.endNext("test", false))
	require.False(t, waitsFor(t, r.p))

	arrives()
	r.p.mu.Lock()
	r.p.rewriting = opening
	r.p.tellAll()
	wanted := r.p.view.generation
	r.p.mu.Unlock()
	require.NoError(t, follower.Next(ctx))
	require.LessOrEqual(t, follower.Generation(), wanted)
	r.p.setRewriting(settled)

	// What the caller holds is its own: neither Order nor the release of a stream ends it.
	s := newStream(t, f.dev)
	require.NoError(t, follower.Order(s))
	require.NoError(t, follower.Release(s))
	require.True(t, waitsFor(t, r.p))
	r.stop()
}
