package handles

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// ImportOptions say what an importer takes and how. The zero value takes as
// much as the device has, for reading and writing.
type ImportOptions struct {
	// ReadOnly imports for reading: no access beyond that can be granted to the
	// memory here. It protects from this process's own mistakes, not from a peer.
	ReadOnly bool
	// MaxBytes is the most memory that is taken in one object; 0 is what the
	// memory's device has, and a TiB of memory of the host.
	MaxBytes int
	// MaxChunks is the most chunks; 0 is MaxChunks.
	MaxChunks int
	// KeepDescriptors keeps the file descriptor of each chunk open for as long as
	// the memory is open here, so that it can be passed on: SendBuffer, Publish,
	// LeaseBuffer and the like then take it, even after the process that made it is
	// dead. The driver exports memory only from its creator. Each descriptor counts
	// against this process's limit of open files: all kept ones may take a quarter of
	// it, less 64 (ErrOpenFiles). Memory that travels by fabric handle alone has none
	// (cuda.ErrNotSupported).
	KeepDescriptors bool
}

// maxHostBytes is what is taken of memory on the host by default.
const maxHostBytes = 1 << 40

// intake is memory that is being imported for a device: what was declared is
// checked first, then each chunk is, and then all are mapped.
type intake struct {
	op       string
	dev      *cuda.Device
	options  ImportOptions
	declared *Descriptor
	// memory is what the chunks must be, as this process counts devices.
	memory driver.AllocationProp
	// remote memory lies on a device that this process does not see, such as
	// another host's. memory then names the importing one.
	remote bool
	gran   uint64
	chunks []*phys.Handle
}

// newIntake checks a descriptor: everything that can be told before any of the
// memory is touched.
func newIntake(op string, d *cuda.Device, declared *Descriptor, o ImportOptions) (*intake, error) {
	if d == nil {
		return nil, failure(op, cuda.ErrInvalidArgument, "a nil device", "take one from System.Devices")
	}
	if o.KeepDescriptors && declared.Handle&vmm.PosixFD == 0 {
		return nil, failure(op, cuda.ErrNotSupported, fmt.Sprintf("KeepDescriptors for memory by %v", declared.Handle),
			"take it without, or have it shared by descriptor (vmm.PosixFD)")
	}
	i := &intake{op: op, dev: d, options: o, declared: declared}
	home, most := d, uint64(maxHostBytes)
	wish := vmm.Properties{Location: declared.Location, Handles: declared.Handle, RDMA: vmm.RDMAOff}
	if declared.Location.Type == cuda.LocationDevice {
		var err error
		if home, err = i.home(); err != nil {
			return nil, err
		}
		wish.Location, most = home.Location(), home.TotalMemory()
	}
	gran, err := vmm.GranularityOf(home, wish)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	if o.MaxBytes > 0 {
		most = uint64(o.MaxBytes)
	}
	if err := declared.Validate(Limits{Granularity: uint64(gran), MaxBytes: most, MaxChunks: o.MaxChunks}); err != nil {
		return nil, err
	}
	i.gran = uint64(gran)
	i.memory = driver.AllocationProp{Type: driver.AllocationPinned,
		Location: driver.Location{Type: driver.LocationType(wish.Location.Type), ID: int32(wish.Location.ID)}}
	if declared.Compressible {
		i.memory.Flags.CompressionType = driver.CompressionGeneric
	}
	if declared.RDMA {
		i.memory.Flags.GPUDirectRDMACapable = 1
	}
	if o.KeepDescriptors {
		i.memory.RequestedHandleTypes = driver.HandlePosixFD
	}
	return i, nil
}

// length is what is in use, in bytes.
func (i *intake) length() uint64 {
	return i.declared.Length * uint64(max(i.declared.ElementSize, 1))
}

// home finds the device that the memory lies on among this process's, which the
// importing device must reach.
func (i *intake) home() (*cuda.Device, error) {
	var seen []string
	for _, d := range i.dev.System().Devices() {
		if d.UUID() == i.declared.Device {
			ok, err := i.dev.CanAccess(d)
			if err == nil && !ok {
				err = failure(i.op, cuda.ErrNotSupported, fmt.Sprintf("memory on %v for %v, which cannot reach it", d, i.dev),
					"import it for the device that it lies on, and copy")
			}
			return d, err
		}
		seen = append(seen, fmt.Sprintf("%v (%v)", d, d.UUID()))
	}
	if i.declared.Handle&vmm.Fabric != 0 {
		i.remote = true // the driver tells whether it can be reached
		return i.dev, nil
	}
	return nil, failure(i.op, cuda.ErrNotSupported,
		fmt.Sprintf("memory on %v, where this process sees %s", i.declared.Device, strings.Join(seen, ", ")),
		"make that device visible to this process (CUDA_VISIBLE_DEVICES, or the container's devices)")
}

