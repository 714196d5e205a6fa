// The C front and its cache on a pool that is a few lines of C and refuses every wrong free,
// from several threads with random operations. TestTheFrontUnderSanitizers builds it with
// front.c and cache.c.
//
//	front_test SEED SECONDS
#include "_cgo_export.h"
#include "front.h"

#include "cache.c" // to look inside

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MUST(x)                                                     \
	do {                                                            \
		if (!(x)) {                                                 \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #x); \
			_exit(1);                                               \
		}                                                           \
	} while (0)

enum { classes = 5, large_class = 2, slots = 1 << 14, streams = 5, others = 70, threads = 4, held_most = 300, cache_bytes = 2 << 20 };
static const uint64_t sizes[classes] = {512, 1024, 2048, 3072, 4096};
static const uint8_t of[] = {0, 0, 1, 2, 2, 3, 3, 4, 4};
static const size_t largest = 4096;

// The pool: slots of all classes, and of requests beyond them, which come from a stream's
// free list or are new.
static struct slot {
	int live;
	uint64_t gen, asked;
	uintptr_t stream, used;
	int size_class;
	int next;
} pool_slots[slots];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static int fresh = 1, free_lists[others + 8][classes + 1];
static uint64_t pool_live, pool_asked;
static _Atomic(uint32_t) capturing[others + 8];
static cuvmm_cache *the_cache;
static const uint64_t number = 7;

static uintptr_t address(int i) { return (uintptr_t)(1 << 20) + (uintptr_t)i * unit; }
static int slot_of(uintptr_t p) { return p < address(1) || p % unit != 0 || p >= address(slots) ? 0 : (int)((p - address(0)) / unit); }

static int32_t asks(uintptr_t stream, uint32_t *status) {
	*status = atomic_load(&capturing[stream]);
	return 0;
}

static cuvmm_block take(int class_, uintptr_t stream, uint64_t bytes) {
	int i = free_lists[stream][class_];
	if (i != 0) {
		free_lists[stream][class_] = pool_slots[i].next;
	} else {
		MUST(fresh < slots); // the cache hoards
		i = fresh++;
	}
	struct slot *s = &pool_slots[i];
	MUST(!s->live);
	s->live = 1, s->gen++, s->asked = bytes, s->stream = stream, s->used = 0, s->size_class = class_;
	pool_live++, pool_asked += bytes;
	return (cuvmm_block){address(i), s->gen, bytes};
}

static void put(uintptr_t p, uint64_t gen) {
	struct slot *s = &pool_slots[slot_of(p)];
	MUST(s->live && (gen == 0 || s->gen == gen));
	s->live = 0, s->gen++;
	pool_live--, pool_asked -= s->asked;
	s->next = free_lists[s->stream][s->size_class];
	free_lists[s->stream][s->size_class] = slot_of(p);
}

static void give_large(void) {
	cuvmm_block room[3];
	for (size_t n; (n = cuvmm_cache_drain(the_cache, CUVMM_LARGE, room, 3)) > 0;) {
		for (size_t i = 0; i < n; i++) MUST(pool_slots[slot_of(room[i].ptr)].size_class >= large_class);
		goFreeBlocks(number, room, n);
		cuvmm_cache_moved(the_cache);
	}
}

int32_t goAlloc(uint64_t pool, size_t bytes, uintptr_t stream, uint64_t arena, cuvmm_got *got, cuvmm_error *e) {
	MUST(pool == number);
	if (bytes > 1 << 20) return cuvmm_say(e, CUVMM_OUT_OF_MEMORY, "too much");
	int small = bytes <= largest && !arena && !atomic_load(&capturing[stream]);
	int c = small ? of[(bytes + unit - 1) / unit] : classes;
	if (c >= large_class && small) { // rounded up to either of two classes, as far as it may be
		int64_t most = cuvmm_cache_rounds(the_cache);
		if (c == 2 && bytes % 3 == 0 && (int64_t)(sizes[3] - bytes) <= most) c = 3;
		small = most >= 0;
		if (!small) c = classes;
	}
	pthread_mutex_lock(&pool_lock);
	got->block = take(c, stream, bytes);
	pthread_mutex_unlock(&pool_lock);
	got->size_class = small ? c : CUVMM_NO_CLASS;
	got->more = 0;
	if (got->block.gen % 64 == 0) give_large(); // as for a miss
	int32_t n = small ? cuvmm_cache_wants(the_cache, stream, c) : 0;
	if (n == 0) return CUVMM_OK;
	pthread_mutex_lock(&pool_lock);
	while (got->more < n && free_lists[stream][c] != 0) got->extra[got->more++] = take(c, stream, 0);
	pthread_mutex_unlock(&pool_lock);
	if (got->more == 0) cuvmm_cache_moved(the_cache);
	return CUVMM_OK;
}

