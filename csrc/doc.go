// Package csrc implements the real driver: the interface of internal/driver over the
// vendor's libcuda.so.1, which is opened at run time. Building it
// needs nothing of CUDA, and running it only the driver.
//
// # Building
//
// The package's C is built on Linux, on amd64 and arm64, with cgo. Everywhere
// else, and with the build tag cuvmm_nocgo, [Open] returns an [OpenError] that
// says so, and the rest of the library runs on the software driver.
//
// # Opening
//
// [Open] loads the library that [Options] name, or libcuda.so.1 as the loader
// finds it, or the first in the folders where containers and distributions put
// it. It takes the first that is a usable driver. If none is, the error says what
// was wrong with each and what to do. Its reason is [NotFound] only if there is no
// library in any place, so that a program can use the software driver without hiding
// a broken installation.
//
// A library that is built with Go is refused without being loaded, since a
// process cannot have two Go runtimes. If it is the software driver's own libcuda
// (cmd/libcuda), the reason is [SoftwareDriver], and nothing behind it is tried.
//
// Open takes each entry point from cuGetProcAddress in the CUDA version that its
// declaration was written for (internal/driver's table has both), so a later driver
// returns the declared form. It requests no form that is newer than the driver, since
// an older driver would return an earlier form, which has other parameters. It takes the
// variants whose default stream is the legacy one. A missing entry point does not make
// opening fail: calling it returns driver.MissingEntryPoint, and Has reports it beforehand.
//
// The library is never closed, and opening it again returns the same [Driver].
//
// # A call
//
// A call is one crossing into C and allocates nothing in Go. On the C side
// (CUVMM_CALL in api.h) it
//
//   - sets the thread's stream capture mode to relaxed, so that no call of this
//     library breaks another library's capture. The form of Foreign skips this;
//   - makes the call's context current, if it takes one and another is
//     current;
//   - makes the one driver call;
//   - restores both.
//
// So any goroutine may call anything, on any thread, and a thread that belongs
// to another library is left as it was found, even if the call fails. cuInit
// and cuDriverGetVersion are called plainly. A call that blocks in the driver
// (a synchronize, cuMemFree) blocks its thread and cannot be cancelled; other
// goroutines run on.
//
// Two things cannot be left as found: a context that is destroyed while it is
// the thread's current one, as CtxDestroy on that very context does; and where
// the context from before is gone when it is to be restored, the thread is left
// with none rather than with ours.
//
// Descriptors that the driver makes are closed on exec, and none is made while
// the process forks.
//
// # NVML
//
// The driver reports the state of a GPU's fabric through NVML. The library is
// libnvidia-ml.so.1, opened at its first use: the one that [NVMLEnv]
// names, or as the driver is searched, or beside the driver. It is initialised
// for each question and shut down after it, and never closed.
//
// # Reading the source
//
// csrc.h is the border: one C function for each method of internal/driver's
// interfaces, named after it. Most are generated from the table there (calls.c
// and calls.go; entries.h declares the entry points). The .c and .go files
// written by hand come in pairs by subject. api.h holds the steps around a call;
// the layouts of the structs are asserted there, so a build for another machine
// proves them. The tests run against testdata/fakecuda, a library that records
// what reaches it, and testdata/fakenvml; the C loops that benchmarks compare
// with are in internal/test/cbench.
package csrc
