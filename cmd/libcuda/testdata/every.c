// Calls each entry point of a libcuda that it opens, over two threads and three
// processes, and prints the name of each that it called. The first unexpected
// result ends it with a line on standard error.
//
//   cc -o every every.c -ldl -lpthread
//   every libcuda.so.1 kernels.ptx

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { uint32_t type; int32_t id; } location;
typedef struct { uint32_t type, handles; location at; void *win32; uint8_t compression, rdma; uint16_t usage; uint8_t reserved[4]; } prop;
typedef struct { location at; uint32_t flags; } access_desc;
typedef struct { uint32_t devices; size_t size; uint64_t handles, flags; } multicast;
typedef struct { char bytes[16]; } uuid;

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_PTX = 218, NO_COMPILER = 221, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ALREADY_ENABLED = 704, NOT_ENABLED = 705, TOO_LARGE = 720, NOT_PERMITTED = 800, NOT_SUPPORTED = 801, UNSUPPORTED_IN_CAPTURE = 900, INVALIDATED = 901 };

static void *library;

static void fail(int line, const char *what) {
    fprintf(stderr, "every.c:%d: %s\n", line, what);
    exit(1);
}

static void *find(int line, const char *name) {
    void *entry = dlsym(library, name);
    if (!entry) fail(line, name);
    printf("%s\n", name);
    return entry;
}

static void expect(int line, const char *name, int want, int got) {
    if (want == got) return;
    char text[200];
    snprintf(text, sizeof text, "%s returns %d, want %d", name, got, want);
    fail(line, text);
}

// GIVES(want, cuName, (types), arguments...)
#define GIVES(want, name, types, ...) expect(__LINE__, #name, want, ((int(*) types)find(__LINE__, #name))(__VA_ARGS__))
#define OK(name, types, ...) GIVES(0, name, types, __VA_ARGS__)
#define TRUE(x) do { if (!(x)) fail(__LINE__, #x); } while (0)

static const size_t size = 2 << 20;
static const prop on_device = {.type = 1, .handles = 1, .at = {1, 0}};
static const access_desc grant = {{1, 0}, 3};

static void *stream_of(unsigned flags) {
    void *s;
    OK(cuStreamCreate, (void **, unsigned), &s, flags);
    return s;
}

// Another process's memory, by descriptor.
static void other_process(int fd) {
    uint64_t h, p;
    int device;
    void *ctx;
    char byte = 0;
    OK(cuInit, (unsigned), 0);
    OK(cuDeviceGet, (int *, int), &device, 0);
    OK(cuDevicePrimaryCtxRetain, (void **, int), &ctx, device);
    OK(cuCtxSetCurrent, (void *), ctx);
    OK(cuMemImportFromShareableHandle, (uint64_t *, void *, unsigned), &h, (void *)(intptr_t)fd, 1);
    OK(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, uint64_t), &p, size, 0, 0, 0);
    OK(cuMemMap, (uint64_t, size_t, size_t, uint64_t, uint64_t), p, size, 0, h, 0);
    OK(cuMemSetAccess, (uint64_t, size_t, const access_desc *, size_t), p, size, &grant, 1);
    OK(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), &byte, p + size - 1, 1);
    TRUE(byte == 0x5a);
    OK(cuMemUnmap, (uint64_t, size_t), p, size);
    OK(cuMemRelease, (uint64_t), h);
    OK(cuMemAddressFree, (uint64_t, size_t), p, size);
}

