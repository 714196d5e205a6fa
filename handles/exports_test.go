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
	v := newVictim(t, ServerOptions{}, Options{Timeout: time.Second})
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 72, Max: old.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	require.NoError(t, v.array.Resize(nil, 20<<19)) // 20 chunks, of which 18 may be open
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	require.NoError(t, v.p.Announce(ctx, v.array.Len(), nil))
	require.NoError(t, v.honest.Next(moment(t)))
}

// One that does not read holds descriptors that others wait for.
func TestADeafClientStarvesNobody(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{Timeout: 2 * time.Second})
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
	begun := time.Now()
	v.announce(14 << 19) // the deaf one has 15 of 24
	took := time.Since(begun)
	require.Less(t, took, time.Second, "an announcement waits for a follower")
}

// Whoever cannot be sent memory at once for want of descriptors gets it later,
// and is not given up.
func TestWhoeverWaitsForDescriptorsIsNotDropped(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{Timeout: 100 * time.Millisecond})
	exports.mu.Lock()
	exports.used += 1 << 21
	exports.mu.Unlock()
	begun := time.Now()
	v.announce(1_000_000)
	require.Less(t, time.Since(begun), 5*time.Second, "an announcement waits for descriptors")
	time.Sleep(400 * time.Millisecond) // several limits
	exports.give(1 << 21)
	for v.honest.Len() != v.array.Len() {
		require.NoError(t, v.honest.Next(moment(t)))
	}
	require.Eventually(t, func() bool {
		exports.mu.Lock()
		defer exports.mu.Unlock()
		return exports.used == 0
	}, 10*time.Second, time.Millisecond)
}
