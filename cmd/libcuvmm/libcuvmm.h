//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The pool of package vmm/pool for programs in any language, and as PyTorch's
// allocator.
//
// Handles are integers, and 0 is no handle; a closed handle is never given out again.
// Every call returns a status. If it is not CUVMM_OK the call fills in the error, which
// may be NULL. Every struct begins with its size in bytes, which the caller sets, so
// that a later version of the library can add fields. Out-parameters must not be NULL.
// No call calls back into the caller. All calls may be made from any thread, and leave
// errno as it was.
//
// A stream is a CUstream. The library refers to it from the first call that names it
// until cuvmm_stream_close or cuvmm_pool_close, so it must live as long. The per-thread
// default stream names another stream on every thread and is refused. On the software
// driver, which the library opens inside the process, there are no streams but NULL and 1,
// the default stream: those of a software libcuda in the process are unknown.
//
// The library holds Go's runtime, which does not survive fork: in a child, requests fail
// with CUVMM_FORKED, and freeing does nothing. A signal handler must have SA_ONSTACK, as
// those of Python 3.10 and later do. A process can hold one library with Go's runtime.
#ifndef LIBCUVMM_H
#define LIBCUVMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUVMM_VERSION 3

enum {
	CUVMM_OK = 0,
	CUVMM_INVALID = 1,        // an invalid argument
	CUVMM_OUT_OF_MEMORY = 2,  // no memory, even after all free memory was given back
	CUVMM_NOT_SUPPORTED = 3,  // by the driver or the device
	CUVMM_CAPTURING = 4,      // a stream captures a graph
	CUVMM_CLOSED = 5,         // an unknown or closed handle
	CUVMM_IN_USE = 6,         // the object is in use
	CUVMM_LOST = 7,           // the device's context is lost
	CUVMM_FAILED = 8,         // any other error: the message says which
	CUVMM_FORKED = 9,         // this process is a child of the one that loaded the library
	CUVMM_FAULT = 10,         // the library failed, and refuses all further calls
	CUVMM_SUSPENDED = 11,     // the memory sleeps: cuvmm_resume
};

typedef struct cuvmm_error {
	size_t size;
	int32_t status;
	char message[2036]; // NUL-terminated UTF-8: what failed, and the remedy
} cuvmm_error;

typedef struct cuvmm_pool_options {
	size_t size;
	int32_t device; // its ordinal in this process
	int64_t limit;  // bytes of physical memory; 0 is no limit
	const char *tag; // what cuvmm_suspend calls its memory; NULL is the empty tag
} cuvmm_pool_options;

typedef struct cuvmm_stats {
	size_t size;
	uint64_t requested, peak_requested; // bytes of live blocks, as requested
	uint64_t reserved, peak_reserved;   // bytes of physical memory
	uint64_t blocks, peak_blocks;       // live blocks
	uint64_t allocs, frees;             // since the pool was opened
	uint64_t requested_total;           // bytes of all requests since the pool was opened
	uint64_t waiting;                   // freed blocks that other streams or a capture may still use
	uint64_t refused;                   // requests that failed for lack of memory
	uint64_t limit;
	uint64_t captures;                  // captures that keep memory
} cuvmm_stats;

// cuvmm_version returns the CUVMM_VERSION that the library was built with.
int32_t cuvmm_version(void);

// cuvmm_pool_open opens a pool of a device's memory, which takes no memory yet.
// The devices of a process's pools that reach each other can access each other's blocks and
// segments; while memory of another one sleeps the opening is CUVMM_SUSPENDED.
// cuvmm_pool_close closes it, after the work of arenas that were released; a pool with live
// blocks, arenas, segments or ranges is CUVMM_IN_USE.
int32_t cuvmm_pool_open(const cuvmm_pool_options *o, uint64_t *pool, cuvmm_error *e);
int32_t cuvmm_pool_close(uint64_t pool, cuvmm_error *e);

// cuvmm_alloc allocates a block for work that is submitted to the stream from now on.
// The arena is that of the capture in which the stream takes part, or 0. One that is
// unknown or released is CUVMM_CLOSED, even if the stream captures nothing.
int32_t cuvmm_alloc(uint64_t pool, size_t bytes, void *stream, uint64_t arena, void **block, cuvmm_error *e);

// cuvmm_free frees a block. Its memory is used again once the work that is now on its
// stream, and on the streams that cuvmm_use named, is done. It does not wait.
int32_t cuvmm_free(uint64_t pool, void *block, cuvmm_error *e);

// cuvmm_use says that a further stream uses a block, so that cuvmm_free takes that
// stream's work into account. Pointers that are not blocks of the pool are ignored.
int32_t cuvmm_use(uint64_t pool, void *block, void *stream, cuvmm_error *e);

// cuvmm_find returns the size of the block that begins at an address, or CUVMM_INVALID
// if there is none.
int32_t cuvmm_find(uint64_t pool, void *block, size_t *bytes, cuvmm_error *e);

// cuvmm_stream_close ends the library's use of a stream, before the caller destroys it:
// the next stream may get the same handle. It waits for the stream's work.
int32_t cuvmm_stream_close(uint64_t pool, void *stream, cuvmm_error *e);

// cuvmm_trim returns free memory that the GPU has finished with to the driver, and sets
// freed to the number of bytes.
int32_t cuvmm_trim(uint64_t pool, uint64_t *freed, cuvmm_error *e);
int32_t cuvmm_set_limit(uint64_t pool, int64_t bytes, cuvmm_error *e);
int32_t cuvmm_total_memory(uint64_t pool, size_t *bytes, cuvmm_error *e); // of the pool's device
int32_t cuvmm_pool_stats(uint64_t pool, cuvmm_stats *s, cuvmm_error *e);

