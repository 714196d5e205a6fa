//go:build linux

package adversary

import (
	"bytes"
	"context"
	"encoding/binary"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// liar is a publisher whose messages are made by hand.
type liar struct {
	*wire
	t       *testing.T
	about   []byte // the descriptor of what it says it publishes
	content []byte // of a chunk's file
	token   []byte
	page    []byte
}

// accepts accepts the follow, with a page.
func (l *liar) accepts(page int, room uint64, slot uint32) {
	for {
		p, err := l.recv(patience)
		if err != nil {
			return
		}
		p.close()
		if p.kind == follow {
			_ = l.send(accepted, acceptedBody(binary.LittleEndian.Uint32(p.body), l.token, room, slot, l.about), page)
			return
		}
	}
}

// begins accepts like an honest publisher.
func (l *liar) begins() {
	f := memfd(l.t, 4096, 0, sealed)
	page, err := unix.Mmap(f, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(l.t, err)
	l.t.Cleanup(func() { _ = unix.Munmap(page) })
	l.page = page
	l.accepts(f, 64*chunk, 0)
}

func (l *liar) updates(serial, generation, ordered, length uint64, keep uint32, sizes ...uint64) {
	var fds []int
	for range sizes {
		fds = append(fds, forged(l.t, l.content, 0, sealed))
	}
	_ = l.send(update, updateBody(l.token, serial, generation, ordered, length, keep, sizes...), fds...)
}

// A publisher that lies costs its follower an error at most: no call hangs, no
// stream stands still, nothing stays open, and what is shown is within the memory.
func TestLyingPublishers(t *testing.T) {
	content, _ := genuine(t)
	odd := func(size int64, flags, seals int, slot uint32, room uint64) func(l *liar) {
		return func(l *liar) { l.accepts(memfd(l.t, size, flags, seals), room, slot) }
	}
	const room = 64 * chunk
	for name, serve := range map[string]func(l *liar){
		"honest":                   func(l *liar) { l.begins(); l.updates(1, 1, 0, chunk, 0, chunk) },
		"goes before it is done":   func(l *liar) { l.begins(); l.updates(1, 1, 1, chunk, 0, chunk); l.close() },
		"is done before it begins": func(l *liar) { l.begins(); fill(l.page); l.updates(1, 1, 1, chunk, 0, chunk) },
		"generation 2^62-1":        func(l *liar) { l.begins(); l.updates(1, 1<<62-1, 1<<62-1, chunk, 0, chunk); l.close() },
		"generation 2^62":          func(l *liar) { l.begins(); l.updates(1, 1<<62, 0, chunk, 0, chunk) },
		"longer than its memory":   func(l *liar) { l.begins(); l.updates(1, 1, 0, chunk+1, 0, chunk) },
		"length 2^63":              func(l *liar) { l.begins(); l.updates(1, 1, 0, 1<<63, 0, chunk) },
		"size 2^63":                func(l *liar) { l.begins(); l.updates(1, 1, 0, 0, 0, 1<<63) },
		"sizes that wrap":          func(l *liar) { l.begins(); l.updates(1, 1, 0, 0, 0, 1<<63, 1<<63) },
		"keeps what is not there":  func(l *liar) { l.begins(); l.updates(1, 1, 0, 0, 7) },
		"another's token":          func(l *liar) { l.begins(); l.token = make([]byte, 16); l.updates(1, 1, 0, chunk, 0, chunk) },
		"many updates at once":     func(l *liar) { l.begins(); repeat(64, func(n uint64) { l.updates(n, n, 0, chunk, 0, chunk) }) },
		"ends twice, and goes on": func(l *liar) {
			l.begins()
			repeat(2, func(uint64) { l.ends(l.token) })
			l.updates(1, 1, 0, chunk, 0, chunk)
		},
		"the ends of others":          func(l *liar) { l.begins(); repeat(2000, func(uint64) { l.ends(make([]byte, 16)) }); l.close() },
		"warnings":                    func(l *liar) { l.begins(); repeat(2000, func(uint64) { _ = l.send(soon, nil) }); l.close() },
		"a page without seals":        odd(4096, 0, 0, 0, room),
		"a page of two":               odd(8192, 0, sealed, 0, room),
		"a page that is write-sealed": odd(4096, 0, sealed|unix.F_SEAL_WRITE, 0, room),
		"slot 512":                    odd(4096, 0, sealed, 512, room),
		"slot 2^32-1":                 odd(4096, 0, sealed, 1<<32-1, room),
		"room for 2^62":               odd(4096, 0, sealed, 0, 1<<62),
		"room for nothing":            odd(4096, 0, sealed, 0, 0),
		"room for a byte":             odd(4096, 0, sealed, 0, 1),
		"a pipe for a page":           func(l *liar) { l.accepts(oddFiles(l.t)["a pipe"], room, 0) },
		"goes without a reply":        func(l *liar) { l.close() },
		"half of a reply, and silent": func(l *liar) { _ = l.part(accepted, make([]byte, 10), 100, 0) },
	} {
		t.Run(name, func(t *testing.T) { believes(t, content, serve, name == "honest") })
	}
}

func fill(page []byte) {
	for i := range page {
		page[i] = 0xff
	}
}

func repeat(n uint64, do func(n uint64)) {
	for i := range n {
		do(i + 1)
	}
}

func (l *liar) ends(token []byte) {
	b := append(bytes.Clone(token), make([]byte, 16)...) // no serial, no generation
	b = append(b, byte(publish.Ended))
	b = append(b, make([]byte, 8+8+4)...)
	b = append(b, 1, 0, 3, 0, 0) // last, not over, withdrawn, no reason
	_ = l.send(update, append(b, 0, 0, 0, 0))
}

// believes follows the liar like an honest client.
func believes(t *testing.T, content []byte, serve func(l *liar), honest bool) {
	sys, err := machine("")
	require.NoError(t, err)
	d := sys.Devices()[0]
	before := peer.OpenFDs()
	conn, far, err := peer.Pair(peer.Options{Timeout: time.Second})
	require.NoError(t, err)
	n, err := unix.FcntlInt(far.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.SetNonblock(n, false))
	require.NoError(t, far.Close())
	says := handles.Descriptor{Kind: handles.BufferKind, Location: cuda.Location{Type: cuda.LocationDevice}, Device: d.UUID(), Handle: vmm.PosixFD, Exporter: handles.Self()}
	about, err := says.MarshalBinary()
	require.NoError(t, err)
	l := &liar{wire: wireOf(n), t: t, about: about, content: content, token: bytes.Repeat([]byte{7}, 16)}
	over := make(chan struct{})
	go func() {
		defer close(over)
		if l.greet() == nil {
			serve(l)
		}
	}()
	c := publish.NewClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	f, err := publish.Follow[uint8](ctx, c, d, "p", publish.FollowOptions{})
	if err == nil {
		s, err := d.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		one, enough := context.WithTimeout(ctx, 300*time.Millisecond)
		if f.Next(one, s) == nil {
			require.LessOrEqual(t, f.Len(), f.Array().Cap())
		}
		if honest {
			require.Equal(t, chunk, f.Len())
		}
		enough()
		<-over
		l.close() // whatever it still owed
		_ = within(t, "the follower's stream", s.Synchronize)
		_ = within(t, "Follower.Close", f.Close)
		require.NoError(t, s.Close())
	}
	_ = within(t, "Client.Close", c.Close)
	<-over
	l.close()
	require.Eventually(t, func() bool { return peer.OpenFDs() <= before }, patience, time.Millisecond, "descriptors stay open")
	require.NoError(t, within(t, "System.Close", sys.Close))
}
