//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#ifndef CBENCH_H
#define CBENCH_H

#include <stdint.h>

typedef int cbench_result;
typedef struct cbench_library cbench_library;
typedef struct cbench_holder cbench_holder;
typedef struct cbench_ring cbench_ring;

// The time of a loop in nanoseconds, and the first result that was no success.
typedef struct {
    int64_t ns;
    cbench_result result;
} cbench_time;

void cbench_empty(void);
int64_t cbench_now(void); // nanoseconds of a clock that only goes on

// NULL if the library cannot be loaded or lacks an entry point; the reason
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

// ring.c: threads that read a file into pinned memory and copy it to a device.

// NULL if there is no memory; result says why.
cbench_ring *cbench_ring_make(const cbench_library *l, uintptr_t ctx, uint32_t threads, uint64_t piece, cbench_result *result);
// Copies the first n bytes of a file to dst, with O_DIRECT or through the page cache. A read that
// fails has the result -errno.
cbench_time cbench_ring_load(cbench_ring *r, const char *path, int direct, uint64_t n, uint64_t dst);
void cbench_ring_free(cbench_ring *r);

// holder.c: a capture on a thread of its own.

// NULL if there is no thread to be had. begin is what beginning returned.
cbench_holder *cbench_hold(const cbench_library *l, uintptr_t ctx, uintptr_t stream, int32_t mode, cbench_result *begin);
// Ends the capture and the thread, and frees the holder.
cbench_result cbench_let_go(cbench_holder *h);

#endif