static int status_of(pid_t child) {
    int status = 0;
    TRUE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A thread has contexts and a capture mode of its own.
static void *other_thread(void *ctx) {
    void *now = ctx;
    uint64_t p;
    unsigned mode = 2;
    OK(cuCtxGetCurrent, (void **), &now);
    TRUE(now == NULL);
    GIVES(INVALID_CONTEXT, cuMemAlloc_v2, (uint64_t *, size_t), &p, 64);
    GIVES(INVALID_CONTEXT, cuCtxPopCurrent_v2, (void **), &now);
    OK(cuThreadExchangeStreamCaptureMode, (unsigned *), &mode);
    TRUE(mode == 0);
    OK(cuCtxPushCurrent_v2, (void *), ctx);
    OK(cuMemAlloc_v2, (uint64_t *, size_t), &p, 64);
    OK(cuMemFree_v2, (uint64_t), p);
    return NULL; // with a context on its stack and another mode
}

static void contexts(int device) {
    void *primary, *made, *now;
    unsigned flags, mode = 1;
    int active = 1, of;
    OK(cuDevicePrimaryCtxGetState, (int, unsigned *, int *), device, &flags, &active);
    TRUE(active == 0);
    OK(cuDevicePrimaryCtxRetain, (void **, int), &primary, device);
    OK(cuCtxSetCurrent, (void *), primary);
    GIVES(INVALID_CONTEXT, cuCtxSetCurrent, (void *), (void *)77);
    OK(cuCtxCreate_v2, (void **, unsigned, int), &made, 0, device);
    OK(cuCtxGetCurrent, (void **), &now);
    TRUE(now == made);
    OK(cuCtxPopCurrent_v2, (void **), &now);
    TRUE(now == made);
    OK(cuCtxPushCurrent_v2, (void *), made);
    OK(cuCtxDestroy_v2, (void *), made);
    OK(cuCtxGetCurrent, (void **), &now);
    TRUE(now == primary);
    OK(cuCtxGetDevice, (int *), &of);
    TRUE(of == device);
    OK(cuCtxSynchronize, (void));
    OK(cuThreadExchangeStreamCaptureMode, (unsigned *), &mode);
    TRUE(mode == 0);
    for (int i = 0; i < 2; i++) { // the second may have the first's number
        pthread_t t;
        TRUE(pthread_create(&t, NULL, other_thread, primary) == 0 && pthread_join(t, NULL) == 0);
    }
    OK(cuThreadExchangeStreamCaptureMode, (unsigned *), &mode);
    TRUE(mode == 1);
}

static void count_call(void *at) { ++*(int *)at; }

// A host function may make the calls that name a stream or an event, and no others.
struct inside { void *stream, *event; int done; };

static void call_inside(void *at) {
    struct inside *in = at;
    size_t free, total;
    uint64_t p;
    void *context;
    unsigned mode = 2;
    int capturing;
    GIVES(NOT_PERMITTED, cuMemGetInfo_v2, (size_t *, size_t *), &free, &total);
    GIVES(NOT_PERMITTED, cuMemAlloc_v2, (uint64_t *, size_t), &p, 64);
    GIVES(NOT_PERMITTED, cuCtxGetCurrent, (void **), &context);
    GIVES(NOT_PERMITTED, cuCtxPopCurrent_v2, (void **), &context);
    OK(cuThreadExchangeStreamCaptureMode, (unsigned *), &mode);
    OK(cuStreamIsCapturing, (void *, int *), in->stream, &capturing);
    OK(cuEventRecord, (void *, void *), in->event, in->stream);
    OK(cuLaunchHostFunc, (void *, void (*)(void *), void *), in->stream, count_call, &in->done);
    OK(cuStreamSynchronize, (void *), in->stream);
    OK(cuEventQuery, (void *), in->event);
    OK(cuStreamQuery, (void *), in->stream);
    TRUE(in->done == 1);
    in->done = 2;
}

static void host_functions(void *s) {
    struct inside in = {0};
    OK(cuStreamCreate, (void **, unsigned), &in.stream, 1);
    OK(cuEventCreate, (void **, unsigned), &in.event, 2);
    for (int i = 0; i < 2; i++) {
        in.done = 0;
        OK(cuLaunchHostFunc, (void *, void (*)(void *), void *), i == 0 ? s : NULL, call_inside, &in);
        OK(cuCtxSynchronize, (void));
        TRUE(in.done == 2);
    }
    OK(cuEventDestroy_v2, (void *), in.event);
    OK(cuStreamDestroy_v2, (void *), in.stream);
}

static void memory(void *s) {
    uint64_t p, q, dev, word;
    char *host, back[64];
    int called = 0;
    size_t free, total;
    OK(cuMemGetInfo_v2, (size_t *, size_t *), &free, &total);
    TRUE(free <= total && total > 0);
    OK(cuMemAlloc_v2, (uint64_t *, size_t), &p, 64);
    OK(cuMemAllocAsync, (uint64_t *, size_t, void *), &q, 64, s);
    OK(cuMemsetD8_v2, (uint64_t, unsigned char, size_t), p, 7, 64);
    OK(cuMemcpyDtoD_v2, (uint64_t, uint64_t, size_t), p + 32, p, 32);
    OK(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), p, "hello", 6);
    OK(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), back, p, 64);
    TRUE(strcmp(back, "hello") == 0 && back[63] == 7);
    OK(cuMemHostAlloc, (void **, size_t, unsigned), (void **)&host, 4096, 0);
    OK(cuMemHostGetDevicePointer_v2, (uint64_t *, void *, unsigned), &dev, host, 0);
    OK(cuMemsetD8Async, (uint64_t, unsigned char, size_t, void *), q, 1, 64, s);
    OK(cuMemsetD32Async, (uint64_t, unsigned, size_t, void *), q, 0x01020304, 2, s);
    OK(cuMemcpyDtoDAsync_v2, (uint64_t, uint64_t, size_t, void *), p, q, 64, s);
    OK(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *), host, p, 64, s);
    OK(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *), q, host, 64, s);
    OK(cuStreamWriteValue64_v2, (void *, uint64_t, uint64_t, unsigned), s, p, 5, 0);
    OK(cuLaunchHostFunc, (void *, void (*)(void *), void *), s, count_call, &called);
    GIVES(INVALID_VALUE, cuLaunchHostFunc, (void *, void (*)(void *), void *), s, NULL, NULL);
    OK(cuStreamWaitValue64_v2, (void *, uint64_t, uint64_t, unsigned), s, p, 5, 0);
    GIVES(INVALID_VALUE, cuStreamWaitValue64_v2, (void *, uint64_t, uint64_t, unsigned), s, p, 5, 8);
    OK(cuMemFreeAsync, (uint64_t, void *), q, s);
    OK(cuStreamSynchronize, (void *), s);
    TRUE(host[0] == 4 && host[8] == 1);
    TRUE(called == 1);
    OK(cuPointerGetAttribute, (void *, int, uint64_t), &word, 12, p);
    TRUE(word == 64);
    const struct { int attribute; size_t bytes; } narrow[] = {{2, 4}, {8, 1}, {9, 4}, {13, 1}};
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++) { // what lies beside the value stays
        memset(&word, 0xAB, sizeof word);
        OK(cuPointerGetAttribute, (void *, int, uint64_t), &word, narrow[i].attribute, p);
        for (size_t b = narrow[i].bytes; b < sizeof word; b++) TRUE(((uint8_t *)&word)[b] == 0xAB);
        TRUE(*(uint8_t *)&word < 4);
    }
    void *no_memory = (void *)8;
    GIVES(INVALID_VALUE, cuMemFreeHost, (void *), no_memory);
    GIVES(INVALID_VALUE, cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), p, no_memory, 8);
    OK(cuMemFree_v2, (uint64_t), p);
    OK(cuMemFreeHost, (void *), host);
    host = aligned_alloc(4096, 4096);
    OK(cuMemHostRegister_v2, (void *, size_t, unsigned), host, 4096, 0);
    OK(cuMemHostUnregister, (void *), host);
}

static void streams(void *s, void *primary) {
    void *e, *f, *of;
    unsigned flags;
    unsigned long long id;
    float ms = -1;
    OK(cuStreamQuery, (void *), s);
    OK(cuStreamGetCtx, (void *, void **), s, &of);
    TRUE(of == primary);
    OK(cuStreamGetFlags, (void *, unsigned *), s, &flags);
    TRUE(flags == 1);
    OK(cuStreamGetId, (void *, unsigned long long *), s, &id);
    OK(cuEventCreate, (void **, unsigned), &e, 0);
    OK(cuEventCreate, (void **, unsigned), &f, 0);
    OK(cuEventRecord, (void *, void *), e, s);
    OK(cuEventRecord, (void *, void *), f, s);
    OK(cuStreamWaitEvent, (void *, void *, unsigned), s, e, 0);
    OK(cuEventSynchronize, (void *), f);
    OK(cuEventQuery, (void *), f);
    OK(cuEventElapsedTime, (float *, void *, void *), &ms, e, f);
    TRUE(ms >= 0);
    OK(cuEventDestroy_v2, (void *), e);
    OK(cuEventDestroy_v2, (void *), f);
}

