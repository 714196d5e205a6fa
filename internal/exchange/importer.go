package exchange

import (
	"errors"
	"fmt"
	"math/bits"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// Importer imports memory for a device: it checks the declaration, then each chunk, and
// then maps all of them. It can go on with further chunks of the same memory.
type Importer struct {
	op       string
	dev      *cuda.Device
	options  ImportOptions
	declared Memory
	validate func(chunks []int, granularity, there uint64) error
	// memory is what the chunks must be, in this process's numbering of devices.
	memory driver.AllocationProp
	// remote: the memory lies on a device that this process does not see, such as
	// another host's. memory then names the importing device.
	remote bool
	// gran is the granularity of the memory, and there how many bytes exist of it.
	gran, there uint64
	chunks      []*phys.Handle
}

// ImportOptions are those of handles.ImportOptions that concern each chunk.
type ImportOptions struct{ ReadOnly, KeepDescriptors bool }

// maxHostBytes bounds imports of host memory by default.
const maxHostBytes = 1 << 40

// CheckBounds refuses bounds of an import that can never be, before anything is requested.
func CheckBounds(op string, bytes, chunks, align int) error {
	switch {
	case bytes < 0 || chunks < 0:
		return errs.PeerInvalid(op, fmt.Sprintf("limits of %d bytes and %d chunks", bytes, chunks), "limits are not negative")
	case align < 0 || bits.OnesCount(uint(align)) > 1:
		return errs.PeerInvalid(op, fmt.Sprintf("an alignment of %d", align), "use a power of two, or 0 for the granularity")
	}
	return nil
}

// NewImporter prepares the import of declared memory for a device. validate checks the sizes
// of chunks, given the granularity of such memory and the bytes that exist of it. All checks
// that need no handle of the memory happen here.
func NewImporter(op string, d *cuda.Device, declared Memory, o ImportOptions, validate func(chunks []int, granularity, there uint64) error) (*Importer, error) {
	if core.SystemOf(d) == nil {
		return nil, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	}
	if o.KeepDescriptors && declared.Handle&vmm.PosixFD == 0 {
		return nil, errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("KeepDescriptors for memory by %v", declared.Handle),
			"import it without, or have it shared by descriptor (vmm.PosixFD)")
	}
	i := &Importer{op: op, dev: d, options: o, declared: declared, validate: validate}
	home, there := d, uint64(maxHostBytes)
	want := vmm.Properties{Location: declared.Location, Handles: declared.Handle, RDMA: vmm.RDMAOff}
	if declared.Location.Type == cuda.LocationDevice {
		var err error
		if home, err = i.home(); err != nil {
			return nil, err
		}
		want.Location, there = home.Location(), uint64(home.TotalMemory())
	}
	gran, err := vmm.GranularityOf(home, want)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	i.gran, i.there = uint64(gran), there
	if err := i.Declare(op, declared.Chunks); err != nil {
		return nil, err
	}
	i.memory = driver.AllocationProp{Type: driver.AllocationPinned,
		Location: driver.Location{Type: driver.LocationType(want.Location.Type), ID: int32(want.Location.ID)}}
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

// Granularity returns the granularity of the memory in bytes.
func (i *Importer) Granularity() uint64 { return i.gran }

// Chunks returns how many chunks are imported so far.
func (i *Importer) Chunks() int { return len(i.chunks) }

// KeepFirst removes all but the first n chunks, and returns the others for the caller to
// release.
func (i *Importer) KeepFirst(n int) []*phys.Handle {
	gone := i.chunks[n:]
	i.chunks = i.chunks[:n:n]
	return gone
}

// Declare replaces the declared chunks, of which the importer may have the first, and names
// the operation that imports them. After an error it is unchanged.
func (i *Importer) Declare(op string, chunks []int) error {
	if err := i.validate(chunks, i.gran, i.there); err != nil {
		return err
	}
	i.op, i.declared.Chunks = op, chunks
	return nil
}

// home returns the device of this process that the memory lies on, which the
// importing device must reach.
func (i *Importer) home() (*cuda.Device, error) {
	var seen []string
	for _, d := range i.dev.System().Devices() {
		if d.UUID() == i.declared.Device {
			ok, err := i.dev.CanAccess(d)
			if err == nil && !ok {
				err = errs.Peer(i.op, cuda.ErrNotSupported, fmt.Sprintf("memory on %v for %v, which cannot reach it", d, i.dev),
					"import it for the device that it lies on, and copy")
			}
			return d, err
		}
		seen = append(seen, fmt.Sprintf("%v (%v)", d, d.UUID()))
	}
	if i.declared.Handle&vmm.Fabric != 0 {
		i.remote = true // the driver decides whether it can be reached
		return i.dev, nil
	}
	return nil, errs.Peer(i.op, cuda.ErrNotSupported,
		fmt.Sprintf("memory on %v, but this process sees %s", i.declared.Device, strings.Join(seen, ", ")),
		"make that device visible to this process (CUDA_VISIBLE_DEVICES, or the container's devices)")
}

// Receive imports the next chunks. The descriptors stay the caller's.
func (i *Importer) Receive(fds []*peer.FD) error {
	sys := core.SystemOf(i.dev)
	for _, f := range fds {
		at := len(i.chunks)
		if at >= len(i.declared.Chunks) {
			return errs.Peer(i.op, ErrMismatch, fmt.Sprintf("more file descriptors than %s", errs.Count(at, "chunk")), errs.SameHint)
		}
		var h *phys.Handle
		err := f.Use(func(n int) (err error) {
			h, err = phys.Import(i.op, sys, n, uint64(i.declared.Chunks[at]))
			return err
		})
		if err != nil {
			return i.importError(at, err)
		}
		link.Of(f).SetForeign(false)
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

// keepDescriptor gives a chunk a descriptor of its own to keep.
func (i *Importer) keepDescriptor(h *phys.Handle, f *peer.FD) error {
	if err := Exports.keep(i.op); err != nil {
		return err
	}
	err := f.Use(func(n int) error {
		another, err := fd.Dup(n)
		if err == nil {
			h.KeepSource(another, i.memory.Flags, Exports.giveKept)
		}
		return err
	})
	if err != nil {
		Exports.giveKept()
		return errs.SystemCall(i.op, fmt.Sprintf("a descriptor of chunk %d to keep", len(i.chunks)-1), err)
	}
	return nil
}

// keep takes over an imported chunk, and compares it with the declaration.
func (i *Importer) keep(h *phys.Handle) error {
	at := len(i.chunks)
	i.chunks = append(i.chunks, h)
	if i.remote {
		// The driver numbers that device differently, or not at all.
		h.Asked.Location = i.memory.Location
	}
	return i.compare(at, h.Asked)
}

func (i *Importer) importError(at int, err error) error {
	var d *cuda.Error
	switch {
	case !errors.As(err, &d) || d.Call != driver.CallMemImportFromShareableHandle.String():
		return err
	case d.Code == cuda.Code(driver.Unknown):
		return errs.PeerCause(err, i.op, ErrNotMemory, fmt.Sprintf("the file descriptor of chunk %d", at),
			"the exporter sent a descriptor of something else, or of another driver's memory")
	}
	return err
}

// compare checks the driver's report of a chunk against the declaration: memory of the
// right type, at the right location. Of an import's compression and RDMA capability the
// driver reports less than was granted, or nothing, so the declaration stands.
func (i *Importer) compare(at int, have driver.AllocationProp) error {
	if have.Type == i.memory.Type && have.Location == i.memory.Location {
		return nil
	}
	place := func(p driver.AllocationProp) string {
		return fmt.Sprintf("type %d on %v", p.Type, cuda.Location{Type: cuda.LocationType(p.Location.Type), ID: int(p.Location.ID)})
	}
	return errs.Peer(i.op, ErrMismatch, fmt.Sprintf("chunk %d is memory of %s, but %s was declared", at, place(have), place(i.memory)),
		"the exporter describes memory other than it sends")
}

// whole returns an error if chunks are missing.
func (i *Importer) whole() error {
	if have, want := len(i.chunks), len(i.declared.Chunks); have != want {
		return errs.Peer(i.op, ErrMismatch, fmt.Sprintf("%s for %s", errs.Count(have, "handle"), errs.Count(want, "chunk")), errs.SameHint)
	}
	return nil
}

// Buffer maps the chunks, which leaves the Importer empty. After an error it is unchanged.
func (i *Importer) Buffer(o share.ImportOptions) (*vmm.Buffer, error) {
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

// Attach maps the chunks behind those of a buffer of imported memory, which leaves the
// Importer empty. After an error it is unchanged.
func (i *Importer) Attach(to share.Memory) error {
	if err := i.whole(); err != nil {
		return err
	}
	if err := to.Attach(i.op, i.chunks); err != nil {
		return sizeError(i.op, err)
	}
	i.chunks = nil
	return nil
}

// Discard releases the imported chunks after a failure, whose error is cause.
func (i *Importer) Discard(cause error) error {
	chunks := i.chunks
	i.chunks = nil
	return phys.Abandon(i.op, cause, chunks...)
}

// sizeError recognises a wrong size among the failures of mapping: the driver maps memory
// only at its true size.
func sizeError(op string, err error) error {
	var d *cuda.Error
	if errors.As(err, &d) && d.Call == driver.CallMemMap.String() && d.Code == cuda.Code(driver.NotSupported) {
		return errs.PeerCause(err, op, ErrSizeMismatch, d.Asked, "the memory has a size other than the exporter declared")
	}
	return err
}

// Declared returns how many chunks the declaration has.
func (i *Importer) Declared() int { return len(i.declared.Chunks) }
