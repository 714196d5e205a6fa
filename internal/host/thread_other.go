//go:build !linux

package host

// ThreadID returns 0: threads have no readable number here, and all count as one.
func ThreadID() int { return 0 }
