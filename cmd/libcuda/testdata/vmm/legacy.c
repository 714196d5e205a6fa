// Calls that are older than virtual memory, or beside it, which programs make and cuvmm's own
// library does not: what they return, in good order and in bad.

#include <stddef.h>
#include <stdint.h>

typedef struct {
    size_t x, y;
    uint32_t type;
    const void *host;
    uint64_t device;
    void *array;
    size_t pitch;
} side;
typedef struct { side src, dst; size_t width, height; } rectangle;
typedef struct { char bytes[64]; } ipc;
typedef struct {
    uint32_t type, handles;
    struct { uint32_t type; int32_t id; } at;
    void *win32;
    size_t most;
    unsigned char reserved[56];
} pool_properties;

#define MORE_CALLS(X)                                                           \
    X(cuDevicePrimaryCtxReset_v2, (int device))                                 \
    X(cuDevicePrimaryCtxSetFlags_v2, (int device, unsigned flags))              \
    X(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active))   \
    X(cuCtxGetFlags, (unsigned *flags))                                         \
    X(cuCtxGetLimit, (size_t *value, int limit))                                \
    X(cuCtxSetLimit, (int limit, size_t value))                                 \
    X(cuCtxEnablePeerAccess, (void *peer, unsigned flags))                      \
    X(cuCtxDisablePeerAccess, (void *peer))                                     \
    X(cuStreamCreate, (void **stream, unsigned flags))                          \
    X(cuStreamSynchronize, (void *stream))                                      \
    X(cuStreamDestroy_v2, (void *stream))                                       \
    X(cuStreamAddCallback, (void *stream, void (*f)(void *, int, void *), void *data, unsigned flags)) \
    X(cuEventCreate, (void **event, unsigned flags))                            \
    X(cuEventDestroy_v2, (void *event))                                         \
    X(cuMemAlloc_v2, (uint64_t *p, size_t n))                                   \
    X(cuMemFree_v2, (uint64_t p))                                               \
    X(cuMemHostAlloc, (void **p, size_t n, unsigned flags))                     \
    X(cuMemHostGetFlags, (unsigned *flags, void *p))                            \
    X(cuMemFreeHost, (void *p))                                                 \
    X(cuMemGetAddressRange_v2, (uint64_t *base, size_t *n, uint64_t p))         \
    X(cuMemcpy, (uint64_t dst, uint64_t src, size_t n))                         \
    X(cuMemcpyAsync, (uint64_t dst, uint64_t src, size_t n, void *stream))      \
    X(cuMemAllocPitch_v2, (uint64_t *p, size_t *pitch, size_t width, size_t height, unsigned element)) \
    X(cuMemcpy2D_v2, (const rectangle *r))                                      \
    X(cuMemcpy2DAsync_v2, (const rectangle *r, void *stream))                   \
    X(cuDeviceGetDefaultMemPool, (void **pool, int device))                     \
    X(cuDeviceGetMemPool, (void **pool, int device))                            \
    X(cuDeviceSetMemPool, (int device, void *pool))                             \
    X(cuMemPoolCreate, (void **pool, const pool_properties *props))             \
    X(cuMemPoolDestroy, (void *pool))                                           \
    X(cuMemPoolTrimTo, (void *pool, size_t keep))                               \
    X(cuMemPoolGetAttribute, (void *pool, int attribute, void *value))          \
    X(cuMemPoolSetAttribute, (void *pool, int attribute, void *value))          \
    X(cuMemAllocFromPoolAsync, (uint64_t *p, size_t n, void *pool, void *stream)) \
    X(cuMemFreeAsync, (uint64_t p, void *stream))                               \
    X(cuIpcGetMemHandle, (ipc *h, uint64_t p))                                  \
    X(cuIpcOpenMemHandle_v2, (uint64_t *p, ipc h, unsigned flags))              \
    X(cuIpcCloseMemHandle, (uint64_t p))                                        \
    X(cuLinkCreate_v2, (unsigned n, int *options, void **values, void **state)) \
    X(cuLinkDestroy, (void *state))                                             \
    X(cuProfilerStart, (void))                                                  \
    X(cuProfilerStop, (void))

