//go:build linux

package publish_test

import (
	"context"
	"encoding/binary"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"golang.org/x/sys/unix"
)

// numbersOf are the numbers in the messages of each kind.
func numbersOf(t testing.TB) map[uint16][]vectors.Number {
	v, all := vectors.Read(t), map[uint16][]vectors.Number{}
	for _, m := range v.Messages {
		all[m.Kind] = m.Layout.Numbers()
	}
	accepted := all[wire.Accepted]
	end := accepted[len(accepted)-1] // the length of the descriptor that follows
	for _, n := range v.Descriptor.Layout.Numbers() {
		accepted = append(accepted, vectors.Number{At: end.At + end.Size + len("cuvD") + n.At, Size: n.Size})
	}
	all[wire.Accepted] = accepted
	return all
}

type piece struct {
	b   []byte
	fds []int
}

func (p piece) close() {
	for _, f := range p.fds {
		unix.Close(f)
	}
}

type between struct {
	mu      sync.Mutex
	script  []byte
	numbers map[uint16][]vectors.Number
	old     [][]byte // earlier packets of both sides
}

func (m *between) next() byte {
	if len(m.script) == 0 {
		return 0
	}
	v := m.script[0]
	m.script = m.script[1:]
	return v
}

func (m *between) number(old uint64) uint64 {
	switch v := m.next(); v % 10 {
	case 0:
		return old + 1
	case 1:
		return old - 1
	case 2:
		return 0
	case 3:
		return ^uint64(0)
	case 4:
		return 1 << (m.next() % 64)
	case 5:
		return old << 1
	case 6:
		return uint64(m.next())
	case 7:
		return old ^ 1<<(m.next()%64)
	case 8:
		return 1<<62 - uint64(m.next()%4)
	}
	return uint64(m.next()) << 16
}

// change changes a packet, and returns the packets that go on.
func (m *between) change(p piece, fresh func() int) []piece {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(p.b) < 48 || binary.LittleEndian.Uint16(p.b[6:]) == 0 {
		return []piece{p}
	}
	kind := binary.LittleEndian.Uint16(p.b[6:])
	dup := func() piece {
		c := piece{append([]byte{}, p.b...), nil}
		for _, f := range p.fds {
			if n, err := unix.FcntlInt(uintptr(f), unix.F_DUPFD_CLOEXEC, 0); err == nil {
				c.fds = append(c.fds, n)
			}
		}
		return c
	}
	m.old = append(m.old, append([]byte{}, p.b...))
	switch op := m.next(); op % 16 {
	case 0, 1, 2, 3, 4, 5:
		return []piece{p}
	case 6: // lost
		p.close()
		return nil
	case 7: // twice
		return []piece{dup(), p}
	case 8: // an earlier packet of either side
		o := append([]byte{}, m.old[int(m.next())%len(m.old)]...)
		return []piece{{o, nil}, p}
	case 9: // without its files, or with others
		switch m.next() % 3 {
		case 0:
			p.close()
			p.fds = nil
		case 1:
			if len(p.fds) > 0 {
				unix.Close(p.fds[0])
				p.fds[0] = fresh()
			}
		case 2:
			p.fds = append(p.fds, fresh())
		}
		return []piece{p}
	case 10: // in another order
		if n := len(p.fds); n > 1 {
			p.fds[0], p.fds[n-1] = p.fds[n-1], p.fds[0]
		}
		return []piece{p}
	case 11: // another kind
		kinds := []uint16{0xf101, 0xf102, 0xf103, 0xf104, 0xf181, 0xf182, 0xf183, 0xf184, 0xf185, 0xff09, 0xff01, 1}
		binary.LittleEndian.PutUint16(p.b[6:], kinds[int(m.next())%len(kinds)])
		return []piece{p}
	case 12: // longer or shorter
		body := p.b[48:]
		if n := int(m.next()); n%2 == 0 && len(body) > 0 {
			body = body[:len(body)-1-n%len(body)]
		} else {
			body = append(append([]byte{}, body...), make([]byte, n)...)
		}
		p.b = append(p.b[:48:48], body...)
		return []piece{p}
	default: // other numbers
		for range 1 + m.next()%2 {
			all := m.numbers[kind]
			if len(all) == 0 {
				break
			}
			f := all[int(m.next())%len(all)]
			if 48+f.At+f.Size > len(p.b) {
				continue
			}
			at := p.b[48+f.At:]
			var v [8]byte
			copy(v[:f.Size], at)
			binary.LittleEndian.PutUint64(v[:], m.number(binary.LittleEndian.Uint64(v[:])))
			copy(at[:f.Size], v[:])
		}
		return []piece{p}
	}
}

