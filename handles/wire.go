package handles

import (
	"encoding/base64"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// The binary form, version 1, little-endian without gaps:
//
//	magic            4  "cuvD"
//	version          2
//	kind             1
//	element type     1
//	element size     4
//	length           8
//	location type    1
//	flags            1  1: compressible, 2: RDMA
//	handle type      2
//	location id      4
//	device UUID     16
//	generation       8
//	exporter's pid   4
//	its instance    16
//	number of chunks 4
//	chunk sizes      8 each
//
// Every value that passes Descriptor.check has one form, and any other bytes are
// refused.
const (
	descriptorMagic   = "cuvD"
	descriptorVersion = 1
	descriptorHeader  = wire.DescriptorHeader

	flagCompressible = 1
	flagRDMA         = 2
)

// MaxDescriptorBytes is the maximum length of the binary form of a descriptor.
const MaxDescriptorBytes = descriptorHeader + 8*MaxChunks

var textEncoding = base64.RawURLEncoding.Strict()

// MarshalBinary returns the one binary form of a valid descriptor.
func (d *Descriptor) MarshalBinary() ([]byte, error) {
	if err := d.check("handles.Descriptor.MarshalBinary"); err != nil {
		return nil, err
	}
	var flags uint8
	if d.Compressible {
		flags |= flagCompressible
	}
	if d.RDMA {
		flags |= flagRDMA
	}
	e := wire.Encoder{B: make([]byte, 0, descriptorHeader+8*len(d.Chunks))}
	e.Raw([]byte(descriptorMagic))
	e.Uint16(descriptorVersion)
	e.Uint8(uint8(d.Kind))
	e.Uint8(uint8(d.Element))
	e.Uint32(uint32(d.ElementSize))
	e.Uint64(uint64(d.Length))
	e.Uint8(uint8(d.Location.Type))
	e.Uint8(flags)
	e.Uint16(uint16(d.Handle))
	e.Uint32(uint32(d.Location.ID))
	e.Raw(d.Device[:])
	e.Uint64(d.Generation)
	e.Uint32(d.Exporter.PID)
	e.Raw(d.Exporter.Instance[:])
	e.Uint32(uint32(len(d.Chunks)))
	for _, c := range d.Chunks {
		e.Uint64(uint64(c))
	}
	return e.B, nil
}

// UnmarshalBinary reads the binary form, and refuses anything else. After an error
// the descriptor is unchanged. It keeps no reference to b.
func (d *Descriptor) UnmarshalBinary(b []byte) error {
	const op = "handles.Descriptor.UnmarshalBinary"
	if len(b) > MaxDescriptorBytes {
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d bytes, of which a descriptor has at most %d", len(b), MaxDescriptorBytes),
			"pass the bytes of one descriptor")
	}
	r := wire.Decoder{B: b}
	n, err := decodeDescriptor(op, &r)
	if err != nil {
		return err
	}
	if left := len(r.B); left > 0 {
		return errs.Peer(op, ErrDescriptor, fmt.Sprintf("%s behind the sizes of %s", errs.Count(left, "byte"), errs.Count(len(n.Chunks), "chunk")), "pass the bytes of MarshalBinary and no more")
	}
	*d = n
	return nil
}

// decodeDescriptor takes a descriptor from the front of a message.
func decodeDescriptor(op string, r *wire.Decoder) (n Descriptor, err error) {
	if have := len(r.B); have < descriptorHeader {
		return n, errs.Peer(op, ErrDescriptor, fmt.Sprintf("%d bytes, of which a descriptor has at least %d", have, descriptorHeader),
			"pass all bytes of MarshalBinary")
	}
	if magic := r.Raw(len(descriptorMagic)); string(magic) != descriptorMagic {
		return n, errs.Peer(op, ErrDescriptor, fmt.Sprintf("it begins with %q instead of %q", magic, descriptorMagic),
			"pass the bytes of MarshalBinary")
	}
	if v := r.Uint16(); v != descriptorVersion {
		return n, errs.Peer(op, ErrDescriptor, fmt.Sprintf("version %d, where this library knows %d", v, descriptorVersion),
			"use the same version of this library in both processes")
	}
	n.Kind, n.Element = Kind(r.Uint8()), ElementType(r.Uint8())
	n.ElementSize = int(r.Uint32())
	length := r.Uint64()
	n.Location.Type = cuda.LocationType(r.Uint8())
	flags := r.Uint8()
	if flags&^(flagCompressible|flagRDMA) != 0 {
		return n, errs.Peer(op, ErrDescriptor, fmt.Sprintf("flags %#x", flags), "use the same version of this library in both processes")
	}
	n.Compressible, n.RDMA = flags&flagCompressible != 0, flags&flagRDMA != 0
	n.Handle = vmm.HandleTypes(r.Uint16())
	n.Location.ID = int(int32(r.Uint32()))
	copy(n.Device[:], r.Raw(len(n.Device)))
	n.Generation, n.Exporter.PID = r.Uint64(), r.Uint32()
	copy(n.Exporter.Instance[:], r.Raw(len(n.Exporter.Instance)))
	count := uint64(r.Uint32())
	if have := uint64(len(r.B)); have < 8*count {
		return n, errs.Peer(op, ErrDescriptor, fmt.Sprintf("%d bytes for the sizes of %d chunks, which take %d", have, count, 8*count),
			"pass all bytes of MarshalBinary")
	}
	if count > 0 {
		n.Chunks = make([]int, count)
	}
	for i := range n.Chunks {
		c := r.Uint64()
		if c > maxBytes { // and so within an int
			return n, errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("chunk %d has %s, where %s are the most", i, errs.Bytes(c), errs.Bytes(uint64(maxBytes))),
				"no device has that much: the exporter declared it wrong")
		}
		n.Chunks[i] = int(c)
	}
	if length > maxBytes { // as many elements have more bytes than that
		return n, errs.Peer(op, ErrDescriptor, fmt.Sprintf("a length of %d", length), "declare no more than there is")
	}
	n.Length = int(length)
	return n, n.check(op)
}
