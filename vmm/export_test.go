package vmm

import "time"

// SetFabricTrialAge changes how long the outcome of PreferFabric's trial is
// believed.
func SetFabricTrialAge(d time.Duration) (restore func()) {
	before := fabricTrialAge
	fabricTrialAge = d
	return func() { fabricTrialAge = before }
}

// Look is what Mapping.Host does once it holds the mapping.
func Look(m *Mapping) error {
	v, err := m.look("test")
	if err == nil {
		m.m.res.views.close(v)
	}
	return err
}
