package handles

import "time"

// Guard bounds the waits of tests that must not hang. No test passes or fails by
// how long something takes.
const Guard = 2 * time.Minute

// What a busy machine takes for an honest peer is no error of it.
func init() { defaultTimeout = Guard }

// SetTimeout changes the limit of a connection that is at rest.
func SetTimeout(c *Conn, d time.Duration) { c.limits.Timeout = d }

// Expire ends a lease as its deadline does.
func Expire(l *Lease) { l.expire() }

// DropKept closes the descriptors that are kept for the driver's sake, so that a
// benchmark finds the driver as a program does that shares nothing yet.
func DropKept() {
	kept.mu.Lock()
	defer kept.mu.Unlock()
	kept.drop()
}
