//go:build linux

package publish_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A follower for which the publication has become too large shows what it showed, until the
// publisher rewrites that.
func TestAFollowerWithoutRoomShowsNothingThatWasRewritten(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{Reserve: 1})
		reader := stream(t, d)
		require.NoError(t, f.Next(ctx, reader))

		chunk, err := vmm.GranularityOf(d, vmm.Properties{})
		require.NoError(t, err)
		require.NoError(t, w.array.Resize(w.writer, chunk/2)) // elements of two chunks
		require.NoError(t, w.announce(w.writer))
		require.NoError(t, w.p.Settle(ctx)) // or Next would wait, and release
		require.ErrorIs(t, f.Next(ctx, reader), cuda.ErrCapacity)
		require.Equal(t, 1000, f.Len())
		require.True(t, w.p.Stats().Followers[0].Reads, "its stream still reads what is shown")

		require.NoError(t, f.Release(reader))
		require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
		require.ErrorIs(t, f.Order(reader), publish.ErrRewriting)
		require.ErrorIs(t, f.Next(ctx, reader), cuda.ErrCapacity)
		require.Zero(t, f.Len())
		require.Zero(t, f.Array().Len())
		require.NoError(t, f.Err())
		require.NoError(t, f.Order(reader), "of nothing")
		require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
	})
}

// A generation without elements leaves nothing to read, so Rewrite waits for no follower of it.
func TestAnEmptyGenerationIsNotHeld(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		reader := stream(t, d)
		for _, on := range [][]*cuda.Stream{nil, {reader}} {
			require.NoError(t, f.Next(ctx, on...))
			require.NoError(t, w.p.Shrink(0, w.writer))
			require.NoError(t, w.p.Settle(ctx))
			require.NoError(t, f.Next(ctx, on...), "it releases what it held")
			require.NoError(t, f.Order(reader))
			require.NoError(t, w.p.Rewrite(ctx, publish.RewriteOptions{}))
			require.NoError(t, w.array.Resize(w.writer, 1000))
			require.NoError(t, w.write(w.writer))
			require.NoError(t, w.announce(w.writer))
		}
	})
}

// What was never made is refused, and not used.
func TestNothingIsDoneWithoutAPublicationOrAFollower(t *testing.T) {
	ctx := peertest.Context(t)
	for _, p := range []*publish.Publication{nil, {}} {
		for name, err := range map[string]error{
			"Announce": p.Announce(ctx, 0), "AnnounceRange": p.AnnounceRange(ctx, 0, 0), "Rewrite": p.Rewrite(ctx, publish.RewriteOptions{}),
			"Shrink": p.Shrink(0), "Withdraw": p.Withdraw(), "Settle": p.Settle(ctx), "AwaitFollowers": p.AwaitFollowers(ctx, 1),
			"Released": p.Released().Wait(ctx),
		} {
			require.ErrorIs(t, err, cuda.ErrInvalidArgument, name)
		}
		require.Empty(t, p.Name())
		require.Zero(t, p.Stats())
	}
	server := publish.NewServer(publish.ServerOptions{})
	defer func() { require.NoError(t, server.Close()) }()
	for _, f := range []*publish.Follower[byte]{nil, {}} {
		_, taken := publish.TakeOver(ctx, server, f, publish.TakeOverOptions{})
		for name, err := range map[string]error{
			"Next": f.Next(ctx), "Release": f.Release(), "Order": f.Order(nil), "Err": f.Err(), "Close": f.Close(),
			"CloseAfter": f.CloseAfter(nil), "Released": f.Released().Wait(ctx), "TakeOver": taken,
		} {
			require.ErrorIs(t, err, cuda.ErrInvalidArgument, name)
		}
		require.Nil(t, f.Array())
		require.Zero(t, f.Len())
		require.Zero(t, f.Generation())
		require.False(t, f.Intact(0))
		require.Equal(t, publish.Ended, f.State())
	}
}

// A closed stream is refused, with what to do instead.
func TestReleaseOfAClosedStream(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		f := followed(t, client(t, w.path), d, publish.FollowOptions{})
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		require.NoError(t, f.Next(ctx, s))
		require.NoError(t, s.Close())
		err = f.Release(s)
		require.ErrorIs(t, err, cuda.ErrClosed)
		require.ErrorContains(t, err, "leave it out")
		require.NoError(t, f.Release())
		require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
	})
}
