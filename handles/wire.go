package handles

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
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
// Every value that passes Descriptor.check has one form, and no other bytes are
// taken.
const (
	descriptorMagic   = "cuvD"
	descriptorVersion = 1
	descriptorHeader  = 76

	flagCompressible = 1
	flagRDMA         = 2

	// textPrefix says in text what the magic and the version say in binary.
	textPrefix = "cuvmm1:"
)

// MaxDescriptorBytes is the most that the binary form of a descriptor has.
const MaxDescriptorBytes = descriptorHeader + 8*MaxChunks

var textEncoding = base64.RawURLEncoding.Strict()

// MarshalBinary writes the one binary form of a valid descriptor.
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
	le := binary.LittleEndian
	b := make([]byte, 0, descriptorHeader+8*len(d.Chunks))
	b = append(b, descriptorMagic...)
	b = le.AppendUint16(b, descriptorVersion)
	b = append(b, uint8(d.Kind), uint8(d.Element))
	b = le.AppendUint32(b, d.ElementSize)
	b = le.AppendUint64(b, d.Length)
	b = append(b, uint8(d.Location.Type), flags)
	b = le.AppendUint16(b, uint16(d.Handle))
	b = le.AppendUint32(b, uint32(d.Location.ID))
	b = append(b, d.Device[:]...)
	b = le.AppendUint64(b, d.Generation)
	b = le.AppendUint32(b, d.Exporter.PID)
	b = append(b, d.Exporter.Instance[:]...)
	b = le.AppendUint32(b, uint32(len(d.Chunks)))
	for _, c := range d.Chunks {
		b = le.AppendUint64(b, c)
	}
	return b, nil
}

// UnmarshalBinary reads the binary form and takes nothing else: after an error
// the descriptor is as it was. It keeps no reference to b.
func (d *Descriptor) UnmarshalBinary(b []byte) error {
	const op = "handles.Descriptor.UnmarshalBinary"
	if len(b) > MaxDescriptorBytes {
		return failure(op, ErrTooLarge, fmt.Sprintf("%d bytes, of which a descriptor has at most %d", len(b), MaxDescriptorBytes),
			"pass the bytes of one descriptor")
	}
	if len(b) < descriptorHeader {
		return failure(op, ErrDescriptor, fmt.Sprintf("%d bytes, of which a descriptor has at least %d", len(b), descriptorHeader),
			"pass all bytes of MarshalBinary")
	}
	r := reader{b}
	if magic := r.bytes(len(descriptorMagic)); string(magic) != descriptorMagic {
		return failure(op, ErrDescriptor, fmt.Sprintf("it begins with %q instead of %q", magic, descriptorMagic),
			"pass the bytes of MarshalBinary")
	}
	if v := r.uint16(); v != descriptorVersion {
		return failure(op, ErrDescriptor, fmt.Sprintf("version %d, where this library knows %d", v, descriptorVersion),
			"use the same version of this library in both processes")
	}
	var n Descriptor
	n.Kind, n.Element = Kind(r.uint8()), ElementType(r.uint8())
	n.ElementSize, n.Length = r.uint32(), r.uint64()
	n.Location.Type = cuda.LocationType(r.uint8())
	flags := r.uint8()
	if flags&^(flagCompressible|flagRDMA) != 0 {
		return failure(op, ErrDescriptor, fmt.Sprintf("flags %#x", flags), "use the same version of this library in both processes")
	}
	n.Compressible, n.RDMA = flags&flagCompressible != 0, flags&flagRDMA != 0
	n.Handle = vmm.HandleTypes(r.uint16())
	n.Location.ID = int(int32(r.uint32()))
	copy(n.Device[:], r.bytes(len(n.Device)))
	n.Generation, n.Exporter.PID = r.uint64(), r.uint32()
	copy(n.Exporter.Instance[:], r.bytes(len(n.Exporter.Instance)))
	count := uint64(r.uint32())
	if have := uint64(len(r.b)); have != 8*count {
		return failure(op, ErrDescriptor, fmt.Sprintf("%d bytes for the sizes of %d chunks, which take %d", have, count, 8*count),
			"pass all bytes of MarshalBinary and no more")
	}
	if count > 0 {
		n.Chunks = make([]uint64, count)
	}
	for i := range n.Chunks {
		n.Chunks[i] = r.uint64()
	}
	if err := n.check(op); err != nil {
		return err
	}
	*d = n
	return nil
}

// MarshalText writes the one text form of a valid descriptor, which is safe in
// files, arguments and URLs.
func (d *Descriptor) MarshalText() ([]byte, error) {
	b, err := d.MarshalBinary()
	if err != nil {
		return nil, err
	}
	return textEncoding.AppendEncode([]byte(textPrefix), b), nil
}

// UnmarshalText reads the text form and takes nothing else: after an error the
// descriptor is as it was.
func (d *Descriptor) UnmarshalText(text []byte) error {
	const op = "handles.Descriptor.UnmarshalText"
	b, err := decodeText(op, text, textPrefix, MaxDescriptorBytes)
	if err != nil {
		return err
	}
	return d.UnmarshalBinary(b)
}

// reader takes little-endian values from the front of bytes that were counted
// before.
type reader struct{ b []byte }

func (r *reader) bytes(n int) []byte {
	front := r.b[:n]
	r.b = r.b[n:]
	return front
}

func (r *reader) uint8() uint8   { return r.bytes(1)[0] }
func (r *reader) uint16() uint16 { return binary.LittleEndian.Uint16(r.bytes(2)) }
func (r *reader) uint32() uint32 { return binary.LittleEndian.Uint32(r.bytes(4)) }
func (r *reader) uint64() uint64 { return binary.LittleEndian.Uint64(r.bytes(8)) }