int32_t goFree(uint64_t pool, uintptr_t block, cuvmm_error *e) {
	(void)e;
	MUST(pool == number);
	pthread_mutex_lock(&pool_lock);
	put(block, 0);
	pthread_mutex_unlock(&pool_lock);
	return CUVMM_OK;
}

int32_t goFreeBlocks(uint64_t pool, cuvmm_block *blocks, size_t n) {
	MUST(pool == number && n > 0);
	pthread_mutex_lock(&pool_lock);
	for (size_t i = 0; i < n; i++) {
		MUST(pool_slots[slot_of(blocks[i].ptr)].used == 0); // or it would be had before that stream is done
		put(blocks[i].ptr, blocks[i].gen);
	}
	pthread_mutex_unlock(&pool_lock);
	return CUVMM_OK;
}

int32_t goUse(uint64_t pool, uintptr_t block, uintptr_t stream, cuvmm_error *e) {
	(void)e;
	MUST(pool == number);
	pthread_mutex_lock(&pool_lock);
	pool_slots[slot_of(block)].used = stream;
	pthread_mutex_unlock(&pool_lock);
	return CUVMM_OK;
}

int32_t goNotLive(uint64_t pool, uintptr_t block, cuvmm_error *e) { (void)pool, (void)block; return cuvmm_say(e, CUVMM_INVALID, "no live block"); }
int32_t goFind(uint64_t pool, uintptr_t block, cuvmm_error *e) { return goNotLive(pool, block, e); }

// hold is what cache.go does.
static void hold(void) {
	cuvmm_block room[CUVMM_BATCH];
	cuvmm_cache_hold(the_cache);
	for (;;) {
		uint32_t moving = cuvmm_cache_moving(the_cache);
		size_t n = cuvmm_cache_drain(the_cache, CUVMM_ALL, room, CUVMM_BATCH);
		if (n > 0) {
			goFreeBlocks(number, room, n);
			cuvmm_cache_moved(the_cache);
		} else if (moving == 0) {
			break;
		}
	}
	uint32_t at = 0;
	for (size_t n; (n = cuvmm_cache_resized(the_cache, &at, room, CUVMM_BATCH)) > 0;) {
		pthread_mutex_lock(&pool_lock);
		for (size_t i = 0; i < n; i++) {
			struct slot *s = &pool_slots[slot_of(room[i].ptr)];
			if (!s->live || s->gen != room[i].gen) continue;
			pool_asked += room[i].bytes - s->asked;
			s->asked = room[i].bytes;
		}
		pthread_mutex_unlock(&pool_lock);
	}
}

int32_t goTrim(uint64_t pool, uint64_t *freed, cuvmm_error *e) {
	(void)pool, (void)e;
	hold();
	size_t kept = cuvmm_cache_drain(the_cache, CUVMM_ALL, (cuvmm_block[1]){{0}}, 1);
	MUST(kept == 0);
	*freed = 0;
	cuvmm_cache_release(the_cache);
	return CUVMM_OK;
}

int32_t goStreamClose(uint64_t pool, uintptr_t stream, cuvmm_error *e) {
	uint64_t freed;
	goTrim(pool, &freed, e);
	cuvmm_cache_close_stream(the_cache, stream);
	return CUVMM_OK;
}

#define UNUSED(name, ...) \
	int32_t name(__VA_ARGS__) { _exit(2); }
