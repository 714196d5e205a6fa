//go:build linux

package publish

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// What another publisher announced before its follower came back is behind that
// publisher's own work, however far the one before had come.
func TestAFollowerThatComesBackWaitsForTheNextPublishersWork(t *testing.T) {
	ctx := peertest.Context(t)
	m, publishers := sim.Open(t, smallChunks)
	_, sys := sim.Open(t, smallChunks)
	r := newRestarting(t, publishers.Devices()[0])
	r.start(2)
	k, err := r.client(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	f, err := Follow[uint32](ctx, k, sys.Devices()[0], "numbers", FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	reader := newStream(t, sys.Devices()[0])
	for range 3 {
		require.NoError(t, f.Next(ctx, reader))
		require.NoError(t, r.p.Announce(ctx, r.array.Len()))
	}
	require.NoError(t, r.p.Settle(ctx))
	r.stop()

	slow := newStream(t, r.dev)
	release := m.Hold(slow.Handle())
	defer release()
	r.start(3, slow)
	require.NoError(t, r.p.AwaitFollowers(ctx, 1))
	require.NoError(t, r.p.Settle(ctx))
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, f.Next(short), peer.ErrTimeout, "the work is not done")
	require.NoError(t, f.Next(ctx, reader))
	require.Equal(t, r.array.Len(), f.Len())
	require.EqualValues(t, r.p.about.Exporter.PID, inspectedFollower{f: f.f, memory: f.f.memory}.InspectFollower().PID, "snapshots name the publisher that lives")
	done, err := reader.Done()
	require.NoError(t, err)
	require.False(t, done, "the stream is ordered behind the work")
	release()
	require.NoError(t, reader.Synchronize())
	r.stop()
}
