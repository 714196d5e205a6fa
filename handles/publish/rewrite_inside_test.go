//go:build linux

package publish

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// comingBack is a follower of a restarting publisher, which reads generation 1 on a stream.
func comingBack(t *testing.T) (r *restarting, f *Follower[uint32]) {
	_, sys := sim.Open(t, smallChunks)
	r = newRestarting(t, sys.Devices()[0])
	r.start(1)
	k, err := r.client(peertest.Context(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	f, err = Follow[uint32](peertest.Context(t), k, sys.Devices()[0], "numbers", FollowOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	require.NoError(t, f.Next(peertest.Context(t), newStream(t, sys.Devices()[0])))
	return r, f
}

// A publisher that dies when it wants to rewrite, and has not begun to, leaves what it
// announced whole: a generation that was not shown is shown.
func TestAPublisherThatDiesBeforeItRewrites(t *testing.T) {
	r, f := comingBack(t)
	ctx := peertest.Context(t)
	require.NoError(t, r.p.Announce(ctx, r.array.Len()))
	require.NoError(t, r.p.Settle(ctx))
	require.NoError(t, r.p.timeline.stream.Synchronize())
	r.p.mu.Lock() // as it is while Rewrite waits
	r.p.rewriting = opening
	r.p.tellAll()
	for f := range r.p.followers { // a crash does not tell what Withdraw tells
		f.on.cutLater(ErrStalled)
	}
	r.p.mu.Unlock()
	require.Eventually(t, func() bool { return f.State() == Stale || f.State() == Ended }, peertest.Guard, time.Millisecond)
	require.NoError(t, f.Next(ctx))
	require.EqualValues(t, 2, f.Generation())
	r.stop()
}

// What a broker keeps is not whole while it is rewritten, when a follower joins that was further ahead.
func TestAFollowerThatIsAheadOfARewriting(t *testing.T) {
	memory, page := keptMemory(t)
	ctx := peertest.Context(t)
	server := NewServer(ServerOptions{})
	p, err := server.Publish("weights", memory, PublishOptions{Page: page})
	require.NoError(t, err)
	require.NoError(t, p.Announce(ctx, memory.Len()))
	require.NoError(t, p.Rewrite(ctx, RewriteOptions{}))
	require.NoError(t, p.timeline.stream.Synchronize())
	words := p.kept.page.slot
	before := words.seen()
	require.Equal(t, before.complete, before.flux)
	p.changes <- struct{}{}
	require.NoError(t, p.overtake("test", before.complete+10))
	p.changes.Give()
	require.NoError(t, p.timeline.stream.Synchronize())
	require.Equal(t, before.complete, words.seen().complete, "the other word is written by the host, later or never")
	require.NoError(t, p.Announce(ctx, memory.Len()))
	require.NoError(t, p.timeline.stream.Synchronize())
	require.Greater(t, words.seen().complete, words.seen().flux)
	require.NoError(t, server.Close())
}

// A Next that was about to show what its publisher did not finish waits, and holds nothing meanwhile:
// the next publisher may be waiting for that.
func TestANextThatShowsNothingAfterAll(t *testing.T) {
	m, sys := sim.Open(t, smallChunks)
	r, ctx := newRestarting(t, sys.Devices()[0]), peertest.Context(t)
	r.start(1)
	k, err := r.client(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	f, err := Follow[uint32](ctx, k, r.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	s, late := newStream(t, r.dev), newStream(t, r.dev)
	require.NoError(t, f.Next(ctx, s))

	goOn := m.Hold(late.Handle())
	defer goOn()
	require.NoError(t, late.Memset(r.array.Ptr(), 1, 4))
	over := make(chan error, 1)
	go func() { over <- f.Next(ctx, s) }()
	require.Eventually(t, func() bool { return len(r.p.readers()) == 0 }, peertest.Guard, time.Millisecond, "it waits")
	f.f.lengths <- struct{}{} // before it shows anything
	require.NoError(t, r.p.Announce(ctx, r.array.Len(), late))
	require.Eventually(t, func() bool {
		f.f.holds.mu.Lock()
		defer f.f.holds.mu.Unlock()
		return len(f.f.holds.streams) == 1
	}, peertest.Guard, time.Millisecond, "it holds what it is about to show")
	r.p.mu.Lock()
	r.p.rewriting = opening
	r.p.tellAll()
	for f := range r.p.followers {
		go func() { _ = f.on.conn.Close() }() // as if it had died
	}
	r.p.mu.Unlock()
	before := f.f.slot
	require.Eventually(t, func() bool { return f.State() == Stale }, peertest.Guard, time.Millisecond)
	f.f.lengths.Give()
	require.Eventually(t, func() bool {
		f.f.mu.Lock()
		defer f.f.mu.Unlock()
		return f.f.slot != before
	}, peertest.Guard, time.Millisecond, "it comes back")
	require.Eventually(t, func() bool { return len(r.p.readers()) == 0 }, peertest.Guard, time.Millisecond, "it holds nothing")
	r.p.setRewriting(settled)
	goOn()
	require.NoError(t, r.p.Announce(ctx, r.array.Len()))
	require.NoError(t, <-over)
	r.stop()
}

// A publication that is withdrawn while Rewrite, or a suspension, waits is whole, also if they notice that before
// it is Withdraw's turn.
func TestAWithdrawWhileRewriteWaits(t *testing.T) {
	waits := map[string]func(p *Publication, ctx context.Context) error{
		"Rewrite": func(p *Publication, ctx context.Context) error { return p.Rewrite(ctx, RewriteOptions{}) },
		"Suspend": func(p *Publication, ctx context.Context) error {
			_, err := audience{p}.Recall(ctx, "test", 0)
			return err
		},
	}
	for name, wait := range waits {
		for _, late := range []bool{false, true} {
			r, f := comingBack(t)
			ctx := peertest.Context(t)
			require.NoError(t, r.p.Announce(ctx, r.array.Len()))
			require.NoError(t, r.p.Settle(ctx))
			over := make(chan error, 1)
			go func() { over <- wait(r.p, ctx) }() // for the stream
			require.Eventually(t, func() bool { st := r.p.Stats(); return st.Rewriting || st.Suspended }, peertest.Guard, time.Millisecond)
			if late {
				r.p.end()
			} else {
				require.NoError(t, r.p.Withdraw())
			}
			require.ErrorIs(t, <-over, cuda.ErrClosed, name)
			require.NoError(t, r.p.Withdraw())
			require.NoError(t, f.Next(ctx))
			require.EqualValues(t, 2, f.Generation())
			r.stop()
		}
	}
}

// A follower that reads, and comes back to a publisher that took the publication over and may
// be rewriting, shows nothing and says so: nobody waited for it.
func TestAReaderThatComesBackWhileItIsRewritten(t *testing.T) {
	for _, same := range []bool{true, false} {
		r, f := comingBack(t)
		identity := r.p.identity
		require.NoError(t, r.l.Close())
		require.NoError(t, r.server.Close())
		before := r.array
		ctx := peertest.Context(t)

		r.start(1)
		r.p.mu.Lock()
		if same {
			r.p.identity = identity
		}
		r.p.rewriting = opening
		r.p.used, r.p.view.generation = 5, 5
		r.p.tellAll()
		r.p.mu.Unlock()
		require.NoError(t, r.p.AwaitFollowers(ctx, 1))
		if same {
			require.ErrorIs(t, f.Next(ctx), ErrUnfinished)
			require.Zero(t, f.Len())
		} else {
			briefly, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			require.ErrorIs(t, f.Next(briefly), peer.ErrTimeout)
			cancel()
		}
		r.p.setRewriting(settled)
		r.stop()
		require.NoError(t, before.Close())
	}
}

// The next publisher waits for work that was released before it came, and is not done.
func TestWorkThatIsReleasedBeforeTheNextPublisher(t *testing.T) {
	_, publishers := sim.Open(t, smallChunks)
	m, sys := sim.Open(t, smallChunks)
	dev, ctx := sys.Devices()[0], peertest.Context(t)
	r := newRestarting(t, publishers.Devices()[0])
	r.start(1)
	k, err := r.client(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	f, err := Follow[uint32](ctx, k, dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	reader := newStream(t, dev)
	require.NoError(t, f.Next(ctx, reader))
	m.Hold(reader.Handle())
	done := sync.OnceFunc(func() { m.Release(reader.Handle()) })
	t.Cleanup(done)
	require.NoError(t, reader.Memset(f.Array().Ptr(), 0, 4))
	require.NoError(t, f.Release(reader))
	before := f.f.current()
	r.stop()
	r.start(1)
	require.Eventually(t, func() bool { return f.f.current() != before }, peertest.Guard, time.Millisecond)
	require.True(t, waitsFor(t, r.p))
	done()
	require.Eventually(t, func() bool { return !waitsFor(t, r.p) }, peertest.Guard, time.Millisecond)
	r.stop()
}
