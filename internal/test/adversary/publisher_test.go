//go:build linux

package adversary

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Clients that are slow, silent, loud or gone cost an honest one nothing, and the
// publisher nothing that stays.
func TestUnpleasantClients(t *testing.T) {
	p := victim{Timeout: 2 * time.Second}.starts(t)
	p.does("announce", 8)
	p.serves(8)
	before := p.does("stats", 0)
	many := func(n int, greets bool, do func(w *wire)) {
		var all []*wire
		for range n {
			w, err := connect(p.path)
			if err == nil && greets {
				err = w.greet()
			}
			if err == nil && do != nil {
				do(w)
			}
			if w != nil {
				all = append(all, w)
			}
		}
		p.does("announce", 8)
		p.serves(8)
		for _, w := range all {
			w.close()
		}
	}
	t.Run("half open", func(*testing.T) { many(200, false, nil) })
	t.Run("silent", func(*testing.T) { many(40, true, nil) })
	t.Run("half a message", func(*testing.T) { many(20, true, func(w *wire) { _ = w.part(list, []byte{1}, 1000, 0) }) })
	t.Run("files of all kinds", func(t *testing.T) {
		var fds []int
		for _, f := range oddFiles(t) {
			fds = append(fds, f)
		}
		many(times(20), true, func(w *wire) {
			switch rand.IntN(3) {
			case 0:
				_ = w.send(follow, followBody(1, 0, "p"), fds...)
			case 1:
				_ = w.part(list, []byte{1}, 4, 253, fds...)
			default: // more than it says
				_ = w.raw(append(packetHeader(list, w.peer, w.seq, 4, 1, 4, 1), 1, 0, 0, 0), fds...)
			}
		})
	})
	t.Run("a storm", func(t *testing.T) {
		for range times(200) {
			w, err := dial(p.path)
			if err != nil {
				continue
			}
			_ = w.send(follow, followBody(1, 0, "p"))
			if a, err := w.recv(testTimeout); err == nil && a.kind == accepted {
				_ = w.send(leave, a.body[4:20])
				a.close()
			}
			w.close()
		}
		p.serves(8)
	})
	t.Run("malformed", func(t *testing.T) {
		for round := range times(400) {
			malformed(p.path, rand.New(rand.NewPCG(uint64(round), 1)))
		}
		p.serves(8)
	})
	var now reply
	require.Eventually(t, func() bool {
		now = p.does("stats", 0)
		return now.Followers == 0 && now.Files <= before.Files && now.Goroutines <= before.Goroutines
	}, testTimeout, 10*time.Millisecond, "%+v before; at last %+v", &before, &now)
	p.ends()
}

// malformed has a session in which some packets are wrong.
func malformed(path string, r *rand.Rand) {
	w, err := connect(path)
	if err != nil {
		return
	}
	defer w.close()
	if r.IntN(8) > 0 && w.greet() != nil {
		return
	}
	for range 1 + r.IntN(6) {
		kinds := []uint16{list, follow, done, leave, update, offer, chunks, soon, refusal, 0, uint16(r.Uint32())}
		kind := kinds[r.IntN(len(kinds))]
		body := make([]byte, r.IntN(200))
		for i := range body {
			body[i] = byte(r.Uint32())
		}
		switch kind {
		case list:
			body = listBody(r.Uint32())
		case follow:
			body = followBody(r.Uint32(), r.Uint64()>>r.IntN(64), []string{"p", "", "\xff\xfe", "nothing", string(make([]byte, 300))}[r.IntN(5)])
		}
		p := append(packetHeader(kind, w.peer, w.seq, uint32(len(body)), 0, uint32(len(body)), 0), body...)
		w.seq++
		switch r.IntN(10) {
		case 0:
			p[r.IntN(len(p))] ^= 1 << r.IntN(8)
		case 1:
			p = p[:1+r.IntN(len(p)-1)]
		case 2, 3, 4:
			le.PutUint32(p[32+4*r.IntN(4):], r.Uint32()>>r.IntN(32))
		case 5:
			le.PutUint64(p[24:], r.Uint64N(4)) // said before
		case 6:
			p = append(p, make([]byte, r.IntN(70000))...)
		}
		if w.raw(p) != nil {
			return
		}
	}
	if r.IntN(2) == 0 {
		_ = unix.Shutdown(w.s, unix.SHUT_WR)
	}
	if r.IntN(4) == 0 {
		if p, err := w.recv(20 * time.Millisecond); err == nil {
			p.close()
		}
	}
}

// Followers that stand still hold up neither the publisher nor a running one.
func TestFollowersThatStandStill(t *testing.T) {
	p := victim{}.starts(t)
	p.does("announce", 1)
	for range 6 {
		c := startFollower(t, p.path, "")
		c.progress()
		require.NoError(t, c.cmd.Process.Signal(syscall.SIGSTOP))
	}
	p.does("announce", 48)
	p.serves(48)
	p.ends()
}
