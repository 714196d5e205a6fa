package pool

import "time"

// SetMoment changes how long a miss waits for events, and answers what it was.
func SetMoment(d time.Duration) time.Duration {
	before := moment
	moment = d
	return before
}
