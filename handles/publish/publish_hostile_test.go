//go:build linux

package publish

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// victim is a server that publishes 1,000 numbers and has an honest follower.
type victim struct {
	*testing.T
	machine *sim.Machine
	dev     *cuda.Device
	server  *Server
	path    string
	array   *vmm.Array[uint32]
	p       *Publication
	honest  *Follower[uint32]

	standing int // streams that stand still: each works on an element of its own
}

// newVictim makes a server with a publication and an honest follower. lower changes the
// limits.
func newVictim(t *testing.T, o ServerOptions, c peer.Options, lower ...func(*limits)) *victim {
	before := peer.OpenFDs()
	t.Cleanup(func() { require.Equal(t, before, peer.OpenFDs()) })
	m, sys := sim.Open(t)
	v := &victim{T: t, machine: m, dev: sys.Devices()[0]}
	l, err := peer.Listen(filepath.Join(t.TempDir(), "d"), "s", c)
	require.NoError(t, err)
	v.path = l.Path()
	most := serverLimits
	for _, f := range lower {
		f(&most)
	}
	v.server = newServer(o, most)
	over := make(chan error, 1)
	go func() { over <- v.server.Serve(context.Background(), l) }()
	v.array, err = vmm.NewArray[uint32](v.dev, vmm.BufferOptions{Reserve: 64 << 20, Chunks: vmm.FixedChunks(2 << 20)})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, v.server.Close())
		require.NoError(t, <-over)
		require.NoError(t, l.Close())
		require.NoError(t, v.array.Close())
	})
	v.p, err = Array(v.server, "numbers", v.array)
	require.NoError(t, err)
	v.announce(1000)
	k := NewClient(v.dial())
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	v.honest, err = Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.honest.Close()) })
	require.NoError(t, v.honest.Next(peertest.Context(t)))
	return v
}

func (v *victim) dial() *peer.Conn {
	v.Helper()
	c, err := peer.Dial(peertest.Context(v), v.path, peer.Options{})
	require.NoError(v, err)
	v.Cleanup(func() { require.NoError(v, c.Close()) })
	return c
}

// serveAs serves a client that counts as a process.
func (v *victim) serveAs(c *peer.Conn, as peer.Credentials) error {
	if !v.server.closer.Acquire() {
		return c.Close()
	}
	defer v.server.closer.Release()
	return v.server.serve(connOf(c), client{as, true})
}

func (v *victim) announce(n int) {
	v.Helper()
	require.NoError(v, v.array.Resize(nil, v.array.Len()+n))
	require.NoError(v, v.p.Announce(peertest.Context(v), v.array.Len(), nil))
}

// served requires that the server goes on serving others, old and new.
func (v *victim) served() {
	v.Helper()
	v.announce(10)
	for v.honest.Len() != v.array.Len() {
		require.NoError(v, v.honest.Next(peertest.Context(v)))
	}
	k := NewClient(v.dial())
	a, err := Open[uint32](peertest.Context(v), k, v.dev, "numbers", handles.ImportOptions{})
	require.NoError(v, err)
	require.Equal(v, v.array.Len(), a.Len())
	require.NoError(v, a.Close())
	require.NoError(v, k.Close())
}

// joined follows by hand.
func (v *victim) joined(c *peer.Conn) (token, *update, []*peer.FD) {
	v.Helper()
	require.NoError(v, c.Send(peertest.Context(v), pack(&follow{number: 1, access: WriteAccess, name: "numbers"})))
	m := v.receive(c)
	require.NoError(v, m.Close())
	said, err := toClient(m.Kind, m.Body, len(m.FDs))
	require.NoError(v, err)
	to := said.(*accepted).token
	m = v.receive(c)
	said, err = toClient(m.Kind, m.Body, len(m.FDs))
	require.NoError(v, err)
	u := said.(*update)
	require.Equal(v, to, u.token)
	return to, u, m.FDs
}

