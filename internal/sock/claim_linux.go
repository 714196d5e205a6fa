package sock

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Same reports whether both are one directory.
func (d *Dir) Same(other *Dir) bool { return d.device == other.device && d.inode == other.inode }

// ReadFile returns at most most bytes of a regular file in the directory, without following a
// link. A file that does not exist is empty.
func (d *Dir) ReadFile(name string, most int) ([]byte, error) {
	n, err := unix.Openat(int(d.f.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(n), name)
	defer func() { _ = f.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(n, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != d.Owner {
		return nil, fmt.Errorf("%s is not a file of the directory's owner", name)
	}
	return io.ReadAll(io.LimitReader(f, int64(most)))
}

// WriteFile replaces a file in the directory as a whole. The caller has the directory's lock.
func (d *Dir) WriteFile(name string, b []byte) error {
	made := name + ".new"
	n, err := unix.Openat(int(d.f.Fd()), made, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "open", Path: made, Err: err}
	}
	f := os.NewFile(uintptr(n), made)
	_, err = f.Write(b)
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err == nil {
		if err = unix.Renameat(int(d.f.Fd()), made, int(d.f.Fd()), name); err != nil {
			err = &os.PathError{Op: "rename", Path: made, Err: err}
		}
	}
	if err != nil {
		_ = d.Remove(made)
	}
	return err
}

// Self identifies this process.
func Self() (ProcessID, error) {
	var ns unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &ns); err != nil {
		return ProcessID{}, &os.PathError{Op: "stat", Path: "/proc/self/ns/pid", Err: err}
	}
	pid := os.Getpid()
	start, err := Started(pid)
	return ProcessID{PID: uint32(pid), Namespace: ns.Ino, Start: start}, err
}

// Open opens a process of this process's pid namespace. It returns nil if the process has
// ended, even if its parent has not collected it.
func (id ProcessID) Open() (*Process, error) {
	n, err := unix.PidfdOpen(int(id.PID), unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, nil // no process has that number, or only a thread
	}
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	p := &Process{os.NewFile(uintptr(n), "process")}
	// The descriptor names the process that has the number now; its start tells them apart.
	start, err := Started(int(id.PID))
	if err == nil && start == id.Start && !hasEnded(n) {
		return p, nil
	}
	_ = p.Close()
	if os.IsNotExist(err) {
		err = nil
	}
	return nil, err
}

// Started returns when a process began, in clock ticks since the system's start.
func Started(pid int) (uint64, error) {
	path := fmt.Sprintf("/proc/%d/stat", pid)
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The command's name, in parentheses, may contain anything.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const start = 22 - 3 // the fields are counted from 1, and the first behind the name is 3
	if len(fields) <= start {
		return 0, fmt.Errorf("%s has %d fields behind the name", path, len(fields))
	}
	return strconv.ParseUint(fields[start], 10, 64)
}
