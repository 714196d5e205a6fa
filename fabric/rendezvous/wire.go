package rendezvous

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/handles/peer"
)

// Kinds of messages between the processes of a group.
const (
	kindHello     = 0x52_01 // rank, size and nonce, to the host
	kindWelcome   = 0x52_02 // the host's proof: the rank is a member
	kindEvent     = 0x52_03
	kindDone      = 0x52_04 // the member leaves
	kindTaken     = 0x52_05 // the host refuses: another process has the rank
	kindOtherSize = 0x52_06 // the host refuses: the size of its group is another
	kindChallenge = 0x52_07 // the host's nonce
	kindProof     = 0x52_08 // the member's proof
	kindUnproved  = 0x52_09 // the host refuses: the proof is not of its secret
)

// hello is a member's first message.
type hello struct {
	Rank, Size uint32
	Nonce      nonce
}

func (h hello) message() peer.Message {
	b := binary.LittleEndian.AppendUint32(nil, h.Rank)
	b = binary.LittleEndian.AppendUint32(b, h.Size)
	return peer.Message{Kind: kindHello, Body: append(b, h.Nonce[:]...)}
}

func readHello(m peer.Message) (h hello, err error) {
	b, err := fixed(m, kindHello, 8+len(h.Nonce))
	if err != nil {
		return h, err
	}
	h = hello{Rank: binary.LittleEndian.Uint32(b), Size: binary.LittleEndian.Uint32(b[4:])}
	copy(h.Nonce[:], b[8:])
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
	b := make([]byte, 0, eventHeader+len(name)+len(reason)+len(e.Contribution.Body))
	b = append(b, byte(e.Kind))
	b = binary.LittleEndian.AppendUint32(b, uint32(e.Rank))
	b = binary.LittleEndian.AppendUint64(b, e.Step.Number)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(name)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(reason)))
	return append(append(append(b, name...), reason...), e.Contribution.Body...), nil
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
	n := Event{Kind: EventKind(b[0]), Rank: int(binary.LittleEndian.Uint32(b[1:]))}
	n.Step.Number = binary.LittleEndian.Uint64(b[5:])
	name, reason := int(binary.LittleEndian.Uint16(b[13:])), int(binary.LittleEndian.Uint16(b[15:]))
	b = b[eventHeader:]
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
	return peer.Message{Kind: kindEvent, Body: body, FDs: e.Contribution.Files}
}

// readEvent takes ownership of the message's files if it succeeds.
func readEvent(m peer.Message) (e Event, err error) {
	switch err = e.UnmarshalBinary(m.Body); {
	case err != nil:
	case m.Kind != kindEvent:
		err = fmt.Errorf("%w: a message of kind %#x", peer.ErrProtocol, m.Kind)
	case e.Kind != Posted && len(m.FDs) > 0 || len(m.FDs) > MaxFiles:
		err = fmt.Errorf("%w: an event with %d files", peer.ErrProtocol, len(m.FDs))
	default:
		e.Contribution.Files = m.FDs
	}
	return e, err
}
