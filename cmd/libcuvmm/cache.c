//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "cache.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { unit = 512, most_classes = 128, most_streams = 64, first_room = 1024, most_more = 256 << 10, most_more_large = 2 << 20 };

// The states of a record. What a block does:
//
//	(the pool's) ──adopt──► live ──free──► cached ──serve──► live
//	                          │              └──drain──► (the pool's)
//	                          └──free, passed on──► passing ──► (the pool's), or live if that failed
enum state { unused, live, cached, passing };

// record is what the cache knows of a block. Records refer to each other by their numbers;
// 0 is none. One lies in one line of the processor's caches, and so does all that a call of
// a warm stream touches beside it: the cache's first line and its counts, a stream and the list
// of a class. A program's work between two calls leaves all of them cold.
struct record {
	uint64_t ptr, bytes;
	uint32_t chain; // the next in its bucket
	uint32_t next;  // in its list of cached blocks, or of unused records
	uint16_t stream;
	uint8_t size_class, state;
	uint32_t padding;
};

// origin is what only the pool needs of a record's block.
struct origin {
	uint64_t gen;
	uint64_t told; // the size that the pool knows
};

// list has the cached blocks of a stream and a class, the latest first.
struct list {
	uint32_t first;
	uint32_t size; // of the class
};

enum stream_state { vacant, open_, closed };

struct stream {
	uintptr_t handle;
	struct list *lists;
	uint32_t referring; // records
	uint8_t state;      // enum stream_state
};

struct cuvmm_cache {
	// Guarded by the lock, but for what is set when the cache is opened.
	_Alignas(64) atomic_uchar locked;
	uint8_t latest; // stream that was served
	uint8_t large;  // the first of the large classes; set once
	uint8_t shift;  // of a hash to the number of a bucket
	uint32_t held;
	struct record *records;
	uint32_t *buckets;
	const uint8_t *of;         // set once
	size_t largest;            // request; set once
	uint64_t most;             // bytes; set once
	cuvmm_capturing capturing; // set once

	_Alignas(64) cuvmm_counts counts;
	uint64_t bytes; // that are cached

	_Alignas(64) struct stream streams[most_streams];
	uint64_t large_bytes;     // that are cached of large classes
	uint64_t excess;          // by how much live blocks of large classes are more than was requested
	uint64_t live_large;      // blocks of no small class
	uint64_t freed_large;     // since the cache was opened
	struct origin *origins;
	uint32_t room, fresh, gap; // records; the first that was never used; the first unused one
	uint32_t moving;
	uint32_t hand; // the list that is drained next
	size_t classes;
	uint64_t sizes[most_classes];
};

static inline void relax(void) {
#if defined(__x86_64__)
	__builtin_ia32_pause();
#else
	__asm__ volatile("yield");
#endif
}

// wait_for_lock waits while another thread has the lock: for some ten instructions, unless it lost
// its processor or drains.
__attribute__((cold, noinline)) static void wait_for_lock(cuvmm_cache *c) {
	int saved = errno;
	for (int i = 1; atomic_load_explicit(&c->locked, memory_order_relaxed); i++) {
		relax();
		if (i % 256 == 0) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
	}
	errno = saved;
}

// The lock is a byte beside what it guards. A mutex of the C library would be two calls and one
// more locked instruction.
static inline void lock(cuvmm_cache *c) {
	while (atomic_exchange_explicit(&c->locked, 1, memory_order_acquire)) wait_for_lock(c);
}
static inline void unlock(cuvmm_cache *c) { atomic_store_explicit(&c->locked, 0, memory_order_release); }

// The caches by the number of their pool. A table that grows is replaced, and the old one
// stays, since a thread may be reading it.
struct table {
	size_t n;
	_Atomic(cuvmm_cache *) at[];
};

static _Atomic(struct table *) caches;
static atomic_int ended;
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
	if (atomic_load(&ended)) atomic_store(&caches, NULL);
	pthread_mutex_unlock(&opening);
	return 1;
}

