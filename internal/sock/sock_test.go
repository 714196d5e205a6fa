//go:build linux

package sock_test

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func pair(t *testing.T) (near, far *sock.Conn) {
	t.Helper()
	near, f, err := sock.Pair()
	require.NoError(t, err)
	far, err = sock.FromFile(f)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	t.Cleanup(func() {
		near.Close()
		far.Close()
	})
	return near, far
}

func closeFDs(t *testing.T, fds []int) {
	t.Helper()
	for _, n := range fds {
		flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0)
		require.NoError(t, err)
		require.NotZero(t, flags&unix.FD_CLOEXEC)
		require.NoError(t, unix.Close(n))
	}
}

func TestPacketsKeepTheirBoundsAndDescriptors(t *testing.T) {
	near, far := pair(t)
	require.NoError(t, near.Send([]byte("one"), nil))
	require.NoError(t, near.Send([]byte("two"), make([]int, sock.MaxFDs)))
	buf := make([]byte, 10)
	n, fds, lost, err := far.Receive(buf)
	require.NoError(t, err)
	require.Equal(t, "one", string(buf[:n]))
	require.Empty(t, fds)
	require.False(t, lost)
	n, fds, lost, err = far.Receive(buf)
	require.NoError(t, err)
	require.Equal(t, "two", string(buf[:n]))
	require.Len(t, fds, sock.MaxFDs)
	require.False(t, lost)
	closeFDs(t, fds)
	require.ErrorIs(t, near.Send([]byte("x"), make([]int, sock.MaxFDs+1)), syscall.EINVAL, "the kernel's limit")
}

func TestWhatDoesNotFitIsSaid(t *testing.T) {
	near, far := pair(t)
	require.NoError(t, near.Send([]byte("too long"), []int{0}))
	n, fds, lost, err := far.Receive(make([]byte, 4))
	require.NoError(t, err)
	require.Equal(t, 4, n)
	require.True(t, lost)
	closeFDs(t, fds)

	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	open, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	require.NoError(t, near.Send([]byte("many"), make([]int, 100)))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(len(open) + 10), Max: limit.Max}))
	_, fds, lost, err = far.Receive(make([]byte, 4))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, err)
	require.True(t, lost)
	require.Less(t, len(fds), 100)
	closeFDs(t, fds)
}

func TestTheEnd(t *testing.T) {
	near, far := pair(t)
	require.NoError(t, far.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, _, _, err := far.Receive(make([]byte, 4))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, far.SetReadDeadline(time.Time{}))
	// near closes with an unread packet: its own packets can still be received.
	require.NoError(t, far.Send([]byte("unread"), nil))
	require.NoError(t, near.Send([]byte("last"), nil))
	require.NoError(t, near.Close())
	n, _, _, err := far.Receive(make([]byte, 10))
	require.NoError(t, err)
	require.Equal(t, 4, n)
	for range 2 {
		_, _, _, err = far.Receive(make([]byte, 10))
		require.ErrorIs(t, err, io.EOF)
		require.ErrorIs(t, far.Send([]byte("x"), nil), io.EOF)
	}
	require.NoError(t, far.Close())
	_, _, _, err = far.Receive(make([]byte, 10))
	require.ErrorIs(t, err, net.ErrClosed)
}

// What is asked of a connection is answered beside signals, which the runtime sends to preempt goroutines.
func TestSignalsAnswerNothing(t *testing.T) {
	near, far := pair(t)
	require.NoError(t, far.Send([]byte("x"), nil))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	process, thread := os.Getpid(), unix.Gettid()
	var signals sync.WaitGroup
	end := make(chan struct{})
	defer signals.Wait()
	defer close(end)
	signals.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
				_ = unix.Tgkill(process, thread, unix.SIGURG)
			}
		}
	})
	for range 20_000 {
		require.False(t, near.HungUp())
		require.True(t, near.Ready())
		require.True(t, near.Writable())
	}
}

func TestADirectoryIsUsedAsItWasOpened(t *testing.T) {
	at := t.TempDir()
	path := filepath.Join(at, "d")
	d, err := sock.OpenDir(path, 0o700)
	require.NoError(t, err)
	defer d.Close()
	require.Equal(t, os.FileMode(0o700), d.Mode)
	require.EqualValues(t, os.Geteuid(), d.Owner)
	// Another directory takes its place.
	require.NoError(t, os.Rename(path, filepath.Join(at, "away")))
	require.NoError(t, os.Mkdir(path, 0o777))
	l, err := sock.Listen(d, "s", false)
	require.NoError(t, err)
	e, err := d.Lookup("s")
	require.NoError(t, err)
	require.True(t, e.Socket)
	_, err = os.Lstat(filepath.Join(at, "away", "s"))
	require.NoError(t, err)
	c, err := sock.Dial(t.Context(), d, "s")
	require.NoError(t, err)
	a, err := l.Accept()
	require.NoError(t, err)
	p, err := a.Peer()
	require.NoError(t, err)
	require.Equal(t, sock.Credentials{PID: os.Getpid(), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}, p)
	require.NoError(t, a.Close())
	require.NoError(t, c.Close())
	require.NoError(t, l.Close())
	_, err = d.Lookup("s")
	require.NoError(t, err, "the listener removes nothing")
	_, err = sock.Dial(t.Context(), d, "s")
	require.True(t, sock.NotListening(err), err)
	require.NoError(t, d.Remove("s"))
	_, err = d.Lookup("s")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestOneHoldsTheLock(t *testing.T) {
	path := t.TempDir()
	a, err := sock.OpenDir(path, 0)
	require.NoError(t, err)
	b, err := sock.OpenDir(path, 0)
	require.NoError(t, err)
	defer b.Close()
	for _, c := range []struct {
		of   *sock.Dir
		want bool
	}{{a, true}, {b, false}} {
		ok, err := c.of.TryLock()
		require.NoError(t, err)
		require.Equal(t, c.want, ok)
	}
	a.Unlock()
	ok, err := b.TryLock()
	require.NoError(t, err)
	require.True(t, ok)
	b.Unlock()
	ok, err = a.TryLock()
	require.NoError(t, err)
	require.True(t, ok)
	require.NoError(t, a.Close(), "which gives it back")
	ok, err = b.TryLock()
	require.NoError(t, err)
	require.True(t, ok)
}

// A packet without descriptors costs the sender no allocation.
func TestSendDoesNotAllocate(t *testing.T) {
	near, far := pair(t)
	p, buf := []byte("packet"), make([]byte, 10)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := near.Send(p, nil); err != nil {
			t.Error(err)
		}
		if n, err := far.Read(buf); n != len(p) || err != nil {
			t.Error(n, err)
		}
	}))
}
