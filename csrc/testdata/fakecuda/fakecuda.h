// What a test shares with a fake driver library: the record of its calls, and
// the results it is told to give. It lies in the file "<library>.state" beside
// the library, which both map. Results may be written before the library is
// loaded.

#ifndef FAKECUDA_H
#define FAKECUDA_H

#include <stdint.h>

enum { FAKECUDA_RESULTS = 16, FAKECUDA_CALLS = 4096, FAKECUDA_ARGS = 256 };

typedef struct {
    char entry[48]; // "cuMemCreate", without a version's suffix; "" ends the list
    int32_t result;
    uint32_t skip; // so many calls succeed before
} fakecuda_result;

typedef struct {
    char entry[48];
    uint64_t context; // current on the thread at the call
    int32_t thread;   // the system's id of the thread
    uint32_t mode;    // the thread's capture mode at the call
    int32_t result;
    uint32_t n;
    // The n bytes of the arguments, one after the other: values as they stand,
    // pointed-to input as its bytes, out-parameters not at all.
    uint8_t args[FAKECUDA_ARGS];
} fakecuda_call;

typedef struct {
    uint32_t quiet; // record nothing
    uint32_t count; // of calls recorded, also past the array's end
    fakecuda_result results[FAKECUDA_RESULTS];
    fakecuda_call calls[FAKECUDA_CALLS];
} fakecuda_state;

#endif
