//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The entry points that are not in internal/driver's table, and what every
// entry point begins with.

#include "libcuda.h"

#include "_cgo_export.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

// A note in the file, by which csrc recognises this library without opening it.
__asm__(".pushsection .note.cuvmm,\"a\",%note\n"
        ".balign 4\n"
        ".long 6, 0, 1\n"
        ".asciz \"cuvmm\"\n"
        ".balign 4\n"
        ".popsection\n");

enum { NOT_INITIALIZED = 3, INVALID_VALUE = 1, NOT_FOUND = 500, NOT_PERMITTED = 800, NOT_SUPPORTED = 801 };

static int forked;
static __thread int known, in_host_func;

static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

static void report(void) {
    if (!forked) cuvmm_report();
}

void cuvmm_report_at_exit(void) { atexit(report); }

// The calls that a host function may make, as measured with release 580 of the vendor's
// driver: calls that find their context by the stream, event or graph that they are given,
// except copies and ordered allocations. Launches of kernels and the end of a capture were
// not measured, and are refused.
static const char *const in_host_funcs[] = {
    "cuInit", "cuDriverGetVersion", "cuThreadExchangeStreamCaptureMode",
    "cuStreamAttachMemAsync", "cuStreamBeginCapture_v2", "cuStreamDestroy_v2", "cuStreamGetCaptureInfo", "cuStreamGetCtx", "cuStreamGetFlags",
    "cuStreamGetId", "cuStreamGetPriority", "cuStreamIsCapturing", "cuStreamQuery", "cuStreamSynchronize", "cuStreamWaitEvent",
    "cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2",
    "cuEventDestroy_v2", "cuEventElapsedTime", "cuEventQuery", "cuEventRecord", "cuEventSynchronize",
    "cuGraphLaunch", "cuLaunchHostFunc", "cuMemPrefetchAsync", "cuMemPrefetchAsync_v2", "cuMemsetD32Async", "cuMemsetD8Async",
};

static int permitted(const char *call) {
    for (size_t i = 0; i < sizeof in_host_funcs / sizeof *in_host_funcs; i++)
        if (strcmp(in_host_funcs[i], call) == 0) return 1;
    return 0;
}

void cuvmm_call_host_func(uintptr_t f, uintptr_t data) {
    known = in_host_func = 1;
    ((void (*)(uintptr_t))f)(data);
    known = in_host_func = 0;
}

void cuvmm_call_callback(uintptr_t f, uintptr_t s, int32_t status, uintptr_t data) {
    known = in_host_func = 1;
    ((void (*)(uintptr_t, int32_t, uintptr_t))f)(s, status, data);
    known = in_host_func = 0;
}

// A child of fork lacks the threads that Go's runtime needs, so a call into Go would hang:
// it is refused, as the driver refuses a child whose parent used it. A new thread may have
// the number of one that ended, and must not get its state.
int32_t cuvmm_enter(const char *call) {
    if (forked) return NOT_INITIALIZED;
    if (in_host_func && !permitted(call)) return NOT_PERMITTED;
    if (!known) {
        known = 1;
        cuvmm_new_thread();
    }
    return 0;
}

int32_t cuCtxPushCurrent_v2(uintptr_t ctx) {
    int32_t r = cuvmm_enter_thread();
    return r != 0 ? r : cuvmm_push_context(ctx);
}

int32_t cuCtxPopCurrent_v2(uintptr_t *ctx) {
    int32_t r = cuvmm_enter_thread();
    return r != 0 ? r : cuvmm_pop_context(ctx);
}

static const cuvmm_result *result_of(int32_t code) {
    for (size_t i = 0; i < cuvmm_results_n; i++)
        if (cuvmm_results[i].code == code) return &cuvmm_results[i];
    return NULL;
}

// These two make no call into Go, so they work everywhere: in a child of fork, too. They
// fail for numbers that are no result.
int32_t cuGetErrorName(int32_t result, const char **name) {
    const cuvmm_result *r = result_of(result);
    if (!name) return INVALID_VALUE;
    *name = r ? r->name : NULL;
    return r ? 0 : INVALID_VALUE;
}

int32_t cuGetErrorString(int32_t result, const char **text) {
    const cuvmm_result *r = result_of(result);
    if (!text) return INVALID_VALUE;
    *text = r ? r->words : NULL;
    return r ? 0 : INVALID_VALUE;
}

int32_t cuGetProcAddress(const char *name, void **function, int32_t version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

static const cuvmm_export others[] = {
    {"cuCtxPushCurrent", 4000, (cuvmm_function)cuCtxPushCurrent_v2},
    {"cuCtxPopCurrent", 4000, (cuvmm_function)cuCtxPopCurrent_v2},
    {"cuGetErrorName", 6000, (cuvmm_function)cuGetErrorName},
    {"cuGetErrorString", 6000, (cuvmm_function)cuGetErrorString},
    {"cuGetProcAddress", 11030, (cuvmm_function)cuGetProcAddress},
    {"cuGetProcAddress", 12000, (cuvmm_function)cuGetProcAddress_v2},
};

// Forms with other parameters that the vendor's driver returns from these
// versions on, and this one lacks.
static const struct {
    const char *name;
    int32_t version;
} later[] = {{"cuStreamGetCaptureInfo", 11030}, {"cuCtxCreate", 11040}};

enum { FOUND, NO_SUCH_NAME, VERSION_TOO_OLD };

// Takes the latest form in a list that both the requested version and the driver have.
static void look(const cuvmm_export *list, size_t n, const char *name, int32_t version, int32_t driver, int32_t *best,
                 cuvmm_function *found, int32_t *status) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i].name, name) != 0 || list[i].version > driver) continue;
        if (*status == NO_SUCH_NAME) *status = VERSION_TOO_OLD;
        if (list[i].version > version || list[i].version < *best) continue;
        *best = list[i].version;
        *found = list[i].function;
        *status = FOUND;
    }
}

int32_t cuGetProcAddress_v2(const char *name, void **function, int32_t version, uint64_t flags, int32_t *status) {
    if (!name || !function || version < 0 || flags > 2) return INVALID_VALUE;
    *function = NULL;
    if (flags == 2) return NOT_SUPPORTED; // forms whose default stream is the thread's
    if (forked) return NOT_INITIALIZED;
    int32_t best = 0, state = NO_SUCH_NAME, driver = cuvmm_driver_version();
    cuvmm_function found = NULL;
    look(cuvmm_exports, cuvmm_exports_n, name, version, driver, &best, &found, &state);
    look(cuvmm_composed, cuvmm_composed_n, name, version, driver, &best, &found, &state);
    look(cuvmm_clients, cuvmm_clients_n, name, version, driver, &best, &found, &state);
    look(others, sizeof others / sizeof *others, name, version, driver, &best, &found, &state);
    for (size_t i = 0; i < sizeof later / sizeof *later; i++)
        if (strcmp(later[i].name, name) == 0 && version >= later[i].version && driver >= later[i].version) state = NO_SUCH_NAME;
    if (status) *status = state;
    if (state != FOUND) return NOT_FOUND;
    memcpy(function, &found, sizeof found);
    return 0;
}
