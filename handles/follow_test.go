//go:build linux

package handles

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A follower's own limit of chunks is its error alone.
func TestALimitOfChunksIsTheFollowersErrorAlone(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	k := NewClient(v.dial())
	defer func() { require.NoError(t, k.Close()) }()
	a, err := Follow[uint32](moment(t), k, v.dev, "numbers", FollowOptions{MaxChunks: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	b, err := Follow[uint32](moment(t), k, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.NoError(t, a.Next(moment(t)))
	require.NoError(t, b.Next(moment(t)))
	v.announce(1_000_000)
	require.ErrorIs(t, a.Next(moment(t)), ErrTooLarge)
	require.NoError(t, b.Next(moment(t)), "the other follower of the same client")
	require.NoError(t, b.Err())
}
