// Package sock has packets with file descriptors between two processes of one
// machine, and the private directories that their sockets lie in: the system
// calls, without any policy.
//
// A socket is reached through its open directory (/proc/self/fd), not through
// the path that led there: so what was checked is what is used, whoever
// changes the path meanwhile, and no path is too long for a socket's address.
//
// Elsewhere than on Linux the package compiles, and everything returns an
// error that matches errors.ErrUnsupported.
package sock

import "errors"

// MaxFDs is how many descriptors the kernel takes with one packet.
const MaxFDs = 253

// ErrNoSocket reports a descriptor that is no connected socket of
// packets.
var ErrNoSocket = errors.New("no connected Unix socket of packets (SOCK_SEQPACKET)")

// Credentials are those of a process when it connected, or began to listen.
type Credentials struct {
	PID      int
	UID, GID uint32
}

// Entry is what a name in a directory is. It tells a file from one that took
// its name later.
type Entry struct {
	Device, Inode uint64
	Owner         uint32
	Socket        bool
}
