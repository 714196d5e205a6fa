//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// NVML as far as it tells of a GPU's fabric, with declarations of its own.

#include "csrc.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

typedef struct nvml_device *nvml_device;

// The three forms of the fabric info. The later two begin with a word that holds
// their size and their number.
typedef struct {
    uint8_t cluster[16];
    int32_t status;
    uint32_t clique;
    uint8_t state;
} fabric_v1;

typedef struct {
    uint32_t version;
    uint8_t cluster[16];
    int32_t status;
    uint32_t clique;
    uint8_t state;
    uint32_t mask;
} fabric_v2;

typedef struct {
    uint32_t version;
    uint8_t cluster[16];
    int32_t status;
    uint32_t clique;
    uint8_t state;
    uint32_t mask;
    uint8_t summary;
} fabric_v3;

_Static_assert(sizeof(fabric_v1) == 28 && sizeof(fabric_v2) == 36 && sizeof(fabric_v3) == 40, "fabric info");
_Static_assert(offsetof(fabric_v1, status) == 16 && offsetof(fabric_v1, clique) == 20 && offsetof(fabric_v1, state) == 24, "fabric info 1");
_Static_assert(offsetof(fabric_v2, cluster) == 4 && offsetof(fabric_v2, status) == 20 && offsetof(fabric_v2, clique) == 24, "fabric info 2");
_Static_assert(offsetof(fabric_v2, state) == 28 && offsetof(fabric_v2, mask) == 32, "fabric info 2");
_Static_assert(offsetof(fabric_v3, state) == 28 && offsetof(fabric_v3, mask) == 32 && offsetof(fabric_v3, summary) == 36, "fabric info 3");

enum { INVALID_ARGUMENT = 2, FUNCTION_NOT_FOUND = 13, VERSION_MISMATCH = 25 };

static void *entry(cuvmm_fabric *f, void *library, const char *name) {
    f->call = name;
    f->result = CUVMM_NVML_LACKS;
    return dlsym(library, name);
}

// A library refuses a form that it does not know, each release in its own way.
static int unknown_form(int32_t result) { return result == VERSION_MISMATCH || result == INVALID_ARGUMENT || result == FUNCTION_NOT_FOUND; }

// Asks for the newest form first, and for the one before if the library does not
// know it.
static void ask(cuvmm_fabric *f, void *library, nvml_device device) {
    int32_t (*versioned)(nvml_device, void *) = entry(f, library, "nvmlDeviceGetGpuFabricInfoV");
    for (uint32_t version = 3; versioned && version >= 2; version--) {
        fabric_v3 v;
        memset(&v, 0, sizeof v);
        v.version = version << 24 | (uint32_t)(version == 3 ? sizeof(fabric_v3) : sizeof(fabric_v2));
        f->result = versioned(device, &v);
        if (unknown_form(f->result)) continue;
        f->version = (int32_t)version;
        f->status = v.status;
        f->clique = v.clique;
        f->mask = v.mask;
        f->state = v.state;
        f->summary = v.summary;
        memcpy(f->cluster, v.cluster, sizeof f->cluster);
        return;
    }
    int32_t (*plain)(nvml_device, fabric_v1 *) = entry(f, library, "nvmlDeviceGetGpuFabricInfo");
    if (!plain) return;
    fabric_v1 v;
    memset(&v, 0, sizeof v);
    f->result = plain(device, &v);
    f->version = 1;
    f->status = v.status;
    f->clique = v.clique;
    f->state = v.state;
    memcpy(f->cluster, v.cluster, sizeof f->cluster);
}

// The library counts its initialisations, so this one is undone without harm
// to other users of it in the process.
cuvmm_fabric cuvmm_nvml_fabric(uintptr_t library, const char *uuid) {
    void *l = (void *)library;
    cuvmm_fabric f = {0};
    int32_t (*init)(void) = entry(&f, l, "nvmlInit_v2");
    int32_t (*shutdown)(void) = init ? entry(&f, l, "nvmlShutdown") : NULL;
    int32_t (*find)(const char *, nvml_device *) = shutdown ? entry(&f, l, "nvmlDeviceGetHandleByUUID") : NULL;
    if (!find) return f;
    f.call = "nvmlInit_v2";
    f.result = init();
    if (f.result != 0) return f;
    nvml_device device = NULL;
    f.call = "nvmlDeviceGetHandleByUUID";
    f.result = find(uuid, &device);
    if (f.result == 0) ask(&f, l, device);
    shutdown();
    return f;
}
