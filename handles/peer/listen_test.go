//go:build linux

package peer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
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
	// serve echoes to one peer after the other, as another user if one is
	// named: serve DIR [UID].
	reexec.Register("serve", func(c *reexec.Child) error {
		if len(c.Args) > 1 {
			if err := peertest.Become(peertest.Unprivileged); err != nil {
				return err
			}
		}
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil { // no process may trace it
			return err
		}
		l, err := peer.Listen(c.Args[0], "s", peer.Options{})
		if err != nil {
			return err
		}
		go func() {
			for {
				conn, err := l.Accept(context.Background())
				if err != nil {
					return
				}
				go func() {
					defer conn.Close()
					_ = echo(conn)
				}()
			}
		}()
		if err := c.Send("ready"); err != nil {
			return err
		}
		var over string
		_ = c.Recv(&over)
		return l.Close()
	})
	// call sends a descriptor to a server and checks that it comes back.
	reexec.Register("call", func(c *reexec.Child) error {
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil { // no process may trace it
			return err
		}
		conn, err := peer.Dial(context.Background(), c.Args[0], peer.Options{})
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
		if err := conn.Send(context.Background(), peer.Message{Kind: 1, FDs: []*peer.FD{f}}); err != nil {
			return err
		}
		m, err := conn.Receive(context.Background())
		if err != nil {
			return err
		}
		if len(m.FDs) != 1 {
			return fmt.Errorf("%d descriptors came back", len(m.FDs))
		}
		p, known := conn.Peer()
		if !known || p.PID != os.Getppid() || int(p.UID) != os.Getuid() {
			return fmt.Errorf("the peer is %v", p)
		}
		if err := m.Close(); err != nil {
			return err
		}
		if len(c.Args) > 1 { // stay until killed
			if err := c.Send("here"); err != nil {
				return err
			}
			_, err = conn.Receive(context.Background())
			return err
		}
		return nil
	})
}

// folder is a directory for sockets.
func folder(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "sockets")
}

