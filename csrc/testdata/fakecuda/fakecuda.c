// A stand-in for libcuda.so.1, for tests: it keeps what belongs to the thread
// (the stack of contexts, the capture mode) as the driver does, returns fixed
// values, and records every call with the bytes of its arguments. It is written
// against the vendor's documented declarations, not against the library's own.
// It has no memory, no streams and no devices: nothing here runs.
//
//   cc -shared -fPIC -O2 -o libcuda.so.1 fakecuda.c -ldl
//
// It is built without a soname: once loaded, the loader would give it to
// any code in the process that opens libcuda.so.1 and means the real one.
//
// Variants:
//
//   FAKECUDA_VERSION=11040       an older driver: later entry points are missing (default 13010)
//   FAKECUDA_MISSING='"a,b"'     a driver that lacks these
//   FAKECUDA_PROC_V1             only the first form of cuGetProcAddress
//   FAKECUDA_NO_PROC             none: a driver before 11.3
//   FAKECUDA_HIDES_PARAMS        cuFuncGetParamInfo fails for a kernel's second parameter
//   FAKECUDA_PARAMS=n            kernels have n parameters of a byte each
//   FAKECUDA_STUB                the toolkit's stub: every call returns STUB_LIBRARY
//   FAKECUDA_NOT_CUDA            a library that is no driver

#ifdef FAKECUDA_NOT_CUDA

int fakecuda_nothing(void) { return 0; }

#else

#define _GNU_SOURCE
#include "fakecuda.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef FAKECUDA_VERSION
#define FAKECUDA_VERSION 13010
#endif
#ifndef FAKECUDA_MISSING
#define FAKECUDA_MISSING ""
#endif

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, STUB_LIBRARY = 34, NOT_FOUND = 500 };

#ifdef FAKECUDA_STUB
enum { USUAL = STUB_LIBRARY };
#else
enum { USUAL = SUCCESS };
#endif

// What belongs to the thread.

static __thread CUcontext stack[16];
static __thread int depth;
static __thread int mode; // 0 global, 1 thread-local, 2 relaxed

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

// The shared state.

static fakecuda_state *state;

__attribute__((constructor)) static void open_state(void) {
    Dl_info info;
    char path[4096];
    static fakecuda_state unshared = {.quiet = 1};
    state = &unshared;
    if (!dladdr((void *)open_state, &info)) return;
    snprintf(path, sizeof path, "%s.state", info.dli_fname);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *state) != 0) return;
    void *p = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p != MAP_FAILED) state = p;
}

// Arguments of call: VAL for a value, MEM for bytes behind a pointer.
#define VAL(x) (const void *)&(x), sizeof(x)
#define MEM(p, n) (const void *)(p), (size_t)(n)
#define END (const void *)NULL, (size_t)0

// Records a call and returns its result.
static CUresult call(const char *entry, ...) {
    if (__atomic_load_n(&state->quiet, __ATOMIC_RELAXED)) return USUAL;
    CUresult result = USUAL;
    for (int i = 0; i < FAKECUDA_RESULTS && state->results[i].entry[0]; i++) {
        fakecuda_result *r = &state->results[i];
        if (strcmp(r->entry, entry) != 0) continue;
        if (r->skip > 0)
            r->skip--;
        else
            result = r->result;
        break;
    }
    fakecuda_call c = {.context = (uintptr_t)current(), .thread = (int32_t)syscall(SYS_gettid), .mode = (uint32_t)mode, .result = result};
    snprintf(c.entry, sizeof c.entry, "%s", entry);
    va_list list;
    va_start(list, entry);
    for (;;) {
        const void *p = va_arg(list, const void *);
        size_t n = va_arg(list, size_t);
        if (!p) {
            if (n == 0) break;
            abort(); // a null pointer to input: the caller's mistake
        }
        if (c.n + n > sizeof c.args) n = sizeof c.args - c.n;
        memcpy(c.args + c.n, p, n);
        c.n += (uint32_t)n;
    }
    va_end(list);
    uint32_t at = __atomic_fetch_add(&state->count, 1, __ATOMIC_ACQ_REL);
    if (at < FAKECUDA_CALLS) state->calls[at] = c;
    return result;
}

// Ends an entry point: writes its outputs if the call succeeded.
#define RETURN(result, ...)     \
    do {                        \
        CUresult code = (result); \
        if (code == SUCCESS) { __VA_ARGS__; } \
        return code;            \
    } while (0)

// Devices.

CUresult cuInit(unsigned int flags) { return call("cuInit", VAL(flags), END); }

CUresult cuDriverGetVersion(int *version) { RETURN(call("cuDriverGetVersion", END), *version = FAKECUDA_VERSION); }

CUresult cuDeviceGetCount(int *count) { RETURN(call("cuDeviceGetCount", END), *count = 3); }

CUresult cuDeviceGet(CUdevice *dev, int ordinal) { RETURN(call("cuDeviceGet", VAL(ordinal), END), *dev = 40 + ordinal); }

