//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The driver's entry points and what every call does to its thread. For the C
// files alone; Go sees csrc.h.

#ifndef CUVMM_API_H
#define CUVMM_API_H

#include "csrc.h"

// The layouts, as measured with the vendor's header.
_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8 && sizeof(unsigned long long) == 8, "64-bit only");
// Handles, callbacks and descriptors are declared as uintptr_t where the vendor has pointers.
_Static_assert(sizeof(uintptr_t) == sizeof(void *) && sizeof(uintptr_t) == sizeof(void (*)(void)), "pointers and numbers are passed alike");
// An output of fewer bytes lands at the front of a cleared word.
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "little-endian only");
_Static_assert(sizeof(int) == 4 && sizeof(float) == 4, "int and float are 32 bits");
_Static_assert(sizeof(cuvmm_location) == 8, "location");
_Static_assert(offsetof(cuvmm_location, id) == 4, "location");
_Static_assert(sizeof(cuvmm_prop) == 32, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, handle_types) == 4, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, location) == 8, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, win32) == 16, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, compression) == 24, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, rdma) == 25, "allocation properties");
_Static_assert(offsetof(cuvmm_prop, usage) == 26, "allocation properties");
_Static_assert(sizeof(cuvmm_multicast) == 32, "multicast properties");
_Static_assert(offsetof(cuvmm_multicast, size) == 8, "multicast properties");
_Static_assert(offsetof(cuvmm_multicast, handle_types) == 16, "multicast properties");
_Static_assert(offsetof(cuvmm_multicast, flags) == 24, "multicast properties");
_Static_assert(sizeof(cuvmm_access) == 12, "access descriptor");
_Static_assert(offsetof(cuvmm_access, flags) == 8, "access descriptor");
_Static_assert(sizeof(cuvmm_copy) == 24, "attributes of copies");
_Static_assert(offsetof(cuvmm_copy, flags) == 20, "attributes of copies");
_Static_assert(sizeof(cuvmm_lock) == 64, "lock arguments");
_Static_assert(sizeof(cuvmm_shareable) == 64, "shareable handle");
_Static_assert(sizeof(cuvmm_uuid) == 16, "uuid");

#include "entries.h"

typedef void (*cuvmm_entry)(void);

// One form of an opened driver. pop is cuCtxPopCurrent, which no method stands
// for. exchange is cuThreadExchangeStreamCaptureMode if calls are to run in the
// relaxed mode, and null in the foreign form.
typedef struct {
    cuvmm_entries api;
    int32_t (*pop)(uintptr_t *ctx);
    int32_t (*exchange)(uint32_t *mode);
} cuvmm_table;

// cuvmm_resolve fills the table in as an array.
_Static_assert(offsetof(cuvmm_table, pop) == CUVMM_POP * sizeof(cuvmm_entry), "a pointer for each entry point");

static inline const cuvmm_table *cuvmm_table_of(cuvmm_driver d) { return (const cuvmm_table *)d; }

enum { CUVMM_CAPTURE_RELAXED = 2 };

// The default streams are 0, 1 (legacy) and 2 (per thread).
enum { CUVMM_LAST_DEFAULT_STREAM = 2 };

// What a call has to put back on its thread.
typedef struct {
    uintptr_t context, before;
    uint32_t mode;
    int switched, exchanged;
} cuvmm_thread;

// Readies the thread for a call: the relaxed capture mode, and ctx current
// unless it is 0. A failed exchange (before cuInit, or without the entry
// point) does not stop the call; a context that cannot be made current does,
// since the call would run in another one.
static inline int32_t cuvmm_enter(const cuvmm_table *d, uintptr_t ctx, cuvmm_thread *t) {
    t->context = ctx;
    t->switched = 0;
    t->mode = CUVMM_CAPTURE_RELAXED;
    t->exchanged = d->exchange && d->exchange(&t->mode) == 0;
    if (ctx == 0) return 0;
    int32_t r = d->api.cuCtxGetCurrent(&t->before);
    if (r != 0 || t->before == ctx) return r;
    // Restored even if this fails: a driver may return an older,
    // asynchronous error after it switched.
    t->switched = 1;
    return d->api.cuCtxSetCurrent(ctx);
}

static inline void cuvmm_leave(const cuvmm_table *d, cuvmm_thread *t) {
    if (t->switched && d->api.cuCtxSetCurrent(t->before) != 0) {
        // The context from before may be destroyed by now. The thread is not
        // ours: it must not keep a context that its owner never chose.
        uintptr_t now = 0;
        if (d->api.cuCtxGetCurrent(&now) == 0 && now == t->context) d->api.cuCtxSetCurrent(0);
    }
    if (t->exchanged) d->exchange(&t->mode);
}

// Declares int32_t result and makes one call: CUVMM_CALL(d, ctx, cuMemFree, (p)).
#define CUVMM_CALL(d, ctx, entry, args)            \
    int32_t result = CUVMM_MISSING_ENTRY_POINT;    \
    const cuvmm_table *table = cuvmm_table_of(d);  \
    if (table->api.entry) {                        \
        cuvmm_thread thread;                       \
        result = cuvmm_enter(table, ctx, &thread); \
        if (result == 0) result = table->api.entry args; \
        cuvmm_leave(table, &thread);               \
    }

// The same of a call that leaves the thread alone.
#define CUVMM_BARE_CALL(d, entry, args)           \
    int32_t result = CUVMM_MISSING_ENTRY_POINT;   \
    const cuvmm_table *table = cuvmm_table_of(d); \
    if (table->api.entry) result = table->api.entry args;

// The same of a call that finds its context by a stream and is harmless to captures in every
// mode, unless the stream is one that every context has: that of the current context is meant.
#define CUVMM_ASKING_CALL(d, ctx, stream, entry, args)           \
    int32_t result = CUVMM_MISSING_ENTRY_POINT;                  \
    const cuvmm_table *table = cuvmm_table_of(d);                \
    if (table->api.entry) {                                      \
        cuvmm_thread thread = {0};                               \
        int is_default = (stream) <= CUVMM_LAST_DEFAULT_STREAM;  \
        result = is_default ? cuvmm_enter(table, ctx, &thread) : 0; \
        if (result == 0) result = table->api.entry args;         \
        if (is_default) cuvmm_leave(table, &thread);             \
    }

#endif
