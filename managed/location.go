package managed

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/host"
)

// place is a location in the driver's form. It is checked in two steps, so that a location
// that no driver accepts is reported before one that this driver or device does not.
type place struct {
	driver.Location
	asked cuda.Location
}

// theHost is passed to calls that ignore their location.
var theHost = driver.Location{Type: driver.LocationHost}

// checkPlace refuses locations that no driver accepts. access is set for accessed-by, which
// does not accept nodes.
func (m *memory) checkPlace(op string, l cuda.Location, access bool) (place, error) {
	refuse := func(hint string) (place, error) {
		return place{}, errs.Invalid(op, fmt.Sprintf("location %v", l), hint)
	}
	p := place{driver.Location{Type: driver.LocationType(l.Type), ID: int32(l.ID)}, l}
	switch l.Type {
	case cuda.LocationDevice:
		if n := len(m.dev.System().Devices()); l.ID < 0 || l.ID >= n {
			return refuse(fmt.Sprintf("there are devices 0 to %d", n-1))
		}
		return p, nil
	case cuda.LocationHost:
		if l.ID != 0 {
			return refuse("the host has no ID: use cuda.OnHost, or cuda.OnHostNUMA for a node")
		}
		return p, nil
	case cuda.LocationHostNUMA, cuda.LocationHostNUMACurrent:
		if access {
			return refuse("accessed-by accepts devices and the host as a whole: use cuda.OnHost")
		}
		return m.checkNode(op, p)
	}
	return refuse("use cuda.OnDevice, cuda.OnHost, cuda.OnHostNUMA or cuda.OnCurrentNUMA")
}

// checkNode resolves the calling thread's node, and refuses nodes that do not exist.
func (m *memory) checkNode(op string, p place) (place, error) {
	nodes, current := []int{0}, 0 // of the software driver
	if !m.dev.System().Driver().Software {
		var err error
		if nodes, err = host.Nodes(); err == nil && p.Type == driver.LocationHostNUMACurrent {
			current, err = host.CurrentNode()
		}
		if err != nil {
			return place{}, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: fmt.Sprintf("location %v", p.asked), Err: err,
				Hint: "use cuda.OnHost"})
		}
	}
	if p.Type == driver.LocationHostNUMACurrent {
		if !slices.Contains(nodes, current) {
			current = nodes[0] // the thread's node has no memory
		}
		p.Location = driver.Location{Type: driver.LocationHostNUMA, ID: int32(current)}
		return p, nil
	}
	if p.asked.ID != int(p.ID) || !slices.Contains(nodes, p.asked.ID) {
		return place{}, errs.Invalid(op, fmt.Sprintf("location %v", p.asked), fmt.Sprintf("nodes with memory are %v", nodes))
	}
	return p, nil
}

// supported refuses locations that this driver or device does not accept, unless the
// memory is not managed and operations do nothing.
func (p place) supported(op string, m *memory) error {
	if m.kind == hinted {
		return nil
	}
	f := errs.Failure{Op: op, Kind: errs.NotSupported, Asked: fmt.Sprintf("location %v", p.asked)}
	switch {
	case p.Type == driver.LocationDevice && !m.concurrent(driver.Device(p.ID)):
		f.Asked += ", which has no concurrent managed access"
		f.Hint = "use cuda.OnHost, or a device whose capabilities have it"
		return errs.New(f)
	case p.Type == driver.LocationHostNUMA && !m.sys.Drv.Has(driver.CallMemPrefetchAsync):
		f.Hint = "nodes need a driver for CUDA " + driver.VersionString(driver.CallMemPrefetchAsync.Version()) + " or later: use cuda.OnHost"
		return errs.New(f)
	}
	return nil
}

func (m *memory) concurrent(d driver.Device) bool {
	return m.sys.Attribute(d, driver.AttrConcurrentManagedAccess) != 0
}

// prefetches refuses a prefetch on a stream of a device without concurrent managed access,
// where the driver refuses every location.
func (m *memory) prefetches(op string, s *cuda.Stream) error {
	d := m.ctx.Device
	if s != nil {
		d = core.StreamOf(s).Ctx.Device
	}
	if m.kind == hinted || m.concurrent(d) {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
		Asked: fmt.Sprintf("a prefetch on a stream of device %d, which has no concurrent managed access", d),
		Hint:  "use a stream of a device whose capabilities have it, or do without: such a device does not page managed memory"})
}

// allConcurrent returns an error unless every device has concurrent managed access.
func (m *memory) allConcurrent(op string) error {
	for i := range m.dev.System().Devices() {
		if !m.concurrent(driver.Device(i)) {
			return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
				Asked: fmt.Sprintf("device %d has no concurrent managed access", i),
				Hint:  "hide it with CUDA_VISIBLE_DEVICES, or do without"})
		}
	}
	return nil
}

// ordinal returns a device or the host in the driver's older form.
func ordinal(l driver.Location) int32 {
	if l.Type == driver.LocationDevice {
		return l.ID
	}
	return driver.DeviceCPU
}

// ofOrdinal returns a location from the driver's older form.
func ofOrdinal(n int32) cuda.Location {
	switch n {
	case driver.DeviceCPU:
		return cuda.OnHost()
	case driver.DeviceInvalid:
		return cuda.Location{}
	}
	return cuda.OnDevice(int(n))
}
