//go:build linux

package publish_test

import (
	"context"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// publisher serves one array at a socket.
type publisher struct {
	t      *testing.T
	l      *peer.Listener
	server *publish.Server
	array  *vmm.Array[uint32]
	p      *publish.Publication
}

func publisherAt(t *testing.T, d *cuda.Device, path string) *publisher {
	t.Helper()
	l, err := peer.Listen(filepath.Dir(path), filepath.Base(path), peer.Options{})
	require.NoError(t, err)
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 << 20, Chunks: vmm.FixedChunks(2 << 20)})
	require.NoError(t, err)
	s := publish.NewServer(publish.ServerOptions{})
	go func() { _ = s.Serve(context.Background(), l) }()
	p, err := publish.Array(s, "numbers", a)
	require.NoError(t, err)
	return &publisher{t, l, s, a, p}
}

// announce appends n times the same number.
func (p *publisher) announce(n int, value uint32) {
	p.t.Helper()
	some := make([]uint32, n)
	for i := range some {
		some[i] = value
	}
	require.NoError(p.t, gputest.Err(p.array.Append(nil, some)))
	require.NoError(p.t, p.p.Announce(peertest.Context(p.t), p.array.Len()))
}

func (p *publisher) close() {
	p.t.Helper()
	require.NoError(p.t, p.l.Close())
	require.NoError(p.t, p.server.Close())
	require.NoError(p.t, p.array.Close())
}

// shows checks that a follower has n times one number and nothing else.
func shows(t *testing.T, f *publish.Follower[uint32], n int, value uint32) {
	t.Helper()
	require.Equal(t, n, f.Len())
	got := make([]uint32, n)
	require.NoError(t, f.Array().All().CopyTo(nil, got))
	require.Len(t, slices.DeleteFunc(got, func(v uint32) bool { return v != value }), n, "elements of another publisher")
}

func TestAFollowerComesBackToAPublisherThatRestarts(t *testing.T) {
	d := gputest.Software(t)
	path := filepath.Join(t.TempDir(), "private", "server")
	ctx := peertest.Context(t)
	first := publisherAt(t, d, path)
	first.announce(600_000, 1)
	k, err := publish.Dial(ctx, path, publish.DialOptions{ComeBack: &publish.ComeBack{}})
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	f, err := publish.Follow[uint32](ctx, k, d, "numbers", publish.FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	require.NoError(t, f.Next(ctx))
	require.Equal(t, publish.Live, f.State())
	shows(t, f, 600_000, 1)
	at, generation := f.Array().Ptr(), f.Generation()
	for value := uint32(2); value < 5; value++ {
		first.close()
		require.Eventually(t, func() bool { return f.State() == publish.Stale }, peertest.Guard, time.Millisecond)
		require.NoError(t, f.Err())
		shows(t, f, 600_000, value-1)
		first = publisherAt(t, d, path)
		require.NoError(t, first.p.AwaitFollowers(ctx, 1))
		require.Equal(t, publish.Stale, f.State(), "nothing was announced yet")
		shows(t, f, 600_000, value-1)
		first.announce(600_000, value)
		require.NoError(t, f.Next(ctx))
		require.Equal(t, publish.Live, f.State())
		shows(t, f, 600_000, value)
		require.Equal(t, at, f.Array().Ptr())
		require.Greater(t, f.Generation(), generation)
		generation = f.Generation()
		require.NoError(t, first.p.Settle(ctx))
	}
	first.close()
}

// The end of one publication is told though the connection stays, for others on it.
func TestOneOfTwoPublicationsIsWithdrawn(t *testing.T) {
	d := gputest.Software(t)
	ctx := peertest.Context(t)
	path := filepath.Join(t.TempDir(), "private", "server")
	first := publisherAt(t, d, path)
	first.announce(1000, 1)
	b, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 2 << 20})
	require.NoError(t, err)
	other, err := publish.Array(first.server, "other", b)
	require.NoError(t, err)
	for _, back := range []*publish.ComeBack{nil, {}} {
		k, err := publish.Dial(ctx, path, publish.DialOptions{ComeBack: back})
		require.NoError(t, err)
		f, err := publish.Follow[uint32](ctx, k, d, "other", publish.FollowOptions{})
		require.NoError(t, err)
		g, err := publish.Follow[uint32](ctx, k, d, "numbers", publish.FollowOptions{})
		require.NoError(t, err)
		require.NoError(t, other.Withdraw())
		require.ErrorIs(t, f.Next(ctx), publish.ErrWithdrawn)
		require.ErrorIs(t, f.Err(), publish.ErrWithdrawn)
		require.Equal(t, publish.Ended, f.State())
		require.NoError(t, g.Next(ctx))
		shows(t, g, 1000, 1)
		require.NoError(t, f.Close())
		require.NoError(t, g.Close())
		require.NoError(t, k.Close())
		other, err = publish.Array(first.server, "other", b)
		require.NoError(t, err)
	}
	require.NoError(t, other.Withdraw())
	require.NoError(t, b.Close())
	first.close()
}

// A connection that ends before the follower is accepted, or is refused for lack of room,
// is followed by another one.
func TestAFollowerComesBackThroughConnectionsThatEnd(t *testing.T) {
	d := gputest.Software(t)
	ctx := peertest.Context(t)
	path := filepath.Join(t.TempDir(), "private", "server")
	first := publisherAt(t, d, path)
	first.announce(1000, 1)
	k, err := publish.Dial(ctx, path, publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond, Most: time.Millisecond}})
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	f, err := publish.Follow[uint32](ctx, k, d, "numbers", publish.FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	require.NoError(t, f.Next(ctx))
	first.close()

	l, err := peer.Listen(filepath.Dir(path), filepath.Base(path), peer.Options{})
	require.NoError(t, err)
	for range 20 {
		c, err := l.Accept(ctx)
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
	full := publish.NewServerForOne()
	near, far := peertest.Pair(t, peer.Options{})
	go func() { _ = full.ServeConn(ctx, near) }()
	occupant := publish.NewClient(far)
	_, err = occupant.List(ctx)
	require.NoError(t, err)
	for range 5 {
		c, err := l.Accept(ctx)
		require.NoError(t, err)
		require.ErrorIs(t, full.ServeConn(ctx, c), peer.ErrTooLarge)
	}
	require.NoError(t, occupant.Close())
	require.NoError(t, l.Close())
	require.NoError(t, full.Close())

	second := publisherAt(t, d, path)
	second.announce(2000, 2)
	require.NoError(t, f.Next(ctx))
	shows(t, f, 2000, 2)
	second.close()
}
