package vmm

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// preferFabric decides what PreferFabric comes to for memory at a location. The
// caller keeps the answer, so the log hears of it once.
func preferFabric(op string, d *cuda.Device, at cuda.Location) (driver.HandleTypes, error) {
	sys := core.SystemOf(d)
	types := driver.HandleNone
	if at.Type != cuda.LocationHost && sys.Attribute(driver.Device(d.Ordinal()), driver.AttrHandlePosixFD) > 0 {
		types = driver.HandlePosixFD
	}
	why, err := noFabric(d, at)
	switch {
	case err != nil:
		return types, fmt.Errorf("%s: %w", op, err)
	case why == nil:
		return types | driver.HandleFabric, nil
	case types == driver.HandleNone:
		return types, fmt.Errorf("%s: memory on %v has no handle type to share it by: %w", op, at, why)
	}
	sys.Config.Log.Warn("cuvmm: memory is made with descriptors alone, since fabric handles do not work here", "device", d.String(), "location", at.String(), "reason", why)
	return types, nil
}

// noFabric says why memory at a location cannot have a fabric handle. An error
// is what says nothing of that.
func noFabric(d *cuda.Device, at cuda.Location) (why, err error) {
	if at.Type != cuda.LocationDevice {
		return core.Error(core.Failure{Op: "vmm.PreferFabric", Kind: core.NotSupported, Asked: fmt.Sprintf("a fabric handle of memory on %v", at),
			Hint: "memory of a device has fabric handles"}), nil
	}
	home, err := d.System().Device(at.ID)
	if err != nil {
		return nil, err
	}
	p, err := home.Probe()
	if err != nil || p.Fabric {
		return nil, err
	}
	// By the driver's code: other answers of it are of the same kind.
	var refused *cuda.Error
	if errors.As(p.FabricError, &refused) {
		if c := driver.Result(refused.Code); c == driver.NotPermitted || c == driver.NotSupported {
			return p.FabricError, nil
		}
	}
	return nil, p.FabricError
}
