package handles

import (
	"slices"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// message is a message of a transfer. Its body, little-endian, is the transfer's number (4
// bytes), and then
//
//	offer                the descriptor
//	chunks               the index of the first 4; a file descriptor of each
//	fabric               the index of the first 4, the fabric handles of the chunks 64 each
//	taken                how many chunks so far 4
//	withdrawn, declined  the reason, in text
//	confirmed, mapped    nothing
type message struct {
	kind     uint16
	transfer uint32
	count    uint32 // of the chunks before these, or taken so far
	rest     []byte // the descriptor, or the reason
	fabric   []cuda.FabricHandle
	fds      []*peer.FD
}

func (m message) pack() peer.Message {
	var e wire.Encoder
	e.Uint32(m.transfer)
	if m.kind == wire.Chunks || m.kind == wire.Fabric || m.kind == wire.Taken {
		e.Uint32(m.count)
	}
	for _, f := range m.fabric {
		e.Raw(f[:])
	}
	e.Raw(m.rest)
	return peer.Message{Kind: m.kind, Body: e.B, FDs: m.fds}
}

// parse reads a message of a reserved kind. It leaves an offer's descriptor packed: a wrong one
// ends the transfer, and a wrong message the connection.
func parse(p peer.Message) (message, error) {
	d := wire.Decoder{B: p.Body}
	m := message{kind: p.Kind, transfer: d.Uint32(), fds: p.FDs}
	least, most := 0, 0 // file descriptors
	switch m.kind {
	case wire.Offer:
		m.rest = d.Raw(max(descriptorHeader, len(d.B)))
	case wire.Chunks:
		m.count, least, most = d.Uint32(), 1, wire.MaxBatch
	case wire.Fabric:
		const size = len(cuda.FabricHandle{})
		m.count = d.Uint32()
		if n := len(d.B) / size; n < 1 || n > wire.MaxBatch {
			d.Fail("%s, where 1 to %d belong to it", errs.Count(n, "fabric handle"), wire.MaxBatch)
		}
		for d.Err() == nil && len(d.B) >= size {
			m.fabric = append(m.fabric, cuda.FabricHandle(d.Raw(size)))
		}
	case wire.Taken:
		m.count = d.Uint32()
	case wire.Withdrawn, wire.Declined:
		if m.rest = d.Raw(len(d.B)); len(m.rest) > wire.MaxReason || !utf8.Valid(m.rest) {
			d.Fail("a reason of %s, where %d of UTF-8 is the most", errs.Count(len(m.rest), "byte"), wire.MaxReason)
		}
	}
	if n := len(m.fds); n < least || n > most {
		d.Fail("%s, where %d to %d belong to it", errs.Count(n, "file descriptor"), least, most)
	}
	if err := d.End(); err != nil {
		return message{}, errs.Violation("a message of kind %#x: %v", m.kind, err)
	}
	return m, nil
}

// failed is the message of a kind, withdrawn or declined, that ends a transfer with a reason.
func failed(kind uint16, t uint32, reason error) message {
	return message{kind: kind, transfer: t, rest: []byte(wire.Clip(reason.Error(), wire.MaxReason))}
}

// err returns the error of a transfer that the peer ended.
func (m message) err(op string) error {
	return errs.Peer(op, peer.ErrRefused, errs.Words(string(m.rest)), "the reason is the peer's own words")
}

// lost reports whether the descriptors of a message exceeded this process's limit.
func (m message) lost() bool { return slices.Contains(m.fds, nil) }

func (m message) close() { _ = peer.CloseAll(m.fds) }
