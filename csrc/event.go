//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_EventCreate
#cgo nocallback cuvmm_EventCreate
#cgo noescape cuvmm_EventRecord
#cgo nocallback cuvmm_EventRecord
#cgo noescape cuvmm_EventQuery
#cgo nocallback cuvmm_EventQuery
#cgo noescape cuvmm_EventSynchronize
#cgo nocallback cuvmm_EventSynchronize
#cgo noescape cuvmm_EventElapsedTime
#cgo nocallback cuvmm_EventElapsedTime
#cgo noescape cuvmm_EventDestroy
#cgo nocallback cuvmm_EventDestroy
#include "csrc.h"
*/
import "C"

import "github.com/cuvmm/cuvmm/internal/driver"

func (t *table) EventCreate(c driver.Context, flags driver.EventFlags) (driver.Event, driver.Result) {
	v := C.cuvmm_EventCreate(t.c, C.uintptr_t(c), C.uint32_t(flags))
	return driver.Event(v.value), driver.Result(v.result)
}

func (t *table) EventRecord(c driver.Context, e driver.Event, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_EventRecord(t.c, C.uintptr_t(c), C.uintptr_t(e), C.uintptr_t(s)))
}

func (t *table) EventQuery(c driver.Context, e driver.Event) driver.Result {
	return driver.Result(C.cuvmm_EventQuery(t.c, C.uintptr_t(c), C.uintptr_t(e)))
}

func (t *table) EventSynchronize(c driver.Context, e driver.Event) driver.Result {
	return driver.Result(C.cuvmm_EventSynchronize(t.c, C.uintptr_t(c), C.uintptr_t(e)))
}

func (t *table) EventElapsedTime(c driver.Context, start, end driver.Event) (float32, driver.Result) {
	v := C.cuvmm_EventElapsedTime(t.c, C.uintptr_t(c), C.uintptr_t(start), C.uintptr_t(end))
	return float32(v.value), driver.Result(v.result)
}

func (t *table) EventDestroy(c driver.Context, e driver.Event) driver.Result {
	return driver.Result(C.cuvmm_EventDestroy(t.c, C.uintptr_t(c), C.uintptr_t(e)))
}
