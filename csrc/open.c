//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

cuvmm_loaded cuvmm_load(const char *name) {
    cuvmm_loaded l = {0};
    l.handle = (uintptr_t)dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (l.handle) return l;
    const char *text = dlerror();
    snprintf(l.error, sizeof l.error, "%s", text ? text : "the loader gave no reason");
    // The loader names the file that it missed, which may also be one that the
    // library needs. Both parts of the text are in the process's language.
    const char *at = strstr(l.error, name);
    l.absent = at && at[strlen(name)] == ':' && strstr(at, strerror(ENOENT)) != NULL;
    return l;
}

char *cuvmm_search_path(void) {
    char *path = NULL;
#ifdef __GLIBC__
    void *self = dlopen(NULL, RTLD_NOW);
    Dl_serinfo size;
    if (!self || dlinfo(self, RTLD_DI_SERINFOSIZE, &size) != 0) return NULL;
    Dl_serinfo *info = malloc(size.dls_size);
    path = calloc(1, size.dls_size);
    if (info && path && dlinfo(self, RTLD_DI_SERINFOSIZE, info) == 0 && dlinfo(self, RTLD_DI_SERINFO, info) == 0)
        for (unsigned int i = 0; i < info->dls_cnt; i++) strcat(strcat(path, info->dls_serpath[i].dls_name), "\n");
    free(info);
    dlclose(self);
#endif
    return path;
}

void cuvmm_unload(uintptr_t handle) { dlclose((void *)handle); }

// cuGetProcAddress has a first form (from 11.3 on) and a second (from 12.0 on)
// that also says why it found nothing. Flags 0 asks for the entry points whose
// default stream is the legacy one.
static cuvmm_entry get_proc(uintptr_t proc, int form, const char *name, int32_t version, int32_t *result) {
    void *entry = NULL;
    int status = 0;
    if (form == 2)
        *result = ((int (*)(const char *, void **, int, uint64_t, int *))proc)(name, &entry, version, 0, &status);
    else
        *result = ((int (*)(const char *, void **, int, uint64_t))proc)(name, &entry, version, 0);
    cuvmm_entry e = NULL;
    if (*result == 0) memcpy(&e, &entry, sizeof e);
    return e;
}

cuvmm_library cuvmm_inspect(uintptr_t handle) {
    cuvmm_library l = {0};
    void *h = (void *)handle;
    l.form = 2;
    l.proc = (uintptr_t)dlsym(h, "cuGetProcAddress_v2");
    if (!l.proc) {
        l.form = 1;
        l.proc = (uintptr_t)dlsym(h, "cuGetProcAddress");
    }
    void *init = dlsym(h, "cuInit");
    l.has_init = init != NULL;
    Dl_info info;
    if (init && dladdr(init, &info) && info.dli_fname) snprintf(l.path, sizeof l.path, "%s", info.dli_fname);

    // Called before cuInit, which the driver allows; a stub library refuses.
    void *ask = dlsym(h, "cuDriverGetVersion");
    if (ask) l.result = ((int (*)(int *))ask)(&l.version);
    if (l.proc && l.result == 0) get_proc(l.proc, l.form, "cuInit", 2000, &l.result);
    return l;
}

cuvmm_driver cuvmm_new(void) { return (cuvmm_driver)calloc(1, sizeof(cuvmm_table)); }

void cuvmm_delete(cuvmm_driver d) { free((void *)d); }

int cuvmm_resolve(cuvmm_driver d, uintptr_t proc, int form, uint32_t at, const char *entry, int32_t version) {
    int32_t result = 0;
    cuvmm_entry e = get_proc(proc, form, entry, version, &result);
    memcpy((cuvmm_entry *)d + at, &e, sizeof e);
    return e != NULL;
}

uintptr_t cuvmm_entry_point(cuvmm_driver d, uint32_t at) { return ((const uintptr_t *)d)[at]; }

cuvmm_driver cuvmm_relaxed(cuvmm_driver foreign) {
    cuvmm_table *table = malloc(sizeof *table);
    if (!table) return 0;
    *table = *cuvmm_table_of(foreign);
    table->exchange = table->api.cuThreadExchangeStreamCaptureMode;
    return (cuvmm_driver)table;
}