// carry relays one direction until it ends.
func (m *between) carry(from, to int, fresh func() int) {
	var seq uint64
	buf, oob := make([]byte, 64<<10), make([]byte, 4096)
	for {
		n, oobn, _, _, err := unix.Recvmsg(from, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			unix.Shutdown(to, unix.SHUT_RDWR)
			unix.Shutdown(from, unix.SHUT_RDWR)
			return
		}
		p := piece{b: append([]byte{}, buf[:n]...)}
		if oobn > 0 {
			ms, _ := unix.ParseSocketControlMessage(oob[:oobn])
			for _, c := range ms {
				fds, _ := unix.ParseUnixRights(&c)
				p.fds = append(p.fds, fds...)
			}
		}
		for _, p := range m.change(p, fresh) {
			if len(p.b) >= 48 {
				le := binary.LittleEndian
				le.PutUint64(p.b[24:], seq)
				le.PutUint32(p.b[32:], uint32(len(p.b)-48))
				le.PutUint32(p.b[36:], uint32(len(p.fds)))
				le.PutUint32(p.b[40:], uint32(len(p.b)-48))
				le.PutUint32(p.b[44:], uint32(len(p.fds)))
			}
			seq++
			var rights []byte
			if len(p.fds) > 0 {
				rights = unix.UnixRights(p.fds...)
			}
			for unix.Sendmsg(to, p.b, rights, nil, unix.MSG_NOSIGNAL) == unix.EINTR {
			}
			p.close()
		}
	}
}

func filesNow() int { e, _ := os.ReadDir("/proc/self/fd"); return len(e) }

// A real server and a real client with an attacker in between, which drops, repeats,
// swaps and changes messages, field by field, and repairs the packets' headers so
// that all of it reaches the protocol. Nothing hangs, nothing stays open, and an
// honest client is served as before.
func FuzzBetween(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 0, 13, 0, 2, 0, 0, 13, 0, 7, 1, 0})
	f.Add([]byte{7, 7, 7, 7, 7, 7})
	f.Add([]byte{0, 9, 1, 0, 9, 2, 0, 6, 0})
	f.Add([]byte{0, 0, 0, 0, 8, 0, 8, 1, 8, 2, 8, 3})
	f.Add([]byte{13, 0, 1, 4, 40, 13, 1, 2, 3, 0, 0, 14, 0, 6, 0})
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 200 {
			return
		}
		files, goroutines, own := filesNow(), runtime.NumGoroutine(), peer.OpenFDs()
		lost := peer.LostFDs()
		play(t, script)
		for i := 0; ; i++ {
			if filesNow() <= files && runtime.NumGoroutine() <= goroutines && peer.OpenFDs() <= own {
				break
			}
			if i > 6000 {
				b := make([]byte, 1<<20)
				t.Fatalf("left: %d files where %d were, %d goroutines where %d were, %d FDs\n%s", filesNow(), files, runtime.NumGoroutine(), goroutines, peer.OpenFDs()-own, b[:runtime.Stack(b, true)])
			}
			time.Sleep(20 * time.Millisecond)
		}
		if n := peer.LostFDs(); n != lost {
			t.Fatalf("%d FDs were lost", n-lost)
		}
	})
}

