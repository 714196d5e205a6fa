//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#ifndef CBENCH_API_H
#define CBENCH_API_H

#include "cbench.h"

#include <stddef.h>

typedef struct {
    int type, id;
} cbench_location;

typedef struct {
    int type, handle_types;
    cbench_location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} cbench_prop;

typedef struct {
    cbench_location location;
    int flags;
} cbench_access;

_Static_assert(sizeof(cbench_prop) == 32 && sizeof(cbench_access) == 12, "the driver's layouts");

enum { CBENCH_PINNED = 1, CBENCH_DEVICE = 1, CBENCH_READ_WRITE = 3, CBENCH_RELAXED = 2 };

// The entry points by the names that the library exports, and the declarations
// that belong to those names.
#define CBENCH_ENTRIES(X)                                                                             \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                     \
    X(cuCtxGetCurrent, (uintptr_t *))                                                                 \
    X(cuCtxSetCurrent, (uintptr_t))                                                                   \
    X(cuStreamIsCapturing, (uintptr_t, int *))                                                        \
    X(cuStreamBeginCapture_v2, (uintptr_t, int))                                                      \
    X(cuStreamEndCapture, (uintptr_t, uintptr_t *))                                                   \
    X(cuGraphDestroy, (uintptr_t))                                                                    \
    X(cuStreamCreate, (uintptr_t *, unsigned))                                                        \
    X(cuStreamDestroy_v2, (uintptr_t))                                                                \
    X(cuStreamSynchronize, (uintptr_t))                                                               \
    X(cuMemHostAlloc, (void **, size_t, unsigned))                                                    \
    X(cuMemFreeHost, (void *))                                                                        \
    X(cuMemcpyHtoDAsync_v2, (unsigned long long, const void *, size_t, uintptr_t))                    \
    X(cuMemGetAllocationGranularity, (size_t *, const cbench_prop *, int))                            \
    X(cuMemAddressReserve, (unsigned long long *, size_t, size_t, unsigned long long, unsigned long long)) \
    X(cuMemAddressFree, (unsigned long long, size_t))                                                 \
    X(cuMemCreate, (unsigned long long *, size_t, const cbench_prop *, unsigned long long))           \
    X(cuMemMap, (unsigned long long, size_t, size_t, unsigned long long, unsigned long long))         \
    X(cuMemSetAccess, (unsigned long long, size_t, const cbench_access *, size_t))                    \
    X(cuMemUnmap, (unsigned long long, size_t))                                                       \
    X(cuMemRelease, (unsigned long long))

struct cbench_library {
#define X(name, params) cbench_result(*name) params;
    CBENCH_ENTRIES(X)
#undef X
};

#endif
