package rendezvous

import (
	"fmt"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// hello is a member's first message.
type hello struct{ Rank, Size uint32 }

func (h hello) message() peer.Message {
	var e wire.Encoder
	e.Uint32(h.Rank)
	e.Uint32(h.Size)
	return peer.Message{Kind: wire.Hello, Body: e.B}
}

func readHello(m peer.Message) (h hello, err error) {
	b, err := fixed(m, wire.Hello, 8)
	if err != nil {
		return h, err
	}
	d := wire.Decoder{B: b}
	h.Rank, h.Size = d.Uint32(), d.Uint32()
	return h, nil
}

// otherSize refuses a member that names another size than the group's.
func otherSize(size int) peer.Message {
	var e wire.Encoder
	e.Uint32(uint32(size))
	return peer.Message{Kind: wire.OtherSize, Body: e.B}
}

func readOtherSize(m peer.Message) (size uint32, err error) {
	b, err := fixed(m, wire.OtherSize, 4)
	if err != nil {
		return 0, err
	}
	d := wire.Decoder{B: b}
	return d.Uint32(), nil
}

// fixed returns the body of a message of one kind and length, without files.
func fixed(m peer.Message, kind uint16, length int) ([]byte, error) {
	if m.Kind != kind || len(m.Body) != length || len(m.FDs) != 0 {
		return nil, fmt.Errorf("%w: a message of kind %#x with %d bytes and %d files in place of kind %#x", peer.ErrProtocol, m.Kind, len(m.Body), len(m.FDs), kind)
	}
	return m.Body, nil
}

// MaxReason bounds the part of a reason that travels, in bytes.
const MaxReason = 4096

// MarshalBinary encodes the event without its files. It clips a name or a reason
// that is too long.
func (e Event) MarshalBinary() ([]byte, error) {
	var out wire.Encoder
	out.Uint8(uint8(e.Kind))
	out.Uint32(uint32(e.Rank))
	out.Uint64(e.Step.Number)
	out.Text(e.Step.Name, MaxName)
	out.Text(e.Reason, MaxReason)
	out.Raw(e.Contribution.Body)
	return out.B, nil
}

// UnmarshalBinary decodes an event, or returns peer.ErrProtocol for malformed
// bytes. The contribution refers to b.
func (e *Event) UnmarshalBinary(b []byte) error {
	d := wire.Decoder{B: b}
	n := Event{Kind: EventKind(d.Uint8()), Rank: int(d.Uint32())}
	n.Step.Number = d.Uint64()
	n.Step.Name, n.Reason = d.Text(MaxName), d.Text(MaxReason)
	body := d.B
	switch {
	case n.Kind < Posted || n.Kind > Ended:
		d.Fail("kind %d", n.Kind)
	case n.Rank >= MaxSize:
		d.Fail("rank %d of at most %d", n.Rank, MaxSize)
	case n.Kind != Posted && len(body) > 0 || len(body) > MaxBody:
		d.Fail("a body of %d bytes", len(body))
	}
	if err := d.Err(); err != nil {
		return fmt.Errorf("%w: an event with %w", peer.ErrProtocol, err)
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
	case e.Kind == Ended:
		err = fmt.Errorf("%w: an event %q, which a rank notes for itself", peer.ErrProtocol, e.Kind)
	case e.Kind != Posted && len(m.FDs) > 0 || len(m.FDs) > MaxFiles:
		err = fmt.Errorf("%w: an event with %d files", peer.ErrProtocol, len(m.FDs))
	default:
		e.Contribution.Files = m.FDs
	}
	return e, err
}
