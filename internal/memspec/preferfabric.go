package memspec

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// FabricTrialAge is how long the result of a trial is used. Fabric handles can start to
// work (the fabric's services start, a channel appears) and cease to. Tests shorten it.
var FabricTrialAge = 10 * time.Second

// preferFabric returns the handle types that PreferFabric resolves to for memory at a
// location.
func preferFabric(op string, d *cuda.Device, at cuda.Location) (HandleTypes, error) {
	sys := core.SystemOf(d)
	var types HandleTypes
	if at.Type != cuda.LocationHost && sys.Attribute(driver.Device(d.Ordinal()), driver.AttrHandlePosixFD) > 0 {
		types = PosixFD
	}
	type trialOf struct{ at cuda.Location }
	why, _ := sys.Cached(trialOf{at}, FabricTrialAge, func() any { return noFabric(d, at) }).(error)
	switch {
	case why == nil:
		return types | Fabric, nil
	case types == 0:
		return 0, fmt.Errorf("%s: memory on %v has no handle type to share it by: %w", op, at, why)
	}
	// Once for each reason.
	type said struct {
		at   cuda.Location
		call string
		code cuda.Code
	}
	var refused cuda.Error
	if e := (*cuda.Error)(nil); errors.As(why, &e) {
		refused = *e
	}
	sys.Cached(said{at, refused.Call, refused.Code}, math.MaxInt64, func() any {
		sys.Config.Log.Warn("cuvmm: memory is made with descriptors alone, since fabric handles do not work here",
			"device", d.String(), "location", at.String(), "reason", why)
		return nil
	})
	return types, nil
}

// noFabric returns why memory at a location cannot have a fabric handle now, nil
// if it can.
func noFabric(d *cuda.Device, at cuda.Location) error {
	const op = "vmm.PreferFabric"
	if at.Type != cuda.LocationDevice {
		return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: fmt.Sprintf("a fabric handle of memory on %v", at),
			Hint: "memory of a device has fabric handles"})
	}
	home, err := d.System().Device(at.ID)
	if err != nil {
		return err
	}
	sys := core.SystemOf(home)
	if _, err := core.ContextOf(op, home); err != nil {
		return err
	}
	prop := driver.AllocationProp{
		Type:                 driver.AllocationPinned,
		Location:             driver.Location{Type: driver.LocationDevice, ID: int32(at.ID)},
		RequestedHandleTypes: driver.HandleFabric,
	}
	size, r := sys.Granularity(prop, driver.GranularityMinimum)
	call := driver.CallMemGetAllocationGranularity
	if r == driver.Success {
		call, r, _ = phys.ProbeHandleType(op, sys, size, prop) // what it could not give back the reclaimer has
	}
	if r == driver.Success {
		return nil
	}
	return errs.New(errs.Failure{Op: op, Call: call, Result: r, Asked: fmt.Sprintf("a trial on %v", home), Err: diagnose.Creation(sys, prop, r)})
}
