//go:build linux && (amd64 || arm64)

package osmem

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Window reserves size bytes of this process's address space in which every
// access faults, until pages are placed there. It is never given back. The
// base is a multiple of align, a power of two.
func Window(size, align uint64) (base uint64, err error) {
	addr, _, errno := unix.Syscall6(unix.SYS_MMAP, 0, uintptr(size+align), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, ^uintptr(0), 0)
	if errno != 0 {
		return 0, fmt.Errorf("reserve an address window of %#x bytes: %w", size, errno)
	}
	return (uint64(addr) + align - 1) &^ (align - 1), nil
}

// Commit puts n bytes of zeroed memory, whole pages, at an address of a window. Clear
// frees them.
func Commit(addr, n uint64) ([]byte, error) {
	if err := roomForMappings(); err != nil {
		return nil, err
	}
	p, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(addr), uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		return nil, fmt.Errorf("commit %#x bytes of the address window at %#x: %w", n, addr, errno)
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), n), nil
}

// Clear makes every access to [addr, addr+n) of a window fault again. After an error
// the old content is still there.
func Clear(addr, n uint64) error {
	cutMappings()
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(addr), uintptr(n), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		return fmt.Errorf("clear %#x bytes of the address window at %#x: %w", n, addr, errno)
	}
	return nil
}

// Protect changes what the CPU may do with pages placed at [addr, addr+n).
func Protect(addr, n uint64, access Access) error {
	if err := roomForMappings(); err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_MPROTECT, uintptr(addr), uintptr(n), uintptr(prot(access)))
	if errno != 0 {
		return fmt.Errorf("protect %#x bytes of the address window at %#x: %w", n, addr, errno)
	}
	return nil
}

// place maps a file over part of a window.
func place(fd int, addr, off, n uint64, access Access) error {
	if err := roomForMappings(); err != nil {
		return err
	}
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(addr), uintptr(n), uintptr(prot(access)),
		unix.MAP_SHARED|unix.MAP_NORESERVE|unix.MAP_FIXED, uintptr(fd), uintptr(off))
	if errno != 0 {
		return fmt.Errorf("place %#x bytes in the address window at %#x: %w", n, addr, errno)
	}
	return nil
}

func prot(a Access) int {
	switch a {
	case AccessRead:
		return unix.PROT_READ
	case AccessReadWrite:
		return unix.PROT_READ | unix.PROT_WRITE
	}
	return unix.PROT_NONE
}
