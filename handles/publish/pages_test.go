//go:build linux

package publish

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A client that had a page may write it forever, so no client gets one that another had.
func TestClientsDoNotSharePages(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	seen := map[*page]bool{}
	for i := range 6 {
		var far *peer.Conn
		if i%2 == 0 {
			var near *peer.Conn
			near, far = peertest.Pair(t, peer.Options{})
			go func() { _ = v.server.ServeConn(context.Background(), near) }()
		} else {
			far = v.dial()
		}
		var last *page
		for range 3 { // followers of one client do share one
			to, _, fds := v.joined(far)
			require.NoError(t, peer.CloseAll(fds))
			v.p.mu.Lock()
			for s := range v.p.followers {
				if s.token == to {
					require.True(t, last == nil || last == s.page)
					last = s.page
				}
			}
			v.p.mu.Unlock()
		}
		require.NotNil(t, last)
		require.False(t, seen[last], "another client had this page")
		seen[last] = true
		require.NoError(t, far.Close())
		require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond)
	}
	v.served()
}

// Followers take a bounded part of the publisher's descriptors, each process a
// part of that, and give it back when they leave.
func TestPagesLeaveRoomForFiles(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.perProcess = 200 })
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 256, Max: old.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	const most = 256 / pageProcessShare // one of which the honest one has
	var all []*peer.Conn
	for range 3 { // a client that comes again finds as much
		for i := range most + 3 {
			near, far := peertest.Pair(t, peer.Options{})
			go func() {
				_ = v.serveAs(near, peer.Credentials{PID: os.Getpid(), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())})
			}()
			require.NoError(t, far.Send(peertest.Context(t), pack(&follow{number: 1, access: WriteAccess, name: "numbers"})))
			m := v.receive(far)
			require.NoError(t, m.Close())
			said, err := toClient(m.Kind, m.Body, len(m.FDs))
			require.NoError(t, err)
			if i < most-1 {
				require.IsType(t, &accepted{}, said)
			} else {
				require.Equal(t, statusLimit, said.(*denied).status)
				require.Contains(t, said.(*denied).reason, "where 16 is the most")
			}
			all = append(all, far)
		}
		for _, c := range all {
			require.NoError(t, c.Close())
		}
		all = nil
		require.Eventually(t, func() bool {
			v.server.pages.mu.Lock()
			defer v.server.pages.mu.Unlock()
			return v.server.pages.opened == 1 && peer.OpenFDs() == 1 // the honest one's page
		}, peertest.Guard, time.Millisecond)
	}
	v.served()
}

// What a follower is told of its page stays so, whatever becomes of the page
// before it is told.
func TestAPageThatIsGivenBackBeforeTheFollowerHearsOfIt(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	near, file, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	defer near.Close()
	require.NoError(t, file.Close())
	ss := &session{server: v.server, conn: connOf(near), followers: map[token]*replicator{}, pages: map[*cuda.Device]*page{}}
	f, err := v.p.join(peertest.Context(t), ss, 0, possession{})
	require.NoError(t, err)
	f.finished() // it is never told
	slot := f.slot.index
	require.NoError(t, v.p.Withdraw())
	v.server.pages.finish(f.page)
	require.Equal(t, slot, f.slot.index)
	require.NoError(t, f.file.Use(func(int) error { return nil }))
	require.NoError(t, f.file.Close())
}

// To unregister a page waits for all work of its context and holds up what is
// submitted meanwhile. So children that leave cause that for many pages at once.
func TestChildrenThatLeaveDelayNoOther(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	s, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	given := func() int {
		v.server.pages.mu.Lock()
		defer v.server.pages.mu.Unlock()
		return len(v.server.pages.spent)
	}
	leave := func() {
		near, far := peertest.Pair(t, peer.Options{})
		over := make(chan error, 1)
		go func() { over <- v.server.ServeConn(context.Background(), near) }()
		_, _, fds := v.joined(far)
		require.NoError(t, peer.CloseAll(fds))
		require.NoError(t, far.Close())
		require.NoError(t, <-over)
	}
	v.machine.ResetCounts()
	v.machine.Hold(s.Handle())
	require.NoError(t, s.Memset(v.array.Ptr(), 0, 4))
	leave()
	require.Eventually(t, func() bool { return given() == 1 }, peertest.Guard, time.Millisecond)
	other, err := v.dev.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	require.NoError(t, other.Memset(v.array.Ptr()+4, 0, 4), "the GPU takes work")
	require.Zero(t, v.machine.Count("cuMemHostUnregister"))

	for range mostSpent - 2 {
		leave()
	}
	require.Eventually(t, func() bool { return given() == mostSpent-1 }, peertest.Guard, time.Millisecond)
	require.Zero(t, v.machine.Count("cuMemHostUnregister"))
	leave()
	require.Eventually(t, func() bool { return v.machine.Count("cuMemHostUnregister") > 0 }, peertest.Guard, time.Millisecond)
	require.Zero(t, given())
	require.NoError(t, v.dev.System().Drain(peertest.Context(t)), "the reclaimer does not wait for it")
	v.machine.Release(s.Handle())
	require.Eventually(t, func() bool { return v.machine.Count("cuMemHostUnregister") == mostSpent }, peertest.Guard, time.Millisecond)
	v.served()
}