func play(t *testing.T, script []byte) {
	const gran = 1 << 16
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	machine, err := sim.New(sim.Options{Devices: []sim.DeviceOptions{{Granularity: gran, Memory: 64 << 20}}})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	dev := sys.Devices()[0]
	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	a, err := vmm.NewArray[uint32](dev, vmm.BufferOptions{Reserve: 16 * gran, Chunks: vmm.FixedChunks(gran), Memory: vmm.Properties{Handles: vmm.PosixFD}})
	check(err)
	srv := publish.NewServer(publish.ServerOptions{})
	pub, err := publish.Array(srv, "p", a)
	check(err)
	announce := func(chunks int) {
		n := chunks * gran / 4
		if n < a.Len() {
			check(pub.Shrink(n, stream))
			return
		}
		if n > a.Len() {
			check(a.Resize(stream, n))
		}
		check(pub.Announce(ctx, n, stream))
	}
	announce(2)

	o := peer.Options{Timeout: 300 * time.Millisecond}
	sconn, sfile, err := peer.Pair(o)
	check(err)
	cconn, cfile, err := peer.Pair(o)
	check(err)
	m := &between{script: script, numbers: numbersOf(t)}
	which := 0
	fresh := func() int {
		which++
		switch which % 4 {
		case 0:
			n, _ := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
			return n
		case 1:
			n, _ := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			unix.Ftruncate(n, gran+4096)
			return n
		case 2:
			n, _ := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			unix.Ftruncate(n, 4096)
			unix.FcntlInt(uintptr(n), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
			return n
		}
		var p [2]int
		unix.Pipe2(p[:], unix.O_CLOEXEC)
		unix.Close(p[1])
		return p[0]
	}
	s, c := int(sfile.Fd()), int(cfile.Fd())
	var carriers, rest sync.WaitGroup
	carriers.Go(func() { m.carry(s, c, fresh) })
	carriers.Go(func() { m.carry(c, s, fresh) })
	rest.Go(func() { _ = srv.ServeConn(ctx, sconn) })

	k := publish.NewClient(cconn)
	short, end := context.WithTimeout(ctx, 400*time.Millisecond)
	_, _ = k.List(short)
	fl, _ := publish.Follow[uint32](short, k, dev, "p", publish.FollowOptions{})
	for i, n := range []int{5, 1, 9} {
		if fl != nil {
			one, enough := context.WithTimeout(short, 50*time.Millisecond)
			if fl.Next(one) == nil {
				if l := fl.Len(); l*4 > 16*gran {
					t.Fatalf("%d elements are shown, of memory for %d", l, 16*gran/4)
				}
				got := make([]uint32, fl.Len())
				if sl, err := fl.Array().Slice(0, len(got)); err == nil {
					_ = sl.CopyTo(stream, got)
				}
			}
			enough()
		}
		if i < 2 {
			announce(n)
		}
	}
	end()
	if fl != nil {
		check(endsIn(t, "Follower.Close", fl.Close))
	}
	_ = endsIn(t, "Client.Close", k.Close)

	// An honest client is served as before.
	hs, hf, err := peer.Pair(peer.Options{})
	check(err)
	hc, err := peer.Inherit(hf, peer.Options{})
	check(err)
	rest.Go(func() { _ = srv.ServeConn(ctx, hs) })
	hk := publish.NewClient(hc)
	h, err := publish.Follow[uint32](ctx, hk, dev, "p", publish.FollowOptions{})
	check(err)
	check(h.Next(ctx))
	if h.Len() != a.Len() {
		t.Fatalf("an honest follower has %d elements, of %d", h.Len(), a.Len())
	}
	check(h.Close())
	check(hk.Close())

	check(endsIn(t, "Server.Close", srv.Close))
	_ = sfile.Close()
	_ = cfile.Close()
	rest.Wait()
	carriers.Wait()
	check(a.Close())
	check(stream.Close())
	check(sys.Drain(ctx))
	check(endsIn(t, "System.Close", sys.Close))
}

func endsIn(t *testing.T, what string, do func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-time.After(2 * time.Minute):
		b := make([]byte, 1<<20)
		t.Fatalf("%s hangs\n%s", what, b[:runtime.Stack(b, true)])
		return nil
	}
}