// take imports the next chunks. The descriptors stay the caller's, to close.
func (i *intake) take(fds []*FD) error {
	sys := core.SystemOf(i.dev)
	for _, f := range fds {
		at := len(i.chunks)
		if at >= len(i.declared.Chunks) {
			return failure(i.op, ErrMismatch, fmt.Sprintf("more file descriptors than %s", errs.Count(at, "chunk")), sameHint)
		}
		var h *phys.Handle
		err := f.Use(func(n int) (err error) {
			h, err = phys.Import(i.op, sys, n, i.declared.Chunks[at])
			return err
		})
		if err != nil {
			return i.importError(at, err)
		}
		f.known()
		if err := i.keep(h); err != nil {
			return err
		}
		if i.options.KeepDescriptors {
			if err := i.keepDescriptor(h, f); err != nil {
				return err
			}
		}
	}
	return nil
}

// keepDescriptor has a chunk keep another descriptor of its own.
func (i *intake) keepDescriptor(h *phys.Handle, f *FD) error {
	if err := exports.keep(i.op); err != nil {
		return err
	}
	err := f.Use(func(n int) error {
		another, err := fd.Dup(n)
		if err == nil {
			h.KeepSource(another, i.memory.Flags, exports.giveKept)
		}
		return err
	})
	if err != nil {
		exports.giveKept()
		return systemError(i.op, fmt.Sprintf("a descriptor of chunk %d to keep", len(i.chunks)-1), err)
	}
	return nil
}

// keep takes an imported chunk over, and compares it with what was declared.
func (i *intake) keep(h *phys.Handle) error {
	at := len(i.chunks)
	i.chunks = append(i.chunks, h)
	if i.remote {
		// The driver counts that device differently, or not at all.
		h.Asked.Location = i.memory.Location
	}
	return i.compare(at, h.Asked)
}

func (i *intake) importError(at int, err error) error {
	var d *cuda.Error
	switch {
	case !errors.As(err, &d) || d.Call != driver.CallMemImportFromShareableHandle.String():
		return err
	case d.Code == cuda.Code(driver.Unknown):
		return failure(i.op, ErrNotMemory, fmt.Sprintf("the file descriptor of chunk %d", at),
			"the exporter sent a descriptor of something else, or of another driver's memory").because(err)
	}
	return err
}

// compare checks what the driver says of a chunk against what was declared:
// that it is memory of the right kind, at the right place. What it says of an
// import's compression and of network cards is less than what was granted, or
// nothing, so there the exporter's word stands.
func (i *intake) compare(at int, have driver.AllocationProp) error {
	if have.Type == i.memory.Type && have.Location == i.memory.Location {
		return nil
	}
	place := func(p driver.AllocationProp) string {
		return fmt.Sprintf("type %d on %v", p.Type, cuda.Location{Type: cuda.LocationType(p.Location.Type), ID: int(p.Location.ID)})
	}
	return failure(i.op, ErrMismatch, fmt.Sprintf("chunk %d is memory of %s, where %s was declared", at, place(have), place(i.memory)),
		"the exporter describes other memory than it sends")
}

// whole refuses to go on while chunks are missing.
func (i *intake) whole() error {
	if have, want := len(i.chunks), len(i.declared.Chunks); have != want {
		return failure(i.op, ErrMismatch, fmt.Sprintf("%s for %s", errs.Count(have, "handle"), errs.Count(want, "chunk")), sameHint)
	}
	return nil
}

// buffer maps the chunks. The intake is empty then, or, after an error, as it
// was.
func (i *intake) buffer(o share.ImportOptions) (*vmm.Buffer, error) {
	if err := i.whole(); err != nil {
		return nil, err
	}
	o.Device, o.Memory, o.Granularity, o.Chunks, o.ReadOnly = i.dev, i.memory, i.gran, i.chunks, i.options.ReadOnly
	b, err := share.NewBuffer(i.op, o)
	if err != nil {
		return nil, sizeError(i.op, err)
	}
	i.chunks = nil
	return b.(*vmm.Buffer), nil
}

// attach maps the chunks behind those of a buffer of imported memory. The intake
// is empty then, or, after an error, as it was.
func (i *intake) attach(to share.Memory) error {
	if err := i.whole(); err != nil {
		return err
	}
	if err := to.Attach(i.op, i.chunks); err != nil {
		return sizeError(i.op, err)
	}
	i.chunks = nil
	return nil
}

// allocation makes the one chunk an allocation. The intake is empty then, or,
// after an error, as it was.
func (i *intake) allocation() (*vmm.Allocation, error) {
	if err := i.whole(); err != nil {
		return nil, err
	}
	a, err := share.NewAllocation(i.op, i.dev, i.chunks[0])
	if err != nil {
		return nil, sizeError(i.op, err)
	}
	i.chunks = nil
	return a.(*vmm.Allocation), nil
}

// discard gives up what was imported, after what failed with cause.
func (i *intake) discard(cause error) error {
	chunks := i.chunks
	i.chunks = nil
	return phys.Abandon(i.op, cause, chunks...)
}

// sizeError tells a wrong size from what else can fail in mapping: the driver
// maps memory at its own size alone.
func sizeError(op string, err error) error {
	var d *cuda.Error
	if errors.As(err, &d) && d.Call == driver.CallMemMap.String() && d.Code == cuda.Code(driver.NotSupported) {
		return failure(op, ErrSizeMismatch, d.Asked, "the memory has another size than the exporter declared").because(err)
	}
	return err
}