#include "driver.h"

static void *context;

// What is destroyed tells its context, so that a thread without a current one may do it.
static void without_a_context(void) {
    void *stream, *event, *host;
    ptr p;
    OK(cuStreamCreate(&stream, 1));
    OK(cuEventCreate(&event, 2));
    OK(cuMemHostAlloc(&host, 4096, 0));
    OK(cuMemAlloc_v2(&p, 4096));
    OK(cuCtxSetCurrent(NULL));
    SHOW("no context: allocate", cuMemAlloc_v2(&(ptr){0}, 4096));
    SHOW("no context: free", cuMemFree_v2(p));
    SHOW("no context: free on the host", cuMemFreeHost(host));
    SHOW("no context: destroy an event", cuEventDestroy_v2(event));
    SHOW("no context: destroy a stream", cuStreamDestroy_v2(stream));
    SHOW("no context: start the profiler", cuProfilerStart());
    OK(cuCtxSetCurrent(context));
}

static void contexts(void) {
    unsigned flags;
    int active;
    size_t value;
    OK(cuCtxGetFlags(&flags));
    printf("context: flags %u\n", flags & 7);
    OK(cuDevicePrimaryCtxGetState(device, &flags, &active));
    printf("context: active %d\n", active);
    OK(cuCtxGetLimit(&value, 0));
    printf("context: the stack of a thread takes %zu bytes\n", value);
    OK(cuCtxSetLimit(0, 4096));
    OK(cuCtxGetLimit(&value, 0));
    printf("context: now %zu\n", value);
    SHOW("context: a limit that is none", cuCtxGetLimit(&value, 99));
    SHOW("context: its own peer", cuCtxEnablePeerAccess(context, 0));
    SHOW("context: no peer", cuCtxDisablePeerAccess(context));
    SHOW("context: start the profiler", cuProfilerStart());
    SHOW("context: stop the profiler", cuProfilerStop());
}

static int called;

static void callback(void *stream, int status, void *data) {
    called += stream != NULL && status == 0 && data == &called;
}

static void copies(void) {
    char text[16] = "0123456789abcde", back[64] = "";
    void *stream, *host;
    unsigned flags = 0;
    ptr p, base;
    size_t pitch, n;
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAllocPitch_v2(&p, &pitch, 20, 3, 4));
    printf("copies: pitch %zu\n", pitch);
    OK(cuMemGetAddressRange_v2(&base, &n, p + pitch));
    printf("copies: the range begins %d, and has %zu bytes\n", base == p, n);
    SHOW("copies: the range of no memory", cuMemGetAddressRange_v2(&base, &n, 4096));
    OK(cuMemsetD8_v2(p, '.', 3 * pitch));
    OK(cuMemcpy(p, (ptr)(uintptr_t)text, 5));
    OK(cuMemcpy(p + 5, p, 5));
    rectangle up = {{.type = 1, .host = text, .pitch = 5, .x = 1}, {.type = 2, .device = p, .pitch = pitch, .x = 10, .y = 1}, 3, 2};
    SHOW("copies: a rectangle", cuMemcpy2D_v2(&up));
    rectangle wide = up;
    wide.width = 8;
    SHOW("copies: one wider than its pitch", cuMemcpy2D_v2(&wide));
    rectangle down = {{.type = 4, .device = p, .pitch = pitch}, {.type = 1, .host = back, .pitch = 16}, 15, 3};
    OK(cuMemcpy2DAsync_v2(&down, stream));
    OK(cuStreamSynchronize(stream));
    for (int i = 0; i < 3; i++) printf("copies: %.15s\n", back + 16 * i);
    OK(cuMemHostAlloc(&host, 4096, 1));
    OK(cuMemHostGetFlags(&flags, host));
    printf("copies: flags of host memory %u\n", flags);
    OK(cuMemsetD8_v2((ptr)(uintptr_t)host, 7, 4096));
    printf("copies: filled when the call returns %d\n", ((char *)host)[4095]);
    OK(cuMemcpyAsync((ptr)(uintptr_t)host, p, 5, stream));
    OK(cuStreamAddCallback(stream, callback, &called, 0));
    SHOW("copies: a callback with flags", cuStreamAddCallback(stream, callback, &called, 1));
    OK(cuStreamSynchronize(stream));
    printf("copies: %.5s, called %d\n", (char *)host, called);
    OK(cuMemFreeHost(host));
    OK(cuMemFree_v2(p));
    OK(cuStreamDestroy_v2(stream));
}

