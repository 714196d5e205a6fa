//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_value cuvmm_MulticastCreate(cuvmm_driver d, const cuvmm_multicast *prop) {
    uint64_t handle = 0;
    CUVMM_CALL(d, 0, cuMulticastCreate, (&handle, prop));
    return (cuvmm_value){handle, result};
}

int32_t cuvmm_MulticastAddDevice(cuvmm_driver d, uint64_t mc, int32_t device) {
    CUVMM_CALL(d, 0, cuMulticastAddDevice, (mc, device));
    return result;
}

int32_t cuvmm_MulticastBindMem(cuvmm_driver d, uint64_t mc, int32_t device, uint64_t mc_offset, uint64_t handle,
                               uint64_t offset, uint64_t size) {
    CUVMM_CALL(d, 0, cuMulticastBindMem, (mc, device, mc_offset, handle, offset, size, 0));
    return result;
}

int32_t cuvmm_MulticastBindMemV1(cuvmm_driver d, uint64_t mc, uint64_t mc_offset, uint64_t handle, uint64_t offset,
                                 uint64_t size) {
    CUVMM_CALL(d, 0, cuMulticastBindMem_v1, (mc, mc_offset, handle, offset, size, 0));
    return result;
}

int32_t cuvmm_MulticastBindAddr(cuvmm_driver d, uint64_t mc, int32_t device, uint64_t mc_offset, uint64_t p, uint64_t size) {
    CUVMM_CALL(d, 0, cuMulticastBindAddr, (mc, device, mc_offset, p, size, 0));
    return result;
}

int32_t cuvmm_MulticastBindAddrV1(cuvmm_driver d, uint64_t mc, uint64_t mc_offset, uint64_t p, uint64_t size) {
    CUVMM_CALL(d, 0, cuMulticastBindAddr_v1, (mc, mc_offset, p, size, 0));
    return result;
}

int32_t cuvmm_MulticastUnbind(cuvmm_driver d, uint64_t mc, int32_t device, uint64_t mc_offset, uint64_t size) {
    CUVMM_CALL(d, 0, cuMulticastUnbind, (mc, device, mc_offset, size));
    return result;
}

cuvmm_value cuvmm_MulticastGetGranularity(cuvmm_driver d, const cuvmm_multicast *prop, uint32_t option) {
    size_t bytes = 0;
    CUVMM_CALL(d, 0, cuMulticastGetGranularity, (&bytes, prop, option));
    return (cuvmm_value){bytes, result};
}
