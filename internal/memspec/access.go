package memspec

import (
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Access is the access that places have to memory, in the driver's form. A list is never
// changed in place, and is passed to the driver as it is.
type Access []driver.AccessDesc

// With returns the list after a change; neither list is changed in place.
func (l Access) With(changes Access) Access {
	if len(l) == 0 && changes.lacksNone() {
		return changes
	}
	next := l.Except(changes, len(changes))
	for _, c := range changes {
		if c.Flags != driver.AccessNone {
			next = append(next, c)
		}
	}
	return next
}

// Except returns the list without the places that a change names, with capacity for
// room more.
func (l Access) Except(changes Access, room int) Access {
	rest := make(Access, 0, len(l)+room)
	for _, a := range l {
		if !changes.Names(a.Location) {
			rest = append(rest, a)
		}
	}
	return rest
}

// lacksNone reports whether every place in the list has some access.
func (l Access) lacksNone() bool {
	for _, a := range l {
		if a.Flags == driver.AccessNone {
			return false
		}
	}
	return true
}

// Names reports whether the list has an entry for the place.
func (l Access) Names(loc driver.Location) bool {
	for _, a := range l {
		if a.Location == loc {
			return true
		}
	}
	return false
}

// Same reports whether two lists are one slice: chunks of a buffer share theirs.
func (l Access) Same(o Access) bool {
	return len(l) == len(o) && (len(l) == 0 || &l[0] == &o[0])
}

// Mode returns what the place may do.
func (l Access) Mode(loc driver.Location) driver.AccessFlags {
	for _, a := range l {
		if a.Location == loc {
			return a.Flags
		}
	}
	return driver.AccessNone
}

// Lowered returns the devices that a change takes access from.
func (l Access) Lowered(changes Access) (from []driver.Device) {
	for _, c := range changes {
		if c.Location.Type == driver.LocationDevice && c.Flags < l.Mode(c.Location) {
			from = append(from, driver.Device(c.Location.ID))
		}
	}
	return from
}

// Lowers reports whether a change gives no place more access than it has.
func (l Access) Lowers(changes Access) bool {
	for _, c := range changes {
		if c.Flags > l.Mode(c.Location) {
			return false
		}
	}
	return true
}

// Lower returns what both lists allow.
func (l Access) Lower(o Access) Access {
	both := make(Access, 0, len(l))
	for _, a := range l {
		if a.Flags = min(a.Flags, o.Mode(a.Location)); a.Flags != driver.AccessNone {
			both = append(both, a)
		}
	}
	return both
}

// All returns the list with the same access for each of its places.
func (l Access) All(mode driver.AccessFlags) Access {
	same := append(Access(nil), l...)
	for i := range same {
		same[i].Flags = mode
	}
	return same
}

// Upper returns the most that either list allows.
func (l Access) Upper(o Access) Access {
	most := l.Except(o, len(o))
	for _, a := range o {
		if a.Flags = max(a.Flags, l.Mode(a.Location)); a.Flags != driver.AccessNone {
			most = append(most, a)
		}
	}
	return most
}

// Of returns the list's access of the places that a change names: the change back.
func (l Access) Of(changes Access) Access {
	back := append(Access(nil), changes...)
	for i, c := range back {
		back[i].Flags = l.Mode(c.Location)
	}
	return back
}

// Devices returns those with any access.
func (l Access) Devices() (with []driver.Device) {
	for _, a := range l {
		if a.Location.Type == driver.LocationDevice && a.Flags != driver.AccessNone {
			with = append(with, driver.Device(a.Location.ID))
		}
	}
	return with
}
