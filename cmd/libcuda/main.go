// Libcuda is the software driver as the vendor's library, for programs in any
// language:
//
//	go build -buildmode=c-shared -o libcuda.so.1 ./cmd/libcuda
//	LD_LIBRARY_PATH=$PWD ./program
//
// With LD_PRELOAD in place of LD_LIBRARY_PATH, a program that opens the vendor's library by
// its name finds this one only if it has that name inside, too:
//
//	go build -buildmode=c-shared -ldflags='-extldflags=-Wl,-soname,libcuda.so.1' -o libcuda.so.1 ./cmd/libcuda
//
// It exports the entry points that internal/driver's table lists, those for the
// thread's stack of contexts, cuGetProcAddress, cuGetErrorName and
// cuGetErrorString, and keeps the real driver's rules as cuda/sim does. What
// belongs to a thread (contexts, the capture mode) belongs to the caller's. It also has
// calls that existing programs look up and cuvmm never makes (composed.c, clients.c);
// docs/testing.md lists them.
//
// The environment describes the machine: CUVMM_SIM and CUVMM_SIM_FAULTS, as
// cuda/sim documents them; CUDA_VISIBLE_DEVICES hides devices by their numbers; and
// CUVMM_REPORT names a file for what the driver saw. Processes whose machine has a folder are on one
// machine, in whatever language: a Go program that finds this library in place
// of the vendor's does not open it, but joins the machine with its own software
// driver.
//
// A kernel runs if a Go function implements it, as for the library's own; loading a
// module that has others fails with an explanation, in the log that the caller gives or
// else on standard error. A child of fork gets CUDA_ERROR_NOT_INITIALIZED from every
// call, and a host function CUDA_ERROR_NOT_PERMITTED from most, as from the vendor's
// driver. Entry points for the per-thread default stream (flag 2 of cuGetProcAddress, and
// names that end in _ptsz) are missing; the handle CU_STREAM_PER_THREAD works.
package main

import (
	"fmt"
	"os"
)

// A shared library's main is never called.
func main() {
	fmt.Fprintln(os.Stderr, "libcuda is a library: go build -buildmode=c-shared -o libcuda.so.1 ./cmd/libcuda")
	os.Exit(2)
}
