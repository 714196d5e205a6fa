//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

#include <errno.h>
#include <unistd.h>

// The end of the pipe that host functions write to. It is set once, before the first
// launch.
static int reached;

void cuvmm_host_funcs_to(int fd) { reached = fd; }

// What the driver calls, on a thread of its own, where no Go may run: a number goes
// into the pipe, and a goroutine that reads it does the rest.
static void host_func(void *data) {
    uint64_t id = (uintptr_t)data;
    int before = errno;
    while (write(reached, &id, sizeof id) < 0 && errno == EINTR) {
    }
    errno = before;
}

int32_t cuvmm_LaunchHostFunc(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint64_t id) {
    CUVMM_CALL(d, ctx, cuLaunchHostFunc, (s, (uintptr_t)host_func, (uintptr_t)id));
    return result;
}
