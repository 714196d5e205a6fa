//go:build linux

package publish

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// An update that could not be sent in time ends nothing.
func TestUpdatesThatCouldNotBeSent(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	near, file, err := peer.Pair(peer.Options{Timeout: time.Second})
	require.NoError(t, err)
	far, err := peer.Inherit(file, peer.Options{})
	require.NoError(t, err)
	require.NoError(t, link.Of(near).Socket().SetWriteBuffer(4608))
	over := make(chan error, 1)
	go func() { over <- v.server.ServeConn(context.Background(), near) }()
	defer func() { _ = far.Close(); <-over }()
	const n = 40
	tokens := map[token]bool{}
	for i := range n { // each is level before the next comes
		require.NoError(t, far.Send(peertest.Context(t), pack(&follow{number: uint32(i), access: WriteAccess, name: "numbers"})))
		m := v.receive(far)
		require.NoError(t, m.Close())
		said, err := toClient(m.Kind, m.Body, 1)
		require.NoError(t, err)
		to := said.(*accepted).token
		tokens[to] = true
		m = v.receive(far)
		require.NoError(t, m.Close())
		require.NoError(t, far.Send(peertest.Context(t), pack(&done{to, 1, statusOK, 1, ""})))
	}
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	v.announce(10)
	time.Sleep(2 * time.Second) // the client stands still for longer than the limit
	// It goes on: either it is told that it was given up, or it gets all updates.
	ctx := peertest.Context(t)
	for len(tokens) > 0 {
		m, err := far.Receive(ctx)
		if err != nil {
			require.NotErrorIs(t, err, peer.ErrTimeout, "%d followers hear nothing any more on a connection that is open", len(tokens))
			return
		}
		said, err := toClient(m.Kind, m.Body, 0)
		require.NoError(t, err)
		if u, ok := said.(*update); ok {
			delete(tokens, u.token)
		}
	}
}
