package sock

import (
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// ListenAbstract listens under a name in Linux's abstract space, which is in no folder and
// free again when the listener is closed, however its process ends. Processes of other users
// may connect, too: see OfThisUser.
func ListenAbstract(name string) (*net.UnixListener, error) {
	return net.ListenUnix("unix", &net.UnixAddr{Name: "@" + name, Net: "unix"})
}

// DialAbstract connects to it.
func DialAbstract(name string) (*net.UnixConn, error) {
	return net.DialUnix("unix", nil, &net.UnixAddr{Name: "@" + name, Net: "unix"})
}

// OfThisUser reports whether the other end is a process of this process's user, or of root.
func OfThisUser(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var cred *unix.Ucred
	e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return e == nil && err == nil && (cred.Uid == 0 || int(cred.Uid) == os.Geteuid())
}
