//go:build linux

package peertest

import (
	"net"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Lingering is a TCP socket whose last close takes an hour, or until the test
// ends: it has bytes to send that no reader takes.
func Lingering(t *testing.T) int {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Connect(s, &unix.SockaddrInet4{Port: l.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}}))
	far, err := l.AcceptTCP()
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, far.SetLinger(0)) // resets it, and waiting calls go on
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

// SendLingering sends such a socket with a message, and keeps no descriptor of it.
func SendLingering(t *testing.T, c *peer.Conn, m peer.Message) {
	f, err := peer.NewFD(Lingering(t))
	require.NoError(t, err)
	m.FDs = []*peer.FD{f}
	require.NoError(t, c.Send(Context(t), m))
	require.NoError(t, f.Close()) // the message's stays open, so this one closes at once
}

// InTime fails the test if an operation waits for a file that a peer sent.
func InTime(t *testing.T, what string, do func() error) {
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