func (v *victim) receive(c *peer.Conn) peer.Message {
	v.Helper()
	m, err := c.Receive(peertest.Context(v))
	require.NoError(v, err)
	return m
}

func TestHostileClientsEndAlone(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	for what, m := range map[string]peer.Message{
		"an unknown kind":           {Kind: 77, Body: []byte("hello")},
		"a message of a server":     pack(&ended{state: Ended, status: statusLeft}),
		"garbage":                   {Kind: wire.Follow, Body: []byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")},
		"a cut request":             {Kind: wire.Follow, Body: pack(&follow{number: 1, access: WriteAccess, name: "numbers"}).Body[:9]},
		"a file with a request":     pack(&list{1}, peertest.NullFD(t)),
		"many files with a request": {Kind: wire.List, Body: pack(&list{1}).Body, FDs: []*peer.FD{peertest.NullFD(t), peertest.NullFD(t), peertest.NullFD(t)}},
		"an absurd name":            {Kind: wire.Follow, Body: append(make([]byte, 12), 0xff, 0xff)},
	} {
		c := v.dial()
		require.NoError(t, c.Send(peertest.Context(t), m), what)
		_, err := c.Receive(peertest.Context(t))
		require.ErrorIs(t, err, peer.ErrRefused, what)
		require.ErrorContains(t, err, "protocol violation", what)
	}
	for what, ack := range map[string]func(to token, u *update) message{
		"an acknowledgement of no update":         func(to token, u *update) message { return &done{to, u.serial + 1, statusOK, 1, ""} },
		"an acknowledgement of absurd chunks":     func(to token, u *update) message { return &done{to, u.serial, statusOK, 1 << 31, ""} },
		"a refusal with absurd chunks":            func(to token, u *update) message { return &done{to, u.serial, statusFailed, 7, "no"} },
		"the same acknowledgement, a second time": func(to token, u *update) message { return &done{to, u.serial, statusOK, 1, ""} },
	} {
		c := v.dial()
		to, u, fds := v.joined(c)
		require.NoError(t, peer.CloseAll(fds))
		if what == "the same acknowledgement, a second time" {
			require.NoError(t, c.Send(peertest.Context(t), pack(ack(to, u))))
		}
		require.NoError(t, c.Send(peertest.Context(t), pack(ack(to, u))))
		_, err := c.Receive(peertest.Context(t))
		require.ErrorIs(t, err, peer.ErrRefused, what)
	}
	v.served()
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond, "the others are forgotten")
}

func TestUnknownNamesAndTokensAreAnswered(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	c, other := v.dial(), v.dial()
	foreign, _, fds := v.joined(other)
	require.NoError(t, peer.CloseAll(fds))
	require.NoError(t, c.Send(peertest.Context(t), pack(&follow{number: 5, access: WriteAccess, name: "secrets"})))
	m := v.receive(c)
	said, err := toClient(m.Kind, m.Body, 0)
	require.NoError(t, err)
	require.EqualValues(t, 5, said.(*denied).number)
	require.Equal(t, statusUnknown, said.(*denied).status)
	for _, to := range []token{{}, newToken(), foreign} {
		for _, request := range []message{&leave{to}, &done{to, 1, statusOK, 1, ""}} {
			require.NoError(t, c.Send(peertest.Context(t), pack(request)))
			m := v.receive(c)
			said, err := toClient(m.Kind, m.Body, 0)
			require.NoError(t, err)
			require.Equal(t, &ended{to, 0, Ended, statusUnknown, "no follower of that token"}, said)
		}
	}
	// Nothing happened to whom the token belongs.
	require.Len(t, v.p.Stats().Followers, 2)
	_, _, fds = v.joined(c)
	require.NoError(t, peer.CloseAll(fds))
	v.served()
}

