//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

int32_t cuvmm_MemcpyHtoDAsync(const cuvmm_driver *d, uintptr_t ctx, uint64_t dst, const void *src, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemcpyHtoDAsync, (dst, src, n, s));
    return result;
}

int32_t cuvmm_MemcpyDtoHAsync(const cuvmm_driver *d, uintptr_t ctx, void *dst, uint64_t src, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoHAsync, (dst, src, n, s));
    return result;
}

int32_t cuvmm_MemcpyDtoDAsync(const cuvmm_driver *d, uintptr_t ctx, uint64_t dst, uint64_t src, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoDAsync, (dst, src, n, s));
    return result;
}

int32_t cuvmm_MemsetD8Async(const cuvmm_driver *d, uintptr_t ctx, uint64_t dst, uint8_t v, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemsetD8Async, (dst, v, n, s));
    return result;
}

int32_t cuvmm_MemsetD32Async(const cuvmm_driver *d, uintptr_t ctx, uint64_t dst, uint32_t v, uint64_t words, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemsetD32Async, (dst, v, words, s));
    return result;
}

// The synchronous forms run on the legacy stream: only the foreign form of the
// driver offers them.

int32_t cuvmm_MemcpyHtoD(const cuvmm_driver *d, uintptr_t ctx, uint64_t dst, const void *src, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemcpyHtoD, (dst, src, n));
    return result;
}

int32_t cuvmm_MemcpyDtoH(const cuvmm_driver *d, uintptr_t ctx, void *dst, uint64_t src, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoH, (dst, src, n));
    return result;
}

int32_t cuvmm_MemcpyDtoD(const cuvmm_driver *d, uintptr_t ctx, uint64_t dst, uint64_t src, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoD, (dst, src, n));
    return result;
}

int32_t cuvmm_MemsetD8(const cuvmm_driver *d, uintptr_t ctx, uint64_t dst, uint8_t v, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemsetD8, (dst, v, n));
    return result;
}
