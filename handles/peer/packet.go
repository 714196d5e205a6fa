package peer

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// A message is one packet or more. Each begins with a header, little-endian:
//
//	magic                4  "cuvP"
//	version              2
//	kind                 2
//	nonce               16  the receiver's
//	sequence             8  packets of this direction before this one
//	bytes that follow    4
//	file descriptors     4  with this packet
//	bytes in all         4  of the message
//	descriptors in all   4  of the message
//
// The first packet of each direction is a greeting: the sender's nonce, the lowest and the
// highest version that it speaks, 2 bytes each, and the optional messages that it takes, 4
// bytes. Fields that a later version may add behind those are ignored. Both sides go on with the highest version that
// both speak, which every later packet names; greetings and refusals are always of
// version 1. A process that ends a connection gives its reason in a refusal, if it can.
//
// The socket is ordered, and its peer's user is known. The nonce and the sequence
// guard against an end that several processes hold, such as a child
// that inherits one by mistake, or a descriptor of one that was passed on. Packets
// of a second speaker lack the nonce, which only the first has received, or break the
// sequence; a second reader takes packets away, which the first notices at the
// next one. docs/protocol.md has all of it.
const (
	packetMagic  = "cuvP"
	packetHeader = 48
	// firstVersion is that of greetings and refusals.
	firstVersion = 1
	// leastVersion and latestVersion bound the versions that this package speaks.
	leastVersion, latestVersion = 2, 2
	// greetingBytes is the length of a greeting without optional messages, and mostGreeting
	// the limit.
	greetingBytes = 16 + 2 + 2
	mostGreeting  = 512
	// takesWarnings is the bit of warnings among the optional messages.
	takesWarnings = 1
	// packetBody bounds a packet's body. Packets must fit into the socket's buffer,
	// usually of 208 KiB.
	packetBody = 32 << 10
)

const (
	// MaxKind is the highest kind of a message, 0xff00; the lowest is 1.
	MaxKind = wire.MaxKind
	// MaxBody is the maximum length of a body, 1 MiB.
	MaxBody = wire.MaxBody
	// MaxFDs is the maximum number of file descriptors in a message, 4,096. A receiver's
	// Options.MaxFDs may allow fewer.
	MaxFDs = wire.MaxFDs
)

// Message is a message of a [Conn].
type Message struct {
	// Kind is the program's choice, from 1 to MaxKind.
	Kind uint16
	Body []byte
	// FDs stay the sender's. Received ones belong to the receiver, which closes them.
	FDs []*FD
}

// Close closes the message's file descriptors.
func (m *Message) Close() error { return CloseAll(m.FDs) }

type nonce [16]byte

// versions is the range from least to most.
type versions struct{ least, most uint16 }

var ownVersions = versions{leastVersion, latestVersion}

// with returns the highest version of both ranges, or 0.
func (v versions) with(o versions) uint16 {
	if both := min(v.most, o.most); both >= max(v.least, o.least) {
		return both
	}
	return 0
}

// header is the header of a packet.
type header struct {
	version  uint16
	kind     uint16
	to       nonce
	sequence uint64
	bytes    uint32
	fds      uint32
	allBytes uint32
	allFDs   uint32
}

func (h *header) append(b []byte) []byte {
	e := wire.Encoder{B: append(b, packetMagic...)}
	e.Uint16(h.version)
	e.Uint16(h.kind)
	e.Raw(h.to[:])
	e.Uint64(h.sequence)
	e.Uint32(h.bytes)
	e.Uint32(h.fds)
	e.Uint32(h.allBytes)
	e.Uint32(h.allFDs)
	return e.B
}

// parseHeader reads a packet's header. fds is how many descriptors came
// with it, unless some were lost, and version the agreed version.
func parseHeader(p []byte, fds int, lost bool, version uint16) (h header, err error) {
	if len(p) < packetHeader {
		return h, errs.Violation("a packet of %s, where the header alone has %d", errs.Count(len(p), "byte"), packetHeader)
	}
	r := wire.Decoder{B: p}
	if magic := r.Raw(len(packetMagic)); string(magic) != packetMagic {
		return h, errs.Violation("a packet that begins with %q instead of %q", magic, packetMagic)
	}
	h.version, h.kind = r.Uint16(), r.Uint16()
	if h.kind == wire.Refusal {
		version = firstVersion
	}
	if h.version != version {
		return h, errs.Violation("a packet of version %d, where %d was agreed on", h.version, version)
	}
	copy(h.to[:], r.Raw(len(h.to)))
	h.sequence = r.Uint64()
	h.bytes, h.fds, h.allBytes, h.allFDs = r.Uint32(), r.Uint32(), r.Uint32(), r.Uint32()
	switch {
	case uint64(h.bytes) != uint64(len(r.B)):
		return h, errs.Violation("a packet that declares %d bytes and has %d", h.bytes, len(r.B))
	case h.fds > sock.MaxFDs:
		return h, errs.Violation("a packet that declares %d file descriptors, where %d is the most", h.fds, sock.MaxFDs)
	case lost:
	case int(h.fds) > fds:
		return h, errs.FilesLost(fmt.Sprintf("a packet declares %s, of which %d came", errs.Count(int(h.fds), "file descriptor"), fds))
	case int(h.fds) < fds:
		return h, errs.Violation("a packet that declares %s and has %d", errs.Count(int(h.fds), "file descriptor"), fds)
	}
	if h.bytes > h.allBytes || h.fds > h.allFDs {
		return h, errs.Violation("a packet with more than its message: %d of %d bytes, %d of %d file descriptors", h.bytes, h.allBytes, h.fds, h.allFDs)
	}
	return h, nil
}

