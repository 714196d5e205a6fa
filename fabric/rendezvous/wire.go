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

const maxReason = 4096

// message lends the event's files to the message.
func (e Event) message() handles.Message {
	reason := e.Reason[:min(len(e.Reason), maxReason)]
	b := make([]byte, 0, eventHeader+len(e.Step.Name)+len(reason)+len(e.Parcel.Body))
	b = append(b, byte(e.Kind))
	b = binary.LittleEndian.AppendUint32(b, uint32(e.Rank))
	b = binary.LittleEndian.AppendUint64(b, e.Step.Number)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(e.Step.Name)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(reason)))
	b = append(append(append(b, e.Step.Name...), reason...), e.Parcel.Body...)
	return handles.Message{Kind: kindEvent, Body: b, FDs: e.Parcel.Files}
}

// readEvent takes the message's files over where it succeeds.
func readEvent(m handles.Message) (Event, error) {
	bad := func(what string) (Event, error) {
		return Event{}, fmt.Errorf("%w: an event with %s", handles.ErrProtocol, what)
	}
	b := m.Body
	if len(b) < eventHeader {
		return bad(fmt.Sprintf("%d bytes", len(b)))
	}
	e := Event{Kind: EventKind(b[0]), Rank: int(binary.LittleEndian.Uint32(b[1:]))}
	e.Step.Number = binary.LittleEndian.Uint64(b[5:])
	name, reason := int(binary.LittleEndian.Uint16(b[13:])), int(binary.LittleEndian.Uint16(b[15:]))
	b = b[eventHeader:]
	switch {
	case e.Kind < Posted || e.Kind > Lost:
		return bad(fmt.Sprintf("kind %d", e.Kind))
	case e.Rank >= MaxSize:
		return bad(fmt.Sprintf("rank %d", e.Rank))
	case name > MaxName || reason > maxReason || name+reason > len(b):
		return bad(fmt.Sprintf("a name of %d bytes and a reason of %d, in %d", name, reason, len(b)))
	}
	e.Step.Name, e.Reason = string(b[:name]), string(b[name:name+reason])
	body := b[name+reason:]
	if e.Kind != Posted && (len(body) > 0 || len(m.FDs) > 0) || len(body) > MaxBody || len(m.FDs) > MaxFiles {
		return bad(fmt.Sprintf("%d bytes and %d files", len(body), len(m.FDs)))
	}
	if len(body) > 0 {
		e.Parcel.Body = body
	}
	e.Parcel.Files = m.FDs
	return e, nil
}
