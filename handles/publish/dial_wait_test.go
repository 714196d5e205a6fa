//go:build linux

package publish_test

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// With Wait the client may start before its publisher, and before the folder exists.
func TestDialWaitsForAPublisher(t *testing.T) {
	d := gputest.Software(t)
	path := filepath.Join(t.TempDir(), "private", "server")
	_, err := publish.Dial(t.Context(), path, publish.DialOptions{})
	require.Error(t, err)
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = publish.Dial(short, path, publish.DialOptions{Wait: true})
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "start the process that serves it")
	type dialed struct {
		k   *publish.Client
		err error
	}
	all := make(chan dialed, 1)
	go func() {
		k, err := publish.Dial(peertest.Context(t), path, publish.DialOptions{Wait: true})
		all <- dialed{k, err}
	}()
	time.Sleep(20 * time.Millisecond) // it has tried, most likely
	p := publisherAt(t, d, path)
	defer p.close()
	got := <-all
	require.NoError(t, got.err)
	list, err := got.k.List(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.NoError(t, got.k.Close())
	// Nothing else is waited for.
	_, err = publish.Dial(t.Context(), path, publish.DialOptions{Wait: true, Options: peer.Options{Allow: func(peer.Credentials) error { return peer.ErrPeer }}})
	require.ErrorIs(t, err, peer.ErrPeer)
}

// A client that is there first waits for the process that publishes, and for the publication.
func TestAwaitingAPublication(t *testing.T) {
	d := gputest.Software(t)
	path := filepath.Join(t.TempDir(), "d", "s")
	l, err := peer.Listen(filepath.Dir(path), "s", peer.Options{})
	require.NoError(t, err)
	s := publish.NewServer(publish.ServerOptions{})
	go func() { _ = s.Serve(t.Context(), l) }()
	k, err := publish.Dial(peertest.Context(t), path, publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond}})
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err = k.Await(short, "numbers")
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, `nothing is published as "numbers"`)
	require.ErrorIs(t, k.Await(peertest.Context(t), ""), cuda.ErrInvalidArgument)

	awaited := make(chan error, 1)
	go func() { awaited <- k.Await(peertest.Context(t), "numbers") }()
	require.NoError(t, l.Close())
	require.NoError(t, s.Close())
	next := publisherAt(t, d, path)
	defer next.close()
	require.NoError(t, <-awaited)
	f := followed(t, k, d, publish.FollowOptions{})
	require.NoError(t, f.Close())

	once, err := publish.Dial(peertest.Context(t), path, publish.DialOptions{})
	require.NoError(t, err)
	require.NoError(t, once.Await(peertest.Context(t), "numbers"))
	require.NoError(t, once.Close())
	require.ErrorIs(t, once.Await(peertest.Context(t), "numbers"), cuda.ErrClosed)
}