// A client is told why a follower ended, whatever it sends before it is told.
func TestTheReasonOfAnEndComesFirst(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	c := v.dial()
	for range 500 {
		to, u, fds := v.joined(c)
		require.NoError(t, peer.CloseAll(fds))
		require.NoError(t, c.Send(peertest.Context(t), pack(&done{to, u.serial, statusOK, uint32(len(fds)), ""})))
		for range 3 {
			require.NoError(t, c.Send(peertest.Context(t), pack(&leave{to})))
		}
		require.NoError(t, c.Send(peertest.Context(t), pack(&list{2})))
		var ends []status
		for listed := false; !listed || len(ends) == 0; {
			m := v.receive(c)
			said, err := toClient(m.Kind, m.Body, 0)
			require.NoError(t, err)
			if e, ok := said.(*ended); ok {
				ends = append(ends, e.status)
			} else {
				require.IsType(t, &listing{}, said)
				listed = true
			}
		}
		require.Equal(t, statusLeft, ends[0])
	}
}

func TestSilentClientsAreSentAway(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	most := serverLimits
	most.idle = 50 * time.Millisecond
	server := newServer(ServerOptions{}, most)
	defer func() { require.NoError(t, server.Close()) }()
	p, err := Array(server, "numbers", v.array)
	require.NoError(t, err)
	near, follower := peertest.Pair(t, peer.Options{})
	// It asks before the server begins to count.
	require.NoError(t, follower.Send(peertest.Context(t), pack(&follow{number: 1, access: WriteAccess, name: "numbers"})))
	go func() { _ = server.ServeConn(context.Background(), near) }()
	accepted := v.receive(follower)
	require.NoError(t, accepted.Close())
	near, silent := peertest.Pair(t, peer.Options{})
	go func() { _ = server.ServeConn(context.Background(), near) }()
	_, err = silent.Receive(peertest.Context(t))
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, "sent no request")
	require.Len(t, p.Stats().Followers, 1, "it follows, and may be silent")
	v.served()
}

func TestCrowdsAreBounded(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.sessions, l.followers = 3, 2 })
	first, second := v.dial(), v.dial()
	for _, c := range []*peer.Conn{first, second} { // both are there
		require.NoError(t, c.Send(peertest.Context(t), pack(&list{1})))
		v.receive(c)
	}
	third, err := peer.Dial(peertest.Context(t), v.path, peer.Options{})
	if err == nil {
		_, err = third.Receive(peertest.Context(t))
		require.NoError(t, third.Close())
	}
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, "where 3 is the most")
	for range 2 {
		_, _, fds := v.joined(first)
		require.NoError(t, peer.CloseAll(fds))
	}
	require.NoError(t, first.Send(peertest.Context(t), pack(&follow{number: 9, access: WriteAccess, name: "numbers"})))
	m := v.receive(first)
	said, err := toClient(m.Kind, m.Body, 0)
	require.NoError(t, err)
	require.Equal(t, statusLimit, said.(*denied).status)
	require.NoError(t, first.Close())
	require.NoError(t, second.Close())
	require.Eventually(t, func() bool {
		v.server.mu.Lock()
		defer v.server.mu.Unlock()
		return len(v.server.sessions) == 1
	}, peertest.Guard, time.Millisecond)
	v.served()
}