CUresult cuDeviceGetName(char *name, int len, CUdevice dev) {
    RETURN(call("cuDeviceGetName", VAL(len), VAL(dev), END), snprintf(name, (size_t)len, "Fake GPU %d", dev));
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice dev) {
    RETURN(call("cuDeviceGetUuid", VAL(dev), END), for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(0xe0 + i));
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    RETURN(call("cuDeviceTotalMem", VAL(dev), END), *bytes = 0x2300000000);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice dev) {
    RETURN(call("cuDeviceGetAttribute", VAL(attribute), VAL(dev), END), *value = -1000 - attribute);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer) {
    RETURN(call("cuDeviceCanAccessPeer", VAL(dev), VAL(peer), END), *can = 1);
}

// Contexts.

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev) {
    RETURN(call("cuDevicePrimaryCtxRetain", VAL(dev), END), *ctx = (CUcontext)0xc0de0001);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) { return call("cuDevicePrimaryCtxRelease", VAL(dev), END); }

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    RETURN(call("cuDevicePrimaryCtxGetState", VAL(dev), END), *flags = 0x18; *active = 1);
}

// Makes the new context current, on top of the thread's stack.
CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice dev) {
    RETURN(call("cuCtxCreate", VAL(flags), VAL(dev), END), *ctx = stack[depth++] = (CUcontext)0xc0de0002);
}

CUresult cuCtxDestroy_v2(CUcontext ctx) {
    RETURN(call("cuCtxDestroy", VAL(ctx), END), if (current() == ctx) depth--);
}

CUresult cuCtxGetCurrent(CUcontext *ctx) { RETURN(call("cuCtxGetCurrent", END), *ctx = current()); }

// Replaces the top of the stack; a null context pops it.
CUresult cuCtxSetCurrent(CUcontext ctx) {
    CUresult result = call("cuCtxSetCurrent", VAL(ctx), END);
    if (result != SUCCESS) return result;
    if (depth) depth--;
    if (ctx) stack[depth++] = ctx;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *ctx) {
    CUresult result = call("cuCtxPopCurrent", END);
    if (result == SUCCESS && depth == 0) result = INVALID_CONTEXT;
    RETURN(result, *ctx = stack[--depth]);
}

CUresult cuCtxGetDevice(CUdevice *dev) { RETURN(call("cuCtxGetDevice", END), *dev = 41); }

CUresult cuCtxSynchronize(void) { return call("cuCtxSynchronize", END); }

// Streams.

CUresult cuStreamCreate(CUstream *s, unsigned int flags) {
    RETURN(call("cuStreamCreate", VAL(flags), END), *s = (CUstream)0x5000000001);
}

CUresult cuStreamDestroy_v2(CUstream s) { return call("cuStreamDestroy", VAL(s), END); }

CUresult cuStreamQuery(CUstream s) { return call("cuStreamQuery", VAL(s), END); }

CUresult cuStreamSynchronize(CUstream s) { return call("cuStreamSynchronize", VAL(s), END); }

CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned int flags) {
    return call("cuStreamWaitEvent", VAL(s), VAL(e), VAL(flags), END);
}

CUresult cuStreamGetCtx(CUstream s, CUcontext *ctx) {
    RETURN(call("cuStreamGetCtx", VAL(s), END), *ctx = (CUcontext)0xc0de0003);
}

CUresult cuStreamGetFlags(CUstream s, unsigned int *flags) { RETURN(call("cuStreamGetFlags", VAL(s), END), *flags = 1); }

CUresult cuStreamGetId(CUstream s, unsigned long long *id) {
    RETURN(call("cuStreamGetId", VAL(s), END), *id = 0x1d00000000000007);
}

CUresult cuStreamWriteValue64_v2(CUstream s, CUdeviceptr p, uint64_t v, unsigned int flags) {
    return call("cuStreamWriteValue64", VAL(s), VAL(p), VAL(v), VAL(flags), END);
}

CUresult cuStreamWaitValue64_v2(CUstream s, CUdeviceptr p, uint64_t v, unsigned int flags) {
    return call("cuStreamWaitValue64", VAL(s), VAL(p), VAL(v), VAL(flags), END);
}

// The function is called at once, on the calling thread.
CUresult cuLaunchHostFunc(CUstream s, void (*f)(void *), void *data) {
    RETURN(call("cuLaunchHostFunc", VAL(s), END), f(data));
}

// Capture and graphs.

CUresult cuStreamIsCapturing(CUstream s, int *status) { RETURN(call("cuStreamIsCapturing", VAL(s), END), *status = 1); }

CUresult cuStreamGetCaptureInfo(CUstream s, int *status, uint64_t *id) {
    RETURN(call("cuStreamGetCaptureInfo", VAL(s), END), *status = 2; *id = 0xca00000000000009);
}

CUresult cuStreamBeginCapture_v2(CUstream s, int m) { return call("cuStreamBeginCapture", VAL(s), VAL(m), END); }

CUresult cuStreamEndCapture(CUstream s, CUgraph *g) {
    RETURN(call("cuStreamEndCapture", VAL(s), END), *g = (CUgraph)0x6000000001);
}

CUresult cuThreadExchangeStreamCaptureMode(int *m) {
    CUresult result = call("cuThreadExchangeStreamCaptureMode", VAL(*m), END);
    if (result != SUCCESS) return result;
    if (*m < 0 || *m > 2) return INVALID_VALUE;
    int was = mode;
    mode = *m;
    *m = was;
    return SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph g, unsigned long long flags) {
    RETURN(call("cuGraphInstantiateWithFlags", VAL(g), VAL(flags), END), *exec = (CUgraphExec)0x6000000002);
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream s) { return call("cuGraphLaunch", VAL(exec), VAL(s), END); }

