// What a warm pair through the C entry costs in a loop, and how often it enters Go.
//
//	cc -O2 -o pair pair.c -ldl && ./pair libcuvmm.so
#define _GNU_SOURCE
#include "../../libcuvmm.h"

#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

static double now(clockid_t clock) {
	struct timespec t;
	clock_gettime(clock, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
	void *lib = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
	if (lib == NULL) {
		fprintf(stderr, "usage: pair libcuvmm.so: %s\n", argc == 2 ? dlerror() : "no library");
		return 2;
	}
	__typeof__(&cuvmm_pool_open) open_pool = (__typeof__(open_pool))dlsym(lib, "cuvmm_pool_open");
	__typeof__(&cuvmm_alloc) alloc = (__typeof__(alloc))dlsym(lib, "cuvmm_alloc");
	__typeof__(&cuvmm_free) free_block = (__typeof__(free_block))dlsym(lib, "cuvmm_free");
	uint64_t (*entries)(void) = (uint64_t(*)(void))dlsym(lib, "cuvmm_entries");
	cuvmm_error e = {sizeof e, 0, ""};
	cuvmm_pool_options o = {.size = sizeof o};
	uint64_t pool = 0;
	if (open_pool(&o, &pool, &e) != CUVMM_OK) {
		fprintf(stderr, "%s\n", e.message);
		return 1;
	}
	// A thread without a current context asks through Go whether the legacy stream captures.
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	int (*retain)(void **, int) = cuda == NULL ? NULL : (int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
	int (*set)(void *) = cuda == NULL ? NULL : (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
	void *context = NULL;
	if (retain != NULL && retain(&context, 0) == 0) set(context);
	enum { n = 1000000 };
	for (int round = 0; round < 5; round++) {
		uint64_t entered = entries();
		double wall = now(CLOCK_MONOTONIC), cpu = now(CLOCK_THREAD_CPUTIME_ID);
		for (int i = 0; i < n; i++) {
			void *block;
			if (alloc(pool, 16384, NULL, 0, &block, &e) != CUVMM_OK || free_block(pool, block, &e) != CUVMM_OK) {
				fprintf(stderr, "%s\n", e.message);
				return 1;
			}
		}
		wall = now(CLOCK_MONOTONIC) - wall, cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
		printf("a pair: %.1f ns, %.1f ns of CPU; %.4f entries into Go\n", wall / n * 1e9, cpu / n * 1e9, (double)(entries() - entered) / n);
	}
	return 0;
}
