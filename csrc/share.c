//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

#include <string.h>

enum { CUVMM_HANDLE_POSIX_FD = 1, CUVMM_RANGE_DMA_BUF_FD = 1 };

// The driver writes four bytes for a descriptor and 64 for a fabric handle.
cuvmm_shareable_result cuvmm_MemExportToShareableHandle(cuvmm_driver d, uint64_t handle, uint32_t type) {
    cuvmm_shareable_result s = {0};
    CUVMM_CALL(d, 0, cuMemExportToShareableHandle, (s.value.bytes, handle, type, 0));
    s.result = result;
    return s;
}

// The driver takes a descriptor as the pointer's value, and a fabric handle
// behind the pointer.
cuvmm_value cuvmm_MemImportFromShareableHandle(cuvmm_driver d, const cuvmm_shareable *s, uint32_t type) {
    uint64_t handle = 0;
    uintptr_t os = (uintptr_t)s->bytes;
    if (type == CUVMM_HANDLE_POSIX_FD) {
        int fd;
        memcpy(&fd, s->bytes, sizeof fd);
        os = (uintptr_t)fd;
    }
    CUVMM_CALL(d, 0, cuMemImportFromShareableHandle, (&handle, os, type));
    return (cuvmm_value){handle, result};
}

cuvmm_value cuvmm_MemGetHandleForAddressRange(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t size, uint64_t flags) {
    int fd = -1;
    CUVMM_CALL(d, ctx, cuMemGetHandleForAddressRange, (&fd, p, size, CUVMM_RANGE_DMA_BUF_FD, flags));
    return (cuvmm_value){(uint64_t)fd, result};
}
