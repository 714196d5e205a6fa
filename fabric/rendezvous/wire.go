package rendezvous

import (
	"fmt"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// hello is a member's first message.
type hello struct {
	Rank, Size uint32
	Nonce      nonce
}

func (h hello) message() peer.Message {
	var e wire.Encoder
	e.Uint32(h.Rank)
	e.Uint32(h.Size)
	e.Raw(h.Nonce[:])
	return peer.Message{Kind: wire.Hello, Body: e.B}
}

func readHello(m peer.Message) (h hello, err error) {
	b, err := fixed(m, wire.Hello, 8+len(h.Nonce))
	if err != nil {
		return h, err
	}
	d := wire.Decoder{B: b}
	h.Rank, h.Size = d.Uint32(), d.Uint32()
	copy(h.Nonce[:], d.B)
	return h, nil
}

// fixed returns the body of a message of one kind and length, without files.
func fixed(m peer.Message, kind uint16, length int) ([]byte, error) {
	if m.Kind != kind || len(m.Body) != length || len(m.FDs) != 0 {
		return nil, fmt.Errorf("%w: a message of kind %#x with %d bytes and %d files in place of kind %#x", peer.ErrProtocol, m.Kind, len(m.Body), len(m.FDs), kind)
	}
	return m.Body, nil
}

// eventHeader is kind (1), rank (4), step (8), length of the name (2) and of the
// reason (2); name, reason and body follow.
const eventHeader = 1 + 4 + 8 + 2 + 2

// MaxReason is how much of a reason travels, in bytes.
const MaxReason = 4096

// MarshalBinary encodes the event without its files. It cuts a name or a reason
// that is too long.
func (e Event) MarshalBinary() ([]byte, error) {
	name, reason := cut(e.Step.Name, MaxName), cut(e.Reason, MaxReason)
	out := wire.Encoder{B: make([]byte, 0, eventHeader+len(name)+len(reason)+len(e.Contribution.Body))}
	out.Uint8(uint8(e.Kind))
	out.Uint32(uint32(e.Rank))
	out.Uint64(e.Step.Number)
	out.Uint16(uint16(len(name)))
	out.Uint16(uint16(len(reason)))
	return append(append(append(out.B, name...), reason...), e.Contribution.Body...), nil
}

// cut shortens a text to a number of bytes, between characters.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most]
}

// UnmarshalBinary decodes an event, or returns peer.ErrProtocol for bytes that
// no rank sends. The contribution refers to b.
func (e *Event) UnmarshalBinary(b []byte) error {
	bad := func(what string) error { return fmt.Errorf("%w: an event with %s", peer.ErrProtocol, what) }
	if len(b) < eventHeader {
		return bad(fmt.Sprintf("%d bytes", len(b)))
	}
	d := wire.Decoder{B: b}
	n := Event{Kind: EventKind(d.Uint8()), Rank: int(d.Uint32())}
	n.Step.Number = d.Uint64()
	name, reason := int(d.Uint16()), int(d.Uint16())
	b = d.B
	switch {
	case n.Kind < Posted || n.Kind > Ended:
		return bad(fmt.Sprintf("kind %d", n.Kind))
	case n.Rank >= MaxSize:
		return bad(fmt.Sprintf("rank %d", n.Rank))
	case name > MaxName || reason > MaxReason || name+reason > len(b):
		return bad(fmt.Sprintf("a name of %d bytes and a reason of %d, in %d", name, reason, len(b)))
	}
	n.Step.Name, n.Reason = string(b[:name]), string(b[name:name+reason])
	body := b[name+reason:]
	if n.Kind != Posted && len(body) > 0 || len(body) > MaxBody {
		return bad(fmt.Sprintf("%d bytes", len(body)))
	}
	if len(body) > 0 {
		n.Contribution.Body = body
	}
	*e = n
	return nil
}

// message lends the event's files to the message.
func (e Event) message() peer.Message {
	body, _ := e.MarshalBinary() // never fails
	return peer.Message{Kind: wire.Event, Body: body, FDs: e.Contribution.Files}
}

// readEvent takes ownership of the message's files if it succeeds.
func readEvent(m peer.Message) (e Event, err error) {
	switch err = e.UnmarshalBinary(m.Body); {
	case err != nil:
	case m.Kind != wire.Event:
		err = fmt.Errorf("%w: a message of kind %#x", peer.ErrProtocol, m.Kind)
	case e.Kind != Posted && len(m.FDs) > 0 || len(m.FDs) > MaxFiles:
		err = fmt.Errorf("%w: an event with %d files", peer.ErrProtocol, len(m.FDs))
	default:
		e.Contribution.Files = m.FDs
	}
	return e, err
}
