//go:build linux

package publish_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// rewriterTask says how a publisher in a process of its own rewrites.
type rewriterTask struct {
	mortal
	Followers int
	Tally     string // the file of its rounds, if it counts them
	// First is its first version. Versions go on until the process is killed, or up to Last,
	// which it opens for rewriting, writes one half of, and never announces.
	First, Last uint32
	Turn        bool // it rewrites halves in turn
}

func init() {
	reexec.Register("rewriter", func(c *reexec.Child) error {
		var do rewriterTask
		if err := c.Recv(&do); err != nil {
			return err
		}
		_, err := do.live(func(d *cuda.Device, begin func()) error {
			begin()
			return do.rewrite(c, d)
		})
		return err
	})
}

func (do rewriterTask) rewrite(c *reexec.Child, d *cuda.Device) error {
	w, streams, err := do.Place.rewritten(d, do.N, do.First)
	if err != nil {
		return err
	}
	ctx := context.Background() // reexec bounds the child's life
	if err := errors.Join(c.Send("ready"), w.p.AwaitFollowers(ctx, do.Followers)); err != nil {
		return err
	}
	var rounds tally
	for do.Last == 0 || w.version+1 < do.Last {
		if do.Tally != "" {
			if err := rounds.store(do.Tally); err != nil {
				return err
			}
		}
		rounds.Proven++
		if do.Turn {
			err = w.turn(ctx, streams...)
		} else {
			err = w.next(ctx, publish.RewriteOptions{}, streams...)
		}
		if err != nil {
			return err
		}
	}
	if err := c.Recv(new(string)); err != nil { // followers have read all versions
		return err
	}
	if err := w.p.Rewrite(ctx, publish.RewriteOptions{Turn: do.Turn}); err != nil {
		return err
	}
	from, n := 0, do.N/2
	if do.Turn {
		from, _ = publish.HalfOf(w.p.Stats().Generation+1, do.N)
		n /= 2
	}
	if err := streams[0].Memset(w.array.Ptr()+cuda.Ptr(4*from), byte(do.Last), 4*n); err != nil {
		return err
	}
	if err := errors.Join(streams[0].Synchronize(), c.Send("open")); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// rewritten is newRewritten for a process of its own.
func (p place) rewritten(d *cuda.Device, n int, first uint32) (w *rewritten, streams []*cuda.Stream, err error) {
	l, err := peer.Listen(p.Dir, "s", peer.Options{})
	if err != nil {
		return nil, nil, err
	}
	w = &rewritten{d: d, server: publish.NewServer(publish.ServerOptions{}), version: first}
	go func() { _ = errors.Join(w.server.Serve(context.Background(), l), l.Close()) }()
	if w.array, err = vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)}); err == nil {
		err = w.array.Resize(nil, n)
	}
	if err == nil {
		w.p, err = publish.Array(w.server, "numbers", w.array)
	}
	for range 2 {
		if err == nil {
			var s *cuda.Stream
			s, err = d.NewStream(cuda.StreamOptions{})
			streams = append(streams, s)
		}
	}
	if err == nil {
		err = errors.Join(w.write(streams...), w.announce(streams...))
	}
	return w, streams, err
}

func startRewriter(t *testing.T, do rewriterTask) *reexec.Cmd {
	t.Helper()
	c := reexec.Command(t, "rewriter")
	c.Start()
	c.Send(do)
	var said string
	c.Recv(&said)
	require.Equal(t, "ready", said)
	return c
}

// A publisher dies while it rewrites. Followers show nothing, nobody takes over what is a
// mixture without saying so, and who says so shows nothing before it has announced it.
func TestATakeOverWhileItIsRewritten(t *testing.T) {
	places(t, func(t *testing.T, p place, d *cuda.Device) {
		const n = 1000
		ctx := peertest.Context(t)
		c := startRewriter(t, rewriterTask{mortal: mortal{Place: p, N: n}, Followers: 2, First: 1, Last: 5})
		follow := func(o publish.FollowOptions) *publish.Follower[uint32] {
			k, err := publish.Dial(ctx, p.socket(), publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond, Most: 5 * time.Millisecond}})
			require.NoError(t, err)
			closeLater(t, k)
			f, err := publish.Follow[uint32](ctx, k, d, "numbers", o)
			require.NoError(t, err)
			return f
		}
		heir, other := follow(publish.FollowOptions{KeepDescriptors: true}), follow(publish.FollowOptions{})
		defer func() { require.NoError(t, other.Close()) }()
		for _, f := range []*publish.Follower[uint32]{heir, other} {
			for f.Generation() < 4 {
				require.NoError(t, f.Next(ctx))
			}
			require.NoError(t, f.Release())
		}
		at := other.Array().Ptr()
		c.Send("go on")
		var said string
		c.Recv(&said)
		require.Equal(t, "open", said)
		for _, f := range []*publish.Follower[uint32]{heir, other} {
			require.False(t, f.Intact(4))
		}
		c.Kill()

		server := publish.NewServer(publish.ServerOptions{})
		defer func() { require.NoError(t, server.Close()) }()
		_, err := publish.TakeOver(ctx, server, heir, publish.TakeOverOptions{})
		require.ErrorIs(t, err, publish.ErrIncomplete)
		require.ErrorIs(t, heir.Err(), publish.ErrUnfinished)
		require.Zero(t, heir.Len())
		pub, err := publish.TakeOver(ctx, server, heir, publish.TakeOverOptions{Incomplete: true})
		require.NoError(t, err)
		require.True(t, pub.Stats().Rewriting)
		array := heir.Array()
		defer func() { require.NoError(t, array.Close()) }()
		defer func() { require.NoError(t, pub.Withdraw()) }()
		require.Equal(t, n, array.Len())

		require.NoError(t, pub.AwaitFollowers(ctx, 1)) // the other comes back
		require.ErrorIs(t, other.Next(ctx), publish.ErrUnfinished)
		require.ErrorIs(t, other.Next(briefly(t)), peer.ErrTimeout)
		require.Zero(t, other.Len())
		w := &rewritten{d: d, array: array, p: pub, version: 9}
		s := stream(t, d)
		require.NoError(t, w.write(s))
		require.NoError(t, w.announce(s))
		require.NoError(t, other.Next(ctx))
		require.Equal(t, at, other.Array().Ptr())
		version, err := versionOf(elementsOf(t, other.Array(), s))
		require.NoError(t, err)
		require.EqualValues(t, 9, version)
		require.True(t, other.Intact(other.Generation()))
	})
}

