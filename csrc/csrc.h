//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// What Go calls: one function per method of internal/driver's interface, and
// the opening of the library.

#ifndef CUVMM_CSRC_H
#define CUVMM_CSRC_H

#include "abi.h"

// A result is a CUresult, or this one: the driver lacks the entry point.
enum { CUVMM_MISSING_ENTRY_POINT = -1 };

// Structs go in behind a pointer, which noescape keeps on Go's stack, and
// results come out by value.
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
} cuvmm_uuid_result;

typedef struct {
    char value[256];
    int32_t result;
} cuvmm_name;

typedef struct {
    cuvmm_prop value;
    int32_t result;
} cuvmm_prop_result;

typedef struct {
    cuvmm_shareable value;
    int32_t result;
} cuvmm_shareable_result;

typedef struct {
    uint32_t grid_x, grid_y, grid_z;
    uint32_t block_x, block_y, block_z;
    uint32_t shared;
} cuvmm_launch;

// One form of an opened driver: the address of its table (api.h). A number,
// since cgo would check at every call for Go pointers behind a pointer.
typedef uintptr_t cuvmm_driver;

// open.c

// What the loader returned for one candidate: a handle, or why there is none.
typedef struct {
    uintptr_t handle;
    int absent; // nothing has that name
    char error[512];
} cuvmm_loaded;

// What stands behind a loaded library. proc is its cuGetProcAddress, of the
// form 1 or 2, or 0; has_init says whether it is a driver at all; version is
// the driver's version, or 0 if it is not known; result is what asking returned.
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
// The folders that the loader searches for a bare name, one a line, in memory
// that the caller frees; null if the loader does not tell.
char *cuvmm_search_path(void);
cuvmm_library cuvmm_inspect(uintptr_t handle);
// An empty table, in the foreign form; 0 if there is no memory.
cuvmm_driver cuvmm_new(void);
// Fills in the entry point at that place of the table, which is the number of
// its call, or CUVMM_POP. Returns 1 if the driver has it in that version, else 0.
int cuvmm_resolve(cuvmm_driver d, uintptr_t proc, int form, uint32_t at, const char *entry, int32_t version);

// cuvmm_entry_point is the address of the entry point at a place of the table, or 0.
uintptr_t cuvmm_entry_point(cuvmm_driver d, uint32_t at);
// The form of a filled table whose calls run in the relaxed capture mode.
cuvmm_driver cuvmm_relaxed(cuvmm_driver foreign);
void cuvmm_delete(cuvmm_driver d);

// The calls that are generated, from the table in internal/driver.
#include "calls.h"

// The calls that are not, by file.

// context.c
cuvmm_value cuvmm_CtxCreate(cuvmm_driver d, uint32_t flags, int32_t device);
cuvmm_value cuvmm_ThreadExchangeStreamCaptureMode(cuvmm_driver d, uint32_t mode);

// device.c
cuvmm_name cuvmm_DeviceGetName(cuvmm_driver d, int32_t device);

// hostfunc.c
void cuvmm_host_funcs_to(int fd);
int32_t cuvmm_LaunchHostFunc(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t id);

// share.c
cuvmm_shareable_result cuvmm_MemExportToShareableHandle(cuvmm_driver d, uint64_t handle, uint32_t type);
cuvmm_value cuvmm_MemImportFromShareableHandle(cuvmm_driver d, const cuvmm_shareable *s, uint32_t type);
cuvmm_value cuvmm_MemGetHandleForAddressRange(cuvmm_driver d, uintptr_t ctx, uint64_t p, uint64_t size, uint64_t flags);

// multicast.c
cuvmm_value cuvmm_MulticastCreate(cuvmm_driver d, const cuvmm_multicast *prop);

// logs.c
cuvmm_pair cuvmm_LogsDumpToMemory(cuvmm_driver d, uint32_t from, char *text, uint64_t room);

// managed.c
int32_t cuvmm_MemRangeGetAttributes(cuvmm_driver d, uintptr_t ctx, const uint32_t *attributes, const uint64_t *counts,
                                    uint64_t n_attributes, uint64_t p, uint64_t n, int32_t *out);

// module.c
cuvmm_value cuvmm_ModuleLoadData(cuvmm_driver d, uintptr_t ctx, const uint8_t *image, uint64_t n);
cuvmm_value cuvmm_ModuleLoadDataEx(cuvmm_driver d, uintptr_t ctx, const uint8_t *image, uint64_t n, char *log, uint64_t room);
cuvmm_value cuvmm_ModuleGetFunction(cuvmm_driver d, uintptr_t ctx, uintptr_t module, const char *name, uint64_t n);
int32_t cuvmm_LaunchKernelEx(cuvmm_driver d, uintptr_t ctx, uintptr_t function, const cuvmm_launch *l,
                             const uint8_t *params, uint64_t n, uintptr_t s);
cuvmm_pair cuvmm_ModuleGetGlobal(cuvmm_driver d, uintptr_t ctx, uintptr_t module, const char *name, uint64_t n);
int32_t cuvmm_LaunchKernel(cuvmm_driver d, uintptr_t ctx, uintptr_t function, const cuvmm_launch *l,
                           const uint8_t *params, uint64_t n, uintptr_t s);

// nvml.c

// What NVML returned: the call that ended it (an entry point's name), its
// nvmlReturn_t, or CUVMM_NVML_LACKS if the library has no such entry point;
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
