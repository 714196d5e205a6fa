package sock

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Dir is an open directory.
type Dir struct {
	f *os.File
	// Owner and Mode (the permission bits) are as they were when it was opened.
	Owner         uint32
	Mode          os.FileMode
	device, inode uint64
}

// OpenDir opens a directory that is not a symbolic link. With a mode it makes the directory first,
// if there is none. A directory that this process may enter and not read has no lock for it.
func OpenDir(path string, make os.FileMode) (*Dir, error) {
	if make != 0 {
		err := unix.Mkdir(path, 0o700)
		if err == nil && make != 0o700 {
			err = unix.Chmod(path, uint32(make)) // whatever the umask is
		}
		if err != nil && err != unix.EEXIST {
			return nil, &os.PathError{Op: "mkdir", Path: path, Err: err}
		}
	}
	open := func(how int) (n int, err error) {
		for {
			n, err = unix.Open(path, how|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
			if err != unix.EINTR {
				return n, err
			}
		}
	}
	n, err := open(unix.O_RDONLY)
	if errors.Is(err, unix.EACCES) {
		n, err = open(unix.O_PATH)
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(n, &st); err != nil {
		unix.Close(n)
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return &Dir{f: os.NewFile(uintptr(n), path), Owner: st.Uid, Mode: os.FileMode(st.Mode & 0o7777), device: st.Dev, inode: st.Ino}, nil
}

// NoDir reports whether OpenDir failed because the path is something else: a
// file, or a symbolic link.
func NoDir(err error) bool { return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) }

// through returns the path of a name by way of the open directory.
func (d *Dir) through(name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", d.f.Fd(), name) }

// named returns an error of package net with the path that the caller knows in place of the
// way through the directory.
func (d *Dir) named(err error, name string) error {
	var op *net.OpError
	if errors.As(err, &op) {
		op.Addr = &net.UnixAddr{Name: filepath.Join(d.f.Name(), name), Net: op.Net}
	}
	return err
}

// Lookup identifies the file of a name. It does not follow links.
func (d *Dir) Lookup(name string) (Entry, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(d.f.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return Entry{}, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	return Entry{Device: st.Dev, Inode: st.Ino, Owner: st.Uid, Socket: st.Mode&unix.S_IFMT == unix.S_IFSOCK}, nil
}

// Remove removes a name that is not a directory.
func (d *Dir) Remove(name string) error {
	if err := unix.Unlinkat(int(d.f.Fd()), name, 0); err != nil {
		return &os.PathError{Op: "unlink", Path: name, Err: err}
	}
	return nil
}

// TryLock acquires the directory's lock, which cooperating processes hold
// while they make and remove names, unless another process has it.
func (d *Dir) TryLock() (bool, error) {
	switch err := unix.Flock(int(d.f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
	case nil:
		return true, nil
	case unix.EWOULDBLOCK, unix.EINTR:
		return false, nil
	default:
		return false, &os.PathError{Op: "flock", Path: d.f.Name(), Err: err}
	}
}

// Unlock releases the lock.
func (d *Dir) Unlock() { _ = unix.Flock(int(d.f.Fd()), unix.LOCK_UN) }

// Close closes the directory.
func (d *Dir) Close() error { return d.f.Close() }
