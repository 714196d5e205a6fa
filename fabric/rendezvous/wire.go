package rendezvous

import (
	"encoding/binary"
	"fmt"

	"github.com/cuvmm/cuvmm/handles"
)

// Kinds of messages between the processes of a group.
const (
	kindHello   = 0x52_01 // rank and size, to the host
	kindWelcome = 0x52_02 // the same back
	kindEvent   = 0x52_03
	kindDone    = 0x52_04 // the member leaves
	// The host's answers to those that it does not take in.
	kindTaken     = 0x52_05 // the same back: another process has the rank
	kindOtherSize = 0x52_06 // rank 0, and the size of the host's group
)

// hello is a member's first message, and the host's answer.
type hello struct {
	Rank, Size uint32
}

func (h hello) message(kind uint16) handles.Message {
	b := binary.LittleEndian.AppendUint32(nil, h.Rank)
	return handles.Message{Kind: kind, Body: binary.LittleEndian.AppendUint32(b, h.Size)}
}

func readHello(m handles.Message) (h hello, err error) {
	if len(m.Body) != 8 || len(m.FDs) != 0 {
		return h, fmt.Errorf("%w: a greeting of %d bytes and %d files", handles.ErrProtocol, len(m.Body), len(m.FDs))
	}
	return hello{binary.LittleEndian.Uint32(m.Body), binary.LittleEndian.Uint32(m.Body[4:])}, nil
}

// eventHeader is kind (1), rank (4), step (8), length of the name (2) and of the
// reason (2); name, reason and body follow.
const eventHeader = 1 + 4 + 8 + 2 + 2

// MaxReason is how much of a reason travels, in bytes.
const MaxReason = 4096

// MarshalBinary is the event without its files. A name or a reason that is too
// long is cut.
func (e Event) MarshalBinary() ([]byte, error) {
	name, reason := e.Step.Name[:min(len(e.Step.Name), MaxName)], e.Reason[:min(len(e.Reason), MaxReason)]
	b := make([]byte, 0, eventHeader+len(name)+len(reason)+len(e.Parcel.Body))
	b = append(b, byte(e.Kind))
	b = binary.LittleEndian.AppendUint32(b, uint32(e.Rank))
	b = binary.LittleEndian.AppendUint64(b, e.Step.Number)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(name)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(reason)))
	return append(append(append(b, name...), reason...), e.Parcel.Body...), nil
}

// UnmarshalBinary reads an event; what no rank sends is handles.ErrProtocol. It
// keeps a reference to b, for the parcel.
func (e *Event) UnmarshalBinary(b []byte) error {
	bad := func(what string) error { return fmt.Errorf("%w: an event with %s", handles.ErrProtocol, what) }
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
		n.Parcel.Body = body
	}
	*e = n
	return nil
}

// message lends the event's files to the message.
func (e Event) message() handles.Message {
	body, _ := e.MarshalBinary() // never fails
	return handles.Message{Kind: kindEvent, Body: body, FDs: e.Parcel.Files}
}

// readEvent takes the message's files over where it succeeds.
func readEvent(m handles.Message) (e Event, err error) {
	switch err = e.UnmarshalBinary(m.Body); {
	case err != nil:
	case m.Kind != kindEvent:
		err = fmt.Errorf("%w: a message of kind %#x", handles.ErrProtocol, m.Kind)
	case e.Kind != Posted && len(m.FDs) > 0 || len(m.FDs) > MaxFiles:
		err = fmt.Errorf("%w: an event with %d files", handles.ErrProtocol, len(m.FDs))
	default:
		e.Parcel.Files = m.FDs
	}
	return e, err
}
