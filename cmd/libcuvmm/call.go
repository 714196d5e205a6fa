//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include <stdlib.h>
// #include "front.h"
import "C"

import (
	"errors"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/environ"
)

// Variables that the program set before it loaded the library count, too.
func init() {
	environ.Lookup = func(name string) string {
		c := C.CString(name)
		defer C.free(unsafe.Pointer(c))
		return C.GoString(C.getenv(c))
	}
}

// call runs do, and turns its error or its panic into a status.
func call(e *C.cuvmm_error, do func() error) (status C.int32_t) {
	if f := fault.Load(); f != nil {
		return say(e, C.CUVMM_FAULT, *f)
	}
	defer func() {
		if p := recover(); p != nil {
			status = say(e, C.CUVMM_FAULT, failed(p))
		}
	}()
	err := do()
	if err == nil {
		return C.CUVMM_OK
	}
	return say(e, statusOf(err), err.Error())
}

// onPool is call with the pool of a handle.
func onPool(handle C.uint64_t, e *C.cuvmm_error, do func(p *entry) error) C.int32_t {
	return call(e, func() error {
		p, err := poolOf(uint64(handle))
		if err != nil {
			return err
		}
		return do(p)
	})
}

func say(e *C.cuvmm_error, status C.int32_t, message string) C.int32_t {
	text := C.CString(message)
	defer C.free(unsafe.Pointer(text))
	return C.cuvmm_say(e, status, text)
}

// statusOf returns the first status that matches: an error may match several.
func statusOf(err error) C.int32_t {
	for _, s := range []struct {
		is     error
		status C.int32_t
	}{
		{cuda.ErrDeviceLost, C.CUVMM_LOST},
		{cuda.ErrSuspended, C.CUVMM_SUSPENDED},
		{cuda.ErrOutOfMemory, C.CUVMM_OUT_OF_MEMORY},
		{cuda.ErrBudget, C.CUVMM_OUT_OF_MEMORY},
		{cuda.ErrOutOfAddressSpace, C.CUVMM_OUT_OF_MEMORY},
		{cuda.ErrCapturing, C.CUVMM_CAPTURING},
		{cuda.ErrClosed, C.CUVMM_CLOSED},
		{cuda.ErrInUse, C.CUVMM_IN_USE},
		{cuda.ErrNotSupported, C.CUVMM_NOT_SUPPORTED},
		{cuda.ErrNoDriver, C.CUVMM_NOT_SUPPORTED},
		{cuda.ErrInvalidArgument, C.CUVMM_INVALID},
	} {
		if errors.Is(err, s.is) {
			return s.status
		}
	}
	return C.CUVMM_FAILED
}
