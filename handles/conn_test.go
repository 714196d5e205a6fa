//go:build linux

package handles_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/reexec"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	// echo sends every message back.
	reexec.Register("echo", func(c *reexec.Child) error {
		conn, err := handles.Inherit(c.Files[0], handles.Options{})
		if err != nil {
			return err
		}
		defer conn.Close()
		return echo(conn)
	})
	// few receives a message with more descriptors than it may open.
	reexec.Register("few", func(c *reexec.Child) error {
		conn, err := handles.Inherit(c.Files[0], handles.Options{})
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
		if len(after) != len(before) || handles.OpenFDs() != 0 {
			return fmt.Errorf("%d descriptors before and %d after", len(before), len(after))
		}
		if !errors.Is(err, handles.ErrTruncated) {
			return fmt.Errorf("receive: %w", err)
		}
		return conn.Close()
	})
	// crowd sends more descriptors than its user may have on their way.
	reexec.Register("crowd", func(c *reexec.Child) error {
		if os.Geteuid() == 0 { // for whom there is no limit
			if err := become(nobody); err != nil {
				return err
			}
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
			return err
		}
		conn, err := handles.Inherit(c.Files[0], handles.Options{})
		if err != nil {
			return err
		}
		defer conn.Close()
		n, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
		if err != nil {
			return err
		}
		f, err := handles.NewFD(n)
		if err != nil {
			return err
		}
		defer f.Close()
		fds := make([]*handles.FD, 700)
		for i := range fds {
			fds[i] = f
		}
		return conn.Send(context.Background(), handles.Message{Kind: 1, FDs: fds})
	})
}

const nobody = 65534

// become gives up being root, for this process alone.
func become(id int) error {
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	if err := syscall.Setresgid(id, id, id); err != nil {
		return err
	}
	return syscall.Setresuid(id, id, id)
}

func needRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("another user is taken on by root alone")
	}
}

func echo(conn *handles.Conn) error {
	for {
		m, err := conn.Receive(context.Background())
		if errors.Is(err, handles.ErrGone) {
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

// quick has a short patience.
var quick = handles.Options{Timeout: 200 * time.Millisecond}

// pair is two ends in this process.
func pair(t *testing.T, o handles.Options) (near, far *handles.Conn) {
	t.Helper()
	near, f, err := handles.Pair(o)
	require.NoError(t, err)
	far, err = handles.Inherit(f, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, near.Close())
		require.NoError(t, far.Close())
	})
	return near, far
}

// rawPair is an end of this package, and the other end as a bare socket.
func rawPair(t *testing.T, o handles.Options) (*handles.Conn, int) {
	t.Helper()
	near, f, err := handles.Pair(o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, near.Close())
		f.Close()
	})
	return near, int(f.Fd())
}