// inbound assembles messages from packets. It trusts nothing in them. After
// an error it is unusable.
type inbound struct {
	own    nonce
	limits *link.Limits

	greeted  bool
	versions versions // that this side speaks
	version  uint16   // that both speak
	peer     nonce
	optional uint32 // messages that the peer takes
	sequence uint64
	// begun: part of a message is here. first is the header of its first packet.
	begun bool
	first header
	part  Message
	fds   int // received so far, lost ones included
	lost  bool
}

// receive takes ownership of a packet and its descriptors. It returns a message once that is
// whole, and otherwise nil. After an error everything that came is closed. lost reports
// that the kernel dropped some of the descriptors, or of the packet.
func (in *inbound) receive(p []byte, fds []*FD, lost bool) (*Message, error) {
	m, err := in.parse(p, fds, lost)
	if err != nil {
		_ = CloseAll(fds)
		in.discard()
	}
	return m, err
}

// discard closes the parts of a message that never ended.
func (in *inbound) discard() {
	_ = in.part.Close()
	in.forget()
}

func (in *inbound) forget() { in.begun, in.part, in.fds, in.lost = false, Message{}, 0, false }

func (in *inbound) parse(p []byte, fds []*FD, lost bool) (*Message, error) {
	h, err := in.header(p, len(fds), lost)
	if err != nil {
		return nil, err
	}
	body := p[packetHeader:]
	switch {
	case h.kind == wire.Refusal:
		return nil, in.refusal(h, body)
	case !in.greeted:
		return nil, in.greeting(h, body)
	case h.to != in.own:
		return nil, errs.Violation("a packet of another connection")
	}
	if err := in.begin(h); err != nil {
		return nil, err
	}
	return in.join(h, body, fds, lost)
}

// header reads a packet's header, and checks what does not depend on the message.
func (in *inbound) header(p []byte, fds int, lost bool) (header, error) {
	if lost && len(p) > packetHeader+packetBody {
		return header{}, errs.Violation("a packet of more than %d bytes", packetHeader+packetBody)
	}
	version := in.version
	if !in.greeted {
		version = firstVersion
	}
	h, err := parseHeader(p, fds, lost, version)
	switch {
	case err != nil:
		return h, err
	case lost && (in.limits.MayLose == nil || !in.limits.MayLose(h.kind)):
		return h, errs.FilesLost("file descriptors of a packet were dropped")
	case h.sequence != in.sequence:
		return h, errs.Violation("packet %d, where %d is the next", h.sequence, in.sequence)
	}
	in.sequence++
	return h, nil
}

// refusal returns why the peer ends the connection. It may have refused before it knew
// this side's nonce.
func (in *inbound) refusal(h header, body []byte) error {
	if h.to != in.own && h.to != (nonce{}) {
		return errs.Violation("a refusal of another connection")
	}
	return errs.Peer(errs.OpReceive, ErrRefused, errs.Words(string(body[:min(len(body), wire.MaxReason)])), "the reason is the peer's own words")
}

// greeting reads the peer's first packet, and settles the version.
func (in *inbound) greeting(h header, body []byte) error {
	if h.kind != wire.Greeting || h.to != (nonce{}) || len(body) < greetingBytes || len(body) > mostGreeting || h.allBytes != h.bytes || h.allFDs != 0 {
		return errs.Violation("something other than a greeting (kind %d, %d bytes, %d file descriptors)", h.kind, h.allBytes, h.allFDs)
	}
	r := wire.Decoder{B: body}
	copy(in.peer[:], r.Raw(len(in.peer)))
	peer := versions{r.Uint16(), r.Uint16()}
	if in.version = in.versions.with(peer); in.version == 0 {
		return errs.Peer(errs.OpReceive, ErrProtocol, fmt.Sprintf("the peer speaks versions %d to %d, and this process %d to %d", peer.least, peer.most, in.versions.least, in.versions.most),
			"use versions of this library in both processes that have one in common")
	}
	if len(r.B) >= 4 {
		in.optional = r.Uint32()
	}
	in.greeted = true
	return nil
}