static void virtual_memory(const char *self, const char *path) {
    uint64_t p, h, again, back, flags = 9;
    size_t least;
    prop got;
    int fd, dmabuf;
    OK(cuMemGetAllocationGranularity, (size_t *, const prop *, int), &least, &on_device, 0);
    TRUE(least == size);
    OK(cuMemCreate, (uint64_t *, size_t, const prop *, uint64_t), &h, size, &on_device, 0);
    GIVES(INVALID_VALUE, cuMemCreate, (uint64_t *, size_t, const prop *, uint64_t), &back, size, NULL, 0);
    OK(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, uint64_t), &p, size, 0, 0, 0);
    OK(cuMemMap, (uint64_t, size_t, size_t, uint64_t, uint64_t), p, size, 0, h, 0);
    OK(cuMemSetAccess, (uint64_t, size_t, const access_desc *, size_t), p, size, &grant, 1);
    OK(cuMemGetAccess, (uint64_t *, const location *, uint64_t), &flags, &grant.at, p);
    TRUE(flags == 3);
    OK(cuMemGetAllocationPropertiesFromHandle, (prop *, uint64_t), &got, h);
    TRUE(memcmp(&got, &on_device, sizeof got) == 0);
    OK(cuMemRetainAllocationHandle, (uint64_t *, void *), &again, (void *)p);
    OK(cuMemRelease, (uint64_t), again);
    OK(cuMemsetD8_v2, (uint64_t, unsigned char, size_t), p, 0x5a, size);
    OK(cuCtxSynchronize, (void)); // a memset may return before it is done, and another process reads it
    OK(cuMemExportToShareableHandle, (void *, uint64_t, int, uint64_t), &fd, h, 1, 0);
    OK(cuMemImportFromShareableHandle, (uint64_t *, void *, int), &back, (void *)(intptr_t)fd, 1);
    OK(cuMemRelease, (uint64_t), back);
    OK(cuMemGetHandleForAddressRange, (void *, uint64_t, size_t, int, uint64_t), &dmabuf, p, size, 1, 0);
    TRUE(close(dmabuf) == 0);

    // A child of fork is refused at once; a program that it becomes is not.
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int version;
        const char *text;
        int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
        int (*ask)(int *) = (int (*)(int *))dlsym(library, "cuDriverGetVersion");
        int (*name)(int, const char **) = (int (*)(int, const char **))dlsym(library, "cuGetErrorName");
        _exit(init(0) == NOT_INITIALIZED && ask(&version) == NOT_INITIALIZED && name(NOT_INITIALIZED, &text) == 0 && strcmp(text, "CUDA_ERROR_NOT_INITIALIZED") == 0 ? 0 : 1);
    }
    TRUE(status_of(child) == 0);
    child = fork();
    if (child == 0) {
        char number[20];
        snprintf(number, sizeof number, "%d", fd);
        fcntl(fd, F_SETFD, 0);
        execl(self, self, path, "import", number, (char *)NULL);
        _exit(1);
    }
    TRUE(status_of(child) == 0);

    TRUE(close(fd) == 0);
    OK(cuMemUnmap, (uint64_t, size_t), p, size);
    OK(cuMemRelease, (uint64_t), h);
    OK(cuMemAddressFree, (uint64_t, size_t), p, size);
}

static void multicasts(void) {
    uint64_t mc, h, p;
    size_t least;
    multicast object = {.devices = 2, .size = size, .handles = 1};
    OK(cuMulticastGetGranularity, (size_t *, const multicast *, int), &least, &object, 0);
    TRUE(least == size);
    OK(cuMulticastCreate, (uint64_t *, const multicast *), &mc, &object);
    OK(cuMulticastAddDevice, (uint64_t, int), mc, 0);
    OK(cuMulticastAddDevice, (uint64_t, int), mc, 1);
    OK(cuMemCreate, (uint64_t *, size_t, const prop *, uint64_t), &h, size, &on_device, 0);
    OK(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, uint64_t), &p, size, 0, 0, 0);
    OK(cuMemMap, (uint64_t, size_t, size_t, uint64_t, uint64_t), p, size, 0, h, 0);
    OK(cuMemSetAccess, (uint64_t, size_t, const access_desc *, size_t), p, size, &grant, 1);
    OK(cuMulticastBindMem, (uint64_t, size_t, uint64_t, size_t, size_t, uint64_t), mc, 0, h, 0, size, 0);
    OK(cuMulticastUnbind, (uint64_t, int, size_t, size_t), mc, 0, 0, size);
    OK(cuMulticastBindMem_v2, (uint64_t, int, size_t, uint64_t, size_t, size_t, uint64_t), mc, 0, 0, h, 0, size, 0);
    OK(cuMulticastUnbind, (uint64_t, int, size_t, size_t), mc, 0, 0, size);
    OK(cuMulticastBindAddr, (uint64_t, size_t, uint64_t, size_t, uint64_t), mc, 0, p, size, 0);
    OK(cuMulticastUnbind, (uint64_t, int, size_t, size_t), mc, 0, 0, size);
    OK(cuMulticastBindAddr_v2, (uint64_t, int, size_t, uint64_t, size_t, uint64_t), mc, 0, 0, p, size, 0);
    OK(cuMulticastUnbind, (uint64_t, int, size_t, size_t), mc, 0, 0, size);
    OK(cuMemUnmap, (uint64_t, size_t), p, size);
    OK(cuMemAddressFree, (uint64_t, size_t), p, size);
    OK(cuMemRelease, (uint64_t), h);
    OK(cuMemRelease, (uint64_t), mc);
}

