//go:build linux

package peer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	// echo sends every message back.
	reexec.Register("echo", func(c *reexec.Child) error {
		conn, err := peer.Inherit(c.Files[0], peer.Options{MaxFDs: peer.MaxFDs})
		if err != nil {
			return err
		}
		defer conn.Close()
		return echo(conn)
	})
	// few receives a message with more descriptors than it may open.
	reexec.Register("few", func(c *reexec.Child) error {
		conn, err := peer.Inherit(c.Files[0], peer.Options{})
		if err != nil {
			return err
		}
		before, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return err
		}
		room := uint64(len(before) + 10)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: room, Max: room}); err != nil {
			return err
		}
		_, err = conn.Receive(context.Background())
		after, list := os.ReadDir("/proc/self/fd")
		if list != nil {
			return list
		}
		if len(after) != len(before) || peer.OpenFDs() != 0 {
			return fmt.Errorf("%d descriptors before and %d after", len(before), len(after))
		}
		if !errors.Is(err, peer.ErrTruncated) {
			return fmt.Errorf("receive: %w", err)
		}
		return conn.Close()
	})
	// crowd sends more descriptors than its user may have on their way.
	reexec.Register("crowd", func(c *reexec.Child) error {
		if os.Geteuid() == 0 { // for whom there is no limit
			if err := peertest.Become(peertest.Unprivileged); err != nil {
				return err
			}
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
			return err
		}
		conn, err := peer.Inherit(c.Files[0], peer.Options{})
		if err != nil {
			return err
		}
		defer conn.Close()
		n, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
		if err != nil {
			return err
		}
		f, err := peer.NewFD(n)
		if err != nil {
			return err
		}
		defer f.Close()
		fds := make([]*peer.FD, 700)
		for i := range fds {
			fds[i] = f
		}
		return conn.Send(context.Background(), peer.Message{Kind: 1, FDs: fds})
	})
}

func echo(conn *peer.Conn) error {
	for {
		m, err := conn.Receive(context.Background())
		if errors.Is(err, peer.ErrGone) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := conn.Send(context.Background(), m); err != nil {
			return err
		}
		if err := m.Close(); err != nil {
			return err
		}
	}
}

// quick has a short timeout.
var quick = peer.Options{Timeout: 200 * time.Millisecond}

// rawPair is an end of this package, and the other end as a bare socket.
func rawPair(t *testing.T, o peer.Options) (*peer.Conn, int) {
	t.Helper()
	near, f, err := peer.Pair(o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, near.Close())
		f.Close()
	})
	return near, int(f.Fd())
}

func TestMessagesToAChild(t *testing.T) {
	peertest.NoLeak(t)
	conn, f, err := peer.Pair(peer.Options{MaxFDs: peer.MaxFDs})
	require.NoError(t, err)
	c := reexec.Command(t, "echo")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	_, known := conn.Peer()
	require.False(t, known)
	fd := file(t, "shared")
	for _, m := range []peer.Message{
		{Kind: 1},
		{Kind: peer.MaxKind, Body: []byte("body"), FDs: []*peer.FD{fd}},
		{Kind: 3, Body: bytes.Repeat([]byte("0123456789"), 10000)},
		{Kind: 4, Body: []byte("a few"), FDs: repeat(fd, 600)},
	} {
		require.NoError(t, conn.Send(t.Context(), m))
		got, err := conn.Receive(t.Context())
		require.NoError(t, err)
		require.Equal(t, m.Kind, got.Kind)
		require.Equal(t, string(m.Body), string(got.Body))
		require.Len(t, got.FDs, len(m.FDs))
		for _, g := range got.FDs {
			require.Equal(t, "shared", contents(t, g))
		}
		require.NoError(t, got.Close())
	}
	require.Equal(t, "shared", contents(t, fd), "it stays the sender's")
	require.NoError(t, fd.Close())
	require.NoError(t, conn.Close())
	c.Wait()
}

func repeat(f *peer.FD, n int) (all []*peer.FD) {
	for range n {
		all = append(all, f)
	}
	return all
}

func TestALargeMessageInParts(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	body := make([]byte, peer.MaxBody)
	for i := range body {
		body[i] = byte(i * i >> 8)
	}
	sent := make(chan error, 1)
	go func() { sent <- near.Send(context.Background(), peer.Message{Kind: 1, Body: body}) }()
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.True(t, bytes.Equal(body, m.Body))
	require.NoError(t, <-sent)
}

