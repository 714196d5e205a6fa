//go:build linux

package adversary

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

var le = binary.LittleEndian

// header is the length of a packet's header.
const header = 48

// wire is a connection whose packets are made by hand.
type wire struct {
	s         int
	own, peer [16]byte
	seq       uint64
}

// packet is what came.
type packet struct {
	kind uint16
	body []byte
	fds  []int
}

func (p packet) close() {
	for _, f := range p.fds {
		_ = unix.Close(f)
	}
}

// connect connects without a greeting.
func connect(path string) (*wire, error) {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(s, &unix.SockaddrUnix{Name: path}); err != nil {
		_ = unix.Close(s)
		return nil, err
	}
	return wireOf(s), nil
}

func wireOf(s int) *wire {
	w := &wire{s: s}
	_, _ = rand.Read(w.own[:])
	return w
}

// dial connects and greets.
func dial(path string) (*wire, error) {
	w, err := connect(path)
	if err != nil {
		return nil, err
	}
	if err := w.greet(); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func mustDial(t *testing.T, path string) *wire {
	t.Helper()
	w, err := dial(path)
	require.NoError(t, err)
	t.Cleanup(w.close)
	return w
}

func (w *wire) close() {
	if w.s >= 0 {
		_ = unix.Shutdown(w.s, unix.SHUT_RDWR)
		_ = unix.Close(w.s)
		w.s = -1
	}
}

func packetHeader(kind uint16, to [16]byte, seq uint64, bytes, fds, allBytes, allFDs uint32) []byte {
	version := uint16(2)
	if kind == 0 || kind == 0xffff {
		version = 1 // of greetings and refusals
	}
	b := le.AppendUint16([]byte("cuvP"), version)
	b = le.AppendUint16(b, kind)
	b = append(b, to[:]...)
	b = le.AppendUint64(b, seq)
	for _, n := range []uint32{bytes, fds, allBytes, allFDs} {
		b = le.AppendUint32(b, n)
	}
	return b
}

func (w *wire) raw(p []byte, fds ...int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	for {
		if err := unix.Sendmsg(w.s, p, rights, nil, unix.MSG_NOSIGNAL); err != unix.EINTR {
			return err
		}
	}
}

// send sends a message of one packet.
func (w *wire) send(kind uint16, body []byte, fds ...int) error {
	return w.part(kind, body, uint32(len(body)), uint32(len(fds)), fds...)
}

// part sends a packet of a message that says it is larger.
func (w *wire) part(kind uint16, body []byte, allBytes, allFDs uint32, fds ...int) error {
	h := packetHeader(kind, w.peer, w.seq, uint32(len(body)), uint32(len(fds)), allBytes, allFDs)
	w.seq++
	return w.raw(append(h, body...), fds...)
}

func (w *wire) greet() error {
	// The nonce, and the least and the latest version that this side speaks.
	if err := w.raw(append(append(packetHeader(0, [16]byte{}, 0, 20, 0, 20, 0), w.own[:]...), 2, 0, 2, 0)); err != nil {
		return err
	}
	w.seq = 1
	p, err := w.recv(testTimeout)
	if err != nil {
		return err
	}
	defer p.close()
	if p.kind != 0 || len(p.body) < len(w.peer) {
		return fmt.Errorf("no greeting: kind %#x %q", p.kind, p.body)
	}
	copy(w.peer[:], p.body)
	return nil
}

// recv waits for a packet.
func (w *wire) recv(limit time.Duration) (p packet, err error) {
	end := time.Now().Add(limit)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(w.s), Events: unix.POLLIN}}, int(max(0, time.Until(end).Milliseconds())))
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return p, fmt.Errorf("nothing came in %v: %w", limit, errors.Join(err, os.ErrDeadlineExceeded))
		}
		break
	}
	buf, oob := make([]byte, 64<<10), make([]byte, 4096)
	n, oobn, _, _, err := unix.Recvmsg(w.s, buf, oob, unix.MSG_CMSG_CLOEXEC)
	switch {
	case err != nil:
		return p, err
	case n < header:
		return p, fmt.Errorf("the connection ended, or a packet has %d bytes", n)
	}
	if all, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for _, m := range all {
			f, _ := unix.ParseUnixRights(&m)
			p.fds = append(p.fds, f...)
		}
	}
	p.kind, p.body = le.Uint16(buf[6:]), append([]byte{}, buf[header:n]...)
	return p, nil
}

// until waits for a message of a kind, and drops the others.
func (w *wire) until(t *testing.T, kind uint16) packet {
	t.Helper()
	for {
		p, err := w.recv(testTimeout)
		require.NoError(t, err)
		if p.kind == kind {
			return p
		}
		require.NotEqual(t, uint16(refusal), p.kind, "%q", p.body)
		p.close()
	}
}

// Kinds of messages: publishing, sending memory once, and the end.
const (
	list, follow, done, leave              = 0xf101, 0xf102, 0xf103, 0xf104
	listing, accepted, denied, update      = 0xf181, 0xf182, 0xf183, 0xf184
	offer, chunks, confirmed, mapped, soon = 0xff01, 0xff02, 0xff04, 0xff06, 0xff09
	refusal                                = 0xffff
)

func listBody(number uint32) []byte { return le.AppendUint32(nil, number) }

func followBody(number uint32, room uint64, name string) []byte {
	b := le.AppendUint64(append(listBody(number), byte(publish.WriteAccess)), room)
	b = append(b, make([]byte, 16+8+8+4)...) // it has nothing of an earlier publisher
	b = le.AppendUint16(b, uint16(len(name)))
	return append(b, name...)
}

// doneBody acknowledges an update, with so many chunks mapped.
func doneBody(of packet, have uint32) []byte {
	b := append([]byte{}, of.body[:24]...) // token and serial
	b = append(b, 0)
	b = le.AppendUint32(b, have)
	return le.AppendUint16(b, 0)
}

// shown returns how many chunks an update leaves mapped.
func shown(p packet) uint32 { return le.Uint32(p.body[49:]) + le.Uint32(p.body[58:]) }