func listen(t *testing.T, o peer.Options) *peer.Listener {
	t.Helper()
	l, err := peer.Listen(folder(t), "", o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

func serve(t *testing.T, dir string, args ...string) *reexec.Cmd {
	t.Helper()
	c := reexec.Command(t, "serve", append([]string{dir}, args...)...)
	c.Start()
	var ready string
	c.Recv(&ready)
	return c
}

func TestProcessesThatAreNotParentAndChildOfAPair(t *testing.T) {
	peertest.NoLeak(t)
	l := listen(t, peer.Options{})
	info, err := os.Stat(filepath.Dir(l.Path()))
	require.NoError(t, err)
	require.Equal(t, os.ModeDir|0o700, info.Mode())
	for range 3 {
		c := reexec.Command(t, "call", l.Path())
		c.Start()
		conn, err := l.Accept(t.Context())
		require.NoError(t, err)
		p, known := conn.Peer()
		require.True(t, known)
		require.Equal(t, peer.Credentials{PID: c.Process.Pid, UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}, p)
		require.NoError(t, echo(conn))
		require.NoError(t, conn.Close())
		c.Wait()
	}
}

func TestAClientThatIsKilledCostsNothing(t *testing.T) {
	peertest.NoLeak(t)
	l := listen(t, peer.Options{})
	for range 5 {
		c := reexec.Command(t, "call", l.Path(), "stay")
		c.Start()
		conn, err := l.Accept(t.Context())
		require.NoError(t, err)
		echoed := make(chan error, 1)
		go func() { echoed <- echo(conn) }()
		var here string
		c.Recv(&here)
		c.Kill()
		require.NoError(t, <-echoed)
		require.NoError(t, conn.Close())
	}
}

func TestAServerThatIsKilledIsNoticedAndReplaced(t *testing.T) {
	peertest.NoLeak(t)
	dir := folder(t)
	path := filepath.Join(dir, "s")
	c := serve(t, dir)
	conn, err := peer.Dial(t.Context(), path, peer.Options{})
	require.NoError(t, err)
	_, err = peer.Listen(dir, "s", peer.Options{})
	require.ErrorIs(t, err, cuda.ErrInUse)
	var served *peer.ServedError
	require.ErrorAs(t, err, &served)
	require.Equal(t, path, served.Path)
	require.Equal(t, c.Process.Pid, served.By.PID)
	require.Equal(t, uint32(os.Geteuid()), served.By.UID)
	require.ErrorContains(t, err, fmt.Sprintf("process %d ", c.Process.Pid))
	c.Kill()
	_, err = conn.Receive(t.Context())
	require.ErrorIs(t, err, peer.ErrGone)
	require.NoError(t, conn.Close())
	_, err = os.Lstat(path)
	require.NoError(t, err, "the dead server's socket is there")
	_, err = peer.Dial(t.Context(), path, peer.Options{})
	require.ErrorIs(t, err, peer.ErrGone)
	require.ErrorContains(t, err, "no process serves")
	l, err := peer.Listen(dir, "s", peer.Options{})
	require.NoError(t, err)
	require.NoError(t, l.Close())
	_, err = os.Lstat(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = peer.Dial(t.Context(), path, peer.Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestOneOfManyListenersGetsTheName(t *testing.T) {
	peertest.NoLeak(t)
	dir := folder(t)
	c := serve(t, dir)
	c.Kill() // it leaves a stale socket
	var mu sync.Mutex
	var got []*peer.Listener
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			l, err := peer.Listen(dir, "s", peer.Options{})
			if err != nil {
				if !errors.Is(err, cuda.ErrInUse) {
					t.Error(err)
				}
				return
			}
			mu.Lock()
			defer mu.Unlock()
			got = append(got, l)
		})
	}
	wg.Wait()
	require.Len(t, got, 1)
	require.NoError(t, got[0].Close())
}

// A listener that could not remove its name, since another process has the directory's
// lock, removes it when it is closed again.
func TestClosingAListenerAgain(t *testing.T) {
	peertest.NoLeak(t)
	dir := folder(t)
	l, err := peer.Listen(dir, "s", peer.Options{Timeout: 20 * time.Millisecond})
	require.NoError(t, err)
	d, err := os.Open(dir)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(d.Fd()), unix.LOCK_EX))
	require.ErrorIs(t, l.Close(), peer.ErrTimeout)
	require.FileExists(t, l.Path())
	_, err = l.Accept(t.Context())
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.NoError(t, d.Close())
	require.NoError(t, l.Close())
	require.NoFileExists(t, l.Path())
	require.NoError(t, l.Close())
}

func TestASquatterStays(t *testing.T) {
	peertest.NoLeak(t)
	dir := folder(t)
	require.NoError(t, os.Mkdir(dir, 0o700))
	for name, squat := range map[string]func(path string) error{
		"a file":         func(p string) error { return os.WriteFile(p, []byte("mine"), 0o600) },
		"a folder":       func(p string) error { return os.Mkdir(p, 0o700) },
		"a link":         func(p string) error { return os.Symlink("/nowhere", p) },
		"a link to peer": func(p string) error { return os.Symlink("s", p) },
	} {
		t.Run(name, func(t *testing.T) {
			peertest.NoLeak(t)
			require.NoError(t, squat(filepath.Join(dir, name)))
			_, err := peer.Listen(dir, name, peer.Options{})
			require.ErrorIs(t, err, cuda.ErrInUse)
			_, err = os.Lstat(filepath.Join(dir, name))
			require.NoError(t, err, "it is still there")
		})
	}
}

func TestCloseRemovesItsOwnSocketOnly(t *testing.T) {
	peertest.NoLeak(t)
	l, err := peer.Listen(folder(t), "s", peer.Options{})
	require.NoError(t, err)
	require.NoError(t, os.Remove(l.Path()))
	require.NoError(t, os.WriteFile(l.Path(), []byte("another's"), 0o600))
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	b, err := os.ReadFile(l.Path())
	require.NoError(t, err)
	require.Equal(t, "another's", string(b))
	_, err = l.Accept(t.Context())
	require.ErrorIs(t, err, cuda.ErrClosed)
}