CUresult cuGraphDestroy(CUgraph g) { return call("cuGraphDestroy", VAL(g), END); }

CUresult cuGraphExecDestroy(CUgraphExec exec) { return call("cuGraphExecDestroy", VAL(exec), END); }

CUresult cuGraphGetNodes(CUgraph g, CUgraphNode *nodes, size_t *count) {
    RETURN(call("cuGraphGetNodes", VAL(g), VAL(nodes), END), *count = 0x100000005);
}

// Events.

CUresult cuEventCreate(CUevent *e, unsigned int flags) {
    RETURN(call("cuEventCreate", VAL(flags), END), *e = (CUevent)0xe000000001);
}

CUresult cuEventRecord(CUevent e, CUstream s) { return call("cuEventRecord", VAL(e), VAL(s), END); }

CUresult cuEventQuery(CUevent e) { return call("cuEventQuery", VAL(e), END); }

CUresult cuEventSynchronize(CUevent e) { return call("cuEventSynchronize", VAL(e), END); }

CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    RETURN(call("cuEventElapsedTime", VAL(start), VAL(end), END), *ms = 1.5f);
}

CUresult cuEventDestroy_v2(CUevent e) { return call("cuEventDestroy", VAL(e), END); }

// Copies.

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream s) {
    return call("cuMemcpyHtoDAsync", VAL(dst), VAL(src), VAL(n), VAL(s), END);
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream s) {
    return call("cuMemcpyDtoHAsync", VAL(dst), VAL(src), VAL(n), VAL(s), END);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s) {
    return call("cuMemcpyDtoDAsync", VAL(dst), VAL(src), VAL(n), VAL(s), END);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char v, size_t n, CUstream s) {
    return call("cuMemsetD8Async", VAL(dst), VAL(v), VAL(n), VAL(s), END);
}

CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int v, size_t n, CUstream s) {
    return call("cuMemsetD32Async", VAL(dst), VAL(v), VAL(n), VAL(s), END);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n) {
    return call("cuMemcpyHtoD", VAL(dst), VAL(src), VAL(n), END);
}

CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n) {
    return call("cuMemcpyDtoH", VAL(dst), VAL(src), VAL(n), END);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n) {
    return call("cuMemcpyDtoD", VAL(dst), VAL(src), VAL(n), END);
}

CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char v, size_t n) {
    return call("cuMemsetD8", VAL(dst), VAL(v), VAL(n), END);
}

// Memory.

CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { RETURN(call("cuMemAlloc", VAL(n), END), *p = 0x7f00000000a0); }

CUresult cuMemFree_v2(CUdeviceptr p) { return call("cuMemFree", VAL(p), END); }

CUresult cuMemAllocAsync(CUdeviceptr *p, size_t n, CUstream s) {
    RETURN(call("cuMemAllocAsync", VAL(n), VAL(s), END), *p = 0x7f00000000b0);
}

CUresult cuMemFreeAsync(CUdeviceptr p, CUstream s) { return call("cuMemFreeAsync", VAL(p), VAL(s), END); }

CUresult cuDeviceGetDefaultMemPool(void **pool, CUdevice dev) {
    RETURN(call("cuDeviceGetDefaultMemPool", VAL(dev), END), *pool = (void *)0x5000000007);
}

CUresult cuMemPoolGetAttribute(void *pool, int a, void *value) {
    RETURN(call("cuMemPoolGetAttribute", VAL(pool), VAL(a), END), *(uint64_t *)value = 0x1300000000);
}

CUresult cuMemPoolTrimTo(void *pool, size_t keep) { return call("cuMemPoolTrimTo", VAL(pool), VAL(keep), END); }

CUresult cuMemGetInfo_v2(size_t *free_, size_t *total) {
    RETURN(call("cuMemGetInfo", END), *free_ = 0x1100000000; *total = 0x2300000000);
}

CUresult cuMemHostAlloc(void **p, size_t n, unsigned int flags) {
    RETURN(call("cuMemHostAlloc", VAL(n), VAL(flags), END), *p = (void *)0x7e0000000000);
}

CUresult cuMemFreeHost(void *p) { return call("cuMemFreeHost", VAL(p), END); }

CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned int flags) {
    return call("cuMemHostRegister", VAL(p), VAL(n), VAL(flags), END);
}

CUresult cuMemHostUnregister(void *p) { return call("cuMemHostUnregister", VAL(p), END); }

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *dev, void *p, unsigned int flags) {
    RETURN(call("cuMemHostGetDevicePointer", VAL(p), VAL(flags), END), *dev = 0x7f00000000c0);
}

// The context and the range's start and size have eight bytes, the others four.
CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr p) {
    uint64_t wide = 0x7f00000000d0 + (uint64_t)attribute;
    size_t n = attribute == 1 || attribute == 11 || attribute == 12 ? 8 : 4;
    RETURN(call("cuPointerGetAttribute", VAL(attribute), VAL(p), END), memcpy(value, &wide, n));
}

// Virtual memory.

CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags) {
    RETURN(call("cuMemAddressReserve", VAL(size), VAL(align), VAL(hint), VAL(flags), END), *p = 0x7f0000000000);
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t size) { return call("cuMemAddressFree", VAL(p), VAL(size), END); }

