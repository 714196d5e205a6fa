//go:build linux

package publish

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A Shrink that waits for the GPU delays only other changes of the
// buffer: followers are told, others come and go, and new contents are announced.
func TestAShrinkThatWaitsForTheGPU(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.announce(1 << 20) // further chunks
	for v.honest.Len() != v.array.Len() {
		require.NoError(t, v.honest.Next(peertest.Context(t)))
	}
	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	v.machine.Hold(s.Handle())
	require.NoError(t, s.Memset(v.array.Ptr(), 0, 4))
	over := make(chan error, 1)
	go func() { over <- v.p.Shrink(1000) }()
	require.Eventually(t, func() bool { return v.honest.Len() == 1000 }, peertest.Guard, time.Millisecond, "the follower is told")
	require.NoError(t, v.p.Announce(peertest.Context(t), 1000, nil))
	other := NewClient(v.dial())
	f, err := Follow[uint32](peertest.Context(t), other, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	require.NoError(t, f.Next(peertest.Context(t)))
	require.Equal(t, 1000, f.Len())
	require.Len(t, v.p.Stats().Followers, 2)
	again := make(chan error, 1) // waits for the first, and delays nothing either
	go func() { again <- v.p.Shrink(500) }()
	require.Never(t, func() bool { return len(over)+len(again) > 0 }, 20*time.Millisecond, time.Millisecond, "the GPU is busy")
	require.NoError(t, v.p.Announce(peertest.Context(t), 1000, nil))
	v.machine.Release(s.Handle())
	require.NoError(t, <-over)
	require.NoError(t, <-again)
	require.Equal(t, 1, v.array.Buffer().Stats().Chunks)
	require.NoError(t, f.Close())
	require.NoError(t, other.Close())
	v.served()
}

// A follower that is ended for the memory that it keeps delays no other, even if its client
// reads nothing any more.
func TestEndingAFollowerDelaysNoOther(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxPinned: 1 << 20}, peer.Options{}, func(l *limits) { l.acknowledging = 0 })
	v.announce(1 << 20)
	near, raw := peertest.Pair(t, peer.Options{})
	told := make(chan struct{})
	c := connOf(near)
	c.in = slowToEnd{c.in, told}
	served := make(chan error, 1)
	go func() { served <- v.server.serve(c, clientOf(near)) }()
	_, _, fds := v.joined(raw)
	require.NoError(t, peer.CloseAll(fds))
	require.NoError(t, v.p.Shrink(1000)) // which raw never acknowledges
	require.Eventually(t, func() bool { return v.p.Stats().Pinned == 4<<20 }, peertest.Guard, time.Millisecond, "the honest one has")
	over := make(chan error, 1)
	go func() { over <- v.p.Shrink(500) }()
	require.Eventually(t, func() bool { return v.p.Stats().Length == 500 }, peertest.Guard, time.Millisecond)
	ctx := peertest.Context(t)
	err := v.p.Announce(ctx, 500, nil)
	grown := make(chan error, 1)
	go func() { grown <- v.array.Resize(nil, 600) }()
	select {
	case growing := <-grown:
		require.NoError(t, growing)
	case <-ctx.Done():
		err = errors.Join(err, ctx.Err())
	}
	close(told)
	require.NoError(t, <-over)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond)
	require.NoError(t, raw.Close())
	require.NoError(t, <-served)
	v.served()
}

// slowToEnd is a connection on which it takes long to tell a follower that it has ended.
type slowToEnd struct {
	link.Conn[peer.Message]
	told chan struct{}
}

func (c slowToEnd) Send(ctx context.Context, op string, m peer.Message) error {
	if said, err := toClient(m.Kind, m.Body, len(m.FDs)); err == nil {
		if _, last := said.(*ended); last {
			<-c.told
		}
	}
	return c.Conn.Send(ctx, op, m)
}

// Err waits for nothing, and Next for its deadline at most, although a stream that Quiesce
// names works on while the connection ends. The array follows later.
func TestTheEndWhileAQuiescedStreamWorks(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.announce(1 << 20)
	ctx := peertest.Context(t)
	own, idle, unfinished := newStream(t, v.dev), newStream(t, v.dev), newStream(t, v.dev)
	k, err := Dial(ctx, v.path, DialOptions{ComeBack: &ComeBack{First: time.Hour, Most: time.Hour}})
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	f, err := Follow[uint32](ctx, k, v.dev, "numbers", FollowOptions{Quiesce: func(int) []*cuda.Stream { return []*cuda.Stream{own} }})
	require.NoError(t, err)
	for f.Len() != v.array.Len() {
		require.NoError(t, f.Next(ctx))
	}
	release := sync.OnceFunc(v.machine.Hold(own.Handle()))
	defer release()
	require.NoError(t, own.Memset(f.Array().Ptr(), 0, 4))
	finish := sync.OnceFunc(v.machine.Hold(unfinished.Handle()))
	defer finish()
	require.NoError(t, unfinished.Memset(v.array.Ptr()+4, 0, 4))
	require.NoError(t, v.p.Announce(ctx, v.array.Len(), unfinished))
	require.NoError(t, f.Next(ctx, idle))
	require.NoError(t, v.p.Shrink(1000, newStream(t, v.dev)))
	require.Eventually(t, func() bool { return f.Len() == 1000 }, peertest.Guard, time.Millisecond, "it waits for the stream")
	v.server.mu.Lock()
	for ss := range v.server.sessions {
		go func() { _ = ss.conn.Close() }()
	}
	v.server.mu.Unlock()
	ended := make(chan [2]error, 1)
	go func() {
		var err error
		for err == nil {
			time.Sleep(time.Millisecond)
			err = f.Err()
		}
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		ended <- [2]error{err, f.Next(short)}
	}()
	select {
	case errs := <-ended:
		require.ErrorIs(t, errs[0], ErrUnfinished)
		require.ErrorIs(t, errs[1], ErrUnfinished)
	case <-time.After(peertest.Guard):
		release()
		require.Fail(t, "Err or Next waits for the stream")
	}
	release()
	finish()
	require.NoError(t, f.Close())
}

