// In place of the header that cgo writes: what the C front calls, for front_test.c to define.
#include "cache.h"
#include "libcuvmm.h"

int32_t goPoolOpen(int32_t device, int64_t limit, char *tag, uint64_t *out, cuvmm_error *e);
int32_t goPoolClose(uint64_t pool, cuvmm_error *e);
int32_t goAlloc(uint64_t pool, size_t bytes, uintptr_t stream, uint64_t arena, cuvmm_got *got, cuvmm_error *e);
int32_t goCaptures(uint64_t pool, uintptr_t stream);
int32_t goFree(uint64_t pool, uintptr_t block, cuvmm_error *e);
int32_t goFreeBlocks(uint64_t pool, cuvmm_block *blocks, size_t n);
int32_t goNotLive(uint64_t pool, uintptr_t block, cuvmm_error *e);
int32_t goUse(uint64_t pool, uintptr_t block, uintptr_t stream, cuvmm_error *e);
int32_t goFind(uint64_t pool, uintptr_t block, cuvmm_error *e);
int32_t goTrim(uint64_t pool, uint64_t *freed, cuvmm_error *e);
int32_t goSetLimit(uint64_t pool, int64_t bytes, cuvmm_error *e);
int32_t goTotalMemory(uint64_t pool, size_t *out, cuvmm_error *e);
int32_t goStats(uint64_t pool, cuvmm_stats *out, cuvmm_error *e);
int32_t goResetPeaks(uint64_t pool, cuvmm_error *e);
int32_t goRecordHistory(uint64_t pool, uint64_t events, cuvmm_error *e);
int32_t goSnapshot(uint64_t pool, char *to, size_t *n, cuvmm_error *e);
int32_t goTorchSnapshot(char *to, size_t *n, cuvmm_error *e);
int32_t goStreamClose(uint64_t pool, uintptr_t stream, cuvmm_error *e);
int32_t goArenaOpen(uint64_t pool, uint64_t *out, cuvmm_error *e);
int32_t goArenaEnd(uint64_t pool, uint64_t arena, cuvmm_error *e);
int32_t goArenaRelease(uint64_t pool, uint64_t arena, cuvmm_error *e);
int32_t goSegmentAlloc(uint64_t pool, size_t bytes, char *tag, uintptr_t *out, cuvmm_error *e);
int32_t goSegmentFree(uint64_t pool, uintptr_t segment, uintptr_t stream, cuvmm_error *e);
int32_t goSuspend(char **tags, size_t n, int32_t drop, int32_t guard, cuvmm_suspended *out, cuvmm_error *e);
int32_t goResume(char **tags, size_t n, int64_t milliseconds, cuvmm_error *e);
int32_t goDiscard(char **tags, size_t n, cuvmm_error *e);
int32_t goTags(char *to, size_t *n, cuvmm_error *e);
int32_t goCRC32C(void *data, size_t n, uint32_t *sum, cuvmm_error *e);
int32_t goRangeOpen(uint64_t pool, size_t bytes, size_t page, int32_t null, char *tag, uintptr_t *out, cuvmm_error *e);
int32_t goRangeCommit(uint64_t pool, uintptr_t ptr, size_t bytes, uintptr_t stream, cuvmm_error *e);
int32_t goRangeRelease(uint64_t pool, uintptr_t ptr, size_t bytes, cuvmm_error *e);
int32_t goRangeClose(uint64_t pool, uintptr_t ptr, cuvmm_error *e);
