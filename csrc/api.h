//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The driver API as this library declares it, the table of its entry points,
// and what every call does to its thread. For the C files alone; Go sees
// csrc.h.

#ifndef CUVMM_API_H
#define CUVMM_API_H

#include "csrc.h"

#include <stddef.h>

// The layouts, as measured with the vendor's header.
_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8 && sizeof(unsigned long long) == 8, "64-bit only");
_Static_assert(sizeof(int) == 4 && sizeof(float) == 4, "int and float are 32 bits");
_Static_assert(sizeof(cuvmm_location) == 8, "location");
_Static_assert(offsetof(cuvmm_location, id) == 4, "location");
_Static_assert(sizeof(cuvmm_prop) == 32, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, handle_types) == 4, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, location) == 8, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, win32) == 16, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, compression) == 24, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, rdma) == 25, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, usage) == 26, "allocation properties");
_Static_assert(sizeof(cuvmm_multicast) == 32, "multicast properties");
_Static_assert(offsetof(cuvmm_multicast, size) == 8, "multicast properties");
_Static_assert(offsetof(cuvmm_multicast, handle_types) == 16, "multicast properties");
_Static_assert(offsetof(cuvmm_multicast, flags) == 24, "multicast properties");
_Static_assert(sizeof(cuvmm_access) == 12, "access descriptor");
_Static_assert(offsetof(cuvmm_access, flags) == 8, "access descriptor");
_Static_assert(sizeof(cuvmm_shareable) == 64, "shareable handle");
_Static_assert(sizeof(cuvmm_uuid) == 16, "uuid");