// Next returns at its deadline although a stream that Quiesce names works on, whether the
// connection has ended or an announcement is to be shown, and loses nothing.
func TestNextAtItsDeadlineWhileAQuiescedStreamWorks(t *testing.T) {
	for what, test := range map[string]struct{ announced, ends bool }{
		"an announcement":          {announced: true},
		"the end":                  {ends: true},
		"an announcement, the end": {announced: true, ends: true},
	} {
		t.Run(what, func(t *testing.T) {
			v := newVictim(t, ServerOptions{}, peer.Options{})
			v.announce(1 << 20)
			ctx := peertest.Context(t)
			own := newStream(t, v.dev)
			var asked atomic.Bool
			f := v.second(FollowOptions{Quiesce: func(int) []*cuda.Stream {
				asked.Store(true)
				return []*cuda.Stream{own}
			}})
			for f.Len() != v.array.Len() {
				require.NoError(t, f.Next(ctx))
			}
			release := sync.OnceFunc(v.machine.Hold(own.Handle()))
			defer release()
			require.NoError(t, own.Memset(f.Array().Ptr(), 0, 4))
			if test.announced {
				require.NoError(t, v.p.Announce(ctx, v.array.Len(), nil))
				require.Eventually(t, func() bool {
					f.f.mu.Lock()
					defer f.f.mu.Unlock()
					return f.f.sub.last().generation > f.f.sub.current().generation
				}, peertest.Guard, time.Millisecond)
			}
			require.NoError(t, v.p.Shrink(1000, newStream(t, v.dev)))
			require.Eventually(t, func() bool { return asked.Load() && len(f.f.lengths) == 1 }, peertest.Guard, time.Millisecond, "it waits for the stream")
			require.Equal(t, 1000, f.Len())
			if test.ends {
				require.NoError(t, f.f.current().close())
				require.Eventually(t, func() bool { return f.Err() != nil }, peertest.Guard, time.Millisecond)
			}
			short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			next := make(chan error, 1)
			go func() { next <- f.Next(short) }()
			select {
			case err := <-next:
				require.ErrorIs(t, err, peer.ErrTimeout)
			case <-time.After(peertest.Guard):
				release()
				require.Fail(t, "Next waits for the stream")
			}
			release()
			err := f.Next(ctx)
			for test.ends && err == nil {
				err = f.Next(ctx)
			}
			if test.ends {
				require.ErrorIs(t, err, cuda.ErrClosed)
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, f.Len(), f.Array().Len())
			require.NoError(t, f.Close())
		})
	}
}

// A stream that Quiesce names may begin a capture before it is asked: the follower gives
// the elements back when that has ended, and Settle waits.
func TestAShrinkBesideACapture(t *testing.T) {
	for what, length := range map[string]int{"the chunk is kept": 1 << 20, "a chunk is unmapped": 10} {
		t.Run(what, func(t *testing.T) {
			v := newVictim(t, ServerOptions{}, peer.Options{})
			v.announce(1 << 20)
			for v.honest.Len() != v.array.Len() {
				require.NoError(t, v.honest.Next(peertest.Context(t)))
			}
			own := newStream(t, v.dev)
			capturing, finish, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			f := v.second(FollowOptions{Quiesce: func(int) []*cuda.Stream {
				go func() {
					g, err := own.WithCapture(cuda.CaptureOptions{}, func() error { close(capturing); <-finish; return nil })
					ended <- errors.Join(err, g.Close())
				}()
				<-capturing
				return []*cuda.Stream{own}
			}})
			require.NoError(t, v.p.Shrink(length))
			<-capturing
			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, v.p.Settle(short), peer.ErrTimeout)
			for _, s := range v.p.Stats().Followers {
				require.Empty(t, s.Refused)
			}
			close(finish)
			require.NoError(t, <-ended)
			require.NoError(t, v.p.Settle(peertest.Context(t)))
			require.Zero(t, v.p.Stats().Pinned)
			require.NoError(t, f.Close())
		})
	}
}
