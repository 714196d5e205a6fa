//go:build linux

package handles

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
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
}

func moment(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Guard)
	t.Cleanup(cancel)
	return ctx
}

func newVictim(t *testing.T, o ServerOptions, c Options) *victim {
	before := OpenFDs()
	t.Cleanup(func() { require.Equal(t, before, OpenFDs()) })
	m, sys := sim.Open(t)
	v := &victim{T: t, machine: m, dev: sys.Devices()[0]}
	l, err := Listen(filepath.Join(t.TempDir(), "d"), "s", c)
	require.NoError(t, err)
	v.path = l.Path()
	v.server = NewServer(o)
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
	v.p, err = PublishArray(v.server, "numbers", v.array)
	require.NoError(t, err)
	v.announce(1000)
	k := NewClient(v.dial())
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	v.honest, err = Follow[uint32](moment(t), k, v.dev, "numbers", FollowOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.honest.Close()) })
	require.NoError(t, v.honest.Next(moment(t)))
	return v
}

func (v *victim) dial() *Conn {
	v.Helper()
	c, err := Dial(moment(v), v.path, Options{})
	require.NoError(v, err)
	v.Cleanup(func() { require.NoError(v, c.Close()) })
	return c
}

func (v *victim) announce(n int) {
	v.Helper()
	require.NoError(v, v.array.Resize(nil, v.array.Len()+n))
	require.NoError(v, v.p.Announce(moment(v), v.array.Len(), nil))
}

// served requires that the server goes on serving others, old and new.
func (v *victim) served() {
	v.Helper()
	v.announce(10)
	for v.honest.Len() != v.array.Len() {
		require.NoError(v, v.honest.Next(moment(v)))
	}
	k := NewClient(v.dial())
	a, err := Open[uint32](moment(v), k, v.dev, "numbers", ImportOptions{})
	require.NoError(v, err)
	require.Equal(v, v.array.Len(), a.Len())
	require.NoError(v, a.Close())
	require.NoError(v, k.Close())
}

// joined follows by hand.
func (v *victim) joined(c *Conn) (token, *update, []*FD) {
	v.Helper()
	require.NoError(v, c.Send(moment(v), pack(&follow{1, WriteAccess, 0, "numbers"})))
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

func (v *victim) receive(c *Conn) Message {
	v.Helper()
	m, err := c.Receive(moment(v))
	require.NoError(v, err)
	return m
}

func nullFD(t testing.TB) *FD {
	n, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	f := own(n)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

func TestHostileClientsEndAlone(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	for what, m := range map[string]Message{
		"an unknown kind":           {Kind: 77, Body: []byte("hello")},
		"a message of a server":     pack(&ended{}),
		"garbage":                   {Kind: followMessage, Body: []byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")},
		"a cut request":             {Kind: followMessage, Body: pack(&follow{1, WriteAccess, 0, "numbers"}).Body[:9]},
		"a file with a request":     pack(&list{1}, nullFD(t)),
		"many files with a request": {Kind: listMessage, Body: pack(&list{1}).Body, FDs: []*FD{nullFD(t), nullFD(t), nullFD(t)}},
		"an absurd name":            {Kind: followMessage, Body: append(make([]byte, 12), 0xff, 0xff)},
	} {
		c := v.dial()
		require.NoError(t, c.Send(moment(t), m), what)
		_, err := c.Receive(moment(t))
		require.ErrorIs(t, err, ErrRefused, what)
		require.ErrorContains(t, err, "protocol violation", what)
	}
	for what, answer := range map[string]func(to token, u *update) message{
		"an answer to no update":         func(to token, u *update) message { return &done{to, u.serial + 1, statusOK, 1, ""} },
		"an answer with absurd chunks":   func(to token, u *update) message { return &done{to, u.serial, statusOK, 1 << 31, ""} },
		"a refusal with absurd chunks":   func(to token, u *update) message { return &done{to, u.serial, statusFailed, 7, "no"} },
		"the same answer, a second time": func(to token, u *update) message { return &done{to, u.serial, statusOK, 1, ""} },
	} {
		c := v.dial()
		to, u, fds := v.joined(c)
		require.NoError(t, closeAll(fds))
		if what == "the same answer, a second time" {
			require.NoError(t, c.Send(moment(t), pack(answer(to, u))))
		}
		require.NoError(t, c.Send(moment(t), pack(answer(to, u))))
		_, err := c.Receive(moment(t))
		require.ErrorIs(t, err, ErrRefused, what)
	}
	v.served()
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 1 }, Guard, time.Millisecond, "the others are forgotten")
}

func TestUnknownNamesAndTokensAreAnswered(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	c, other := v.dial(), v.dial()
	foreign, _, fds := v.joined(other)
	require.NoError(t, closeAll(fds))
	require.NoError(t, c.Send(moment(t), pack(&follow{5, WriteAccess, 0, "secrets"})))
	m := v.receive(c)
	said, err := toClient(m.Kind, m.Body, 0)
	require.NoError(t, err)
	require.EqualValues(t, 5, said.(*denied).number)
	require.Equal(t, statusUnknown, said.(*denied).status)
	for _, to := range []token{{}, newToken(), foreign} {
		for _, request := range []message{&leave{to}, &done{to, 1, statusOK, 1, ""}} {
			require.NoError(t, c.Send(moment(t), pack(request)))
			m := v.receive(c)
			said, err := toClient(m.Kind, m.Body, 0)
			require.NoError(t, err)
			require.Equal(t, &ended{to, statusUnknown, "no follower of that token"}, said)
		}
	}
	// Nothing happened to whom the token belongs.
	require.Len(t, v.p.Stats().Followers, 2)
	_, _, fds = v.joined(c)
	require.NoError(t, closeAll(fds))
	v.served()
}

func TestSilentClientsAreSentAway(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	server := NewServer(ServerOptions{Idle: 50 * time.Millisecond})
	defer func() { require.NoError(t, server.Close()) }()
	p, err := PublishArray(server, "numbers", v.array)
	require.NoError(t, err)
	near, follower := linked(t)
	// It asks before the server begins to count.
	require.NoError(t, follower.Send(moment(t), pack(&follow{1, WriteAccess, 0, "numbers"})))
	go func() { _ = server.ServeConn(context.Background(), near) }()
	accepted := v.receive(follower)
	require.NoError(t, accepted.Close())
	near, silent := linked(t)
	go func() { _ = server.ServeConn(context.Background(), near) }()
	_, err = silent.Receive(moment(t))
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "asked nothing")
	require.Len(t, p.Stats().Followers, 1, "it follows, and may be silent")
	v.served()
}

