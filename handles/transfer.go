package handles

import (
	"slices"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// The bodies of the library's own messages, little-endian, after the transfer's
// number (4 bytes):
//
//	offer       the descriptor
//	chunks      the index of the first 4
//	fabric      the index of the first 4, the fabric handles of the chunks 64 each
//	withdrawn   the reason, in text
//	confirmed
//	taken       how many chunks so far 4
//	mapped
//	declined    the reason, in text
//
// The file descriptors of chunks are the handles of the next chunks.
const transferHeader = 4

// transferOf returns the number of the transfer that a message belongs to. It refuses
// messages whose length or descriptors do not fit their kind.
func transferOf(m peer.Message) (uint32, error) {
	least, most := transferHeader, transferHeader
	switch m.Kind {
	case wire.Offer:
		least, most = transferHeader+descriptorHeader, peer.MaxBody
	case wire.Chunks, wire.Taken:
		least, most = transferHeader+4, transferHeader+4
	case wire.Withdrawn, wire.Declined:
		most += wire.MaxReason
	case wire.Fabric:
		const one = len(cuda.FabricHandle{})
		least, most = transferHeader+4+one, transferHeader+4+wire.MaxBatch*one
		if (len(m.Body)-least)%one != 0 {
			return 0, errs.Violation("fabric handles of %d bytes, where each has %d", len(m.Body)-transferHeader-4, one)
		}
	}
	carries := 0
	if m.Kind == wire.Chunks {
		carries = wire.MaxBatch
	}
	reason := m.Kind == wire.Withdrawn || m.Kind == wire.Declined
	switch {
	case len(m.Body) < least || len(m.Body) > most:
		return 0, errs.Violation("a message of kind %d with %s instead of %d to %d", m.Kind, errs.Count(len(m.Body), "byte"), least, most)
	case len(m.FDs) > carries || m.Kind == wire.Chunks && len(m.FDs) == 0:
		return 0, errs.Violation("a message of kind %d with %s", m.Kind, errs.Count(len(m.FDs), "file descriptor"))
	case reason && !utf8.Valid(m.Body[transferHeader:]):
		return 0, errs.Violation("a message of kind %d with a reason that is not UTF-8", m.Kind)
	}
	return numberAt(m.Body, 0), nil
}

func transferMessage(kind uint16, t uint32) peer.Message {
	var e wire.Encoder
	e.Uint32(t)
	return peer.Message{Kind: kind, Body: e.B}
}

func offerMessage(t uint32, d *Descriptor) (peer.Message, error) {
	m := transferMessage(wire.Offer, t)
	b, err := d.MarshalBinary()
	m.Body = append(m.Body, b...)
	return m, err
}

// parseOffer reads an offer that transferOf has checked.
func parseOffer(m peer.Message) (d Descriptor, err error) {
	err = d.UnmarshalBinary(m.Body[transferHeader:])
	return d, err
}

// countMessage makes a message of kind chunks, fabric or taken.
func countMessage(kind uint16, t uint32, count int) peer.Message {
	var e wire.Encoder
	e.Uint32(t)
	e.Uint32(uint32(count))
	return peer.Message{Kind: kind, Body: e.B}
}

func countOf(m peer.Message) uint32 { return numberAt(m.Body, transferHeader) }

// numberAt reads a number from a body whose length transferOf has checked.
func numberAt(body []byte, at int) uint32 {
	d := wire.Decoder{B: body[at:]}
	return d.Uint32()
}

// fabricHandlesOf reads the handles of a message that transferOf has checked.
func fabricHandlesOf(m peer.Message) []cuda.FabricHandle {
	b := m.Body[transferHeader+4:]
	all := make([]cuda.FabricHandle, len(b)/len(cuda.FabricHandle{}))
	for i := range all {
		b = b[copy(all[i][:], b):]
	}
	return all
}

// reasonMessage makes a message of kind withdrawn or declined.
func reasonMessage(kind uint16, t uint32, reason error) peer.Message {
	m := transferMessage(kind, t)
	m.Body = append(m.Body, wire.Clip(reason.Error(), wire.MaxReason)...)
	return m
}

// reasonOf returns the error of a transfer that the peer ended.
func reasonOf(op string, m peer.Message) error {
	return errs.Peer(op, peer.ErrRefused, errs.Words(string(m.Body[transferHeader:])), "the reason is the peer's own words")
}

// lost reports whether the descriptors of a message exceeded this process's limit.
func lost(m peer.Message) bool { return slices.Contains(m.FDs, nil) }
