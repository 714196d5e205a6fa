//go:build linux

package publish

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// lagging is a follower of two announcements whose work is not done. The first was waited
// for in vain, before the second arrived. The functions let their work end.
func lagging(t *testing.T) (v *victim, end [2]func()) {
	v = newVictim(t, ServerOptions{}, peer.Options{})
	first := v.p.Stats().Generation + 1
	for i := range end {
		s := newStream(t, v.dev)
		end[i] = v.stand(s)
		require.NoError(t, v.array.Resize(nil, v.array.Len()+1000))
		require.NoError(t, v.p.Announce(peertest.Context(t), v.array.Len(), s))
		require.NoError(t, v.p.Settle(peertest.Context(t)))
		v.waitsFor(first)
	}
	return v, end
}

// waitsFor calls Next, which waits for the work of a generation and times out.
func (v *victim) waitsFor(generation uint64) {
	v.Helper()
	for waited := false; !waited; {
		ctx, cancel := context.WithTimeout(v.Context(), 5*time.Millisecond)
		err := v.honest.Next(ctx) // which may time out before it waits for the work
		cancel()
		require.ErrorIs(v, err, peer.ErrTimeout)
		var waits uint64
		if _, after, ok := strings.Cut(err.Error(), "the work of generation "); ok {
			_, err := fmt.Sscan(after, &waits)
			require.NoError(v, err)
			require.Equal(v, generation, waits)
			waited = true
		}
	}
}

// A publisher that goes on only when its follower was shown a generation does not wait for
// ever, although it has announced a later one whose work is not done.
func TestAPublisherInLockstepGoesOn(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	for range 5 {
		require.NoError(t, v.array.Resize(nil, v.array.Len()+1000))
		require.NoError(t, v.p.Announce(peertest.Context(t), v.array.Len()))
		require.NoError(t, v.p.Settle(peertest.Context(t))) // or the follower hears of the later one alone
		complete := v.array.Len()
		s := newStream(t, v.dev)
		end := v.stand(s)
		require.NoError(t, v.array.Resize(nil, v.array.Len()+1000))
		require.NoError(t, v.p.Announce(peertest.Context(t), v.array.Len(), s))
		require.NoError(t, v.p.Settle(peertest.Context(t)))
		ctx, cancel := context.WithTimeout(t.Context(), peertest.Guard)
		for v.honest.Len() < complete {
			require.NoError(t, v.honest.Next(ctx))
		}
		cancel()
		require.Equal(t, complete, v.honest.Len())
		end()
		require.NoError(t, v.honest.Next(peertest.Context(t)))
		require.Equal(t, v.array.Len(), v.honest.Len())
	}
}

// A caller whose limit is shorter than the publisher's lag is shown one generation after
// the other, although a later one has always arrived.
func TestShortCallsOfNextAreShownWhatTheyWaitedFor(t *testing.T) {
	v, end := lagging(t)
	end[0]()
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	require.Equal(t, 2000, v.honest.Len())
	v.waitsFor(v.p.Stats().Generation)
	require.Equal(t, 2000, v.honest.Len())
	end[1]()
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	require.Equal(t, 3000, v.honest.Len())
}

func TestNextPrefersTheLastIfItIsComplete(t *testing.T) {
	v, end := lagging(t)
	end[0]()
	end[1]()
	require.Eventually(t, func() bool { return v.honest.f.reached(v.p.Stats().Generation) }, peertest.Guard, time.Millisecond)
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	require.Equal(t, 3000, v.honest.Len())
}

// Streams wait by themselves, so they are ordered behind the last.
func TestNextWithStreamsShowsTheLast(t *testing.T) {
	v, end := lagging(t)
	require.NoError(t, v.honest.Next(peertest.Context(t), newStream(t, v.dev)))
	require.Equal(t, 3000, v.honest.Len())
	end[0]()
	end[1]()
}

// What was waited for and is taken back meanwhile is not shown.
func TestWhatWasAwaitedAndTakenBackIsNotShown(t *testing.T) {
	v, end := lagging(t)
	end[0]()
	shrunk := make(chan error, 1)
	go func() { shrunk <- v.p.Shrink(10) }()
	end[1]()
	require.NoError(t, <-shrunk)
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	for v.honest.Generation() < v.p.Stats().Generation {
		require.NoError(t, v.honest.Next(peertest.Context(t)))
		require.Equal(t, 10, v.honest.Len())
	}
}

// If the publisher dies, what arrived and is complete is shown before Next returns that,
// although a later generation has arrived that never will be complete.
func TestWhatIsCompleteIsShownAfterThePublisherDied(t *testing.T) {
	v, end := lagging(t)
	end[0]()
	require.Eventually(t, func() bool { return v.honest.f.reached(v.p.Stats().Generation - 1) }, peertest.Guard, time.Millisecond)
	require.NoError(t, v.honest.f.k.conn.Close())
	<-v.honest.f.over
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	require.Equal(t, 2000, v.honest.Len())
	require.ErrorIs(t, v.honest.Next(peertest.Context(t)), cuda.ErrClosed)
	require.NotErrorIs(t, v.honest.Err(), ErrUnfinished)
	end[1]()
}