func TestCrowdsAreBounded(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxSessions: 3, MaxFollowers: 2}, Options{})
	first, second := v.dial(), v.dial()
	for _, c := range []*Conn{first, second} { // both are there
		require.NoError(t, c.Send(moment(t), pack(&list{1})))
		v.receive(c)
	}
	third, err := Dial(moment(t), v.path, Options{})
	if err == nil {
		_, err = third.Receive(moment(t))
		require.NoError(t, third.Close())
	}
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "where 3 is the most")
	for range 2 {
		_, _, fds := v.joined(first)
		require.NoError(t, closeAll(fds))
	}
	require.NoError(t, first.Send(moment(t), pack(&follow{9, WriteAccess, 0, "numbers"})))
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
	}, Guard, time.Millisecond)
	v.served()
}

// A follower that takes nothing back is reported, and cut off where it keeps too
// much.
func TestFollowersThatDoNotAnswer(t *testing.T) {
	v := newVictim(t, ServerOptions{MaxPinned: 3 << 20}, Options{})
	v.announce(2_000_000)
	lazy := v.dial()
	to, u, fds := v.joined(lazy)
	require.NoError(t, closeAll(fds))
	require.Len(t, u.sizes, 4)
	require.NoError(t, lazy.Send(moment(t), pack(&done{to, u.serial, statusOK, 4, ""})))
	require.NoError(t, v.p.Settle(moment(t)))
	require.NoError(t, v.p.Shrink(1_000_000))
	require.Eventually(t, func() bool { return v.p.Stats().Pinned == 4<<20 }, Guard, time.Millisecond, "the honest one has let go")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, v.p.Settle(ctx), ErrTimeout)
	require.NoError(t, v.p.Shrink(900_000), "over the limit since before")
	require.Eventually(t, func() bool { return v.p.Stats().Pinned == 0 }, Guard, time.Millisecond)
	require.Len(t, v.p.Stats().Followers, 1)
	for {
		m, err := lazy.Receive(moment(t))
		if err != nil {
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, "no longer published")
			break
		}
		require.NoError(t, m.Close())
	}
	v.served()
}

