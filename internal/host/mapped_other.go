//go:build !linux || !(amd64 || arm64)

package host

// Mapped returns false: the system has no such query.
func Mapped(addr, n uint64) bool { return false }
