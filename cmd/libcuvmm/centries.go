//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

/*
#include "front.h"

// Handles and addresses are numbers to Go.
static int32_t c_alloc(uint64_t pool, size_t bytes, uintptr_t stream, uintptr_t *block) {
	return cuvmm_alloc(pool, bytes, (void *)stream, 0, (void **)block, NULL);
}
static int32_t c_free(uint64_t pool, uintptr_t block) { return cuvmm_free(pool, (void *)block, NULL); }
static int32_t c_use(uint64_t pool, uintptr_t block, uintptr_t stream) { return cuvmm_use(pool, (void *)block, (void *)stream, NULL); }
static int32_t c_stream_close(uint64_t pool, uintptr_t stream) { return cuvmm_stream_close(pool, (void *)stream, NULL); }
*/
import "C"

// The C entry points for tests in Go, whose files cannot have cgo.

func cAlloc(pool uint64, bytes int, stream uintptr) (block uintptr, status int32) {
	var p C.uintptr_t
	status = int32(C.c_alloc(C.uint64_t(pool), C.size_t(bytes), C.uintptr_t(stream), &p))
	return uintptr(p), status
}

func cFree(pool uint64, block uintptr) int32 {
	return int32(C.c_free(C.uint64_t(pool), C.uintptr_t(block)))
}

func cUse(pool uint64, block, stream uintptr) int32 {
	return int32(C.c_use(C.uint64_t(pool), C.uintptr_t(block), C.uintptr_t(stream)))
}

func cStreamClose(pool uint64, stream uintptr) int32 {
	return int32(C.c_stream_close(C.uint64_t(pool), C.uintptr_t(stream)))
}

func centries() uint64 { return uint64(C.cuvmm_entries()) }

const cOK, cInvalid, cOutOfMemory, cCapturing = C.CUVMM_OK, C.CUVMM_INVALID, C.CUVMM_OUT_OF_MEMORY, C.CUVMM_CAPTURING
const cLost, cSuspended = C.CUVMM_LOST, C.CUVMM_SUSPENDED
