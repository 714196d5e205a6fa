//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#define _GNU_SOURCE

#include "api.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum { NON_BLOCKING = 1, PORTABLE = 1, OUT_OF_MEMORY = 2, MOST_THREADS = 64 };

typedef struct {
    cbench_ring *ring;
    uintptr_t streams[2];
    char *pieces[2];
    cbench_result result;
} worker;

struct cbench_ring {
    const cbench_library *library;
    uintptr_t ctx;
    uint64_t piece;
    uint32_t threads;
    worker workers[MOST_THREADS];
    // Of the load that runs.
    int file;
    uint64_t n, dst, taken;
};

static cbench_result make_worker(cbench_ring *r, worker *w) {
    w->ring = r;
    cbench_result result = 0;
    for (int i = 0; i < 2 && result == 0; i++) {
        result = r->library->cuStreamCreate(&w->streams[i], NON_BLOCKING);
        if (result == 0) result = r->library->cuMemHostAlloc((void **)&w->pieces[i], r->piece, PORTABLE);
    }
    return result;
}

cbench_ring *cbench_ring_make(const cbench_library *l, uintptr_t ctx, uint32_t threads, uint64_t piece, cbench_result *result) {
    cbench_ring *r = threads <= MOST_THREADS ? calloc(1, sizeof *r) : NULL;
    if (!r) {
        *result = OUT_OF_MEMORY;
        return NULL;
    }
    r->library = l;
    r->ctx = ctx;
    r->piece = piece;
    r->threads = threads;
    uintptr_t before = 0;
    l->cuCtxGetCurrent(&before);
    *result = l->cuCtxSetCurrent(ctx);
    for (uint32_t i = 0; i < threads && *result == 0; i++) *result = make_worker(r, &r->workers[i]);
    l->cuCtxSetCurrent(before);
    if (*result != 0) {
        cbench_ring_free(r);
        return NULL;
    }
    return r;
}

static cbench_result read_all(int file, char *to, uint64_t n, uint64_t offset) {
    for (uint64_t done = 0; done < n;) {
        ssize_t got = pread(file, to + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? -errno : -EIO;
        done += (uint64_t)got;
    }
    return 0;
}

static void *work(void *arg) {
    worker *w = arg;
    cbench_ring *r = w->ring;
    const cbench_library *l = r->library;
    w->result = l->cuCtxSetCurrent(r->ctx);
    for (int i = 0; w->result == 0; i = !i) {
        uint64_t at = __atomic_fetch_add(&r->taken, r->piece, __ATOMIC_RELAXED);
        if (at >= r->n) break;
        uint64_t n = r->n - at < r->piece ? r->n - at : r->piece;
        w->result = l->cuStreamSynchronize(w->streams[i]);
        if (w->result == 0) w->result = read_all(r->file, w->pieces[i], n, at);
        if (w->result == 0) w->result = l->cuMemcpyHtoDAsync_v2(r->dst + at, w->pieces[i], n, w->streams[i]);
    }
    for (int i = 0; i < 2; i++) {
        cbench_result last = l->cuStreamSynchronize(w->streams[i]);
        if (w->result == 0) w->result = last;
    }
    l->cuCtxSetCurrent(0);
    return NULL;
}

cbench_time cbench_ring_load(cbench_ring *r, const char *path, int direct, uint64_t n, uint64_t dst) {
    cbench_time t = {0, 0};
    pthread_t threads[MOST_THREADS];
    int64_t start = cbench_now();
    r->file = open(path, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
    if (r->file < 0) return (cbench_time){0, -errno};
    r->n = n;
    r->dst = dst;
    r->taken = 0;
    uint32_t started = 0;
    while (started < r->threads && pthread_create(&threads[started], NULL, work, &r->workers[started]) == 0) started++;
    if (started < r->threads) t.result = OUT_OF_MEMORY;
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
        if (t.result == 0) t.result = r->workers[i].result;
    }
    close(r->file);
    t.ns = cbench_now() - start;
    return t;
}

void cbench_ring_free(cbench_ring *r) {
    uintptr_t before = 0;
    r->library->cuCtxGetCurrent(&before);
    r->library->cuCtxSetCurrent(r->ctx);
    for (uint32_t i = 0; i < r->threads; i++) {
        for (int j = 0; j < 2; j++) {
            if (r->workers[i].pieces[j]) r->library->cuMemFreeHost(r->workers[i].pieces[j]);
            if (r->workers[i].streams[j]) r->library->cuStreamDestroy_v2(r->workers[i].streams[j]);
        }
    }
    r->library->cuCtxSetCurrent(before);
    free(r);
}
