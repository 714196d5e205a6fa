//go:build linux

package publish

import (
	"context"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// More chunks than may be open are sent in smaller batches.
func TestALowLimitOfOpenFiles(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 72, Max: old.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	require.NoError(t, v.array.Resize(nil, 20<<19)) // 20 chunks, of which 18 may be open
	require.NoError(t, v.p.Announce(peertest.Context(t), v.array.Len(), nil))
	require.NoError(t, v.honest.Next(peertest.Context(t)))
}

// A client that does not read holds descriptors that others wait for.
func TestADeafClientStarvesNoOther(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 96, Max: old.Max})) // 24 may be open
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	deaf := v.dial()
	to, u, fds := v.joined(deaf)
	require.NoError(t, peer.CloseAll(fds))
	require.NoError(t, deaf.Send(peertest.Context(t), pack(&done{to, u.serial, statusOK, 1, ""})))
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	for range 400 { // its side of the connection is full now
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		err := deaf.Send(ctx, pack(&list{1}))
		cancel()
		if err != nil {
			break
		}
	}
	v.announce(15 << 19) // 15 chunks, or less: on their way to both
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	v.announce(14 << 19) // the deaf one has 15 of 24
	st := v.p.Stats()
	require.Len(t, st.Followers, 2, "the announcement waited until the deaf one was given up")
	require.Contains(t, []uint64{st.Followers[0].Generation, st.Followers[1].Generation}, uint64(1), "it reads")
}

// A follower that cannot be sent memory at once for lack of descriptors gets it later,
// and is not dropped.
func TestAFollowerThatWaitsForDescriptorsIsNotDropped(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	near, far := peertest.Pair(t, peer.Options{})
	peertest.SetTimeout(near, time.Second)
	go func() { _ = v.server.ServeConn(context.Background(), near) }()
	k := NewClient(far)
	defer func() { require.NoError(t, k.Close()) }()
	f, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	require.NoError(t, f.Next(peertest.Context(t)))
	all, err := exchange.Exports.Acquire(t.Context(), "test", 1, 1<<30)
	require.NoError(t, err)
	v.announce(1_000_000) // waits for no descriptors, or for ever
	time.Sleep(3 * time.Second)
	exchange.Exports.Give(all)
	for _, follower := range []*Follower[uint32]{v.honest, f} {
		for follower.Len() != v.array.Len() {
			require.NoError(t, follower.Next(peertest.Context(t)))
		}
	}
	require.Eventually(t, func() bool { return exchange.Exports.Used() == 0 }, peertest.Guard, time.Millisecond)
}

// A follower without room for descriptors misses a generation, and no more.
func TestAnUpdateWhoseDescriptorsDoNotFit(t *testing.T) {
	refused := make(chan *done, 1)
	k, d := fake(t, func(c *peer.Conn, d *cuda.Device, n uint32) {
		to := token{1}
		exchanged := func(u *update, files ...*peer.FD) *done {
			_ = c.Send(context.Background(), pack(u, files...))
			m, err := c.Receive(context.Background())
			if err != nil {
				return nil
			}
			said, _ := toServer(m.Kind, m.Body, 0)
			ack, _ := said.(*done)
			return ack
		}
		null := peertest.NullFD(t)
		_ = c.Send(context.Background(), pack(&accepted{number: n, token: to, reserved: 64 << 20, about: about(d)}, memoryFile(t, 4096, sealed)))
		_ = exchanged(&update{state: Live, token: to, serial: 1, generation: 1, ordered: 1, last: true}) // it is ready
		peertest.NoRoom(t, func() {
			refused <- exchanged(&update{state: Live, token: to, serial: 2, generation: 2, ordered: 1, length: 10, last: true, chunks: []chunk{{1, 2 << 20}}}, null)
		})
		_ = c.Send(context.Background(), pack(&update{state: Live, token: to, serial: 3, generation: 3, ordered: 1, last: true}))
	})
	f, err := Follow[uint32](peertest.Context(t), k, d, "numbers", FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	f.f.slot.word(completeWord).Store(1)
	ack := <-refused
	require.NotNil(t, ack)
	require.Equal(t, statusFailed, ack.status)
	require.Contains(t, ack.reason, "ulimit -n")
	for f.Generation() < 3 {
		if err := f.Next(peertest.Context(t)); err != nil {
			require.ErrorIs(t, err, peer.ErrTruncated)
		}
	}
}
