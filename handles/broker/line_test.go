//go:build linux

package broker

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A broker that reads nothing keeps no call from ending with its context, and no client from closing.
func TestABrokerThatReadsNothing(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	ctx := peertest.Context(t)
	k, err := NewClient(ctx, near)
	require.NoError(t, err)
	limited, giveUp := context.WithCancel(ctx)
	ended := make(chan error, 2)
	go func() { ended <- k.await(limited, "test", "w", "it") }()
	go func() { ended <- k.await(ctx, "test", "w", "it") }()
	for range 3 { // the number of the client, and the requests
		_, err = far.Receive(ctx)
		require.NoError(t, err)
	}
	for sent := true; sent; {
		limited, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		_, _, err := k.now.request(limited, "test", request{kind: 0xb10b})
		cancel()
		sent = err == nil
		require.True(t, sent || errors.Is(err, context.DeadlineExceeded), err)
	}
	giveUp()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.NoError(t, k.Close())
	require.Error(t, <-ended)
	require.NoError(t, far.Close())
}

// A reply that came counts, even if the connection or the context has ended when the caller looks.
func TestAReplyThatCameCounts(t *testing.T) {
	near, far := peertest.Pair(t, peer.Options{})
	l := &line{c: near, over: make(chan struct{})}
	close(l.over)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		replies := make(chan reply, 1)
		replies <- reply{number: 3}
		got, err := l.next(ctx, "test", replies)
		require.NoError(t, err)
		require.EqualValues(t, 3, got.number)
	}
	require.NoError(t, near.Close())
	require.NoError(t, far.Close())
}
