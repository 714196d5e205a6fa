//go:build !linux || !(amd64 || arm64)

package osmem

// Mapped is false where the system cannot be asked.
func Mapped(addr, n uint64) bool { return false }
