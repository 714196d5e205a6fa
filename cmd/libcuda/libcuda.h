//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// What the files of this folder share: the entry points with a rule of their
// own, and the list of all.

#ifndef CUVMM_LIBCUDA_H
#define CUVMM_LIBCUDA_H

#include "../../csrc/abi.h"

// Some exports take a uintptr_t in place of the vendor's pointer.
_Static_assert(sizeof(uintptr_t) == sizeof(void *) && sizeof(uintptr_t) == sizeof(void (*)(void)), "pointers and numbers are passed alike");

typedef void (*cuvmm_function)(void);

// An entry point: its name for cuGetProcAddress, and the CUDA version that
// first had it in this form.
typedef struct {
    const char *name;
    int32_t version;
    cuvmm_function function;
} cuvmm_export;

extern const cuvmm_export cuvmm_exports[];
extern const size_t cuvmm_exports_n;

// Those that the table does not list: made of others (composed.c), and with state in Go
// (clients.c).
extern const cuvmm_export cuvmm_composed[], cuvmm_clients[];
extern const size_t cuvmm_composed_n, cuvmm_clients_n;

// A result: its number, the vendor's name, and the name as words.
typedef struct {
    int32_t code;
    const char *name, *words;
} cuvmm_result;

extern const cuvmm_result cuvmm_results[];
extern const size_t cuvmm_results_n;

// Begins every entry point. The result is not 0 if the call must end with it.
int32_t cuvmm_enter(const char *call);
#define cuvmm_enter_thread() cuvmm_enter(__func__)

// Returns an address of host memory as Go may hold it. The first page is no memory, and a
// number of that size where Go expects a pointer ends the process.
static inline void *cuvmm_host(const void *p) { return (uintptr_t)p < 4096 ? NULL : (void *)p; }

// Call a function of the program: of cuLaunchHostFunc, and of cuStreamAddCallback.
void cuvmm_call_host_func(uintptr_t f, uintptr_t data);
void cuvmm_call_callback(uintptr_t f, uintptr_t s, int32_t status, uintptr_t data);

// Has what the software driver saw reported when the program ends.
void cuvmm_report_at_exit(void);

int32_t cuGetProcAddress_v2(const char *name, void **function, int32_t version, uint64_t flags, int32_t *status);

#endif
