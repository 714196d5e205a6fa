package drivertest

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

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

// socketPair is two ends over which descriptors can be passed.
func socketPair() (near, far *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, err
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	return os.NewFile(uintptr(fds[0]), "near end"), os.NewFile(uintptr(fds[1]), "far end"), nil
}

func sendDescriptor(over *os.File, fd int) error {
	return unix.Sendmsg(int(over.Fd()), []byte{0}, unix.UnixRights(fd), nil, 0)
}

func receiveDescriptor(over *os.File) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(over.Fd()), make([]byte, 1), oob, 0)
	if err != nil {
		return 0, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) == 0 {
		return 0, errors.Join(errors.New("no descriptor came"), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return 0, err
	}
	unix.CloseOnExec(fds[0])
	return fds[0], nil
}

// memoryFile is n bytes that processes can share.
func memoryFile(n int64) (*os.File, error) {
	fd, err := unix.MemfdCreate("shared words", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "shared words")
	if err := f.Truncate(n); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// mapFile is n bytes of a memory file, until freePageable.
func mapFile(f *os.File, n int) ([]byte, error) {
	return unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// pageable is n bytes of ordinary memory that the Go collector does not own.
func pageable(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

func freePageable(b []byte) error { return unix.Munmap(b) }
