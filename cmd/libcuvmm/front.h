//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// What the C front, the front for PyTorch and the Go side of the library share.
#ifndef CUVMM_FRONT_H
#define CUVMM_FRONT_H

#include "libcuvmm.h"

#ifdef __cplusplus
extern "C" {
#endif

// cuvmm_forked reports whether this process is a child of fork, where no call may cross
// into Go.
int cuvmm_forked(void);

// cuvmm_refuse_child fills in the error for a call in a child of fork.
int32_t cuvmm_refuse_child(cuvmm_error *e);

// cuvmm_fault ends what the library does without Go, which refuses all calls from now on.
void cuvmm_fault(void);

// cuvmm_entries returns how many calls have entered Go, for tests and benchmarks.
uint64_t cuvmm_entries(void);

#pragma GCC visibility push(hidden)

// cuvmm_serve serves a request outside of captures from the cache, or returns NULL: then
// cuvmm_alloc does, or says what is wrong.
void *cuvmm_serve(uint64_t pool, size_t bytes, void *stream);

// cuvmm_leaving is what is to be done with a block that was freed.
typedef struct cuvmm_leaving {
	struct cuvmm_cache *cache;
	int what;
	uint32_t passing;
} cuvmm_leaving;

// cuvmm_keep frees a block into the cache. If it returns 0, cuvmm_leave does the rest.
int cuvmm_keep(uint64_t pool, void *block, cuvmm_leaving *rest);
int32_t cuvmm_leave(uint64_t pool, void *block, const cuvmm_leaving *rest, cuvmm_error *e);

#pragma GCC visibility pop

// cuvmm_say fills in an error, and returns its status.
int32_t cuvmm_say(cuvmm_error *e, int32_t status, const char *message);

// cuvmm_check_events refuses a length of the history that no pool takes.
int32_t cuvmm_check_events(uint64_t events, cuvmm_error *e);

#ifdef __cplusplus
}
#endif

#endif
