//go:build linux

package publish

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/peertest"
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
	var p *pending
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		p = f.pending
		return p != nil
	}, time.Minute, time.Millisecond)
	require.NoError(t, v.p.Shrink(1000))
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	done, err := f.show(peertest.Context(t), "publish.Follower.Next", p, nil)
	require.NoError(t, err)
	require.False(t, done)
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	require.Equal(t, v.honest.Len(), v.honest.Array().Len())
}
