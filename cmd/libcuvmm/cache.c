//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "cache.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { unit = 512, most_classes = 128, most_streams = 64, first_room = 1024, most_more = 256 << 10 };

// The states of a record. What a block does:
//
//	(the pool's) ──adopt──► live ──free──► cached ──serve──► live
//	                          │              └──drain──► (the pool's)
//	                          └──free, passed on──► passing ──► (the pool's), or live if that failed
enum state { unused, live, cached, passing };

// record is what the cache knows of a block. Records refer to each other by their numbers;
// 0 is none.
struct record {
	uint64_t ptr, gen, bytes;
	uint64_t told;  // the size that the pool knows
	uint32_t chain; // the next in its bucket
	uint32_t next;  // in its list of cached blocks, or of unused records
	uint16_t stream;
	uint8_t size_class, state;
};

enum stream_state { vacant, open_, closed };

// lists are the cached blocks of a stream by class, the latest first.
struct lists {
	uint32_t first[most_classes];
};

struct cuvmm_cache {
	pthread_mutex_t lock;
	// Set when it is opened.
	uint64_t most;
	size_t largest; // request
	cuvmm_capturing capturing;
	size_t classes, large; // the first of the large ones
	uint64_t sizes[most_classes];
	uint8_t *of;

	// Guarded by the lock.
	uint32_t held, moving;
	uint64_t bytes, large_bytes; // that are cached, and of large classes
	uint64_t large_live;         // bytes of large classes that are live
	cuvmm_counts counts;
	struct record *records;
	uint32_t *buckets;         // room of them, a power of two
	uint32_t room, fresh, gap; // records; the first that was never used; the first unused one
	uint32_t latest;           // stream that was served
	uint32_t hand;             // the list that is drained next
	uintptr_t handles[most_streams];
	uint8_t streams[most_streams];      // enum stream_state
	uint32_t referring[most_streams];   // records
	struct lists *lists[most_streams];
};

static inline void lock(cuvmm_cache *c) { pthread_mutex_lock(&c->lock); }
static inline void unlock(cuvmm_cache *c) { pthread_mutex_unlock(&c->lock); }

// The caches by the number of their pool. A table that grows is replaced, and the old one
// stays, since a thread may be reading it.
struct table {
	size_t n;
	_Atomic(cuvmm_cache *) at[];
};

static _Atomic(struct table *) caches;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

cuvmm_cache *cuvmm_cache_of(uint64_t pool) {
	struct table *t = atomic_load_explicit(&caches, memory_order_acquire);
	return t != NULL && pool < t->n ? atomic_load_explicit(&t->at[pool], memory_order_acquire) : NULL;
}

static int enlist(uint64_t pool, cuvmm_cache *c) {
	pthread_mutex_lock(&opening);
	struct table *t = atomic_load(&caches);
	if (t == NULL || pool >= t->n) {
		size_t n = 2 * pool + 16;
		struct table *next = calloc(1, sizeof *next + n * sizeof next->at[0]);
		if (next == NULL) {
			pthread_mutex_unlock(&opening);
			return 0;
		}
		next->n = n;
		for (size_t i = 0; t != NULL && i < t->n; i++) atomic_init(&next->at[i], atomic_load(&t->at[i]));
		atomic_store(&caches, next);
		t = next;
	}
	atomic_store_explicit(&t->at[pool], c, memory_order_release);
	pthread_mutex_unlock(&opening);
	return 1;
}

