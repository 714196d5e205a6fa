//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

#include <stdlib.h>
#include <string.h>

// What the operations did not free is freed at the end, which counts for nothing.
static void operate(const cbench_library *l, uintptr_t pool, uintptr_t stream, const cbench_op *ops, uint64_t n,
                    unsigned long long *at, uint64_t blocks, cbench_replayed *r) {
    int64_t start = cbench_now();
    uint64_t i = 0;
    for (; i < n && r->result == 0; i++) {
        const cbench_op *op = &ops[i];
        switch (op->kind) {
        case CBENCH_ALLOC:
            r->result = l->cuMemAllocFromPoolAsync(&at[op->block], op->bytes, pool, stream);
            break;
        case CBENCH_FREE:
            r->result = l->cuMemFreeAsync(at[op->block], stream);
            at[op->block] = 0;
            break;
        default: {
            int64_t from = cbench_now();
            r->result = l->cuStreamSynchronize(stream);
            r->waited += cbench_now() - from;
        }
        }
    }
    r->ns = cbench_now() - start - r->waited;
    if (r->result != 0) r->at = i - 1;
    for (uint64_t b = 0; b < blocks; b++) {
        if (!at[b]) continue;
        cbench_result freed = l->cuMemFreeAsync(at[b], stream);
        if (r->result == 0) r->result = freed;
    }
}

cbench_replayed cbench_replay(const cbench_library *l, uintptr_t ctx, int32_t device, uintptr_t stream,
                              const cbench_op *ops, uint64_t n, uint64_t blocks, uint64_t keep) {
    enum { OUT_OF_MEMORY = 2 };
    cbench_replayed r = {0};
    cbench_pool_props props;
    memset(&props, 0, sizeof props);
    props.type = CBENCH_PINNED;
    props.location = (cbench_location){CBENCH_DEVICE, device};
    unsigned long long *at = calloc(blocks ? blocks : 1, sizeof *at);
    if (!at) {
        r.result = OUT_OF_MEMORY;
        return r;
    }
    uintptr_t before = 0, pool = 0;
    if ((r.result = l->cuCtxGetCurrent(&before)) == 0 && (r.result = l->cuCtxSetCurrent(ctx)) == 0) {
        if ((r.result = l->cuMemPoolCreate(&pool, &props)) == 0) {
            r.result = l->cuMemPoolSetAttribute(pool, CBENCH_RELEASE_THRESHOLD, &keep);
            if (r.result == 0) operate(l, pool, stream, ops, n, at, blocks, &r);
            cbench_result rest[] = {
                l->cuMemPoolGetAttribute(pool, CBENCH_RESERVED_HIGH, &r.reserved),
                l->cuStreamSynchronize(stream), // its frees come before the pool's end
                l->cuMemPoolDestroy(pool),
            };
            for (int i = 0; i < 3; i++)
                if (r.result == 0) r.result = rest[i];
        }
        cbench_result restored = l->cuCtxSetCurrent(before);
        if (r.result == 0) r.result = restored;
    }
    free(at);
    return r;
}