UNUSED(goPoolOpen, int32_t a, int64_t b, char *c, uint64_t *d, cuvmm_error *e)
UNUSED(goPoolClose, uint64_t a, cuvmm_error *e)
UNUSED(goCaptures, uint64_t a, uintptr_t b)
UNUSED(goSetLimit, uint64_t a, int64_t b, cuvmm_error *e)
UNUSED(goTotalMemory, uint64_t a, size_t *b, cuvmm_error *e)
UNUSED(goStats, uint64_t a, cuvmm_stats *b, cuvmm_error *e)
UNUSED(goResetPeaks, uint64_t a, cuvmm_error *e)
UNUSED(goRecordHistory, uint64_t a, uint64_t b, cuvmm_error *e)
UNUSED(goSnapshot, uint64_t a, char *b, size_t *c, cuvmm_error *e)
UNUSED(goTorchSnapshot, char *a, size_t *b, cuvmm_error *e)
UNUSED(goArenaOpen, uint64_t a, uint64_t *b, cuvmm_error *e)
UNUSED(goArenaEnd, uint64_t a, uint64_t b, cuvmm_error *e)
UNUSED(goArenaRelease, uint64_t a, uint64_t b, cuvmm_error *e)
UNUSED(goSegmentAlloc, uint64_t a, size_t b, char *c, uintptr_t *d, cuvmm_error *e)
UNUSED(goSegmentFree, uint64_t a, uintptr_t b, uintptr_t c, cuvmm_error *e)
UNUSED(goSuspend, char **a, size_t b, int32_t c, int32_t d, cuvmm_suspended *f, cuvmm_error *e)
UNUSED(goResume, char **a, size_t b, int64_t c, cuvmm_error *e)
UNUSED(goDiscard, char **a, size_t b, cuvmm_error *e)
UNUSED(goRangeOpen, uint64_t a, size_t b, size_t c, int32_t d, char *f, uintptr_t *g, cuvmm_error *e)
UNUSED(goRangeCommit, uint64_t a, uintptr_t b, size_t c, uintptr_t d, cuvmm_error *e)
UNUSED(goRangeRelease, uint64_t a, uintptr_t b, size_t c, cuvmm_error *e)
UNUSED(goRangeClose, uint64_t a, uintptr_t b, cuvmm_error *e)
UNUSED(goTags, char *a, size_t *b, cuvmm_error *e)
UNUSED(goCRC32C, void *a, size_t b, uint32_t *c, cuvmm_error *e)

// What the threads know of the blocks that they have. owner is of the block's first bytes:
// two threads that had one block would both write it.
static int owner[slots];
static _Atomic(uint64_t) allocs, frees, asked_total;
static _Atomic(uintptr_t) passed_on[32]; // blocks that another thread frees
static double until;
static uint64_t seed;

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t next(uint64_t *x) {
	*x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
	return *x * 0x2545f4914f6cdd1du >> 16;
}

static cuvmm_error error = {sizeof error, 0, ""};

static void release(uintptr_t p) {
	MUST(owner[slot_of(p)] != 0);
	owner[slot_of(p)] = 0;
	MUST(cuvmm_free(number, (void *)p, NULL) == CUVMM_OK);
	atomic_fetch_add(&frees, 1);
}

// fits reports whether blocks of a class may serve requests of another one.
static int fits(int size_class, int request) {
	return size_class == request || (request >= large_class && size_class > request && 2 * sizes[size_class] <= 3 * sizes[request]);
}

