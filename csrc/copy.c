//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

int32_t cuvmm_MemcpyHtoDAsync(cuvmm_driver d, uintptr_t ctx, uint64_t dst, const void *src, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemcpyHtoDAsync, (dst, src, n, s));
    return result;
}

int32_t cuvmm_MemcpyDtoHAsync(cuvmm_driver d, uintptr_t ctx, void *dst, uint64_t src, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoHAsync, (dst, src, n, s));
    return result;
}

int32_t cuvmm_MemcpyDtoDAsync(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint64_t src, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoDAsync, (dst, src, n, s));
    return result;
}

int32_t cuvmm_MemsetD8Async(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint8_t v, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemsetD8Async, (dst, v, n, s));
    return result;
}

int32_t cuvmm_MemsetD32Async(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint32_t v, uint64_t words, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemsetD32Async, (dst, v, words, s));
    return result;
}

// The synchronous forms run on the legacy stream: only the foreign form of the
// driver offers them.

int32_t cuvmm_MemcpyHtoD(cuvmm_driver d, uintptr_t ctx, uint64_t dst, const void *src, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemcpyHtoD, (dst, src, n));
    return result;
}

int32_t cuvmm_MemcpyDtoH(cuvmm_driver d, uintptr_t ctx, void *dst, uint64_t src, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoH, (dst, src, n));
    return result;
}

int32_t cuvmm_MemcpyDtoD(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint64_t src, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemcpyDtoD, (dst, src, n));
    return result;
}

int32_t cuvmm_MemsetD8(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint8_t v, uint64_t n) {
    CUVMM_CALL(d, ctx, cuMemsetD8, (dst, v, n));
    return result;
}
