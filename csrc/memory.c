//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_value cuvmm_MemAlloc(cuvmm_driver d, uintptr_t ctx, uint64_t n) {
    uint64_t p = 0;
    CUVMM_CALL(d, ctx, cuMemAlloc, (&p, n));
    return (cuvmm_value){p, result};
}

int32_t cuvmm_MemFree(cuvmm_driver d, uintptr_t ctx, uint64_t p) {
    CUVMM_CALL(d, ctx, cuMemFree, (p));
    return result;
}

cuvmm_value cuvmm_MemAllocAsync(cuvmm_driver d, uintptr_t ctx, uint64_t n, uintptr_t s) {
    uint64_t p = 0;
    CUVMM_CALL(d, ctx, cuMemAllocAsync, (&p, n, s));
    return (cuvmm_value){p, result};
}

int32_t cuvmm_MemFreeAsync(cuvmm_driver d, uintptr_t ctx, uint64_t p, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemFreeAsync, (p, s));
    return result;
}

cuvmm_pair cuvmm_MemGetInfo(cuvmm_driver d, uintptr_t ctx) {
    size_t free = 0, total = 0;
    CUVMM_CALL(d, ctx, cuMemGetInfo, (&free, &total));
    return (cuvmm_pair){free, total, result};
}

cuvmm_pointer cuvmm_MemHostAlloc(cuvmm_driver d, uintptr_t ctx, uint64_t n, uint32_t flags) {
    void *p = NULL;
    CUVMM_CALL(d, ctx, cuMemHostAlloc, (&p, n, flags));
    return (cuvmm_pointer){p, result};
}

int32_t cuvmm_MemFreeHost(cuvmm_driver d, uintptr_t ctx, void *p) {
    CUVMM_CALL(d, ctx, cuMemFreeHost, (p));
    return result;
}

int32_t cuvmm_MemHostRegister(cuvmm_driver d, uintptr_t ctx, void *p, uint64_t n, uint32_t flags) {
    CUVMM_CALL(d, ctx, cuMemHostRegister, (p, n, flags));
    return result;
}

int32_t cuvmm_MemHostUnregister(cuvmm_driver d, uintptr_t ctx, void *p) {
    CUVMM_CALL(d, ctx, cuMemHostUnregister, (p));
    return result;
}

cuvmm_value cuvmm_MemHostGetDevicePointer(cuvmm_driver d, uintptr_t ctx, void *p) {
    uint64_t dev = 0;
    CUVMM_CALL(d, ctx, cuMemHostGetDevicePointer, (&dev, p, 0));
    return (cuvmm_value){dev, result};
}

// The attributes have 1, 4 or 8 bytes. All land at the front of a cleared
// word, which on a little-endian machine widens them.
cuvmm_value cuvmm_PointerGetAttribute(cuvmm_driver d, uintptr_t ctx, int32_t attribute, uint64_t p) {
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "little-endian only");
    uint64_t value = 0;
    CUVMM_CALL(d, ctx, cuPointerGetAttribute, (&value, attribute, p));
    return (cuvmm_value){value, result};
}