static void *work(void *arg) {
	struct { uintptr_t ptr; size_t bytes; uintptr_t stream; } mine[held_most];
	int n = 0, me = (int)(intptr_t)arg;
	uint64_t x = 88172645463325252u ^ (seed * threads + (uint64_t)me) * 0x9e3779b97f4a7c15u;
	while (now() < until || n > 0) {
		int ending = now() >= until;
		uint64_t what = next(&x) % 1000;
		if (ending || n == held_most || (n > 0 && what < 470)) {
			int i = (int)(next(&x) % (uint64_t)n);
			uintptr_t p = mine[i].ptr;
			mine[i] = mine[--n];
			if (what % 7 == 0 && !ending) p = atomic_exchange(&passed_on[what % 32], p);
			if (p != 0) release(p);
		} else if (what < 960) {
			uintptr_t s = what % 50 == 0 ? next(&x) % others : next(&x) % streams;
			size_t bytes = next(&x) % (what % 10 == 0 ? 2 * largest : largest);
			void *block = NULL;
			MUST(cuvmm_alloc(number, bytes, (void *)s, 0, &block, &error) == CUVMM_OK);
			struct slot *slot = &pool_slots[slot_of((uintptr_t)block)];
			MUST(slot->stream == s); // it does not change while the block is ours
			MUST(bytes > largest || slot->size_class == classes || fits(slot->size_class, of[(bytes + unit - 1) / unit]));
			MUST(owner[slot_of((uintptr_t)block)] == 0);
			owner[slot_of((uintptr_t)block)] = me + 1;
			size_t found = 1 << 30;
			MUST(cuvmm_find(number, block, &found, NULL) == CUVMM_OK && found == bytes);
			atomic_fetch_add(&allocs, 1);
			atomic_fetch_add(&asked_total, bytes);
			mine[n].ptr = (uintptr_t)block, mine[n].bytes = bytes, mine[n++].stream = s;
		} else if (what < 975 && n > 0) {
			MUST(cuvmm_use(number, (void *)mine[next(&x) % (uint64_t)n].ptr, (void *)(uintptr_t)3, NULL) == CUVMM_OK);
		} else if (what < 980) {
			atomic_store(&capturing[streams - 1], (uint32_t)(next(&x) % 2));
		} else if (what < 982) {
			uint64_t freed;
			MUST(cuvmm_trim(number, &freed, NULL) == CUVMM_OK);
		} else if (what < 985 && me == 0) {
			MUST(cuvmm_stream_close(number, (void *)(streams + next(&x) % (others - streams)), NULL) == CUVMM_OK);
		} else if (what < 990) {
			MUST(cuvmm_free(number, (void *)(address(slots - 1) + 1), NULL) == CUVMM_INVALID);
			MUST(cuvmm_use(number, (void *)address(slots - 1), NULL, NULL) == CUVMM_OK);
		} else {
			cuvmm_counts c = cuvmm_cache_counts(the_cache);
			MUST(c.allocs >= c.frees && c.blocks == c.allocs - c.frees && c.blocks <= c.peak_blocks && c.requested <= c.peak_requested);
			MUST(c.blocks <= threads * (held_most + 1) + 32);
		}
	}
	return NULL;
}

// exact compares the counts with what the callers have, and then, held, with the pool's.
static void exact(uint64_t blocks) {
	cuvmm_counts c = cuvmm_cache_counts(the_cache);
	MUST(c.allocs == allocs && c.frees == frees && c.blocks == blocks && c.requested_total == asked_total);
	hold();
	MUST(pool_live == c.blocks && pool_asked == c.requested);
	uint64_t records = 0, referring = 0;
	for (uint32_t i = 1; i < the_cache->fresh; i++) records += the_cache->records[i].state != unused;
	for (int i = 0; i < most_streams; i++) referring += the_cache->streams[i].referring;
	MUST(records == c.blocks && referring <= c.blocks && the_cache->bytes == 0 && the_cache->moving == 0);
	MUST(blocks > 0 || the_cache->excess == 0);
	cuvmm_cache_release(the_cache);
}

static uintptr_t alloc(size_t bytes, uintptr_t stream) {
	void *p = NULL;
	MUST(cuvmm_alloc(number, bytes, (void *)stream, 0, &p, &error) == CUVMM_OK);
	atomic_fetch_add(&allocs, 1);
	atomic_fetch_add(&asked_total, bytes);
	owner[slot_of((uintptr_t)p)] = 1;
	return (uintptr_t)p;
}

