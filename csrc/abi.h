//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The driver's structs, as internal/driver lays them out in Go. api.h asserts
// the layouts.

#ifndef CUVMM_ABI_H
#define CUVMM_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint32_t type;
    int32_t id;
} cuvmm_location;

typedef struct {
    uint32_t type;
    uint32_t handle_types;
    cuvmm_location location;
    // A pointer, and always null on Linux; declared as a number, so that cgo does
    // not check for Go pointers behind it.
    uintptr_t win32;
    uint8_t compression;
    uint8_t rdma;
    uint16_t usage;
    uint8_t reserved[4];
} cuvmm_prop;

typedef struct {
    cuvmm_location location;
    uint32_t flags;
} cuvmm_access;

typedef struct {
    uint32_t order;
    cuvmm_location src, dst;
    uint32_t flags;
} cuvmm_copy;

typedef struct {
    uint32_t devices;
    uint64_t size, handle_types, flags;
} cuvmm_multicast;

typedef struct {
    uint32_t timeout_ms, reserved[15];
} cuvmm_lock;

typedef struct {
    uint8_t bytes[16];
} cuvmm_uuid;

typedef struct {
    uint8_t bytes[64];
} cuvmm_shareable;

#endif
