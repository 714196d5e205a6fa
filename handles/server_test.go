//go:build linux

package handles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/stretchr/testify/require"
)

// A server takes no files, so a client cannot fill its table of them.
func TestAClientCannotFillTheTableOfFiles(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	c := v.dial()
	before := OpenFDs()
	null := nullFD(t)
	var numbers []int
	for range 200 {
		numbers = append(numbers, null.s.n)
	}
	m := Message{Kind: listMessage, FDs: make([]*FD, 4096), Body: pack(&list{1}).Body}
	most := 0
	for sent := 0; sent < 4000; sent += 200 {
		p, _, _ := c.out.packet(nil, &m, min(sent, 4), sent, 200)
		if err := c.sock.Send(p, numbers); err != nil {
			break
		}
		c.out.sequence++
		time.Sleep(5 * time.Millisecond)
		most = max(most, OpenFDs()-before)
	}
	require.LessOrEqual(t, most, 300, "files of one client that the server holds")
	v.served()
}

// A publication that was on its way when the server closed is refused.
func TestAPublicationWhileTheServerCloses(t *testing.T) {
	s := NewServer(ServerOptions{})
	require.True(t, s.closer.Acquire()) // as publish has it
	over := make(chan error, 1)
	go func() { over <- s.Close() }()
	require.Eventually(t, s.closer.Closed, Guard, time.Millisecond)
	require.Eventually(t, func() bool {
		err := s.enter("test", &Publication{name: "late"})
		s.leave(&Publication{name: "late"})
		return errors.Is(err, cuda.ErrClosed)
	}, Guard, time.Millisecond)
	s.closer.Release()
	require.NoError(t, <-over)
}

// A program that goes on connecting leaves room for the others.
func TestClientsOfOneProcessLeaveRoom(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxPerProcess: 3}, Options{}) // one is the honest one
	serve := func(pid int) (chan error, *Conn) {
		near, far := linked(t)
		near.peer, near.known = Peer{PID: pid, UID: uint32(os.Geteuid())}, true
		over := make(chan error, 1)
		go func() { over <- v.server.ServeConn(context.Background(), near) }()
		return over, far
	}
	listed := func(c *Conn) {
		require.NoError(t, c.Send(moment(t), pack(&list{1})))
		_ = v.receive(c)
	}
	listed(v.dial())
	_, last := serve(os.Getpid())
	listed(last)
	over, refused := serve(os.Getpid())
	err := <-over
	require.ErrorIs(t, err, ErrTooLarge)
	require.ErrorContains(t, err, "MaxPerProcess")
	_, err = refused.Receive(moment(t))
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, fmt.Sprintf("process %d", os.Getpid()))
	_, another := serve(os.Getpid() + 1)
	listed(another)
	require.NoError(t, last.Close())
	require.Eventually(t, func() bool {
		over, again := serve(os.Getpid())
		defer func() { require.NoError(t, again.Close()) }()
		if again.Send(moment(t), pack(&list{1})) != nil {
			return false
		}
		_, err := again.Receive(moment(t))
		require.NoError(t, again.Close())
		<-over
		return err == nil
	}, Guard, 10*time.Millisecond)
	v.served()
}

// Processes of other pid namespaces have the same number here, 0, and one user's
// take no place of another's.
func TestProcessesThatCannotBeToldApart(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxSessions: 8, MaxPerProcess: 2}, Options{})
	serve := func(uid int) (chan error, *Conn) {
		near, far := linked(t)
		near.peer, near.known = Peer{UID: uint32(uid)}, true
		over := make(chan error, 1)
		go func() { over <- v.server.ServeConn(context.Background(), near) }()
		return over, far
	}
	let := func(uid int) {
		_, far := serve(uid)
		require.NoError(t, far.Send(moment(t), pack(&list{1})))
		_ = v.receive(far)
	}
	for range 2 {
		let(424242)
	}
	over, _ := serve(424242)
	require.ErrorContains(t, <-over, "MaxPerProcess")
	let(os.Geteuid())
	v.served()
}

// Clients of another user take at most half of the places.
func TestClientsOfAnotherUserLeaveRoom(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxSessions: 4}, Options{}) // one is the honest one
	serve := func() (chan error, *Conn) {
		near, file, err := Pair(Options{})
		require.NoError(t, err)
		far, err := Inherit(file, Options{})
		require.NoError(t, err)
		near.peer, near.known = Peer{UID: 424242}, true
		over := make(chan error, 1)
		go func() { over <- v.server.ServeConn(context.Background(), near) }()
		return over, far
	}
	var ends []chan error
	for range 2 {
		over, far := serve()
		defer far.Close()
		require.NoError(t, far.Send(moment(t), pack(&list{1})))
		_ = v.receive(far)
		ends = append(ends, over)
	}
	over, far := serve()
	require.ErrorIs(t, <-over, ErrTooLarge)
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
// is quicker, and fills nobody's log with warnings.
func TestARefusedClientLearnsWhy(t *testing.T) {
	log := slog.New(slog.NewTextHandler(loud{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	v := newVictim(t, ServerOptions{MaxSessions: 2, Log: log}, Options{}) // of which the victim has one follower
	first := v.dial()
	require.NoError(t, first.Send(moment(t), pack(&list{1})))
	v.receive(first)
	for range 100 {
		c, err := Dial(moment(t), v.path, Options{})
		if err == nil {
			k := NewClient(c)
			_, err = k.List(moment(t))
			require.NoError(t, k.Close())
		}
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "where 2 is the most")
	}
}
