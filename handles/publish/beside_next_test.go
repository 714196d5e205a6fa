//go:build linux

package publish

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A goroutine that reads while another one calls Next finds elements wherever Len says.
func TestTheArrayHasWhatLenSaysBesideNext(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	f := v.honest
	done := make(chan struct{})
	read := make(chan error, 1)
	go func() {
		for {
			n := f.Len()
			if _, err := f.Array().Slice(0, n); err != nil {
				read <- err
				return
			}
			select {
			case <-done:
				read <- nil
				return
			default:
			}
		}
	}()
	for range 500 {
		v.announce(8)
		require.NoError(t, f.Next(peertest.Context(t)))
	}
	close(done)
	require.NoError(t, <-read)
}

// An update that was replaced while Next ordered the streams is not shown, although its
// memory is given back by then.
func TestAnUpdateThatWasReplacedIsNotShown(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	f := v.honest.f
	v.announce(1_000_000)
	var c candidate
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		c = candidate{f.sub.pending, f.sub.cuts}
		return c.generation > 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, v.p.Shrink(1000))
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	done, err := f.show(peertest.Context(t), "publish.Follower.Next", c, nil)
	require.NoError(t, err)
	require.False(t, done)
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	require.Equal(t, v.honest.Len(), v.honest.Array().Len())
}

// Next on the host shows what is complete, though the publisher's work is always one
// announcement behind.
func TestNextDoesNotStarveBehindNewerAnnouncements(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	f := v.honest.f
	first, second := newStream(t, v.dev), newStream(t, v.dev)
	goOn, goOnAgain := v.stand(first), v.stand(second)
	arrives := func(n int, s *cuda.Stream) {
		require.NoError(t, v.array.Resize(nil, n))
		require.NoError(t, v.p.Announce(peertest.Context(t), n, s))
		require.Eventually(t, func() bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.sub.pending.length == n
		}, peertest.Guard, time.Millisecond)
	}
	arrives(2000, first)
	f.mu.Lock()
	c := candidate{f.sub.pending, f.sub.cuts}
	f.mu.Unlock()
	arrives(3000, second) // while Next waits for the first
	goOn()
	done, err := f.show(peertest.Context(t), "publish.Follower.Next", c, nil)
	require.NoError(t, err)
	require.True(t, done)
	require.Equal(t, 2000, v.honest.Len())
	goOnAgain()
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	require.Equal(t, 3000, v.honest.Len())
	require.Equal(t, 3000, v.honest.Array().Len())
}
