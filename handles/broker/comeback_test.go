//go:build linux

package broker

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
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