// A child of fork calls it, too, where another thread of the parent may have had the lock.
void cuvmm_cache_end(void) {
	atomic_store(&ended, 1);
	atomic_store(&caches, NULL);
}

static void discard(cuvmm_cache *c) {
	free((void *)c->of);
	free(c->records);
	free(c->origins);
	free(c->buckets);
	free(c);
}

// bucket is that of an address. Blocks begin at multiples of 512.
static inline uint32_t *bucket(cuvmm_cache *c, uint64_t ptr) { return &c->buckets[ptr / unit * 0x9e3779b97f4a7c15u >> c->shift]; }

// make_room moves the records to tables of a power of two of them.
static int make_room(cuvmm_cache *c, uint32_t room) {
	struct record *records = aligned_alloc(64, room * sizeof *records);
	struct origin *origins = malloc(room * sizeof *origins);
	uint32_t *buckets = calloc(room, sizeof *buckets);
	if (records == NULL || origins == NULL || buckets == NULL) {
		free(records);
		free(origins);
		free(buckets);
		return 0;
	}
	if (c->room > 0) {
		memcpy(records, c->records, c->fresh * sizeof *records);
		memcpy(origins, c->origins, c->fresh * sizeof *origins);
	}
	free(c->records);
	free(c->origins);
	free(c->buckets);
	c->records = records;
	c->origins = origins;
	c->buckets = buckets;
	c->room = room;
	c->shift = (uint8_t)(64 - __builtin_ctz(room));
	for (uint32_t i = 1; i < c->fresh; i++) {
		struct record *r = &c->records[i];
		if (r->state == unused) continue;
		uint32_t *b = bucket(c, r->ptr);
		r->chain = *b;
		*b = i;
	}
	return 1;
}

cuvmm_cache *cuvmm_cache_open(uint64_t pool, const uint64_t *sizes, size_t classes, size_t large, const uint8_t *of, size_t of_n, uint64_t most, uintptr_t capturing) {
	if (classes > most_classes) return NULL;
	cuvmm_cache *c = aligned_alloc(_Alignof(cuvmm_cache), sizeof *c);
	if (c == NULL) return NULL;
	memset(c, 0, sizeof *c);
	c->most = most;
	c->largest = (of_n - 1) * unit;
	c->capturing = (cuvmm_capturing)capturing;
	c->classes = classes;
	c->large = (uint8_t)large;
	memcpy(c->sizes, sizes, classes * sizeof *sizes);
	uint8_t *copy = malloc(of_n);
	if (copy != NULL) memcpy(copy, of, of_n);
	c->of = copy;
	c->fresh = 1;
	if (copy == NULL || !make_room(c, first_room) || !enlist(pool, c)) {
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
	for (size_t i = 0; t != NULL && i < t->n; i++)
		if (atomic_load(&t->at[i]) == c) atomic_store(&t->at[i], NULL);
	pthread_mutex_unlock(&opening);
	lock(c);
	c->held++; // for good
	c->bytes = c->large_bytes = 0;
	free(c->records);
	free(c->origins);
	free(c->buckets);
	c->records = NULL;
	c->origins = NULL;
	c->buckets = NULL;
	c->room = c->fresh = c->gap = 0;
	for (int i = 0; i < most_streams; i++) {
		free(c->streams[i].lists);
		c->streams[i] = (struct stream){.state = vacant};
	}
	unlock(c);
}

cuvmm_capturing cuvmm_cache_asks(const cuvmm_cache *c) { return c->capturing; }

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
	return room == c->room || make_room(c, room);
}