static void managed(void *s) {
    uint64_t p;
    location device = {1, 0};
    int32_t preferred = -9, mostly = -9;
    OK(cuMemAllocManaged, (uint64_t *, size_t, unsigned), &p, size, 1);
    OK(cuMemAdvise, (uint64_t, size_t, int, int), p, size, 1, 0);
    OK(cuMemAdvise_v2, (uint64_t, size_t, int, location), p, size, 3, device);
    OK(cuMemPrefetchAsync, (uint64_t, size_t, int, void *), p, size, 0, s);
    OK(cuMemPrefetchAsync_v2, (uint64_t, size_t, location, unsigned, void *), p, size, device, 0, s);
    size_t n = size, first = 0;
    OK(cuMemPrefetchBatchAsync, (uint64_t *, size_t *, size_t, location *, size_t *, size_t, uint64_t, void *), &p, &n, 1, &device, &first, 1, 0, s);
    struct { unsigned order; location src, dst; unsigned flags; } how = {1, {0, 0}, {0, 0}, 0};
    uint64_t copied = p + size / 2;
    size_t half = size / 2;
    OK(cuMemcpyBatchAsync_v2, (uint64_t *, uint64_t *, size_t *, size_t, void *, size_t *, size_t, void *), &copied, &p, &half, 1, &how, &first, 1, s);
    GIVES(INVALID_VALUE, cuMemcpyBatchAsync_v2, (uint64_t *, uint64_t *, size_t *, size_t, void *, size_t *, size_t, void *), &copied, &p, &half, 0, &how, &first, 1, s);
    OK(cuMemDiscardBatchAsync, (uint64_t *, size_t *, size_t, uint64_t, void *), &p, &n, 1, 0, s);
    OK(cuMemDiscardAndPrefetchBatchAsync, (uint64_t *, size_t *, size_t, location *, size_t *, size_t, uint64_t, void *), &p, &n, 1, &device, &first, 1, 0, s);
    GIVES(INVALID_VALUE, cuMemDiscardBatchAsync, (uint64_t *, size_t *, size_t, uint64_t, void *), NULL, &n, 1, 0, s);
    OK(cuStreamSynchronize, (void *), s);
    OK(cuMemRangeGetAttribute, (void *, size_t, int, uint64_t, size_t), &preferred, 4, 2, p, size);
    TRUE(preferred == 0);
    void *out[] = {&mostly, &preferred};
    size_t sizes[] = {4, 4};
    int attributes[] = {1, 2};
    OK(cuMemRangeGetAttributes, (void **, size_t *, int *, size_t, uint64_t, size_t), out, sizes, attributes, 2, p, size);
    TRUE(mostly == 1 && preferred == 0);
    OK(cuStreamAttachMemAsync, (void *, uint64_t, size_t, unsigned), s, p, 0, 4);
    OK(cuStreamSynchronize, (void *), s);
    OK(cuMemFree_v2, (uint64_t), p);
}

static void graphs(void *s) {
    void *g, *x;
    uint64_t p;
    unsigned status = 9;
    unsigned long long id;
    size_t nodes = 0;
    OK(cuMemAlloc_v2, (uint64_t *, size_t), &p, 64);
    OK(cuStreamBeginCapture_v2, (void *, int), s, 2);
    OK(cuMemsetD8Async, (uint64_t, unsigned char, size_t, void *), p, 3, 64, s);
    OK(cuStreamIsCapturing, (void *, unsigned *), s, &status);
    TRUE(status == 1);
    OK(cuStreamGetCaptureInfo, (void *, unsigned *, unsigned long long *), s, &status, &id);
    OK(cuStreamGetCaptureInfo, (void *, unsigned *, unsigned long long *), s, &status, NULL);
    OK(cuStreamEndCapture, (void *, void **), s, &g);
    OK(cuGraphGetNodes, (void *, void **, size_t *), g, NULL, &nodes);
    TRUE(nodes == 1);
    OK(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long), &x, g, 0);
    OK(cuGraphLaunch, (void *, void *), x, s);
    OK(cuStreamSynchronize, (void *), s);
    OK(cuGraphExecDestroy, (void *), x);
    OK(cuGraphDestroy, (void *), g);
    OK(cuMemFree_v2, (uint64_t), p);
}

// What launches are made of beside their arguments.
static void launches(void *s, void *m, void *f, void **params) {
    int value, least, greatest, blocks;
    uint64_t p;
    size_t bytes;
    void *urgent;
    struct { unsigned id, padding, value[16]; } cooperative = {2, 0, {1}};
    struct { unsigned g[3], b[3], shared; void *s; void *attributes; unsigned n; } config = {{1, 1, 1}, {32, 1, 1}, 0, s, &cooperative, 1};
    OK(cuFuncGetAttribute, (int *, int, void *), &value, 1, f);
    TRUE(value == 0);
    OK(cuFuncSetAttribute, (void *, int, int), f, 8, 100 << 10);
    GIVES(INVALID_VALUE, cuFuncSetAttribute, (void *, int, int), f, 8, 1 << 30);
    OK(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, void *, int, size_t), &blocks, f, 256, 100 << 10);
    TRUE(blocks == 2);
    OK(cuLaunchKernelEx, (const void *, void *, void **, void **), &config, f, params, NULL);
    // Captured, the launch takes a list of parameters; a block of them ends the capture.
    void *g, *block[] = {NULL};
    OK(cuStreamBeginCapture_v2, (void *, int), s, 2);
    OK(cuLaunchKernelEx, (const void *, void *, void **, void **), &config, f, params, NULL);
    OK(cuStreamEndCapture, (void *, void **), s, &g);
    OK(cuGraphDestroy, (void *), g);
    OK(cuStreamBeginCapture_v2, (void *, int), s, 2);
    GIVES(INVALID_VALUE, cuLaunchKernelEx, (const void *, void *, void **, void **), &config, f, NULL, block);
    GIVES(INVALIDATED, cuStreamEndCapture, (void *, void **), s, &g);
    config.g[0] = 1 << 20;
    GIVES(TOO_LARGE, cuLaunchKernelEx, (const void *, void *, void **, void **), &config, f, params, NULL);
    GIVES(NOT_FOUND, cuModuleGetGlobal_v2, (uint64_t *, size_t *, void *, const char *), &p, &bytes, m, "nothing");
    OK(cuCtxGetStreamPriorityRange, (int *, int *), &least, &greatest);
    OK(cuStreamCreateWithPriority, (void **, unsigned, int), &urgent, 1, greatest - 1);
    OK(cuStreamGetPriority, (void *, int *), urgent, &value);
    TRUE(value == greatest && greatest < least);
    OK(cuStreamDestroy_v2, (void *), urgent);
    OK(cuStreamSynchronize, (void *), s);
}