// A client that does not read is given up after a limit, and holds up nobody.
func TestClientsThatDoNotRead(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	near, deaf := linked(t)
	near.limits.Timeout = 300 * time.Millisecond
	over := make(chan error, 1)
	go func() { over <- v.server.ServeConn(context.Background(), near) }()
	var err error
	for err == nil {
		err = deaf.Send(moment(t), pack(&list{1}))
	}
	require.NotErrorIs(t, err, ErrTimeout, "it is not given up")
	require.ErrorIs(t, <-over, ErrTimeout)
	v.served()
}

// fake is a server that says what a test tells it to the first that follows.
func fake(t *testing.T, script func(c *Conn, d *cuda.Device, number uint32)) (*Client, *cuda.Device) {
	before := OpenFDs()
	t.Cleanup(func() { require.Equal(t, before, OpenFDs()) })
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	near, file, err := Pair(Options{})
	require.NoError(t, err)
	far, err := Inherit(file, Options{})
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
func about(d *cuda.Device) Descriptor {
	return Descriptor{Kind: ArrayKind, Element: Uint32, ElementSize: 4, Location: cuda.OnDevice(0), Device: d.UUID(), Handle: vmm.PosixFD}
}

func memoryFile(t testing.TB, size int64, seal int) *FD {
	n, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(n, size))
	_, err = unix.FcntlInt(uintptr(n), unix.F_ADD_SEALS, seal)
	require.NoError(t, err)
	f := own(n)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

const sealed = unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL

func TestHostileServersAreRefused(t *testing.T) {
	size := int64(os.Getpagesize())
	to := token{1}
	welcome := func(d *cuda.Device, n uint32) message { return &accepted{n, to, 64 << 20, 0, about(d)} }
	chunk := &update{token: to, serial: 1, generation: 1, ordered: 1, length: 10, last: true, sizes: []uint64{2 << 20}}
	for what, row := range map[string]struct {
		is  error
		say func(t *testing.T, c *Conn, d *cuda.Device, n uint32)
	}{
		"no answer that was asked for": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(&denied{n + 1, statusUnknown, ""}))
		}},
		"a listing": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(&listing{n, nil}))
		}},
		"a refusal": {ErrRefused, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(&denied{n, statusFailed, "no"}))
		}},
		"garbage": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), Message{Kind: acceptedMessage, Body: []byte{1, 2, 3}, FDs: []*FD{nullFD(t)}})
		}},
		"no page": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n)))
		}},
		"two pages": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed), memoryFile(t, size, sealed)))
		}},
		"the null device for a page": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), nullFD(t)))
		}},
		"a page that may shrink": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, 0)))
		}},
		"an empty page": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, 0, sealed)))
		}},
		"a word beyond the page": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(&accepted{n, to, 64 << 20, uint32(size / 8), about(d)}, memoryFile(t, size, sealed)))
		}},
		"an absurd range": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(&accepted{n, to, 1 << 63, 0, about(d)}, memoryFile(t, size, sealed)))
		}},
		"an empty range": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(&accepted{n, to, 0, 0, about(d)}, memoryFile(t, size, sealed)))
		}},
		"an odd range": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(&accepted{n, to, 3 << 20, 0, about(d)}, memoryFile(t, size, sealed)))
		}},
		"another device": {cuda.ErrNotSupported, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			other := about(d)
			other.Device[3]++
			_ = c.Send(moment(t), pack(&accepted{n, to, 64 << 20, 0, other}, memoryFile(t, size, sealed)))
		}},
		"other elements": {ErrMismatch, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			other := about(d)
			other.Element = Int32
			_ = c.Send(moment(t), pack(&accepted{n, to, 64 << 20, 0, other}, memoryFile(t, size, sealed)))
		}},
		"an update for somebody else": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *chunk
			u.token = token{9}
			_ = c.Send(moment(t), pack(&u, nullFD(t)))
		}},
		"a foreign file for memory": {ErrNotMemory, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Send(moment(t), pack(chunk, nullFD(t)))
		}},
		"a chunk of an odd size": {ErrSizeMismatch, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *chunk
			u.sizes = []uint64{4096}
			_ = c.Send(moment(t), pack(&u, nullFD(t)))
		}},
		"chunks beyond the range": {ErrTooLarge, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *chunk
			u.sizes = []uint64{1 << 62, 1 << 62}
			_ = c.Send(moment(t), pack(&u, nullFD(t), nullFD(t)))
		}},
		"a length beyond the chunks": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			u := *chunk
			u.length = 1 << 20
			_ = c.Send(moment(t), pack(&u, nullFD(t)))
		}},
		"a generation out of turn": {ErrProtocol, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Send(moment(t), pack(&update{token: to, serial: 2, generation: 1, last: true}))
		}},
		"its end": {ErrGone, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Close()
		}},
		"an end for an unknown reason": {ErrRefused, func(t *testing.T, c *Conn, d *cuda.Device, n uint32) {
			_ = c.Send(moment(t), pack(welcome(d, n), memoryFile(t, size, sealed)))
			_ = c.Send(moment(t), pack(&ended{to, statusFailed, "out of descriptors"}))
		}},
	} {
		t.Run(what, func(t *testing.T) {
			k, d := fake(t, func(c *Conn, d *cuda.Device, n uint32) { row.say(t, c, d, n) })
			f, err := Follow[uint32](moment(t), k, d, "numbers", FollowOptions{})
			if err == nil {
				for err == nil {
					err = f.Next(moment(t))
				}
				require.Zero(t, f.Len())
				require.NoError(t, f.Close())
			}
			require.ErrorIs(t, err, row.is)
		})
	}
}

