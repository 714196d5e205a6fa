//go:build linux

package handles

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// lingering is a TCP socket whose last close takes an hour, or until the test
// ends: it has bytes to send that nobody takes.
func lingering(t *testing.T) int {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Connect(s, &unix.SockaddrInet4{Port: l.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}}))
	far, err := l.AcceptTCP()
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, far.SetLinger(0)) // resets it, and what waits goes on
		require.NoError(t, far.Close())
		require.NoError(t, l.Close())
	})
	require.NoError(t, unix.SetNonblock(s, true))
	for b := make([]byte, 1<<16); ; {
		if _, err := unix.Write(s, b); err != nil {
			require.ErrorIs(t, err, unix.EAGAIN)
			break
		}
	}
	require.NoError(t, unix.SetNonblock(s, false))
	require.NoError(t, unix.SetsockoptLinger(s, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}))
	return s
}

// passLingering sends such a socket with part of a request, and has no more of it.
func passLingering(t *testing.T, c *Conn) {
	require.NoError(t, c.greet(moment(t), "test"))
	s := lingering(t)
	m := Message{Kind: listMessage, Body: pack(&list{1}).Body, FDs: make([]*FD, 1)}
	p, _, _ := c.out.packet(nil, &m, 0, 0, 1)
	require.NoError(t, c.sock.Send(p, []int{s}))
	c.out.sequence++
	require.NoError(t, unix.Close(s))
}

func inTime(t *testing.T, what string, do func() error) {
	t.Helper()
	over := make(chan error, 1)
	go func() { over <- do() }()
	select {
	case err := <-over:
		require.NoError(t, err)
	case <-time.After(Guard):
		require.FailNow(t, what+" waits for a file that a peer sent")
	}
}

// Files whose close takes as long as their sender likes hold up nobody, received
// or unread.
func TestFilesThatAreLongInClosing(t *testing.T) {
	t.Run("a server", func(t *testing.T) {
		v := newVictim(t, ServerOptions{}, Options{})
		for range 3 {
			near, far := linked(t)
			passLingering(t, far) // before the server reads, so that it has the last one
			go func() { _ = v.server.ServeConn(context.Background(), near) }()
		}
		v.served()
		inTime(t, "Server.Close", v.server.Close)
	})
	t.Run("unread", func(t *testing.T) {
		near, far := linked(t)
		passLingering(t, far)
		inTime(t, "Conn.Close", near.Close)
	})
	t.Run("taken by the program", func(t *testing.T) {
		near, far := linked(t)
		passLingering(t, far)
		m, err := near.Receive(moment(t))
		require.NoError(t, err)
		require.Len(t, m.FDs, 1)
		inTime(t, "Message.Close", m.Close)
	})
	t.Run("instead of memory", func(t *testing.T) {
		h := newHostile(t, Guard)
		s := lingering(t)
		n, err := unix.FcntlInt(uintptr(s), unix.F_DUPFD_CLOEXEC, 0)
		require.NoError(t, err)
		require.NoError(t, unix.Close(s))
		f := own(n)
		d := h.honest
		d.Chunks, d.Length = d.Chunks[:1], 1
		h.offer(d, []*FD{f})
		f.s.foreign.Store(true) // this end's own must not wait either
		require.NoError(t, f.Close())
		inTime(t, "ReceiveBuffer", func() error {
			_, err := ReceiveBuffer(moment(t), h.far, h.d, ImportOptions{})
			if errors.Is(err, ErrNotMemory) {
				err = nil
			}
			return err
		})
	})
}

// A reason is cut behind a whole character.
func TestReasonsAreCutBetweenCharacters(t *testing.T) {
	for n := range 4 {
		reason := strings.Repeat("x", refusalBytes-n) + "€€€"
		near, far := linked(t)
		_ = near.fail(failure("x", ErrProtocol, reason, ""))
		_, err := far.Receive(moment(t))
		require.ErrorIs(t, err, ErrRefused)
		require.NotContains(t, err.Error(), `\x`)
		require.True(t, utf8.ValidString(clipped(reason, refusalBytes)))
	}
}

// An offer that lacks a file is refused, and so is one with a closed one.
func TestOffersWithoutTheirFiles(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 << 20})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	_, err = b.AppendUndefined(1000)
	require.NoError(t, err)
	l, err := LeaseBuffer(b, LeaseOptions{Handle: vmm.PosixFD})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	closed := nullFD(t)
	require.NoError(t, closed.Close())
	for f, want := range map[*FD]error{nil: cuda.ErrInvalidArgument, {}: cuda.ErrInvalidArgument, closed: cuda.ErrClosed} {
		o := l.Offer()
		o.Files = []*FD{f}
		_, err = ImportBuffer(d, o, ImportOptions{})
		require.ErrorIs(t, err, want)
	}
	require.Equal(t, "no file descriptor", (*FD)(nil).String())
	_, err = (*FD)(nil).Dup()
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = (&FD{}).File("x")
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.NoError(t, (&FD{}).Close())
	m := Message{FDs: []*FD{nil}}
	require.NoError(t, m.Close())
}
