//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// What Go calls: one function per method of internal/driver's interface, and
// the opening of the library.

#ifndef CUVMM_CSRC_H
#define CUVMM_CSRC_H

#include <stdint.h>

// A result is a CUresult, or this one: the driver lacks the entry point.
enum { CUVMM_MISSING_ENTRY_POINT = -1 };

typedef struct {
    uint32_t type;
    int32_t id;
} cuvmm_location;

typedef struct {
    uint32_t type;
    uint32_t handle_types;
    cuvmm_location location;
    // A pointer, and always null on Linux; as a number it keeps cgo from
    // looking for Go pointers behind it.
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
    uint32_t devices;
    uint64_t size, handle_types, flags;
} cuvmm_multicast;

typedef struct {
    uint8_t bytes[16];
} cuvmm_uuid;

typedef struct {
    uint8_t bytes[64];
} cuvmm_shareable;

// Structs go in behind a pointer, which noescape keeps on Go's stack, and
// answers come out by value.
typedef struct {
    uint64_t value;
    int32_t result;
} cuvmm_value;

typedef struct {
    uint64_t first, second;
    int32_t result;
} cuvmm_pair;

typedef struct {
    float value;
    int32_t result;
} cuvmm_float;

typedef struct {
    void *value;
    int32_t result;
} cuvmm_pointer;

typedef struct {
    cuvmm_uuid value;
    int32_t result;
} cuvmm_uuid_answer;

typedef struct {
    char value[256];
    int32_t result;
} cuvmm_name;

typedef struct {
    cuvmm_prop value;
    int32_t result;
} cuvmm_prop_answer;

typedef struct {
    cuvmm_shareable value;
    int32_t result;
} cuvmm_shareable_answer;

typedef struct {
    uint32_t grid_x, grid_y, grid_z;
    uint32_t block_x, block_y, block_z;
    uint32_t shared;
} cuvmm_launch;

// One form of an opened driver: the address of its table (api.h). A number,
// since cgo would ask at every call whether Go pointers lie behind a pointer.
typedef uintptr_t cuvmm_driver;

// open.c

// What the loader answered about one candidate: a handle, or why there is none.
typedef struct {
    uintptr_t handle;
    int absent; // nothing has that name
    char error[512];
} cuvmm_loaded;

// What stands behind a loaded library. proc is its cuGetProcAddress, of the
// form 1 or 2, or 0; has_init says whether it is a driver at all; version is
// the driver's version where it told one, or 0; result is what it answered.
typedef struct {
    uintptr_t proc;
    int form;
    int has_init;
    int32_t version;
    int32_t result;
    char path[4096];
} cuvmm_library;

cuvmm_loaded cuvmm_load(const char *name);
void cuvmm_unload(uintptr_t handle);
cuvmm_library cuvmm_inspect(uintptr_t handle);
// An empty table, in the foreign form; 0 where there is no memory.
cuvmm_driver cuvmm_new(void);
// Fills the table's member in with the entry point: 1 if the driver has it, 0 if
// it lacks it in that version, -1 if api.h does not declare the member.
int cuvmm_resolve(cuvmm_driver d, uintptr_t proc, int form, const char *member, const char *entry, int32_t version);
// The form of a filled table whose calls run in the relaxed capture mode.
cuvmm_driver cuvmm_relaxed(cuvmm_driver foreign);
void cuvmm_delete(cuvmm_driver d);

// device.c

int32_t cuvmm_Init(cuvmm_driver d);
cuvmm_value cuvmm_DriverGetVersion(cuvmm_driver d);
cuvmm_value cuvmm_DeviceGetCount(cuvmm_driver d);
cuvmm_value cuvmm_DeviceGet(cuvmm_driver d, int32_t ordinal);
cuvmm_name cuvmm_DeviceGetName(cuvmm_driver d, int32_t device);
cuvmm_uuid_answer cuvmm_DeviceGetUUID(cuvmm_driver d, int32_t device);
cuvmm_value cuvmm_DeviceTotalMem(cuvmm_driver d, int32_t device);
cuvmm_value cuvmm_DeviceGetAttribute(cuvmm_driver d, int32_t attribute, int32_t device);
cuvmm_value cuvmm_DeviceCanAccessPeer(cuvmm_driver d, int32_t device, int32_t peer);

