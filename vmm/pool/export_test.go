package pool

import "time"

// SetMoment changes how long a miss waits at least for other streams to pass, and
// returns a function that changes it back.
func SetMoment(d time.Duration) (undo func()) {
	least, most := leastMoment, mostMoment
	leastMoment, mostMoment = d, max(d, most)
	return func() { leastMoment, mostMoment = least, most }
}

// SetUpkeep changes how soon the pool's upkeep begins, and returns a function that
// changes it back.
func SetUpkeep(d time.Duration) (undo func()) {
	before := firstUpkeep
	firstUpkeep = d
	return func() { firstUpkeep = before }
}
