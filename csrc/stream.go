//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_StreamCreate
#cgo nocallback cuvmm_StreamCreate
#cgo noescape cuvmm_StreamDestroy
#cgo nocallback cuvmm_StreamDestroy
#cgo noescape cuvmm_StreamQuery
#cgo nocallback cuvmm_StreamQuery
#cgo noescape cuvmm_StreamSynchronize
#cgo nocallback cuvmm_StreamSynchronize
#cgo noescape cuvmm_StreamWaitEvent
#cgo nocallback cuvmm_StreamWaitEvent
#cgo noescape cuvmm_StreamGetCtx
#cgo nocallback cuvmm_StreamGetCtx
#cgo noescape cuvmm_StreamGetFlags
#cgo nocallback cuvmm_StreamGetFlags
#cgo noescape cuvmm_StreamGetID
#cgo nocallback cuvmm_StreamGetID
#cgo noescape cuvmm_StreamWriteValue64
#cgo nocallback cuvmm_StreamWriteValue64
#cgo noescape cuvmm_StreamWaitValue64
#cgo nocallback cuvmm_StreamWaitValue64
#include "csrc.h"
*/
import "C"

import "github.com/cuvmm/cuvmm/internal/driver"

func (t *table) StreamCreate(c driver.Context, flags driver.StreamFlags) (driver.Stream, driver.Result) {
	v := C.cuvmm_StreamCreate(t.c, C.uintptr_t(c), C.uint32_t(flags))
	return driver.Stream(v.value), driver.Result(v.result)
}

func (t *table) StreamDestroy(c driver.Context, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_StreamDestroy(t.c, C.uintptr_t(c), C.uintptr_t(s)))
}

func (t *table) StreamQuery(c driver.Context, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_StreamQuery(t.c, C.uintptr_t(c), C.uintptr_t(s)))
}

func (t *table) StreamSynchronize(c driver.Context, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_StreamSynchronize(t.c, C.uintptr_t(c), C.uintptr_t(s)))
}

func (t *table) StreamWaitEvent(c driver.Context, s driver.Stream, e driver.Event) driver.Result {
	return driver.Result(C.cuvmm_StreamWaitEvent(t.c, C.uintptr_t(c), C.uintptr_t(s), C.uintptr_t(e)))
}

func (t *table) StreamGetCtx(c driver.Context, s driver.Stream) (driver.Context, driver.Result) {
	v := C.cuvmm_StreamGetCtx(t.c, C.uintptr_t(c), C.uintptr_t(s))
	return driver.Context(v.value), driver.Result(v.result)
}

func (t *table) StreamGetFlags(c driver.Context, s driver.Stream) (driver.StreamFlags, driver.Result) {
	v := C.cuvmm_StreamGetFlags(t.c, C.uintptr_t(c), C.uintptr_t(s))
	return driver.StreamFlags(v.value), driver.Result(v.result)
}

func (t *table) StreamGetID(c driver.Context, s driver.Stream) (uint64, driver.Result) {
	v := C.cuvmm_StreamGetID(t.c, C.uintptr_t(c), C.uintptr_t(s))
	return uint64(v.value), driver.Result(v.result)
}

func (t *table) StreamWriteValue64(c driver.Context, s driver.Stream, p driver.Ptr, v uint64) driver.Result {
	return driver.Result(C.cuvmm_StreamWriteValue64(t.c, C.uintptr_t(c), C.uintptr_t(s), C.uint64_t(p), C.uint64_t(v)))
}

func (t *table) StreamWaitValue64(c driver.Context, s driver.Stream, p driver.Ptr, v uint64) driver.Result {
	return driver.Result(C.cuvmm_StreamWaitValue64(t.c, C.uintptr_t(c), C.uintptr_t(s), C.uint64_t(p), C.uint64_t(v)))
}
