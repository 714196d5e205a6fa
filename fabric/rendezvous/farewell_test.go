//go:build linux

package rendezvous

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// A rank that has just joined receives the reason why the host gives up, even if the host
// closes its group at once.
func TestARankThatJustJoinedHearsWhy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "private")
	for range 300 {
		host, path, err := Host(dir, "", 3, Options{})
		require.NoError(t, err)
		joined, heard := make(chan struct{}), make(chan error, 1)
		go func() {
			g, err := Join(t.Context(), path, 1, 3, Options{})
			close(joined)
			if err == nil {
				err = g.Barrier(t.Context(), "start")
				_ = g.Close()
			}
			heard <- err
		}()
		<-joined
		host.Fail(errors.New("the reason"))
		require.NoError(t, host.Close())
		require.ErrorContains(t, <-heard, "the reason")
	}
}

// A rank that dies is found gone, with what it sent before, whichever of the host's two
// goroutines for it notices first.
func TestARankThatDiesIsReadToItsEnd(t *testing.T) {
	near, far := peertest.Pair(t, peer.Options{})
	m := &member{rank: 1, conn: near, out: newQueue(), sent: make(chan struct{})}
	require.NoError(t, far.Send(t.Context(), peer.Message{Kind: wire.Left}))
	require.NoError(t, far.Close())
	m.out.put(Event{Kind: Left, Rank: 2})
	m.send()
	msg, err := near.Receive(t.Context())
	require.NoError(t, err)
	require.Equal(t, uint16(wire.Left), msg.Kind)
	_, err = near.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrGone)
}

// Ranks may start before their host.
func TestJoinWaitsForItsHost(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "private")
	_, err := Join(t.Context(), filepath.Join(dir, "group"), 1, 2, Options{Timeout: 20 * time.Millisecond})
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "no process serves")
	joined := make(chan error, 1)
	go func() {
		g, err := Join(t.Context(), filepath.Join(dir, "group"), 1, 2, Options{Timeout: peertest.Guard})
		if err == nil {
			err = g.Close()
		}
		joined <- err
	}()
	time.Sleep(10 * time.Millisecond) // it has tried, most likely
	host, _, err := Host(dir, "group", 2, Options{})
	require.NoError(t, err)
	require.NoError(t, <-joined)
	require.NoError(t, host.Close())
}

func TestNegativeTimeoutsAreRefused(t *testing.T) {
	o := Options{Timeout: -1}
	_, err := InProcess(2, o)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, _, err = Host(t.TempDir(), "", 2, o)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = Join(t.Context(), "nowhere", 1, 2, o)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "or more")
}
