//go:build linux

package publish_test

import (
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/internal/peertest"
	"github.com/stretchr/testify/require"
)

// What goroutines append is announced by one that names no stream: no follower's stream
// sees an element before the append that made it is done.
func TestWhatWasAppendedIsAnnounced(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	server, path := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	k := client(t, path)
	f := followed(t, k, d, publish.FollowOptions{ReadOnly: true, Align: 4 << 20})
	require.Zero(t, uint64(f.Array().Ptr())%(4<<20))
	reader := stream(t, d)
	for round := range 3 {
		var writers sync.WaitGroup
		before := a.Len()
		for range 4 {
			s := stream(t, d)
			writers.Go(func() {
				require.NoError(t, gputest.Err(a.Append(s, counting(7, 1000))))
				require.NoError(t, gputest.Err(a.Append(s, counting(8, 1000))))
			})
		}
		writers.Wait()
		require.NoError(t, p.AnnounceAppended(peertest.Context(t)))
		require.Equal(t, before+8000, p.Stats().Length, "round %d", round)
		require.NoError(t, f.Next(peertest.Context(t), reader))
		require.Equal(t, a.Len(), f.Len())
	}
	require.NoError(t, p.AnnounceAppended(peertest.Context(t)), "of nothing new")
	require.Equal(t, a.Len(), p.Stats().Length)
}

// An append on a stream that captures is refused, and the capture goes on.
func TestNothingIsAnnouncedOfACapture(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	server, _ := publishing(t, publish.ServerOptions{})
	a, p := published(t, server, d)
	s := stream(t, d)
	require.NoError(t, gputest.Err(a.Append(s, counting(0, 10))))
	shown := p.Stats().Length
	g, err := s.WithCapture(cuda.CaptureOptions{Mode: cuda.CaptureGlobal}, func() error {
		require.ErrorIs(t, p.AnnounceAppended(peertest.Context(t)), cuda.ErrCapturing)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, g.Close())
	require.Equal(t, shown, p.Stats().Length)
	require.NoError(t, p.AnnounceAppended(peertest.Context(t)))
	require.Equal(t, a.Len(), p.Stats().Length)
}