// insert records a block. There is room.
static uint32_t insert(cuvmm_cache *c, const cuvmm_block *b, uint32_t stream, uint8_t size_class, enum state state) {
	uint32_t i = c->gap;
	if (i != 0)
		c->gap = c->records[i].next;
	else
		i = c->fresh++;
	uint32_t *head = bucket(c, b->ptr);
	c->records[i] = (struct record){.ptr = b->ptr, .bytes = b->bytes, .chain = *head, .stream = (uint16_t)stream, .size_class = size_class, .state = (uint8_t)state};
	c->origins[i] = (struct origin){b->gen, b->bytes};
	*head = i;
	if (size_class != CUVMM_NO_CLASS) c->streams[stream].referring++;
	return i;
}

static void refer_no_more(cuvmm_cache *c, struct record *r) {
	if (r->size_class == CUVMM_NO_CLASS) return;
	struct stream *s = &c->streams[r->stream];
	if (--s->referring == 0 && s->state == closed) s->state = vacant;
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

__attribute__((noinline)) static uint32_t search_stream(cuvmm_cache *c, uintptr_t handle) {
	for (uint32_t i = 0; i < most_streams; i++)
		if (c->streams[i].handle == handle && c->streams[i].state == open_) return c->latest = (uint8_t)i;
	return no_stream;
}

static inline uint32_t stream_of(cuvmm_cache *c, uintptr_t handle) {
	const struct stream *s = &c->streams[c->latest];
	return s->handle == handle && s->state == open_ ? c->latest : search_stream(c, handle);
}

// add_stream is stream_of for a stream that may be new. Of more streams than there is room for
// nothing is kept.
static uint32_t add_stream(cuvmm_cache *c, uintptr_t handle) {
	uint32_t i = stream_of(c, handle);
	if (i != no_stream) return i;
	for (i = 0; i < most_streams && c->streams[i].state != vacant;) i++;
	if (i == most_streams) return no_stream;
	struct stream *s = &c->streams[i];
	if (s->lists == NULL) {
		if ((s->lists = aligned_alloc(64, most_classes * sizeof *s->lists)) == NULL) return no_stream;
		for (size_t k = 0; k < most_classes; k++) s->lists[k] = (struct list){.size = k < c->classes ? (uint32_t)c->sizes[k] : 0};
	}
	s->handle = handle;
	s->state = open_;
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

static inline int is_large(const cuvmm_cache *c, const struct record *r) { return r->size_class >= c->large && r->size_class != CUVMM_NO_CLASS; }

static inline uint32_t class_of(const cuvmm_cache *c, uint64_t bytes) { return c->of[(bytes + unit - 1) / unit]; }

// exceeds counts what a block of a large class has too much.
static inline void exceeds(cuvmm_cache *c, const struct record *r, int on) {
	if (!is_large(c, r)) return;
	uint64_t excess = c->sizes[r->size_class] - r->bytes;
	c->excess += on ? excess : -excess;
}

// lives counts a block of no small class that is live from now on, or no more.
static inline void lives(cuvmm_cache *c, const struct record *r, int on) {
	if (r->size_class < c->large) return;
	c->live_large += on ? 1 : -1;
	c->freed_large += !on;
	exceeds(c, r, on);
}

// spare_excess is how much more than they need live blocks may have yet, if they are not of the
// class of their request but of a larger one.
static uint64_t spare_excess(const cuvmm_cache *c) {
	uint64_t most = c->most / 8;
	return c->excess < most ? most - c->excess : 0;
}

static inline void push(cuvmm_cache *c, struct list *l, uint32_t i) {
	struct record *r = &c->records[i];
	r->next = l->first;
	l->first = i;
	c->bytes += l->size;
	if (is_large(c, r)) c->large_bytes += l->size;
}

static inline struct record *pop(cuvmm_cache *c, struct list *l) {
	struct record *r = &c->records[l->first];
	l->first = r->next;
	c->bytes -= l->size;
	if (is_large(c, r)) c->large_bytes -= l->size;
	return r;
}

// fitting returns the list that serves a request of a large class, or NULL: its own, or the next that has a block, up to
// blocks half as large again, which the pool serves such requests with.
__attribute__((noinline)) static struct list *fitting(cuvmm_cache *c, struct list *lists, uint32_t k, uint64_t bytes) {
	uint64_t most = c->sizes[k] + c->sizes[k] / 2;
	if (lists[k].first != 0) return &lists[k];
	while (k < c->classes && c->sizes[k] <= most && lists[k].first == 0) k++;
	return k < c->classes && c->sizes[k] <= most && c->sizes[k] - bytes <= spare_excess(c) ? &lists[k] : NULL;
}

CUVMM_HOT uintptr_t cuvmm_cache_serve(cuvmm_cache *c, size_t bytes, uintptr_t stream) {
	uintptr_t ptr = 0;
	if (bytes > c->largest) return 0;
	lock(c);
	uint32_t s = stream_of(c, stream);
	if (s != no_stream) { // while it is held there is nothing in the lists, or less and less
		uint32_t k = class_of(c, bytes);
		struct list *l = &c->streams[s].lists[k];
		if (k >= c->large) l = fitting(c, c->streams[s].lists, k, bytes);
		if (l != NULL && l->first != 0) {
			struct record *r = pop(c, l);
			r->state = live;
			r->bytes = bytes;
			lives(c, r, 1);
			count_alloc(c, bytes);
			ptr = r->ptr;
		}
	}
	unlock(c);
	return ptr;
}

int64_t cuvmm_cache_rounds(cuvmm_cache *c) {
	lock(c);
	// A program first requests its weights, which stay: rounded up they would serve no other request.
	int64_t n = c->held == 0 && c->freed_large > c->live_large && c->counts.requested < 2 * c->most ? (int64_t)spare_excess(c) : -1;
	unlock(c);
	return n;
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
		uint64_t fit = (size_class < c->large ? most_more : most_more_large) / c->sizes[size_class];
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
			push(c, &c->streams[s].lists[got->size_class], insert(c, &got->extra[k], s, (uint8_t)got->size_class, cached));
		if (got->more > 0) c->moving--;
	}
	unlock(c);
	return done;
}

CUVMM_HOT int cuvmm_cache_free(cuvmm_cache *c, uintptr_t ptr, uint32_t *passed) {
	int what = CUVMM_NOT_LIVE;
	lock(c);
	uint32_t i = find_live(c, ptr);
	if (i != 0) {
		struct record *r = &c->records[i];
		lives(c, r, 0);
		if (c->held == 0 && r->size_class != CUVMM_NO_CLASS && c->streams[r->stream].state == open_) {
			count_free(c, r->bytes);
			r->state = cached;
			push(c, &c->streams[r->stream].lists[r->size_class], i);
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
		exceeds(c, &c->records[i], 0);
		c->live_large += c->records[i].size_class < c->large; // none of a small class any more
		c->records[i].size_class = CUVMM_NO_CLASS;
	}
	unlock(c);
}

void cuvmm_cache_close_stream(cuvmm_cache *c, uintptr_t stream) {
	lock(c);
	uint32_t s = stream_of(c, stream);
	if (s != no_stream) c->streams[s].state = c->streams[s].referring > 0 ? closed : vacant;
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
		struct list *l = c->streams[s].lists == NULL ? NULL : &c->streams[s].lists[k];
		if (l == NULL || l->first == 0 || (what == CUVMM_LARGE && k < c->large)) {
			c->hand = (l == NULL ? (s + 1) * most_classes : c->hand + 1) % (most_streams * most_classes);
			continue;
		}
		uint32_t i = l->first;
		struct record *r = pop(c, l);
		to[got++] = (cuvmm_block){r->ptr, c->origins[i].gen, r->bytes};
		erase(c, i);
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
		struct origin *o = &c->origins[*at];
		if (*at == 0 || r->state != live || r->bytes == o->told) continue;
		o->told = r->bytes;
		to[got++] = (cuvmm_block){r->ptr, o->gen, r->bytes};
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