// context.c

cuvmm_value cuvmm_DevicePrimaryCtxRetain(cuvmm_driver d, int32_t device);
int32_t cuvmm_DevicePrimaryCtxRelease(cuvmm_driver d, int32_t device);
cuvmm_pair cuvmm_DevicePrimaryCtxGetState(cuvmm_driver d, int32_t device);
cuvmm_value cuvmm_CtxCreate(cuvmm_driver d, uint32_t flags, int32_t device);
int32_t cuvmm_CtxDestroy(cuvmm_driver d, uintptr_t ctx);
cuvmm_value cuvmm_CtxGetCurrent(cuvmm_driver d);
int32_t cuvmm_CtxSetCurrent(cuvmm_driver d, uintptr_t ctx);
cuvmm_value cuvmm_CtxGetDevice(cuvmm_driver d, uintptr_t ctx);
int32_t cuvmm_CtxSynchronize(cuvmm_driver d, uintptr_t ctx);

// stream.c

cuvmm_value cuvmm_StreamCreate(cuvmm_driver d, uintptr_t ctx, uint32_t flags);
int32_t cuvmm_StreamDestroy(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
int32_t cuvmm_StreamQuery(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
int32_t cuvmm_StreamSynchronize(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
int32_t cuvmm_StreamWaitEvent(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uintptr_t e);
cuvmm_value cuvmm_StreamGetCtx(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
cuvmm_value cuvmm_StreamGetFlags(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
cuvmm_value cuvmm_StreamGetID(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
int32_t cuvmm_StreamWriteValue64(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t p, uint64_t v);
int32_t cuvmm_StreamWaitValue64(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t p, uint64_t v);

// graph.c

cuvmm_value cuvmm_StreamIsCapturing(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
cuvmm_pair cuvmm_StreamGetCaptureInfo(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
int32_t cuvmm_StreamBeginCapture(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint32_t mode);
cuvmm_value cuvmm_StreamEndCapture(cuvmm_driver d, uintptr_t ctx, uintptr_t s);
cuvmm_value cuvmm_ThreadExchangeStreamCaptureMode(cuvmm_driver d, uint32_t mode);
cuvmm_value cuvmm_GraphInstantiate(cuvmm_driver d, uintptr_t ctx, uintptr_t graph);
int32_t cuvmm_GraphLaunch(cuvmm_driver d, uintptr_t ctx, uintptr_t exec, uintptr_t s);
int32_t cuvmm_GraphDestroy(cuvmm_driver d, uintptr_t graph);
int32_t cuvmm_GraphExecDestroy(cuvmm_driver d, uintptr_t exec);
cuvmm_value cuvmm_GraphGetNodeCount(cuvmm_driver d, uintptr_t graph);

// event.c

cuvmm_value cuvmm_EventCreate(cuvmm_driver d, uintptr_t ctx, uint32_t flags);
int32_t cuvmm_EventRecord(cuvmm_driver d, uintptr_t ctx, uintptr_t e, uintptr_t s);
int32_t cuvmm_EventQuery(cuvmm_driver d, uintptr_t ctx, uintptr_t e);
int32_t cuvmm_EventSynchronize(cuvmm_driver d, uintptr_t ctx, uintptr_t e);
cuvmm_float cuvmm_EventElapsedTime(cuvmm_driver d, uintptr_t ctx, uintptr_t start, uintptr_t end);
int32_t cuvmm_EventDestroy(cuvmm_driver d, uintptr_t ctx, uintptr_t e);

// copy.c

int32_t cuvmm_MemcpyHtoDAsync(cuvmm_driver d, uintptr_t ctx, uint64_t dst, const void *src, uint64_t n, uintptr_t s);
int32_t cuvmm_MemcpyDtoHAsync(cuvmm_driver d, uintptr_t ctx, void *dst, uint64_t src, uint64_t n, uintptr_t s);
int32_t cuvmm_MemcpyDtoDAsync(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint64_t src, uint64_t n, uintptr_t s);
int32_t cuvmm_MemsetD8Async(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint8_t v, uint64_t n, uintptr_t s);
int32_t cuvmm_MemsetD32Async(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint32_t v, uint64_t words, uintptr_t s);
int32_t cuvmm_MemcpyHtoD(cuvmm_driver d, uintptr_t ctx, uint64_t dst, const void *src, uint64_t n);
int32_t cuvmm_MemcpyDtoH(cuvmm_driver d, uintptr_t ctx, void *dst, uint64_t src, uint64_t n);
int32_t cuvmm_MemcpyDtoD(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint64_t src, uint64_t n);
int32_t cuvmm_MemsetD8(cuvmm_driver d, uintptr_t ctx, uint64_t dst, uint8_t v, uint64_t n);

// memory.c

cuvmm_value cuvmm_MemAlloc(cuvmm_driver d, uintptr_t ctx, uint64_t n);
int32_t cuvmm_MemFree(cuvmm_driver d, uintptr_t ctx, uint64_t p);
cuvmm_value cuvmm_MemAllocAsync(cuvmm_driver d, uintptr_t ctx, uint64_t n, uintptr_t s);
int32_t cuvmm_MemFreeAsync(cuvmm_driver d, uintptr_t ctx, uint64_t p, uintptr_t s);
cuvmm_pair cuvmm_MemGetInfo(cuvmm_driver d, uintptr_t ctx);
cuvmm_pointer cuvmm_MemHostAlloc(cuvmm_driver d, uintptr_t ctx, uint64_t n, uint32_t flags);
int32_t cuvmm_MemFreeHost(cuvmm_driver d, uintptr_t ctx, void *p);
int32_t cuvmm_MemHostRegister(cuvmm_driver d, uintptr_t ctx, void *p, uint64_t n, uint32_t flags);
int32_t cuvmm_MemHostUnregister(cuvmm_driver d, uintptr_t ctx, void *p);
cuvmm_value cuvmm_MemHostGetDevicePointer(cuvmm_driver d, uintptr_t ctx, void *p);
cuvmm_value cuvmm_PointerGetAttribute(cuvmm_driver d, uintptr_t ctx, int32_t attribute, uint64_t p);

// vmm.c

cuvmm_value cuvmm_MemAddressReserve(cuvmm_driver d, uint64_t size, uint64_t align, uint64_t hint);
int32_t cuvmm_MemAddressFree(cuvmm_driver d, uint64_t p, uint64_t size);
cuvmm_value cuvmm_MemCreate(cuvmm_driver d, uint64_t size, const cuvmm_prop *prop);
int32_t cuvmm_MemRelease(cuvmm_driver d, uint64_t handle);
int32_t cuvmm_MemMap(cuvmm_driver d, uint64_t p, uint64_t size, uint64_t offset, uint64_t handle);
int32_t cuvmm_MemUnmap(cuvmm_driver d, uint64_t p, uint64_t size);
int32_t cuvmm_MemSetAccess(cuvmm_driver d, uint64_t p, uint64_t size, const cuvmm_access *desc, uint64_t count);
cuvmm_value cuvmm_MemGetAccess(cuvmm_driver d, const cuvmm_location *location, uint64_t p);
cuvmm_value cuvmm_MemGetAllocationGranularity(cuvmm_driver d, const cuvmm_prop *prop, uint32_t option);
cuvmm_prop_answer cuvmm_MemGetAllocationPropertiesFromHandle(cuvmm_driver d, uint64_t handle);
cuvmm_value cuvmm_MemRetainAllocationHandle(cuvmm_driver d, uint64_t p);
cuvmm_shareable_answer cuvmm_MemExportToShareableHandle(cuvmm_driver d, uint64_t handle, uint32_t type);
cuvmm_value cuvmm_MemImportFromShareableHandle(cuvmm_driver d, const cuvmm_shareable *s, uint32_t type);
cuvmm_value cuvmm_MemGetHandleForAddressRange(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t size);

// multicast.c

cuvmm_value cuvmm_MulticastCreate(cuvmm_driver d, const cuvmm_multicast *prop);
int32_t cuvmm_MulticastAddDevice(cuvmm_driver d, uint64_t mc, int32_t device);
int32_t cuvmm_MulticastBindMem(cuvmm_driver d, uint64_t mc, int32_t device, uint64_t mc_offset, uint64_t handle,
                               uint64_t offset, uint64_t size);
int32_t cuvmm_MulticastBindMemV1(cuvmm_driver d, uint64_t mc, uint64_t mc_offset, uint64_t handle, uint64_t offset,
                                 uint64_t size);
int32_t cuvmm_MulticastBindAddr(cuvmm_driver d, uint64_t mc, int32_t device, uint64_t mc_offset, uint64_t p, uint64_t size);
int32_t cuvmm_MulticastBindAddrV1(cuvmm_driver d, uint64_t mc, uint64_t mc_offset, uint64_t p, uint64_t size);
int32_t cuvmm_MulticastUnbind(cuvmm_driver d, uint64_t mc, int32_t device, uint64_t mc_offset, uint64_t size);
cuvmm_value cuvmm_MulticastGetGranularity(cuvmm_driver d, const cuvmm_multicast *prop, uint32_t option);

// managed.c

cuvmm_value cuvmm_MemAllocManaged(cuvmm_driver d, uintptr_t ctx, uint64_t n, uint32_t flags);
int32_t cuvmm_MemAdvise(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, uint32_t advice, cuvmm_location l);
int32_t cuvmm_MemAdviseV1(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, uint32_t advice, int32_t device);
int32_t cuvmm_MemPrefetchAsync(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, cuvmm_location to, uintptr_t s);
int32_t cuvmm_MemPrefetchAsyncV1(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t n, int32_t device, uintptr_t s);
int32_t cuvmm_MemPrefetchBatchAsync(cuvmm_driver d, uintptr_t ctx, const uint64_t *p, const uint64_t *sizes, uint64_t count,
                                    const cuvmm_location *to, const uint64_t *first, uint64_t n, uintptr_t s);
int32_t cuvmm_MemDiscardBatchAsync(cuvmm_driver d, uintptr_t ctx, const uint64_t *p, const uint64_t *sizes, uint64_t count,
                                   uintptr_t s);
int32_t cuvmm_MemDiscardAndPrefetchBatchAsync(cuvmm_driver d, uintptr_t ctx, const uint64_t *p, const uint64_t *sizes,
                                              uint64_t count, const cuvmm_location *to, const uint64_t *first, uint64_t n,
                                              uintptr_t s);
int32_t cuvmm_MemRangeGetAttribute(cuvmm_driver d, uintptr_t ctx, uint32_t attribute, uint64_t p, uint64_t n, int32_t *out,
                                   uint64_t count);
int32_t cuvmm_MemRangeGetAttributes(cuvmm_driver d, uintptr_t ctx, const uint32_t *attributes, const uint64_t *counts,
                                    uint64_t n_attributes, uint64_t p, uint64_t n, int32_t *out);
int32_t cuvmm_StreamAttachMemAsync(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t p, uint64_t n, uint32_t flags);

// module.c

cuvmm_value cuvmm_ModuleLoadData(cuvmm_driver d, uintptr_t ctx, const uint8_t *image, uint64_t n);
cuvmm_value cuvmm_ModuleLoadDataEx(cuvmm_driver d, uintptr_t ctx, const uint8_t *image, uint64_t n, char *log, uint64_t room);
int32_t cuvmm_ModuleUnload(cuvmm_driver d, uintptr_t ctx, uintptr_t module);
cuvmm_value cuvmm_ModuleGetFunction(cuvmm_driver d, uintptr_t ctx, uintptr_t module, const char *name, uint64_t n);
cuvmm_pair cuvmm_FuncGetParamInfo(cuvmm_driver d, uintptr_t ctx, uintptr_t function, uint64_t index);
int32_t cuvmm_LaunchKernel(cuvmm_driver d, uintptr_t ctx, uintptr_t function, const cuvmm_launch *l,
                           const uint8_t *params, uint64_t n, uintptr_t s);

// nvml.c

// What NVML answered: the call that ended it (an entry point's name), its
// nvmlReturn_t, or CUVMM_NVML_LACKS where the library has no such entry point;
// on success version is the struct's, 3, 2 or 1.
enum { CUVMM_NVML_LACKS = -1 };
typedef struct {
    const char *call;
    int32_t result;
    int32_t version;
    uint8_t cluster[16];
    int32_t status;
    uint32_t clique, mask;
    uint8_t state, summary;
} cuvmm_fabric;

cuvmm_fabric cuvmm_nvml_fabric(uintptr_t library, const char *uuid);

#endif
