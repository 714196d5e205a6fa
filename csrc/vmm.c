//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

#include <string.h>

enum { CUVMM_HANDLE_POSIX_FD = 1, CUVMM_RANGE_DMA_BUF_FD = 1 };

cuvmm_value cuvmm_MemAddressReserve(cuvmm_driver d, uint64_t size, uint64_t align, uint64_t hint) {
    uint64_t p = 0;
    CUVMM_CALL(d, 0, cuMemAddressReserve, (&p, size, align, hint, 0));
    return (cuvmm_value){p, result};
}

int32_t cuvmm_MemAddressFree(cuvmm_driver d, uint64_t p, uint64_t size) {
    CUVMM_CALL(d, 0, cuMemAddressFree, (p, size));
    return result;
}

cuvmm_value cuvmm_MemCreate(cuvmm_driver d, uint64_t size, const cuvmm_prop *prop) {
    uint64_t handle = 0;
    CUVMM_CALL(d, 0, cuMemCreate, (&handle, size, prop, 0));
    return (cuvmm_value){handle, result};
}

int32_t cuvmm_MemRelease(cuvmm_driver d, uint64_t handle) {
    CUVMM_CALL(d, 0, cuMemRelease, (handle));
    return result;
}

int32_t cuvmm_MemMap(cuvmm_driver d, uint64_t p, uint64_t size, uint64_t offset, uint64_t handle) {
    CUVMM_CALL(d, 0, cuMemMap, (p, size, offset, handle, 0));
    return result;
}

int32_t cuvmm_MemUnmap(cuvmm_driver d, uint64_t p, uint64_t size) {
    CUVMM_CALL(d, 0, cuMemUnmap, (p, size));
    return result;
}

int32_t cuvmm_MemSetAccess(cuvmm_driver d, uint64_t p, uint64_t size, const cuvmm_access *desc, uint64_t count) {
    CUVMM_CALL(d, 0, cuMemSetAccess, (p, size, desc, count));
    return result;
}

cuvmm_value cuvmm_MemGetAccess(cuvmm_driver d, const cuvmm_location *location, uint64_t p) {
    uint64_t flags = 0;
    CUVMM_CALL(d, 0, cuMemGetAccess, (&flags, location, p));
    return (cuvmm_value){flags, result};
}

cuvmm_value cuvmm_MemGetAllocationGranularity(cuvmm_driver d, const cuvmm_prop *prop, uint32_t option) {
    size_t bytes = 0;
    CUVMM_CALL(d, 0, cuMemGetAllocationGranularity, (&bytes, prop, option));
    return (cuvmm_value){bytes, result};
}

cuvmm_prop_answer cuvmm_MemGetAllocationPropertiesFromHandle(cuvmm_driver d, uint64_t handle) {
    cuvmm_prop_answer prop = {0};
    CUVMM_CALL(d, 0, cuMemGetAllocationPropertiesFromHandle, (&prop.value, handle));
    prop.result = result;
    return prop;
}

cuvmm_value cuvmm_MemRetainAllocationHandle(cuvmm_driver d, uint64_t p) {
    uint64_t handle = 0;
    CUVMM_CALL(d, 0, cuMemRetainAllocationHandle, (&handle, (void *)(uintptr_t)p));
    return (cuvmm_value){handle, result};
}

// The driver writes four bytes for a descriptor and 64 for a fabric handle.
cuvmm_shareable_answer cuvmm_MemExportToShareableHandle(cuvmm_driver d, uint64_t handle, uint32_t type) {
    cuvmm_shareable_answer s = {0};
    CUVMM_CALL(d, 0, cuMemExportToShareableHandle, (s.value.bytes, handle, type, 0));
    s.result = result;
    return s;
}

// The driver takes a descriptor as the pointer's value, and a fabric handle
// behind the pointer.
cuvmm_value cuvmm_MemImportFromShareableHandle(cuvmm_driver d, const cuvmm_shareable *s, uint32_t type) {
    uint64_t handle = 0;
    void *os = (void *)s->bytes;
    if (type == CUVMM_HANDLE_POSIX_FD) {
        int fd;
        memcpy(&fd, s->bytes, sizeof fd);
        os = (void *)(intptr_t)fd;
    }
    CUVMM_CALL(d, 0, cuMemImportFromShareableHandle, (&handle, os, type));
    return (cuvmm_value){handle, result};
}

cuvmm_value cuvmm_MemGetHandleForAddressRange(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t size) {
    int fd = -1;
    CUVMM_CALL(d, ctx, cuMemGetHandleForAddressRange, (&fd, p, size, CUVMM_RANGE_DMA_BUF_FD, 0));
    return (cuvmm_value){(uint64_t)fd, result};
}
