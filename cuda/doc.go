// Package cuda is the ground of the library: the driver's System, its devices,
// streams and events, copies, pinned host memory, and the errors that every
// other package answers with.
//
// [Open] opens the real driver. The software driver is in package sim, and
// package auto chooses between the two.
//
// # Goroutines
//
// Everything is safe for use by any goroutine at any time, unless its
// documentation says otherwise: contexts and capture modes, which the driver
// keeps per thread, are switched and restored inside every call.
//
// # Closing
//
// Every object is closed by its owner, once or more often: the second Close
// does nothing. The one exception is the System of the real driver, which is
// one for the process and counted: it ends when Close was called as often as
// [Open]. After it, operations answer [ErrClosed]. The garbage collector
// gives nothing back: an address is a number in kernels and graphs that Go
// cannot see, so an object that is lost without Close is reported through the
// logger and stays.
package cuda
