//go:build linux

package broker

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// An object that is closed while its client tells the next broker that it holds it is released there.
func TestWhatIsClosedDuringAComeBackIsReleased(t *testing.T) {
	peertest.NoLeak(t)
	ctx := peertest.Context(t)
	b, err := vmm.NewBuffer(gputest.Software(t), vmm.BufferOptions{})
	require.NoError(t, err)
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	accept := func() *peer.Conn {
		c, err := l.Accept(ctx)
		require.NoError(t, err)
		m, err := c.Receive(ctx)
		require.NoError(t, err)
		require.Equal(t, wire.BrokerHello, m.Kind)
		return c
	}
	dialed := make(chan *Client, 1)
	go func() {
		k, _ := Dial(ctx, l.Path(), DialOptions{ComeBack: publish.ComeBack{Most: 10 * time.Millisecond}})
		dialed <- k
	}()
	first := accept()
	k := <-dialed
	require.NotNil(t, k)
	o := &Object{k: k, key: keeper.Key{7}, buffer: b}
	k.hold(o)
	require.NoError(t, first.Close())

	second := accept()
	next := func(kind uint16) request {
		m, err := second.Receive(ctx)
		require.NoError(t, err)
		r, err := parseRequest(m)
		require.NoError(t, err)
		require.Equal(t, kind, r.kind)
		require.Equal(t, o.key, r.key)
		return r
	}
	held := next(wire.BrokerHold)
	require.NoError(t, o.Close()) // the connection that it knows has ended
	require.NoError(t, second.Send(ctx, (&reply{kind: wire.BrokerDone, number: held.number}).pack()))
	released := next(wire.BrokerRelease)
	require.NoError(t, second.Send(ctx, (&reply{kind: wire.BrokerDone, number: released.number}).pack()))
	require.NoError(t, k.Close())
	require.NoError(t, second.Close())
	require.NoError(t, l.Close())
}

// A broker that ended before it replied may have removed what the next one does not know.
func TestARemoveWhoseReplyIsLost(t *testing.T) {
	peertest.NoLeak(t)
	ctx := peertest.Context(t)
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	accept := func() *peer.Conn {
		c, err := l.Accept(ctx)
		require.NoError(t, err)
		_, err = c.Receive(ctx)
		require.NoError(t, err)
		return c
	}
	next := func(c *peer.Conn) request {
		m, err := c.Receive(ctx)
		require.NoError(t, err)
		r, err := parseRequest(m)
		require.NoError(t, err)
		require.Equal(t, wire.BrokerRemove, r.kind)
		return r
	}
	ended := make(chan error, 2)
	var k *Client
	dialed := make(chan struct{})
	go func() {
		defer close(dialed)
		k, err = Dial(ctx, l.Path(), DialOptions{ComeBack: publish.ComeBack{Most: 10 * time.Millisecond}})
	}()
	first := accept()
	<-dialed
	require.NoError(t, err)
	go func() { ended <- k.Remove(ctx, "w", 0) }()
	next(first)
	require.NoError(t, first.Close())
	second := accept()
	unknown := errs.Peer("test", ErrUnknown, "w", "")
	require.NoError(t, second.Send(ctx, denial(next(second).number, unknown).pack()))
	require.NoError(t, <-ended)
	go func() { ended <- k.Remove(ctx, "w", 0) }()
	require.NoError(t, second.Send(ctx, denial(next(second).number, unknown).pack()))
	require.ErrorIs(t, <-ended, ErrUnknown)

	// A request that was not sent leaves nothing that waits for its reply.
	over, cancel := context.WithCancel(ctx)
	cancel()
	for range 3 {
		_, err = k.List(over)
		require.ErrorIs(t, err, context.Canceled)
	}
	require.Empty(t, k.line().replies)
	require.NoError(t, k.Close())
	require.NoError(t, second.Close())
	require.NoError(t, l.Close())
}
