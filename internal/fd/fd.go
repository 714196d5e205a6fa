// Package fd has the system calls for file descriptors as numbers. Who owns
// which is not decided here.
//
// Elsewhere than on Linux the package compiles, and everything returns an
// error that matches errors.ErrUnsupported.
package fd
