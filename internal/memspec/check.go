package memspec

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Mode is what a place may do with memory, for texts: a driver.AccessFlags.
type Mode uint8

// String names the mode.
func (m Mode) String() string {
	return errs.Name("AccessMode", m, []string{driver.AccessNone: "no access", driver.AccessRead: "read-only", driver.AccessReadWrite: "read-write"})
}

// grant is the structure of vmm.Access.
type grant[M ~uint8] = struct {
	Location cuda.Location
	Mode     M
}

// CheckAccess converts the access that a caller requests, a []vmm.Access, into the driver's
// form, for memory at a location, and refuses what cannot work.
func CheckAccess[A ~grant[M], M ~uint8](op string, s *cuda.System, memory driver.Location, access []A) (Access, error) {
	if len(access) == 0 {
		return nil, errs.Invalid(op, "no access", "name at least one location and its mode")
	}
	list := make(Access, 0, len(access))
	for _, named := range access {
		a := grant[M](named)
		switch mode := Mode(a.Mode); mode {
		case Mode(driver.AccessNone), Mode(driver.AccessRead), Mode(driver.AccessReadWrite):
		default:
			return nil, errs.Invalid(op, fmt.Sprintf("%v: %v", a.Location, mode), "use NoAccess, ReadOnly or ReadWrite")
		}
		if err := CheckLocation(op, s, a.Location); err != nil {
			return nil, err
		}
		loc := driver.Location{Type: driver.LocationType(a.Location.Type), ID: int32(a.Location.ID)}
		if loc.Type != driver.LocationDevice && memory.Type == driver.LocationDevice {
			return nil, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
				Asked: fmt.Sprintf("access of the %v to memory on device %d", a.Location, memory.ID),
				Hint:  "the host cannot reach device memory: copy, or create the memory on the host"})
		}
		if loc.Type != driver.LocationDevice && memory.Type == driver.LocationNone {
			return nil, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
				Asked: fmt.Sprintf("access of the %v to a multicast object", a.Location),
				Hint:  "only devices of its team reach it"})
		}
		if list.Names(loc) {
			return nil, errs.Invalid(op, fmt.Sprintf("%v twice", a.Location), "name each location once")
		}
		if loc.Type == driver.LocationDevice && memory.Type == driver.LocationDevice &&
			loc.ID != memory.ID && a.Mode != M(driver.AccessNone) {
			if err := checkPeer(op, s, int(loc.ID), int(memory.ID)); err != nil {
				return nil, err
			}
		}
		list = append(list, driver.AccessDesc{Location: loc, Flags: driver.AccessFlags(a.Mode)})
	}
	return list, nil
}

// checkPeer refuses access of a device to another's memory where the two
// cannot reach each other.
func checkPeer(op string, s *cuda.System, from, to int) error {
	reader, err := s.Device(from)
	if err != nil {
		return err
	}
	owner, err := s.Device(to)
	if err != nil {
		return err
	}
	ok, err := reader.CanAccess(owner)
	if err == nil && !ok {
		err = errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
			Asked: fmt.Sprintf("access of %v to memory on %v", reader, owner),
			Hint:  "the driver reports no peer access between the two: they need NVLink or PCIe peer-to-peer; copy instead"})
	}
	return err
}

// CheckHost refuses memory that the host cannot access: the access would crash the
// process.
func CheckHost(op string, memory driver.Location, mode driver.AccessFlags) error {
	if memory.Type != driver.LocationHost && memory.Type != driver.LocationHostNUMA {
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported,
			Asked: fmt.Sprintf("the CPU on memory of device %d", memory.ID),
			Hint:  "copy it, or create the memory on the host (cuda.OnHost, cuda.OnHostNUMA)"})
	}
	if mode != driver.AccessReadWrite {
		loc := cuda.Location{Type: cuda.LocationType(memory.Type), ID: int(memory.ID)}
		return errs.New(errs.Failure{Op: op, Kind: errs.NotPermitted,
			Asked: fmt.Sprintf("the CPU has %v to memory on %v", Mode(mode), loc),
			Hint:  fmt.Sprintf("grant %v read-write access with SetAccess", loc)})
	}
	return nil
}
