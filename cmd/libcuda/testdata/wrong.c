// A program with mistakes that a GPU may let pass, or answer without a reason: it writes to
// memory that it may only read, two of its streams write the same bytes, and it leaves memory
// behind. With a second argument it does none of that.

#include <stddef.h>
#include <stdint.h>

#define MORE_CALLS(X)                                                     \
    X(cuStreamCreate, (void **stream, unsigned flags))                    \
    X(cuStreamSynchronize, (void *stream))                                \
    X(cuMemsetD8Async, (uint64_t p, unsigned char v, size_t n, void *stream))

#include "vmm/driver.h"

int main(int argc, char **argv) {
    handle h;
    ptr p;
    void *stream[2];
    load_driver(argc > 1 ? argv[1] : NULL);
    open_device();
    if (argc > 2) return 0; // without the mistakes
    OK(cuMemCreate(&h, granule, &on_device, 0));
    OK(cuMemAddressReserve(&p, granule, 0, 0, 0));
    OK(cuMemMap(p, granule, 0, h, 0));
    allow(p, granule, READ_WRITE);
    for (int i = 0; i < 2; i++) {
        OK(cuStreamCreate(&stream[i], 1));
        OK(cuMemsetD8Async(p, i, granule, stream[i]));
    }
    for (int i = 0; i < 2; i++) OK(cuStreamSynchronize(stream[i]));
    allow(p, granule, READ);
    OK(cuMemsetD8Async(p, 1, granule, stream[0]));
    SHOW("synchronize", cuStreamSynchronize(stream[0]));
    return 0;
}
