//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The C entry points. Each checks its pointers, so that Go can use them unchecked, and
// whether the process is a child of fork, where a call into Go would hang.
#include "front.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "_cgo_export.h"

static int forked;

static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

int cuvmm_forked(void) { return forked; }

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

// CROSS calls into Go, which may change errno, and returns the status.
#define CROSS(call)         \
	int saved = errno;      \
	int32_t status = (call); \
	errno = saved;          \
	return status

int32_t cuvmm_version(void) { return CUVMM_VERSION; }

int32_t cuvmm_pool_open(const cuvmm_pool_options *options, uint64_t *pool, cuvmm_error *e) {
	ENTER(options);
	ENTER(pool);
	if (options->size != sizeof *options)
		return cuvmm_say(e, CUVMM_INVALID, "options of an unknown size (set size to sizeof(cuvmm_pool_options), and build with this library's header)");
	CROSS(goPoolOpen(options->device, options->limit, pool, e));
}

int32_t cuvmm_pool_close(uint64_t pool, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	CROSS(goPoolClose(pool, e));
}

int32_t cuvmm_alloc(uint64_t pool, size_t bytes, void *stream, uint64_t arena, void **block, cuvmm_error *e) {
	ENTER(block);
	CROSS(goAlloc(pool, bytes, (uintptr_t)stream, arena, (uintptr_t *)block, e));
}

int32_t cuvmm_free(uint64_t pool, void *block, cuvmm_error *e) {
	if (forked) return CUVMM_OK;
	CROSS(goFree(pool, (uintptr_t)block, e));
}

int32_t cuvmm_use(uint64_t pool, void *block, void *stream, cuvmm_error *e) {
	if (forked) return cuvmm_refuse_child(e);
	CROSS(goUse(pool, (uintptr_t)block, (uintptr_t)stream, e));
}

int32_t cuvmm_find(uint64_t pool, void *block, size_t *bytes, cuvmm_error *e) {
	ENTER(bytes);
	CROSS(goFind(pool, (uintptr_t)block, bytes, e));
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
	cuvmm_stats all = {sizeof all};
	int saved = errno;
	int32_t status = goStats(pool, &all, e);
	errno = saved;
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
	ENTER(n);
	if (json == NULL && *n > 0) return cuvmm_say(e, CUVMM_INVALID, "a size without a buffer (pass 0 to learn the size)");
	CROSS(goSnapshot(pool, json, n, e));
}

// cuvmm_torch_snapshot is cuvmm_snapshot for all of the process's memory, in the form of
// PyTorch's snapshots: a pickle.
int32_t cuvmm_torch_snapshot(char *pickle, size_t *n, cuvmm_error *e) {
	ENTER(n);
	if (pickle == NULL && *n > 0) return cuvmm_say(e, CUVMM_INVALID, "a size without a buffer (pass 0 to learn the size)");
	CROSS(goTorchSnapshot(pickle, n, e));
}

int32_t cuvmm_segment_alloc(uint64_t pool, size_t bytes, void **segment, cuvmm_error *e) {
	ENTER(segment);
	CROSS(goSegmentAlloc(pool, bytes, (uintptr_t *)segment, e));
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