// Numbers that went wrong, and pointers that are missing, are refused.
static void wrong_arguments(void *f) {
    uint64_t p = 0;
    const size_t endless = (size_t)-1;
    int32_t value;
    void *out[] = {&value, NULL}, *params[] = {NULL, NULL, NULL, NULL}, *made;
    int attributes[] = {1, 2}, device;
    size_t sizes[] = {4, 4};
    OK(cuMemAllocManaged, (uint64_t *, size_t, unsigned), &p, size, 1);
    GIVES(INVALID_VALUE, cuMemSetAccess, (uint64_t, size_t, const access_desc *, size_t), p, size, &grant, endless);
    GIVES(INVALID_VALUE, cuMemDiscardBatchAsync, (uint64_t *, size_t *, size_t, uint64_t, void *), &p, sizes, endless, 0, NULL);
    GIVES(INVALID_VALUE, cuMemRangeGetAttribute, (void *, size_t, int, uint64_t, size_t), &value, endless - 3, 1, p, size);
    GIVES(INVALID_VALUE, cuMemRangeGetAttributes, (void **, size_t *, int *, size_t, uint64_t, size_t), out, sizes, attributes, 2, p, size);
    GIVES(INVALID_VALUE, cuMemRangeGetAttributes, (void **, size_t *, int *, size_t, uint64_t, size_t), out, sizes, attributes, endless, p, size);
    out[1] = &value;
    sizes[1] = endless - 3;
    GIVES(INVALID_VALUE, cuMemRangeGetAttributes, (void **, size_t *, int *, size_t, uint64_t, size_t), out, sizes, attributes, 2, p, size);
    OK(cuMemFree_v2, (uint64_t), p);
    typedef int launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    launch *go = (launch *)find(__LINE__, "cuLaunchKernel");
    TRUE(go(f, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL) == INVALID_VALUE);
    void *sizeless[] = {(void *)1, &p, (void *)2, NULL, NULL};
    TRUE(go(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, sizeless) == INVALID_VALUE);
    OK(cuDeviceGet, (int *, int), &device, 0);
    GIVES(INVALID_VALUE, cuCtxCreate_v2, (void **, unsigned, int), &made, 0x100, device);
}

static void kernels(void *s, char *ptx) {
    void *m, *f;
    uint64_t p, n = 4;
    uint32_t first = 10, step = 3, got[4];
    size_t offset, bytes;
    char log[300] = "";
    int options[] = {5, 6};
    void *values[] = {log, (void *)sizeof log};
    const char *strange = ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry without_a_function()\n{\nret;\n}\n";
    OK(cuModuleLoadData, (void **, const void *), &m, ptx);
    OK(cuModuleUnload, (void *), m);
    OK(cuModuleLoadDataEx, (void **, const void *, unsigned, int *, void **), &m, ptx, 2, options, values);
    OK(cuModuleGetFunction, (void **, void *, const char *), &f, m, "cuvmm_fill_u32");
    GIVES(NOT_FOUND, cuModuleGetFunction, (void **, void *, const char *), &f, m, "nothing");
    OK(cuModuleGetFunction, (void **, void *, const char *), &f, m, "cuvmm_fill_u32");
    OK(cuFuncGetParamInfo, (void *, size_t, size_t *, size_t *), f, 3, &offset, &bytes);
    TRUE(offset == 20 && bytes == 4);
    OK(cuMemAlloc_v2, (uint64_t *, size_t), &p, sizeof got);
    void *params[] = {&p, &n, &first, &step};
    typedef int launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    launches(s, m, f, params);
    launch *go = (launch *)find(__LINE__, "cuLaunchKernel");
    TRUE(go(f, 1, 1, 1, 32, 1, 1, 0, s, params, NULL) == 0);
    OK(cuStreamSynchronize, (void *), s);
    OK(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), got, p, sizeof got);
    TRUE(got[0] == 10 && got[3] == 19);
    struct { uint64_t p, n; uint32_t first, step; } block = {p, n, 1, 1};
    size_t length = sizeof block;
    void *extra[] = {(void *)1, &block, (void *)2, &length, NULL};
    TRUE(go(f, 1, 1, 1, 32, 1, 1, 0, s, NULL, extra) == 0);
    TRUE(go(f, 1, 1, 1, 32, 1, 1, 0, s, params, extra) == INVALID_VALUE);
    OK(cuStreamSynchronize, (void *), s);
    OK(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), got, p, sizeof got);
    TRUE(got[0] == 1 && got[3] == 4);
    wrong_arguments(f);
    OK(cuMemFree_v2, (uint64_t), p);
    OK(cuModuleUnload, (void *), m);

    // Kernels without a Go function fail at load, in words.
    GIVES(NO_BINARY, cuModuleLoadDataEx, (void **, const void *, unsigned, int *, void **), &m, strange, 2, options, values);
    TRUE(strstr(log, "without_a_function") && strstr(log, "no Go function"));
    GIVES(NO_BINARY, cuModuleLoadData, (void **, const void *), &m, strange);
    GIVES(NO_BINARY, cuModuleLoadData, (void **, const void *), &m, "\x7f" "ELF");
    GIVES(INVALID_PTX, cuModuleLoadDataEx, (void **, const void *, unsigned, int *, void **), &m, ".version 8.0\n", 2, options, values);
    TRUE(strstr(log, ".target"));
}

