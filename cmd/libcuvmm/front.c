//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The C entry points. Each asks first whether this is a child of fork: Go's
// runtime does not survive that, and a call into it would hang.
#include "front.h"

#include <pthread.h>
#include <string.h>

#include "_cgo_export.h"

static int forked;

static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

int cuvmm_forked(void) { return forked; }

int32_t cuvmm_say(cuvmm_error *e, int32_t status, const char *message) {
	if (e != NULL && e->size >= sizeof(size_t) + sizeof(int32_t) + 1) {
		size_t room = e->size - sizeof(size_t) - sizeof(int32_t);
		if (room > sizeof(e->message)) room = sizeof(e->message);
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

static int32_t in_a_child(cuvmm_error *e) {
	return cuvmm_say(e, CUVMM_FORKED,
		"this process was forked from one that uses the pool, and neither CUDA nor the pool survives that "
		"(start workers with the spawn method, or keep GPU work out of them)");
}

int32_t cuvmm_version(void) { return CUVMM_VERSION; }

int32_t cuvmm_pool_open(const cuvmm_pool_options *o, uint64_t *pool, cuvmm_error *e) {
	if (forked) return in_a_child(e);
	if (o == NULL || pool == NULL || o->size < sizeof(cuvmm_pool_options)) return cuvmm_say(e, CUVMM_INVALID, "options without their size");
	return goPoolOpen(o->device, o->limit, pool, e);
}

int32_t cuvmm_pool_close(uint64_t pool, cuvmm_error *e) { return forked ? CUVMM_OK : goPoolClose(pool, e); }

int32_t cuvmm_alloc(uint64_t pool, size_t bytes, void *stream, uint64_t arena, void **block, cuvmm_error *e) {
	return forked ? in_a_child(e) : goAlloc(pool, bytes, (uintptr_t)stream, arena, (uintptr_t *)block, e);
}

int32_t cuvmm_free(uint64_t pool, void *block, cuvmm_error *e) { return forked ? CUVMM_OK : goFree(pool, (uintptr_t)block, e); }

int32_t cuvmm_use(uint64_t pool, void *block, void *stream, cuvmm_error *e) {
	return forked ? in_a_child(e) : goUse(pool, (uintptr_t)block, (uintptr_t)stream, e);
}

int32_t cuvmm_find(uint64_t pool, void *block, size_t *bytes, cuvmm_error *e) {
	return forked ? in_a_child(e) : goFind(pool, (uintptr_t)block, bytes, e);
}

int32_t cuvmm_trim(uint64_t pool, uint64_t *freed, cuvmm_error *e) { return forked ? in_a_child(e) : goTrim(pool, freed, e); }

int32_t cuvmm_set_limit(uint64_t pool, int64_t bytes, cuvmm_error *e) { return forked ? in_a_child(e) : goSetLimit(pool, bytes, e); }

int32_t cuvmm_total_memory(uint64_t pool, size_t *bytes, cuvmm_error *e) { return forked ? in_a_child(e) : goTotalMemory(pool, bytes, e); }

int32_t cuvmm_pool_stats(uint64_t pool, cuvmm_stats *s, cuvmm_error *e) {
	if (forked) return in_a_child(e);
	if (s == NULL || s->size < sizeof(size_t)) return cuvmm_say(e, CUVMM_INVALID, "statistics without their size");
	cuvmm_stats all = {sizeof all};
	int32_t status = goStats(pool, &all, e);
	if (status == CUVMM_OK) {
		size_t n = s->size < sizeof all ? s->size : sizeof all;
		memcpy((char *)s + sizeof(size_t), (char *)&all + sizeof(size_t), n - sizeof(size_t));
	}
	return status;
}

int32_t cuvmm_snapshot(uint64_t pool, char *json, size_t *n, cuvmm_error *e) {
	if (forked) return in_a_child(e);
	if (n == NULL || (json == NULL && *n > 0)) return cuvmm_say(e, CUVMM_INVALID, "a buffer without its size");
	return goSnapshot(pool, json, n, e);
}

int32_t cuvmm_segment_alloc(uint64_t pool, size_t bytes, void **segment, cuvmm_error *e) {
	return forked ? in_a_child(e) : goSegmentAlloc(pool, bytes, (uintptr_t *)segment, e);
}

int32_t cuvmm_segment_free(uint64_t pool, void *segment, void *stream, cuvmm_error *e) {
	return forked ? CUVMM_OK : goSegmentFree(pool, (uintptr_t)segment, (uintptr_t)stream, e);
}

int32_t cuvmm_arena_open(uint64_t pool, uint64_t *arena, cuvmm_error *e) { return forked ? in_a_child(e) : goArenaOpen(pool, arena, e); }

int32_t cuvmm_arena_end(uint64_t pool, uint64_t arena, cuvmm_error *e) { return forked ? in_a_child(e) : goArenaEnd(pool, arena, e); }

int32_t cuvmm_arena_release(uint64_t pool, uint64_t arena, cuvmm_error *e) { return forked ? CUVMM_OK : goArenaRelease(pool, arena, e); }
