//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

#include <pthread.h>
#include <stdlib.h>

struct cbench_holder {
    const cbench_library *library;
    uintptr_t ctx, stream;
    int mode;
    cbench_result begin, end;
    int begun, told;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
};

static void *hold(void *arg) {
    cbench_holder *h = arg;
    const cbench_library *l = h->library;
    cbench_result r = l->cuCtxSetCurrent(h->ctx);
    if (r == 0) r = l->cuStreamBeginCapture_v2(h->stream, h->mode);

    pthread_mutex_lock(&h->lock);
    h->begin = r;
    h->begun = 1;
    pthread_cond_signal(&h->change);
    while (!h->told) pthread_cond_wait(&h->change, &h->lock);
    pthread_mutex_unlock(&h->lock);

    if (r == 0) {
        uintptr_t graph = 0;
        h->end = l->cuStreamEndCapture(h->stream, &graph);
        if (graph) l->cuGraphDestroy(graph);
    }
    l->cuCtxSetCurrent(0);
    return NULL;
}

cbench_holder *cbench_hold(const cbench_library *l, uintptr_t ctx, uintptr_t stream, int32_t mode, cbench_result *begin) {
    cbench_holder *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->library = l;
    h->ctx = ctx;
    h->stream = stream;
    h->mode = mode;
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->change, NULL);
    if (pthread_create(&h->thread, NULL, hold, h) != 0) {
        free(h);
        return NULL;
    }
    pthread_mutex_lock(&h->lock);
    while (!h->begun) pthread_cond_wait(&h->change, &h->lock);
    *begin = h->begin;
    pthread_mutex_unlock(&h->lock);
    return h;
}

cbench_result cbench_let_go(cbench_holder *h) {
    pthread_mutex_lock(&h->lock);
    h->told = 1;
    pthread_cond_signal(&h->change);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
    cbench_result end = h->end;
    pthread_cond_destroy(&h->change);
    pthread_mutex_destroy(&h->lock);
    free(h);
    return end;
}
