package imex

import (
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// inspect reads the state of the channel's device file without opening it.
func (c *Channel) inspect() error {
	var st unix.Stat_t
	if err := unix.Stat(c.Path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: c.Path, Err: err}
	}
	c.Mode = fs.FileMode(st.Mode & 0o777)
	c.UID, c.GID = int(st.Uid), int(st.Gid)
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		c.Device = [2]int{int(unix.Major(st.Rdev)), int(unix.Minor(st.Rdev))}
	}
	// By the effective ids, as an open would be judged, and with the device
	// rules of the control group.
	c.Readable = unix.Faccessat(unix.AT_FDCWD, c.Path, unix.R_OK, unix.AT_EACCESS) == nil
	c.Writable = unix.Faccessat(unix.AT_FDCWD, c.Path, unix.W_OK, unix.AT_EACCESS) == nil
	return nil
}
