//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The pool of package vmm/pool for programs in any language, and as PyTorch's
// allocator.
//
// Handles are integers, and 0 is none. Every call returns a status and, where it
// is not CUVMM_OK, fills in the error, whose pointer may be NULL. Structs begin
// with their size in bytes, which the caller sets: a later version of the library
// fills in no more than that. No call calls back into the caller. All calls may be
// made from any thread.
//
// The library holds Go's runtime. A child of fork can use nothing of it: requests
// fail with CUVMM_FORKED, and freeing does nothing.
#ifndef LIBCUVMM_H
#define LIBCUVMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUVMM_VERSION 1

enum {
	CUVMM_OK = 0,
	CUVMM_INVALID = 1,        // an argument that no call could take
	CUVMM_OUT_OF_MEMORY = 2,  // no memory, after everything free was given back
	CUVMM_NOT_SUPPORTED = 3,  // by the driver or the device
	CUVMM_CAPTURING = 4,      // a stream that captures a graph
	CUVMM_CLOSED = 5,         // an unknown or closed handle
	CUVMM_IN_USE = 6,         // something still uses it
	CUVMM_LOST = 7,           // the device's context is lost
	CUVMM_FAILED = 8,         // anything else: the message says what
	CUVMM_FORKED = 9,         // this process is a child of the one that loaded the library
	CUVMM_FAULT = 10,         // the library failed, and refuses all further calls
};

typedef struct cuvmm_error {
	size_t size;
	int32_t status;
	char message[2036]; // UTF-8 with a NUL at its end: what failed, and the remedy
} cuvmm_error;

typedef struct cuvmm_pool_options {
	size_t size;
	int32_t device; // as the process counts its devices
	int64_t limit;  // bytes of physical memory; 0 is none
} cuvmm_pool_options;

typedef struct cuvmm_stats {
	size_t size;
	uint64_t requested, peak_requested; // bytes of live blocks, as requested
	uint64_t allocated;                 // bytes of live blocks, as they were rounded
	uint64_t reserved, peak_reserved;   // bytes of physical memory
	uint64_t blocks, peak_blocks;       // live blocks
	uint64_t allocs, frees;             // since the pool was made
	uint64_t limit;
	uint64_t captures;                  // that keep memory
} cuvmm_stats;

int32_t cuvmm_version(void);

int32_t cuvmm_pool_open(const cuvmm_pool_options *o, uint64_t *pool, cuvmm_error *e);
int32_t cuvmm_pool_close(uint64_t pool, cuvmm_error *e);

// cuvmm_alloc gives a block for the work of a stream, a CUstream. The arena is 0,
// or that of the capture which the stream takes part in.
int32_t cuvmm_alloc(uint64_t pool, size_t bytes, void *stream, uint64_t arena, void **block, cuvmm_error *e);

// cuvmm_free gives a block back, in the order of the stream that it was allocated
// for, and of those that cuvmm_use named.
int32_t cuvmm_free(uint64_t pool, void *block, cuvmm_error *e);

// cuvmm_use says that a further stream uses a block: it is not used again before
// that stream's work at the time of its free is done. A pointer that is no block
// of the pool is ignored.
int32_t cuvmm_use(uint64_t pool, void *block, void *stream, cuvmm_error *e);

// cuvmm_find tells the size of the block that begins at an address: CUVMM_INVALID
// if none does.
int32_t cuvmm_find(uint64_t pool, void *block, size_t *bytes, cuvmm_error *e);

// cuvmm_trim gives free memory that the GPU has passed back to the driver.
int32_t cuvmm_trim(uint64_t pool, uint64_t *freed, cuvmm_error *e);
int32_t cuvmm_set_limit(uint64_t pool, int64_t bytes, cuvmm_error *e);
int32_t cuvmm_total_memory(uint64_t pool, size_t *bytes, cuvmm_error *e); // of the pool's device
int32_t cuvmm_pool_stats(uint64_t pool, cuvmm_stats *s, cuvmm_error *e);

// cuvmm_snapshot writes what the pool holds as JSON, with a NUL at its end. *n is
// the buffer's size, and becomes what was needed: call again if that is more.
int32_t cuvmm_snapshot(uint64_t pool, char *json, size_t *n, cuvmm_error *e);

// An arena holds the memory of captured graphs, which replays use at fixed
// addresses. cuvmm_arena_end says that no further capture takes from it for now,
// before the driver's capture ends; cuvmm_arena_release, that its graphs are gone
// or about to be: the memory returns to the pool when the work that is in flight
// then is done.
int32_t cuvmm_arena_open(uint64_t pool, uint64_t *arena, cuvmm_error *e);
int32_t cuvmm_arena_end(uint64_t pool, uint64_t arena, cuvmm_error *e);
int32_t cuvmm_arena_release(uint64_t pool, uint64_t arena, cuvmm_error *e);

// A segment is an allocation of one handle, which other processes can map, for a
// cache of the caller's own. cuvmm_segment_free gives it back when the stream's
// work is done.
int32_t cuvmm_segment_alloc(uint64_t pool, size_t bytes, void **segment, cuvmm_error *e);
int32_t cuvmm_segment_free(uint64_t pool, void *segment, void *stream, cuvmm_error *e);

#ifdef __cplusplus
}
#endif

#endif
