package handles

import (
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/peererr"
	"github.com/cuvmm/cuvmm/vmm"
)

// Kind says what object a Descriptor describes.
type Kind uint8

// The values are part of the binary form.
const (
	// AllocationKind is one piece of physical memory.
	AllocationKind Kind = iota + 1
	// BufferKind is a run of chunks that holds bytes.
	BufferKind
	// ArrayKind is a run of chunks that holds elements of one type.
	ArrayKind
)

// String names the kind.
func (k Kind) String() string {
	switch k {
	case AllocationKind:
		return "allocation"
	case BufferKind:
		return "buffer"
	case ArrayKind:
		return "array"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Descriptor says what memory one process offers to another. It is a plain
// value, and no secret: what gives access is the handle of each chunk that
// travels beside it. The driver tells no size of a handle, so the sizes are
// the exporter's word, to be checked ([Descriptor.Validate]) and then proved by
// mapping.
type Descriptor struct {
	Kind Kind
	// Element and ElementSize, in bytes, are set for arrays alone.
	Element     ElementType
	ElementSize uint32
	// Length is what is in use: elements of an array, otherwise bytes. It fits
	// into the chunks.
	Length uint64
	// Chunks are the sizes in bytes, in the order of their addresses. An
	// allocation has one; a buffer that is empty has none.
	Chunks []uint64
	// Location is where the memory lies as the exporter counts its devices.
	// Device is what the importer goes by: it is set for device memory alone.
	Location cuda.Location
	Device   cuda.UUID
	// Compressible and RDMA are as the driver granted them.
	Compressible bool
	RDMA         bool
	// Handle are the types of handle by which the memory can be taken:
	// vmm.PosixFD, vmm.Fabric, or both.
	Handle vmm.HandleTypes
	// Generation counts the changes of the exporter's object.
	Generation uint64
	// Exporter is the process that owns the memory.
	Exporter Process
}

// MaxChunks is how many chunks a descriptor can have.
const MaxChunks = 1 << 16

// maxBytes is more than any device has address space for.
const maxBytes = 1 << 60

// Limits are what an importer takes.
type Limits struct {
	// Granularity that every chunk is a multiple of, in bytes: that of memory
	// with the declared properties on the importer's device.
	Granularity uint64
	// MaxBytes is the most that all chunks have together.
	MaxBytes uint64
	// MaxChunks is the most chunks; 0 is MaxChunks.
	MaxChunks int
}

// Size is what the chunks have together, in bytes. It never wraps: what is
// more than the largest number is that number.
func (d *Descriptor) Size() uint64 {
	var sum uint64
	for _, c := range d.Chunks {
		if sum > math.MaxUint64-c {
			return math.MaxUint64
		}
		sum += c
	}
	return sum
}

// bytes is what is in use.
func (d *Descriptor) bytes() uint64 { return d.Length * uint64(max(d.ElementSize, 1)) }

// Validate checks the descriptor by itself and against the importer's limits.
// It belongs before anything is reserved.
func (d *Descriptor) Validate(l Limits) error {
	const op = "handles.Descriptor.Validate"
	if l.Granularity == 0 || l.MaxBytes == 0 || l.MaxChunks < 0 {
		return peererr.Invalid(op, fmt.Sprintf("limits %+v", l), "set Granularity and MaxBytes")
	}
	if err := d.check(op); err != nil {
		return err
	}
	most := l.MaxChunks
	if most == 0 {
		most = MaxChunks
	}
	if len(d.Chunks) > most {
		return peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks, where %d is the most", len(d.Chunks), most),
			"share memory in larger chunks, or raise the importer's limit")
	}
	if size := d.Size(); size > l.MaxBytes {
		return peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%s, of which %s are allowed", errs.Bytes(size), errs.Bytes(l.MaxBytes)),
			"share less, or raise the importer's limit")
	}
	for i, c := range d.Chunks {
		if c%l.Granularity != 0 {
			return peererr.New(op, ErrSizeMismatch, fmt.Sprintf("chunk %d has %s, which is no multiple of %s", i, errs.Bytes(c), errs.Bytes(l.Granularity)),
				"no memory of this device has that size: the exporter declared it wrong")
		}
	}
	return nil
}

// check refuses what no exporter of this library describes. What passes has
// exactly one binary form.
func (d *Descriptor) check(op string) error {
	bad := func(hint, format string, args ...any) error {
		return peererr.New(op, ErrDescriptor, fmt.Sprintf(format, args...), hint)
	}
	if len(d.Chunks) > MaxChunks {
		return peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks, of which a descriptor has at most %d", len(d.Chunks), MaxChunks),
			"share memory in larger chunks")
	}
	for i, c := range d.Chunks {
		if c == 0 {
			return bad("leave empty chunks out", "chunk %d has no bytes", i)
		}
	}
	size := d.Size()
	if size > maxBytes {
		return peererr.New(op, peer.ErrTooLarge, fmt.Sprintf("%d chunks of together more than %s", len(d.Chunks), errs.Bytes(uint64(maxBytes))),
			"no device has that much: the exporter declared it wrong")
	}
	unit := uint64(1)
	switch {
	case d.Kind < AllocationKind || d.Kind > ArrayKind:
		return bad("use a version of this library that knows it", "%v", d.Kind)
	case d.Kind == AllocationKind && len(d.Chunks) != 1:
		return bad("describe each allocation by itself", "an allocation of %d chunks", len(d.Chunks))
	case d.Kind != ArrayKind && (d.Element != NoElement || d.ElementSize != 0):
		return bad("describe it as an array", "%v with elements of type %v and size %d", d.Kind, d.Element, d.ElementSize)
	case d.Kind == ArrayKind:
		switch {
		case d.Element == NoElement || d.Element >= elementTypes:
			return bad("take Element and ElementSize from ElementOf", "an array of %v", d.Element)
		case d.ElementSize == 0 || d.Element != Record && d.ElementSize != elements[d.Element].size:
			return bad("take Element and ElementSize from ElementOf", "elements of type %v and size %d", d.Element, d.ElementSize)
		}
		unit = uint64(d.ElementSize)
	}
	if d.Length > size/unit {
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
