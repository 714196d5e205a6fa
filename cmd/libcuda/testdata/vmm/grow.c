// A vector that grows in place: a range of addresses is reserved, and memory is mapped behind
// the memory that is there. When the addresses end, the same memory moves to a longer range.
// Nothing is copied, and what was written stays.

#include "driver.h"

enum { MOST = 64 };

struct vector {
    ptr at;
    size_t reserved, chunks;
    handle memory[MOST];
};

static void reserve(struct vector *v, size_t chunks) {
    v->reserved = chunks * granule;
    OK(cuMemAddressReserve(&v->at, v->reserved, 0, 0, 0));
}

static void map(struct vector *v, size_t i) {
    OK(cuMemMap(v->at + i * granule, granule, 0, v->memory[i], 0));
}

// Moves the memory to a range of twice the length.
static void move(struct vector *v) {
    ptr old = v->at;
    size_t was = v->reserved;
    reserve(v, 2 * was / granule);
    OK(cuCtxSynchronize());
    OK(cuMemUnmap(old, v->chunks * granule));
    for (size_t i = 0; i < v->chunks; i++) map(v, i);
    allow(v->at, v->chunks * granule, READ_WRITE);
    OK(cuMemAddressFree(old, was));
}

// Adds a chunk, and writes its number into its words.
static void grow(struct vector *v) {
    if (v->chunks * granule == v->reserved) {
        move(v);
        printf("moved to a range of %zu chunks\n", v->reserved / granule);
    }
    size_t i = v->chunks++;
    OK(cuMemCreate(&v->memory[i], granule, &on_device, 0));
    map(v, i);
    allow(v->at + i * granule, granule, READ_WRITE);
    OK(cuMemsetD32_v2(v->at + i * granule, (unsigned)i, granule / 4));
}

static void shrink(struct vector *v, size_t chunks) {
    OK(cuCtxSynchronize());
    while (v->chunks > chunks) {
        v->chunks--;
        OK(cuMemUnmap(v->at + v->chunks * granule, granule));
        OK(cuMemRelease(v->memory[v->chunks]));
    }
}

static void check(const struct vector *v) {
    size_t right = 0;
    for (size_t i = 0; i < v->chunks; i++)
        right += word_at(v->at + i * granule) == i && word_at(v->at + (i + 1) * granule - 4) == i;
    printf("%zu chunks, %zu of them right\n", v->chunks, right);
}

// What the driver refuses, and leaves as it was.
static void refusals(struct vector *v) {
    right to = {{ON_DEVICE, device}, READ_WRITE};
    handle h;
    ptr p;
    unsigned word;
    SHOW("create half a granule", cuMemCreate(&h, granule / 2, &on_device, 0));
    SHOW("reserve half a granule", cuMemAddressReserve(&p, granule / 2, 0, 0, 0));
    SHOW("reserve with an alignment of 3", cuMemAddressReserve(&p, granule, 3, 0, 0));
    SHOW("map over a mapping", cuMemMap(v->at, granule, 0, v->memory[1], 0));
    SHOW("map more than the memory", cuMemMap(v->at + v->chunks * granule, 2 * granule, 0, v->memory[0], 0));
    SHOW("unmap half of a mapping", cuMemUnmap(v->at, granule / 2));
    SHOW("access to half of a mapping", cuMemSetAccess(v->at, granule / 2, &to, 1));
    SHOW("access to what is not mapped", cuMemSetAccess(v->at + v->chunks * granule, granule, &to, 1));
    SHOW("read what is not mapped", cuMemcpyDtoH_v2(&word, v->at + v->chunks * granule, 4));
    SHOW("free a range with mappings", cuMemAddressFree(v->at, v->reserved));
    SHOW("free a part of a range", cuMemAddressFree(v->at, granule));
    SHOW("unmap what is not mapped", cuMemUnmap(v->at + v->chunks * granule, granule));
}

int main(int argc, char **argv) {
    struct vector v = {0};
    load_driver(argc > 1 ? argv[1] : NULL);
    open_device();
    reserve(&v, 4);
    while (v.chunks < 12) grow(&v);
    check(&v);
    shrink(&v, 5);
    check(&v);
    grow(&v);
    check(&v);
    refusals(&v);
    check(&v);
    shrink(&v, 0);
    SHOW("free the range", cuMemAddressFree(v.at, v.reserved));
    SHOW("release the context", cuDevicePrimaryCtxRelease_v2(device));
    return 0;
}
