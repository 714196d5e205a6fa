//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// Entry points that programs look up and that other entry points make up: the software
// driver has none of these itself.

#include "exports.h"

#include <string.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801 };

// Attributes of devices, functions and pointers.
enum { MAX_THREADS = 1, WARP_SIZE = 10, MULTIPROCESSORS = 16, THREADS_OF_MULTIPROCESSOR = 39, MAJOR = 75, MINOR = 76 };
enum { FUNCTION_MAX_THREADS = 0 };
enum { MEMORY_TYPE = 2, IS_MANAGED = 8, RANGE_START = 11, RANGE_SIZE = 12 };

int32_t cuDeviceComputeCapability(int32_t *major, int32_t *minor, int32_t d) {
    if (!major || !minor) return INVALID_VALUE;
    int32_t r = cuDeviceGetAttribute(major, MAJOR, d);
    return r != 0 ? r : cuDeviceGetAttribute(minor, MINOR, d);
}

int32_t cuProfilerStart(void) {
    int32_t device;
    return cuCtxGetDevice(&device);
}

int32_t cuProfilerStop(void) { return cuProfilerStart(); }

int32_t cuFuncSetCacheConfig(uintptr_t f, uint32_t config) {
    int32_t value;
    return config > 3 ? INVALID_VALUE : cuFuncGetAttribute(&value, FUNCTION_MAX_THREADS, f);
}

int32_t cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t p) {
    uint64_t start, bytes;
    int32_t r = cuPointerGetAttribute(&start, RANGE_START, p);
    if (r == 0) r = cuPointerGetAttribute(&bytes, RANGE_SIZE, p);
    if (r == INVALID_VALUE) return 500; // NOT_FOUND
    if (r != 0) return r;
    if (base) *base = start;
    if (size) *size = bytes;
    return 0;
}

// Copies whose addresses say where they lead, and of rectangles, which the software driver
// does row by row.

enum { ON_HOST = 1, ON_DEVICE = 2, IN_ARRAY = 3, UNIFIED = 4 };

// An end of a copy.
typedef struct {
    uint32_t type; // ON_HOST or ON_DEVICE
    uint64_t at;
} end;

// A side of a CUDA_MEMCPY2D.
typedef struct {
    size_t x, y;
    uint32_t type;
    const void *host;
    uint64_t device;
    uintptr_t array;
    size_t pitch;
} side;

typedef struct {
    side src, dst;
    size_t width, height;
} rectangle;

static end end_at(uint64_t p) {
    uint32_t type = 0;
    uint8_t managed = 0;
    cuPointerGetAttribute((uint64_t *)&type, MEMORY_TYPE, p);
    cuPointerGetAttribute((uint64_t *)&managed, IS_MANAGED, p);
    return (end){type == ON_DEVICE || managed ? ON_DEVICE : ON_HOST, p};
}

static int32_t copy_row(end dst, end src, size_t n, uintptr_t s) {
    void *to = (void *)(uintptr_t)dst.at;
    const void *from = (const void *)(uintptr_t)src.at;
    if (dst.type == ON_DEVICE && src.type == ON_DEVICE) return cuMemcpyDtoDAsync_v2(dst.at, src.at, n, s);
    if (dst.type == ON_DEVICE) return cuMemcpyHtoDAsync_v2(dst.at, from, n, s);
    if (src.type == ON_DEVICE) return cuMemcpyDtoHAsync_v2(to, src.at, n, s);
    int32_t r = cuStreamSynchronize(s);
    if (r == 0) memmove(to, from, n);
    return r;
}

// A synchronous copy waits unless all of its memory is a device's, as the driver's do.
static int32_t finish(end dst, end src, int32_t r) {
    return r != 0 || (dst.type == ON_DEVICE && src.type == ON_DEVICE) ? r : cuStreamSynchronize(0);
}

static int32_t copy(uint64_t dst, uint64_t src, size_t n, uintptr_t s, int wait) {
    int32_t device, r = cuCtxGetDevice(&device);
    if (r != 0 || n == 0) return r;
    if (!cuvmm_host((void *)(uintptr_t)dst) || !cuvmm_host((void *)(uintptr_t)src)) return INVALID_VALUE;
    end to = end_at(dst), from = end_at(src);
    r = copy_row(to, from, n, s);
    return wait ? finish(to, from, r) : r;
}

// A fill waits where the host sees the memory.
int32_t cuMemsetD32_v2(uint64_t dst, uint32_t v, size_t words) {
    uint32_t type = 0;
    int32_t r = cuMemsetD32Async(dst, v, words, 0);
    return r != 0 || (cuPointerGetAttribute((uint64_t *)&type, MEMORY_TYPE, dst) == 0 && type == ON_DEVICE) ? r : cuStreamSynchronize(0);
}

int32_t cuMemcpy(uint64_t dst, uint64_t src, size_t n) { return copy(dst, src, n, 0, 1); }

int32_t cuMemcpyAsync(uint64_t dst, uint64_t src, size_t n, uintptr_t s) { return copy(dst, src, n, s, 0); }

int32_t cuMemAllocPitch_v2(uint64_t *p, size_t *pitch, size_t width, size_t height, uint32_t element) {
    const size_t align = 512; // of a row
    if (!p || !pitch || (element != 4 && element != 8 && element != 16)) return INVALID_VALUE;
    if (width == 0 || height == 0 || width > SIZE_MAX - align) return INVALID_VALUE;
    size_t row = (width + align - 1) / align * align;
    if (row > SIZE_MAX / height) return INVALID_VALUE;
    int32_t r = cuMemAlloc_v2(p, row * height);
    if (r == 0) *pitch = row;
    return r;
}