// What the driver logged of a call that failed, and what is refused of this process itself.
static void log_and_checkpoints(void) {
    uint32_t end, from;
    char text[2000];
    size_t n = sizeof text;
    int state = 9;
    struct { unsigned timeout, reserved[15]; } wait = {100, {0}};
    OK(cuLogsCurrent, (uint32_t *, unsigned), &end, 0);
    from = end;
    GIVES(INVALID_VALUE, cuMemHostRegister_v2, (void *, size_t, unsigned), (void *)(uintptr_t)(1 << 20), 4096, 0);
    OK(cuLogsDumpToMemory, (uint32_t *, char *, size_t *, unsigned), &from, text, &n, 0);
    TRUE(from == end + 1 && n == strlen(text) && strstr(text, "[cuMemHostRegister] ") && text[n - 1] == '\n');
    GIVES(INVALID_VALUE, cuLogsDumpToMemory, (uint32_t *, char *, size_t *, unsigned), &from, NULL, &n, 0);
    OK(cuCheckpointProcessGetState, (int, int *), getpid(), &state);
    TRUE(state == 0);
    GIVES(NOT_SUPPORTED, cuCheckpointProcessLock, (int, void *), getpid(), &wait);
    GIVES(NOT_SUPPORTED, cuCheckpointProcessCheckpoint, (int, void *), getpid(), NULL);
    GIVES(NOT_SUPPORTED, cuCheckpointProcessRestore, (int, void *), getpid(), NULL);
    GIVES(NOT_SUPPORTED, cuCheckpointProcessUnlock, (int, void *), getpid(), NULL);
}

