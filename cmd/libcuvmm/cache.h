//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The cache of blocks in front of a pool: notes.go says how it works. It calls nothing but
// the C library, and what calls it crosses into Go without its lock.
#ifndef CUVMM_CACHE_H
#define CUVMM_CACHE_H

#include <stddef.h>
#include <stdint.h>

// CUVMM_HOT puts the functions that every call runs side by side.
#define CUVMM_HOT __attribute__((hot))

#pragma GCC visibility push(hidden) // called directly, not through the linker's table

enum {
	CUVMM_MORE = 16,      // blocks that come with one that the cache does not have
	CUVMM_BATCH = 128,    // blocks that are given back at once
	CUVMM_NO_CLASS = 255, // of blocks that are not kept
};

// cuvmm_block is a block of the pool: front.Block.
typedef struct cuvmm_block {
	uint64_t ptr, gen, bytes;
} cuvmm_block;

// cuvmm_got is what the pool serves a request with: the block, and some free ones like it.
typedef struct cuvmm_got {
	cuvmm_block block;
	int32_t size_class, more;
	cuvmm_block extra[CUVMM_MORE];
} cuvmm_got;

// cuvmm_counts are of the blocks that the callers have, and of their calls.
typedef struct cuvmm_counts {
	uint64_t requested, peak_requested, blocks, peak_blocks, allocs, frees, requested_total;
} cuvmm_counts;

// cuvmm_capturing is the driver's cuStreamIsCapturing.
typedef int32_t (*cuvmm_capturing)(uintptr_t stream, uint32_t *status);

typedef struct cuvmm_cache cuvmm_cache;

// cuvmm_cache_open puts a cache in front of a pool. sizes are those of the classes, from large
// on of large ones; of has the class of a request by its size in units of 512 bytes. It keeps at most so many bytes.
// capturing is the address of the driver's entry point, or 0. NULL: the host has no memory.
cuvmm_cache *cuvmm_cache_open(uint64_t pool, const uint64_t *sizes, size_t classes, size_t large, const uint8_t *of, size_t of_n, uint64_t most, uintptr_t capturing);

// cuvmm_cache_close ends the cache of a pool that is closed: it has no blocks.
void cuvmm_cache_close(cuvmm_cache *c);

// cuvmm_cache_of returns the cache of an open pool, or NULL.
cuvmm_cache *cuvmm_cache_of(uint64_t pool);

// cuvmm_cache_end makes the process have no caches, for good: every call goes another way.
void cuvmm_cache_end(void);

// cuvmm_cache_asks returns how to ask whether a stream captures, or NULL.
cuvmm_capturing cuvmm_cache_asks(const cuvmm_cache *c);

// cuvmm_cache_serve serves a request of a stream that does not capture. 0: the pool does.
uintptr_t cuvmm_cache_serve(cuvmm_cache *c, size_t bytes, uintptr_t stream);

// cuvmm_cache_rounds returns by how much a large request may be rounded up to more than its class, or -1 if
// it is not to be rounded up at all: front.Pool.
int64_t cuvmm_cache_rounds(cuvmm_cache *c);

// cuvmm_cache_bytes returns how much the cache keeps.
uint64_t cuvmm_cache_bytes(cuvmm_cache *c);

// cuvmm_cache_wants returns how many free blocks of a class are to come with a block of the
// stream. If it is not 0, blocks move until cuvmm_cache_adopt.
int32_t cuvmm_cache_wants(cuvmm_cache *c, uintptr_t stream, int32_t size_class);

// cuvmm_cache_adopt records what the pool served. 0: the host has no memory, and the caller
// frees all of it and calls cuvmm_cache_moved if there was more than the block.
int cuvmm_cache_adopt(cuvmm_cache *c, uintptr_t stream, const cuvmm_got *got);

enum {
	CUVMM_KEPT, // freed
	CUVMM_FULL, // freed, and there is more than may be kept: cuvmm_cache_drain
	CUVMM_PASS, // the pool is to free it: then cuvmm_cache_passed
	CUVMM_NOT_LIVE,
};

// cuvmm_cache_free frees a block, or says what to do.
int cuvmm_cache_free(cuvmm_cache *c, uintptr_t ptr, uint32_t *passing);
void cuvmm_cache_passed(cuvmm_cache *c, uint32_t passing, int freed);

// cuvmm_cache_find returns whether a live block begins at an address, and its size.
int cuvmm_cache_find(cuvmm_cache *c, uintptr_t ptr, size_t *bytes);

// cuvmm_cache_use says that a further stream uses a block: the pool is to free it.
void cuvmm_cache_use(cuvmm_cache *c, uintptr_t ptr);

// cuvmm_cache_close_stream keeps nothing for a stream any more that is about to be destroyed.
void cuvmm_cache_close_stream(cuvmm_cache *c, uintptr_t stream);

// cuvmm_cache_hold makes the cache keep nothing that is freed until as many calls of
// cuvmm_cache_release. The caller drains it.
void cuvmm_cache_hold(cuvmm_cache *c);
void cuvmm_cache_release(cuvmm_cache *c);

enum cuvmm_drain {
	CUVMM_ALL,
	CUVMM_LARGE,    // blocks of large classes
	CUVMM_TOO_MUCH, // until the cache has no more than it may
};

// cuvmm_cache_drain takes blocks out of the cache for the pool to free, as many as there is
// room for. If there are any, blocks move until cuvmm_cache_moved.
size_t cuvmm_cache_drain(cuvmm_cache *c, enum cuvmm_drain what, cuvmm_block *to, size_t n);
void cuvmm_cache_moved(cuvmm_cache *c);
uint32_t cuvmm_cache_moving(cuvmm_cache *c);

// cuvmm_cache_resized returns live blocks that were served at another size than the pool
// knows. It goes on from *at, which begins with 0.
size_t cuvmm_cache_resized(cuvmm_cache *c, uint32_t *at, cuvmm_block *to, size_t n);

cuvmm_counts cuvmm_cache_counts(cuvmm_cache *c);
void cuvmm_cache_reset_peaks(cuvmm_cache *c);

#pragma GCC visibility pop

#endif