// The first byte of a side's rectangle, or NOT_SUPPORTED for arrays, which the software driver lacks.
static int32_t corner(const side *s, size_t width, end *first) {
    if (s->type == IN_ARRAY) return NOT_SUPPORTED;
    if (s->type < ON_HOST || s->type > UNIFIED) return INVALID_VALUE;
    if (width > s->pitch || s->x > s->pitch - width) return INVALID_VALUE;
    uint64_t base = s->type == ON_HOST ? (uint64_t)(uintptr_t)s->host : s->device;
    if (!cuvmm_host((void *)(uintptr_t)base)) return INVALID_VALUE;
    *first = s->type == UNIFIED ? end_at(base) : (end){s->type, base};
    first->at += s->y * s->pitch + s->x;
    return 0;
}

static int32_t copy_2d(const rectangle *c, uintptr_t s, int wait) {
    int32_t device, r = cuCtxGetDevice(&device);
    if (r != 0) return r;
    if (!c) return INVALID_VALUE;
    if (c->width == 0 || c->height == 0) return 0;
    end to, from;
    if ((r = corner(&c->dst, c->width, &to)) != 0 || (r = corner(&c->src, c->width, &from)) != 0) return r;
    end row_to = to, row_from = from;
    for (size_t i = 0; i < c->height && r == 0; i++) {
        r = copy_row(row_to, row_from, c->width, s);
        row_to.at += c->dst.pitch;
        row_from.at += c->src.pitch;
    }
    return wait ? finish(to, from, r) : r;
}

int32_t cuMemcpy2D_v2(const rectangle *c) { return copy_2d(c, 0, 1); }

int32_t cuMemcpy2DUnaligned_v2(const rectangle *c) { return copy_2d(c, 0, 1); }

int32_t cuMemcpy2DAsync_v2(const rectangle *c, uintptr_t s) { return copy_2d(c, s, 0); }

// Occupancy. The flag turns off a use of caches, which the software driver does not count.

int32_t cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int32_t *blocks, uintptr_t f, int32_t threads, size_t shared, uint32_t flags) {
    return flags > 1 ? INVALID_VALUE : cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, shared);
}

// Tries blocks of whole warps from the largest down, and takes the first that puts the most
// threads on a multiprocessor.
int32_t cuOccupancyMaxPotentialBlockSizeWithFlags(int32_t *grid, int32_t *block, uintptr_t f, size_t (*shared_of)(int), size_t shared,
                                                  int32_t limit, uint32_t flags) {
    int32_t device, warp, most, processors, fit, best = 0, threads, r;
    if (!grid || !block || limit < 0) return INVALID_VALUE;
    if ((r = cuCtxGetDevice(&device)) != 0 || (r = cuDeviceGetAttribute(&warp, WARP_SIZE, device)) != 0 ||
        (r = cuDeviceGetAttribute(&fit, THREADS_OF_MULTIPROCESSOR, device)) != 0 ||
        (r = cuDeviceGetAttribute(&processors, MULTIPROCESSORS, device)) != 0 ||
        (r = cuDeviceGetAttribute(&most, MAX_THREADS, device)) != 0)
        return r;
    if (limit > 0 && limit < most) most = limit;
    for (threads = most; threads > 0 && best < fit; threads = (threads - 1) / warp * warp) {
        int32_t blocks = 0;
        size_t bytes = shared_of ? shared_of(threads) : shared;
        r = cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, f, threads, bytes, flags);
        if (r != 0) return r;
        if (blocks * threads <= best) continue;
        best = blocks * threads;
        *grid = blocks * processors;
        *block = threads;
    }
    return best > 0 ? 0 : INVALID_VALUE;
}

int32_t cuOccupancyMaxPotentialBlockSize(int32_t *grid, int32_t *block, uintptr_t f, size_t (*shared_of)(int), size_t shared, int32_t limit) {
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, f, shared_of, shared, limit, 0);
}

const cuvmm_export cuvmm_composed[] = {
    {"cuDeviceComputeCapability", 2000, (cuvmm_function)cuDeviceComputeCapability},
    {"cuProfilerStart", 4000, (cuvmm_function)cuProfilerStart},
    {"cuProfilerStop", 4000, (cuvmm_function)cuProfilerStop},
    {"cuFuncSetCacheConfig", 3000, (cuvmm_function)cuFuncSetCacheConfig},
    {"cuMemGetAddressRange", 3020, (cuvmm_function)cuMemGetAddressRange_v2},
    {"cuMemsetD32", 3020, (cuvmm_function)cuMemsetD32_v2},
    {"cuMemcpy", 4000, (cuvmm_function)cuMemcpy},
    {"cuMemcpyAsync", 4000, (cuvmm_function)cuMemcpyAsync},
    {"cuMemAllocPitch", 3020, (cuvmm_function)cuMemAllocPitch_v2},
    {"cuMemcpy2D", 3020, (cuvmm_function)cuMemcpy2D_v2},
    {"cuMemcpy2DUnaligned", 3020, (cuvmm_function)cuMemcpy2DUnaligned_v2},
    {"cuMemcpy2DAsync", 3020, (cuvmm_function)cuMemcpy2DAsync_v2},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", 7000, (cuvmm_function)cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags},
    {"cuOccupancyMaxPotentialBlockSize", 6050, (cuvmm_function)cuOccupancyMaxPotentialBlockSize},
    {"cuOccupancyMaxPotentialBlockSizeWithFlags", 7000, (cuvmm_function)cuOccupancyMaxPotentialBlockSizeWithFlags},
};

const size_t cuvmm_composed_n = sizeof cuvmm_composed / sizeof *cuvmm_composed;
