// Package csrc is the real driver: the interface of internal/driver over the
// vendor's libcuda.so.1, which is opened at run time. Nothing of CUDA is needed
// to build it, and only the driver to run it.
//
// # Building
//
// The package's C is built on Linux, on amd64 and arm64, with cgo. Everywhere
// else, and with the build tag cuvmm_nocgo, [Open] answers an [OpenError] that
// says so, and the rest of the library runs on the software driver.
//
// # Opening
//
// [Open] loads the library that [Options] name, or libcuda.so.1 as the loader
// finds it, or the first in the folders where containers and distributions put
// it. The first that is a usable driver is taken. Where none is, the error says
// for each what was wrong and what to do; its reason is [NotFound] only where
// no library lies anywhere, which is when a program may turn to the software
// driver with a good conscience.
//
// A library that is built with Go is refused without being loaded, since a
// process cannot have two Go runtimes. If it is the software driver's own libcuda
// (cmd/libcuda), the reason is [SoftwareDriver], and nothing behind it is tried.
//
// Each entry point is taken by cuGetProcAddress in the CUDA version that its
// declaration was written for (both stand in internal/driver's table), so a
// later driver gives the form that is declared.
// Of an older driver a form that came later is not asked for, since it would
// answer with an earlier one, whose parameters are others.
// The variants whose default stream is the legacy one are asked for. A missing
// entry point is no failure to open: calling it answers
// driver.MissingEntryPoint, and Has tells beforehand.
//
// The library is never closed, and opening it again gives the same [Driver].
//
// # A call
//
// A call is one crossing into C and allocates nothing in Go. On the C side
// (CUVMM_CALL in api.h) it
//
//   - sets the thread's stream capture mode to relaxed, so that no call of this
//     library breaks anybody's capture. The form of Foreign leaves it out;
//   - makes the call's context current, where it takes one and another is
//     current;
//   - makes the one driver call;
//   - restores both.
//
// So any goroutine may call anything, on any thread, and a thread that belongs
// to someone else is left as it was found, also where the call fails. cuInit
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
// [Driver.NVML] answers how a GPU stands with its fabric. The library is
// libnvidia-ml.so.1, opened when it is first asked: the one that [NVMLEnv]
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
// with are in internal/cbench.
package csrc
