package pool

import "time"

// SetMostLag changes how long a miss waits for other streams, and returns a function
// that changes it back.
func SetMostLag(d time.Duration) (undo func()) {
	before := mostLag
	mostLag = d
	return func() { mostLag = before }
}

// SetUpkeep changes how soon the pool's upkeep begins, and returns a function that
// changes it back.
func SetUpkeep(d time.Duration) (undo func()) {
	before := firstUpkeep
	firstUpkeep = d
	return func() { firstUpkeep = before }
}
