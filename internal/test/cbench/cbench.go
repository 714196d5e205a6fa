//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package cbench

/*
#cgo LDFLAGS: -ldl
#cgo noescape cbench_empty
#cgo nocallback cbench_empty
#cgo noescape cbench_capture_steps
#cgo nocallback cbench_capture_steps
#cgo noescape cbench_granularity_steps
#cgo nocallback cbench_granularity_steps
#include <stdlib.h>
#include "cbench.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Available reports whether this build has the C side.
const Available = true

// EmptyLoop times n crossings into C and back.
func EmptyLoop(n int) time.Duration {
	start := time.Now()
	for range n {
		C.cbench_empty()
	}
	return time.Since(start)
}

// Library is a driver library that this package opened for itself. It is never
// closed.
type Library struct{ c *C.cbench_library }

// Open opens a library by its path. It calls nothing in it: the caller that opens the
// driver beside it has called cuInit.
func Open(path string) (*Library, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	const size = 512
	reason := (*C.char)(C.calloc(1, size))
	defer C.free(unsafe.Pointer(reason))
	l := C.cbench_open(name, reason, size)
	if l == nil {
		return nil, fmt.Errorf("opening %s for C loops: %s", path, C.GoString(reason))
	}
	return &Library{l}, nil
}

func timed(t C.cbench_time) (time.Duration, driver.Result) {
	return time.Duration(t.ns), driver.Result(t.result)
}

// CaptureSteps times n calls of cuStreamIsCapturing on s, each with the steps
// that csrc takes around a call: the relaxed mode, c current, and back.
func (l *Library) CaptureSteps(c driver.Context, s driver.Stream, n int) (time.Duration, driver.Result) {
	return timed(C.cbench_capture_steps(l.c, C.uintptr_t(c), C.uintptr_t(s), C.uint64_t(n)))
}

// GranularitySteps times n calls of cuMemGetAllocationGranularity, which needs
// no context, each in the relaxed mode.
func (l *Library) GranularitySteps(d driver.Device, n int) (time.Duration, driver.Result) {
	return timed(C.cbench_granularity_steps(l.c, C.int32_t(d), C.uint64_t(n)))
}

// VMMCycle times rounds of reserve, create, map, set access, unmap, release
// and free of size bytes on d.
func (l *Library) VMMCycle(d driver.Device, size uint64, rounds int) (time.Duration, driver.Result) {
	return timed(C.cbench_vmm_cycle(l.c, C.int32_t(d), C.uint64_t(size), C.uint64_t(rounds)))
}

// GrowLoop reserves once and grows by steps, each a list of chunk sizes:
// creates and maps every chunk, and sets access once a step. The time is that
// of the growth alone.
func (l *Library) GrowLoop(d driver.Device, reserve uint64, steps [][]uint64) (time.Duration, driver.Result) {
	var sizes, chunks []uint64
	for _, s := range steps {
		sizes = append(sizes, s...)
		chunks = append(chunks, uint64(len(s)))
	}
	return timed(C.cbench_grow(l.c, C.int32_t(d), C.uint64_t(reserve),
		(*C.uint64_t)(unsafe.SliceData(sizes)), (*C.uint64_t)(unsafe.SliceData(chunks)), C.uint64_t(len(steps))))
}

// CopyLoop times rounds of copying n bytes from src, host memory that Go does
// not own, to dst in chunks, and of waiting for the stream after each.
func (l *Library) CopyLoop(c driver.Context, s driver.Stream, dst driver.Ptr, src unsafe.Pointer, n, chunk uint64, rounds int) (time.Duration, driver.Result) {
	return timed(C.cbench_copy(l.c, C.uintptr_t(c), C.uintptr_t(s), C.uint64_t(dst), src,
		C.uint64_t(n), C.uint64_t(chunk), C.uint64_t(rounds)))
}

// Ring is threads with two pieces of pinned memory each, into which they read a file in turn
// while the other is copied to a device.
type Ring struct{ c *C.cbench_ring }

// NewRing makes the memory.
func (l *Library) NewRing(c driver.Context, threads int, piece uint64) (*Ring, driver.Result) {
	var r C.cbench_result
	ring := C.cbench_ring_make(l.c, C.uintptr_t(c), C.uint32_t(threads), C.uint64_t(piece), &r)
	return &Ring{ring}, driver.Result(r)
}

// Load times the copy of a file's first n bytes to dst, through the page cache or with O_DIRECT.
// A read that fails has -errno for a result.
func (r *Ring) Load(path string, direct bool, n uint64, dst driver.Ptr) (time.Duration, driver.Result) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	past := C.int(0)
	if direct {
		past = 1
	}
	return timed(C.cbench_ring_load(r.c, name, past, C.uint64_t(n), C.uint64_t(dst)))
}

// Free frees the memory.
func (r *Ring) Free() { C.cbench_ring_free(r.c) }

// CaptureHolder captures a stream on a thread of its own, as another library
// in the process would. The zero value is ready for Start. It is for one
// goroutine at a time.
type CaptureHolder struct{ c *C.cbench_holder }

// Start makes c current on a new thread, begins capturing s there in the mode,
// and returns what that gave. Whatever it was, the thread stays until End.
func (h *CaptureHolder) Start(l *Library, c driver.Context, s driver.Stream, m driver.CaptureMode) (driver.Result, error) {
	if h.c != nil {
		return 0, errors.New("the holder has a capture already: end it first")
	}
	var begin C.cbench_result
	h.c = C.cbench_hold(l.c, C.uintptr_t(c), C.uintptr_t(s), C.int32_t(m), &begin)
	if h.c == nil {
		return 0, errors.New("no thread for the capture")
	}
	return driver.Result(begin), nil
}

// End ends the capture, destroys its graph, and joins the thread. It returns
// what ending the capture gave: Success for one that was not broken, and where
// Start began none.
func (h *CaptureHolder) End() driver.Result {
	if h.c == nil {
		return driver.Success
	}
	r := driver.Result(C.cbench_let_go(h.c))
	h.c = nil
	return r
}
