//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_value cuvmm_MulticastCreate(cuvmm_driver d, const cuvmm_multicast *prop) {
    uint64_t handle = 0;
    CUVMM_CALL(d, 0, cuMulticastCreate, (&handle, prop));
    return (cuvmm_value){handle, result};
}
