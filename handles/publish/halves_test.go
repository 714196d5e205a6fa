//go:build linux

package publish_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// turn rewrites the half that is not shown.
func (w *rewritten) turn(ctx context.Context, streams ...*cuda.Stream) error {
	if err := w.p.Rewrite(ctx, publish.RewriteOptions{Turn: true}); err != nil {
		return err
	}
	w.version++
	from, to := publish.HalfOf(w.p.Stats().Generation+1, w.array.Len())
	for i, s := range streams { // each stream writes a part
		at, n := from+i*(to-from)/len(streams), (to-from)/len(streams)
		if err := s.Memset(w.array.Ptr()+cuda.Ptr(4*at), byte(w.version), 4*n); err != nil {
			return err
		}
	}
	return w.announce(streams...)
}

// half reads the half that the follower shows, and returns its version.
func half(f *publish.Follower[uint32], s *cuda.Stream) (uint32, error) {
	from, to := publish.HalfOf(f.Generation(), f.Len())
	part, err := f.Array().Slice(from, to)
	if err != nil {
		return 0, err
	}
	got := make([]uint32, to-from)
	if err := part.CopyTo(s, got); err != nil {
		return 0, err
	}
	return versionOf(got)
}

// Readers of halves that are rewritten in turn see no mixture, and each version is intact while
// they hold it.
func TestHalvesInTurn(t *testing.T) {
	const versions = 100
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 100_000)
		other, ctx := stream(t, d), peertest.Context(t)
		reading, stop := context.WithCancel(ctx)
		defer stop()
		var reads sync.WaitGroup
		for i := range 3 {
			f, s := followed(t, client(t, w.path), d, publish.FollowOptions{ReadOnly: true}), stream(t, d)
			on := []*cuda.Stream{s}[min(i, 1):]
			reads.Go(func() {
				for last := uint32(0); f.Next(reading, on...) == nil; {
					version, err := half(f, s)
					intact := f.Intact(f.Generation())
					if err != nil || version < last || !intact {
						t.Errorf("reader %d: %v: version %d after %d, intact: %v", i, err, version, last, intact)
						return
					}
					last = version
				}
			})
		}
		for w.version < versions {
			require.NoError(t, w.turn(ctx, w.writer, other))
			if w.version%30 == 0 { // a follower that comes late
				f := followed(t, client(t, w.path), d, publish.FollowOptions{})
				require.NoError(t, f.Next(ctx, other))
				got, err := half(f, other)
				require.NoError(t, err)
				require.LessOrEqual(t, got, w.version)
				require.NoError(t, f.Release(other))
			}
		}
		stop()
		reads.Wait()
	})
}

// While one half is written the other one is read: what was shown is held, begun, and intact. The
// readers of the older half alone are waited for.
func TestOneHalfCanBeReadAtAnyTime(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		w := newRewritten(t, d, 1000)
		ctx := peertest.Context(t)
		follow := func() *publish.Follower[uint32] {
			return followed(t, client(t, w.path), d, publish.FollowOptions{})
		}
		reader, slow := follow(), follow()
		reads := func(f *publish.Follower[uint32], want uint32) {
			t.Helper()
			got, err := half(f, w.writer)
			require.NoError(t, err)
			require.Equal(t, want, got)
			require.True(t, f.Intact(f.Generation()))
		}
		require.NoError(t, w.turn(ctx, w.writer))
		require.NoError(t, slow.Next(ctx)) // holds version 2
		require.NoError(t, w.turn(ctx, w.writer))
		require.NoError(t, reader.Next(ctx)) // holds version 3
		reads(slow, 2)

		briefly, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, w.turn(briefly, w.writer), peer.ErrTimeout, "the half of version 2 is read")
		reads(slow, 2)
		reads(reader, 3)
		require.NoError(t, slow.Release())
		require.NoError(t, w.p.Rewrite(ctx, publish.RewriteOptions{Turn: true}), "although version 3 is read")
		require.False(t, slow.Intact(slow.Generation()))
		reads(reader, 3)
		late := follow()
		require.NoError(t, late.Next(ctx))
		reads(late, 3)
		require.ErrorIs(t, w.p.Shrink(10, w.writer), cuda.ErrInUse)
		require.NoError(t, w.announce(w.writer))
		for _, f := range []*publish.Follower[uint32]{reader, late} {
			require.NoError(t, f.Release())
		}

		// Another length needs all elements.
		require.NoError(t, w.array.Resize(w.writer, 1100))
		require.ErrorIs(t, w.announce(w.writer), cuda.ErrInUse)
		require.ErrorIs(t, w.p.Shrink(10, w.writer), cuda.ErrInUse)
		require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
		require.NoError(t, w.p.Shrink(999, w.writer))
		require.ErrorIs(t, w.p.Rewrite(ctx, publish.RewriteOptions{Turn: true}), cuda.ErrInvalidArgument, "odd")
	})
}