CUresult cuMemCreate(CUmemHandle *h, size_t size, const void *prop, unsigned long long flags) {
    RETURN(call("cuMemCreate", VAL(size), MEM(prop, 32), VAL(flags), END), *h = 0x4000000000000001);
}

CUresult cuMemRelease(CUmemHandle h) { return call("cuMemRelease", VAL(h), END); }

CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemHandle h, unsigned long long flags) {
    return call("cuMemMap", VAL(p), VAL(size), VAL(offset), VAL(h), VAL(flags), END);
}

CUresult cuMemUnmap(CUdeviceptr p, size_t size) { return call("cuMemUnmap", VAL(p), VAL(size), END); }

CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const void *desc, size_t count) {
    static const char none;
    return call("cuMemSetAccess", VAL(p), VAL(size), MEM(count ? desc : &none, 12 * count), VAL(count), END);
}

CUresult cuMemGetAccess(unsigned long long *flags, const void *location, CUdeviceptr p) {
    RETURN(call("cuMemGetAccess", MEM(location, 8), VAL(p), END), *flags = 3);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const void *prop, int option) {
    RETURN(call("cuMemGetAllocationGranularity", MEM(prop, 32), VAL(option), END), *bytes = 0x200000);
}

CUresult cuMemGetAllocationPropertiesFromHandle(void *prop, CUmemHandle h) {
    static const unsigned char bytes[32] = {1, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, [24] = 1, [25] = 1, [26] = 2};
    RETURN(call("cuMemGetAllocationPropertiesFromHandle", VAL(h), END), memcpy(prop, bytes, sizeof bytes));
}

CUresult cuMemRetainAllocationHandle(CUmemHandle *h, void *p) {
    RETURN(call("cuMemRetainAllocationHandle", VAL(p), END), *h = 0x4000000000000002);
}

// Descriptors are real, and left without close-on-exec.
static int descriptor(void) { return open("/dev/null", O_RDONLY); }

CUresult cuMemExportToShareableHandle(void *out, CUmemHandle h, int type, unsigned long long flags) {
    CUresult result = call("cuMemExportToShareableHandle", VAL(h), VAL(type), VAL(flags), END);
    if (result != SUCCESS) return result;
    if (type == 1) {
        *(int *)out = descriptor();
    } else {
        for (int i = 0; i < 64; i++) ((unsigned char *)out)[i] = (unsigned char)(0x80 + i);
    }
    return SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemHandle *h, void *os, int type) {
    CUresult result = type == 1 ? call("cuMemImportFromShareableHandle", VAL(os), VAL(type), END)
                                : call("cuMemImportFromShareableHandle", MEM(os, 64), VAL(type), END);
    RETURN(result, *h = 0x4000000000000003);
}

CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr p, size_t size, int type, unsigned long long flags) {
    RETURN(call("cuMemGetHandleForAddressRange", VAL(p), VAL(size), VAL(type), VAL(flags), END), *(int *)out = descriptor());
}

// Multicast objects. The first forms of two entry points are recorded with _v1
// behind their names.

typedef struct {
    unsigned int devices;
    size_t size;
    unsigned long long handle_types, flags;
} CUmulticastObjectProp;

CUresult cuMulticastCreate(CUmemHandle *h, const CUmulticastObjectProp *p) {
    RETURN(call("cuMulticastCreate", VAL(p->devices), VAL(p->size), VAL(p->handle_types), VAL(p->flags), END),
           *h = 0x4000000000000005);
}

CUresult cuMulticastAddDevice(CUmemHandle mc, CUdevice dev) { return call("cuMulticastAddDevice", VAL(mc), VAL(dev), END); }

CUresult cuMulticastBindMem(CUmemHandle mc, size_t mc_offset, CUmemHandle h, size_t offset, size_t size,
                            unsigned long long flags) {
    return call("cuMulticastBindMem_v1", VAL(mc), VAL(mc_offset), VAL(h), VAL(offset), VAL(size), VAL(flags), END);
}

CUresult cuMulticastBindMem_v2(CUmemHandle mc, CUdevice dev, size_t mc_offset, CUmemHandle h, size_t offset, size_t size,
                               unsigned long long flags) {
    return call("cuMulticastBindMem", VAL(mc), VAL(dev), VAL(mc_offset), VAL(h), VAL(offset), VAL(size), VAL(flags), END);
}

CUresult cuMulticastBindAddr(CUmemHandle mc, size_t mc_offset, CUdeviceptr p, size_t size, unsigned long long flags) {
    return call("cuMulticastBindAddr_v1", VAL(mc), VAL(mc_offset), VAL(p), VAL(size), VAL(flags), END);
}

CUresult cuMulticastBindAddr_v2(CUmemHandle mc, CUdevice dev, size_t mc_offset, CUdeviceptr p, size_t size,
                                unsigned long long flags) {
    return call("cuMulticastBindAddr", VAL(mc), VAL(dev), VAL(mc_offset), VAL(p), VAL(size), VAL(flags), END);
}

CUresult cuMulticastUnbind(CUmemHandle mc, CUdevice dev, size_t mc_offset, size_t size) {
    return call("cuMulticastUnbind", VAL(mc), VAL(dev), VAL(mc_offset), VAL(size), END);
}

