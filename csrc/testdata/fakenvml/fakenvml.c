// A stand-in for libnvidia-ml.so.1, for tests: one GPU, and a fabric whose
// state the build says. It is written against the vendor's documented
// declarations, not against the library's own.
//
//   cc -shared -fPIC -O2 -o libnvidia-ml.so.1 fakenvml.c -ldl
//
// Variants:
//
//   FAKENVML_NEWEST=3      the newest form of the fabric info: 3, 2, or 1, which has
//                          a call of its own; 0 for a library that has neither
//   FAKENVML_REFUSES=25    what an unknown form is refused with
//   FAKENVML_INIT=0        what nvmlInit_v2 returns
//   FAKENVML_INFO=0        what the question itself is answered with

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef FAKENVML_NEWEST
#define FAKENVML_NEWEST 3
#endif
#ifndef FAKENVML_REFUSES
#define FAKENVML_REFUSES 25
#endif
#ifndef FAKENVML_INIT
#define FAKENVML_INIT 0
#endif
#ifndef FAKENVML_INFO
#define FAKENVML_INFO 0
#endif

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;

static char gpu;

// How often it is initialised and not shut down, in a file that the test reads,
// beside the library.
static int unshared, *count = &unshared;
#define initialised __atomic_load_n(count, __ATOMIC_SEQ_CST)

__attribute__((constructor)) static void open_count(void) {
    Dl_info info;
    char path[4096];
    if (!dladdr((void *)open_count, &info)) return;
    snprintf(path, sizeof path, "%s.count", info.dli_fname);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *count) != 0) return;
    void *p = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p != MAP_FAILED) count = p;
}

nvmlReturn_t nvmlInit_v2(void) {
    if (FAKENVML_INIT == 0) __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    return FAKENVML_INIT;
}

nvmlReturn_t nvmlShutdown(void) {
    if (!initialised) return 1;
    __atomic_sub_fetch(count, 1, __ATOMIC_SEQ_CST);
    return 0;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    if (!initialised) return 1;
    if (strcmp(uuid, "GPU-00112233-4455-6677-8899-aabbccddeeff") != 0) return 6;
    *device = (nvmlDevice_t)&gpu;
    return 0;
}

static void cluster(unsigned char *uuid) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(0xa0 + i);
}

#if FAKENVML_NEWEST >= 2
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, void *info) {
    unsigned char *bytes = info;
    unsigned int version;
    memcpy(&version, bytes, 4);
    if (!initialised || device != (nvmlDevice_t)&gpu) return 2;
    if (version != ((2u << 24) | 36u) && !(FAKENVML_NEWEST >= 3 && version == ((3u << 24) | 40u))) return FAKENVML_REFUSES;
    if (FAKENVML_INFO) return FAKENVML_INFO;
    uint32_t clique = 0x01020304, mask = 0x1145;
    int32_t status = 999;
    cluster(bytes + 4);
    memcpy(bytes + 20, &status, 4);
    memcpy(bytes + 24, &clique, 4);
    bytes[28] = 3;
    memcpy(bytes + 32, &mask, 4);
    if (version >> 24 == 3) bytes[36] = 2;
    return 0;
}
#endif

#if FAKENVML_NEWEST >= 1
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, void *info) {
    unsigned char *bytes = info;
    if (!initialised || device != (nvmlDevice_t)&gpu) return 2;
    if (FAKENVML_INFO) return FAKENVML_INFO;
    uint32_t clique = 0x01020304;
    int32_t status = 999;
    cluster(bytes);
    memcpy(bytes + 16, &status, 4);
    memcpy(bytes + 20, &clique, 4);
    bytes[24] = 3;
    return 0;
}
#endif
