//go:build linux

package handles

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/stretchr/testify/require"
)

// A Shrink that waits for the GPU holds up nobody but those who change the
// buffer: followers are told, others come and go, and new contents are announced.
func TestAShrinkThatWaitsForTheGPU(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	v.announce(1 << 20) // further chunks
	for v.honest.Len() != v.array.Len() {
		require.NoError(t, v.honest.Next(moment(t)))
	}
	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	v.machine.Hold(s.Handle())
	require.NoError(t, s.Memset(v.array.Ptr(), 0, 4))
	over := make(chan error, 1)
	go func() { over <- v.p.Shrink(1000) }()
	require.Eventually(t, func() bool { return v.honest.Len() == 1000 }, 20*time.Second, time.Millisecond, "the follower is told")
	require.NoError(t, v.p.Announce(moment(t), 1000, nil))
	other := NewClient(v.dial())
	f, err := Follow[uint32](moment(t), other, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	require.NoError(t, f.Next(moment(t)))
	require.Equal(t, 1000, f.Len())
	require.Len(t, v.p.Stats().Followers, 2)
	again := make(chan error, 1) // waits for the first, and holds up nobody either
	go func() { again <- v.p.Shrink(500) }()
	require.Never(t, func() bool { return len(over)+len(again) > 0 }, 20*time.Millisecond, time.Millisecond, "the GPU is busy")
	require.NoError(t, v.p.Announce(moment(t), 1000, nil))
	v.machine.Release(s.Handle())
	require.NoError(t, <-over)
	require.NoError(t, <-again)
	require.Equal(t, 1, v.array.Buffer().Stats().Chunks)
	require.NoError(t, f.Close())
	require.NoError(t, other.Close())
	v.served()
}
