//go:build linux

package peer

import (
	"bytes"
	"encoding/binary"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// someFDs makes n descriptors.
func someFDs(t testing.TB, n int) (all []*FD) {
	t.Helper()
	for range n {
		i, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		require.NoError(t, err)
		all = append(all, own(i))
	}
	return all
}

var (
	receiver = nonce{1, 2, 3}
	sender   = nonce{4, 5, 6}
)

func rawPacket(h header, body string) []byte {
	h.bytes = uint32(len(body))
	if h.version == 0 {
		h.version = latestVersion
		if h.kind == wire.Greeting || h.kind == wire.Refusal {
			h.version = firstVersion
		}
	}
	return append(h.append(nil), body...)
}

func hello() []byte { return greeting(sender, ownVersions) }

// helloBody is the body of the greeting.
var helloBody = string(hello()[packetHeader:])

// greeted is a receiver that knows its peer.
func greeted(t testing.TB) *inbound {
	t.Helper()
	in := &inbound{own: receiver, versions: ownVersions, limits: &link.Limits{MaxFDs: 8}}
	m, err := in.receive(hello(), nil, false)
	require.NoError(t, err)
	require.Nil(t, m)
	require.Equal(t, sender, in.peer)
	return in
}

func TestMessagesAreCutAndPutTogether(t *testing.T) {
	for _, size := range []int{0, 1, packetBody, packetBody + 1, MaxBody} {
		for _, fds := range []int{0, 1, 5, 8} {
			in, out := greeted(t), &outbound{version: latestVersion, peer: receiver, sequence: 1}
			m := &Message{Kind: 9, Body: bytes.Repeat([]byte("x."), size)[:size], FDs: someFDs(t, fds)}
			var got *Message
			for b, f, first := 0, 0, true; first || b < size || f < fds; first = false {
				require.Nil(t, got)
				p, body, with := out.packet(m, b, f, 3)
				var err error
				got, err = in.receive(p, m.FDs[f:f+with], false)
				require.NoError(t, err)
				b, f, out.sequence = b+body, f+with, out.sequence+1
			}
			require.NotNil(t, got)
			require.Equal(t, m.Kind, got.Kind)
			require.Len(t, got.Body, len(m.Body))
			require.True(t, bytes.Equal(m.Body, got.Body))
			require.Len(t, got.FDs, len(m.FDs))
			for i := range m.FDs {
				require.Same(t, m.FDs[i], got.FDs[i], "in order")
			}
			require.NoError(t, got.Close())
		}
	}
}

func TestPacketsThatNoPeerSends(t *testing.T) {
	h := header{kind: 5, to: receiver, sequence: 1, fds: 1, allBytes: 4, allFDs: 2}
	with := func(change func(h *header)) header { h := h; change(&h); return h }
	for _, c := range []struct {
		name   string
		packet []byte
		fds    int
		lost   bool
		want   error
		says   string
	}{
		{"nothing but a byte", []byte{0}, 0, false, ErrProtocol, "a packet of 1 byte"},
		{"half a header", rawPacket(h, "")[:40], 1, false, ErrProtocol, "a packet of 40 bytes"},
		{"garbage", bytes.Repeat([]byte("garbage "), 10), 0, false, ErrProtocol, `begins with "garb"`},
		{"another version", func() []byte { p := rawPacket(h, "abcd"); p[4] = 9; return p }(), 1, false, ErrProtocol, "version 9"},
		{"cut", rawPacket(h, "abcd")[:packetHeader+2], 1, false, ErrProtocol, "declares 4 bytes and has 2"},
		{"longer than it says", append(rawPacket(h, "ab"), 'c'), 1, false, ErrProtocol, "declares 2 bytes and has 3"},
		{"an absurd length", func() []byte {
			p := rawPacket(h, "abcd")
			binary.LittleEndian.PutUint32(p[32:], 1<<32-1)
			return p
		}(), 1, false, ErrProtocol, "declares 4294967295 bytes"},
		{"an absurd count", rawPacket(with(func(h *header) { h.fds = 1 << 31; h.allFDs = 1 << 31 }), "abcd"), 1, false, ErrProtocol, "declares 2147483648 file descriptors"},
		{"a descriptor too few", rawPacket(h, "abcd"), 0, false, ErrTruncated, "of which 0 came"},
		{"a descriptor too many", rawPacket(h, "abcd"), 2, false, ErrProtocol, "declares 1 file descriptor and has 2"},
		{"dropped descriptors", rawPacket(h, "abcd"), 1, true, ErrTruncated, "raise this process's limit"},
		{"too long", make([]byte, packetHeader+packetBody+1), 0, true, ErrProtocol, "more than 32816 bytes"},
		{"more than the message", rawPacket(h, "abcde"), 1, false, ErrProtocol, "5 of 4 bytes"},
		{"a second copy", rawPacket(with(func(h *header) { h.sequence = 0 }), "abcd"), 1, false, ErrProtocol, "packet 0, where 1 is the next"},
		{"a later one first", rawPacket(with(func(h *header) { h.sequence = 2 }), "abcd"), 1, false, ErrProtocol, "packet 2, where 1 is the next"},
		{"one of another connection", rawPacket(with(func(h *header) { h.to[0]++ }), "abcd"), 1, false, ErrProtocol, "another connection"},
		{"a second greeting", rawPacket(header{version: latestVersion, sequence: 1, to: receiver, allBytes: uint32(len(helloBody))}, helloBody), 0, false, ErrProtocol, "kind 0"},
		{"a kind that is reserved", rawPacket(with(func(h *header) { h.kind = wire.LastKind + 1 }), "abcd"), 1, false, ErrProtocol, "kind 65290"},
		{"a message too long", rawPacket(with(func(h *header) { h.allBytes = MaxBody + 1 }), "abcd"), 1, false, ErrTooLarge, "1048577 bytes"},
		{"too many descriptors", rawPacket(with(func(h *header) { h.allFDs = 9 }), "abcd"), 1, false, ErrTooLarge, "9 file descriptors, where 8"},
		{"an empty part", rawPacket(with(func(h *header) { h.fds = 0 }), ""), 0, false, ErrProtocol, "an empty part"},
		{"a refusal", rawPacket(header{kind: wire.Refusal, sequence: 1, to: receiver, allBytes: 8}, "no\x1b[31m!"), 0, false, ErrRefused, `"no\x1b[31m!"`},
		{"a refusal that knows no nonce", rawPacket(header{kind: wire.Refusal, sequence: 1, allBytes: 2}, "no"), 0, false, ErrRefused, `"no"`},
		{"another connection's refusal", rawPacket(header{kind: wire.Refusal, sequence: 1, to: sender, allBytes: 2}, "no"), 0, false, ErrProtocol, "another connection"},
		{"a long refusal", rawPacket(header{kind: wire.Refusal, sequence: 1, allBytes: 9999}, strings.Repeat("n", 9999)), 0, false, ErrRefused, strings.Repeat("n", wire.MaxReason) + `"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			open := OpenFDs()
			in := greeted(t)
			m, err := in.receive(c.packet, someFDs(t, c.fds), c.lost)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, "; ", "it says what to do")
			require.Nil(t, m)
			require.Equal(t, open, OpenFDs(), "what came is closed")
		})
	}
}

func TestPartsThatDoNotFit(t *testing.T) {
	first := header{kind: 5, to: receiver, sequence: 1, fds: 1, allBytes: 4, allFDs: 2}
	for name, second := range map[string]header{
		"another kind":         {kind: 6, to: receiver, sequence: 2, fds: 1, allBytes: 4, allFDs: 2},
		"another length":       {kind: 5, to: receiver, sequence: 2, fds: 1, allBytes: 5, allFDs: 2},
		"another count":        {kind: 5, to: receiver, sequence: 2, fds: 1, allBytes: 4, allFDs: 3},
		"too many descriptors": {kind: 5, to: receiver, sequence: 2, fds: 2, allBytes: 4, allFDs: 2},
		"the same again":       {kind: 5, to: receiver, sequence: 1, fds: 1, allBytes: 4, allFDs: 2},
	} {
		t.Run(name, func(t *testing.T) {
			open := OpenFDs()
			in := greeted(t)
			m, err := in.receive(rawPacket(first, "ab"), someFDs(t, 1), false)
			require.NoError(t, err)
			require.Nil(t, m)
			require.Equal(t, open+1, OpenFDs())
			_, err = in.receive(rawPacket(second, "cd"), someFDs(t, int(second.fds)), false)
			require.ErrorIs(t, err, ErrProtocol)
			require.Equal(t, open, OpenFDs(), "of both parts")
		})
	}
}

func TestTheFirstPacketIsAGreeting(t *testing.T) {
	for name, p := range map[string][]byte{
		"a message":             rawPacket(header{version: firstVersion, kind: 5, allBytes: uint32(len(helloBody))}, helloBody),
		"a short one":           rawPacket(header{allBytes: 19}, helloBody[:19]),
		"a part of one":         rawPacket(header{allBytes: 40}, helloBody),
		"with a nonce to":       rawPacket(header{to: receiver, allBytes: uint32(len(helloBody))}, helloBody),
		"with file descriptors": rawPacket(header{allBytes: uint32(len(helloBody)), allFDs: 1}, helloBody),
	} {
		t.Run(name, func(t *testing.T) {
			in := &inbound{own: receiver, versions: ownVersions, limits: &link.Limits{}}
			_, err := in.receive(p, nil, false)
			require.ErrorIs(t, err, ErrProtocol)
			require.ErrorContains(t, err, "other than a greeting")
		})
	}
}

// FuzzPacket takes any packet: it is a message, a part, or an error of
// this package, and the descriptors that came with an error are closed.
func FuzzPacket(f *testing.F) {
	h := header{kind: 5, to: receiver, sequence: 1, fds: 1, allBytes: 4, allFDs: 1}
	f.Add(rawPacket(h, "abcd"), 1, false)
	f.Add(rawPacket(h, "ab"), 1, false)
	f.Add(rawPacket(h, "abcd"), 2, true)
	f.Add(rawPacket(header{kind: wire.Refusal, sequence: 1, allBytes: 2}, "no"), 0, false)
	f.Add(hello(), 0, false)
	f.Fuzz(func(t *testing.T, p []byte, n int, lost bool) {
		n = int(uint(n) % 4)
		open := OpenFDs()
		in := greeted(t)
		m, err := in.receive(p, someFDs(t, n), lost)
		want := n
		switch {
		case err != nil:
			var e *Error
			require.ErrorAs(t, err, &e)
			require.Nil(t, m)
			want = 0
		case m != nil:
			require.Len(t, m.FDs, n)
			require.LessOrEqual(t, len(m.Body), MaxBody)
		default:
			require.True(t, in.begun)
		}
		require.Equal(t, open+want, OpenFDs())
		if m != nil {
			require.NoError(t, m.Close())
		}
		in.discard()
		require.Equal(t, open, OpenFDs())
	})
}

// FuzzSession drives a receiver with a run of packets, most of them almost
// right: each four bytes choose what is wrong with the next one.
func FuzzSession(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 1, 16, 0, 0, 1, 16, 2, 1})
	f.Add([]byte{0, 0, 0, 0, 2, 8, 1, 0, 3, 8, 1, 0, 3, 8, 1, 0})
	f.Add([]byte{0, 0, 0, 0, 2, 8, 1, 3})
	f.Add([]byte{1, 0, 0, 0})
	f.Add([]byte{0, 0, 0, 0, 2, 8, 3, 2, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, script []byte) {
		open := OpenFDs()
		in := &inbound{own: receiver, versions: ownVersions, limits: &link.Limits{MaxFDs: 8}}
		var sequence uint64
		var failed bool
		for ; len(script) >= 4 && !failed; script = script[4:] {
			kind, size, fds, wrong := script[0]%5, int(script[1]), int(script[2]%4), script[3]%8
			h := header{kind: uint16(kind), to: receiver, sequence: sequence, fds: uint32(fds), allBytes: uint32(size), allFDs: uint32(fds)}
			switch kind {
			case 0:
				h.to, size, fds = nonce{}, 16, 0
				h.fds, h.allBytes, h.allFDs = 0, 16, 0
			case 2, 3: // a part of a longer one
				h.kind, h.allBytes, h.allFDs = 2, 64, 6
			case 4:
				h.kind = wire.Refusal
			}
			switch wrong {
			case 1:
				h.sequence++
			case 2:
				h.to[1]++
			case 3:
				h.fds++
			case 4:
				h.allBytes = MaxBody + uint32(size)
			case 5:
				h.allFDs += 8
			}
			p := rawPacket(h, strings.Repeat("b", size))
			if wrong == 6 {
				p = p[:len(p)/2]
			}
			wasGreeted, had := in.greeted, len(in.part.FDs)
			m, err := in.receive(p, someFDs(t, fds), wrong == 7)
			sequence++
			held := len(in.part.FDs)
			switch {
			case err != nil:
				failed = true
				require.Zero(t, held)
			case m != nil:
				require.True(t, wasGreeted, "no message before a greeting")
				require.NotContains(t, []byte{1, 2, 3, 6, 7}, wrong, "none that is wrong")
				require.Len(t, m.FDs, had+fds)
				require.NoError(t, m.Close())
				require.Zero(t, held)
			default:
				require.Equal(t, had+fds, held)
			}
			require.Equal(t, open+held, OpenFDs())
		}
		in.discard()
		require.Equal(t, open, OpenFDs())
	})
}

// Both sides go on with the greatest version that both speak, and later ones may
// add to the greeting.
func TestVersionsAreNegotiated(t *testing.T) {
	for _, c := range []struct {
		a, b versions
		want uint16
	}{
		{versions{1, 1}, versions{1, 1}, 1}, {versions{1, 3}, versions{2, 9}, 3}, {versions{2, 9}, versions{1, 3}, 3},
		{versions{1, 1}, versions{2, 2}, 0}, {versions{4, 9}, versions{1, 3}, 0}, {versions{3, 2}, versions{1, 9}, 0},
	} {
		require.Equal(t, c.want, c.a.with(c.b))
		require.Equal(t, c.want, c.b.with(c.a))
		in := &inbound{own: receiver, versions: c.a, limits: &link.Limits{}}
		body := string(greeting(sender, c.b)[packetHeader:]) + "what is new"
		p := rawPacket(header{allBytes: uint32(len(body))}, body)
		_, err := in.receive(p, nil, false)
		if c.want == 0 {
			require.ErrorIs(t, err, ErrProtocol)
			require.ErrorContains(t, err, "speaks versions")
			continue
		}
		require.NoError(t, err)
		h := header{version: c.want, kind: 5, to: receiver, sequence: 1}
		m, err := in.receive(rawPacket(h, ""), nil, false)
		require.NoError(t, err)
		require.NotNil(t, m)
		h.version, h.sequence = c.want+1, 2
		_, err = in.receive(rawPacket(h, ""), nil, false)
		require.ErrorContains(t, err, "was agreed on")
	}
	// Two processes that have none in common learn so.
	ownVersions = versions{7, 8}
	near, file, err := Pair(Options{})
	ownVersions = versions{leastVersion, latestVersion}
	require.NoError(t, err)
	defer near.Close()
	far, err := Inherit(file, Options{})
	require.NoError(t, err)
	defer far.Close()
	_, err = far.Receive(moment(t))
	require.ErrorContains(t, err, "the peer speaks versions 7 to 8, and this process 2 to 2")
	_, err = near.Receive(moment(t))
	require.ErrorContains(t, err, "speaks versions 2 to 2")
}

func TestPacketsReuseTheirBuffer(t *testing.T) {
	out, m := &outbound{version: latestVersion, peer: receiver}, &Message{Kind: 9, Body: make([]byte, 700)}
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _, _ = out.packet(m, 0, 0, 0) }))
}
