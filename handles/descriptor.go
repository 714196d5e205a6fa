package handles

import (
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm"
)

// Kind is the type of object that a Descriptor describes.
type Kind uint8

// The values are part of the binary form.
const (
	// BufferKind is a run of chunks that holds bytes.
	BufferKind Kind = iota + 2
	// ArrayKind is a run of chunks that holds elements of one type.
	ArrayKind
)

// String names the kind.
func (k Kind) String() string {
	return errs.Name("Kind", k, []string{BufferKind: "buffer", ArrayKind: "array"})
}

// Descriptor describes memory that one process offers to another. It is a plain
// value, and no secret: access comes with the handle of each chunk, which
// travels beside it. The driver does not report the size behind a handle, so an
// importer checks the declared sizes ([Descriptor.Validate]) and then proves them by
// mapping.
type Descriptor struct {
	Kind Kind
	// Element and ElementSize, in bytes, are set for arrays alone.
	Element     ElementType
	ElementSize int
	// Length is the part in use: elements of an array, otherwise bytes. It fits
	// into the chunks.
	Length int
	// Chunks are the sizes in bytes, in the order of their addresses. An
	// empty buffer has none.
	Chunks []int
	// Location is where the memory lies, in the exporter's numbering of devices.
	// Device, set for device memory alone, identifies the device to the importer.
	Location cuda.Location
	Device   cuda.UUID
	// Compressible and RDMA are the properties that the driver granted.
	Compressible bool
	RDMA         bool
	// Handle is the set of handle types that the memory has: vmm.PosixFD,
	// vmm.Fabric, or both.
	Handle vmm.HandleTypes
	// Generation counts the changes of the exporter's object.
	Generation uint64
	// Exporter is the process that owns the memory.
	Exporter Process
}

// MaxChunks is the maximum number of chunks in a descriptor.
const MaxChunks = 1 << 16

// maxBytes exceeds any device's address space.
const maxBytes = 1 << 60

// Limits bound what an importer accepts.
type Limits struct {
	// Granularity that every chunk is a multiple of, in bytes: that of memory
	// with the declared properties on the importer's device.
	Granularity int
	// MaxBytes bounds the sum of all chunks.
	MaxBytes int
	// MaxChunks bounds the number of chunks; 0 is the constant MaxChunks.
	MaxChunks int
}

// Size returns the sum of the chunks in bytes. It saturates, and counts no negative
// size, which Validate refuses.
func (d *Descriptor) Size() int {
	sum := 0
	for _, c := range d.Chunks {
		if c = max(c, 0); sum > math.MaxInt-c {
			return math.MaxInt
		}
		sum += c
	}
	return sum
}

// bytes returns the length in bytes of a descriptor that was checked.
func (d *Descriptor) bytes() uint64 { return uint64(d.Length) * uint64(max(d.ElementSize, 1)) }

// Validate checks the descriptor by itself and against the importer's limits. Call it
// before reserving anything.
func (d *Descriptor) Validate(l Limits) error {
	const op = "handles.Descriptor.Validate"
	if l.Granularity <= 0 || l.MaxBytes <= 0 || l.MaxChunks < 0 {
		return errs.PeerInvalid(op, fmt.Sprintf("limits %+v", l), "set Granularity and MaxBytes")
	}
	if err := d.check(op); err != nil {
		return err
	}
	most := l.MaxChunks
	if most == 0 {
		most = MaxChunks
	}
	if len(d.Chunks) > most {
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks, where %d is the most", len(d.Chunks), most),
			"share memory in larger chunks, or raise the importer's limit")
	}
	if size := d.Size(); size > l.MaxBytes {
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%s, of which %s are allowed", errs.Bytes(size), errs.Bytes(l.MaxBytes)),
			"share less, or raise the importer's limit")
	}
	for i, c := range d.Chunks {
		if c%l.Granularity != 0 {
			return errs.Peer(op, ErrSizeMismatch, fmt.Sprintf("chunk %d has %s, which is no multiple of %s", i, errs.Bytes(c), errs.Bytes(l.Granularity)),
				"no memory of this device has that size: the exporter declared it wrong")
		}
	}
	return nil
}

// check refuses descriptors that no exporter of this library makes. One that passes has
// exactly one binary form.
func (d *Descriptor) check(op string) error {
	bad := func(hint, format string, args ...any) error {
		return errs.Peer(op, ErrDescriptor, fmt.Sprintf(format, args...), hint)
	}
	if len(d.Chunks) > MaxChunks {
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks, of which a descriptor has at most %d", len(d.Chunks), MaxChunks),
			"share memory in larger chunks")
	}
	for i, c := range d.Chunks {
		if c <= 0 {
			return bad("leave empty chunks out", "chunk %d has %d bytes", i, c)
		}
	}
	size := d.Size()
	if size > maxBytes {
		return errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks of together more than %s", len(d.Chunks), errs.Bytes(uint64(maxBytes))),
			"no device has that much: the exporter declared it wrong")
	}
	unit := 1
	switch {
	case d.Kind < BufferKind || d.Kind > ArrayKind:
		return bad("use a version of this library that knows it", "%v", d.Kind)
	case d.Kind != ArrayKind && (d.Element != NoElement || d.ElementSize != 0):
		return bad("describe it as an array", "%v with elements of type %v and size %d", d.Kind, d.Element, d.ElementSize)
	case d.Kind == ArrayKind:
		switch {
		case d.Element == NoElement || d.Element >= elementTypes:
			return bad("take Element and ElementSize from ElementOf", "an array of %v", d.Element)
		case d.ElementSize <= 0 || d.ElementSize > math.MaxUint32 || d.Element != Record && d.ElementSize != elements[d.Element].size:
			return bad("take Element and ElementSize from ElementOf", "elements of type %v and size %d", d.Element, d.ElementSize)
		}
		unit = d.ElementSize
	}
	if d.Length < 0 || d.Length > size/unit {
		return bad("declare no more than there is", "a length of %d times %d bytes in chunks of %s", d.Length, unit, errs.Bytes(size))
	}
	var none cuda.UUID
	switch l := d.Location; {
	case l.ID < 0 || l.ID > math.MaxInt32:
		return bad("devices and nodes are numbered from 0", "location %v", l)
	case l.Type == cuda.LocationDevice && d.Device == none:
		return bad("set Device", "memory of %v without the device's UUID", l)
	case l.Type == cuda.LocationHostNUMA && d.Device != none:
		return bad("leave Device at its zero value", "memory of %v with the UUID of a device", l)
	case l.Type != cuda.LocationDevice && l.Type != cuda.LocationHostNUMA:
		return bad("memory of a device or of a NUMA node can be shared", "location %v", l)
	}
	if d.Handle == 0 || d.Handle&^(vmm.PosixFD|vmm.Fabric) != 0 {
		return bad("set Handle to vmm.PosixFD, vmm.Fabric or both", "handle type %v", d.Handle)
	}
	return nil
}