// Every entry point with its parameters, in the form of the CUDA version that
// internal/driver's list of calls names for it. Opaque handles are uintptr_t
// and enumerations are 32-bit integers: the same registers, and no casts.
#define CUVMM_ENTRIES(X)                                                                           \
    X(cuInit, (uint32_t flags))                                                                    \
    X(cuDriverGetVersion, (int32_t *version))                                                      \
    X(cuDeviceGetCount, (int32_t *count))                                                          \
    X(cuDeviceGet, (int32_t *device, int32_t ordinal))                                             \
    X(cuDeviceGetName, (char *name, int32_t len, int32_t device))                                  \
    X(cuDeviceGetUuid, (cuvmm_uuid *uuid, int32_t device))                                         \
    X(cuDeviceTotalMem, (size_t *bytes, int32_t device))                                           \
    X(cuDeviceGetAttribute, (int32_t *value, int32_t attribute, int32_t device))                   \
    X(cuDeviceCanAccessPeer, (int32_t *can, int32_t device, int32_t peer))                         \
    X(cuDevicePrimaryCtxRetain, (uintptr_t *ctx, int32_t device))                                  \
    X(cuDevicePrimaryCtxRelease, (int32_t device))                                                 \
    X(cuDevicePrimaryCtxGetState, (int32_t device, uint32_t *flags, int32_t *active))              \
    X(cuCtxCreate, (uintptr_t *ctx, uint32_t flags, int32_t device))                               \
    X(cuCtxDestroy, (uintptr_t ctx))                                                               \
    X(cuCtxGetCurrent, (uintptr_t *ctx))                                                           \
    X(cuCtxSetCurrent, (uintptr_t ctx))                                                            \
    X(cuCtxPopCurrent, (uintptr_t *ctx))                                                           \
    X(cuCtxGetDevice, (int32_t *device))                                                           \
    X(cuCtxSynchronize, (void))                                                                    \
    X(cuStreamCreate, (uintptr_t *stream, uint32_t flags))                                         \
    X(cuStreamDestroy, (uintptr_t stream))                                                         \
    X(cuStreamQuery, (uintptr_t stream))                                                           \
    X(cuStreamSynchronize, (uintptr_t stream))                                                     \
    X(cuStreamWaitEvent, (uintptr_t stream, uintptr_t event, uint32_t flags))                      \
    X(cuStreamGetCtx, (uintptr_t stream, uintptr_t *ctx))                                          \
    X(cuStreamGetFlags, (uintptr_t stream, uint32_t *flags))                                       \
    X(cuStreamGetId, (uintptr_t stream, uint64_t *id))                                             \
    X(cuStreamWriteValue64, (uintptr_t stream, uint64_t p, uint64_t value, uint32_t flags))        \
    X(cuStreamWaitValue64, (uintptr_t stream, uint64_t p, uint64_t value, uint32_t flags))         \
    X(cuStreamIsCapturing, (uintptr_t stream, uint32_t *status))                                   \
    X(cuStreamGetCaptureInfo, (uintptr_t stream, uint32_t *status, uint64_t *id))                  \
    X(cuStreamBeginCapture, (uintptr_t stream, uint32_t mode))                                     \
    X(cuStreamEndCapture, (uintptr_t stream, uintptr_t *graph))                                    \
    X(cuThreadExchangeStreamCaptureMode, (uint32_t *mode))                                         \
    X(cuGraphInstantiateWithFlags, (uintptr_t *exec, uintptr_t graph, uint64_t flags))             \
    X(cuGraphLaunch, (uintptr_t exec, uintptr_t stream))                                           \
    X(cuGraphDestroy, (uintptr_t graph))                                                           \
    X(cuGraphExecDestroy, (uintptr_t exec))                                                        \
    X(cuGraphGetNodes, (uintptr_t graph, uintptr_t *nodes, size_t *count))                         \
    X(cuEventCreate, (uintptr_t *event, uint32_t flags))                                           \
    X(cuEventRecord, (uintptr_t event, uintptr_t stream))                                          \
    X(cuEventQuery, (uintptr_t event))                                                             \
    X(cuEventSynchronize, (uintptr_t event))                                                       \
    X(cuEventElapsedTime, (float *ms, uintptr_t start, uintptr_t end))                             \
    X(cuEventDestroy, (uintptr_t event))                                                           \
    X(cuMemcpyHtoDAsync, (uint64_t dst, const void *src, size_t n, uintptr_t stream))              \
    X(cuMemcpyDtoHAsync, (void *dst, uint64_t src, size_t n, uintptr_t stream))                    \
    X(cuMemcpyDtoDAsync, (uint64_t dst, uint64_t src, size_t n, uintptr_t stream))                 \
    X(cuMemsetD8Async, (uint64_t dst, uint8_t value, size_t n, uintptr_t stream))                  \
    X(cuMemsetD32Async, (uint64_t dst, uint32_t value, size_t words, uintptr_t stream))            \
    X(cuMemcpyHtoD, (uint64_t dst, const void *src, size_t n))                                     \
    X(cuMemcpyDtoH, (void *dst, uint64_t src, size_t n))                                           \
    X(cuMemcpyDtoD, (uint64_t dst, uint64_t src, size_t n))                                        \
    X(cuMemsetD8, (uint64_t dst, uint8_t value, size_t n))                                         \
    X(cuMemAlloc, (uint64_t *p, size_t n))                                                         \
    X(cuMemFree, (uint64_t p))                                                                     \
    X(cuMemAllocAsync, (uint64_t *p, size_t n, uintptr_t stream))                                  \
    X(cuMemFreeAsync, (uint64_t p, uintptr_t stream))                                              \
    X(cuMemGetInfo, (size_t *free, size_t *total))                                                 \
    X(cuMemHostAlloc, (void **p, size_t n, uint32_t flags))                                        \
    X(cuMemFreeHost, (void *p))                                                                    \
    X(cuMemHostRegister, (void *p, size_t n, uint32_t flags))                                      \
    X(cuMemHostUnregister, (void *p))                                                              \
    X(cuMemHostGetDevicePointer, (uint64_t *dev, void *p, uint32_t flags))                         \
    X(cuPointerGetAttribute, (void *value, int32_t attribute, uint64_t p))                         \
    X(cuMemAddressReserve, (uint64_t *p, size_t size, size_t align, uint64_t hint, uint64_t flags)) \
    X(cuMemAddressFree, (uint64_t p, size_t size))                                                 \
    X(cuMemCreate, (uint64_t *handle, size_t size, const cuvmm_prop *prop, uint64_t flags))        \
    X(cuMemRelease, (uint64_t handle))                                                             \
    X(cuMemMap, (uint64_t p, size_t size, size_t offset, uint64_t handle, uint64_t flags))         \
    X(cuMemUnmap, (uint64_t p, size_t size))                                                       \
    X(cuMemSetAccess, (uint64_t p, size_t size, const cuvmm_access *desc, size_t count))           \
    X(cuMemGetAccess, (uint64_t *flags, const cuvmm_location *location, uint64_t p))               \
    X(cuMemGetAllocationGranularity, (size_t *bytes, const cuvmm_prop *prop, uint32_t option))     \
    X(cuMemGetAllocationPropertiesFromHandle, (cuvmm_prop *prop, uint64_t handle))                 \
    X(cuMemRetainAllocationHandle, (uint64_t *handle, void *p))                                    \
    X(cuMemExportToShareableHandle, (void *out, uint64_t handle, uint32_t type, uint64_t flags))   \
    X(cuMemImportFromShareableHandle, (uint64_t *handle, void *os, uint32_t type))                 \
    X(cuMemGetHandleForAddressRange, (void *out, uint64_t p, size_t size, uint32_t type, uint64_t flags)) \
    X(cuMulticastCreate, (uint64_t *handle, const cuvmm_multicast *prop))                          \
    X(cuMulticastAddDevice, (uint64_t mc, int32_t device))                                         \
    X(cuMulticastBindMem, (uint64_t mc, int32_t device, size_t mc_offset, uint64_t handle, size_t offset, size_t size, \
                           uint64_t flags))                                                        \
    X(cuMulticastBindMem_v1, (uint64_t mc, size_t mc_offset, uint64_t handle, size_t offset, size_t size, uint64_t flags)) \
    X(cuMulticastBindAddr, (uint64_t mc, int32_t device, size_t mc_offset, uint64_t p, size_t size, uint64_t flags)) \
    X(cuMulticastBindAddr_v1, (uint64_t mc, size_t mc_offset, uint64_t p, size_t size, uint64_t flags)) \
    X(cuMulticastUnbind, (uint64_t mc, int32_t device, size_t mc_offset, size_t size))             \
    X(cuMulticastGetGranularity, (size_t *bytes, const cuvmm_multicast *prop, uint32_t option))    \
    X(cuMemAllocManaged, (uint64_t *p, size_t n, uint32_t flags))                                  \
    X(cuMemAdvise, (uint64_t p, size_t n, uint32_t advice, cuvmm_location location))               \
    X(cuMemAdvise_v1, (uint64_t p, size_t n, uint32_t advice, int32_t device))                     \
    X(cuMemPrefetchAsync, (uint64_t p, size_t n, cuvmm_location to, uint32_t flags, uintptr_t stream)) \
    X(cuMemPrefetchAsync_v1, (uint64_t p, size_t n, int32_t device, uintptr_t stream))             \
    X(cuMemPrefetchBatchAsync, (const uint64_t *p, const size_t *sizes, size_t count, const cuvmm_location *to, \
                                const size_t *first, size_t n, uint64_t flags, uintptr_t stream))  \
    X(cuMemDiscardBatchAsync, (const uint64_t *p, const size_t *sizes, size_t count, uint64_t flags, uintptr_t stream)) \
    X(cuMemDiscardAndPrefetchBatchAsync, (const uint64_t *p, const size_t *sizes, size_t count, const cuvmm_location *to, \
                                          const size_t *first, size_t n, uint64_t flags, uintptr_t stream)) \
    X(cuMemRangeGetAttribute, (void *out, size_t size, uint32_t attribute, uint64_t p, size_t n))  \
    X(cuMemRangeGetAttributes, (void **out, size_t *sizes, uint32_t *attributes, size_t count, uint64_t p, size_t n)) \
    X(cuStreamAttachMemAsync, (uintptr_t stream, uint64_t p, size_t n, uint32_t flags))            \
    X(cuModuleLoadData, (uintptr_t *module, const void *image))                                    \
    X(cuModuleLoadDataEx, (uintptr_t *module, const void *image, uint32_t n, uint32_t *options, void **values)) \
    X(cuModuleUnload, (uintptr_t module))                                                          \
    X(cuModuleGetFunction, (uintptr_t *function, uintptr_t module, const char *name))              \
    X(cuFuncGetParamInfo, (uintptr_t function, size_t index, size_t *offset, size_t *size))        \
    X(cuLaunchKernel, (uintptr_t function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx,     \
                       uint32_t by, uint32_t bz, uint32_t shared, uintptr_t stream, void **params, \
                       void **extra))

