package handles

import (
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// The bodies of the library's own messages, little-endian, after the transfer's
// number (4 bytes):
//
//	offer       identity 16, the descriptor
//	chunks      the index of the first 4
//	fabric      the index of the first 4, the fabric handles of the chunks 64 each
//	withdrawn   the reason, in text
//	confirmed
//	taken       how many chunks so far 4
//	mapped
//	declined    the reason, in text
//	by fd       the reason, in text
//
// The file descriptors of chunks are the handles of the next chunks.
const (
	transferHeader = 4
	identityBytes  = 16
)

// identity says which memory an offer is of, in the sender's own terms: the
// same memory has the same, other memory another.
type identity [identityBytes]byte

// transferOf is the transfer that a message of the library belongs to. What it
// lets through has the right length for its kind.
func transferOf(m peer.Message) (uint32, error) {
	least, most := transferHeader, transferHeader
	switch m.Kind {
	case wire.Offer:
		least, most = transferHeader+identityBytes+descriptorHeader, peer.MaxBody
	case wire.Chunks, wire.Taken:
		least, most = transferHeader+4, transferHeader+4
	case wire.Withdrawn, wire.Declined, wire.ByFD:
		most += wire.MaxReason
	case wire.Fabric:
		const one = len(cuda.FabricHandle{})
		least, most = transferHeader+4+one, transferHeader+4+wire.MaxBatch*one
		if (len(m.Body)-least)%one != 0 {
			return 0, peererr.Violation("fabric handles of %d bytes, where each has %d", len(m.Body)-transferHeader-4, one)
		}
	}
	carries := 0
	if m.Kind == wire.Chunks {
		carries = wire.MaxBatch
	}
	reason := m.Kind == wire.Withdrawn || m.Kind == wire.Declined || m.Kind == wire.ByFD
	switch {
	case len(m.Body) < least || len(m.Body) > most:
		return 0, peererr.Violation("a message of kind %d with %s instead of %d to %d", m.Kind, errs.Count(len(m.Body), "byte"), least, most)
	case len(m.FDs) > carries || m.Kind == wire.Chunks && len(m.FDs) == 0:
		return 0, peererr.Violation("a message of kind %d with %s", m.Kind, errs.Count(len(m.FDs), "file descriptor"))
	case reason && !utf8.Valid(m.Body[transferHeader:]):
		return 0, peererr.Violation("a message of kind %d with a reason that is not UTF-8", m.Kind)
	}
	return numberAt(m.Body, 0), nil
}

func transferMessage(kind uint16, t uint32) peer.Message {
	var e wire.Encoder
	e.Uint32(t)
	return peer.Message{Kind: kind, Body: e.B}
}

func offerMessage(t uint32, who identity, d *Descriptor) (peer.Message, error) {
	m := transferMessage(wire.Offer, t)
	b, err := d.MarshalBinary()
	m.Body = append(append(m.Body, who[:]...), b...)
	return m, err
}

// parseOffer reads an offer that transferOf let through.
func parseOffer(m peer.Message) (who identity, d Descriptor, err error) {
	copy(who[:], m.Body[transferHeader:])
	err = d.UnmarshalBinary(m.Body[transferHeader+identityBytes:])
	return who, d, err
}

// countMessage is one of chunks or of taken.
func countMessage(kind uint16, t uint32, count int) peer.Message {
	var e wire.Encoder
	e.Uint32(t)
	e.Uint32(uint32(count))
	return peer.Message{Kind: kind, Body: e.B}
}

func countOf(m peer.Message) uint32 { return numberAt(m.Body, transferHeader) }

// numberAt reads a number of a body whose length was checked.
func numberAt(body []byte, at int) uint32 {
	d := wire.Decoder{B: body[at:]}
	return d.Uint32()
}

// reasonMessage is one of withdrawn or of declined.
func reasonMessage(kind uint16, t uint32, reason error) peer.Message {
	m := transferMessage(kind, t)
	m.Body = append(m.Body, wire.Clip(reason.Error(), wire.MaxReason)...)
	return m
}

// reasonOf is the error of what the peer ended.
func reasonOf(op string, m peer.Message) error {
	return peererr.New(op, peer.ErrRefused, fmt.Sprintf("%q", m.Body[transferHeader:]), "the reason is the peer's own words")
}

// lost reports whether the descriptors of a message did not fit into this process.
func lost(m peer.Message) bool { return slices.Contains(m.FDs, nil) }
