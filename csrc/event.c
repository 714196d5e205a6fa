//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_value cuvmm_EventCreate(cuvmm_driver d, uintptr_t ctx, uint32_t flags) {
    uintptr_t e = 0;
    CUVMM_CALL(d, ctx, cuEventCreate, (&e, flags));
    return (cuvmm_value){e, result};
}

int32_t cuvmm_EventRecord(cuvmm_driver d, uintptr_t ctx, uintptr_t e, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuEventRecord, (e, s));
    return result;
}

int32_t cuvmm_EventQuery(cuvmm_driver d, uintptr_t ctx, uintptr_t e) {
    CUVMM_CALL(d, ctx, cuEventQuery, (e));
    return result;
}

int32_t cuvmm_EventSynchronize(cuvmm_driver d, uintptr_t ctx, uintptr_t e) {
    CUVMM_CALL(d, ctx, cuEventSynchronize, (e));
    return result;
}

cuvmm_float cuvmm_EventElapsedTime(cuvmm_driver d, uintptr_t ctx, uintptr_t start, uintptr_t end) {
    float ms = 0;
    CUVMM_CALL(d, ctx, cuEventElapsedTime, (&ms, start, end));
    return (cuvmm_float){ms, result};
}

int32_t cuvmm_EventDestroy(cuvmm_driver d, uintptr_t ctx, uintptr_t e) {
    CUVMM_CALL(d, ctx, cuEventDestroy, (e));
    return result;
}