static void pools(void) {
    pool_properties props = {.type = 1, .at = {1, 0}};
    void *stream, *first, *now, *made;
    uint64_t keep = 1, threshold;
    int reuse;
    ptr p;
    OK(cuStreamCreate(&stream, 1));
    OK(cuDeviceGetDefaultMemPool(&first, device));
    OK(cuDeviceGetMemPool(&now, device));
    printf("pools: the device's own %d\n", first == now);
    OK(cuMemPoolCreate(&made, &props));
    OK(cuMemPoolGetAttribute(made, 4, &threshold));
    OK(cuMemPoolGetAttribute(made, 1, &reuse));
    printf("pools: threshold %llu, reuse %d\n", (unsigned long long)threshold, reuse);
    OK(cuMemPoolSetAttribute(made, 4, &keep));
    OK(cuMemPoolGetAttribute(made, 4, &threshold));
    printf("pools: threshold %llu\n", (unsigned long long)threshold);
    SHOW("pools: an attribute that is none", cuMemPoolGetAttribute(made, 99, &threshold));
    OK(cuMemAllocFromPoolAsync(&p, 4096, made, stream));
    OK(cuMemFreeAsync(p, stream));
    OK(cuStreamSynchronize(stream));
    SHOW("pools: trim", cuMemPoolTrimTo(made, 0));
    OK(cuDeviceSetMemPool(device, made));
    OK(cuDeviceGetMemPool(&now, device));
    printf("pools: set %d\n", now == made);
    SHOW("pools: destroy", cuMemPoolDestroy(made));
    OK(cuDeviceGetMemPool(&now, device));
    printf("pools: the device's own again %d\n", now == first);
    SHOW("pools: destroy the device's own", cuMemPoolDestroy(first));
    OK(cuStreamDestroy_v2(stream));
}

static void others(void) {
    ptr p, opened;
    ipc h;
    void *state;
    OK(cuMemAlloc_v2(&p, 1 << 20));
    OK(cuIpcGetMemHandle(&h, p));
    SHOW("others: open memory of this process", cuIpcOpenMemHandle_v2(&opened, h, 1));
    SHOW("others: close what was not opened", cuIpcCloseMemHandle(p));
    SHOW("others: a handle of no memory", cuIpcGetMemHandle(&h, 4096));
    OK(cuMemFree_v2(p));
    OK(cuLinkCreate_v2(0, NULL, NULL, &state));
    SHOW("others: end a link", cuLinkDestroy(state));
}

// The primary context is the same one after a reset, and again after its last release.
static void resets(void) {
    void *again;
    ptr p;
    OK(cuMemAlloc_v2(&p, 4096));
    SHOW("resets: reset", cuDevicePrimaryCtxReset_v2(device));
    SHOW("resets: allocate in the context that is current", cuMemAlloc_v2(&p, 4096));
    OK(cuDevicePrimaryCtxRetain(&again, device));
    printf("resets: the same context %d\n", again == context);
    SHOW("resets: release", cuDevicePrimaryCtxRelease_v2(device));
    SHOW("resets: release again", cuDevicePrimaryCtxRelease_v2(device));
    SHOW("resets: once more", cuDevicePrimaryCtxRelease_v2(device));
}

int main(int argc, char **argv) {
    load_driver(argc > 1 ? argv[1] : NULL);
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxSetFlags_v2(device, 4)); // the CPU sleeps while it waits
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    contexts();
    without_a_context();
    copies();
    pools();
    others();
    resets();
    return 0;
}
