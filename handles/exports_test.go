//go:build linux

package handles

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// More chunks than may be open are sent in smaller batches.
func TestALowLimitOfOpenFiles(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 72, Max: old.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	require.NoError(t, v.array.Resize(nil, 20<<19)) // 20 chunks, of which 18 may be open
	require.NoError(t, v.p.Announce(moment(t), v.array.Len(), nil))
	require.NoError(t, v.honest.Next(moment(t)))
}

// One that does not read holds descriptors that others wait for.
func TestADeafClientStarvesNobody(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 96, Max: old.Max})) // 24 may be open
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	deaf := v.dial()
	to, u, fds := v.joined(deaf)
	require.NoError(t, closeAll(fds))
	require.NoError(t, deaf.Send(moment(t), pack(&done{to, u.serial, statusOK, 1, ""})))
	require.NoError(t, v.p.Settle(moment(t)))
	for range 400 { // its side of the connection is full now
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		err := deaf.Send(ctx, pack(&list{1}))
		cancel()
		if err != nil {
			break
		}
	}
	v.announce(15 << 19) // 15 chunks, or less: on their way to both
	require.NoError(t, v.honest.Next(moment(t)))
	v.announce(14 << 19) // the deaf one has 15 of 24
	st := v.p.Stats()
	require.Len(t, st.Followers, 2, "the announcement waited until the deaf one was given up")
	require.Contains(t, []uint64{st.Followers[0].Generation, st.Followers[1].Generation}, uint64(1), "it reads")
}

// Whoever cannot be sent memory at once for want of descriptors gets it later,
// and is not given up.
func TestWhoeverWaitsForDescriptorsIsNotDropped(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	near, far := linked(t)
	near.limits.Timeout = time.Second
	go func() { _ = v.server.ServeConn(context.Background(), near) }()
	k := NewClient(far)
	defer func() { require.NoError(t, k.Close()) }()
	f, err := Follow[uint32](moment(t), k, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	require.NoError(t, f.Next(moment(t)))
	exports.mu.Lock()
	exports.used += 1 << 21
	exports.mu.Unlock()
	v.announce(1_000_000) // waits for no descriptors, or for ever
	time.Sleep(3 * near.limits.Timeout)
	exports.give(1 << 21)
	for _, follower := range []*Follower[uint32]{v.honest, f} {
		for follower.Len() != v.array.Len() {
			require.NoError(t, follower.Next(moment(t)))
		}
	}
	require.Eventually(t, func() bool {
		exports.mu.Lock()
		defer exports.mu.Unlock()
		return exports.used == 0
	}, Guard, time.Millisecond)
}