static void entry_points(void) {
    void *p = NULL;
    int status = 9;
    const char *text = NULL;
    OK(cuGetErrorName, (int, const char **), 2, &text);
    TRUE(strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
    OK(cuGetErrorString, (int, const char **), 2, &text);
    TRUE(strcmp(text, "out of memory") == 0);
    OK(cuGetErrorName, (int, const char **), 911, &text); // which the software driver never returns
    TRUE(strcmp(text, "CUDA_ERROR_EXTERNAL_DEVICE") == 0);
    GIVES(INVALID_VALUE, cuGetErrorName, (int, const char **), 123456, &text);
    TRUE(text == NULL);
#define GET(want, name, version, flags) GIVES(want, cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *), name, &p, version, flags, &status)
    GET(0, "cuMemAlloc", 13000, 0);
    TRUE(p == dlsym(library, "cuMemAlloc_v2") && status == 0);
    GET(0, "cuMemAdvise", 12010, 0);
    TRUE(p == dlsym(library, "cuMemAdvise"));
    GET(0, "cuMemAdvise", 12020, 1);
    TRUE(p == dlsym(library, "cuMemAdvise_v2"));
    GET(NOT_FOUND, "cuMemAlloc", 3010, 0);
    TRUE(p == NULL && status == 2);
    GET(NOT_FOUND, "cuNothing", 13000, 0);
    TRUE(status == 1);
    GET(0, "cuStreamGetCaptureInfo", 11020, 0);
    GET(NOT_FOUND, "cuStreamGetCaptureInfo", 11030, 0);
    GET(NOT_SUPPORTED, "cuMemAlloc", 13000, 2);
    GET(INVALID_VALUE, "cuMemAlloc", 13000, 4);
    OK(cuGetProcAddress, (const char *, void **, int, uint64_t), "cuGetProcAddress", &p, 11030, 0);
    TRUE(p == dlsym(library, "cuGetProcAddress"));
    OK(cuGetProcAddress, (const char *, void **, int, uint64_t), "cuGetProcAddress", &p, 12000, 0);
    TRUE(p == dlsym(library, "cuGetProcAddress_v2"));
}

// Calls that the library itself never makes. testdata/vmm/legacy.c looks at what they do.
static void on_callback(void *stream, int status, void *at) {
    if (stream && status == 0) ++*(int *)at;
}

static size_t quarter(int threads) { return (size_t)threads / 4; }

static void clients(int device, void *s, char *ptx) {
    struct side { size_t x, y; uint32_t type; const void *host; uint64_t device; void *array; size_t pitch; };
    struct { struct side src, dst; size_t width, height; } in_array = {{.type = 3}, {.type = 3}, 4, 1}, row;
    struct { uint32_t type, handles; location at; char rest[72]; } props = {.type = 1, .handles = 1, .at = {1, 0}};
    void *primary, *made, *pool, *other, *m, *f, *state, *host;
    char text[300] = "text", log[300] = "";
    uint64_t p, q, n = 0;
    size_t bytes;
    unsigned flags = 9;
    int major, minor, called = 0, grid, block, blocks, options[] = {5, 6};
    void *values[] = {log, (void *)sizeof log};
    OK(cuDeviceComputeCapability, (int *, int *, int), &major, &minor, device);
    TRUE(major == 9 && minor == 0);
    OK(cuProfilerStart, (void));
    OK(cuProfilerStop, (void));

    // Contexts.
    OK(cuDevicePrimaryCtxSetFlags_v2, (int, unsigned), device, 2);
    OK(cuCtxGetFlags, (unsigned *), &flags);
    TRUE(flags == 2);
    GIVES(INVALID_VALUE, cuDevicePrimaryCtxSetFlags_v2, (int, unsigned), device, 0x100);
    OK(cuCtxSetLimit, (int, size_t), 2, 64 << 20);
    OK(cuCtxGetLimit, (size_t *, int), &bytes, 2);
    TRUE(bytes == 64 << 20);
    GIVES(INVALID_VALUE, cuCtxSetLimit, (int, size_t), 99, 1);
    OK(cuCtxGetCurrent, (void **), &primary);
    OK(cuCtxCreate_v2, (void **, unsigned, int), &made, 0, 1);
    OK(cuCtxPopCurrent_v2, (void **), NULL);
    OK(cuCtxEnablePeerAccess, (void *, unsigned), made, 0);
    GIVES(ALREADY_ENABLED, cuCtxEnablePeerAccess, (void *, unsigned), made, 0);
    OK(cuCtxDisablePeerAccess, (void *), made);
    GIVES(NOT_ENABLED, cuCtxDisablePeerAccess, (void *), made);
    GIVES(INVALID_VALUE, cuCtxEnablePeerAccess, (void *, unsigned), made, 1);
    OK(cuCtxDestroy_v2, (void *), made);

    // Memory.
    OK(cuMemAllocPitch_v2, (uint64_t *, size_t *, size_t, size_t, unsigned), &p, &bytes, 100, 2, 4);
    GIVES(INVALID_VALUE, cuMemAllocPitch_v2, (uint64_t *, size_t *, size_t, size_t, unsigned), &q, &bytes, (size_t)1 << 40, (size_t)1 << 40, 4);
    OK(cuMemGetAddressRange_v2, (uint64_t *, size_t *, uint64_t), &q, &bytes, p + 5);
    TRUE(q == p && bytes == 1024);
    OK(cuMemsetD32_v2, (uint64_t, unsigned, size_t), p, 0x01010101, 256);
    OK(cuMemcpy, (uint64_t, uint64_t, size_t), p, (uintptr_t)text, 5);
    OK(cuMemcpy, (uint64_t, uint64_t, size_t), (uintptr_t)text + 8, (uintptr_t)text, 5);
    OK(cuMemcpyAsync, (uint64_t, uint64_t, size_t, void *), (uintptr_t)text + 20, p, 5, s);
    OK(cuStreamSynchronize, (void *), s);
    TRUE(strcmp(text + 8, "text") == 0 && strcmp(text + 20, "text") == 0);
    GIVES(INVALID_VALUE, cuMemcpy, (uint64_t, uint64_t, size_t), 8, p, 5);
    memset(&row, 0, sizeof row);
    row.src.type = row.dst.type = 4, row.src.device = p, row.dst.device = p + 512, row.src.pitch = row.dst.pitch = 512, row.width = 5, row.height = 1;
    OK(cuMemcpy2D_v2, (void *), &row);
    OK(cuMemcpy2DUnaligned_v2, (void *), &row);
    OK(cuMemcpy2DAsync_v2, (void *, void *), &row, s);
    GIVES(NOT_SUPPORTED, cuMemcpy2D_v2, (void *), &in_array);
    row.src.x = 510;
    GIVES(INVALID_VALUE, cuMemcpy2DUnaligned_v2, (void *), &row);
    OK(cuStreamSynchronize, (void *), s);
    OK(cuMemFree_v2, (uint64_t), p);
    OK(cuMemHostAlloc, (void **, size_t, unsigned), &host, 4096, 4);
    OK(cuMemHostGetFlags, (unsigned *, void *), &flags, host);
    TRUE(flags == 6);
    GIVES(INVALID_VALUE, cuMemHostGetFlags, (unsigned *, void *), &flags, text);
    OK(cuMemFreeHost, (void *), host);

    // Pools.
    OK(cuDeviceGetDefaultMemPool, (void **, int), &pool, device);
    GIVES(INVALID_DEVICE, cuDeviceGetDefaultMemPool, (void **, int), &other, 99);
    GIVES(NOT_SUPPORTED, cuMemPoolCreate, (void **, const void *), &other, &props);
    props.handles = 0;
    OK(cuMemPoolCreate, (void **, const void *), &other, &props);
    OK(cuDeviceSetMemPool, (int, void *), device, other);
    OK(cuDeviceGetMemPool, (void **, int), &pool, device);
    TRUE(pool == other);
    OK(cuMemPoolSetAttribute, (void *, int, void *), pool, 4, &n);
    GIVES(NOT_SUPPORTED, cuMemPoolGetAttribute, (void *, int, void *), pool, 5, &n);
    OK(cuMemPoolGetAttribute, (void *, int, void *), pool, 4, &n);
    OK(cuMemAllocFromPoolAsync, (uint64_t *, size_t, void *, void *), &p, 64, pool, s);
    OK(cuMemFreeAsync, (uint64_t, void *), p, s);
    OK(cuMemPoolTrimTo, (void *, size_t), pool, 0);
    OK(cuMemPoolDestroy, (void *), pool);
    GIVES(INVALID_VALUE, cuMemAllocFromPoolAsync, (uint64_t *, size_t, void *, void *), &p, 64, pool, s);

    // Streams and kernels.
    OK(cuStreamAddCallback, (void *, void (*)(void *, int, void *), void *, unsigned), s, on_callback, &called, 0);
    OK(cuStreamSynchronize, (void *), s);
    TRUE(called == 1);
    OK(cuStreamBeginCapture_v2, (void *, int), s, 2);
    GIVES(UNSUPPORTED_IN_CAPTURE, cuStreamAddCallback, (void *, void (*)(void *, int, void *), void *, unsigned), s, on_callback, &called, 0);
    GIVES(INVALIDATED, cuStreamEndCapture, (void *, void **), s, &other);
    OK(cuModuleLoadData, (void **, const void *), &m, ptx);
    OK(cuModuleGetFunction, (void **, void *, const char *), &f, m, "cuvmm_fill_u32");
    OK(cuFuncSetCacheConfig, (void *, int), f, 1);
    GIVES(INVALID_VALUE, cuFuncSetCacheConfig, (void *, int), f, 4);
    OK(cuMemAlloc_v2, (uint64_t *, size_t), &p, 16);
    uint32_t first = 1;
    n = 4;
    void *params[] = {&p, &n, &first, &first};
    OK(cuLaunchCooperativeKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **), f, 1, 1, 1, 32, 1, 1, 0, s, params);
    OK(cuStreamSynchronize, (void *), s);
    OK(cuMemFree_v2, (uint64_t), p);
    OK(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int *, void *, int, size_t, unsigned), &blocks, f, 1024, 0, 1);
    TRUE(blocks == 2);
    OK(cuOccupancyMaxPotentialBlockSize, (int *, int *, void *, size_t (*)(int), size_t, int), &grid, &block, f, quarter, 0, 0);
    TRUE(grid == 2 * 132 && block == 1024);
    OK(cuOccupancyMaxPotentialBlockSizeWithFlags, (int *, int *, void *, size_t (*)(int), size_t, int, unsigned), &grid, &block, f, NULL, 100 << 10, 200, 0);
    TRUE(grid == 2 * 132 && block == 200);
    OK(cuModuleUnload, (void *), m);

    // The linker is there, and refuses everything.
    OK(cuLinkCreate_v2, (unsigned, int *, void **, void **), 2, options, values, &state);
    GIVES(NO_COMPILER, cuLinkAddData_v2, (void *, int, void *, size_t, const char *, unsigned, int *, void **), state, 1, ptx, 4, "mine", 0, NULL, NULL);
    TRUE(strstr(log, "mine") && strstr(log, "no compiler"));
    GIVES(NO_COMPILER, cuLinkAddFile_v2, (void *, int, const char *, unsigned, int *, void **), state, 1, "file.o", 0, NULL, NULL);
    GIVES(NO_COMPILER, cuLinkComplete, (void *, void **, size_t *), state, &other, &bytes);
    OK(cuLinkDestroy, (void *), state);
    GIVES(INVALID_HANDLE, cuLinkDestroy, (void *), state);
}