func TestMessagesToAChild(t *testing.T) {
	noLeak(t)
	conn, f, err := handles.Pair(handles.Options{})
	require.NoError(t, err)
	c := reexec.Command(t, "echo")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	_, known := conn.Peer()
	require.False(t, known)
	fd := file(t, "shared")
	for _, m := range []handles.Message{
		{Kind: 1},
		{Kind: handles.MaxKind, Body: []byte("body"), FDs: []*handles.FD{fd}},
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

func repeat(f *handles.FD, n int) (all []*handles.FD) {
	for range n {
		all = append(all, f)
	}
	return all
}

func TestALargeMessageInParts(t *testing.T) {
	noLeak(t)
	near, far := pair(t, handles.Options{})
	body := make([]byte, handles.MaxBody)
	for i := range body {
		body[i] = byte(i * i >> 8)
	}
	sent := make(chan error, 1)
	go func() { sent <- near.Send(context.Background(), handles.Message{Kind: 1, Body: body}) }()
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.True(t, bytes.Equal(body, m.Body))
	require.NoError(t, <-sent)
}

func TestWhatIsNotSent(t *testing.T) {
	noLeak(t)
	near, far := pair(t, handles.Options{})
	closed := file(t, "x")
	require.NoError(t, closed.Close())
	for _, c := range []struct {
		m    handles.Message
		want error
	}{
		{handles.Message{}, cuda.ErrInvalidArgument},
		{handles.Message{Kind: handles.MaxKind + 1}, cuda.ErrInvalidArgument},
		{handles.Message{Kind: 1, Body: make([]byte, handles.MaxBody+1)}, handles.ErrTooLarge},
		{handles.Message{Kind: 1, FDs: make([]*handles.FD, handles.MaxFDs+1)}, handles.ErrTooLarge},
		{handles.Message{Kind: 1, FDs: make([]*handles.FD, 1)}, cuda.ErrInvalidArgument},
		{handles.Message{Kind: 1, FDs: []*handles.FD{closed}}, cuda.ErrClosed},
	} {
		require.ErrorIs(t, near.Send(t.Context(), c.m), c.want)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, near.Send(ended, handles.Message{Kind: 7, Body: make([]byte, 500<<10)}), context.Canceled)
	_ = far
}

func TestAWaitEndsWithItsContextAndNothingIsLost(t *testing.T) {
	noLeak(t)
	near, far := pair(t, handles.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := far.Receive(ctx)
	require.ErrorIs(t, err, handles.ErrTimeout)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	_, err = far.Receive(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, near.Send(t.Context(), handles.Message{Kind: 2, Body: []byte("still")}))
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.Equal(t, "still", string(m.Body))
}

func TestACrowdOnOneConnection(t *testing.T) {
	noLeak(t)
	near, far := pair(t, handles.Options{})
	f := file(t, "x")
	const senders, each = 4, 50
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for i := range each {
				m := handles.Message{Kind: uint16(s + 1), Body: bytes.Repeat([]byte{byte(i)}, 40000+i), FDs: repeat(f, i%4)}
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
	noLeak(t)
	conn, _ := rawPair(t, quick)
	_, err := conn.Receive(t.Context())
	require.ErrorIs(t, err, handles.ErrTimeout)
	require.Equal(t, err, conn.Send(t.Context(), handles.Message{Kind: 1}), "it stays so")
}

func TestASilentPeerDoesNotHoldUpASender(t *testing.T) {
	noLeak(t)
	conn, _ := rawPair(t, quick)
	require.ErrorIs(t, conn.Send(t.Context(), handles.Message{Kind: 1}), handles.ErrTimeout)
}

func TestAPeerThatDoesNotRead(t *testing.T) {
	noLeak(t)
	near, far := pair(t, quick)
	require.ErrorIs(t, near.Send(t.Context(), handles.Message{Kind: 1, Body: make([]byte, handles.MaxBody)}), handles.ErrTimeout)
	_, err := far.Receive(t.Context())
	require.Error(t, err, "half of it came")
	_, err = near.Receive(t.Context())
	require.ErrorIs(t, err, handles.ErrTimeout, "it stays so")
}

// wire is the other end's half of the form, written down apart from the code.
func wire(kind uint16, to []byte, sequence uint64, fds, allBytes, allFDs uint32, body string) []byte {
	le := binary.LittleEndian
	b := append([]byte("cuvP"), 1, 0)
	b = le.AppendUint16(b, kind)
	b = append(b, to...)
	b = le.AppendUint64(b, sequence)
	b = le.AppendUint32(b, uint32(len(body)))
	b = le.AppendUint32(b, fds)
	b = le.AppendUint32(b, allBytes)
	b = le.AppendUint32(b, allFDs)
	return append(b, body...)
}

// shake greets as a bare socket does, and answers the other's nonce.
func shake(t *testing.T, s int) (nonce []byte) {
	t.Helper()
	b := make([]byte, 100)
	n, err := unix.Read(s, b)
	require.NoError(t, err)
	require.Equal(t, 68, n)
	require.Equal(t, "cuvP\x01\x00\x00\x00", string(b[:8]))
	require.Equal(t, "\x01\x00\x01\x00", string(b[64:68]), "versions 1 to 1")
	require.NoError(t, unix.Sendmsg(s, wire(0, make([]byte, 16), 0, 0, 20, 0, strings.Repeat("n", 16)+"\x01\x00\x01\x00"), nil, nil, 0))
	return b[48:64]
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
		{"garbage", func([]byte) []byte { return []byte("GET / HTTP/1.1\r\n\r\n") }, nil, handles.ErrProtocol},
		{"garbage with descriptors", func([]byte) []byte { return []byte("x") }, rights(253), handles.ErrProtocol},
		{"more descriptors than said", func(to []byte) []byte { return wire(1, to, 1, 1, 0, 1, "") }, rights(3), handles.ErrProtocol},
		{"descriptors that nobody said", func(to []byte) []byte { return wire(1, to, 1, 0, 0, 0, "") }, rights(1), handles.ErrProtocol},
		{"fewer descriptors than said", func(to []byte) []byte { return wire(1, to, 1, 3, 0, 3, "") }, rights(1), handles.ErrTruncated},
		{"more descriptors than taken", func(to []byte) []byte { return wire(1, to, 1, 3, 0, 4000, "") }, rights(3), handles.ErrTooLarge},
		{"a replay", func(to []byte) []byte { return wire(1, to, 0, 0, 0, 0, "") }, nil, handles.ErrProtocol},
		{"another session", func([]byte) []byte { return wire(1, another[:], 1, 0, 0, 0, "") }, nil, handles.ErrProtocol},
		{"a packet too long", func(to []byte) []byte { return wire(1, to, 1, 0, 1<<16, 0, strings.Repeat("x", 1<<16)) }, rights(5), handles.ErrProtocol},
		{"a packet of nothing", func([]byte) []byte { return nil }, nil, handles.ErrGone},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeak(t)
			conn, s := rawPair(t, handles.Options{MaxFDs: 10})
			to := shake(t, s)
			require.NoError(t, unix.Sendmsg(s, c.packet(to), c.oob, nil, 0))
			_, err := conn.Receive(t.Context())
			require.ErrorIs(t, err, c.want)
			_, again := conn.Receive(t.Context())
			require.Equal(t, err, again)
			if errors.Is(c.want, handles.ErrGone) {
				return
			}
			b := make([]byte, 1000)
			n, err := unix.Read(s, b)
			require.NoError(t, err)
			require.Equal(t, wire(0xffff, bytes.Repeat([]byte("n"), 16), 1, 0, uint32(n-48), 0, string(b[48:n])), b[:n], "it is told why")
			require.Contains(t, string(b[:n]), c.want.Error())
		})
	}
}

func TestASlowPeer(t *testing.T) {
	noLeak(t)
	conn, s := rawPair(t, quick)
	to := shake(t, s)
	require.NoError(t, unix.Sendmsg(s, wire(1, to, 1, 2, 10, 2, "half"), unix.UnixRights(0, 1), nil, 0))
	_, err := conn.Receive(t.Context())
	require.ErrorIs(t, err, handles.ErrTimeout)
}

func TestCloseEndsWaits(t *testing.T) {
	noLeak(t)
	near, far := pair(t, handles.Options{})
	received := make(chan error, 1)
	go func() { _, err := near.Receive(context.Background()); received <- err }()
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, near.Close())
	require.NoError(t, near.Close())
	require.ErrorIs(t, <-received, cuda.ErrClosed)
	require.ErrorIs(t, near.Send(t.Context(), handles.Message{Kind: 1}), cuda.ErrClosed)
	_, err := far.Receive(t.Context())
	require.ErrorIs(t, err, handles.ErrGone)
}