CUresult cuMulticastGetGranularity(size_t *bytes, const CUmulticastObjectProp *p, int option) {
    RETURN(call("cuMulticastGetGranularity", VAL(p->devices), VAL(p->size), VAL(p->handle_types), VAL(p->flags), VAL(option), END),
           *bytes = 1 << 25);
}

// Managed memory. A location travels by value. The first forms of two entry
// points are recorded with _v1 behind their names.

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int order;
    CUmemLocation src, dst;
    unsigned int flags;
} CUmemcpyAttributes;

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dst, CUdeviceptr *src, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                               size_t *first, size_t n, CUstream s) {
    return call("cuMemcpyBatchAsync", MEM(dst, count * 8), MEM(src, count * 8), MEM(sizes, count * 8), VAL(count),
                MEM(attrs, n * sizeof *attrs), MEM(first, n * 8), VAL(n), VAL(s), END);
}

CUresult cuMemAllocManaged(CUdeviceptr *p, size_t n, unsigned int flags) {
    RETURN(call("cuMemAllocManaged", VAL(n), VAL(flags), END), *p = 0x7f00000000e0);
}

CUresult cuMemAdvise(CUdeviceptr p, size_t n, int advice, CUdevice dev) {
    return call("cuMemAdvise_v1", VAL(p), VAL(n), VAL(advice), VAL(dev), END);
}

CUresult cuMemAdvise_v2(CUdeviceptr p, size_t n, int advice, CUmemLocation l) {
    return call("cuMemAdvise", VAL(p), VAL(n), VAL(advice), VAL(l), END);
}

CUresult cuMemPrefetchAsync(CUdeviceptr p, size_t n, CUdevice dev, CUstream s) {
    return call("cuMemPrefetchAsync_v1", VAL(p), VAL(n), VAL(dev), VAL(s), END);
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr p, size_t n, CUmemLocation l, unsigned int flags, CUstream s) {
    return call("cuMemPrefetchAsync", VAL(p), VAL(n), VAL(l), VAL(flags), VAL(s), END);
}

CUresult cuMemPrefetchBatchAsync(CUdeviceptr *p, size_t *sizes, size_t count, CUmemLocation *to, size_t *first, size_t n,
                                 unsigned long long flags, CUstream s) {
    return call("cuMemPrefetchBatchAsync", MEM(p, count * 8), MEM(sizes, count * 8), VAL(count), MEM(to, n * sizeof *to),
                MEM(first, n * 8), VAL(n), VAL(flags), VAL(s), END);
}

CUresult cuMemDiscardBatchAsync(CUdeviceptr *p, size_t *sizes, size_t count, unsigned long long flags, CUstream s) {
    return call("cuMemDiscardBatchAsync", MEM(p, count * 8), MEM(sizes, count * 8), VAL(count), VAL(flags), VAL(s), END);
}

CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *p, size_t *sizes, size_t count, CUmemLocation *to, size_t *first,
                                           size_t n, unsigned long long flags, CUstream s) {
    return call("cuMemDiscardAndPrefetchBatchAsync", MEM(p, count * 8), MEM(sizes, count * 8), VAL(count),
                MEM(to, n * sizeof *to), MEM(first, n * 8), VAL(n), VAL(flags), VAL(s), END);
}

// Every element has its attribute and its place as its value.
static void fill_range(int *out, size_t size, int attribute) {
    for (size_t i = 0; i < size / 4; i++) out[i] = 100 * attribute + (int)i;
}

CUresult cuMemRangeGetAttribute(void *data, size_t size, int attribute, CUdeviceptr p, size_t n) {
    RETURN(call("cuMemRangeGetAttribute", VAL(size), VAL(attribute), VAL(p), VAL(n), END), fill_range(data, size, attribute));
}

CUresult cuMemRangeGetAttributes(void **data, size_t *sizes, int *attributes, size_t count, CUdeviceptr p, size_t n) {
    RETURN(call("cuMemRangeGetAttributes", MEM(sizes, count * 8), MEM(attributes, count * 4), VAL(count), VAL(p), VAL(n), END),
           for (size_t i = 0; i < count; i++) fill_range(data[i], sizes[i], attributes[i]));
}

CUresult cuStreamAttachMemAsync(CUstream s, CUdeviceptr p, size_t n, unsigned int flags) {
    return call("cuStreamAttachMemAsync", VAL(s), VAL(p), VAL(n), VAL(flags), END);
}

// Modules. Text is recorded with its NUL, of a binary image the first bytes.

CUresult cuModuleLoadData(CUmodule *m, const char *image) {
    int binary = memcmp(image, "\x7f" "ELF", 4) == 0 || memcmp(image, "\x50\xed\x55\xba", 4) == 0;
    RETURN(call("cuModuleLoadData", MEM(image, binary ? 4 : strlen(image) + 1), END), *m = (CUmodule)0x3000000001);
}

// The options are recorded with the size; the log gets what it has room for.
CUresult cuModuleLoadDataEx(CUmodule *m, const char *image, unsigned int n, unsigned int *options, void **values) {
    int binary = memcmp(image, "\x7f" "ELF", 4) == 0 || memcmp(image, "\x50\xed\x55\xba", 4) == 0;
    size_t room = (size_t)values[1];
    CUresult result = call("cuModuleLoadDataEx", MEM(image, binary ? 4 : strlen(image) + 1), VAL(n), MEM(options, n * 4), VAL(room), END);
    if (result == SUCCESS) *m = (CUmodule)0x3000000001;
    else snprintf(values[0], room, "line 1; error   : \n");
    return result;
}

