//go:build linux

package publish

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A Next that waits for another goroutine's turn holds nothing: that one may wait for the announcement
// that a Rewrite precedes.
func TestANextThatWaitsForAnotherHoldsNothing(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	f, ctx := v.honest, peertest.Context(t)
	first, second := newStream(t, v.dev), newStream(t, v.dev)
	require.NoError(t, f.Order(second))
	over := make(chan error, 2)
	go func() { over <- f.Next(ctx, first) }()
	require.Eventually(t, func() bool {
		f.f.holds.mu.Lock()
		defer f.f.holds.mu.Unlock()
		return f.f.holds.awaiting
	}, peertest.Guard, time.Millisecond)
	go func() { over <- f.Next(ctx, second) }()
	require.NoError(t, v.p.Rewrite(ctx, RewriteOptions{}))
	require.NoError(t, v.p.Announce(ctx, v.array.Len()))
	require.NoError(t, <-over)
	require.NoError(t, v.p.Withdraw())
	require.ErrorIs(t, <-over, ErrWithdrawn)
}
