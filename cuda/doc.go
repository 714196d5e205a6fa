// Package cuda provides the driver as Go objects: the System, its devices, streams,
// events, graphs and kernels, copies, pinned host memory, and the errors that every
// other package returns.
//
// [Open] opens the real driver. The software driver is in package sim, and
// package auto chooses between the two.
//
// # Goroutines
//
// Everything is safe for use by any goroutine at any time, unless its
// documentation says otherwise. The driver keeps contexts and capture modes for each
// thread; every call switches and restores them.
//
// Objects are made by functions and methods. A nil object and a zero value return
// [ErrInvalidArgument], as an argument and as the receiver of a method. Do not
// call a method that returns no error on either.
//
// # Closing
//
// The caller closes every object. Close is idempotent, except for the System of the
// real driver: the process has one, and it ends when Close was called as often as
// [Open]. Operations on a closed object return [ErrClosed]. The garbage collector
// releases nothing: an address is a number in kernels and graphs that Go cannot see,
// so an object that is lost without Close is logged, and its memory leaks.
package cuda