CUresult cuModuleUnload(CUmodule m) { return call("cuModuleUnload", VAL(m), END); }

CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    RETURN(call("cuModuleGetFunction", VAL(m), MEM(name, strlen(name) + 1), END), *f = (CUfunction)0x3000000002);
}

CUresult cuLogsCurrent(unsigned int *end, unsigned int flags) { RETURN(call("cuLogsCurrent", VAL(flags), END), *end = 41); }

CUresult cuLogsDumpToMemory(unsigned int *iterator, char *buffer, size_t *size, unsigned int flags) {
    RETURN(call("cuLogsDumpToMemory", VAL(*iterator), VAL(*size), VAL(flags), END), *iterator += 2; *size = 6; strcpy(buffer, "a line"));
}

typedef struct { unsigned int timeout, reserved[15]; } lock_args;

CUresult cuCheckpointProcessGetState(int pid, unsigned int *process_state) {
    RETURN(call("cuCheckpointProcessGetState", VAL(pid), END), *process_state = 2);
}

CUresult cuCheckpointProcessLock(int pid, const lock_args *args) {
    return call("cuCheckpointProcessLock", VAL(pid), MEM(args, sizeof *args), END);
}

CUresult cuCheckpointProcessCheckpoint(int pid, void *args) { return call("cuCheckpointProcessCheckpoint", VAL(pid), VAL(args), END); }

CUresult cuCheckpointProcessRestore(int pid, void *args) { return call("cuCheckpointProcessRestore", VAL(pid), VAL(args), END); }

CUresult cuCheckpointProcessUnlock(int pid, void *args) { return call("cuCheckpointProcessUnlock", VAL(pid), VAL(args), END); }

CUresult cuFuncGetParamInfo(CUfunction f, size_t index, size_t *offset, size_t *size) {
    // A launch reads the kernels' two parameters, which is not recorded.
#ifdef FAKECUDA_PARAMS
    *offset = index, *size = 1;
    return index < FAKECUDA_PARAMS ? SUCCESS : INVALID_VALUE;
#endif
#ifdef FAKECUDA_HIDES_PARAMS
    if (index == 1) return NOT_FOUND;
#endif
    if (index == 2) return INVALID_VALUE;
    *offset = 8 * index, *size = 8 + index;
    if (index < 2) return SUCCESS;
    RETURN(call("cuFuncGetParamInfo", VAL(f), VAL(index), END), *offset = 16; *size = 8);
}

// The extra list is recorded as it is read: mark, block, mark, size, mark.
CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                        unsigned int bz, unsigned int shared, CUstream s, void **params, void **extra) {
#define GEOMETRY VAL(f), VAL(gx), VAL(gy), VAL(gz), VAL(bx), VAL(by), VAL(bz), VAL(shared), VAL(s), VAL(params)
    if (!extra) return call("cuLaunchKernel", GEOMETRY, END);
    size_t size = *(size_t *)extra[3];
    return call("cuLaunchKernel", GEOMETRY, VAL(extra[0]), MEM(extra[1], size), VAL(extra[2]), VAL(size), VAL(extra[4]), END);
}

typedef struct {
    unsigned int grid[3], block[3], shared;
    CUstream stream;
    struct {
        unsigned int id, padding, value[16];
    } *attributes;
    unsigned int count;
} CUlaunchConfig;

CUresult cuLaunchKernelEx(const CUlaunchConfig *l, CUfunction f, void **params, void **extra) {
#define CONFIG MEM(l->grid, 12), MEM(l->block, 12), VAL(l->shared), VAL(l->stream), VAL(l->count), \
               VAL(l->attributes->id), MEM(l->attributes->value, 4), VAL(f)
    if (!extra) return call("cuLaunchKernelEx", CONFIG, MEM(params[0], 8), MEM(params[1], 9), VAL(extra), END);
    size_t size = *(size_t *)extra[3];
    return call("cuLaunchKernelEx", CONFIG, VAL(params), VAL(extra[0]), MEM(extra[1], size), VAL(extra[2]), VAL(size), VAL(extra[4]), END);
}

CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction f) {
    RETURN(call("cuFuncGetAttribute", VAL(attribute), VAL(f), END), *value = 4711);
}

