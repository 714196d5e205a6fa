package host

import "golang.org/x/sys/unix"

// Uptime returns for how many nanoseconds the machine has run, which is the same for all its
// processes.
func Uptime() uint64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return 0
	}
	return uint64(t.Nano())
}
