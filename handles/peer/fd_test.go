//go:build linux

package peer_test

import (
	"io"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// number makes a file with contents and returns its descriptor.
func number(t testing.TB, contents string) int {
	t.Helper()
	n, err := unix.MemfdCreate("test", 0)
	require.NoError(t, err)
	_, err = unix.Pwrite(n, []byte(contents), 0)
	require.NoError(t, err)
	return n
}

func file(t testing.TB, contents string) *peer.FD {
	t.Helper()
	f, err := peer.NewFD(number(t, contents))
	require.NoError(t, err)
	return f
}

func contents(t testing.TB, f *peer.FD) string {
	t.Helper()
	b := make([]byte, 100)
	require.NoError(t, f.Use(func(n int) error {
		flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0)
		require.NoError(t, err)
		require.NotZero(t, flags&unix.FD_CLOEXEC, "closed on exec")
		got, err := unix.Pread(n, b, 0)
		b = b[:got]
		return err
	}))
	return string(b)
}

// An FD is released when its file is closed, or handed over.
func TestFDIsReleased(t *testing.T) {
	peertest.NoLeak(t)
	open := func(f *peer.FD) bool {
		select {
		case <-f.Released().Done():
			return false
		default:
			return true
		}
	}
	closed, handed := file(t, "x"), file(t, "y")
	require.True(t, open(closed))
	released := closed.Released()
	require.NoError(t, closed.Close())
	require.NoError(t, released.Wait(t.Context()))
	require.False(t, open(closed))
	require.True(t, open(handed))
	f, err := handed.File("name")
	require.NoError(t, err)
	require.False(t, open(handed))
	require.NoError(t, f.Close())
	require.False(t, open(nil), "there is nothing to close")

	// A file that another process sent is closed elsewhere.
	near, far := peertest.Pair(t, peer.Options{})
	sent := file(t, "z")
	require.NoError(t, near.Send(t.Context(), peer.Message{Kind: 1, FDs: []*peer.FD{sent}}))
	require.NoError(t, sent.Close())
	m, err := far.Receive(t.Context())
	require.NoError(t, err)
	require.True(t, open(m.FDs[0]))
	released = m.FDs[0].Released()
	require.NoError(t, m.Close())
	require.NoError(t, released.Wait(peertest.Context(t)))
}

func TestFDIsClosedOnce(t *testing.T) {
	peertest.NoLeak(t)
	f := file(t, "x")
	d, err := f.Dup()
	require.NoError(t, err)
	other := number(t, "y")
	var n int
	require.NoError(t, f.Use(func(i int) error { n = i; return nil }))
	require.NoError(t, f.Close())
	// The next owner of the number keeps it.
	require.NoError(t, unix.Dup3(other, n, unix.O_CLOEXEC))
	require.NoError(t, f.Close())
	_, err = unix.FcntlInt(uintptr(n), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Close(n))
	require.NoError(t, unix.Close(other))
	require.ErrorIs(t, f.Use(func(int) error { return nil }), cuda.ErrClosed)
	_, err = f.Dup()
	require.ErrorIs(t, err, cuda.ErrClosed)
	_, err = f.File("f")
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.Equal(t, "x", contents(t, d))
	require.NoError(t, d.Close())
}

func TestNewFDOfNothing(t *testing.T) {
	peertest.NoLeak(t)
	for _, n := range []int{-1, 1 << 20} {
		_, err := peer.NewFD(n)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "pass one that is open")
	}
	d := new(peer.FD)
	require.ErrorContains(t, d.Use(nil), "peer.FD.Use: invalid argument: no function")
}

func TestFDIsHandedOver(t *testing.T) {
	peertest.NoLeak(t)
	f := file(t, "handed over")
	before := peer.OpenFDs()
	o, err := f.File("name")
	require.NoError(t, err)
	require.Equal(t, before-1, peer.OpenFDs())
	require.Equal(t, "name", o.Name())
	require.NoError(t, f.Close(), "it is closed already")
	b, err := io.ReadAll(io.NewSectionReader(o, 0, 100))
	require.NoError(t, err)
	require.Equal(t, "handed over", string(b))
	require.NoError(t, o.Close())
}

func TestFDIsClosedByManyAndOnlyBetweenUses(t *testing.T) {
	peertest.NoLeak(t)
	f := file(t, "x")
	inside, leave := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = f.Use(func(n int) error {
			close(inside)
			<-leave
			_, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0)
			if err != nil {
				t.Error("closed while it was lent")
			}
			return nil
		})
	})
	<-inside
	for range 8 {
		wg.Go(func() {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(time.Millisecond)
	close(leave)
	wg.Wait()
}

func TestALostFDIsReportedAndClosed(t *testing.T) {
	peertest.NoLeak(t)
	var out testlog.Log
	peer.TraceFDs(slog.New(slog.NewTextHandler(&out, nil)))
	defer peer.TraceFDs(nil)
	lost, open := peer.LostFDs(), peer.OpenFDs()
	func() { file(t, "lost") }()
	kept := file(t, "kept")
	require.Eventually(t, func() bool { runtime.GC(); return peer.OpenFDs() == open+1 }, peertest.Guard, time.Millisecond)
	require.Equal(t, lost+1, peer.LostFDs())
	require.Contains(t, out.String(), "peer_test.file")
	require.Contains(t, out.String(), "TestALostFDIsReportedAndClosed")
	require.NoError(t, kept.Close())
	runtime.GC()
	require.Equal(t, lost+1, peer.LostFDs(), "one that was closed is not lost")
}
