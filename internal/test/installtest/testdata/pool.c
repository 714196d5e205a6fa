#include <libcuvmm.h>
#include <stdio.h>

static cuvmm_error error = {.size = sizeof error};

static void check(int32_t status) {
	if (status != CUVMM_OK) {
		fprintf(stderr, "%s\n", error.message);
		_Exit(1);
	}
}

int main(void) {
	cuvmm_pool_options options = {.size = sizeof options};
	cuvmm_stats stats = {.size = sizeof stats};
	uint64_t pool;
	void *block;
	size_t bytes;
	check(cuvmm_pool_open(&options, &pool, &error));
	check(cuvmm_alloc(pool, 1000, NULL, 0, &block, &error));
	check(cuvmm_find(pool, block, &bytes, &error));
	check(cuvmm_free(pool, block, &error));
	check(cuvmm_pool_stats(pool, &stats, &error));
	check(cuvmm_pool_close(pool, &error));
	printf("version %d: a block of %zu bytes, then %llu blocks\n", cuvmm_version(), bytes, (unsigned long long)stats.blocks);
	return 0;
}
