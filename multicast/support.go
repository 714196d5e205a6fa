package multicast

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/vmm"
)

// Properties describe a multicast object. Devices must be set.
type Properties struct {
	// Devices is how many devices take part, including those of other processes.
	Devices int
	// Handles are the ways to share the object: vmm.PosixFD, vmm.Fabric or both. Such an
	// object accepts only shareable memory. Zero, like vmm.NoHandles, is an object of this
	// process alone.
	Handles vmm.HandleTypes
	// Granularity chooses which of the driver's two granularities the size is rounded up
	// to: the minimum, or the one that it recommends for speed.
	Granularity vmm.Granularity
}

// prop returns the properties in the driver's form.
func (p Properties) prop(op string) (driver.MulticastProp, error) {
	var none driver.MulticastProp
	const most = 1 << 16
	switch {
	case p.Devices < 1 || p.Devices > most:
		return none, errs.Invalid(op, fmt.Sprintf("an object for %d devices", p.Devices), fmt.Sprintf("say how many devices take part, from 1 to %d", most))
	case p.Handles != vmm.NoHandles && p.Handles&^(vmm.PosixFD|vmm.Fabric) != 0:
		return none, errs.Invalid(op, fmt.Sprintf("handle types %v", p.Handles), "use vmm.PosixFD, vmm.Fabric, both, or nothing")
	case p.Granularity > vmm.RecommendedGranularity:
		return none, errs.Invalid(op, p.Granularity.String(), "use vmm.MinimumGranularity or vmm.RecommendedGranularity")
	}
	prop := driver.MulticastProp{NumDevices: uint32(p.Devices)}
	if p.Handles != vmm.NoHandles {
		prop.HandleTypes = uint64(p.Handles)
	}
	return prop, nil
}

// Supported returns nil if these devices can take part in one multicast object, as far as
// their attributes and the driver report, and otherwise an error with the reason. All must
// be of one System. It creates nothing: it does not verify that the driver was opened for
// creating objects, or that devices of other processes are on the same switches.
func Supported(devices ...*cuda.Device) error {
	const op = "multicast.Supported"
	if err := checkDevices(op, devices); err != nil {
		return err
	}
	sys := core.SystemOf(devices[0])
	if sys.Closed() {
		return errs.ClosedError(op, "System") // whose attributes read 0
	}
	for _, d := range devices {
		if sys.Attribute(driver.Device(d.Ordinal()), driver.AttrMulticast) <= 0 {
			return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: fmt.Sprintf("%v has no multicast: its attribute reads 0", d),
				Hint: "multicast needs devices from sm_90 on that an NVSwitch connects, without MIG and confidential computing; copy between peers instead"})
		}
	}
	_, err := granularity(op, sys, Properties{Devices: len(devices)})
	return err
}

// checkDevices refuses an empty list, nil, devices of two Systems, and duplicates.
func checkDevices(op string, devices []*cuda.Device) error {
	if len(devices) == 0 {
		return errs.Invalid(op, "no devices", "name at least one")
	}
	seen := map[int]bool{}
	for _, d := range devices {
		switch {
		case core.SystemOf(d) == nil:
			return errs.NilDevice(op)
		case d.System() != devices[0].System():
			return errs.ForeignError(op, "device")
		case seen[d.Ordinal()]:
			return errs.Invalid(op, fmt.Sprintf("%v twice", d), "name each device once")
		}
		seen[d.Ordinal()] = true
	}
	return nil
}

// Granularity returns what the sizes of objects with these properties are rounded up to, in
// bytes. Offsets and sizes of bound memory are multiples of the minimum, whichever the
// object was made with. It creates nothing.
func Granularity(s *cuda.System, p Properties) (int, error) {
	const op = "multicast.Granularity"
	if core.SystemOf(s) == nil {
		return 0, errNilSystem(op)
	}
	g, err := granularity(op, core.SystemOf(s), p)
	return int(g), err
}

func errNilSystem(op string) error {
	return errs.Invalid(op, "a nil System", "open one with cuda.Open")
}

func granularity(op string, sys *core.System, p Properties) (uint64, error) {
	prop, err := p.prop(op)
	if err != nil {
		return 0, err
	}
	if sys.Closed() {
		return 0, errs.ClosedError(op, "System")
	}
	g, r := sys.Drv.MulticastGetGranularity(prop, driver.GranularityOption(p.Granularity))
	if r != driver.Success {
		return 0, sys.CallError(op, driver.CallMulticastGetGranularity, r, "an object for "+errs.Count(p.Devices, "device"))
	}
	return g, nil
}