// begin begins a message with its first packet, and otherwise checks that the packet
// is part of the message that has begun.
func (in *inbound) begin(h header) error {
	if in.begun {
		if f := in.first; h.kind != f.kind || h.allBytes != f.allBytes || h.allFDs != f.allFDs {
			return errs.Violation("the parts of a message differ: kinds %d and %d, %d and %d bytes, %d and %d file descriptors",
				f.kind, h.kind, f.allBytes, h.allBytes, f.allFDs, h.allFDs)
		}
		return nil
	}
	switch {
	case h.kind < 1 || h.kind > wire.LastKind:
		return errs.Violation("a message of kind %d, where 1 to %d are", h.kind, wire.LastKind)
	case h.allBytes > MaxBody:
		return errs.Peer(errs.OpReceive, ErrTooLarge, fmt.Sprintf("a message of %d bytes, where %d is the most", h.allBytes, MaxBody), "send less in a message")
	case in.limits.NoFDs && h.allFDs > 0:
		return errs.Violation("a message with %s, where none has any", errs.Count(int(h.allFDs), "file descriptor"))
	case uint64(h.allFDs) > uint64(in.limits.MaxFDs) && (h.kind <= MaxKind || h.allFDs > wire.MaxBatch || in.limits.MaxFDs == 0):
		return errs.Peer(errs.OpReceive, ErrTooLarge, fmt.Sprintf("a message with %s, where %d is the most", errs.Count(int(h.allFDs), "file descriptor"), in.limits.MaxFDs),
			"send fewer in a message, or raise the receiver's Options.MaxFDs")
	}
	in.begun, in.first, in.part = true, h, Message{Kind: h.kind}
	return nil
}

// join adds a packet to the message that has begun, and returns the message once it is
// whole.
func (in *inbound) join(h header, body []byte, fds []*FD, lost bool) (*Message, error) {
	in.fds += int(h.fds)
	haveBytes, haveFDs := len(in.part.Body)+len(body), in.fds
	whole := haveBytes == int(h.allBytes) && haveFDs == int(h.allFDs)
	switch {
	case haveBytes > int(h.allBytes) || haveFDs > int(h.allFDs):
		return nil, errs.Violation("the parts of a message have %d of %d bytes, %d of %d file descriptors", haveBytes, h.allBytes, haveFDs, h.allFDs)
	case !whole && len(body) == 0 && h.fds == 0:
		return nil, errs.Violation("an empty part of a message")
	}
	m := &in.part
	m.Body, m.FDs = append(m.Body, body...), append(m.FDs, fds...)
	if in.lost = in.lost || lost; in.lost {
		_ = m.Close()
		m.FDs = nil
	}
	if !whole {
		return nil, nil
	}
	got := *m
	if in.lost {
		got.FDs = make([]*FD, in.fds) // all nil: some did not fit, and which is unknown
	}
	in.forget()
	return &got, nil
}

// greeting returns the first packet of a direction.
func greeting(own nonce, speaks versions) []byte {
	var body wire.Encoder
	body.Raw(own[:])
	body.Uint16(speaks.least)
	body.Uint16(speaks.most)
	body.Uint32(takesWarnings)
	h := header{version: firstVersion, kind: wire.Greeting, bytes: uint32(len(body.B)), allBytes: uint32(len(body.B))}
	return append(h.append(nil), body.B...)
}

// outbound cuts messages into packets.
type outbound struct {
	version  uint16
	peer     nonce
	optional uint32 // messages that the peer takes
	sequence uint64
	buf      []byte // of the last packet
}

// packet returns the next packet of a message of which some bytes and descriptors
// have been sent, with at most batch descriptors. It is good until the next call. The
// caller counts the sequence on when it was sent.
func (out *outbound) packet(m *Message, bytes, fds, batch int) (packet []byte, body, with int) {
	body, with = min(len(m.Body)-bytes, packetBody), min(len(m.FDs)-fds, batch)
	h := header{version: out.version, kind: m.Kind, to: out.peer, sequence: out.sequence, bytes: uint32(body), fds: uint32(with),
		allBytes: uint32(len(m.Body)), allFDs: uint32(len(m.FDs))}
	if size := packetHeader + body; cap(out.buf) < size {
		out.buf = make([]byte, 0, max(size, leastPacket))
	}
	out.buf = append(h.append(out.buf[:0]), m.Body[bytes:bytes+body]...)
	return out.buf, body, with
}

// leastPacket is how much is allocated for packets at least: most messages are short.
const leastPacket = 512
