//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_name cuvmm_DeviceGetName(cuvmm_driver d, int32_t device) {
    cuvmm_name name = {0};
    CUVMM_CALL(d, 0, cuDeviceGetName, (name.value, sizeof name.value, device));
    name.value[sizeof name.value - 1] = 0;
    name.result = result;
    return name;
}
