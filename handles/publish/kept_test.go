//go:build linux

package publish

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// keptMemory is memory as a broker keeps it, and its page.
func keptMemory(t *testing.T) (*vmm.Buffer, *Page) {
	_, sys := sim.Open(t, smallChunks)
	memory, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{})
	require.NoError(t, err)
	require.NoError(t, memory.Resize(nil, 1<<20))
	file, err := NewPageFile()
	require.NoError(t, err)
	page := NewPage([16]byte{1}, memory, file)
	t.Cleanup(func() {
		require.NoError(t, page.Close())
		require.NoError(t, memory.Close())
	})
	return memory, page
}

// The next publication may write the page as soon as the one before says that it has ended.
func TestAPageIsFreeOnceItsPublicationHasEnded(t *testing.T) {
	memory, page := keptMemory(t)
	ctx := peertest.Context(t)
	for range 500 {
		server := NewServer(ServerOptions{})
		p, err := server.Publish("weights", memory, PublishOptions{Page: page})
		require.NoError(t, err)
		require.NoError(t, p.Withdraw())
		require.NoError(t, p.Released().Wait(ctx))
		_, err = server.Publish("weights", memory, PublishOptions{Page: page})
		require.NoError(t, err)
		require.NoError(t, server.Close())
	}
}