func TestWhatIsNotSent(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	closed := file(t, "x")
	require.NoError(t, closed.Close())
	for _, c := range []struct {
		m    peer.Message
		want error
	}{
		{peer.Message{}, cuda.ErrInvalidArgument},
		{peer.Message{Kind: peer.MaxKind + 1}, cuda.ErrInvalidArgument},
		{peer.Message{Kind: 1, Body: make([]byte, peer.MaxBody+1)}, peer.ErrTooLarge},
		{peer.Message{Kind: 1, FDs: make([]*peer.FD, peer.MaxFDs+1)}, peer.ErrTooLarge},
		{peer.Message{Kind: 1, FDs: make([]*peer.FD, 1)}, cuda.ErrInvalidArgument},
		{peer.Message{Kind: 1, FDs: []*peer.FD{closed}}, cuda.ErrClosed},
	} {
		require.ErrorIs(t, near.Send(t.Context(), c.m), c.want)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, near.Send(ended, peer.Message{Kind: 7, Body: make([]byte, 500<<10)}), context.Canceled)
	_ = far
}

func TestAWaitEndsWithItsContextAndNothingIsLost(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := far.Receive(ctx)
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	_, err = far.Receive(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, near.Send(t.Context(), peer.Message{Kind: 2, Body: []byte("still")}))
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.Equal(t, "still", string(m.Body))
}

func TestACrowdOnOneConnection(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	f := file(t, "x")
	const senders, each = 4, 50
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for i := range each {
				m := peer.Message{Kind: uint16(s + 1), Body: bytes.Repeat([]byte{byte(i)}, 40000+i), FDs: repeat(f, i%4)}
				if err := near.Send(context.Background(), m); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var got atomic.Int64
	for range 2 {
		wg.Go(func() {
			for got.Add(1) <= senders*each {
				m, err := far.Receive(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				i := int(m.Body[0])
				if len(m.Body) != 40000+i || bytes.Count(m.Body, []byte{byte(i)}) != len(m.Body) || len(m.FDs) != i%4 {
					t.Errorf("a mixed message: %d bytes, %d descriptors", len(m.Body), len(m.FDs))
				}
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, f.Close())
}

func TestASilentPeer(t *testing.T) {
	peertest.NoLeak(t)
	conn, _ := rawPair(t, quick)
	_, err := conn.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.Equal(t, err, conn.Send(t.Context(), peer.Message{Kind: 1}), "it stays so")
}

func TestASilentPeerDoesNotHoldUpASender(t *testing.T) {
	peertest.NoLeak(t)
	conn, _ := rawPair(t, quick)
	require.ErrorIs(t, conn.Send(t.Context(), peer.Message{Kind: 1}), peer.ErrTimeout)
}

func TestAPeerThatDoesNotRead(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, quick)
	require.ErrorIs(t, near.Send(t.Context(), peer.Message{Kind: 1, Body: make([]byte, peer.MaxBody)}), peer.ErrTimeout)
	_, err := far.Receive(t.Context())
	require.Error(t, err, "half of it came")
	_, err = near.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrTimeout, "it stays so")
}

func TestHostilePackets(t *testing.T) {
	rights := func(n int) []byte {
		fds := make([]int, n)
		return unix.UnixRights(fds...)
	}
	var another [16]byte
	for _, c := range []struct {
		name   string
		packet func(to []byte) []byte
		oob    []byte
		want   error
	}{
		{"garbage", func([]byte) []byte { return []byte("GET / HTTP/1.1\r\n\r\n") }, nil, peer.ErrProtocol},
		{"garbage with descriptors", func([]byte) []byte { return []byte("x") }, rights(253), peer.ErrProtocol},
		{"more descriptors than said", func(to []byte) []byte { return peertest.Packet(1, to, 1, 1, 0, 1, "") }, rights(3), peer.ErrProtocol},
		{"undeclared descriptors", func(to []byte) []byte { return peertest.Packet(1, to, 1, 0, 0, 0, "") }, rights(1), peer.ErrProtocol},
		{"fewer descriptors than said", func(to []byte) []byte { return peertest.Packet(1, to, 1, 3, 0, 3, "") }, rights(1), peer.ErrTruncated},
		{"more descriptors than taken", func(to []byte) []byte { return peertest.Packet(1, to, 1, 3, 0, 4000, "") }, rights(3), peer.ErrTooLarge},
		{"a replay", func(to []byte) []byte { return peertest.Packet(1, to, 0, 0, 0, 0, "") }, nil, peer.ErrProtocol},
		{"another session", func([]byte) []byte { return peertest.Packet(1, another[:], 1, 0, 0, 0, "") }, nil, peer.ErrProtocol},
		{"a packet too long", func(to []byte) []byte { return peertest.Packet(1, to, 1, 0, 1<<16, 0, strings.Repeat("x", 1<<16)) }, rights(5), peer.ErrProtocol},
		{"a packet of nothing", func([]byte) []byte { return nil }, nil, peer.ErrGone},
	} {
		t.Run(c.name, func(t *testing.T) {
			peertest.NoLeak(t)
			conn, s := rawPair(t, peer.Options{MaxFDs: 10})
			to := peertest.Greet(t, s)
			require.NoError(t, unix.Sendmsg(s, c.packet(to), c.oob, nil, 0))
			_, err := conn.Receive(t.Context())
			require.ErrorIs(t, err, c.want)
			_, again := conn.Receive(t.Context())
			require.Equal(t, err, again)
			if errors.Is(c.want, peer.ErrGone) {
				return
			}
			b := make([]byte, 1000)
			n, err := unix.Read(s, b)
			require.NoError(t, err)
			require.Equal(t, peertest.Packet(0xffff, bytes.Repeat([]byte("n"), 16), 1, 0, uint32(n-48), 0, string(b[48:n])), b[:n], "it is told why")
			require.Contains(t, string(b[:n]), c.want.Error())
		})
	}
}

func TestASlowPeer(t *testing.T) {
	peertest.NoLeak(t)
	conn, s := rawPair(t, quick)
	to := peertest.Greet(t, s)
	require.NoError(t, unix.Sendmsg(s, peertest.Packet(1, to, 1, 2, 10, 2, "half"), unix.UnixRights(0, 1), nil, 0))
	_, err := conn.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrTimeout)
}

func TestCloseEndsWaits(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	received := make(chan error, 1)
	go func() { _, err := near.Receive(context.Background()); received <- err }()
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, near.Close())
	require.NoError(t, near.Close())
	require.ErrorIs(t, <-received, cuda.ErrClosed)
	require.ErrorIs(t, near.Send(t.Context(), peer.Message{Kind: 1}), cuda.ErrClosed)
	_, err := far.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrGone)
}

