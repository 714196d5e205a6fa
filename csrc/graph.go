//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc

/*
#cgo noescape cuvmm_StreamIsCapturing
#cgo nocallback cuvmm_StreamIsCapturing
#cgo noescape cuvmm_StreamGetCaptureInfo
#cgo nocallback cuvmm_StreamGetCaptureInfo
#cgo noescape cuvmm_StreamBeginCapture
#cgo nocallback cuvmm_StreamBeginCapture
#cgo noescape cuvmm_StreamEndCapture
#cgo nocallback cuvmm_StreamEndCapture
#cgo noescape cuvmm_ThreadExchangeStreamCaptureMode
#cgo nocallback cuvmm_ThreadExchangeStreamCaptureMode
#cgo noescape cuvmm_GraphInstantiate
#cgo nocallback cuvmm_GraphInstantiate
#cgo noescape cuvmm_GraphLaunch
#cgo nocallback cuvmm_GraphLaunch
#cgo noescape cuvmm_GraphDestroy
#cgo nocallback cuvmm_GraphDestroy
#cgo noescape cuvmm_GraphExecDestroy
#cgo nocallback cuvmm_GraphExecDestroy
#cgo noescape cuvmm_GraphGetNodeCount
#cgo nocallback cuvmm_GraphGetNodeCount
#include "csrc.h"
*/
import "C"

import "github.com/cuvmm/cuvmm/internal/driver"

func (t *table) StreamIsCapturing(c driver.Context, s driver.Stream) (driver.CaptureStatus, driver.Result) {
	v := C.cuvmm_StreamIsCapturing(t.c, C.uintptr_t(c), C.uintptr_t(s))
	return driver.CaptureStatus(v.value), driver.Result(v.result)
}

func (t *table) StreamGetCaptureInfo(c driver.Context, s driver.Stream) (driver.CaptureStatus, uint64, driver.Result) {
	v := C.cuvmm_StreamGetCaptureInfo(t.c, C.uintptr_t(c), C.uintptr_t(s))
	return driver.CaptureStatus(v.first), uint64(v.second), driver.Result(v.result)
}

func (t *table) StreamBeginCapture(c driver.Context, s driver.Stream, m driver.CaptureMode) driver.Result {
	return driver.Result(C.cuvmm_StreamBeginCapture(t.c, C.uintptr_t(c), C.uintptr_t(s), C.uint32_t(m)))
}

func (t *table) StreamEndCapture(c driver.Context, s driver.Stream) (driver.Graph, driver.Result) {
	v := C.cuvmm_StreamEndCapture(t.c, C.uintptr_t(c), C.uintptr_t(s))
	return driver.Graph(v.value), driver.Result(v.result)
}

func (f *foreign) ThreadExchangeStreamCaptureMode(m driver.CaptureMode) (driver.CaptureMode, driver.Result) {
	v := C.cuvmm_ThreadExchangeStreamCaptureMode(f.c, C.uint32_t(m))
	return driver.CaptureMode(v.value), driver.Result(v.result)
}

func (t *table) GraphInstantiate(c driver.Context, g driver.Graph) (driver.GraphExec, driver.Result) {
	v := C.cuvmm_GraphInstantiate(t.c, C.uintptr_t(c), C.uintptr_t(g))
	return driver.GraphExec(v.value), driver.Result(v.result)
}

func (t *table) GraphLaunch(c driver.Context, g driver.GraphExec, s driver.Stream) driver.Result {
	return driver.Result(C.cuvmm_GraphLaunch(t.c, C.uintptr_t(c), C.uintptr_t(g), C.uintptr_t(s)))
}

func (t *table) GraphDestroy(g driver.Graph) driver.Result {
	return driver.Result(C.cuvmm_GraphDestroy(t.c, C.uintptr_t(g)))
}

func (t *table) GraphExecDestroy(g driver.GraphExec) driver.Result {
	return driver.Result(C.cuvmm_GraphExecDestroy(t.c, C.uintptr_t(g)))
}

func (t *table) GraphGetNodeCount(g driver.Graph) (uint64, driver.Result) {
	v := C.cuvmm_GraphGetNodeCount(t.c, C.uintptr_t(g))
	return uint64(v.value), driver.Result(v.result)
}
