//go:build linux

package handles

import (
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A receiver that may open no more files refuses the object, and the connection
// goes on.
func TestAnObjectWhoseDescriptorsDoNotFit(t *testing.T) {
	h := newHostile(t, peertest.Guard)
	h.offer(h.honest, h.memory(2))
	open := peer.OpenFDs()
	peertest.NoRoom(t, func() {
		_, err := ReceiveBuffer(peertest.Context(t), h.far, h.d, ImportOptions{})
		require.ErrorIs(t, err, peer.ErrTruncated)
		require.ErrorContains(t, err, "ulimit -n")
	})
	require.Equal(t, open, peer.OpenFDs())
	near := inside(t, h.near)
	near.mu.Lock()
	near.out.begun = h.offers
	near.out.ended = h.offers
	near.mu.Unlock()
	over := make(chan error, 1)
	go func() { over <- near.offerHandles(peertest.Context(t), "test", &h.honest, h.chunks) }()
	got, err := ReceiveBuffer(peertest.Context(t), h.far, h.d, ImportOptions{})
	require.NoError(t, err)
	require.NoError(t, <-over)
	require.NoError(t, got.Close())
}
