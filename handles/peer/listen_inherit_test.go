//go:build linux

package peer_test

import (
	"net"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A peer that connected while nobody accepted is served by whoever inherits the socket, which stays
// when that one closes it.
func TestAListenerIsInherited(t *testing.T) {
	peertest.NoLeak(t)
	ctx := peertest.Context(t)
	l, err := peer.Listen(t.TempDir()+"/s", "s", peer.Options{})
	require.NoError(t, err)
	for range 2 {
		dialed := make(chan error, 1)
		go func() {
			c, err := peer.Dial(ctx, l.Path(), peer.Options{})
			if err == nil {
				err = c.Send(ctx, peer.Message{Kind: 1, Body: []byte("hello")})
				_ = c.Close()
			}
			dialed <- err
		}()
		f, err := l.File()
		require.NoError(t, err)
		heir, err := peer.InheritListener(f, peer.Options{})
		require.NoError(t, err)
		require.Error(t, f.Close(), "it is the listener's")
		c, err := heir.Accept(ctx)
		require.NoError(t, err)
		who, known := c.Peer()
		require.True(t, known)
		require.Equal(t, os.Getpid(), who.PID)
		m, err := c.Receive(ctx)
		require.NoError(t, err)
		require.Equal(t, "hello", string(m.Body))
		require.NoError(t, <-dialed)
		require.NoError(t, c.Close())
		require.NoError(t, heir.Close())
		require.NoError(t, heir.Close())
	}
	require.NoError(t, l.Close())
	_, err = l.File()
	require.ErrorIs(t, err, cuda.ErrClosed)
}

func TestOtherFilesAreNoListeners(t *testing.T) {
	stream, err := net.Listen("unix", t.TempDir()+"/s")
	require.NoError(t, err)
	defer stream.Close()
	f, err := stream.(*net.UnixListener).File()
	require.NoError(t, err)
	defer f.Close()
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	c, end, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	defer c.Close()
	defer end.Close()
	for _, f := range []*os.File{f, null, end, nil} {
		_, err := peer.InheritListener(f, peer.Options{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
}
