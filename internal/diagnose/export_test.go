package diagnose

import "time"

// SetPatience changes how long NVML is waited for.
func SetPatience(d time.Duration) (restore func()) {
	before := patience
	patience = d
	return func() { patience = before }
}
