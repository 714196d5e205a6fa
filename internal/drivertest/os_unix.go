//go:build unix

package drivertest

import "golang.org/x/sys/unix"

// duplicate is another descriptor of the same file, closed on exec.
func duplicate(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) }

func closeDescriptor(fd int) error { return unix.Close(fd) }

func closedOnExec(fd int) (bool, error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return flags&unix.FD_CLOEXEC != 0, err
}

func sizeOf(fd int) (int64, error) {
	var stat unix.Stat_t
	err := unix.Fstat(fd, &stat)
	return stat.Size, err
}

// pageable is n bytes of ordinary memory that the Go collector does not own.
func pageable(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

func freePageable(b []byte) error { return unix.Munmap(b) }
