//go:build linux

package publish

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A request that is given up, before or after it was sent, leaves nothing behind.
func TestRequestsThatAreGivenUpLeaveNothing(t *testing.T) {
	near, far := peertest.Pair(t, peer.Options{})
	k := NewClient(near)
	defer func() { require.NoError(t, k.Close()) }()
	before := runtime.NumGoroutine()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for range 200 {
		_, err := k.List(over)
		require.ErrorIs(t, err, context.Canceled)
		_, _, err = k.now.subscribe(over, opFollower, "numbers", 0, true, possession{})
		require.ErrorIs(t, err, context.Canceled)
	}
	k.now.mu.Lock()
	require.Empty(t, k.now.requests)
	k.now.mu.Unlock()
	require.LessOrEqual(t, runtime.NumGoroutine(), before)
	none, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := far.Receive(none)
	require.ErrorIs(t, err, peer.ErrTimeout, "something was sent")

	// A request that was sent, and whose reply comes later.
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan peer.Message)
	go func() {
		m, _ := far.Receive(context.Background())
		cancel()
		asked <- m
	}()
	_, err = k.List(ctx)
	require.ErrorIs(t, err, context.Canceled)
	m := <-asked
	said, err := toServer(m.Kind, m.Body, 0)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+1 }, peertest.Guard, time.Millisecond) // and that of Eventually
	require.NoError(t, far.Send(peertest.Context(t), pack(&listing{said.(*list).number, nil})))
	require.Eventually(t, func() bool {
		k.now.mu.Lock()
		defer k.now.mu.Unlock()
		return len(k.now.requests) == 0 && k.now.err == nil
	}, peertest.Guard, time.Millisecond)
}

// A context that is over sends nothing, whatever else could be done.
func TestNothingIsSentAfterTheContext(t *testing.T) {
	near, far := peertest.Pair(t, peer.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 200 {
		require.ErrorIs(t, near.Send(ctx, peer.Message{Kind: 1}), context.Canceled)
	}
	none, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := far.Receive(none)
	require.ErrorIs(t, err, peer.ErrTimeout, "something was sent")
}

// A request that is refused together with its connection is known to have failed for that
// reason, so that a client that comes back tries the next one.
func TestARefusedConnectionHasEnded(t *testing.T) {
	full := errs.Peer("publish.Server.Serve", peer.ErrTooLarge, "2 clients, where 1 is the most", "try again")
	for range 1000 {
		near, far := peertest.Pair(t, peer.Options{})
		k := newLine(near)
		refused := make(chan error, 1)
		go func() { refused <- errors.Join(connOf(far).in.Fail(full), far.Close()) }()
		_, _, err := k.subscribe(t.Context(), opFollower, "numbers", 0, true, possession{})
		if !errors.Is(err, peer.ErrGone) { // which a process that has just sent a request may see
			require.ErrorIs(t, err, peer.ErrRefused)
			require.True(t, k.ended(), "%v", err)
		}
		require.ErrorIs(t, <-refused, peer.ErrTooLarge)
		require.NoError(t, k.close())
	}
}
