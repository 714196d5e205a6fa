//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

// cuCtxCreate pushes the new context onto the thread's stack. Popping it
// leaves the stack as it was; setting the old one current would not, since it
// replaces the top and so makes the stack deeper.
cuvmm_value cuvmm_CtxCreate(cuvmm_driver d, uint32_t flags, int32_t device) {
    uintptr_t ctx = 0, popped = 0;
    if (!cuvmm_table_of(d)->pop) return (cuvmm_value){0, CUVMM_MISSING_ENTRY_POINT};
    CUVMM_CALL(d, 0, cuCtxCreate, (&ctx, flags, device));
    if (result == 0) table->pop(&popped);
    return (cuvmm_value){ctx, result};
}

// Never through CUVMM_CALL, which exchanges the mode itself.
cuvmm_value cuvmm_ThreadExchangeStreamCaptureMode(cuvmm_driver d, uint32_t mode) {
    CUVMM_BARE_CALL(d, cuThreadExchangeStreamCaptureMode, (&mode));
    return (cuvmm_value){mode, result};
}
