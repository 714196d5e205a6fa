//go:build linux

package broker

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// raw is a client that sends what it likes.
type raw struct {
	t     *testing.T
	c     *peer.Conn
	ended chan error
}

// against makes a broker and a raw client of it, which has said hello unless it is silent.
func against(t *testing.T, b *Broker, silent bool) *raw {
	near, far := peertest.Pair(t, peer.Options{})
	if silent {
		peertest.SetTimeout(far, 50*time.Millisecond)
	}
	x := &raw{t, near, make(chan error, 1)}
	go func() { x.ended <- b.ServeConn(context.Background(), far) }()
	if !silent {
		x.send(peer.Message{Kind: wire.BrokerHello, Body: bytes.Repeat([]byte{9}, 16)})
	}
	return x
}

func (x *raw) send(m peer.Message) { require.NoError(x.t, x.c.Send(peertest.Context(x.t), m)) }

// ask sends a request, and returns the reply.
func (x *raw) ask(r request) reply {
	r.number = 7
	x.send(r.pack())
	m, err := x.c.Receive(peertest.Context(x.t))
	require.NoError(x.t, err)
	got, err := parseReply(m)
	require.NoError(x.t, err)
	require.EqualValues(x.t, 7, got.number)
	return got
}

// refused requires that a request is denied for a reason, and that the session goes on.
func (x *raw) refused(kind error, r request) {
	x.t.Helper()
	got := x.ask(r)
	require.Equal(x.t, wire.BrokerDenied, got.kind, "%+v", got)
	require.ErrorIs(x.t, got.err("test"), kind)
}

func newBroker(t *testing.T) (*Broker, *cuda.Device) {
	d := gputest.Software(t)
	b, err := New(t.Context(), d.System(), Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b, d
}

func TestClientsThatBreakTheProtocolAreCutOff(t *testing.T) {
	peertest.NoLeak(t)
	b, _ := newBroker(t)
	for name, c := range map[string]struct {
		silent bool
		do     func(x *raw)
		kind   error
	}{
		"says nothing":          {true, func(*raw) {}, peer.ErrTimeout},
		"begins with no hello":  {true, func(x *raw) { x.send((&request{kind: wire.BrokerList}).pack()) }, peer.ErrProtocol},
		"has a number of zeros": {true, func(x *raw) { x.send(peer.Message{Kind: wire.BrokerHello, Body: make([]byte, 16)}) }, peer.ErrProtocol},
		"says hello twice":      {false, func(x *raw) { x.send(peer.Message{Kind: wire.BrokerHello, Body: make([]byte, 16)}) }, peer.ErrProtocol},
		"sends a reply":         {false, func(x *raw) { x.send((&reply{kind: wire.BrokerDone}).pack()) }, peer.ErrProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			x := against(t, b, c.silent)
			c.do(x)
			require.ErrorIs(t, <-x.ended, c.kind)
		})
	}
}

