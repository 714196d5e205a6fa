// Package memspec provides the one form of a request for memory, which vmm, the pool and
// ranges of pages stand on: properties with every default decided, and lists of access.
// Requests are vmm.Properties and []vmm.Access, which this package sees by their structure,
// since vmm stands above it.
package memspec

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// form is the structure of vmm.Properties, which has the documents of all types and values
// here.
type form[H ~uint32, R ~uint8, U ~uint16, G ~uint8] = struct {
	Location     cuda.Location
	Handles      H
	Compressible bool
	RDMA         R
	Usage        U
	Granularity  G
}

type properties form[HandleTypes, RDMA, Usage, Granularity]

// HandleTypes is vmm.HandleTypes.
type HandleTypes uint32

// The values of HandleTypes.
const (
	DefaultHandles HandleTypes = 0
	PosixFD                    = HandleTypes(driver.HandlePosixFD)
	Fabric                     = HandleTypes(driver.HandleFabric)
	PreferFabric   HandleTypes = 1 << 30
	NoHandles      HandleTypes = 1 << 31
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

// RDMA is vmm.RDMA.
type RDMA uint8

// The values of RDMA.
const (
	RDMADefault RDMA = iota
	RDMAOff
	RDMARequired
)

// String returns the name of the choice.
func (r RDMA) String() string {
	return errs.Name("RDMA", r, []string{RDMADefault: "default", RDMAOff: "off", RDMARequired: "required"})
}

// Usage is vmm.Usage.
type Usage uint16

// The values of Usage.
const (
	AnyUsage     = Usage(driver.UsageNone)
	TilePool     = Usage(driver.UsageTilePool)
	HWDecompress = Usage(driver.UsageHWDecompress)
)

// String returns the name of the purpose.
func (u Usage) String() string {
	return errs.Name("Usage", u, []string{AnyUsage: "any", TilePool: "tile pool", HWDecompress: "hardware decompression"})
}

// Granularity is vmm.Granularity.
type Granularity uint8

// The values of Granularity.
const (
	MinimumGranularity Granularity = iota
	RecommendedGranularity
)

// String returns the name of the choice.
func (g Granularity) String() string {
	return errs.Name("Granularity", g, []string{MinimumGranularity: "minimum", RecommendedGranularity: "recommended"})
}

// Resolve converts vmm.Properties into the driver's form, with every default decided, and
// returns the granularity. It refuses what cannot work before it calls the driver.
func Resolve[P ~form[H, R, U, G], H ~uint32, R ~uint8, U ~uint16, G ~uint8](op string, d *cuda.Device, asked P) (driver.AllocationProp, uint64, error) {
	p := form[H, R, U, G](asked)
	return properties{p.Location, HandleTypes(p.Handles), p.Compressible, RDMA(p.RDMA), Usage(p.Usage), Granularity(p.Granularity)}.resolve(op, d)
}

// Default is Resolve of the zero vmm.Properties.
func Default(op string, d *cuda.Device) (driver.AllocationProp, uint64, error) {
	return properties{}.resolve(op, d)
}

func (p properties) resolve(op string, d *cuda.Device) (driver.AllocationProp, uint64, error) {
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
		err := CheckLocation(op, d.System(), loc)
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
	if err := CheckLocation(op, d.System(), loc); err != nil {
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
func (p properties) setHandles(op string, loc cuda.Location, has func(driver.DeviceAttribute) bool, prop *driver.AllocationProp) error {
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
func (p properties) setFlags(op string, loc cuda.Location, has func(driver.DeviceAttribute) bool, prop *driver.AllocationProp) error {
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
