//go:build !linux

package host

import "time"

// ThreadID returns 0: threads have no readable number here, and all count as one.
func ThreadID() int { return 0 }

// Pause sleeps.
func Pause(d time.Duration) { time.Sleep(d) }