static void discard(cuvmm_cache *c) {
	free(c->of);
	free(c->records);
	free(c->buckets);
	for (int i = 0; i < most_streams; i++) free(c->lists[i]);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

cuvmm_cache *cuvmm_cache_open(uint64_t pool, const uint64_t *sizes, size_t classes, size_t large, const uint8_t *of, size_t of_n, uint64_t most, uintptr_t capturing) {
	if (classes > most_classes) return NULL;
	cuvmm_cache *c = calloc(1, sizeof *c);
	if (c == NULL) return NULL;
	pthread_mutex_init(&c->lock, NULL);
	c->most = most;
	c->largest = (of_n - 1) * unit;
	c->capturing = (cuvmm_capturing)capturing;
	c->classes = classes;
	c->large = large;
	memcpy(c->sizes, sizes, classes * sizeof *sizes);
	c->fresh = 1;
	c->room = first_room;
	c->of = malloc(of_n);
	c->records = malloc(first_room * sizeof *c->records);
	c->buckets = calloc(first_room, sizeof *c->buckets);
	if (c->of == NULL || c->records == NULL || c->buckets == NULL) {
		discard(c);
		return NULL;
	}
	memcpy(c->of, of, of_n);
	if (!enlist(pool, c)) {
		discard(c);
		return NULL;
	}
	return c;
}

// A call with the closed pool's number may still be under way, so the cache itself stays, and
// only what has grown goes.
void cuvmm_cache_close(cuvmm_cache *c) {
	pthread_mutex_lock(&opening);
	struct table *t = atomic_load(&caches);
	for (size_t i = 0; i < t->n; i++)
		if (atomic_load(&t->at[i]) == c) atomic_store(&t->at[i], NULL);
	pthread_mutex_unlock(&opening);
	lock(c);
	c->held++; // for good
	c->bytes = c->large_bytes = 0;
	free(c->records);
	c->records = NULL;
	c->room = c->fresh = c->gap = 0;
	free(c->buckets);
	c->buckets = NULL;
	for (int i = 0; i < most_streams; i++) {
		free(c->lists[i]);
		c->lists[i] = NULL;
		c->streams[i] = vacant;
	}
	unlock(c);
}

cuvmm_capturing cuvmm_cache_asks(const cuvmm_cache *c) { return c->capturing; }

// bucket is that of an address. Blocks begin at multiples of 512.
static inline uint32_t *bucket(cuvmm_cache *c, uint64_t ptr) {
	return &c->buckets[(ptr / unit * 0x9e3779b97f4a7c15u >> 32) & (c->room - 1)];
}

// find_live is the record of a live block, or 0. While one is passing, the pool may give its
// address to another.
static inline uint32_t find_live(cuvmm_cache *c, uint64_t ptr) {
	if (c->buckets == NULL) return 0;
	for (uint32_t i = *bucket(c, ptr); i != 0; i = c->records[i].chain)
		if (c->records[i].ptr == ptr && c->records[i].state == live) return i;
	return 0;
}

// grow makes room for n more records.
static int grow(cuvmm_cache *c, uint32_t n) {
	if (c->room == 0) return 0; // it is closed
	uint32_t room = c->room;
	while (room - c->fresh < n) {
		if (room > UINT32_MAX / 2) return 0;
		room *= 2;
	}
	if (room == c->room) return 1;
	uint32_t *buckets = calloc(room, sizeof *buckets);
	if (buckets == NULL) return 0;
	struct record *records = realloc(c->records, room * sizeof *records);
	if (records == NULL) {
		free(buckets);
		return 0;
	}
	free(c->buckets);
	c->records = records;
	c->buckets = buckets;
	c->room = room;
	for (uint32_t i = 1; i < c->fresh; i++) {
		struct record *r = &c->records[i];
		if (r->state == unused) continue;
		uint32_t *b = bucket(c, r->ptr);
		r->chain = *b;
		*b = i;
	}
	return 1;
}

// insert records a block. There is room.
static uint32_t insert(cuvmm_cache *c, const cuvmm_block *b, uint32_t stream, uint8_t size_class, enum state state) {
	uint32_t i = c->gap;
	if (i != 0)
		c->gap = c->records[i].next;
	else
		i = c->fresh++;
	uint32_t *head = bucket(c, b->ptr);
	c->records[i] = (struct record){b->ptr, b->gen, b->bytes, b->bytes, *head, 0, (uint16_t)stream, size_class, (uint8_t)state};
	*head = i;
	if (size_class != CUVMM_NO_CLASS) c->referring[stream]++;
	return i;
}

static void refer_no_more(cuvmm_cache *c, struct record *r) {
	if (r->size_class != CUVMM_NO_CLASS && --c->referring[r->stream] == 0 && c->streams[r->stream] == closed) c->streams[r->stream] = vacant;
}

static void erase(cuvmm_cache *c, uint32_t i) {
	struct record *r = &c->records[i];
	uint32_t *at = bucket(c, r->ptr);
	while (*at != i) at = &c->records[*at].chain;
	*at = r->chain;
	refer_no_more(c, r);
	r->state = unused;
	r->next = c->gap;
	c->gap = i;
}

enum { no_stream = most_streams };

static inline uint32_t stream_of(cuvmm_cache *c, uintptr_t handle) {
	if (c->handles[c->latest] == handle && c->streams[c->latest] == open_) return c->latest;
	for (uint32_t i = 0; i < most_streams; i++)
		if (c->handles[i] == handle && c->streams[i] == open_) return c->latest = i;
	return no_stream;
}

// add_stream is stream_of for a stream that may be new. Of more streams than there is room for
// nothing is kept.
static uint32_t add_stream(cuvmm_cache *c, uintptr_t handle) {
	uint32_t i = stream_of(c, handle);
	if (i != no_stream) return i;
	for (i = 0; i < most_streams && c->streams[i] != vacant;) i++;
	if (i == most_streams) return no_stream;
	if (c->lists[i] == NULL && (c->lists[i] = calloc(1, sizeof *c->lists[i])) == NULL) return no_stream;
	c->handles[i] = handle;
	c->streams[i] = open_;
	return i;
}

static inline void raise(uint64_t *most, uint64_t n) {
	if (n > *most) *most = n;
}

static inline void count_alloc(cuvmm_cache *c, uint64_t bytes) {
	cuvmm_counts *n = &c->counts;
	n->allocs++;
	n->requested_total += bytes;
	raise(&n->peak_requested, n->requested += bytes);
	raise(&n->peak_blocks, ++n->blocks);
}

static inline void count_free(cuvmm_cache *c, uint64_t bytes) {
	c->counts.frees++;
	c->counts.requested -= bytes;
	c->counts.blocks--;
}

// lives counts a block of a large class that is live from now on, or no more.
static inline void lives(cuvmm_cache *c, const struct record *r, int on) {
	if (r->size_class >= c->large && r->size_class != CUVMM_NO_CLASS) c->large_live += on ? c->sizes[r->size_class] : -c->sizes[r->size_class];
}

static inline void push(cuvmm_cache *c, uint32_t i) {
	struct record *r = &c->records[i];
	uint32_t *first = &c->lists[r->stream]->first[r->size_class];
	r->next = *first;
	*first = i;
	c->bytes += c->sizes[r->size_class];
	if (r->size_class >= c->large) c->large_bytes += c->sizes[r->size_class];
}

static inline struct record *pop(cuvmm_cache *c, uint32_t *first) {
	struct record *r = &c->records[*first];
	*first = r->next;
	c->bytes -= c->sizes[r->size_class];
	if (r->size_class >= c->large) c->large_bytes -= c->sizes[r->size_class];
	return r;
}

uintptr_t cuvmm_cache_serve(cuvmm_cache *c, size_t bytes, uintptr_t stream) {
	uintptr_t ptr = 0;
	if (bytes > c->largest) return 0;
	lock(c);
	uint32_t s = stream_of(c, stream);
	if (s != no_stream) { // while it is held there is nothing in the lists, or less and less
		uint32_t *first = &c->lists[s]->first[c->of[(bytes + unit - 1) / unit]];
		if (*first != 0) {
			struct record *r = pop(c, first);
			r->state = live;
			lives(c, r, 1);
			r->bytes = bytes;
			count_alloc(c, bytes);
			ptr = r->ptr;
		}
	}
	unlock(c);
	return ptr;
}

int cuvmm_cache_rounds(cuvmm_cache *c) {
	lock(c);
	int rounds = c->held == 0 && c->large_live < c->most;
	unlock(c);
	return rounds;
}

uint64_t cuvmm_cache_bytes(cuvmm_cache *c) {
	lock(c);
	uint64_t n = c->bytes;
	unlock(c);
	return n;
}

int32_t cuvmm_cache_wants(cuvmm_cache *c, uintptr_t stream, int32_t size_class) {
	int32_t n = 0;
	lock(c);
	if (c->held == 0 && c->bytes < c->most / 2 && add_stream(c, stream) != no_stream) {
		uint64_t fit = most_more / c->sizes[size_class];
		n = fit < CUVMM_MORE ? (int32_t)fit : CUVMM_MORE;
		if (n > 0) c->moving++;
	}
	unlock(c);
	return n;
}

int cuvmm_cache_adopt(cuvmm_cache *c, uintptr_t stream, const cuvmm_got *got) {
	lock(c);
	int done = grow(c, 1 + (uint32_t)got->more);
	if (done) {
		uint32_t s = got->size_class == CUVMM_NO_CLASS ? no_stream : add_stream(c, stream);
		lives(c, &c->records[insert(c, &got->block, s, s == no_stream ? CUVMM_NO_CLASS : (uint8_t)got->size_class, live)], 1);
		count_alloc(c, got->block.bytes);
		for (int32_t k = 0; k < got->more; k++) // the stream has a place: cuvmm_cache_wants
			push(c, insert(c, &got->extra[k], s, (uint8_t)got->size_class, cached));
		if (got->more > 0) c->moving--;
	}
	unlock(c);
	return done;
}

int cuvmm_cache_free(cuvmm_cache *c, uintptr_t ptr, uint32_t *passed) {
	int what = CUVMM_NOT_LIVE;
	lock(c);
	uint32_t i = find_live(c, ptr);
	if (i != 0) {
		struct record *r = &c->records[i];
		lives(c, r, 0);
		if (c->held == 0 && r->size_class != CUVMM_NO_CLASS && c->streams[r->stream] == open_) {
			count_free(c, r->bytes);
			r->state = cached;
			push(c, i);
			what = c->bytes > c->most ? CUVMM_FULL : CUVMM_KEPT;
		} else {
			r->state = passing;
			*passed = i;
			what = CUVMM_PASS;
		}
	}
	unlock(c);
	return what;
}

void cuvmm_cache_passed(cuvmm_cache *c, uint32_t i, int freed) {
	lock(c);
	if (c->records == NULL) { // it was the last block, and the pool is closed
	} else if (freed) {
		count_free(c, c->records[i].bytes);
		erase(c, i);
	} else {
		c->records[i].state = live;
		lives(c, &c->records[i], 1);
	}
	unlock(c);
}

int cuvmm_cache_find(cuvmm_cache *c, uintptr_t ptr, size_t *bytes) {
	lock(c);
	uint32_t i = find_live(c, ptr);
	if (i != 0) *bytes = c->records[i].bytes;
	unlock(c);
	return i != 0;
}

void cuvmm_cache_use(cuvmm_cache *c, uintptr_t ptr) {
	lock(c);
	uint32_t i = find_live(c, ptr);
	if (i != 0) {
		refer_no_more(c, &c->records[i]);
		lives(c, &c->records[i], 0);
		c->records[i].size_class = CUVMM_NO_CLASS;
	}
	unlock(c);
}

void cuvmm_cache_close_stream(cuvmm_cache *c, uintptr_t stream) {
	lock(c);
	uint32_t s = stream_of(c, stream);
	if (s != no_stream) c->streams[s] = c->referring[s] > 0 ? closed : vacant;
	unlock(c);
}

void cuvmm_cache_hold(cuvmm_cache *c) {
	lock(c);
	c->held++;
	unlock(c);
}

void cuvmm_cache_release(cuvmm_cache *c) {
	lock(c);
	c->held--;
	unlock(c);
}

// wanted reports whether a drain is to go on.
static int wanted(const cuvmm_cache *c, enum cuvmm_drain what) {
	switch (what) {
	case CUVMM_ALL: return c->bytes > 0;
	case CUVMM_LARGE: return c->large_bytes > 0;
	default: return c->bytes > c->most;
	}
}

// A drain goes on with the list at which the last one ended, so that in a full cache what is
// not requested any more goes, too.
size_t cuvmm_cache_drain(cuvmm_cache *c, enum cuvmm_drain what, cuvmm_block *to, size_t n) {
	size_t got = 0;
	lock(c);
	while (wanted(c, what) && got < n) {
		uint32_t s = c->hand / most_classes, k = c->hand % most_classes;
		uint32_t *first = c->lists[s] == NULL ? NULL : &c->lists[s]->first[k];
		if (first == NULL || *first == 0 || (what == CUVMM_LARGE && k < c->large)) {
			c->hand = (first == NULL ? (s + 1) * most_classes : c->hand + 1) % (most_streams * most_classes);
			continue;
		}
		struct record *r = pop(c, first);
		to[got++] = (cuvmm_block){r->ptr, r->gen, r->bytes};
		erase(c, (uint32_t)(r - c->records));
	}
	if (got > 0) c->moving++;
	unlock(c);
	return got;
}

void cuvmm_cache_moved(cuvmm_cache *c) {
	lock(c);
	c->moving--;
	unlock(c);
}

uint32_t cuvmm_cache_moving(cuvmm_cache *c) {
	lock(c);
	uint32_t n = c->moving;
	unlock(c);
	return n;
}

size_t cuvmm_cache_resized(cuvmm_cache *c, uint32_t *at, cuvmm_block *to, size_t n) {
	size_t got = 0;
	lock(c);
	for (; *at < c->fresh && got < n; ++*at) {
		struct record *r = &c->records[*at];
		if (*at == 0 || r->state != live || r->bytes == r->told) continue;
		r->told = r->bytes;
		to[got++] = (cuvmm_block){r->ptr, r->gen, r->bytes};
	}
	unlock(c);
	return got;
}

cuvmm_counts cuvmm_cache_counts(cuvmm_cache *c) {
	lock(c);
	cuvmm_counts n = c->counts;
	unlock(c);
	return n;
}

void cuvmm_cache_reset_peaks(cuvmm_cache *c) {
	lock(c);
	c->counts.peak_requested = c->counts.requested;
	c->counts.peak_blocks = c->counts.blocks;
	unlock(c);
}
