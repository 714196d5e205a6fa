package host

import (
	"time"

	"golang.org/x/sys/unix"
)

// ThreadID names the calling operating system thread.
func ThreadID() int { return unix.Gettid() }

// Pause sleeps for less than time.Sleep can, whose timers an idle process rounds up to a
// millisecond. It occupies a thread.
func Pause(d time.Duration) {
	t := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&t, nil) // a signal that ends it early does no harm
}
