package cuda

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Ptr is a device address. It is a number, never an unsafe.Pointer: the host
// cannot follow it, and Go's checks must not try to.
type Ptr uint64

// String returns the address in hexadecimal.
func (p Ptr) String() string { return fmt.Sprintf("%#x", uint64(p)) }

// LocationType says what kind of place a Location is.
type LocationType int32

// The values are the driver's.
const (
	LocationNone            = LocationType(driver.LocationNone)
	LocationDevice          = LocationType(driver.LocationDevice)
	LocationHost            = LocationType(driver.LocationHost)
	LocationHostNUMA        = LocationType(driver.LocationHostNUMA)
	LocationHostNUMACurrent = LocationType(driver.LocationHostNUMACurrent)
)

// String names the kind.
func (t LocationType) String() string {
	return errs.Name("LocationType", t, []string{LocationNone: "none", LocationDevice: "device", LocationHost: "host", LocationHostNUMA: "host NUMA node", LocationHostNUMACurrent: "current host NUMA node"})
}

// Location is a place where memory lives or that is granted access to it: a
// device, the host, or a NUMA node of the host. Locations are comparable.
type Location struct {
	Type LocationType
	// ID is the device's ordinal or the node's number; 0 otherwise.
	ID int
}

// OnDevice returns the device with that ordinal.
func OnDevice(ordinal int) Location { return Location{LocationDevice, ordinal} }

// OnHost returns the host's memory, on any node.
func OnHost() Location { return Location{Type: LocationHost} }

// OnHostNUMA returns a NUMA node of the host.
func OnHostNUMA(node int) Location { return Location{LocationHostNUMA, node} }

// OnCurrentNUMA returns the NUMA node of the host on which the calling goroutine's
// thread runs when the location is used. Goroutines move between threads: lock
// the goroutine to its thread (runtime.LockOSThread), and the thread to a
// processor, where it matters.
func OnCurrentNUMA() Location { return Location{Type: LocationHostNUMACurrent} }

// String returns the location: "device 0".
func (l Location) String() string {
	if l.Type == LocationDevice || l.Type == LocationHostNUMA {
		return fmt.Sprintf("%s %d", l.Type, l.ID)
	}
	return l.Type.String()
}
