package cuda

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/limits"
)

// MemoryLimit is a limit on a device's memory that is set outside of the program.
type MemoryLimit struct {
	// Bytes is the limit, and Used what counts towards it now: memory of all processes that
	// it binds.
	Bytes, Used int
	// File is the file that sets it.
	File string
}

// Remaining returns how many bytes can be taken before the limit is reached.
func (l MemoryLimit) Remaining() int { return l.Bytes - min(l.Used, l.Bytes) }

// readDeviceLimits reads the limits of the control groups.
var readDeviceLimits = limits.OfDevices

// MemoryLimit returns the limit on the device's memory of the control groups that this process
// is in, the one with least remaining, for a Budget to keep below. It reports false if there is
// none, as on most machines: kernels have the dmem controller from 6.14 on, and the device's
// driver has to register its memory there. An error names a file that could not be read or
// understood.
func (d *Device) MemoryLimit() (l MemoryLimit, limited bool, err error) {
	const op = "cuda.Device.MemoryLimit"
	if err := d.open(op); err != nil {
		return l, false, err
	}
	all, err := readDeviceLimits()
	if len(all) == 0 {
		return l, false, err
	}
	var at [3]int
	for i, a := range []driver.DeviceAttribute{driver.AttrPCIDomainID, driver.AttrPCIBusID, driver.AttrPCIDeviceID} {
		if at[i], err = d.Attribute(int(a)); err != nil {
			return l, false, err
		}
	}
	found, limited := limits.OfPCI(all, at[0], at[1], at[2])
	return MemoryLimit{Bytes: int(found.Bytes), Used: int(found.Used), File: found.File}, limited, nil
}
