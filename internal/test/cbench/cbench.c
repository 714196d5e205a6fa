//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void cbench_empty(void) {}

cbench_library *cbench_open(const char *path, char *error, uint64_t n) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(error, n, "%s", dlerror());
        return NULL;
    }
    cbench_library *l = malloc(sizeof *l);
    if (!l) {
        snprintf(error, n, "no memory");
        return NULL;
    }
    void *entry;
#define X(name, params)                             \
    entry = dlsym(handle, #name);                   \
    if (!entry) {                                   \
        snprintf(error, n, "%s has no " #name, path); \
        free(l);                                    \
        return NULL;                                \
    }                                               \
    memcpy(&l->name, &entry, sizeof entry);
    CBENCH_ENTRIES(X)
#undef X
    return l;
}

int64_t cbench_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// The steps of one of the library's calls: the relaxed capture mode, the
// context where it is not current, the call, and back.

cbench_time cbench_capture_steps(const cbench_library *l, uintptr_t ctx, uintptr_t stream, uint64_t n) {
    cbench_time t = {0, 0};
    int64_t start = cbench_now();
    for (uint64_t i = 0; i < n && t.result == 0; i++) {
        int mode = CBENCH_RELAXED, status = 0;
        uintptr_t before = 0;
        l->cuThreadExchangeStreamCaptureMode(&mode);
        l->cuCtxGetCurrent(&before);
        if (before != ctx) l->cuCtxSetCurrent(ctx);
        t.result = l->cuStreamIsCapturing(stream, &status);
        if (before != ctx) l->cuCtxSetCurrent(before);
        l->cuThreadExchangeStreamCaptureMode(&mode);
    }
    t.ns = cbench_now() - start;
    return t;
}

static cbench_prop on_device(int32_t device) {
    cbench_prop prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CBENCH_PINNED;
    prop.location = (cbench_location){CBENCH_DEVICE, device};
    return prop;
}

cbench_time cbench_granularity_steps(const cbench_library *l, int32_t device, uint64_t n) {
    cbench_time t = {0, 0};
    cbench_prop prop = on_device(device);
    int64_t start = cbench_now();
    for (uint64_t i = 0; i < n && t.result == 0; i++) {
        int mode = CBENCH_RELAXED;
        size_t bytes = 0;
        l->cuThreadExchangeStreamCaptureMode(&mode);
        t.result = l->cuMemGetAllocationGranularity(&bytes, &prop, 0);
        l->cuThreadExchangeStreamCaptureMode(&mode);
    }
    t.ns = cbench_now() - start;
    return t;
}

// Keeps the first failure.
static int ok(cbench_time *t, cbench_result r) {
    if (t->result == 0) t->result = r;
    return r == 0;
}

cbench_time cbench_vmm_cycle(const cbench_library *l, int32_t device, uint64_t size, uint64_t rounds) {
    cbench_time t = {0, 0};
    cbench_prop prop = on_device(device);
    cbench_access access = {prop.location, CBENCH_READ_WRITE};
    int64_t start = cbench_now();
    for (uint64_t i = 0; i < rounds && t.result == 0; i++) {
        unsigned long long p = 0, handle = 0;
        if (!ok(&t, l->cuMemAddressReserve(&p, size, 0, 0, 0))) break;
        if (ok(&t, l->cuMemCreate(&handle, size, &prop, 0))) {
            if (ok(&t, l->cuMemMap(p, size, 0, handle, 0))) {
                ok(&t, l->cuMemSetAccess(p, size, &access, 1));
                ok(&t, l->cuMemUnmap(p, size));
            }
            ok(&t, l->cuMemRelease(handle));
        }
        ok(&t, l->cuMemAddressFree(p, size));
    }
    t.ns = cbench_now() - start;
    return t;
}

cbench_time cbench_grow(const cbench_library *l, int32_t device, uint64_t reserve, const uint64_t *sizes,
                        const uint64_t *chunks, uint64_t n) {
    enum { OUT_OF_MEMORY = 2 };
    cbench_time t = {0, 0};
    cbench_prop prop = on_device(device);
    cbench_access access = {prop.location, CBENCH_READ_WRITE};
    unsigned long long base = 0;
    uint64_t total = 0, made = 0, mapped = 0, at = 0;
    for (uint64_t s = 0; s < n; s++) total += chunks[s];
    unsigned long long *handles = malloc((total ? total : 1) * sizeof *handles);
    if (!handles) return (cbench_time){0, OUT_OF_MEMORY};
    if (!ok(&t, l->cuMemAddressReserve(&base, reserve, 0, 0, 0))) {
        free(handles);
        return t;
    }

    int64_t start = cbench_now();
    for (uint64_t s = 0; s < n && t.result == 0; s++) {
        uint64_t from = at;
        for (uint64_t c = 0; c < chunks[s]; c++) {
            uint64_t size = sizes[made];
            if (!ok(&t, l->cuMemCreate(&handles[made], size, &prop, 0))) break;
            made++;
            if (!ok(&t, l->cuMemMap(base + at, size, 0, handles[made - 1], 0))) break;
            mapped++;
            at += size;
        }
        if (t.result == 0 && at > from) ok(&t, l->cuMemSetAccess(base + from, at - from, &access, 1));
    }
    t.ns = cbench_now() - start;

    at = 0;
    for (uint64_t c = 0; c < made; c++) {
        if (c < mapped) ok(&t, l->cuMemUnmap(base + at, sizes[c]));
        ok(&t, l->cuMemRelease(handles[c]));
        at += sizes[c];
    }
    ok(&t, l->cuMemAddressFree(base, reserve));
    free(handles);
    return t;
}

cbench_time cbench_copy(const cbench_library *l, uintptr_t ctx, uintptr_t stream, uint64_t dst, const void *src,
                        uint64_t n, uint64_t chunk, uint64_t rounds) {
    enum { INVALID_VALUE = 1 };
    cbench_time t = {0, 0};
    uintptr_t before = 0;
    if (chunk == 0) return (cbench_time){0, INVALID_VALUE};
    if (!ok(&t, l->cuCtxGetCurrent(&before)) || !ok(&t, l->cuCtxSetCurrent(ctx))) return t;
    int64_t start = cbench_now();
    for (uint64_t i = 0; i < rounds && t.result == 0; i++) {
        for (uint64_t at = 0; at < n && t.result == 0; at += chunk) {
            uint64_t part = n - at < chunk ? n - at : chunk;
            ok(&t, l->cuMemcpyHtoDAsync_v2(dst + at, (const char *)src + at, part, stream));
        }
        ok(&t, l->cuStreamSynchronize(stream));
    }
    t.ns = cbench_now() - start;
    ok(&t, l->cuCtxSetCurrent(before));
    return t;
}
