//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

#include <stdlib.h>
#include <string.h>

enum { CUVMM_INVALID_VALUE = 1, CUVMM_OUT_OF_MEMORY = 2 };

// The driver finds the end of PTX text by its NUL, and the end of a binary
// image (an ELF file, or a fat binary) by its header.
static int is_text(const uint8_t *image, uint64_t n) {
    static const uint8_t elf[4] = {0x7f, 'E', 'L', 'F'};
    static const uint8_t fat[4] = {0x50, 0xed, 0x55, 0xba};
    return n < 4 || (memcmp(image, elf, 4) != 0 && memcmp(image, fat, 4) != 0);
}

static char *terminated(const void *text, uint64_t n) {
    char *copy = malloc(n + 1);
    if (copy) {
        if (n) memcpy(copy, text, n);
        copy[n] = 0;
    }
    return copy;
}

// The image as the driver wants it: itself, or a copy that the caller frees.
static const void *readable(const uint8_t *image, uint64_t n, char **copy) {
    *copy = NULL;
    if (!is_text(image, n) || (n && image[n - 1] == 0)) return image;
    return *copy = terminated(image, n);
}

cuvmm_value cuvmm_ModuleLoadData(cuvmm_driver d, uintptr_t ctx, const uint8_t *image, uint64_t n) {
    uintptr_t module = 0;
    char *copy;
    const void *read = readable(image, n, &copy);
    if (!read) return (cuvmm_value){0, CUVMM_OUT_OF_MEMORY};
    CUVMM_CALL(d, ctx, cuModuleLoadData, (&module, read));
    free(copy);
    return (cuvmm_value){module, result};
}

cuvmm_value cuvmm_ModuleLoadDataEx(cuvmm_driver d, uintptr_t ctx, const uint8_t *image, uint64_t n, char *log, uint64_t room) {
    uintptr_t module = 0;
    char *copy;
    const void *read = readable(image, n, &copy);
    if (!read) return (cuvmm_value){0, CUVMM_OUT_OF_MEMORY};
    // The driver's options: 5 the log of errors, 6 its size, whose value is the number itself.
    uint32_t options[] = {5, 6};
    void *values[] = {log, (void *)(uintptr_t)room};
    log[0] = 0;
    CUVMM_CALL(d, ctx, cuModuleLoadDataEx, (&module, read, 2, options, values));
    log[room - 1] = 0;
    free(copy);
    return (cuvmm_value){module, result};
}

cuvmm_value cuvmm_ModuleGetFunction(cuvmm_driver d, uintptr_t ctx, uintptr_t module, const char *name, uint64_t n) {
    uintptr_t function = 0;
    char *copy = terminated(name, n);
    if (!copy) return (cuvmm_value){0, CUVMM_OUT_OF_MEMORY};
    CUVMM_CALL(d, ctx, cuModuleGetFunction, (&function, module, copy));
    free(copy);
    return (cuvmm_value){function, result};
}

int32_t cuvmm_LaunchKernel(cuvmm_driver d, uintptr_t ctx, uintptr_t function, const cuvmm_launch *l,
                           const uint8_t *params, uint64_t n, uintptr_t s) {
    // The marks of the driver's list: 1 the block, 2 its size, 0 the end.
    size_t size = n;
    void *extra[] = {(void *)1, (void *)params, (void *)2, &size, (void *)0};
    CUVMM_CALL(d, ctx, cuLaunchKernel,
               (function, l->grid_x, l->grid_y, l->grid_z, l->block_x, l->block_y, l->block_z, l->shared, s, NULL,
                n ? extra : NULL));
    return result;
}

// The launch in the driver's form: CUlaunchConfig, and CUlaunchAttribute, whose
// value is 64 bytes at an offset of 8.
typedef struct {
    uint32_t id, padding, value[16];
} launch_attribute;

typedef struct {
    uint32_t grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    uintptr_t stream;
    launch_attribute *attributes;
    uint32_t attribute_count;
} launch_config;

// Fills a list with the address of each parameter in the block and returns whether
// it is complete. Drivers before CUDA 12.4 do not tell where parameters lie.
static int list_parameters(const cuvmm_table *table, uintptr_t function, const uint8_t *params, uint64_t n, void **list, size_t room) {
    size_t offset = 0, size = 0;
    if (!table->api.cuFuncGetParamInfo) return 0;
    for (size_t i = 0; i <= room; i++) { // one more than there is room for tells whether the list is complete
        int32_t told = table->api.cuFuncGetParamInfo(function, i, &offset, &size);
        if (told != 0) return told == CUVMM_INVALID_VALUE && i > 0; // behind the last one
        if (i == room || offset > n || size > n - offset) return 0;
        list[i] = (void *)(params + offset);
    }
    return 0;
}

int32_t cuvmm_LaunchKernelEx(cuvmm_driver d, uintptr_t ctx, uintptr_t function, const cuvmm_launch *l,
                             const uint8_t *params, uint64_t n, uintptr_t s) {
    enum { COOPERATIVE = 2, MOST_PARAMETERS = 256 };
    size_t size = n;
    void *list[MOST_PARAMETERS], *extra[] = {(void *)1, (void *)params, (void *)2, &size, (void *)0};
    launch_attribute cooperative = {COOPERATIVE, 0, {1}};
    launch_config config = {l->grid_x, l->grid_y, l->grid_z, l->block_x, l->block_y, l->block_z, l->shared, s, &cooperative, 1};
    int32_t result = CUVMM_MISSING_ENTRY_POINT;
    const cuvmm_table *table = cuvmm_table_of(d);
    if (table->api.cuLaunchKernelEx) {
        cuvmm_thread thread;
        result = cuvmm_enter(table, ctx, &thread);
        if (result == 0) {
            // On a capturing stream the driver takes a cooperative launch with a list of
            // parameters, and refuses one with a block of them, which ends the capture.
            int listed = n && list_parameters(table, function, params, n, list, MOST_PARAMETERS);
            result = table->api.cuLaunchKernelEx(&config, function, listed ? list : NULL, n && !listed ? extra : NULL);
        }
        cuvmm_leave(table, &thread);
    }
    return result;
}

cuvmm_pair cuvmm_ModuleGetGlobal(cuvmm_driver d, uintptr_t ctx, uintptr_t module, const char *name, uint64_t n) {
    uint64_t address = 0;
    size_t bytes = 0;
    char *copy = terminated(name, n);
    if (!copy) return (cuvmm_pair){0, 0, CUVMM_OUT_OF_MEMORY};
    CUVMM_CALL(d, ctx, cuModuleGetGlobal, (&address, &bytes, module, copy));
    free(copy);
    return (cuvmm_pair){address, bytes, result};
}
