//go:build linux

package publish

import (
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
)

// A publisher that died while the follower would have come back finishes nothing, although
// the follower is taken over before its mapping goroutine sees the end.
func TestAPublisherThatDiedFinishesNothing(t *testing.T) {
	m := &mailbox{updates: make(chan arrival), over: make(chan struct{}), why: peer.ErrGone}
	f := newFollower(nil, &accepted{}, m, nil, FollowOptions{})
	f.died, f.completed = true, 5
	f.take()
	close(m.over)
	f.work()
	require.EqualValues(t, 5, f.completed)
	require.ErrorIs(t, f.gone, peer.ErrGone)
	require.Equal(t, Ended, f.state)
}
