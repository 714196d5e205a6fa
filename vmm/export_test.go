package vmm

import "time"

// SetFabricTrialAge changes how long the outcome of PreferFabric's trial is
// believed.
func SetFabricTrialAge(d time.Duration) (restore func()) {
	before := fabricTrialAge
	fabricTrialAge = d
	return func() { fabricTrialAge = before }
}