// A follower that takes nothing back is reported, and ended where it keeps too much. The
// client's other followers go on.
func TestFollowersThatDoNotAnswer(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxPinned: 3 << 20}, peer.Options{}, func(l *limits) { l.acknowledging = 0 })
	v.announce(2_000_000)
	client := v.dial()
	join := func() token {
		to, u, fds := v.joined(client)
		require.NoError(t, peer.CloseAll(fds))
		require.Len(t, u.chunks, 4)
		require.NoError(t, client.Send(peertest.Context(t), pack(&done{to, u.serial, statusOK, 4, ""})))
		return to
	}
	lazy, neighbour := join(), join()
	var ends []ended
	answer := func() { // of both, but for what the lazy one is told
		for range 2 {
			m := v.receive(client)
			require.NoError(t, m.Close())
			said, err := toClient(m.Kind, m.Body, 0)
			require.NoError(t, err)
			switch said := said.(type) {
			case *ended:
				ends = append(ends, *said)
			case *update:
				if said.token == neighbour {
					require.NoError(t, client.Send(peertest.Context(t), pack(&done{neighbour, said.serial, statusOK, said.keep, ""})))
				}
			}
		}
	}
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	require.NoError(t, v.p.Shrink(1_000_000))
	answer()
	require.Eventually(t, func() bool { return v.p.Stats().Pinned == 4<<20 }, peertest.Guard, time.Millisecond, "the others have let go")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, v.p.Settle(ctx), peer.ErrTimeout)
	require.NoError(t, v.p.Shrink(900_000), "over the limit since before")
	answer()
	require.Len(t, ends, 1)
	require.Equal(t, ended{lazy, 0, Ended, statusLimit, `more than 3 MiB of publication "numbers" are still mapped that are no longer published`}, ends[0])
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	require.Len(t, v.p.Stats().Followers, 2)
	require.NoError(t, v.honest.Err())
	v.served()
}

// Several quick Shrinks end no follower that has not had the time to acknowledge the first.
func TestQuickShrinksEndNoHonestFollower(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxPinned: 1 << 20}, peer.Options{})
	v.announce(2_000_000)
	slow := make(chan struct{})
	f := v.second(FollowOptions{Quiesce: func(int) []*cuda.Stream { <-slow; return nil }})
	for f.Len() != v.array.Len() {
		require.NoError(t, f.Next(peertest.Context(t)))
	}
	for length := 1_500_000; length > 0; length -= 500_000 {
		require.NoError(t, v.p.Shrink(length))
	}
	close(slow)
	require.NoError(t, v.p.Settle(peertest.Context(t)))
	require.Len(t, v.p.Stats().Followers, 2)
	require.NoError(t, f.Err())
	require.NoError(t, f.Close())
	v.served()
}

// A client that does not read is cut off after a limit, and delays no other.
func TestClientsThatDoNotRead(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	near, deaf := peertest.Pair(t, peer.Options{})
	peertest.SetTimeout(near, 300*time.Millisecond)
	over := make(chan error, 1)
	go func() { over <- v.server.ServeConn(context.Background(), near) }()
	var err error
	for err == nil {
		err = deaf.Send(peertest.Context(t), pack(&list{1}))
	}
	require.NotErrorIs(t, err, peer.ErrTimeout, "it is not given up")
	require.ErrorIs(t, <-over, peer.ErrTimeout)
	v.served()
}

// A client that follows what there is not, and does not read the denials, holds no more of
// the server than its followers would.
func TestDenialsThatAreNotReadAreBounded(t *testing.T) {
	const followers = 64
	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.followers, l.followRate = followers, 1_000_000 })
	near, deaf := peertest.Pair(t, peer.Options{})
	over := make(chan error, 1)
	go func() { over <- v.server.ServeConn(context.Background(), near) }()
	before := runtime.NumGoroutine()
	brief, cancel := context.WithTimeout(peertest.Context(t), 3*time.Second)
	defer cancel()
	var err error
	most := 0
	for i := 0; err == nil && i < 5000; i++ {
		err = deaf.Send(brief, pack(&follow{number: uint32(i), access: WriteAccess, name: "nothing"}))
		time.Sleep(100 * time.Microsecond) // so that each is denied before the next
		most = max(most, runtime.NumGoroutine())
	}
	require.ErrorIs(t, err, peer.ErrTimeout, "the server reads no more than it can reply to")
	require.LessOrEqual(t, most, before+followers+20)
	require.NoError(t, deaf.Close())
	require.NoError(t, <-over)
	v.served()
}

