package pool

import "time"

// SetMoment changes how long a miss waits for events, for tests.
func SetMoment(d time.Duration) { moment = d }
