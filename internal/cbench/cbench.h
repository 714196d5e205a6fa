//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#ifndef CBENCH_H
#define CBENCH_H

#include <stdint.h>

typedef int cbench_result;
typedef struct cbench_library cbench_library;
typedef struct cbench_holder cbench_holder;

// The time of a loop in nanoseconds, and the first result that was no success.
typedef struct {
    int64_t ns;
    cbench_result result;
} cbench_time;

void cbench_empty(void);
int64_t cbench_now(void); // nanoseconds of a clock that only goes on

// NULL where the library cannot be loaded or lacks an entry point; the reason
// is written to error.
cbench_library *cbench_open(const char *path, char *error, uint64_t n);

cbench_time cbench_capture_steps(const cbench_library *l, uintptr_t ctx, uintptr_t stream, uint64_t n);
cbench_time cbench_granularity_steps(const cbench_library *l, int32_t device, uint64_t n);

cbench_time cbench_vmm_cycle(const cbench_library *l, int32_t device, uint64_t size, uint64_t rounds);
// sizes are the chunks of all steps one after the other, chunks how many of
// them each of the n steps has.
cbench_time cbench_grow(const cbench_library *l, int32_t device, uint64_t reserve, const uint64_t *sizes,
                        const uint64_t *chunks, uint64_t n);
cbench_time cbench_copy(const cbench_library *l, uintptr_t ctx, uintptr_t stream, uint64_t dst, const void *src,
                        uint64_t n, uint64_t chunk, uint64_t rounds);

// replay.c: a list of allocations through a pool of the driver's own.

enum { CBENCH_ALLOC, CBENCH_FREE, CBENCH_WAIT };

typedef struct {
    uint64_t bytes; // of CBENCH_ALLOC
    uint32_t block; // of CBENCH_ALLOC and CBENCH_FREE
    uint32_t kind;
} cbench_op;

// ns is the time of allocating and freeing, waited that of the waits. reserved
// is the most memory that the pool held.
typedef struct {
    int64_t ns, waited;
    uint64_t reserved;
    uint64_t at; // the operation that failed
    cbench_result result;
} cbench_replayed;

// Blocks are below so many, each is freed before it is allocated again. The pool
// keeps so many bytes over a wait.
cbench_replayed cbench_replay(const cbench_library *l, uintptr_t ctx, int32_t device, uintptr_t stream,
                              const cbench_op *ops, uint64_t n, uint64_t blocks, uint64_t keep);

// holder.c: a capture on a thread of its own.

// NULL where there is no thread to be had. begin is what beginning answered.
cbench_holder *cbench_hold(const cbench_library *l, uintptr_t ctx, uintptr_t stream, int32_t mode, cbench_result *begin);
// Ends the capture and the thread, and frees the holder.
cbench_result cbench_let_go(cbench_holder *h);

#endif