func TestWhatWasSentArrivesAfterClose(t *testing.T) {
	noLeak(t)
	near, far := pair(t, handles.Options{})
	// far has not greeted yet as near sees it, nor read.
	require.NoError(t, far.Send(t.Context(), handles.Message{Kind: 1, Body: []byte("unread")}))
	f := file(t, "x")
	require.NoError(t, near.Send(t.Context(), handles.Message{Kind: 1, Body: []byte("last"), FDs: []*handles.FD{f}}))
	require.NoError(t, f.Close())
	require.NoError(t, near.Close())
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.Equal(t, "last", string(m.Body))
	require.Equal(t, "x", contents(t, m.FDs[0]))
	require.NoError(t, m.Close())
	_, err = far.Receive(t.Context())
	require.ErrorIs(t, err, handles.ErrGone)
}

func TestAPeerThatIsKilled(t *testing.T) {
	noLeak(t)
	conn, f, err := handles.Pair(handles.Options{})
	require.NoError(t, err)
	c := reexec.Command(t, "echo")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	require.NoError(t, conn.Send(t.Context(), handles.Message{Kind: 1}))
	_, err = conn.Receive(t.Context())
	require.NoError(t, err)
	c.Kill()
	_, err = conn.Receive(t.Context())
	require.ErrorIs(t, err, handles.ErrGone)
	require.ErrorIs(t, conn.Send(t.Context(), handles.Message{Kind: 1}), handles.ErrGone)
	require.NoError(t, conn.Close())
}

func TestNoRoomForDescriptors(t *testing.T) {
	noLeak(t)
	conn, f, err := handles.Pair(handles.Options{})
	require.NoError(t, err)
	c := reexec.Command(t, "few")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	fd := file(t, "x")
	require.NoError(t, conn.Send(t.Context(), handles.Message{Kind: 1, FDs: repeat(fd, 100)}))
	_, err = conn.Receive(t.Context())
	require.ErrorIs(t, err, handles.ErrRefused)
	require.ErrorContains(t, err, "ulimit -n")
	c.Wait()
	require.NoError(t, fd.Close())
	require.NoError(t, conn.Close())
}

func TestTooManyDescriptorsOnTheirWay(t *testing.T) {
	noLeak(t)
	conn, f, err := handles.Pair(handles.Options{})
	require.NoError(t, err)
	defer conn.Close()
	c := reexec.Command(t, "crowd")
	c.ExtraFiles = []*os.File{f}
	c.Start()
	require.NoError(t, f.Close())
	time.Sleep(100 * time.Millisecond) // it fills what it may
	m, err := conn.Receive(t.Context())
	require.NoError(t, err)
	require.Len(t, m.FDs, 700)
	require.NoError(t, m.Close())
	c.Wait()
}

func TestInheritOfOtherFiles(t *testing.T) {
	noLeak(t)
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	stream, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer unix.Close(stream[1])
	alone, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	require.NoError(t, err)
	for _, f := range []*os.File{nil, null, os.NewFile(uintptr(stream[0]), "stream"), os.NewFile(uintptr(alone), "alone")} {
		_, err := handles.Inherit(f, handles.Options{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		if f != nil {
			require.NoError(t, f.Close(), "it stayed the caller's")
		}
	}
}
