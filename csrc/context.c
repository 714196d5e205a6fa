//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_value cuvmm_DevicePrimaryCtxRetain(cuvmm_driver d, int32_t device) {
    uintptr_t ctx = 0;
    CUVMM_CALL(d, 0, cuDevicePrimaryCtxRetain, (&ctx, device));
    return (cuvmm_value){ctx, result};
}

int32_t cuvmm_DevicePrimaryCtxRelease(cuvmm_driver d, int32_t device) {
    CUVMM_CALL(d, 0, cuDevicePrimaryCtxRelease, (device));
    return result;
}

cuvmm_pair cuvmm_DevicePrimaryCtxGetState(cuvmm_driver d, int32_t device) {
    uint32_t flags = 0;
    int32_t active = 0;
    CUVMM_CALL(d, 0, cuDevicePrimaryCtxGetState, (device, &flags, &active));
    return (cuvmm_pair){flags, (uint64_t)active, result};
}

// cuCtxCreate pushes the new context onto the thread's stack. Popping it
// leaves the stack as it was; setting the old one current would not, it
// replaces the top and so makes the stack deeper.
cuvmm_value cuvmm_CtxCreate(cuvmm_driver d, uint32_t flags, int32_t device) {
    uintptr_t ctx = 0, popped = 0;
    if (!cuvmm_table_of(d)->api.cuCtxPopCurrent) return (cuvmm_value){0, CUVMM_MISSING_ENTRY_POINT};
    CUVMM_CALL(d, 0, cuCtxCreate, (&ctx, flags, device));
    if (result == 0) table->api.cuCtxPopCurrent(&popped);
    return (cuvmm_value){ctx, result};
}

int32_t cuvmm_CtxDestroy(cuvmm_driver d, uintptr_t ctx) {
    CUVMM_CALL(d, 0, cuCtxDestroy, (ctx));
    return result;
}

cuvmm_value cuvmm_CtxGetCurrent(cuvmm_driver d) {
    uintptr_t ctx = 0;
    CUVMM_CALL(d, 0, cuCtxGetCurrent, (&ctx));
    return (cuvmm_value){ctx, result};
}

int32_t cuvmm_CtxSetCurrent(cuvmm_driver d, uintptr_t ctx) {
    CUVMM_CALL(d, 0, cuCtxSetCurrent, (ctx));
    return result;
}

cuvmm_value cuvmm_CtxGetDevice(cuvmm_driver d, uintptr_t ctx) {
    int32_t device = 0;
    CUVMM_CALL(d, ctx, cuCtxGetDevice, (&device));
    return (cuvmm_value){(uint64_t)device, result};
}

int32_t cuvmm_CtxSynchronize(cuvmm_driver d, uintptr_t ctx) {
    CUVMM_CALL(d, ctx, cuCtxSynchronize, ());
    return result;
}
