package diagnose

import "time"

// SetPatience changes how long NVML is waited for.
func SetPatience(d time.Duration) (restore func()) {
	before := nvmlTimeout
	nvmlTimeout = d
	return func() { nvmlTimeout = before }
}