// cuvmm_reset_peaks makes the pool's peaks what is there now.
int32_t cuvmm_reset_peaks(uint64_t pool, cuvmm_error *e);

// cuvmm_record_history makes the pool keep its latest allocations and frees, which
// snapshots contain, and forget earlier ones. It keeps at most 4,194,304 events, which
// take some 400 MB of the host's memory; more is CUVMM_INVALID. 0 events stops it.
int32_t cuvmm_record_history(uint64_t pool, uint64_t events, cuvmm_error *e);

// cuvmm_snapshot writes the pool's state as JSON, the form of pool.Snapshot, with a NUL at
// its end. n is the buffer's size, and becomes the size that is needed: if it exceeds the
// buffer's, nothing was written. Two calls may need different sizes, since what is written
// contains times: leave room, and repeat the call if it was not enough.
int32_t cuvmm_snapshot(uint64_t pool, char *json, size_t *n, cuvmm_error *e);

// An arena is memory for graph captures. Open one when captures begin, and pass it to
// cuvmm_alloc. cuvmm_arena_end ends the captures that used it, before the driver's own
// capture ends. cuvmm_arena_release says that its graphs are destroyed or about to be:
// once the work that is then in flight is done, the memory returns to the pool.
int32_t cuvmm_arena_open(uint64_t pool, uint64_t *arena, cuvmm_error *e);
int32_t cuvmm_arena_end(uint64_t pool, uint64_t arena, cuvmm_error *e);
int32_t cuvmm_arena_release(uint64_t pool, uint64_t arena, cuvmm_error *e);

// A segment is an allocation of one handle, which other processes can map, for a cache
// of the caller's own. It has at least one byte, and a tag, or NULL. cuvmm_segment_free frees
// it when the stream's work is done.
int32_t cuvmm_segment_alloc(uint64_t pool, size_t bytes, const char *tag, void **segment, cuvmm_error *e);
int32_t cuvmm_segment_free(uint64_t pool, void *segment, void *stream, cuvmm_error *e);

// A range is addresses for bytes, of which the first have memory, of this process alone: those
// that were committed, and the first page always. Graphs that use it stay good when more is committed.
// Behind that there is no memory, and work faults, unless null is set: then one page lies
// under all of it, in which work reads and writes something of no meaning.
typedef struct cuvmm_range_options {
	size_t size;
	size_t bytes;
	size_t page;     // of how many bytes memory is made at once; 0 is the granularity
	const char *tag; // as a pool's
	int32_t null;
} cuvmm_range_options;

// cuvmm_range_commit has memory lie under the first bytes, at once for work of the stream; it
// never takes any away. On a stream that captures it is CUVMM_CAPTURING, unless nothing is to be
// done. With null it waits for the device's work, and the caller submits none on the range until it
// returns. cuvmm_range_release and cuvmm_range_close wait for all work: the former gives back what
// lies behind the first bytes.
int32_t cuvmm_range_open(uint64_t pool, const cuvmm_range_options *options, void **range, cuvmm_error *e);
int32_t cuvmm_range_commit(uint64_t pool, void *range, size_t bytes, void *stream, cuvmm_error *e);
int32_t cuvmm_range_release(uint64_t pool, void *range, size_t bytes, cuvmm_error *e);
int32_t cuvmm_range_close(uint64_t pool, void *range, cuvmm_error *e);

// Memory sleeps by its tag: it goes back to the driver, and its addresses stay. A tag is the
// group of pools, segments and ranges that were made with it; the empty one is that of all memory without
// one. Without a list, n being 0, a call is for all tags. While a tag sleeps nothing can be made
// with it (CUVMM_SUSPENDED), and freeing works. Work that the caller submits on the memory
// meanwhile faults, which ends the context of the device.
typedef struct cuvmm_suspend_options {
	size_t size;
	int32_t drop;  // 1: the bytes are lost. 0: they are kept in pinned host memory
	int32_t guard; // 1: scratch memory lies under the addresses, so that a stray access mostly does no harm
} cuvmm_suspend_options;

typedef struct cuvmm_suspended {
	size_t size;
	uint64_t given; // bytes that went back to the driver
	uint64_t held;  // that stayed, because other processes or objects may have them
	uint64_t host;  // of host memory that keep the contents
} cuvmm_suspended;

// cuvmm_suspend waits for the devices' work, copies the bytes out and gives the memory back.
// options may be NULL. A named tag that sleeps is CUVMM_SUSPENDED, one that no memory has is
// CUVMM_INVALID, and a pool that serves a capture is CUVMM_CAPTURING; then nothing has changed.
int32_t cuvmm_suspend(const char *const *tags, size_t n, const cuvmm_suspend_options *options, cuvmm_suspended *done, cuvmm_error *e);

// cuvmm_resume brings memory back with its bytes, and waits so many milliseconds for room. After
// an error it sleeps on with what is kept, or if several calls suspended the tags some of it does.
int32_t cuvmm_resume(const char *const *tags, size_t n, int64_t milliseconds, cuvmm_error *e);

// cuvmm_discard gives back memory without keeping its bytes, and for tags that sleep what is
// kept of them. After cuvmm_resume the contents are undefined.
int32_t cuvmm_discard(const char *const *tags, size_t n, cuvmm_error *e);

// cuvmm_tags writes the tags of the process's memory as JSON, as cuvmm_snapshot does: a list of
// objects with "tag", "suspended", and "ranges", which are pairs of an address and bytes.
int32_t cuvmm_tags(char *json, size_t *n, cuvmm_error *e);

// cuvmm_crc32c gives the CRC-32C of n bytes of the host's memory, as files of tensors declare it.
int32_t cuvmm_crc32c(const void *data, size_t n, uint32_t *sum, cuvmm_error *e);

#ifdef __cplusplus
}
#endif

#endif