// steps are what one thread sees.
static void steps(void) {
	uintptr_t a = alloc(1000, 1);
	MUST(cuvmm_find(number, (void *)a, &(size_t){0}, NULL) == CUVMM_OK);
	release(a);
	MUST(cuvmm_find(number, (void *)a, &(size_t){0}, NULL) == CUVMM_INVALID);
	MUST(cuvmm_free(number, (void *)a, NULL) == CUVMM_INVALID); // freed twice
	uint64_t before = cuvmm_entries();
	for (int i = 0; i < 1000; i++) {
		uintptr_t b = alloc(1024 - (size_t)(i % 500), 1);
		MUST(b == a); // the latest of its class
		release(b);
	}
	MUST(cuvmm_entries() == before); // none enters Go
	a = alloc(600, 1);
	exact(1); // the pool knows of 1000 bytes
	uintptr_t other = alloc(1000, 2);
	MUST(other != a);
	release(other);
	release(a);
	atomic_store(&capturing[1], 1);
	uintptr_t c = alloc(1000, 1);
	MUST(c != a && c != other);
	release(c);
	atomic_store(&capturing[1], 0);
	c = alloc(1000, 1);
	MUST(cuvmm_use(number, (void *)c, (void *)(uintptr_t)2, NULL) == CUVMM_OK);
	before = cuvmm_entries();
	release(c);
	MUST(cuvmm_entries() == before + 1); // the pool frees it
	c = alloc(700, 1);
	MUST(cuvmm_stream_close(number, (void *)1, NULL) == CUVMM_OK);
	before = cuvmm_entries();
	release(c);
	MUST(cuvmm_entries() == before + 1);
	exact(0);
	MUST(the_cache->live_large == 0);
	the_cache->freed_large = 0; // as when it was opened
	uintptr_t weights = alloc(3000, 3);
	before = cuvmm_entries();
	release(weights);
	MUST(cuvmm_entries() == before + 1 && the_cache->live_large == 0 && the_cache->freed_large == 1);
	a = alloc(3000, 3);
	release(a);
	before = cuvmm_entries();
	c = alloc(2000, 3);
	MUST(c == a && cuvmm_entries() == before && the_cache->excess == 3072 - 2000);
	release(c);
	MUST(the_cache->excess == 0);
	exact(0);
	for (int i = 0; i < 600; i++) release(alloc(4096, 3));
	uintptr_t many[600];
	for (int i = 0; i < 600; i++) many[i] = alloc(4096, 3);
	for (int i = 0; i < 600; i++) release(many[i]);
	MUST(the_cache->large_bytes == the_cache->bytes);
	release(alloc(600, 3));
	give_large();
	MUST(the_cache->large_bytes == 0 && the_cache->bytes > 0);
	for (int i = 0; i < 600; i++) many[i] = alloc(4096, 3);
	for (int i = 0; i < 600; i++) release(many[i]);
	MUST(pool_live <= cache_bytes / 4096); // it keeps no more
	exact(0);
}

int main(int argc, char **argv) {
	MUST(argc == 3);
	seed = strtoull(argv[1], NULL, 10);
	the_cache = cuvmm_cache_open(number, sizes, classes, large_class, of, sizeof of, cache_bytes, (uintptr_t)asks);
	MUST(the_cache != NULL && cuvmm_cache_of(number) == the_cache && cuvmm_cache_of(number + 1) == NULL && cuvmm_cache_of(~(uint64_t)0) == NULL);
	steps();
	until = now() + atof(argv[2]);
	pthread_t t[threads];
	for (int i = 0; i < threads; i++) MUST(pthread_create(&t[i], NULL, work, (void *)(intptr_t)i) == 0);
	for (int i = 0; i < threads; i++) pthread_join(t[i], NULL);
	for (int i = 0; i < 32; i++)
		if (passed_on[i] != 0) release(passed_on[i]);
	exact(0);
	printf("%lu requests, of which %lu entered Go or freed there\n", (unsigned long)allocs, (unsigned long)cuvmm_entries());
	uintptr_t last = alloc(8 * unit, 3);
	cuvmm_cache_use(the_cache, last);
	uint32_t passing_now = 0;
	MUST(cuvmm_cache_free(the_cache, last, &passing_now) == CUVMM_PASS);
	cuvmm_cache_close(the_cache);
	MUST(cuvmm_cache_of(number) == NULL);
	// What is still under way with the closed pool's cache:
	cuvmm_cache_passed(the_cache, passing_now, 1);
	MUST(cuvmm_cache_serve(the_cache, 1000, 3) == 0 && cuvmm_cache_wants(the_cache, 3, 0) == 0);
	MUST(cuvmm_cache_free(the_cache, last, &passing_now) == CUVMM_NOT_LIVE && !cuvmm_cache_find(the_cache, last, &(size_t){0}));
	MUST(!cuvmm_cache_adopt(the_cache, 3, &(cuvmm_got){.size_class = 0}));
	cuvmm_cache_use(the_cache, last);
	cuvmm_cache_close_stream(the_cache, 3);
	give_large();
	hold();
	return 0;
}
