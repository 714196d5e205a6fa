//go:build !linux

package host

// Uptime returns 0: nothing is shared between processes of this system.
func Uptime() uint64 { return 0 }
