// Package sock provides packets with file descriptors between two processes of one
// machine, and the private directories of their sockets: the system calls, without any
// policy.
//
// A socket is reached through its open directory (/proc/self/fd), not through
// the path that led there. So the directory that was checked is the one that is used,
// even if the path changes meanwhile, and no path is too long for a socket's address.
//
// On other systems than Linux the package compiles, and everything returns an
// error that matches errors.ErrUnsupported.
package sock

import "errors"

// MaxFDs is the kernel's limit of descriptors in one packet.
const MaxFDs = 253

// ErrNoSocket reports a descriptor that is not a connected socket of
// packets.
var ErrNoSocket = errors.New("not a connected Unix socket of packets (SOCK_SEQPACKET)")

// Credentials are those of a process when it connected, or began to listen.
type Credentials struct {
	PID      int
	UID, GID uint32
}

// ProcessID identifies a process for as long as the machine runs, unlike a pid alone.
type ProcessID struct {
	PID uint32
	// Namespace is the inode of the pid namespace that PID counts in, and Start when the
	// process began, in the system's clock ticks.
	Namespace, Start uint64
}

// Entry identifies the file of a name in a directory, as opposed to a later file of the
// same name.
type Entry struct {
	Device, Inode uint64
	Owner         uint32
	Socket        bool
}
