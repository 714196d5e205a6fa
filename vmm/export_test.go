package vmm

import (
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// SetFabricTrialAge changes how long the outcome of PreferFabric's trial is
// believed.
func SetFabricTrialAge(d time.Duration) (restore func()) {
	before := fabricTrialAge
	fabricTrialAge = d
	return func() { fabricTrialAge = before }
}

// Look is what Mapping.Host does once it holds the mapping.
func Look(m *Mapping) error {
	v, err := m.m.look("test")
	if err == nil {
		m.m.res.views.close(v)
	}
	return err
}

// WhileRefused calls f between a RevokeAfter of a device that has returned and the
// change of the buffer that it follows.
func WhileRefused(b *Buffer, device int, f func()) {
	place := driver.Location{Type: driver.LocationDevice, ID: int32(device)}
	b.b.refuse(place, 1)
	defer b.b.refuse(place, -1)
	f()
}