func TestDirectoriesThatOthersCouldUse(t *testing.T) {
	peertest.NoLeak(t)
	at := t.TempDir()
	make := func(name string, mode os.FileMode) string {
		p := filepath.Join(at, name)
		require.NoError(t, os.Mkdir(p, 0o700))
		require.NoError(t, os.Chmod(p, mode))
		return p
	}
	good := make("good", 0o700)
	require.NoError(t, os.Symlink(good, filepath.Join(at, "link")))
	require.NoError(t, os.WriteFile(filepath.Join(at, "file"), nil, 0o700))
	for name, c := range map[string]struct {
		dir  string
		want error
	}{
		"open to all":     {make("all", 0o777), peer.ErrPeer},
		"open to group":   {make("group", 0o710), peer.ErrPeer},
		"sticky":          {make("sticky", 0o700|os.ModeSticky), peer.ErrPeer},
		"not its owner's": {make("own", 0o500), peer.ErrPeer},
		"a link":          {filepath.Join(at, "link"), peer.ErrPeer},
		"a link, a slash": {filepath.Join(at, "link") + "/", peer.ErrPeer},
		"a link, a dot":   {filepath.Join(at, "link") + "/.", peer.ErrPeer},
		"a file":          {filepath.Join(at, "file"), peer.ErrPeer},
		"no folder above": {filepath.Join(at, "none", "none"), os.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			peertest.NoLeak(t)
			_, err := peer.Listen(c.dir, "s", peer.Options{})
			require.ErrorIs(t, err, c.want)
			_, err = peer.Dial(t.Context(), filepath.Join(c.dir, "s"), peer.Options{})
			require.ErrorIs(t, err, c.want)
		})
	}
	_, err := peer.Listen(filepath.Join(at, "none", "none"), "s", peer.Options{})
	require.ErrorContains(t, err, "make the folder above it first")
	_, err = peer.Listen("", "s", peer.Options{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	for _, name := range []string{".", "..", "a/b", "a\x00b", string(bytesOf(81))} {
		_, err := peer.Listen(good, name, peer.Options{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err = peer.Dial(t.Context(), good+"/", peer.Options{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

// A shared socket needs a directory that others enter, and only its owner writes.
func TestSharedDirectories(t *testing.T) {
	peertest.NoLeak(t)
	at := t.TempDir()
	shared := peer.Options{Shared: true}
	for mode, says := range map[os.FileMode]string{
		0: "", 0o711: "", 0o755: "", 0o700: "other users cannot enter it", 0o710: "other users cannot enter it",
		0o731: "other users could put a socket there", 0o713: "other users could put a socket there",
	} {
		t.Run(mode.String(), func(t *testing.T) {
			peertest.NoLeak(t)
			dir := filepath.Join(at, strconv.Itoa(int(mode)))
			if mode != 0 {
				require.NoError(t, os.Mkdir(dir, 0o700))
				require.NoError(t, os.Chmod(dir, mode))
			}
			l, err := peer.Listen(dir, "s", shared)
			if says != "" {
				require.ErrorIs(t, err, peer.ErrPeer)
				require.ErrorContains(t, err, says)
				if mode&0o022 != 0 {
					_, err = peer.Dial(t.Context(), filepath.Join(dir, "s"), shared)
					require.ErrorIs(t, err, peer.ErrPeer)
				}
				return
			}
			require.NoError(t, err)
			defer func() { require.NoError(t, l.Close()) }()
			info, err := os.Stat(l.Path())
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o666), info.Mode().Perm())
			info, err = os.Stat(dir)
			require.NoError(t, err)
			require.Equal(t, max(mode, 0o711), info.Mode().Perm())
			_, err = peer.Dial(t.Context(), l.Path(), peer.Options{})
			require.ErrorIs(t, err, peer.ErrPeer, "who does not say that it is shared")
			accepted := make(chan error, 1)
			go func() {
				c, err := l.Accept(t.Context())
				if err == nil {
					_, err = c.Receive(t.Context())
					_ = c.Close()
				}
				accepted <- err
			}()
			c, err := peer.Dial(t.Context(), l.Path(), shared)
			require.NoError(t, err)
			require.NoError(t, c.Close())
			require.ErrorIs(t, <-accepted, peer.ErrGone)
		})
	}
}

func bytesOf(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = 'x'
	}
	return b
}

func TestALongPath(t *testing.T) {
	peertest.NoLeak(t)
	dir := t.TempDir()
	for range 3 {
		dir = filepath.Join(dir, string(bytesOf(100)))
		require.NoError(t, os.Mkdir(dir, 0o700))
	}
	l, err := peer.Listen(dir, string(bytesOf(80)), peer.Options{})
	require.NoError(t, err)
	accepted := make(chan error, 1)
	go func() {
		conn, err := l.Accept(context.Background())
		if err == nil {
			err = errors.Join(echo(conn), conn.Close())
		}
		accepted <- err
	}()
	conn, err := peer.Dial(t.Context(), l.Path(), peer.Options{})
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.NoError(t, <-accepted)
	require.NoError(t, l.Close())
	_, err = peer.Listen(filepath.Join(dir, string(bytesOf(300))), "", peer.Options{})
	require.ErrorContains(t, err, "use a shorter name")
}

// othersFolder is a directory of another user, with a server of that user.
func othersFolder(t *testing.T) string {
	t.Helper()
	peertest.NeedRoot(t)
	//nolint:usetesting // the folder above t.TempDir lets no other user in
	dir, err := os.MkdirTemp("", "cuvmm")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Chown(dir, peertest.Unprivileged, peertest.Unprivileged))
	return dir
}

func TestAServerOfAnotherUserIsRefused(t *testing.T) {
	peertest.NoLeak(t)
	dir := othersFolder(t)
	c := serve(t, dir, "unprivileged")
	_, err := peer.Dial(t.Context(), filepath.Join(dir, "s"), peer.Options{})
	require.ErrorIs(t, err, peer.ErrPeer)
	require.ErrorContains(t, err, "of user 65534")
	_, err = peer.Listen(dir, "mine", peer.Options{})
	require.ErrorIs(t, err, peer.ErrPeer, "nor does this user serve there")
	require.ErrorContains(t, err, "belongs to user 65534")
	c.Wait()
}

func TestAClientOfAnotherUserIsRefused(t *testing.T) {
	peertest.NoLeak(t)
	dir := othersFolder(t)
	c := serve(t, dir, "unprivileged")
	var seen peer.Credentials
	_, err := peer.Dial(t.Context(), filepath.Join(dir, "s"), peer.Options{Allow: func(p peer.Credentials) error { seen = p; return nil }})
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, "user 0 is not allowed")
	require.Equal(t, peer.Credentials{PID: c.Process.Pid, UID: peertest.Unprivileged, GID: peertest.Unprivileged}, seen)
	c.Wait()
}

func TestASocketMovedIntoTheDirectoryOfAnotherUser(t *testing.T) {
	peertest.NoLeak(t)
	dir := othersFolder(t)
	l := listen(t, peer.Options{})
	require.NoError(t, os.Link(l.Path(), filepath.Join(dir, "s")))
	_, err := peer.Dial(t.Context(), filepath.Join(dir, "s"), peer.Options{})
	require.ErrorIs(t, err, peer.ErrPeer)
	require.ErrorContains(t, err, "the directory belongs to user 65534")
}

func TestAPolicyRefusesAndTheOthersAreServed(t *testing.T) {
	peertest.NoLeak(t)
	refuse := true
	var log bytes.Buffer
	l := listen(t, peer.Options{Log: slog.New(slog.NewTextHandler(&log, nil)), Allow: func(peer.Credentials) error {
		if refuse {
			refuse = false
			return errors.New("not today")
		}
		return nil
	}})
	accepted := make(chan *peer.Conn, 1)
	go func() {
		conn, err := l.Accept(context.Background())
		if err != nil {
			t.Error(err)
		}
		accepted <- conn
	}()
	_, err := peer.Dial(t.Context(), l.Path(), peer.Options{})
	require.ErrorIs(t, err, peer.ErrRefused)
	require.NotContains(t, err.Error(), "not today", "the policy's words are for the log")
	conn, err := peer.Dial(t.Context(), l.Path(), peer.Options{})
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.NoError(t, (<-accepted).Close())
	require.Contains(t, log.String(), "level=INFO", "strangers write it")
	require.Contains(t, log.String(), "not today")
}

func TestSilentPeersDelayNoOther(t *testing.T) {
	peertest.NoLeak(t)
	l := listen(t, peer.Options{})
	var sockets []int
	for range 20 {
		s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		sockets = append(sockets, s)
		require.NoError(t, unix.Connect(s, &unix.SockaddrUnix{Name: l.Path()}))
	}
	dialed := make(chan error, 1)
	go func() {
		conn, err := peer.Dial(context.Background(), l.Path(), peer.Options{})
		if err == nil {
			err = conn.Send(context.Background(), peer.Message{Kind: 1})
		}
		dialed <- err
		if conn != nil {
			conn.Close()
		}
	}()
	var wg sync.WaitGroup
	silent := make(chan error, 21)
	for range 21 {
		conn, err := l.Accept(t.Context())
		require.NoError(t, err)
		wg.Go(func() {
			_, err := conn.Receive(context.Background())
			silent <- err
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	require.NoError(t, <-dialed)
	require.NoError(t, <-silent, "the one that greets, while all others are silent")
	for _, s := range sockets {
		require.NoError(t, unix.Close(s))
	}
	wg.Wait()
	close(silent)
	for err := range silent {
		require.ErrorIs(t, err, peer.ErrGone)
	}
}

func TestAcceptEndsWithItsContextAndWithClose(t *testing.T) {
	peertest.NoLeak(t)
	l, err := peer.Listen(folder(t), "", peer.Options{})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = l.Accept(ctx)
	require.ErrorIs(t, err, peer.ErrTimeout)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := l.Accept(context.Background()); !errors.Is(err, cuda.ErrClosed) {
				t.Error(err)
			}
		})
	}
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, l.Close())
	wg.Wait()
}

func TestAServerThatDoesNotAccept(t *testing.T) {
	peertest.NoLeak(t)
	dir := folder(t)
	require.NoError(t, os.Mkdir(dir, 0o700))
	path := filepath.Join(dir, "s")
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(s)
	require.NoError(t, unix.Bind(s, &unix.SockaddrUnix{Name: path}))
	require.NoError(t, unix.Listen(s, 0))
	_, err = peer.Dial(t.Context(), path, quick)
	require.ErrorIs(t, err, peer.ErrTimeout, "it is connected, and not greeted")
	_, err = peer.Dial(t.Context(), path, quick)
	require.ErrorIs(t, err, peer.ErrTimeout, "the queue is full")
	require.ErrorContains(t, err, "full queue")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = peer.Dial(ctx, path, peer.Options{})
	require.ErrorIs(t, err, context.Canceled)
	_, err = peer.Listen(dir, "s", quick)
	require.ErrorIs(t, err, cuda.ErrInUse, "it lives")
}

func TestAnotherProtocolOnThePath(t *testing.T) {
	peertest.NoLeak(t)
	dir := folder(t)
	require.NoError(t, os.Mkdir(dir, 0o700))
	path := filepath.Join(dir, "s")
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(s)
	require.NoError(t, unix.Bind(s, &unix.SockaddrUnix{Name: path}))
	require.NoError(t, unix.Listen(s, 1))
	_, err = peer.Dial(t.Context(), path, quick)
	require.ErrorIs(t, err, syscall.EPROTOTYPE)
	_, err = peer.Listen(dir, "s", quick)
	require.ErrorIs(t, err, cuda.ErrInUse)
}
