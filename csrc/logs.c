//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_pair cuvmm_LogsDumpToMemory(cuvmm_driver d, uint32_t from, char *text, uint64_t room) {
    size_t size = room;
    CUVMM_BARE_CALL(d, cuLogsDumpToMemory, (&from, text, &size, 0));
    return (cuvmm_pair){from, size < room ? size : room, result};
}
