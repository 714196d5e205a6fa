//go:build linux

package publish

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// orphans are two followers of a publisher in another process.
type orphans struct {
	path         string
	machine      *sim.Machine
	client       *Client
	numbers      *Follower[uint32]
	more         *Follower[uint32]
	endPublisher func()
}

func newOrphans(t *testing.T) *orphans {
	t.Helper()
	folder, dir := filepath.Join(t.TempDir(), "machine"), filepath.Join(t.TempDir(), "d")
	m, sys := sim.Open(t, sim.Options{Folder: folder})
	c := reexec.Command(t, "heir")
	c.Start()
	c.Send(map[string]any{"Folder": folder, "Dir": dir})
	for _, do := range []string{"publish", "append", "publish more"} {
		var is struct{ Err string }
		c.Send(map[string]any{"Do": do, "N": 1000})
		c.Recv(&is)
		require.Empty(t, is.Err, do)
	}
	ctx := peertest.Context(t)
	o := &orphans{path: filepath.Join(dir, "s"), machine: m, endPublisher: c.Kill}
	var err error
	o.client, err = Dial(ctx, o.path, DialOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, o.client.Close()) })
	for name, f := range map[string]**Follower[uint32]{"numbers": &o.numbers, "more": &o.more} {
		*f, err = Follow[uint32](ctx, o.client, sys.Devices()[0], name, FollowOptions{KeepDescriptors: true})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, (*f).Close()) })
		require.NoError(t, (*f).Next(ctx))
	}
	return o
}

// names lists what is served at the socket.
func (o *orphans) names(t *testing.T) (all []string) {
	t.Helper()
	k, err := Dial(peertest.Context(t), o.path, DialOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	listed, err := k.List(peertest.Context(t))
	require.NoError(t, err)
	for _, l := range listed {
		all = append(all, l.Name)
	}
	return all
}

// bound waits until a server has bound the socket.
func (o *orphans) bound(t *testing.T, by *Server) {
	t.Helper()
	require.Eventually(t, func() bool {
		by.mu.Lock()
		defer by.mu.Unlock()
		return by.taken[o.path] != nil
	}, peertest.Guard, time.Millisecond)
}

// Of two calls for one socket the first binds it. If the first then fails the second
// binds it again, and what that publishes is served.
func TestTwoTakeOversOfOneServer(t *testing.T) {
	o := newOrphans(t)
	server := NewServer(ServerOptions{})
	o.numbers.f.lengths <- struct{}{} // the first does not get past its binding
	o.endPublisher()
	within, giveUp := context.WithCancel(peertest.Context(t))
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := TakeOver(within, server, o.numbers, TakeOverOptions{})
		first <- err
	}()
	o.bound(t, server)
	go func() {
		_, err := TakeOver(peertest.Context(t), server, o.more, TakeOverOptions{})
		second <- err
	}()
	giveUp()
	require.ErrorIs(t, <-first, context.Canceled)
	require.NoError(t, <-second)
	require.Equal(t, []string{"more"}, o.names(t))
	o.numbers.f.lengths.Give()
	_, err := TakeOver(peertest.Context(t), server, o.numbers, TakeOverOptions{})
	require.NoError(t, err)
	require.Equal(t, []string{"more", "numbers"}, o.names(t))
	require.NoError(t, server.Close())
	require.NoError(t, o.numbers.Array().Close())
	require.NoError(t, o.more.Array().Close())
}

// A TakeOver that waits for a publisher that lives ends with its context, and with its
// server.
func TestATakeOverIsGivenUp(t *testing.T) {
	o := newOrphans(t)
	server := NewServer(ServerOptions{})
	_, err := TakeOver(canceled(t), server, o.numbers, TakeOverOptions{})
	require.ErrorIs(t, err, context.Canceled)
	over := make(chan error, 1)
	go func() {
		_, err := TakeOver(peertest.Context(t), server, o.numbers, TakeOverOptions{})
		over <- err
	}()
	require.Eventually(t, func() bool { return !server.closer.Now().Quiet() }, peertest.Guard, time.Millisecond)
	peertest.InTime(t, "Server.Close", server.Close)
	require.ErrorIs(t, <-over, cuda.ErrClosed)

	server = NewServer(ServerOptions{})
	require.NoError(t, o.client.Close())
	_, err = TakeOver(peertest.Context(t), server, o.numbers, TakeOverOptions{})
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.ErrorContains(t, err, "client")
	require.NoError(t, server.Close())
	o.endPublisher()
}

// A socket that another process has is refused with that process's name, and the
// follower is unchanged.
func TestATakenSocketIsNotTakenOver(t *testing.T) {
	o := newOrphans(t)
	o.endPublisher()
	l, err := peer.Listen(filepath.Dir(o.path), filepath.Base(o.path), peer.Options{})
	require.NoError(t, err)
	server := NewServer(ServerOptions{})
	_, err = TakeOver(peertest.Context(t), server, o.numbers, TakeOverOptions{})
	require.ErrorIs(t, err, cuda.ErrInUse)
	var served *peer.ServedError
	require.ErrorAs(t, err, &served)
	require.Equal(t, o.path, served.Path)
	require.NoError(t, l.Close())
	_, err = TakeOver(peertest.Context(t), server, o.numbers, TakeOverOptions{})
	require.NoError(t, err)
	require.NoError(t, server.Close())
	require.NoError(t, o.numbers.Array().Close())
}

// A client may come back to another process after the one that TakeOver waited for has
// ended. That one is waited for, too, even if it no longer listens.
func TestATakeOverWaitsForTheProcessThatTheClientCameBackTo(t *testing.T) {
	o, next := newOrphans(t), newOrphans(t)
	server := NewServer(ServerOptions{})
	o.endPublisher()
	o.client.process, next.client.process = next.client.process, o.client.process
	within, giveUp := context.WithCancel(peertest.Context(t))
	took := make(chan error, 1)
	go func() {
		at, err := o.client.place("test")
		if err == nil {
			_, err = server.takeOverInTurn(within, "test", o.numbers.f, at, TakeOverOptions{})
			_ = at.folder.Close()
		}
		took <- err
	}()
	o.bound(t, server)
	giveUp()
	require.ErrorContains(t, <-took, "the publisher's process has not ended")
	require.NoError(t, o.numbers.f.taking.Err(), "the follower is unchanged")
	next.endPublisher()
	_, err := TakeOver(peertest.Context(t), server, o.numbers, TakeOverOptions{})
	require.NoError(t, err)
	require.NoError(t, server.Close())
	require.NoError(t, o.numbers.Array().Close())
}
