//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_value cuvmm_StreamCreate(cuvmm_driver d, uintptr_t ctx, uint32_t flags) {
    uintptr_t s = 0;
    CUVMM_CALL(d, ctx, cuStreamCreate, (&s, flags));
    return (cuvmm_value){s, result};
}

int32_t cuvmm_StreamDestroy(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuStreamDestroy, (s));
    return result;
}

int32_t cuvmm_StreamQuery(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuStreamQuery, (s));
    return result;
}

int32_t cuvmm_StreamSynchronize(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuStreamSynchronize, (s));
    return result;
}

int32_t cuvmm_StreamWaitEvent(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uintptr_t e) {
    CUVMM_CALL(d, ctx, cuStreamWaitEvent, (s, e, 0));
    return result;
}

cuvmm_value cuvmm_StreamGetCtx(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    uintptr_t of = 0;
    CUVMM_CALL(d, ctx, cuStreamGetCtx, (s, &of));
    return (cuvmm_value){of, result};
}

cuvmm_value cuvmm_StreamGetFlags(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    uint32_t flags = 0;
    CUVMM_CALL(d, ctx, cuStreamGetFlags, (s, &flags));
    return (cuvmm_value){flags, result};
}

cuvmm_value cuvmm_StreamGetID(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    uint64_t id = 0;
    CUVMM_CALL(d, ctx, cuStreamGetId, (s, &id));
    return (cuvmm_value){id, result};
}

// Flags 0: everything before it is visible before the value is.
int32_t cuvmm_StreamWriteValue64(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t p, uint64_t v) {
    CUVMM_CALL(d, ctx, cuStreamWriteValue64, (s, p, v, 0));
    return result;
}

// Flags 0: until the word is at least the value.
int32_t cuvmm_StreamWaitValue64(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t p, uint64_t v) {
    CUVMM_CALL(d, ctx, cuStreamWaitValue64, (s, p, v, 0));
    return result;
}