// A publisher dies while it rewrites one half of two in turn. The other half stays whole, for a
// follower that comes back and for the heir, which goes on in turn.
func TestATakeOverWhileOneHalfIsRewritten(t *testing.T) {
	places(t, func(t *testing.T, p place, d *cuda.Device) {
		const n = 1000
		ctx := peertest.Context(t)
		c := startRewriter(t, rewriterTask{mortal: mortal{Place: p, N: n}, Followers: 2, First: 1, Last: 5, Turn: true})
		follow := func(o publish.FollowOptions) *publish.Follower[uint32] {
			k, err := publish.Dial(ctx, p.socket(), publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond, Most: 5 * time.Millisecond}})
			require.NoError(t, err)
			closeLater(t, k)
			f, err := publish.Follow[uint32](ctx, k, d, "numbers", o)
			require.NoError(t, err)
			return f
		}
		heir, other := follow(publish.FollowOptions{KeepDescriptors: true}), follow(publish.FollowOptions{})
		defer func() { require.NoError(t, other.Close()) }()
		s := stream(t, d)
		reads := func(f *publish.Follower[uint32], want uint32) {
			t.Helper()
			for got := uint32(0); got < want; {
				require.NoError(t, f.Next(ctx))
				var err error
				got, err = half(f, s)
				require.NoError(t, err)
				require.LessOrEqual(t, got, want)
			}
		}
		reads(heir, 4)
		reads(other, 4)
		require.NoError(t, heir.Release())
		c.Send("go on")
		var said string
		c.Recv(&said)
		require.Equal(t, "open", said)
		for _, f := range []*publish.Follower[uint32]{heir, other} {
			require.True(t, f.Intact(f.Generation()))
		}
		c.Kill()

		server := publish.NewServer(publish.ServerOptions{})
		defer func() { require.NoError(t, server.Close()) }()
		pub, err := publish.TakeOver(ctx, server, heir, publish.TakeOverOptions{})
		require.NoError(t, err)
		array := heir.Array()
		defer func() { require.NoError(t, array.Close()) }()
		defer func() { require.NoError(t, pub.Withdraw()) }()
		reads(other, 4)
		require.NoError(t, other.Err())
		require.NoError(t, other.Release())
		w := &rewritten{d: d, array: array, p: pub, version: 4}
		require.NoError(t, w.turn(ctx, s))
		reads(other, 5)
	})
}

// mutual says where a process publishes that follows another one.
type mutual struct{ Mine, Theirs place }

func init() {
	reexec.Register("rewrites for each other", func(c *reexec.Child) error {
		var do mutual
		if err := c.Recv(&do); err != nil {
			return err
		}
		_, d, err := do.Mine.open()
		if err != nil {
			return err
		}
		w, streams, err := do.Mine.rewritten(d, 1000, 1)
		if err != nil {
			return err
		}
		ctx := context.Background() // reexec bounds the child's life
		k, err := publish.Dial(ctx, do.Theirs.socket(), publish.DialOptions{Wait: true})
		if err == nil {
			err = k.Await(ctx, "numbers")
		}
		if err != nil {
			return err
		}
		f, err := publish.Follow[uint32](ctx, k, d, "numbers", publish.FollowOptions{})
		if err == nil {
			err = errors.Join(f.Next(ctx, streams[0]), w.p.AwaitFollowers(ctx, 1), c.Send("reads"), c.Recv(new(string)))
		}
		if err != nil {
			return err
		}
		limited, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		err = w.next(limited, publish.RewriteOptions{}, streams...)
		gaveUp := errors.Is(err, peer.ErrTimeout)
		if err != nil && !gaveUp {
			return err
		}
		if err = f.Release(streams[0]); err == nil && gaveUp {
			err = w.next(ctx, publish.RewriteOptions{}, streams...)
		}
		if err = errors.Join(err, c.Send(gaveUp), c.Recv(new(string))); err != nil {
			return err
		}
		return errors.Join(f.Close(), k.Close(), w.server.Close(), w.array.Close())
	})
}

// Two processes that rewrite and follow each other, each of which releases only after its
// own rewriting: the one that gives up gets an error, and both go on.
func TestTwoThatRewriteForEachOther(t *testing.T) {
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		a, b := p, p
		a.Dir, b.Dir = p.Dir+"-a", p.Dir+"-b"
		both := []*reexec.Cmd{reexec.Command(t, "rewrites for each other"), reexec.Command(t, "rewrites for each other")}
		for i, do := range []mutual{{a, b}, {b, a}} {
			both[i].Start()
			both[i].Send(do)
		}
		gaveUp := 0
		for _, c := range both {
			c.Recv(new(string))
		}
		for _, c := range both {
			c.Send("rewrite")
		}
		for _, c := range both {
			var did bool
			if c.Recv(&did); did {
				gaveUp++
			}
		}
		require.NotZero(t, gaveUp, "each waits for the other")
		for _, c := range both {
			c.Send("end")
		}
		for _, c := range both {
			c.Wait()
		}
	})
}
