//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

// So many attributes can be read at once.
enum { CUVMM_RANGE_ATTRIBUTES = 8, CUVMM_INVALID_VALUE = 1 };

// The driver's arrays of sizes and indices are of size_t, which is uint64_t on
// the machines that this is built for.
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "size_t");

cuvmm_value cuvmm_MemAllocManaged(cuvmm_driver d, uintptr_t ctx, uint64_t n, uint32_t flags) {
    uint64_t p = 0;
    CUVMM_CALL(d, ctx, cuMemAllocManaged, (&p, n, flags));
    return (cuvmm_value){p, result};
}

int32_t cuvmm_MemAdvise(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, uint32_t advice, cuvmm_location l) {
    CUVMM_CALL(d, ctx, cuMemAdvise, (p, n, advice, l));
    return result;
}

int32_t cuvmm_MemAdviseV1(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, uint32_t advice, int32_t device) {
    CUVMM_CALL(d, ctx, cuMemAdvise_v1, (p, n, advice, device));
    return result;
}

int32_t cuvmm_MemPrefetchAsync(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, cuvmm_location to, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemPrefetchAsync, (p, n, to, 0, s));
    return result;
}

int32_t cuvmm_MemPrefetchAsyncV1(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, int32_t device, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemPrefetchAsync_v1, (p, n, device, s));
    return result;
}

int32_t cuvmm_MemPrefetchBatchAsync(cuvmm_driver d, uintptr_t ctx, const uint64_t *p, const uint64_t *sizes, uint64_t count,
                                    const cuvmm_location *to, const uint64_t *first, uint64_t n, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemPrefetchBatchAsync, (p, (const size_t *)sizes, count, to, (const size_t *)first, n, 0, s));
    return result;
}

int32_t cuvmm_MemDiscardBatchAsync(cuvmm_driver d, uintptr_t ctx, const uint64_t *p, const uint64_t *sizes, uint64_t count,
                                   uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemDiscardBatchAsync, (p, (const size_t *)sizes, count, 0, s));
    return result;
}

int32_t cuvmm_MemDiscardAndPrefetchBatchAsync(cuvmm_driver d, uintptr_t ctx, const uint64_t *p, const uint64_t *sizes,
                                              uint64_t count, const cuvmm_location *to, const uint64_t *first, uint64_t n,
                                              uintptr_t s) {
    CUVMM_CALL(d, ctx, cuMemDiscardAndPrefetchBatchAsync,
               (p, (const size_t *)sizes, count, to, (const size_t *)first, n, 0, s));
    return result;
}

int32_t cuvmm_MemRangeGetAttribute(cuvmm_driver d, uintptr_t ctx, uint32_t attribute, uint64_t p, uint64_t n, int32_t *out,
                                   uint64_t count) {
    CUVMM_CALL(d, ctx, cuMemRangeGetAttribute, (out, count * sizeof *out, attribute, p, n));
    return result;
}

int32_t cuvmm_MemRangeGetAttributes(cuvmm_driver d, uintptr_t ctx, const uint32_t *attributes, const uint64_t *counts,
                                    uint64_t n_attributes, uint64_t p, uint64_t n, int32_t *out) {
    // The driver takes pointers to memory of its callers, which Go must not
    // hand out one by one.
    void *to[CUVMM_RANGE_ATTRIBUTES];
    size_t sizes[CUVMM_RANGE_ATTRIBUTES];
    uint32_t which[CUVMM_RANGE_ATTRIBUTES];
    if (n_attributes > CUVMM_RANGE_ATTRIBUTES) return CUVMM_INVALID_VALUE;
    for (uint64_t i = 0; i < n_attributes; i++) {
        which[i] = attributes[i];
        to[i] = out;
        sizes[i] = counts[i] * sizeof *out;
        out += counts[i];
    }
    CUVMM_CALL(d, ctx, cuMemRangeGetAttributes, (to, sizes, which, n_attributes, p, n));
    return result;
}

int32_t cuvmm_StreamAttachMemAsync(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t p, uint64_t n, uint32_t flags) {
    CUVMM_CALL(d, ctx, cuStreamAttachMemAsync, (s, p, n, flags));
    return result;
}
