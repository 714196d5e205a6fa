// One range of addresses over memory of several kinds, one memory at several addresses, and
// who may do what with them.

#include "driver.h"

// A window: the same memory twice, one behind the other, so that what is written past the end
// of the first is at the beginning of the second.
static void ring(void) {
    handle h, found;
    ptr p;
    unsigned words[2] = {1, 2};
    OK(cuMemCreate(&h, granule, &on_device, 0));
    OK(cuMemAddressReserve(&p, 2 * granule, 0, 0, 0));
    OK(cuMemMap(p, granule, 0, h, 0));
    OK(cuMemMap(p + granule, granule, 0, h, 0));
    allow(p, 2 * granule, READ_WRITE);
    OK(cuMemsetD8_v2(p, 0, granule));
    OK(cuMemcpyHtoD_v2(p + granule - 4, words, sizeof words));
    printf("ring: the first word is %u, the last %u\n", word_at(p), word_at(p + 2 * granule - 4));
    OK(cuMemRetainAllocationHandle(&found, (void *)(p + granule)));
    printf("ring: the same handle %d\n", found == h);
    OK(cuMemRelease(found));
    SHOW("ring: release while mapped", cuMemRelease(h));
    printf("ring: the first word is %u\n", word_at(p));
    OK(cuCtxSynchronize());
    SHOW("ring: unmap both in one call", cuMemUnmap(p, 2 * granule));
    OK(cuMemAddressFree(p, 2 * granule));
}

static unsigned long long access_at(ptr p) {
    unsigned long long flags = 99;
    location here = {ON_DEVICE, device};
    OK(cuMemGetAccess(&flags, &here, p));
    return flags;
}

static void access_rights(void) {
    handle h[3];
    ptr p;
    OK(cuMemAddressReserve(&p, 4 * granule, 1 << 30, 0, 0));
    printf("access: aligned %d\n", p % (1 << 30) == 0);
    for (int i = 0; i < 3; i++) {
        OK(cuMemCreate(&h[i], granule, &on_device, 0));
        OK(cuMemMap(p + i * granule, granule, 0, h[i], 0));
    }
    printf("access: at first %llu\n", access_at(p));
    allow(p, 2 * granule, READ_WRITE);
    printf("access: of three, two granted: %llu %llu %llu\n", access_at(p), access_at(p + granule), access_at(p + 2 * granule));
    OK(cuMemsetD32_v2(p, 7, granule / 4));
    OK(cuCtxSynchronize());
    allow(p, granule, READ);
    printf("access: for reading %llu, and reads %u\n", access_at(p), word_at(p));
    allow(p, granule, NONE);
    printf("access: none %llu\n", access_at(p));
    allow(p, granule, READ_WRITE);
    printf("access: again %llu, and reads %u\n", access_at(p), word_at(p));

    // Other memory at the address of the middle one.
    OK(cuMemUnmap(p + granule, granule));
    SHOW("access: read the gap", cuMemcpyDtoH_v2(&(unsigned){0}, p + granule, 4));
    OK(cuMemMap(p + granule, granule, 0, h[0], 0));
    printf("access: of what follows %llu, of its neighbor %llu\n", access_at(p + granule), access_at(p));
    allow(p + granule, granule, READ_WRITE);
    printf("access: the same memory reads %u\n", word_at(p + granule));
    SHOW("access: unmap across what is not mapped", cuMemUnmap(p, 4 * granule));
    OK(cuMemAddressFree(p, 4 * granule));
    for (int i = 0; i < 3; i++) OK(cuMemRelease(h[i]));
}

// Attributes of addresses with and without memory.
static void attributes(void) {
    handle h;
    ptr p;
    unsigned long long kind = 0, ordinal = 0, mapped = 0; // as long as the longest attribute
    int dmabuf = -1;
    OK(cuMemCreate(&h, granule, &on_device, 0));
    OK(cuMemAddressReserve(&p, 2 * granule, 0, 0, 0));
    OK(cuMemMap(p, granule, 0, h, 0));
    allow(p, granule, READ_WRITE);
    OK(cuPointerGetAttribute(&kind, 2, p + 5));
    OK(cuPointerGetAttribute(&ordinal, 9, p + 5));
    OK(cuPointerGetAttribute(&mapped, 13, p + 5));
    printf("attributes: memory type %u, device %d, mapped %d\n", (unsigned)kind, (int)ordinal, (char)mapped);
    SHOW("attributes: a descriptor for other devices", cuMemGetHandleForAddressRange(&dmabuf, p, granule, 1, 0));
    close(dmabuf);
    OK(cuMemUnmap(p, granule));
    OK(cuMemAddressFree(p, 2 * granule));
    OK(cuMemRelease(h));
}

// Memory of the host in the same range as the device's: the CPU has it at the same address.
static void host_memory(void) {
    properties on_node = {.type = PINNED, .handles = BY_DESCRIPTOR, .at = {ON_NODE, 0}};
    right both[] = {{{ON_DEVICE, device}, READ_WRITE}, {{ON_NODE, 0}, READ_WRITE}};
    handle h, near;
    ptr p;
    size_t least;
    OK(cuMemGetAllocationGranularity(&least, &on_node, 0));
    OK(cuMemCreate(&h, least, &on_node, 0));
    OK(cuMemCreate(&near, least, &on_device, 0));
    OK(cuMemAddressReserve(&p, 2 * least, 0, 0, 0));
    OK(cuMemMap(p, least, 0, h, 0));
    OK(cuMemMap(p + least, least, 0, near, 0));
    SHOW("host: the node's access to its memory", cuMemSetAccess(p, least, both, 2));
    SHOW("host: the node's access to the device's memory", cuMemSetAccess(p + least, least, both, 2));
    allow(p + least, least, READ_WRITE);
    *(volatile unsigned *)p = 0xcafe;
    OK(cuMemcpyDtoD_v2(p + least, p, 4));
    OK(cuMemsetD32_v2(p + 4, 0xbeef, 1));
    OK(cuCtxSynchronize());
    printf("host: the device reads %#x, the CPU %#x\n", word_at(p + least), *(volatile unsigned *)(p + 4));
    OK(cuMemUnmap(p, 2 * least));
    OK(cuMemAddressFree(p, 2 * least));
    OK(cuMemRelease(h));
    OK(cuMemRelease(near));
}

int main(int argc, char **argv) {
    load_driver(argc > 1 ? argv[1] : NULL);
    open_device();
    ring();
    access_rights();
    attributes();
    host_memory();
    SHOW("release the context", cuDevicePrimaryCtxRelease_v2(device));
    return 0;
}
