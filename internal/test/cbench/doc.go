// Package cbench is what tests and benchmarks compare the library with, and
// what they cannot do in Go: the same work as plain C loops, one empty crossing
// into C, and callers of the driver on threads of their own.
//
// It opens the driver's library by itself and shares no code with csrc, so that
// a baseline is none of the library's own doing. Its loops leave the thread's
// capture mode alone, as a plain C program does, and end with everything given
// back, even if a call fails.
//
// Go allows no cgo in test files; only tests import this package.
package cbench
