package sealedfile

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// New makes a file with the contents, and returns its descriptor, closed on exec. The caller closes it.
func New(name string, contents []byte) (fd int, err error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err = unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // kernels before 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, os.NewSyscallError("memfd_create", err)
	}
	for rest := contents; err == nil && len(rest) > 0; {
		var n int
		n, err = unix.Write(fd, rest)
		rest = rest[max(n, 0):]
		if errors.Is(err, unix.EINTR) {
			err = nil
		}
	}
	err = os.NewSyscallError("write", err)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		err = os.NewSyscallError("fcntl F_ADD_SEALS", err)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// Read returns the contents of a file that New made in any process, if they are at most so many bytes.
// The descriptor stays the caller's.
func Read(fd int, most int) ([]byte, error) {
	// First the seals: only files in memory have any, so nothing here waits for another file system.
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		return nil, fmt.Errorf("%w: descriptor %d", ErrNotSealed, fd)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if stat.Size > int64(most) {
		return nil, fmt.Errorf("a file of %d bytes, where %d are the most", stat.Size, most)
	}
	contents := make([]byte, stat.Size)
	for at := 0; at < len(contents); {
		n, err := unix.Pread(fd, contents[at:], int64(at))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil, os.NewSyscallError("pread", err)
		case n == 0:
			return nil, io.ErrUnexpectedEOF
		default:
			at += n
		}
	}
	return contents, nil
}
