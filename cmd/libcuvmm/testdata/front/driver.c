// A driver of one device that hands out numbers and runs nothing, for what the C front costs:
// every stream is done at once. stand_in_capturing is what it says of each stream.
//
//	cc -shared -fPIC -O2 -o driver.so driver.c
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { memory = 1 << 30 };
static uint64_t next = 1ull << 40, handles = 1;
static __thread uintptr_t current;
static __thread uint32_t mode;
uint32_t stand_in_capturing;
uint64_t stand_in_calls;

#define OK(name, ...) \
	int name(__VA_ARGS__) { return 0; }
OK(cuInit, uint32_t flags)
int cuDriverGetVersion(int *v) { return *v = 12080, 0; }
int cuDeviceGetCount(int *n) { return *n = 1, 0; }
int cuDeviceGet(int *d, int ordinal) { return *d = ordinal, 0; }
int cuDeviceGetName(char *name, int n, int d) { return strncpy(name, "stand-in", (size_t)n), 0; }
int cuDeviceGetUuid_v2(char *uuid, int d) { return memset(uuid, 7, 16), 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { return *n = 80ull * memory, 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { return *v = a == 102 || a == 103 || a == 41 || a == 122 ? 1 : a == 75 ? 9 : 0, 0; }
int cuDevicePrimaryCtxRetain(uintptr_t *c, int d) { return *c = 4096, 0; }
OK(cuDevicePrimaryCtxRelease_v2, int d)
int cuDevicePrimaryCtxGetState(int d, uint32_t *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuCtxGetDevice(int *d) { return *d = 0, 0; }
int cuCtxGetCurrent(uintptr_t *c) { return *c = current, 0; }
int cuCtxSetCurrent(uintptr_t c) { return current = c, 0; }
int cuCtxPopCurrent_v2(uintptr_t *c) { return *c = current, current = 0, 0; }
int cuThreadExchangeStreamCaptureMode(uint32_t *m) {
	uint32_t was = mode;
	return mode = *m, *m = was, 0;
}
int cuStreamCreate(uintptr_t *s, uint32_t flags) { return *s = __atomic_add_fetch(&handles, 1, __ATOMIC_RELAXED) << 4, 0; }
OK(cuStreamDestroy_v2, uintptr_t s)
OK(cuStreamQuery, uintptr_t s)
OK(cuStreamSynchronize, uintptr_t s)
OK(cuStreamWaitEvent, uintptr_t s, uintptr_t e, uint32_t flags)
int cuStreamGetCtx(uintptr_t s, uintptr_t *c) { return *c = 4096, 0; }
int cuStreamIsCapturing(uintptr_t s, uint32_t *status) { return __atomic_add_fetch(&stand_in_calls, 1, __ATOMIC_RELAXED), *status = stand_in_capturing, 0; }
int cuStreamGetCaptureInfo(uintptr_t s, uint32_t *status, uint64_t *id) { return *status = stand_in_capturing, *id = stand_in_capturing, 0; }
int cuEventCreate(uintptr_t *e, uint32_t flags) { return *e = __atomic_add_fetch(&handles, 1, __ATOMIC_RELAXED) << 4, 0; }
OK(cuEventRecord, uintptr_t e, uintptr_t s)
OK(cuEventQuery, uintptr_t e)
OK(cuEventSynchronize, uintptr_t e)
OK(cuEventDestroy_v2, uintptr_t e)
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = 80ull * memory, 0; }
int cuMemGetAllocationGranularity(size_t *n, const void *prop, int flags) { return *n = 2 << 20, 0; }
int cuMemAddressReserve(uint64_t *p, size_t size, size_t align, uint64_t hint, uint64_t flags) {
	size_t step = (size + (2 << 20)) & ~(size_t)((2 << 20) - 1);
	return *p = __atomic_fetch_add(&next, step, __ATOMIC_RELAXED), 0;
}
OK(cuMemAddressFree, uint64_t p, size_t size)
int cuMemCreate(uint64_t *h, size_t size, const void *prop, uint64_t flags) { return *h = __atomic_add_fetch(&handles, 1, __ATOMIC_RELAXED), 0; }
OK(cuMemRelease, uint64_t h)
OK(cuMemMap, uint64_t p, size_t size, size_t offset, uint64_t h, uint64_t flags)
OK(cuMemUnmap, uint64_t p, size_t size)
OK(cuMemSetAccess, uint64_t p, size_t size, const void *access, size_t n)

int cuGetProcAddress_v2(const char *name, void **f, int version, uint64_t flags, int *found) {
	char versioned[80];
	*f = NULL;
	Dl_info self;
	void *own = dladdr((void *)cuInit, &self) ? dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
	if (own != NULL) {
		*f = dlsym(own, name);
		if (*f == NULL && strlen(name) < 70) *f = dlsym(own, strcat(strcpy(versioned, name), "_v2"));
	}
	if (found != NULL) *found = *f == NULL;
	return *f == NULL ? 500 : 0;
}
