//go:build linux

package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A server takes no files, so a client cannot fill its table of them.
func TestAClientCannotFillTheTableOfFiles(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	near, file, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	defer file.Close()
	raw := int(file.Fd())
	nonce := peertest.Greet(t, raw)
	over := make(chan error, 1)
	go func() { over <- v.server.ServeConn(context.Background(), near) }()
	before := peer.OpenFDs()
	var rights []byte
	require.NoError(t, peertest.NullFD(t).Use(func(n int) error {
		rights = unix.UnixRights(slices.Repeat([]int{n}, 200)...)
		return nil
	}))
	most, body := 0, "body"
	for i := range uint64(20) { // of a message that has 4,096 files and never ends
		p := peertest.Packet(wire.List, nonce, 1+i, 200, 4, 4096, body)
		if err := unix.Sendmsg(raw, p, rights, nil, unix.MSG_NOSIGNAL); err != nil {
			break
		}
		body = ""
		time.Sleep(5 * time.Millisecond)
		most = max(most, peer.OpenFDs()-before)
	}
	require.ErrorIs(t, <-over, peer.ErrProtocol)
	require.LessOrEqual(t, most, 300, "files of one client that the server holds")
	v.served()
}

// A publication that was on its way when the server closed is refused.
func TestAPublicationWhileTheServerCloses(t *testing.T) {
	s := NewServer(ServerOptions{})
	require.True(t, s.closer.Acquire()) // as publish has it
	over := make(chan error, 1)
	go func() { over <- s.Close() }()
	require.Eventually(t, s.closer.Closed, peertest.Guard, time.Millisecond)
	require.Eventually(t, func() bool {
		err := s.enter("test", &Publication{name: "late"})
		s.leave(&Publication{name: "late"})
		return errors.Is(err, cuda.ErrClosed)
	}, peertest.Guard, time.Millisecond)
	s.closer.Release()
	require.NoError(t, <-over)
}

// A program that goes on connecting leaves room for the others.
func TestClientsOfOneProcessLeaveRoom(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.perProcess = 3 }) // one is the honest one
	serve := func(pid int) (chan error, *peer.Conn) {
		near, far := peertest.Pair(t, peer.Options{})
		over := make(chan error, 1)
		go func() { over <- v.serveAs(near, peer.Credentials{PID: pid, UID: uint32(os.Geteuid())}) }()
		return over, far
	}
	listed := func(c *peer.Conn) {
		require.NoError(t, c.Send(peertest.Context(t), pack(&list{1})))
		_ = v.receive(c)
	}
	listed(v.dial())
	_, last := serve(os.Getpid())
	listed(last)
	over, refused := serve(os.Getpid())
	err := <-over
	require.ErrorIs(t, err, peer.ErrTooLarge)
	require.ErrorContains(t, err, "by one client")
	_, err = refused.Receive(peertest.Context(t))
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, fmt.Sprintf("process %d", os.Getpid()))
	_, another := serve(os.Getpid() + 1)
	listed(another)
	require.NoError(t, last.Close())
	require.Eventually(t, func() bool {
		over, again := serve(os.Getpid())
		defer func() { require.NoError(t, again.Close()) }()
		if again.Send(peertest.Context(t), pack(&list{1})) != nil {
			return false
		}
		_, err := again.Receive(peertest.Context(t))
		require.NoError(t, again.Close())
		<-over
		return err == nil
	}, peertest.Guard, 10*time.Millisecond)
	v.served()
}

// Processes of other pid namespaces have the same number here, 0, and one user's
// take no place of another's.
func TestProcessesThatCannotBeToldApart(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.sessions, l.perProcess = 8, 2 })
	serve := func(uid int) (chan error, *peer.Conn) {
		near, far := peertest.Pair(t, peer.Options{})
		over := make(chan error, 1)
		go func() { over <- v.serveAs(near, peer.Credentials{UID: uint32(uid)}) }()
		return over, far
	}
	let := func(uid int) {
		_, far := serve(uid)
		require.NoError(t, far.Send(peertest.Context(t), pack(&list{1})))
		_ = v.receive(far)
	}
	for range 2 {
		let(424242)
	}
	over, _ := serve(424242)
	require.ErrorContains(t, <-over, "by one client")
	let(os.Geteuid())
	v.served()
}

// Clients of another user take at most half of the places.
func TestClientsOfAnotherUserLeaveRoom(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.sessions = 4 }) // one is the honest one
	serve := func() (chan error, *peer.Conn) {
		near, file, err := peer.Pair(peer.Options{})
		require.NoError(t, err)
		far, err := peer.Inherit(file, peer.Options{})
		require.NoError(t, err)
		over := make(chan error, 1)
		go func() { over <- v.serveAs(near, peer.Credentials{UID: 424242}) }()
		return over, far
	}
	var ends []chan error
	for range 2 {
		over, far := serve()
		defer far.Close()
		require.NoError(t, far.Send(peertest.Context(t), pack(&list{1})))
		_ = v.receive(far)
		ends = append(ends, over)
	}
	over, far := serve()
	require.ErrorIs(t, <-over, peer.ErrTooLarge)
	require.NoError(t, far.Close())
	v.served() // another of its own user is let in
	require.Len(t, ends, 2)
}

// loud is a log in which nothing may stand.
type loud struct{ testing.TB }

func (l loud) Write(p []byte) (int, error) {
	l.Errorf("logged: %s", p)
	return len(p), nil
}

// A client that is not let in learns why from its first request, whichever side
// is quicker, and fills no log with warnings.
func TestARefusedClientLearnsWhy(t *testing.T) {
	log := slog.New(slog.NewTextHandler(loud{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	v := newVictim(t, ServerOptions{Log: log}, peer.Options{}, func(l *limits) { l.sessions = 2 }) // of which the victim has one follower
	first := v.dial()
	require.NoError(t, first.Send(peertest.Context(t), pack(&list{1})))
	v.receive(first)
	for range 100 {
		c, err := peer.Dial(peertest.Context(t), v.path, peer.Options{})
		if err == nil {
			k := NewClient(c)
			_, err = k.List(peertest.Context(t))
			require.NoError(t, k.Close())
		}
		require.ErrorIs(t, err, peer.ErrRefused)
		require.ErrorContains(t, err, "where 2 is the most")
	}
}

func TestANegativeServerOptionIsRefused(t *testing.T) {
	s := NewServer(ServerOptions{MaxPinned: -1})
	l, err := peer.Listen(filepath.Join(t.TempDir(), "d"), "s", peer.Options{})
	require.NoError(t, err)
	near, _ := peertest.Pair(t, peer.Options{})
	_, err = s.Publish("x", new(vmm.Buffer))
	for _, err := range []error{err, s.Serve(t.Context(), l), s.ServeConn(t.Context(), near)} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "ServerOptions.MaxPinned")
	}
	require.NoError(t, l.Close())
	require.NoError(t, s.Close())
}
