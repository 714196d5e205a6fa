//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The C entry points. Each checks its pointers, so that Go can use them unchecked, and
// whether the process is a child of fork, where a call into Go would hang. What the cache serves
// needs no such check: a child has none.
#include "front.h"

#include "cache.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "_cgo_export.h"

static int forked;

static void in_child(void) {
	forked = 1;
	cuvmm_cache_end();
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

int cuvmm_forked(void) { return forked; }

void cuvmm_fault(void) { cuvmm_cache_end(); }

static _Atomic(uint64_t) entries;

uint64_t cuvmm_entries(void) { return atomic_load_explicit(&entries, memory_order_relaxed); }

int32_t cuvmm_say(cuvmm_error *e, int32_t status, const char *message) {
	const size_t head = offsetof(cuvmm_error, message);
	if (e != NULL && e->size > head) {
		size_t room = e->size - head;
		if (room > sizeof e->message) room = sizeof e->message;
		e->status = status;
		size_t n = strlen(message);
		if (n >= room) {
			n = room - 1;
			while (n > 0 && ((unsigned char)message[n] & 0xc0) == 0x80) n--; // not inside a character
		}
		memcpy(e->message, message, n);
		e->message[n] = 0;
	}
	return status;
}

int32_t cuvmm_refuse_child(cuvmm_error *e) {
	return cuvmm_say(e, CUVMM_FORKED,
		"this process was forked from one that uses the pool, and neither CUDA nor the pool survives that "
		"(start workers with the spawn method, or keep GPU work out of them)");
}

int32_t cuvmm_check_events(uint64_t events, cuvmm_error *e) {
	enum { most = 1 << 22 }; // what the pool's HistoryOptions take
	return events <= most ? CUVMM_OK : cuvmm_say(e, CUVMM_INVALID, "a history of too many events (keep at most 4194304)");
}

// ENTER refuses children of fork, and out-parameters that are NULL.
#define ENTER(out)                             \
	if (forked) return cuvmm_refuse_child(e); \
	if ((out) == NULL) return cuvmm_say(e, CUVMM_INVALID, #out " is NULL (pass a variable for the result)")

// BUFFER is ENTER for a buffer of n bytes, which may be NULL to learn the size.
#define BUFFER(to) \
	ENTER(n);      \
	if ((to) == NULL && *n > 0) return cuvmm_say(e, CUVMM_INVALID, "a size without a buffer (pass 0 to learn the size)")

// ENTERED calls into Go, which may change errno; CROSS returns the status.
#define ENTERED(call)                                                    \
	int saved = errno;                                                   \
	atomic_fetch_add_explicit(&entries, 1, memory_order_relaxed);        \
	int32_t status = (call);                                             \
	errno = saved

#define CROSS(call) \
	ENTERED(call);  \
	return status

int32_t cuvmm_version(void) { return CUVMM_VERSION; }

int32_t cuvmm_pool_open(const cuvmm_pool_options *options, uint64_t *pool, cuvmm_error *e) {
	ENTER(options);
	ENTER(pool);
	if (options->size != sizeof *options)
		return cuvmm_say(e, CUVMM_INVALID, "options of an unknown size (set size to sizeof(cuvmm_pool_options), and build with this library's header)");
	CROSS(goPoolOpen(options->device, options->limit, (char *)options->tag, pool, e));
}

int32_t cuvmm_pool_close(uint64_t pool, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	CROSS(goPoolClose(pool, e));
}

// captures reports whether a stream captures, or whether that is unknown. The driver's call
// needs no current context, is harmless in every capture mode, and takes 12 ns in a loop. The
// legacy stream never captures.
static inline int captures(cuvmm_cache *c, uint64_t pool, void *stream) {
	if (stream == NULL) return 0;
	cuvmm_capturing ask = cuvmm_cache_asks(c);
	uint32_t capture = 0;
	if (ask != NULL) return ask((uintptr_t)stream, &capture) != 0 || capture != 0;
	ENTERED(goCaptures(pool, (uintptr_t)stream));
	return status;
}

CUVMM_HOT void *cuvmm_serve(uint64_t pool, size_t bytes, void *stream) {
	cuvmm_cache *c = cuvmm_cache_of(pool);
	return c == NULL || captures(c, pool, stream) ? NULL : (void *)cuvmm_cache_serve(c, bytes, (uintptr_t)stream);
}

// give_back has the pool free blocks that the cache does not keep any more.
static void give_back(cuvmm_cache *c, uint64_t pool, const cuvmm_block *blocks, size_t n) {
	ENTERED(goFreeBlocks(pool, (cuvmm_block *)blocks, n));
	(void)status; // if not CUVMM_OK the library has failed
	cuvmm_cache_moved(c);
}

// alloc_of_go has the pool serve a request that the cache does not.
__attribute__((noinline)) static int32_t alloc_of_go(uint64_t pool, size_t bytes, void *stream, uint64_t arena, void **block, cuvmm_error *e) {
	ENTER(block);
	cuvmm_got got;
	ENTERED(goAlloc(pool, bytes, (uintptr_t)stream, arena, &got, e));
	if (status != CUVMM_OK) return status;
	cuvmm_cache *c = cuvmm_cache_of(pool); // NULL: the library has failed since
	int adopted = c == NULL || cuvmm_cache_adopt(c, (uintptr_t)stream, &got);
	errno = saved; // which the host's allocator may change
	if (!adopted) {
		if (got.more > 0) give_back(c, pool, got.extra, (size_t)got.more);
		goFree(pool, got.block.ptr, NULL);
		return cuvmm_say(e, CUVMM_OUT_OF_MEMORY, "the host has no memory for the list of blocks");
	}
	*block = (void *)got.block.ptr;
	return CUVMM_OK;
}

CUVMM_HOT int32_t cuvmm_alloc(uint64_t pool, size_t bytes, void *stream, uint64_t arena, void **block, cuvmm_error *e) {
	void *served = arena != 0 || block == NULL ? NULL : cuvmm_serve(pool, bytes, stream);
	if (served == NULL) return alloc_of_go(pool, bytes, stream, arena, block, e);
	*block = served;
	return CUVMM_OK;
}

CUVMM_HOT int cuvmm_keep(uint64_t pool, void *block, cuvmm_leaving *rest) {
	cuvmm_cache *c = rest->cache = cuvmm_cache_of(pool);
	rest->what = c == NULL ? CUVMM_NOT_LIVE : cuvmm_cache_free(c, (uintptr_t)block, &rest->passing);
	return rest->what == CUVMM_KEPT;
}

int32_t cuvmm_leave(uint64_t pool, void *block, const cuvmm_leaving *rest, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	switch (rest->what) {
	case CUVMM_FULL:;
		cuvmm_block blocks[CUVMM_BATCH];
		for (size_t n; (n = cuvmm_cache_drain(rest->cache, CUVMM_TOO_MUCH, blocks, CUVMM_BATCH)) > 0;) give_back(rest->cache, pool, blocks, n);
		return CUVMM_OK;
	case CUVMM_PASS: {
		ENTERED(goFree(pool, (uintptr_t)block, e));
		cuvmm_cache_passed(rest->cache, rest->passing, status == CUVMM_OK);
		return status;
	}
	default:
		CROSS(goNotLive(pool, (uintptr_t)block, e));
	}
}

CUVMM_HOT int32_t cuvmm_free(uint64_t pool, void *block, cuvmm_error *e) {
	cuvmm_leaving rest;
	return cuvmm_keep(pool, block, &rest) ? CUVMM_OK : cuvmm_leave(pool, block, &rest, e);
}

int32_t cuvmm_use(uint64_t pool, void *block, void *stream, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	cuvmm_cache *c = cuvmm_cache_of(pool);
	size_t bytes;
	if (c != NULL && !cuvmm_cache_find(c, (uintptr_t)block, &bytes)) return CUVMM_OK;
	ENTERED(goUse(pool, (uintptr_t)block, (uintptr_t)stream, e));
	if (status == CUVMM_OK) cuvmm_cache_use(c, (uintptr_t)block);
	return status;
}

int32_t cuvmm_find(uint64_t pool, void *block, size_t *bytes, cuvmm_error *e) {
	ENTER(bytes);
	cuvmm_cache *c = cuvmm_cache_of(pool);
	if (c != NULL && cuvmm_cache_find(c, (uintptr_t)block, bytes)) return CUVMM_OK;
	CROSS(goFind(pool, (uintptr_t)block, e));
}

int32_t cuvmm_stream_close(uint64_t pool, void *stream, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	CROSS(goStreamClose(pool, (uintptr_t)stream, e));
}

int32_t cuvmm_trim(uint64_t pool, uint64_t *freed, cuvmm_error *e) {
	ENTER(freed);
	CROSS(goTrim(pool, freed, e));
}

int32_t cuvmm_set_limit(uint64_t pool, int64_t bytes, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	CROSS(goSetLimit(pool, bytes, e));
}

int32_t cuvmm_total_memory(uint64_t pool, size_t *bytes, cuvmm_error *e) {
	ENTER(bytes);
	CROSS(goTotalMemory(pool, bytes, e));
}

int32_t cuvmm_pool_stats(uint64_t pool, cuvmm_stats *stats, cuvmm_error *e) {
	ENTER(stats);
	if (stats->size < sizeof stats->size) return cuvmm_say(e, CUVMM_INVALID, "statistics without their size (set size to sizeof(cuvmm_stats))");
	cuvmm_stats all;
	memset(&all, 0, sizeof all);
	ENTERED(goStats(pool, &all, e));
	if (status == CUVMM_OK) {
		size_t n = stats->size < sizeof all ? stats->size : sizeof all;
		memcpy((char *)stats + sizeof all.size, (char *)&all + sizeof all.size, n - sizeof all.size);
	}
	return status;
}

int32_t cuvmm_reset_peaks(uint64_t pool, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	CROSS(goResetPeaks(pool, e));
}

int32_t cuvmm_record_history(uint64_t pool, uint64_t events, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	int32_t refused = cuvmm_check_events(events, e);
	if (refused != CUVMM_OK) return refused;
	CROSS(goRecordHistory(pool, events, e));
}

int32_t cuvmm_snapshot(uint64_t pool, char *json, size_t *n, cuvmm_error *e) {
	BUFFER(json);
	CROSS(goSnapshot(pool, json, n, e));
}

// cuvmm_torch_snapshot is cuvmm_snapshot for all of the process's memory, in the form of
// PyTorch's snapshots: a pickle.
int32_t cuvmm_torch_snapshot(char *pickle, size_t *n, cuvmm_error *e) {
	BUFFER(pickle);
	CROSS(goTorchSnapshot(pickle, n, e));
}

int32_t cuvmm_segment_alloc(uint64_t pool, size_t bytes, const char *tag, void **segment, cuvmm_error *e) {
	ENTER(segment);
	CROSS(goSegmentAlloc(pool, bytes, (char *)tag, (uintptr_t *)segment, e));
}

int32_t cuvmm_segment_free(uint64_t pool, void *segment, void *stream, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	CROSS(goSegmentFree(pool, (uintptr_t)segment, (uintptr_t)stream, e));
}

int32_t cuvmm_arena_open(uint64_t pool, uint64_t *arena, cuvmm_error *e) {
	ENTER(arena);
	CROSS(goArenaOpen(pool, arena, e));
}

int32_t cuvmm_arena_end(uint64_t pool, uint64_t arena, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	CROSS(goArenaEnd(pool, arena, e));
}

int32_t cuvmm_arena_release(uint64_t pool, uint64_t arena, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	CROSS(goArenaRelease(pool, arena, e));
}

int32_t cuvmm_range_open(uint64_t pool, const cuvmm_range_options *options, void **range, cuvmm_error *e) {
	ENTER(options);
	ENTER(range);
	if (options->size != sizeof *options)
		return cuvmm_say(e, CUVMM_INVALID, "options of an unknown size (set size to sizeof(cuvmm_range_options), and build with this library's header)");
	CROSS(goRangeOpen(pool, options->bytes, options->page, options->null, (char *)options->tag, (uintptr_t *)range, e));
}

int32_t cuvmm_range_commit(uint64_t pool, void *range, size_t bytes, void *stream, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	CROSS(goRangeCommit(pool, (uintptr_t)range, bytes, (uintptr_t)stream, e));
}

int32_t cuvmm_range_release(uint64_t pool, void *range, size_t bytes, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	CROSS(goRangeRelease(pool, (uintptr_t)range, bytes, e));
}

int32_t cuvmm_range_close(uint64_t pool, void *range, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	CROSS(goRangeClose(pool, (uintptr_t)range, e));
}

// TAGS refuses children of fork, and lists with a NULL.
#define TAGS                                                                                                       \
	if (forked) return cuvmm_refuse_child(e);                                                                     \
	for (size_t i = 0; i < n; i++)                                                                                \
		if (tags == NULL || tags[i] == NULL) return cuvmm_say(e, CUVMM_INVALID, "a tag that is NULL (pass \"\" for memory without a tag, or n 0 for all)")

int32_t cuvmm_suspend(const char *const *tags, size_t n, const cuvmm_suspend_options *options, cuvmm_suspended *done, cuvmm_error *e) {
	ENTER(done);
	TAGS;
	if ((options != NULL && options->size != sizeof *options) || done->size != sizeof *done)
		return cuvmm_say(e, CUVMM_INVALID, "a struct of an unknown size (set size to its sizeof, and build with this library's header)");
	CROSS(goSuspend((char **)tags, n, options != NULL && options->drop, options != NULL && options->guard, done, e));
}

int32_t cuvmm_resume(const char *const *tags, size_t n, int64_t milliseconds, cuvmm_error *e) {
	TAGS;
	CROSS(goResume((char **)tags, n, milliseconds, e));
}

int32_t cuvmm_discard(const char *const *tags, size_t n, cuvmm_error *e) {
	TAGS;
	CROSS(goDiscard((char **)tags, n, e));
}

int32_t cuvmm_tags(char *json, size_t *n, cuvmm_error *e) {
	BUFFER(json);
	CROSS(goTags(json, n, e));
}

int32_t cuvmm_crc32c(const void *data, size_t n, uint32_t *sum, cuvmm_error *e) {
	ENTER(sum);
	if (data == NULL && n > 0) return cuvmm_say(e, CUVMM_INVALID, "data is NULL (pass where the bytes are)");
	CROSS(goCRC32C((void *)data, n, sum, e));
}
