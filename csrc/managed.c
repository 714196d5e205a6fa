//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

// The most attributes that one call reads.
enum { CUVMM_RANGE_ATTRIBUTES = 8, CUVMM_INVALID_VALUE = 1 };

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
