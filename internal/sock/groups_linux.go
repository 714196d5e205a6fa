package sock

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Groups returns all groups of the process at the other end: the one of its credentials, and those that
// it had beside that when it connected.
func (c *Conn) Groups() (all []uint32, err error) {
	cred, err := c.Peer()
	if err != nil {
		return nil, err
	}
	size := uint32(64 * 4)
	for {
		all = make([]uint32, size/4+1)
		var failed error
		if e := c.raw.Control(func(s uintptr) {
			_, _, n := unix.Syscall6(unix.SYS_GETSOCKOPT, s, unix.SOL_SOCKET, unix.SO_PEERGROUPS, uintptr(unsafe.Pointer(&all[0])), uintptr(unsafe.Pointer(&size)), 0)
			if n != 0 {
				failed = n
			}
		}); e != nil {
			return nil, e
		}
		switch failed {
		case nil:
			return append(all[:size/4:size/4], cred.GID), nil
		case unix.ERANGE: // size is what they need
		default:
			return nil, os.NewSyscallError("getsockopt SO_PEERGROUPS", failed)
		}
	}
}
