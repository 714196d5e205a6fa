package vmm

import (
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
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
	PreferFabric HandleTypes = 1 << 30
	// NoHandles is for memory that cannot be shared.
	NoHandles HandleTypes = 1 << 31
)

// String returns the set as text: "fd+fabric".
func (h HandleTypes) String() string {
	switch h {
	case DefaultHandles:
		return "default"
	case PosixFD:
		return "fd"
	case Fabric:
		return "fabric"
	case PosixFD | Fabric:
		return "fd+fabric"
	case PreferFabric:
		return "fabric preferred"
	case NoHandles:
		return "none"
	}
	return fmt.Sprintf("HandleTypes(%#x)", uint32(h))
}

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
func (r RDMA) String() string {
	switch r {
	case RDMADefault:
		return "default"
	case RDMAOff:
		return "off"
	case RDMARequired:
		return "required"
	}
	return fmt.Sprintf("RDMA(%d)", uint8(r))
}

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
func (u Usage) String() string {
	switch u {
	case AnyUsage:
		return "any"
	case TilePool:
		return "tile pool"
	case HWDecompress:
		return "hardware decompression"
	}
	return fmt.Sprintf("Usage(%d)", uint16(u))
}

// Granularity chooses one of the driver's two granularities.
type Granularity uint8

const (
	// MinimumGranularity is the smallest that the driver allows.
	MinimumGranularity Granularity = iota
	// RecommendedGranularity is the one that the driver recommends for speed.
	RecommendedGranularity
)

// String returns the name of the choice.
func (g Granularity) String() string {
	switch g {
	case MinimumGranularity:
		return "minimum"
	case RecommendedGranularity:
		return "recommended"
	}
	return fmt.Sprintf("Granularity(%d)", uint8(g))
}

// GranularityOf returns what sizes of memory with these properties must be multiples
// of, in bytes.
func GranularityOf(d *cuda.Device, p Properties) (int, error) {
	_, gran, err := p.resolve("vmm.GranularityOf", d)
	return int(gran), err
}

// resolve converts the properties into the driver's form, with every default decided,
// and returns the granularity. It refuses what cannot work before it calls the driver.
func (p Properties) resolve(op string, d *cuda.Device) (driver.AllocationProp, uint64, error) {
	var none driver.AllocationProp
	sys := core.SystemOf(d)
	if sys == nil {
		return none, 0, errs.NilDevice(op)
	}
	if sys.Closed() {
		return none, 0, errs.ClosedError(op, "System")
	}
	loc := p.Location
	if loc == (cuda.Location{}) {
		loc = d.Location()
	}
	if p.Handles == PreferFabric {
		err := checkLocation(op, d.System(), loc)
		if err == nil {
			p.Handles, err = preferFabric(op, d, loc)
		}
		if err != nil {
			return none, 0, err
		}
	}
	key := core.PropertiesKey{
		Device: d.Ordinal(), LocationType: int32(p.Location.Type), LocationID: p.Location.ID,
		Handles: uint32(p.Handles), Compressible: p.Compressible, RDMA: uint8(p.RDMA),
		Usage: uint16(p.Usage), Granularity: uint8(p.Granularity),
	}
	if prop, gran, ok := sys.Decided(key); ok {
		return prop, gran, nil
	}
	has := func(a driver.DeviceAttribute) bool { return sys.Attribute(driver.Device(d.Ordinal()), a) > 0 }
	if !has(driver.AttrVirtualMemoryManagement) {
		return none, 0, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
			Asked: fmt.Sprintf("%v has no virtual memory management", d), Hint: "use another device"})
	}
	if err := checkLocation(op, d.System(), loc); err != nil {
		return none, 0, err
	}
	prop := driver.AllocationProp{
		Type:     driver.AllocationPinned,
		Location: driver.Location{Type: driver.LocationType(loc.Type), ID: int32(loc.ID)},
	}
	for _, set := range []func(string, cuda.Location, func(driver.DeviceAttribute) bool, *driver.AllocationProp) error{
		p.setHandles, p.setFlags,
	} {
		if err := set(op, loc, has, &prop); err != nil {
			return none, 0, err
		}
	}
	gran, r := sys.Granularity(prop, driver.GranularityOption(p.Granularity))
	if r != driver.Success {
		return none, 0, sys.CallError(op, driver.CallMemGetAllocationGranularity, r, fmt.Sprintf("memory on %v", loc), core.DevicesOf(prop.Location)...)
	}
	sys.Decide(key, prop, gran)
	return prop, gran, nil
}