// What is wrong with a request is said, and the session goes on.
func TestRequestsThatAreRefused(t *testing.T) {
	peertest.NoLeak(t)
	b, d := newBroker(t)
	x := against(t, b, false)
	create := request{kind: wire.BrokerCreate, key: keeper.Key{1}, name: "w", device: d.UUID(), bytes: 1 << 20}
	elsewhere, huge := create, create
	elsewhere.device[0]++
	huge.bytes = maxBytes
	x.refused(cuda.ErrNotSupported, elsewhere)
	mine := create
	copy(mine.key[:], bytes.Repeat([]byte{9}, 16))
	x.refused(peer.ErrRefused, mine) // which would be the entry of the client
	x.refused(cuda.ErrOutOfMemory, huge)
	x.refused(ErrUnknown, request{kind: wire.BrokerAttach, name: "w"})
	x.refused(ErrUnknown, request{kind: wire.BrokerRemove, name: "w"})
	x.refused(ErrLost, request{kind: wire.BrokerHold, key: create.key})
	require.Equal(t, wire.BrokerDone, x.ask(request{kind: wire.BrokerRelease, key: create.key}).kind)

	got := x.ask(create)
	require.Equal(t, wire.BrokerObject, got.kind)
	memory, err := handles.ReceiveBuffer(peertest.Context(t), x.c, d, handles.ImportOptions{})
	require.NoError(t, err)
	x.refused(ErrWriting, request{kind: wire.BrokerAttach, name: "w"})
	x.refused(ErrWriting, request{kind: wire.BrokerRemove, name: "w"})
	manifest := func(text string) *peer.FD {
		f, err := exchange.TextFile("test", "a manifest", []byte(text))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, f.Close()) })
		return f
	}
	good := manifest(`{"bytes":1048576,"tensors":null}`)
	null := peertest.NullFD(t)
	for _, f := range []*peer.FD{null, manifest(""), manifest("{"), manifest(`{"bytes":5,"tensors":null}`), manifest(`{"bytes":-1,"tensors":null}`)} {
		got := x.ask(request{kind: wire.BrokerCommit, key: create.key, manifest: f})
		require.Equal(t, wire.BrokerDenied, got.kind)
	}
	x.refused(ErrLost, request{kind: wire.BrokerCommit, key: keeper.Key{2}, manifest: good})

	// Another client knows the key.
	other := clientOf(t, b)
	err = other.on(peertest.Context(t), "test", func(_ context.Context, l *line) error {
		_, err := l.do(peertest.Context(t), "test", request{kind: wire.BrokerCommit, key: create.key, manifest: good})
		return err
	})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.NoError(t, other.Close())

	require.EqualValues(t, 1, x.ask(request{kind: wire.BrokerCommit, key: create.key, manifest: good}).version)
	require.EqualValues(t, 1, x.ask(request{kind: wire.BrokerCommit, key: create.key, manifest: good}).version, "again, since the reply may have been lost")
	x.refused(ErrLost, create)
	require.NoError(t, memory.Close())
	require.NoError(t, x.c.Close())
	require.NoError(t, <-x.ended)
	require.NoError(t, null.Close())
}

// More waits than a client may have end its session, and nobody else's.
func TestAClientThatWaitsTooOften(t *testing.T) {
	peertest.NoLeak(t)
	b, d := newBroker(t)
	k := clientOf(t, b)
	w, err := k.Create(peertest.Context(t), d, "w", CreateOptions{Bytes: 1})
	require.NoError(t, err)
	x := against(t, b, false)
	for i := range maxAwaits + 1 {
		x.send((&request{kind: wire.BrokerAwait, number: uint32(i), name: "w"}).pack())
	}
	require.ErrorIs(t, <-x.ended, peer.ErrProtocol)
	o, err := w.Commit(peertest.Context(t), nil)
	require.NoError(t, err)
	require.NoError(t, o.Close())
	require.NoError(t, k.Close())
}

// A client that has the reply to a request may send another, however many wait beside it.
func TestARequestThatHasItsReplyDoesNotCount(t *testing.T) {
	peertest.NoLeak(t)
	b, d := newBroker(t)
	k, ctx := clientOf(t, b), peertest.Context(t)
	x := against(t, b, false)
	sent := uint32(0)
	await := func(name string) {
		sent++
		x.send((&request{kind: wire.BrokerAwait, number: sent, name: name}).pack())
	}
	for range 50 {
		w, err := k.Create(ctx, d, "w", CreateOptions{Bytes: 1})
		require.NoError(t, err)
		for range maxAwaits {
			await("w")
		}
		require.Equal(t, wire.BrokerStatus, x.ask(request{kind: wire.BrokerAsk}).kind, "the broker has all of them")
		require.NoError(t, w.Close())
		for n := range 2 * maxAwaits {
			_, err := x.c.Receive(ctx)
			require.NoError(t, err)
			if n < maxAwaits {
				await("nothing") // which is not written
			}
		}
	}
	require.NoError(t, x.c.Close())
	require.NoError(t, <-x.ended)
	require.NoError(t, k.Close())
}

// Requests whose replies a client does not read count.
func TestAClientThatReadsNoReplies(t *testing.T) {
	peertest.NoLeak(t)
	b, _ := newBroker(t)
	x := against(t, b, false)
	for n, err := uint32(0), error(nil); err == nil; n++ {
		require.Less(t, n, uint32(1<<16), "it is cut off")
		err = x.c.Send(peertest.Context(t), (&request{kind: wire.BrokerAwait, number: n, name: "nothing"}).pack())
	}
	require.ErrorIs(t, <-x.ended, peer.ErrProtocol)
}