func TestWhatWasSentArrivesAfterClose(t *testing.T) {
	peertest.NoLeak(t)
	near, far := peertest.Pair(t, peer.Options{})
	// far has not greeted yet as near sees it, nor read.
	require.NoError(t, far.Send(t.Context(), peer.Message{Kind: 1, Body: []byte("unread")}))
	f := file(t, "x")
	require.NoError(t, near.Send(t.Context(), peer.Message{Kind: 1, Body: []byte("last"), FDs: []*peer.FD{f}}))
	require.NoError(t, f.Close())
	require.NoError(t, near.Close())
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.Equal(t, "last", string(m.Body))
	require.Equal(t, "x", contents(t, m.FDs[0]))
	require.NoError(t, m.Close())
	_, err = far.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrGone)
}

func TestAPeerThatIsKilled(t *testing.T) {
	peertest.NoLeak(t)
	conn, f, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	c := reexec.Command(t, "echo")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	require.NoError(t, conn.Send(t.Context(), peer.Message{Kind: 1}))
	_, err = conn.Receive(t.Context())
	require.NoError(t, err)
	c.Kill()
	_, err = conn.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrGone)
	require.ErrorIs(t, conn.Send(t.Context(), peer.Message{Kind: 1}), peer.ErrGone)
	require.NoError(t, conn.Close())
}

func TestNoRoomForDescriptors(t *testing.T) {
	peertest.NoLeak(t)
	conn, f, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	c := reexec.Command(t, "few")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	fd := file(t, "x")
	require.NoError(t, conn.Send(t.Context(), peer.Message{Kind: 1, FDs: repeat(fd, 100)}))
	_, err = conn.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, "ulimit -n")
	c.Wait()
	require.NoError(t, fd.Close())
	require.NoError(t, conn.Close())
}

// Without Options.MaxFDs one message takes at most a quarter of the files that the
// receiver may open, so a peer cannot fill its table with one.
func TestTheDefaultLimitOfDescriptorsInAMessage(t *testing.T) {
	peertest.NoLeak(t)
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 200, Max: limit.Max}))
	near, far := peertest.Pair(t, peer.Options{})
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	fd := file(t, "x")
	defer func() { require.NoError(t, fd.Close()) }()
	require.NoError(t, near.Send(t.Context(), peer.Message{Kind: 1, FDs: repeat(fd, 50)}))
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.Len(t, m.FDs, 50)
	require.NoError(t, m.Close())
	require.NoError(t, near.Send(t.Context(), peer.Message{Kind: 1, FDs: repeat(fd, 51)}))
	_, err = far.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrTooLarge)
	require.ErrorContains(t, err, "where 50 is the most")
	require.ErrorContains(t, err, "Options.MaxFDs")
}

func TestTooManyDescriptorsOnTheirWay(t *testing.T) {
	peertest.NoLeak(t)
	conn, f, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	defer conn.Close()
	c := reexec.Command(t, "crowd")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	time.Sleep(100 * time.Millisecond) // it fills the mailbox
	m, err := conn.Receive(t.Context())
	require.NoError(t, err)
	require.Len(t, m.FDs, 700)
	require.NoError(t, m.Close())
	c.Wait()
}

func TestInheritOfOtherFiles(t *testing.T) {
	peertest.NoLeak(t)
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	stream, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer unix.Close(stream[1])
	alone, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	require.NoError(t, err)
	for _, f := range []*os.File{nil, null, os.NewFile(uintptr(stream[0]), "stream"), os.NewFile(uintptr(alone), "alone")} {
		_, err := peer.Inherit(f, peer.Options{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		if f != nil {
			require.NoError(t, f.Close(), "it stayed the caller's")
		}
	}
}
