package vmm

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
)

// Properties describe physical memory: as requested, or as granted. The zero value is
// plain memory of the device that it is created with; if the device supports it, the
// memory can be shared by descriptor and accessed by network cards.
type Properties struct {
	// Location is where the memory is; zero is the device itself. Host memory
	// (cuda.OnHost, cuda.OnHostNUMA) can be mapped like the device's.
	Location cuda.Location
	// Handles are the ways to share the memory. They cannot change later.
	Handles HandleTypes
	// Compressible requests memory that the GPU may compress. The driver may not grant
	// it (see Granted), and never does for RDMA-capable memory.
	Compressible bool
	// RDMA determines whether network cards can access the memory directly.
	RDMA RDMA
	// Usage marks memory for a special purpose.
	Usage Usage
	// Granularity chooses which of the driver's two granularities sizes are multiples
	// of. It is not a property of the memory itself.
	Granularity Granularity
}

// HandleTypes is a set of ways to share memory.
type HandleTypes uint32

const (
	// DefaultHandles is a file descriptor if the location and the device support one,
	// and nothing otherwise. It costs nothing until the memory is exported.
	DefaultHandles HandleTypes = 0
	// PosixFD is a file descriptor, for processes of one host.
	PosixFD = HandleTypes(driver.HandlePosixFD)
	// Fabric is a handle of 64 bytes, for hosts on one NVLink fabric.
	Fabric = HandleTypes(driver.HandleFabric)
	// PreferFabric is a descriptor, and also a fabric handle if a trial on the device
	// succeeds: it creates, exports and imports memory of the minimum granularity, at the
	// first request and again if the last trial is some seconds old. If the trial fails,
	// for any reason, the memory has only a descriptor; Requested returns the result, and
	// the System logs each reason once. If the memory can have neither type it is an error.
	PreferFabric = HandleTypes(memspec.PreferFabric)
	// NoHandles is for memory that cannot be shared.
	NoHandles = HandleTypes(memspec.NoHandles)
)

// String returns the set as text: "fd+fabric".
func (h HandleTypes) String() string { return memspec.HandleTypes(h).String() }

// RDMA determines whether network cards can access memory.
type RDMA uint8

const (
	// RDMADefault is on if the device supports it, except for compressible memory. It
	// makes creating and freeing a chunk of 2 MiB about 20% slower (measured on an
	// H200).
	RDMADefault RDMA = iota
	// RDMAOff is off.
	RDMAOff
	// RDMARequired is on, and an error if the device does not support it.
	RDMARequired
)

// String returns the name of the choice.
func (r RDMA) String() string { return memspec.RDMA(r).String() }

// Usage marks memory for a special purpose.
type Usage uint16

const (
	// AnyUsage is plain memory.
	AnyUsage = Usage(driver.UsageNone)
	// TilePool is memory for sparse arrays.
	TilePool = Usage(driver.UsageTilePool)
	// HWDecompress is memory for the hardware decompression engine.
	HWDecompress = Usage(driver.UsageHWDecompress)
)

// String returns the name of the purpose.
func (u Usage) String() string { return memspec.Usage(u).String() }

// Granularity chooses one of the driver's two granularities.
type Granularity uint8

const (
	// MinimumGranularity is the smallest that the driver allows.
	MinimumGranularity Granularity = iota
	// RecommendedGranularity is the one that the driver recommends for speed.
	RecommendedGranularity
)

// String returns the name of the choice.
func (g Granularity) String() string { return memspec.Granularity(g).String() }

// GranularityOf returns what sizes of memory with these properties must be multiples
// of, in bytes.
func GranularityOf(d *cuda.Device, p Properties) (int, error) {
	_, gran, err := p.resolve("vmm.GranularityOf", d)
	return int(gran), err
}

func (p Properties) resolve(op string, d *cuda.Device) (driver.AllocationProp, uint64, error) {
	return memspec.Resolve(op, d, p)
}

func errNilBuffer(op string) error {
	return errs.Invalid(op, "a nil buffer", "make one with NewBuffer or NewArray")
}

// properties converts the driver's form back. It lacks the choice of the granularity.
func properties(prop driver.AllocationProp, g Granularity) Properties {
	p := Properties{
		Location:     cuda.Location{Type: cuda.LocationType(prop.Location.Type), ID: int(prop.Location.ID)},
		Handles:      HandleTypes(prop.RequestedHandleTypes),
		Compressible: prop.Flags.CompressionType == driver.CompressionGeneric,
		RDMA:         RDMAOff,
		Usage:        Usage(prop.Flags.Usage),
		Granularity:  g,
	}
	if p.Handles == 0 {
		p.Handles = NoHandles
	}
	if prop.Flags.GPUDirectRDMACapable != 0 {
		p.RDMA = RDMARequired
	}
	return p
}