// A server that answers nothing is given up after the connection's limit, and
// what it answers later makes no follower.
func TestServersThatDoNotAnswer(t *testing.T) {
	release := make(chan struct{})
	said := make(chan struct{})
	k, d := fake(t, func(c *Conn, d *cuda.Device, n uint32) {
		<-release
		page := memoryFile(t, int64(os.Getpagesize()), sealed)
		_ = c.Send(context.Background(), pack(&accepted{n, token{1}, 64 << 20, 0, about(d)}, page))
		m, err := c.Receive(context.Background())
		if err == nil && m.Kind == leaveMessage {
			close(said)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := Follow[uint32](ctx, k, d, "numbers", FollowOptions{})
	require.ErrorIs(t, err, ErrTimeout)
	close(release)
	select {
	case <-said:
	case <-time.After(Guard):
		require.Fail(t, "the client did not leave")
	}
	require.NoError(t, k.Close())
	_, err = k.List(t.Context())
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.NotErrorIs(t, err, ErrGone)
}

// Whoever follows gets a word that nobody had before, of pages that are kept.
func TestWordsAreNeverUsedTwice(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	k := NewClient(v.dial())
	defer func() { require.NoError(t, k.Close()) }()
	most := os.Getpagesize() / 8
	seen := map[string]bool{}
	for range most + 10 {
		f, err := Follow[uint32](moment(t), k, v.dev, "numbers", FollowOptions{})
		require.NoError(t, err)
		word := f.f.word.value()
		require.LessOrEqual(t, word.Load(), v.p.Stats().Generation)
		v.p.mu.Lock()
		for s := range v.p.followers {
			if s.token == f.f.token {
				name := fmt.Sprintf("%p %d", s.word.page.Pointer(), s.word.slot)
				require.False(t, seen[name])
				seen[name] = true
			}
		}
		v.p.mu.Unlock()
		require.NoError(t, f.Close())
		require.NoError(t, v.p.Settle(moment(t)))
	}
	require.Len(t, seen, most+10)
	v.server.pages.mu.Lock()
	opened, spent := v.server.pages.opened, len(v.server.pages.spent)
	v.server.pages.mu.Unlock()
	require.Equal(t, 2, opened, "the honest one's, and the second of the other")
	require.Equal(t, 1, spent)
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
	p, err := PublishArray(server, "weights", a)
	require.NoError(f, err)
	require.NoError(f, p.Announce(context.Background(), 1000, nil))
	f.Fuzz(func(t *testing.T, kind uint16, body []byte, kind2 uint16, body2 []byte, fds uint8) {
		near, file, err := Pair(Options{})
		require.NoError(t, err)
		c, err := Inherit(file, Options{})
		require.NoError(t, err)
		over := make(chan error, 1)
		go func() { over <- server.ServeConn(context.Background(), near) }()
		m := Message{Kind: max(1, min(kind, MaxKind)), Body: body[:min(len(body), MaxBody)]}
		for range fds % 4 {
			m.FDs = append(m.FDs, nullFD(t))
		}
		_ = c.Send(moment(t), m)
		_ = c.Send(moment(t), Message{Kind: max(1, min(kind2, MaxKind)), Body: body2[:min(len(body2), MaxBody)]})
		_ = c.Send(moment(t), pack(&list{99}))
		for {
			m, err := c.Receive(moment(t))
			if err != nil {
				require.ErrorIs(t, err, ErrRefused)
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
			require.ErrorIs(t, err, ErrProtocol)
		}
	})
}
