// Package fd provides the system calls for file descriptors as numbers, without owners.
//
// On other systems than Linux the package compiles, and everything returns an
// error that matches errors.ErrUnsupported.
package fd
