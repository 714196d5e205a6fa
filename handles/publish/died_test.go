//go:build linux

package publish

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// lonely is a follower whose connection has ended, and whose client comes back.
func lonely() *follower {
	m := &mailbox{updates: make(chan arrival), over: make(chan struct{}), why: peer.ErrGone}
	close(m.over)
	f := newFollower(&line{err: peer.ErrGone}, "", &accepted{}, m, nil, FollowOptions{})
	f.client = &Client{options: DialOptions{ComeBack: &ComeBack{}}, ctx: context.Background()}
	return f
}

// A publisher that died while the follower would have come back finishes nothing, although
// the follower is taken over before its mapping goroutine sees the end.
func TestAPublisherThatDiedFinishesNothing(t *testing.T) {
	f := lonely()
	f.sub.lose(peer.ErrGone, seen{complete: 5})
	f.inherit()
	f.work()
	require.False(t, f.comeBack())
	f.finish()
	require.EqualValues(t, 5, f.sub.completed)
	require.ErrorIs(t, f.sub.err(), peer.ErrGone)
	require.Equal(t, Ended, f.sub.state())
}

// The goroutine that maps may see the end of the connection before the watcher has found
// what is complete. Nothing says that it has ended before that.
func TestTheEndIsKnownWithWhatIsComplete(t *testing.T) {
	f := lonely()
	f.client = nil
	f.work()
	require.False(t, f.comeBack())
	require.NoError(t, f.failed())
	require.NotEqual(t, Ended, f.sub.state())
}

// A follower whose wait reaches its limit at the moment when its connection ends stays
// ended: one that came back would show nothing any more.
func TestAFollowerThatStalledDoesNotComeBack(t *testing.T) {
	f := lonely()
	require.True(t, f.mayReturn(f.mailbox.why))
	f.sub.end(ErrStalled, seen{}) // by the watcher
	f.work()
	require.False(t, f.comeBack())
	f.finish()
	require.ErrorIs(t, f.sub.err(), ErrStalled)
}

// A follower that ended while another publisher accepted it leaves that again.
func TestAPublisherThatAcceptsTooLate(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	f := v.second(FollowOptions{})
	require.NoError(t, f.f.k.conn.Close())
	<-f.f.over
	was := f.f.attachment
	next := newLine(v.dial())
	require.ErrorIs(t, f.f.attach(next), cuda.ErrClosed)
	require.Equal(t, was, f.f.attachment)
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond, "the other")
	require.NoError(t, next.close())
	require.NoError(t, f.Close())
	v.served()
}

// A follower that no longer comes back, because a TakeOver of it failed, has ended.
func TestAFailedTakeOverEndsTheFollower(t *testing.T) {
	ctx := peertest.Context(t)
	o := newOrphans(t)
	k, err := Dial(ctx, o.path, DialOptions{ComeBack: &ComeBack{}})
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	f, err := Follow[uint32](ctx, k, o.numbers.f.dev, "numbers", FollowOptions{KeepDescriptors: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	require.NoError(t, f.Next(ctx))
	o.endPublisher()
	require.Eventually(t, func() bool { return f.State() == Stale }, peertest.Guard, time.Millisecond)
	server := NewServer(ServerOptions{})
	o.machine.Inject(sim.Fault{Call: "cuStreamCreate", Result: cuda.Code(driver.Unknown)})
	_, err = TakeOver(ctx, server, f, TakeOverOptions{})
	require.Error(t, err)
	o.machine.ClearFaults()
	require.ErrorIs(t, f.Next(ctx), peer.ErrGone)
	require.ErrorIs(t, f.Err(), peer.ErrGone)
	require.Equal(t, Ended, f.State())
	_, err = TakeOver(ctx, server, f, TakeOverOptions{})
	require.NoError(t, err)
	require.NoError(t, server.Close())
	require.NoError(t, f.Array().Close())
}

// What arrived before the end counts, for Open as for a follower.
func TestOpenTakesWhatArrivedBeforeTheEnd(t *testing.T) {
	near, _ := peertest.Pair(t, peer.Options{})
	k := newLine(near)
	for range 50 {
		b := newMailbox()
		b.updates <- arrival{update: &update{serial: 1, generation: 1, last: true, over: true}}
		b.end(ErrWithdrawn)
		_, err := (&snapshotReader{k: k, op: "test", replica: &replica{unit: 1}}).read(peertest.Context(t), b)
		require.ErrorIs(t, err, cuda.ErrCapacity)
		_, err = (&snapshotReader{k: k, op: "test", replica: &replica{unit: 1}}).read(peertest.Context(t), b)
		require.ErrorIs(t, err, ErrWithdrawn)
	}
	require.NoError(t, k.close())
}

// A follower whose client no longer connects again says so, and that the publisher is gone.
func TestAComeBackWhoseContextEnded(t *testing.T) {
	f := lonely()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f.client.ctx, f.client.now = ended, f.k
	f.sub.lose(peer.ErrGone, seen{})
	require.False(t, f.comeBack())
	require.ErrorIs(t, f.sub.err(), peer.ErrGone)
	require.ErrorContains(t, f.sub.err(), "make another client")
}
