//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_MemAllocManaged
#cgo nocallback cuvmm_MemAllocManaged
#cgo noescape cuvmm_MemAdvise
#cgo nocallback cuvmm_MemAdvise
#cgo noescape cuvmm_MemAdviseV1
#cgo nocallback cuvmm_MemAdviseV1
#cgo noescape cuvmm_MemPrefetchAsync
#cgo nocallback cuvmm_MemPrefetchAsync
#cgo noescape cuvmm_MemPrefetchAsyncV1
#cgo nocallback cuvmm_MemPrefetchAsyncV1
#cgo noescape cuvmm_MemPrefetchBatchAsync
#cgo nocallback cuvmm_MemPrefetchBatchAsync
#cgo noescape cuvmm_MemDiscardBatchAsync
#cgo nocallback cuvmm_MemDiscardBatchAsync
#cgo noescape cuvmm_MemDiscardAndPrefetchBatchAsync
#cgo nocallback cuvmm_MemDiscardAndPrefetchBatchAsync
#cgo noescape cuvmm_MemRangeGetAttribute
#cgo nocallback cuvmm_MemRangeGetAttribute
#cgo noescape cuvmm_MemRangeGetAttributes
#cgo nocallback cuvmm_MemRangeGetAttributes
#cgo noescape cuvmm_StreamAttachMemAsync
#cgo nocallback cuvmm_StreamAttachMemAsync
#include "csrc.h"
*/
import "C"

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

func (t *table) MemAllocManaged(c driver.Context, n uint64, flags driver.AttachFlags) (driver.Ptr, driver.Result) {
	v := C.cuvmm_MemAllocManaged(t.c, C.uintptr_t(c), C.uint64_t(n), C.uint32_t(flags))
	return driver.Ptr(v.value), driver.Result(v.result)
}

func (t *table) MemAdvise(c driver.Context, p driver.Ptr, n uint64, a driver.Advice, l driver.Location) driver.Result {
	return driver.Result(C.cuvmm_MemAdvise(t.c, C.uintptr_t(c), C.uint64_t(p), C.uint64_t(n), C.uint32_t(a), location(l)))
}

func (t *table) MemAdviseV1(c driver.Context, p driver.Ptr, n uint64, a driver.Advice, device int32) driver.Result {
	return driver.Result(C.cuvmm_MemAdviseV1(t.c, C.uintptr_t(c), C.uint64_t(p), C.uint64_t(n), C.uint32_t(a), C.int32_t(device)))
}

func (t *table) MemPrefetchAsync(c driver.Context, p driver.Ptr, n uint64, to driver.Location, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemPrefetchAsync(t.c, C.uintptr_t(c), C.uint64_t(p), C.uint64_t(n), location(to), C.uintptr_t(s)))
}

func (t *table) MemPrefetchAsyncV1(c driver.Context, p driver.Ptr, n uint64, device int32, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_MemPrefetchAsyncV1(t.c, C.uintptr_t(c), C.uint64_t(p), C.uint64_t(n), C.int32_t(device), C.uintptr_t(s)))
}

func location(l driver.Location) C.cuvmm_location {
	return C.cuvmm_location{_type: C.uint32_t(l.Type), id: C.int32_t(l.ID)}
}

func (t *table) MemPrefetchBatchAsync(c driver.Context, p []driver.Ptr, sizes []uint64, to []driver.Location, first []uint64, s driver.Stream) driver.Result {
	if len(p) != len(sizes) || len(to) != len(first) {
		return driver.InvalidValue
	}
	return driver.Result(C.cuvmm_MemPrefetchBatchAsync(t.c, C.uintptr_t(c), pointers(p), numbers(sizes), C.uint64_t(len(p)),
		locations(to), numbers(first), C.uint64_t(len(to)), C.uintptr_t(s)))
}

func (t *table) MemDiscardBatchAsync(c driver.Context, p []driver.Ptr, sizes []uint64, s driver.Stream) driver.Result {
	if len(p) != len(sizes) {
		return driver.InvalidValue
	}
	return driver.Result(C.cuvmm_MemDiscardBatchAsync(t.c, C.uintptr_t(c), pointers(p), numbers(sizes), C.uint64_t(len(p)), C.uintptr_t(s)))
}

func (t *table) MemDiscardAndPrefetchBatchAsync(c driver.Context, p []driver.Ptr, sizes []uint64, to []driver.Location, first []uint64, s driver.Stream) driver.Result {
	if len(p) != len(sizes) || len(to) != len(first) {
		return driver.InvalidValue
	}
	return driver.Result(C.cuvmm_MemDiscardAndPrefetchBatchAsync(t.c, C.uintptr_t(c), pointers(p), numbers(sizes), C.uint64_t(len(p)),
		locations(to), numbers(first), C.uint64_t(len(to)), C.uintptr_t(s)))
}

func pointers(p []driver.Ptr) *C.uint64_t { return (*C.uint64_t)(unsafe.SliceData(p)) }

func numbers(n []uint64) *C.uint64_t { return (*C.uint64_t)(unsafe.SliceData(n)) }

func locations(l []driver.Location) *C.cuvmm_location {
	return (*C.cuvmm_location)(unsafe.Pointer(unsafe.SliceData(l)))
}

func (t *table) MemRangeGetAttribute(c driver.Context, a driver.RangeAttribute, p driver.Ptr, n uint64, out []int32) driver.Result {
	return driver.Result(C.cuvmm_MemRangeGetAttribute(t.c, C.uintptr_t(c), C.uint32_t(a), C.uint64_t(p), C.uint64_t(n),
		(*C.int32_t)(unsafe.SliceData(out)), C.uint64_t(len(out))))
}

func (t *table) MemRangeGetAttributes(c driver.Context, a []driver.RangeAttribute, counts []uint64, p driver.Ptr, n uint64, out []int32) driver.Result {
	room := uint64(len(out))
	for _, count := range counts {
		if count > room {
			return driver.InvalidValue
		}
		room -= count
	}
	if len(a) != len(counts) {
		return driver.InvalidValue
	}
	return driver.Result(C.cuvmm_MemRangeGetAttributes(t.c, C.uintptr_t(c), (*C.uint32_t)(unsafe.SliceData(a)), numbers(counts), C.uint64_t(len(a)),
		C.uint64_t(p), C.uint64_t(n), (*C.int32_t)(unsafe.SliceData(out))))
}

func (t *table) StreamAttachMemAsync(c driver.Context, s driver.Stream, p driver.Ptr, n uint64, flags driver.AttachFlags) driver.Result {
	return driver.Result(C.cuvmm_StreamAttachMemAsync(t.c, C.uintptr_t(c), C.uintptr_t(s), C.uint64_t(p), C.uint64_t(n), C.uint32_t(flags)))
}
