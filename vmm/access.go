package vmm

import (
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// AccessMode is what a place may do with mapped memory.
type AccessMode uint8

// The values are the driver's.
const (
	NoAccess  = AccessMode(driver.AccessNone)
	ReadOnly  = AccessMode(driver.AccessRead)
	ReadWrite = AccessMode(driver.AccessReadWrite)
)

// String names the mode.
func (m AccessMode) String() string {
	switch m {
	case NoAccess:
		return "no access"
	case ReadOnly:
		return "read-only"
	case ReadWrite:
		return "read-write"
	}
	return fmt.Sprintf("AccessMode(%d)", uint8(m))
}

// Access is the access of one place.
type Access struct {
	Location cuda.Location
	Mode     AccessMode
}

// String writes "device 0: read-only".
func (a Access) String() string { return fmt.Sprintf("%v: %v", a.Location, a.Mode) }

// accessList holds the access that places have to a mapping, in the driver's form.
// The slice belongs to its owner and is passed to the driver as it is.
type accessList []driver.AccessDesc

// with returns the list after a change; neither list is changed in place.
func (l accessList) with(changes accessList) accessList {
	if len(l) == 0 && changes.lacksNone() {
		return changes
	}
	next := l.except(changes, len(changes))
	for _, c := range changes {
		if c.Flags != driver.AccessNone {
			next = append(next, c)
		}
	}
	return next
}

// except returns the list without the places that a change names, with capacity for
// room more.
func (l accessList) except(changes accessList, room int) accessList {
	rest := make(accessList, 0, len(l)+room)
	for _, a := range l {
		if !changes.names(a.Location) {
			rest = append(rest, a)
		}
	}
	return rest
}

// lacksNone reports whether every place in the list has some access.
func (l accessList) lacksNone() bool {
	for _, a := range l {
		if a.Flags == driver.AccessNone {
			return false
		}
	}
	return true
}

func (l accessList) names(loc driver.Location) bool {
	for _, a := range l {
		if a.Location == loc {
			return true
		}
	}
	return false
}

// same reports whether two lists are one slice: chunks of a buffer share theirs.
func (l accessList) same(o accessList) bool {
	return len(l) == len(o) && (len(l) == 0 || &l[0] == &o[0])
}

// mode returns what the place may do.
func (l accessList) mode(loc driver.Location) driver.AccessFlags {
	for _, a := range l {
		if a.Location == loc {
			return a.Flags
		}
	}
	return driver.AccessNone
}

// lowered returns the devices that a change takes access from.
func (l accessList) lowered(changes accessList) (from []driver.Device) {
	for _, c := range changes {
		if c.Location.Type == driver.LocationDevice && c.Flags < l.mode(c.Location) {
			from = append(from, driver.Device(c.Location.ID))
		}
	}
	return from
}

// lower returns what both lists allow.
func (l accessList) lower(o accessList) accessList {
	both := make(accessList, 0, len(l))
	for _, a := range l {
		if a.Flags = min(a.Flags, o.mode(a.Location)); a.Flags != driver.AccessNone {
			both = append(both, a)
		}
	}
	return both
}

// upper returns the most that either list allows.
func (l accessList) upper(o accessList) accessList {
	most := l.except(o, len(o))
	for _, a := range o {
		if a.Flags = max(a.Flags, l.mode(a.Location)); a.Flags != driver.AccessNone {
			most = append(most, a)
		}
	}
	return most
}

// of returns the list's access of the places that a change names: the change back.
func (l accessList) of(changes accessList) accessList {
	back := append(accessList(nil), changes...)
	for i, c := range back {
		back[i].Flags = l.mode(c.Location)
	}
	return back
}

// devices returns those with any access.
func (l accessList) devices() (with []driver.Device) {
	for _, a := range l {
		if a.Location.Type == driver.LocationDevice && a.Flags != driver.AccessNone {
			with = append(with, driver.Device(a.Location.ID))
		}
	}
	return with
}

// checkAccess converts the access that a caller requests into the driver's form, for
// memory at a location, and refuses what cannot work.
func checkAccess(op string, s *cuda.System, memory driver.Location, access []Access) (accessList, error) {
	if len(access) == 0 {
		return nil, errs.Invalid(op, "no access", "name at least one location and its mode")
	}
	list := make(accessList, 0, len(access))
	for _, a := range access {
		switch a.Mode {
		case NoAccess, ReadOnly, ReadWrite:
		default:
			return nil, errs.Invalid(op, a.String(), "use NoAccess, ReadOnly or ReadWrite")
		}
		if err := checkLocation(op, s, a.Location); err != nil {
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
		if list.names(loc) {
			return nil, errs.Invalid(op, fmt.Sprintf("%v twice", a.Location), "name each location once")
		}
		if loc.Type == driver.LocationDevice && memory.Type == driver.LocationDevice &&
			loc.ID != memory.ID && a.Mode != NoAccess {
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