CUresult cuFuncSetAttribute(CUfunction f, int attribute, int value) {
    return call("cuFuncSetAttribute", VAL(f), VAL(attribute), VAL(value), END);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads, size_t shared) {
    RETURN(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", VAL(f), VAL(threads), VAL(shared), END), *blocks = 7);
}

CUresult cuModuleGetGlobal_v2(unsigned long long *p, size_t *bytes, CUmodule m, const char *name) {
    RETURN(call("cuModuleGetGlobal", VAL(m), MEM(name, strlen(name) + 1), END), *p = 0x7f1200000000, *bytes = 24);
}

CUresult cuStreamCreateWithPriority(CUstream *s, unsigned int flags, int priority) {
    RETURN(call("cuStreamCreateWithPriority", VAL(flags), VAL(priority), END), *s = (CUstream)0x5000000002);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    RETURN(call("cuCtxGetStreamPriorityRange", END), *least = 0; *greatest = -5);
}

CUresult cuStreamGetPriority(CUstream s, int *priority) {
    RETURN(call("cuStreamGetPriority", VAL(s), END), *priority = -3);
}

// The entry points by name, each since the version that first had this form.

static const struct {
    const char *name;
    int since;
    void *entry;
} entries[] = {
    {"cuInit", 2000, cuInit},
    {"cuDriverGetVersion", 2020, cuDriverGetVersion},
    {"cuDeviceGetCount", 2000, cuDeviceGetCount},
    {"cuDeviceGet", 2000, cuDeviceGet},
    {"cuDeviceGetName", 2000, cuDeviceGetName},
    {"cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2},
    {"cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2},
    {"cuDeviceGetAttribute", 2000, cuDeviceGetAttribute},
    {"cuDeviceCanAccessPeer", 4000, cuDeviceCanAccessPeer},
    {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2},
    {"cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState},
    {"cuCtxCreate", 3020, cuCtxCreate_v2},
    {"cuCtxDestroy", 4000, cuCtxDestroy_v2},
    {"cuCtxGetCurrent", 4000, cuCtxGetCurrent},
    {"cuCtxSetCurrent", 4000, cuCtxSetCurrent},
    {"cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2},
    {"cuCtxGetDevice", 2000, cuCtxGetDevice},
    {"cuCtxSynchronize", 2000, cuCtxSynchronize},
    {"cuStreamCreate", 2000, cuStreamCreate},
    {"cuStreamDestroy", 4000, cuStreamDestroy_v2},
    {"cuStreamQuery", 2000, cuStreamQuery},
    {"cuStreamSynchronize", 2000, cuStreamSynchronize},
    {"cuStreamWaitEvent", 3020, cuStreamWaitEvent},
    {"cuStreamGetCtx", 9020, cuStreamGetCtx},
    {"cuStreamGetFlags", 5050, cuStreamGetFlags},
    {"cuStreamGetId", 12000, cuStreamGetId},
    {"cuLaunchHostFunc", 10000, cuLaunchHostFunc},
    {"cuStreamWriteValue64", 11070, cuStreamWriteValue64_v2},
    {"cuStreamWaitValue64", 11070, cuStreamWaitValue64_v2},
    {"cuStreamIsCapturing", 10000, cuStreamIsCapturing},
    {"cuStreamGetCaptureInfo", 10010, cuStreamGetCaptureInfo},
    {"cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2},
    {"cuStreamEndCapture", 10000, cuStreamEndCapture},
    {"cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode},
    {"cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags},
    {"cuGraphLaunch", 10000, cuGraphLaunch},
    {"cuGraphDestroy", 10000, cuGraphDestroy},
    {"cuGraphExecDestroy", 10000, cuGraphExecDestroy},
    {"cuGraphGetNodes", 10000, cuGraphGetNodes},
    {"cuEventCreate", 2000, cuEventCreate},
    {"cuEventRecord", 2000, cuEventRecord},
    {"cuEventQuery", 2000, cuEventQuery},
    {"cuEventSynchronize", 2000, cuEventSynchronize},
    {"cuEventElapsedTime", 2000, cuEventElapsedTime},
    {"cuEventDestroy", 4000, cuEventDestroy_v2},
    {"cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2},
    {"cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2},
    {"cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2},
    {"cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2},
    {"cuMemsetD8Async", 3020, cuMemsetD8Async},
    {"cuMemsetD32Async", 3020, cuMemsetD32Async},
    {"cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2},
    {"cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2},
    {"cuMemcpyDtoD", 3020, cuMemcpyDtoD_v2},
    {"cuMemsetD8", 3020, cuMemsetD8_v2},
    {"cuMemAlloc", 3020, cuMemAlloc_v2},
    {"cuMemFree", 3020, cuMemFree_v2},
    {"cuMemAllocAsync", 11020, cuMemAllocAsync},
    {"cuMemFreeAsync", 11020, cuMemFreeAsync},
    {"cuDeviceGetDefaultMemPool", 11020, cuDeviceGetDefaultMemPool},
    {"cuMemPoolGetAttribute", 11020, cuMemPoolGetAttribute},
    {"cuMemPoolTrimTo", 11020, cuMemPoolTrimTo},
    {"cuMemGetInfo", 3020, cuMemGetInfo_v2},
    {"cuMemHostAlloc", 2020, cuMemHostAlloc},
    {"cuMemFreeHost", 2000, cuMemFreeHost},
    {"cuMemHostRegister", 6050, cuMemHostRegister_v2},
    {"cuMemHostUnregister", 4000, cuMemHostUnregister},
    {"cuMemHostGetDevicePointer", 3020, cuMemHostGetDevicePointer_v2},
    {"cuPointerGetAttribute", 4000, cuPointerGetAttribute},
    {"cuMemAddressReserve", 10020, cuMemAddressReserve},
    {"cuMemAddressFree", 10020, cuMemAddressFree},
    {"cuMemCreate", 10020, cuMemCreate},
    {"cuMemRelease", 10020, cuMemRelease},
    {"cuMemMap", 10020, cuMemMap},
    {"cuMemUnmap", 10020, cuMemUnmap},
    {"cuMemSetAccess", 10020, cuMemSetAccess},
    {"cuMemGetAccess", 10020, cuMemGetAccess},
    {"cuMemGetAllocationGranularity", 10020, cuMemGetAllocationGranularity},
    {"cuMemGetAllocationPropertiesFromHandle", 10020, cuMemGetAllocationPropertiesFromHandle},
    {"cuMemRetainAllocationHandle", 11000, cuMemRetainAllocationHandle},
    {"cuMemExportToShareableHandle", 10020, cuMemExportToShareableHandle},
    {"cuMemImportFromShareableHandle", 10020, cuMemImportFromShareableHandle},
    {"cuMemGetHandleForAddressRange", 11070, cuMemGetHandleForAddressRange},
    {"cuMulticastCreate", 12010, cuMulticastCreate},
    {"cuMulticastAddDevice", 12010, cuMulticastAddDevice},
    {"cuMulticastBindMem", 12010, cuMulticastBindMem},
    {"cuMulticastBindMem", 13010, cuMulticastBindMem_v2},
    {"cuMulticastBindAddr", 12010, cuMulticastBindAddr},
    {"cuMulticastBindAddr", 13010, cuMulticastBindAddr_v2},
    {"cuMulticastUnbind", 12010, cuMulticastUnbind},
    {"cuMulticastGetGranularity", 12010, cuMulticastGetGranularity},
    {"cuMemAllocManaged", 6000, cuMemAllocManaged},
    {"cuMemAdvise", 8000, cuMemAdvise},
    {"cuMemAdvise", 12020, cuMemAdvise_v2},
    {"cuMemPrefetchAsync", 8000, cuMemPrefetchAsync},
    {"cuMemPrefetchAsync", 12020, cuMemPrefetchAsync_v2},
    {"cuMemPrefetchBatchAsync", 13000, cuMemPrefetchBatchAsync},
    {"cuMemDiscardBatchAsync", 13000, cuMemDiscardBatchAsync},
    {"cuMemDiscardAndPrefetchBatchAsync", 13000, cuMemDiscardAndPrefetchBatchAsync},
    {"cuMemRangeGetAttribute", 8000, cuMemRangeGetAttribute},
    {"cuMemRangeGetAttributes", 8000, cuMemRangeGetAttributes},
    {"cuStreamAttachMemAsync", 6000, cuStreamAttachMemAsync},
    {"cuModuleLoadData", 2000, cuModuleLoadData},
    {"cuModuleLoadDataEx", 2010, cuModuleLoadDataEx},
    {"cuModuleUnload", 2000, cuModuleUnload},
    {"cuModuleGetFunction", 2000, cuModuleGetFunction},
    {"cuFuncGetParamInfo", 12040, cuFuncGetParamInfo},
    {"cuLaunchKernel", 4000, cuLaunchKernel},
    {"cuLaunchKernelEx", 11060, cuLaunchKernelEx},
    {"cuFuncGetAttribute", 2020, cuFuncGetAttribute},
    {"cuFuncSetAttribute", 9000, cuFuncSetAttribute},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, cuOccupancyMaxActiveBlocksPerMultiprocessor},
    {"cuModuleGetGlobal", 3020, cuModuleGetGlobal_v2},
    {"cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority},
    {"cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange},
    {"cuStreamGetPriority", 5050, cuStreamGetPriority},
    {"cuLogsCurrent", 12090, cuLogsCurrent},
    {"cuLogsDumpToMemory", 12090, cuLogsDumpToMemory},
    {"cuCheckpointProcessGetState", 12080, cuCheckpointProcessGetState},
    {"cuCheckpointProcessLock", 12080, cuCheckpointProcessLock},
    {"cuCheckpointProcessCheckpoint", 12080, cuCheckpointProcessCheckpoint},
    {"cuCheckpointProcessRestore", 12080, cuCheckpointProcessRestore},
    {"cuCheckpointProcessUnlock", 12080, cuCheckpointProcessUnlock},
};

static int listed(const char *list, const char *name) {
    size_t n = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || at[n] == 0)) return 1;
    return 0;
}

// status: 0 found, 1 no such entry point, 2 not in so old a version.
static CUresult find(const char *name, void **entry, int version, uint64_t flags, int *status) {
    CUresult result = call("cuGetProcAddress", MEM(name, strlen(name) + 1), VAL(version), VAL(flags), END);
    if (result != SUCCESS) return result;
    *entry = NULL;
    *status = 1;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        if (strcmp(entries[i].name, name) != 0 || entries[i].since > FAKECUDA_VERSION || listed(FAKECUDA_MISSING, name)) continue;
        // Of the forms that the driver has, the latest that the version knows.
        if (version >= entries[i].since) *entry = entries[i].entry;
        *status = *entry ? 0 : 2;
    }
    return *status ? NOT_FOUND : SUCCESS;
}

#ifndef FAKECUDA_NO_PROC

CUresult cuGetProcAddress(const char *name, void **entry, int version, uint64_t flags) {
    int status;
    return find(name, entry, version, flags, &status);
}

#ifndef FAKECUDA_PROC_V1
CUresult cuGetProcAddress_v2(const char *name, void **entry, int version, uint64_t flags, int *status) {
    return find(name, entry, version, flags, status);
}
#endif

#else
void *fakecuda_unused(void) { return (void *)find; }
#endif

#endif