// setHandles sets the handle types of memory at a location, on a device that has some
// attributes.
func (p Properties) setHandles(op string, loc cuda.Location, has func(driver.DeviceAttribute) bool, prop *driver.AllocationProp) error {
	switch {
	case p.Handles == DefaultHandles:
		if loc.Type != cuda.LocationHost && has(driver.AttrHandlePosixFD) {
			prop.RequestedHandleTypes = driver.HandlePosixFD
		}
	case p.Handles == NoHandles:
	case p.Handles&^(PosixFD|Fabric) != 0:
		return errs.Invalid(op, fmt.Sprintf("handle types %v", p.Handles),
			"use PosixFD, Fabric, both, PreferFabric, NoHandles, or nothing for the default")
	case loc.Type == cuda.LocationHost:
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
			Asked: fmt.Sprintf("host memory with handle types %v", p.Handles),
			Hint:  "memory of a NUMA node (cuda.OnHostNUMA) can be shared"})
	default:
		prop.RequestedHandleTypes = driver.HandleTypes(p.Handles)
	}
	return nil
}

// setFlags sets compression, RDMA and usage of memory at a location, on a device that
// has some attributes.
func (p Properties) setFlags(op string, loc cuda.Location, has func(driver.DeviceAttribute) bool, prop *driver.AllocationProp) error {
	onDevice := loc.Type == cuda.LocationDevice
	if p.Compressible {
		if !onDevice {
			return errs.Invalid(op, fmt.Sprintf("compressible memory on %v", loc), "only device memory can be compressible")
		}
		prop.Flags.CompressionType = driver.CompressionGeneric
	}
	switch p.RDMA {
	case RDMADefault:
		// The driver silently drops compression if both are requested.
		if onDevice && !p.Compressible && has(driver.AttrRDMAWithVMM) {
			prop.Flags.GPUDirectRDMACapable = 1
		}
	case RDMAOff:
	case RDMARequired:
		if !onDevice || !has(driver.AttrRDMAWithVMM) {
			return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
				Asked: fmt.Sprintf("RDMA-capable memory on %v", loc),
				Hint:  "the device attribute for RDMA with virtual memory management is 0: leave RDMA at its default"})
		}
		prop.Flags.GPUDirectRDMACapable = 1
	default:
		return errs.Invalid(op, p.RDMA.String(), "use RDMADefault, RDMAOff or RDMARequired")
	}
	if p.Usage > HWDecompress {
		return errs.Invalid(op, p.Usage.String(), "use AnyUsage, TilePool or HWDecompress")
	}
	prop.Flags.Usage = driver.AllocationUsage(p.Usage)
	if p.Granularity > RecommendedGranularity {
		return errs.Invalid(op, p.Granularity.String(), "use MinimumGranularity or RecommendedGranularity")
	}
	return nil
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

// checkLocation refuses locations that do not exist.
func checkLocation(op string, s *cuda.System, l cuda.Location) error {
	switch l.Type {
	case cuda.LocationDevice:
		if _, err := s.Device(l.ID); err != nil {
			return errs.Invalid(op, fmt.Sprintf("%v of %d", l, len(s.Devices())), "devices are numbered from 0")
		}
		return nil
	case cuda.LocationHost:
		if l.ID != 0 {
			return errs.Invalid(op, fmt.Sprintf("%v with ID %d", l, l.ID), "the host has no ID: use cuda.OnHost, or cuda.OnHostNUMA for a node")
		}
		return nil
	case cuda.LocationHostNUMA:
		if l.ID < 0 || l.ID > math.MaxInt32 {
			return errs.Invalid(op, l.String(), "NUMA nodes are numbered from 0")
		}
		return nil
	case cuda.LocationHostNUMACurrent:
		return errs.Invalid(op, l.String(), "the driver refuses it for physical memory: name the node with cuda.OnHostNUMA")
	}
	return errs.Invalid(op, l.String(), "use cuda.OnDevice, OnHost or OnHostNUMA")
}