// fake is a server that says what a test tells it to the first that follows.
func fake(t *testing.T, script func(c *peer.Conn, d *cuda.Device, number uint32)) (*Client, *cuda.Device) {
	before := peer.OpenFDs()
	t.Cleanup(func() { require.Equal(t, before, peer.OpenFDs()) })
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	near, file, err := peer.Pair(peer.Options{})
	require.NoError(t, err)
	far, err := peer.Inherit(file, peer.Options{})
	require.NoError(t, err)
	over := make(chan struct{})
	go func() {
		defer close(over)
		m, err := far.Receive(context.Background())
		if err != nil {
			return
		}
		asked, err := toServer(m.Kind, m.Body, 0)
		if f, ok := asked.(*follow); ok && err == nil {
			script(far, d, f.number)
		}
		for err == nil { // until the client is gone
			m, err = far.Receive(context.Background())
			_ = m.Close()
		}
	}()
	k := NewClient(near)
	t.Cleanup(func() {
		require.NoError(t, k.Close())
		require.NoError(t, far.Close())
		<-over
	})
	return k, d
}

// about describes numbers on a device.
func about(d *cuda.Device) handles.Descriptor {
	return handles.Descriptor{Kind: handles.ArrayKind, Element: handles.Uint32, ElementSize: 4, Location: cuda.OnDevice(0), Device: d.UUID(), Handle: vmm.PosixFD}
}

