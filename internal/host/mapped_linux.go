//go:build linux && (amd64 || arm64)

package host

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Mapped reports whether the process has something mapped at all of [addr,
// addr+n).
func Mapped(addr, n uint64) bool {
	page := PageSize()
	const addresses = 1 << 60 // more than a process has
	if n == 0 || addr >= addresses || n > addresses {
		return false
	}
	lo, hi := addr/page*page, (addr+n+page-1)/page*page
	// The result has a byte for each page, so large ranges are queried in pieces.
	var in [4096]byte
	for step := page * uint64(len(in)); lo < hi; lo += step {
		part := min(step, hi-lo)
		if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(lo), uintptr(part), uintptr(unsafe.Pointer(&in[0]))); errno != 0 {
			return false
		}
	}
	return true
}
