//go:build linux

package peer

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// bound is a socket "s" in a directory, between its bind and its listen. Its maker has
// locked the directory.
func bound(t *testing.T) (path string, maker, dialer *sock.Dir, s int) {
	path = filepath.Join(t.TempDir(), "d")
	maker, err := sock.OpenDir(path, 0o700)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, maker.Close()) })
	dialer, err = sock.OpenDir(path, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dialer.Close()) })
	s, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(s)) })
	locked, err := maker.TryLock()
	require.NoError(t, err)
	require.True(t, locked)
	require.NoError(t, unix.Bind(s, &unix.SockaddrUnix{Name: filepath.Join(path, "s")}))
	return path, maker, dialer, s
}

// Between its bind and its listen a socket refuses every connection. A listener is
// made under the directory's lock, so that Dial can tell.
func TestDialWaitsForAListenerThatIsBeingMade(t *testing.T) {
	path, maker, dialer, s := bound(t)
	done := make(chan error, 1)
	go func() {
		c, err := dial(t.Context(), "test", dialer, path, "s", guard)
		if err == nil {
			err = c.Close()
		}
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatal("it did not wait: ", err)
	case <-time.After(50 * time.Millisecond):
	}
	require.NoError(t, unix.Listen(s, 1))
	maker.Unlock()
	require.NoError(t, <-done)

	require.NoError(t, unix.Shutdown(s, unix.SHUT_RDWR))
	_, err := dial(t.Context(), "test", dialer, path, "s", guard)
	require.ErrorIs(t, err, ErrGone, "no process makes one")
}

// An error of the context says what kept Dial waiting, whenever the context ends.
func TestDialSaysWhatItWaitedFor(t *testing.T) {
	path, maker, dialer, s := bound(t)
	fails := func(what string) {
		for limit := 20 * time.Millisecond; ; limit *= 2 { // a short one may end before anything is tried
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			_, err := dial(ctx, "test", dialer, path, "s", guard)
			cancel()
			require.ErrorIs(t, err, ErrTimeout)
			if limit > time.Second || strings.Contains(err.Error(), what) {
				require.ErrorContains(t, err, what)
				return
			}
		}
	}
	fails("no listener")
	require.NoError(t, unix.Listen(s, 0))
	maker.Unlock()
	c, err := dial(t.Context(), "test", dialer, path, "s", guard)
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	fails("full queue")
}

// However short the wait, its end is the context's, and says that no process serves the
// socket.
func TestDialWaitEndsWithItsContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	maker, err := sock.OpenDir(path, 0o700)
	require.NoError(t, err)
	defer maker.Close()
	for i := range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+i)*10*time.Microsecond)
		_, err := DialWait(ctx, filepath.Join(path, "s"), Options{})
		require.ErrorIs(t, err, ErrTimeout)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotContains(t, err.Error(), "operating system")
		cancel()
	}
}