func memoryFile(t testing.TB, size int64, seal int) *peer.FD {
	n, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(n, size))
	_, err = unix.FcntlInt(uintptr(n), unix.F_ADD_SEALS, seal)
	require.NoError(t, err)
	f, err := peer.NewFD(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

const sealed = unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

func TestHostileServersAreRefused(t *testing.T) {
	size := int64(os.Getpagesize())
	to := token{1}
	welcome := func(d *cuda.Device, n uint32) message {
		return &accepted{number: n, token: to, reserved: 64 << 20, about: about(d)}
	}
	first := &update{state: Live, token: to, serial: 1, generation: 1, ordered: 1, length: 10, last: true, chunks: []chunk{{1, 2 << 20}}}
	for what, row := range map[string]struct {
		is  error
		say func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32)
	}{
		"a reply that was not requested": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(&denied{n + 1, statusUnknown, ""}))
		}},
		"a listing": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(&listing{n, nil}))
		}},
		"a refusal": {peer.ErrRefused, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(&denied{n, statusFailed, "no"}))
		}},
		"garbage": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), peer.Message{Kind: wire.Accepted, Body: []byte{1, 2, 3}, FDs: []*peer.FD{peertest.NullFD(t)}})
		}},
		"no page": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n)))
		}},
		"two pages": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed), memoryFile(t, size, sealed)))
		}},
		"the null device for a page": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), peertest.NullFD(t)))
		}},
		"a page that may shrink": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, 0)))
		}},
		"an empty page": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, 0, sealed)))
		}},
		"a page of two": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, 2*size, sealed)))
		}},
		"a page that none can write": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed|unix.F_SEAL_WRITE)))
		}},
		"a word beyond the page": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: to, reserved: 64 << 20, slot: uint32(size / 8), about: about(d)}, memoryFile(t, size, sealed)))
		}},
		"an absurd range": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: to, reserved: 1 << 63, about: about(d)}, memoryFile(t, size, sealed)))
		}},
		"an empty range": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: to, about: about(d)}, memoryFile(t, size, sealed)))
		}},
		"an odd range": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: to, reserved: 3 << 20, about: about(d)}, memoryFile(t, size, sealed)))
		}},
		"another device": {cuda.ErrNotSupported, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			other := about(d)
			other.Device[3]++
			_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: to, reserved: 64 << 20, about: other}, memoryFile(t, size, sealed)))
		}},
		"other elements": {handles.ErrMismatch, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			other := about(d)
			other.Element = handles.Int32
			_ = c.Send(peertest.Context(t), pack(&accepted{number: n, token: to, reserved: 64 << 20, about: other}, memoryFile(t, size, sealed)))
		}},
		"an update for another follower": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *first
			u.token = token{9}
			_ = c.Send(peertest.Context(t), pack(&u, peertest.NullFD(t)))
		}},
		"a foreign file for memory": {handles.ErrNotMemory, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Send(peertest.Context(t), pack(first, peertest.NullFD(t)))
		}},
		"a chunk of an odd size": {handles.ErrSizeMismatch, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *first
			u.chunks = []chunk{{1, 4096}}
			_ = c.Send(peertest.Context(t), pack(&u, peertest.NullFD(t)))
		}},
		"chunks beyond the range": {peer.ErrTooLarge, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *first
			u.chunks = []chunk{{1, 1 << 62}, {2, 1 << 62}}
			_ = c.Send(peertest.Context(t), pack(&u, peertest.NullFD(t), peertest.NullFD(t)))
		}},
		"a length beyond the chunks": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *first
			u.length = 1 << 20
			_ = c.Send(peertest.Context(t), pack(&u, peertest.NullFD(t)))
		}},
		"a generation after the last": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *first
			u.generation = lastGeneration + 1
			_ = c.Send(peertest.Context(t), pack(&u, peertest.NullFD(t)))
		}},
		"chunks that it does not have": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Send(peertest.Context(t), pack(&update{state: Live, token: to, serial: 1, generation: 1, keep: 7, last: true}))
		}},
		"the ends of others, and warnings": {peer.ErrGone, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			for range 2000 {
				_ = c.Send(peertest.Context(t), peer.Message{Kind: wire.Warning})
				_ = c.Send(peertest.Context(t), pack(&ended{token{9}, 0, Ended, statusWithdrawn, ""}))
			}
			_ = c.Close()
		}},
		"two ends, and an update": {ErrWithdrawn, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			for range 2 {
				_ = c.Send(peertest.Context(t), pack(&ended{to, 0, Ended, statusWithdrawn, ""}))
			}
			_ = c.Send(peertest.Context(t), pack(first, peertest.NullFD(t)))
		}},
		"a generation out of turn": {peer.ErrProtocol, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Send(peertest.Context(t), pack(&update{state: Live, token: to, serial: 2, generation: 1, last: true}))
		}},
		"its end": {peer.ErrGone, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Close()
		}},
		"an end for an unknown reason": {peer.ErrRefused, func(t *testing.T, c *peer.Conn, d *cuda.Device, n uint32) {
			_ = c.Send(peertest.Context(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Send(peertest.Context(t), pack(&ended{to, 0, Ended, statusFailed, "out of descriptors"}))
		}},
	} {
		t.Run(what, func(t *testing.T) {
			k, d := fake(t, func(c *peer.Conn, d *cuda.Device, n uint32) { row.say(t, c, d, n) })
			f, err := Follow[uint32](peertest.Context(t), k, d, "numbers", FollowOptions{})
			if err == nil {
				for err == nil {
					err = f.Next(peertest.Context(t))
				}
				require.Zero(t, f.Len())
				require.NoError(t, f.Close())
			}
			require.ErrorIs(t, err, row.is)
		})
	}
}

