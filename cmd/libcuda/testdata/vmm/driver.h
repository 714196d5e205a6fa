// What the programs of this folder share: the driver's calls for virtual memory, found in the
// library that the first argument names (libcuda.so.1 without one), and how results are printed.
// They need no CUDA toolkit: cc -o grow grow.c -ldl

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t ptr, handle;
typedef struct { uint32_t type; int32_t id; } location;
typedef struct {
    uint32_t type, handles;
    location at;
    void *win32;
    uint8_t compression, rdma;
    uint16_t usage;
    uint8_t reserved[4];
} properties;
typedef struct { location at; uint32_t flags; } right;

enum { ON_DEVICE = 1, ON_NODE = 3 };
enum { NONE = 0, READ = 1, READ_WRITE = 3 };
enum { PINNED = 1, BY_DESCRIPTOR = 1 };

// A program that needs more calls lists them before it includes this file.
#ifndef MORE_CALLS
#define MORE_CALLS(X)
#endif

#define CALLS(X)                                                                \
    X(cuInit, (unsigned flags))                                                 \
    X(cuGetErrorName, (int result, const char **name))                          \
    X(cuDeviceGet, (int *device, int ordinal))                                  \
    X(cuDeviceGetAttribute, (int *value, int attribute, int device))            \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                   \
    X(cuDevicePrimaryCtxRelease_v2, (int device))                               \
    X(cuCtxSetCurrent, (void *context))                                         \
    X(cuCtxSynchronize, (void))                                                 \
    X(cuMemcpyHtoD_v2, (ptr dst, const void *src, size_t n))                    \
    X(cuMemcpyDtoH_v2, (void *dst, ptr src, size_t n))                          \
    X(cuMemcpyDtoD_v2, (ptr dst, ptr src, size_t n))                            \
    X(cuMemsetD8_v2, (ptr dst, unsigned char v, size_t n))                      \
    X(cuMemsetD32_v2, (ptr dst, unsigned v, size_t n))                          \
    X(cuMemAddressReserve, (ptr *p, size_t n, size_t align, ptr hint, uint64_t flags)) \
    X(cuMemAddressFree, (ptr p, size_t n))                                      \
    X(cuMemCreate, (handle *h, size_t n, const properties *props, uint64_t flags)) \
    X(cuMemRelease, (handle h))                                                 \
    X(cuMemMap, (ptr p, size_t n, size_t offset, handle h, uint64_t flags))     \
    X(cuMemUnmap, (ptr p, size_t n))                                            \
    X(cuMemSetAccess, (ptr p, size_t n, const right *list, size_t count))      \
    X(cuMemGetAccess, (unsigned long long *flags, const location *at, ptr p))   \
    X(cuMemGetAllocationGranularity, (size_t *n, const properties *props, int option)) \
    X(cuMemGetAllocationPropertiesFromHandle, (properties *props, handle h))    \
    X(cuMemRetainAllocationHandle, (handle *h, void *p))                        \
    X(cuMemExportToShareableHandle, (void *out, handle h, int type, uint64_t flags)) \
    X(cuMemImportFromShareableHandle, (handle *h, void *os, int type))          \
    X(cuMemGetHandleForAddressRange, (void *out, ptr p, size_t n, int type, uint64_t flags)) \
    X(cuPointerGetAttribute, (void *value, int attribute, ptr p))               \
    MORE_CALLS(X)

#define DECLARE(name, params) static int (*name) params;
CALLS(DECLARE)

static void die(const char *what, const char *why) {
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static const char *name_of(int result) {
    const char *name = NULL;
    cuGetErrorName(result, &name);
    return name ? name : "?";
}

static void expect_success(const char *call, int result) {
    if (result != 0) die(call, name_of(result));
}

// OK ends the program if a call fails. SHOW prints what it returns.
#define OK(call) expect_success(#call, call)
#define SHOW(what, call) printf("%-52s %s\n", what, name_of(call))

static int device;
static properties on_device = {.type = PINNED, .at = {ON_DEVICE, 0}};
static size_t granule;

static void load_driver(const char *path) {
    void *library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW);
    if (!library) die("dlopen", dlerror());
#define FIND(name, params) \
    if (!(name = (int (*) params)dlsym(library, #name))) die("dlsym", #name);
    CALLS(FIND)
}

// Opens the device with its primary context.
static inline void open_device(void) {
    void *context;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    OK(cuMemGetAllocationGranularity(&granule, &on_device, 0));
}

static inline void allow(ptr p, size_t n, unsigned flags) {
    right to = {{ON_DEVICE, device}, flags};
    OK(cuMemSetAccess(p, n, &to, 1));
}

static inline unsigned word_at(ptr p) {
    unsigned word;
    OK(cuMemcpyDtoH_v2(&word, p, sizeof word));
    return word;
}