// Another process's memory, by the bytes of a legacy handle, and this process's for another.
typedef struct { unsigned char bytes[64]; } ipc;

static void open_ipc(const char *hex) {
    ipc h;
    int device;
    void *ctx;
    uint64_t p;
    char text[6];
    for (int i = 0; i < 64; i++) TRUE(sscanf(hex + 2 * i, "%2hhx", &h.bytes[i]) == 1);
    OK(cuInit, (unsigned), 0);
    OK(cuDeviceGet, (int *, int), &device, 0);
    OK(cuDevicePrimaryCtxRetain, (void **, int), &ctx, device);
    OK(cuCtxSetCurrent, (void *), ctx);
    OK(cuIpcOpenMemHandle_v2, (uint64_t *, ipc, unsigned), &p, h, 1);
    OK(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), text, p, 6);
    TRUE(strcmp(text, "hello") == 0);
    OK(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), p, "there", 6);
    GIVES(INVALID_VALUE, cuMemFree_v2, (uint64_t), p);
    OK(cuIpcCloseMemHandle, (uint64_t), p);
    GIVES(INVALID_VALUE, cuIpcCloseMemHandle, (uint64_t), p);
}

static void legacy_ipc(const char *self, const char *path) {
    uint64_t p, opened;
    ipc h, wrong = {{1}};
    char hex[129] = "", text[6];
    OK(cuMemAlloc_v2, (uint64_t *, size_t), &p, 10000);
    OK(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), p, "hello", 6);
    OK(cuIpcGetMemHandle, (ipc *, uint64_t), &h, p);
    GIVES(INVALID_VALUE, cuIpcGetMemHandle, (ipc *, uint64_t), &wrong, p + 512);
    GIVES(INVALID_CONTEXT, cuIpcOpenMemHandle_v2, (uint64_t *, ipc, unsigned), &opened, h, 1);
    GIVES(INVALID_HANDLE, cuIpcOpenMemHandle_v2, (uint64_t *, ipc, unsigned), &opened, wrong, 1);
    for (int i = 0; i < 64; i++) snprintf(hex + 2 * i, 3, "%02x", h.bytes[i]);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl(self, self, path, "ipc", hex, (char *)NULL);
        _exit(1);
    }
    TRUE(status_of(child) == 0);
    OK(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), text, p, 6);
    TRUE(strcmp(text, "there") == 0);
    OK(cuMemFree_v2, (uint64_t), p);
}

static char *read_text(const char *path) {
    static char text[1 << 16];
    FILE *f = fopen(path, "r");
    TRUE(f && fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    return text;
}

int main(int argc, char **argv) {
    int version = 0, n = 0, device, value;
    char name[8];
    uuid id;
    size_t total;
    TRUE(argc >= 3);
    library = dlopen(argv[1], RTLD_NOW);
    if (!library) fail(__LINE__, dlerror());
    if (argc == 4) {
        if (strcmp(argv[2], "ipc") == 0) open_ipc(argv[3]);
        else other_process(atoi(argv[3]));
        return 0;
    }
    OK(cuDriverGetVersion, (int *), &version);
    TRUE(version == 13010);
    GIVES(NOT_INITIALIZED, cuDeviceGetCount, (int *), &n);
    GIVES(INVALID_VALUE, cuInit, (unsigned), 1);
    OK(cuInit, (unsigned), 0);
    OK(cuDeviceGetCount, (int *), &n);
    TRUE(n == 2);
    OK(cuDeviceGet, (int *, int), &device, 0);
    OK(cuDeviceGetName, (char *, int, int), name, sizeof name, device);
    TRUE(strcmp(name, "Softwar") == 0);
    OK(cuDeviceGetUuid_v2, (uuid *, int), &id, device);
    TRUE(memcmp(id.bytes, "cuvmm-sim-gpu000", 16) == 0);
    OK(cuDeviceTotalMem_v2, (size_t *, int), &total, device);
    TRUE(total == 1ul << 30);
    OK(cuDeviceGetAttribute, (int *, int, int), &value, 16, device);
    TRUE(value == 132);
    OK(cuDeviceCanAccessPeer, (int *, int, int), &value, 0, 1);
    TRUE(value == 1);
    entry_points();
    contexts(device);
    void *primary, *s = stream_of(1);
    OK(cuCtxGetCurrent, (void **), &primary);
    memory(s);
    streams(s, primary);
    virtual_memory(argv[0], argv[1]);
    multicasts();
    managed(s);
    host_functions(s);
    graphs(s);
    kernels(s, read_text(argv[2]));
    log_and_checkpoints();
    clients(device, s, read_text(argv[2]));
    legacy_ipc(argv[0], argv[1]);
    OK(cuStreamDestroy_v2, (void *), s);
    OK(cuDevicePrimaryCtxReset_v2, (int), device);
    OK(cuCtxGetCurrent, (void **), &s);
    TRUE(s == primary);
    OK(cuCtxSetCurrent, (void *), NULL);
    OK(cuDevicePrimaryCtxRelease_v2, (int), device);
    return 0;
}
