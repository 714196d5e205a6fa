//go:build linux

package broker

import (
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
)

// A user who connects as often as it can leaves room for the others.
func TestAUserLeavesRoomForOthers(t *testing.T) {
	b := &Broker{ofUser: map[uint32]int{}}
	const other, another = 4242, 4243
	entered := 0
	for b.enter(other) == nil {
		entered++
	}
	require.ErrorIs(t, b.enter(other), peer.ErrTooLarge)
	require.LessOrEqual(t, entered, maxSessions/othersShare)
	require.NoError(t, b.enter(another))
	for _, uid := range []uint32{0, uint32(os.Geteuid())} {
		for range entered + 1 {
			require.NoError(t, b.enter(uid))
		}
	}
	b.leave(other)
	require.NoError(t, b.enter(other))
	b.leave(another)
	require.NotContains(t, b.ofUser, uint32(another))
}