typedef void (*cuvmm_entry)(void);

// A member per entry point, null where the running driver lacks it.
typedef struct {
#define X(name, params) int32_t(*name) params;
    CUVMM_ENTRIES(X)
#undef X
} cuvmm_entries;

// One form of an opened driver. exchange is
// cuThreadExchangeStreamCaptureMode where calls are to run in the relaxed
// mode, and null in the foreign form.
typedef struct {
    cuvmm_entries api;
    int32_t (*exchange)(uint32_t *mode);
} cuvmm_table;

static inline const cuvmm_table *cuvmm_table_of(cuvmm_driver d) { return (const cuvmm_table *)d; }

enum { CUVMM_CAPTURE_RELAXED = 2 };

// What a call has to put back on its thread.
typedef struct {
    uintptr_t context, before;
    uint32_t mode;
    int switched, exchanged;
} cuvmm_thread;

// Readies the thread for a call: the relaxed capture mode, and ctx current
// unless it is 0. A failed exchange (before cuInit, or without the entry
// point) does not stop the call; a context that cannot be made current does,
// since the call would run in another one.
static inline int32_t cuvmm_enter(const cuvmm_table *d, uintptr_t ctx, cuvmm_thread *t) {
    t->context = ctx;
    t->switched = 0;
    t->mode = CUVMM_CAPTURE_RELAXED;
    t->exchanged = d->exchange && d->exchange(&t->mode) == 0;
    if (ctx == 0) return 0;
    int32_t r = d->api.cuCtxGetCurrent(&t->before);
    if (r != 0 || t->before == ctx) return r;
    // Restored even where this fails: a driver may answer an older,
    // asynchronous error after it switched.
    t->switched = 1;
    return d->api.cuCtxSetCurrent(ctx);
}

static inline void cuvmm_leave(const cuvmm_table *d, cuvmm_thread *t) {
    if (t->switched && d->api.cuCtxSetCurrent(t->before) != 0) {
        // The context from before may be destroyed by now. The thread is not
        // ours: it must not keep a context that its owner never chose.
        uintptr_t now = 0;
        if (d->api.cuCtxGetCurrent(&now) == 0 && now == t->context) d->api.cuCtxSetCurrent(0);
    }
    if (t->exchanged) d->exchange(&t->mode);
}

// Declares int32_t result and makes one call: CUVMM_CALL(d, ctx, cuMemFree, (p)).
#define CUVMM_CALL(d, ctx, entry, args)            \
    int32_t result = CUVMM_MISSING_ENTRY_POINT;    \
    const cuvmm_table *table = cuvmm_table_of(d);  \
    if (table->api.entry) {                        \
        cuvmm_thread thread;                       \
        result = cuvmm_enter(table, ctx, &thread); \
        if (result == 0) result = table->api.entry args; \
        cuvmm_leave(table, &thread);               \
    }

#endif
