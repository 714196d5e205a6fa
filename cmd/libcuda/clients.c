//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// Entry points that programs look up and this library's own packages never call, so that
// internal/driver's table has no rows for them. Go has their state.

#include "libcuda.h"

#include "_cgo_export.h"

#define ENTRY(name, params, call)            \
    int32_t name params {                    \
        int32_t r = cuvmm_enter_thread();    \
        return r != 0 ? r : call;            \
    }

// Contexts.
ENTRY(cuDevicePrimaryCtxReset_v2, (int32_t d), cuvmm_primary_reset(d))
ENTRY(cuDevicePrimaryCtxSetFlags_v2, (int32_t d, uint32_t flags), cuvmm_primary_set_flags(d, flags))
ENTRY(cuCtxGetFlags, (uint32_t *flags), cuvmm_context_flags(flags))
ENTRY(cuCtxGetLimit, (size_t *value, uint32_t limit), cuvmm_get_limit(value, limit))
ENTRY(cuCtxSetLimit, (uint32_t limit, size_t value), cuvmm_set_limit(limit, value))
ENTRY(cuCtxEnablePeerAccess, (uintptr_t peer, uint32_t flags), cuvmm_enable_peer(peer, flags))
ENTRY(cuCtxDisablePeerAccess, (uintptr_t peer), cuvmm_disable_peer(peer))

// Streams and kernels.
ENTRY(cuStreamAddCallback, (uintptr_t s, uintptr_t f, uintptr_t data, uint32_t flags), cuvmm_add_callback(s, f, data, flags))
ENTRY(cuLaunchCooperativeKernel,
      (uintptr_t f, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared, uintptr_t s, void **params),
      cuvmm_launch_cooperative(f, gx, gy, gz, bx, by, bz, shared, s, params))

// Host memory.
ENTRY(cuMemHostGetFlags, (uint32_t *flags, void *p), cuvmm_host_flags(flags, cuvmm_host(p)))

// Pools.
ENTRY(cuDeviceGetMemPool, (uintptr_t *pool, int32_t d), cuvmm_current_pool(pool, d))
ENTRY(cuDeviceSetMemPool, (int32_t d, uintptr_t pool), cuvmm_set_pool(d, pool))
ENTRY(cuMemPoolCreate, (uintptr_t *pool, const void *props), cuvmm_create_pool(pool, (void *)props))
ENTRY(cuMemPoolDestroy, (uintptr_t pool), cuvmm_destroy_pool(pool))
ENTRY(cuMemPoolSetAttribute, (uintptr_t pool, uint32_t attribute, void *value), cuvmm_set_pool_attribute(pool, attribute, value))
ENTRY(cuMemAllocFromPoolAsync, (uint64_t *p, size_t n, uintptr_t pool, uintptr_t s), cuvmm_alloc_from_pool(p, n, pool, s))

// Memory of other processes.
ENTRY(cuIpcGetMemHandle, (cuvmm_shareable *handle, uint64_t p), cuvmm_ipc_get(handle, p))
ENTRY(cuIpcOpenMemHandle_v2, (uint64_t *p, cuvmm_shareable handle, uint32_t flags), cuvmm_ipc_open(p, &handle, flags))
ENTRY(cuIpcCloseMemHandle, (uint64_t p), cuvmm_ipc_close(p))

// The linker.
ENTRY(cuLinkCreate_v2, (uint32_t n, uint32_t *options, void **values, uintptr_t *state), cuvmm_link_create(n, options, values, state))
ENTRY(cuLinkAddData_v2,
      (uintptr_t state, uint32_t type, void *data, size_t size, const char *name, uint32_t n, uint32_t *options, void **values),
      cuvmm_link_add(state, (char *)name))
ENTRY(cuLinkAddFile_v2, (uintptr_t state, uint32_t type, const char *path, uint32_t n, uint32_t *options, void **values),
      cuvmm_link_add(state, (char *)path))
ENTRY(cuLinkComplete, (uintptr_t state, void **cubin, size_t *size), cuvmm_link_add(state, NULL))
ENTRY(cuLinkDestroy, (uintptr_t state), cuvmm_link_destroy(state))

const cuvmm_export cuvmm_clients[] = {
    {"cuDevicePrimaryCtxReset", 11000, (cuvmm_function)cuDevicePrimaryCtxReset_v2},
    {"cuDevicePrimaryCtxSetFlags", 11000, (cuvmm_function)cuDevicePrimaryCtxSetFlags_v2},
    {"cuCtxGetFlags", 7000, (cuvmm_function)cuCtxGetFlags},
    {"cuCtxGetLimit", 3010, (cuvmm_function)cuCtxGetLimit},
    {"cuCtxSetLimit", 3010, (cuvmm_function)cuCtxSetLimit},
    {"cuCtxEnablePeerAccess", 4000, (cuvmm_function)cuCtxEnablePeerAccess},
    {"cuCtxDisablePeerAccess", 4000, (cuvmm_function)cuCtxDisablePeerAccess},
    {"cuStreamAddCallback", 5000, (cuvmm_function)cuStreamAddCallback},
    {"cuLaunchCooperativeKernel", 9000, (cuvmm_function)cuLaunchCooperativeKernel},
    {"cuMemHostGetFlags", 2030, (cuvmm_function)cuMemHostGetFlags},
    {"cuDeviceGetMemPool", 11020, (cuvmm_function)cuDeviceGetMemPool},
    {"cuDeviceSetMemPool", 11020, (cuvmm_function)cuDeviceSetMemPool},
    {"cuMemPoolCreate", 11020, (cuvmm_function)cuMemPoolCreate},
    {"cuMemPoolDestroy", 11020, (cuvmm_function)cuMemPoolDestroy},
    {"cuMemPoolSetAttribute", 11020, (cuvmm_function)cuMemPoolSetAttribute},
    {"cuMemAllocFromPoolAsync", 11020, (cuvmm_function)cuMemAllocFromPoolAsync},
    {"cuIpcGetMemHandle", 4010, (cuvmm_function)cuIpcGetMemHandle},
    {"cuIpcOpenMemHandle", 11000, (cuvmm_function)cuIpcOpenMemHandle_v2},
    {"cuIpcCloseMemHandle", 4010, (cuvmm_function)cuIpcCloseMemHandle},
    {"cuLinkCreate", 6050, (cuvmm_function)cuLinkCreate_v2},
    {"cuLinkAddData", 6050, (cuvmm_function)cuLinkAddData_v2},
    {"cuLinkAddFile", 6050, (cuvmm_function)cuLinkAddFile_v2},
    {"cuLinkComplete", 5050, (cuvmm_function)cuLinkComplete},
    {"cuLinkDestroy", 5050, (cuvmm_function)cuLinkDestroy},
};

const size_t cuvmm_clients_n = sizeof cuvmm_clients / sizeof *cuvmm_clients;