// A request to a server that does not reply ends after the connection's limit, and a
// later reply makes no follower.
func TestServersThatDoNotAnswer(t *testing.T) {
	release := make(chan struct{})
	said := make(chan struct{})
	k, d := fake(t, func(c *peer.Conn, d *cuda.Device, n uint32) {
		<-release
		page := memoryFile(t, int64(os.Getpagesize()), sealed)
		_ = c.Send(context.Background(), pack(&accepted{number: n, token: token{1}, reserved: 64 << 20, about: about(d)}, page))
		m, err := c.Receive(context.Background())
		if err == nil && m.Kind == wire.Leave {
			close(said)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := Follow[uint32](ctx, k, d, "numbers", FollowOptions{})
	require.ErrorIs(t, err, peer.ErrTimeout)
	close(release)
	select {
	case <-said:
	case <-time.After(peertest.Guard):
		require.Fail(t, "the client did not leave")
	}
	require.NoError(t, k.Close())
	_, err = k.List(t.Context())
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.NotErrorIs(t, err, peer.ErrGone)
}

// Each follower gets a word that no other had before, of pages that are kept.
func TestWordsAreNeverUsedTwice(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	k := NewClient(v.dial())
	defer func() { require.NoError(t, k.Close()) }()
	most := os.Getpagesize() / 8 / slotWords
	seen := map[string]bool{}
	for range most + 10 {
		f, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
		require.NoError(t, err)
		word := f.f.slot.word(completeWord)
		require.LessOrEqual(t, word.Load(), v.p.Stats().Generation)
		v.p.mu.Lock()
		for s := range v.p.followers {
			if s.token == f.f.token {
				name := fmt.Sprintf("%p %d", s.slot.page.Pointer(), s.slot.index)
				require.False(t, seen[name])
				seen[name] = true
			}
		}
		v.p.mu.Unlock()
		require.NoError(t, f.Close())
		require.NoError(t, v.p.Settle(peertest.Context(t)))
	}
	require.Len(t, seen, most+10)
	// A word comes back when the streams that could use it have passed.
	require.Eventually(t, func() bool {
		v.server.pages.mu.Lock()
		defer v.server.pages.mu.Unlock()
		return len(v.server.pages.spent) == 1
	}, peertest.Guard, time.Millisecond, "a page whose words are all used")
	v.server.pages.mu.Lock()
	opened := v.server.pages.opened
	v.server.pages.mu.Unlock()
	require.Equal(t, 2, opened, "the honest one's, and the second of the other")
	v.served()
}

// Whatever a client says, the session ends or goes on, and the next client is
// served.
func FuzzSessions(f *testing.F) {
	for _, first := range said {
		for _, second := range said[:4] {
			f.Add(first.kind(), pack(first).Body, second.kind(), pack(second).Body, uint8(files(first)))
		}
	}
	_, sys := sim.Open(f)
	a, err := vmm.NewArray[uint32](sys.Devices()[0], vmm.BufferOptions{Reserve: 8 << 20})
	require.NoError(f, err)
	require.NoError(f, a.Resize(nil, 1000))
	server := NewServer(ServerOptions{})
	f.Cleanup(func() {
		require.NoError(f, server.Close())
		require.NoError(f, a.Close())
	})
	p, err := Array(server, "weights", a)
	require.NoError(f, err)
	require.NoError(f, p.Announce(context.Background(), 1000, nil))
	f.Fuzz(func(t *testing.T, kind uint16, body []byte, kind2 uint16, body2 []byte, fds uint8) {
		near, file, err := peer.Pair(peer.Options{})
		require.NoError(t, err)
		c, err := peer.Inherit(file, peer.Options{})
		require.NoError(t, err)
		over := make(chan error, 1)
		go func() { over <- server.ServeConn(context.Background(), near) }()
		m := peer.Message{Kind: max(1, min(kind, peer.MaxKind)), Body: body[:min(len(body), peer.MaxBody)]}
		for range fds % 4 {
			m.FDs = append(m.FDs, peertest.NullFD(t))
		}
		_ = c.Send(peertest.Context(t), m)
		_ = c.Send(peertest.Context(t), peer.Message{Kind: max(1, min(kind2, peer.MaxKind)), Body: body2[:min(len(body2), peer.MaxBody)]})
		_ = c.Send(peertest.Context(t), pack(&list{99}))
		for {
			m, err := c.Receive(peertest.Context(t))
			if err != nil {
				require.ErrorIs(t, err, peer.ErrRefused)
				break
			}
			said, err := toClient(m.Kind, m.Body, len(m.FDs))
			require.NoError(t, err)
			require.NoError(t, m.Close())
			if l, ok := said.(*listing); ok && l.number == 99 {
				require.Len(t, l.entries, 1)
				break
			}
		}
		require.NoError(t, c.Close())
		err = <-over
		if err != nil {
			require.ErrorIs(t, err, peer.ErrProtocol)
		}
	})
}
