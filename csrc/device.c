//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

// These two are asked before there is anything on the thread to protect.

int32_t cuvmm_Init(cuvmm_driver d) {
    const cuvmm_table *table = cuvmm_table_of(d);
    return table->api.cuInit ? table->api.cuInit(0) : CUVMM_MISSING_ENTRY_POINT;
}

cuvmm_value cuvmm_DriverGetVersion(cuvmm_driver d) {
    const cuvmm_table *table = cuvmm_table_of(d);
    int32_t version = 0, result = CUVMM_MISSING_ENTRY_POINT;
    if (table->api.cuDriverGetVersion) result = table->api.cuDriverGetVersion(&version);
    return (cuvmm_value){(uint64_t)version, result};
}

cuvmm_value cuvmm_DeviceGetCount(cuvmm_driver d) {
    int32_t count = 0;
    CUVMM_CALL(d, 0, cuDeviceGetCount, (&count));
    return (cuvmm_value){(uint64_t)count, result};
}

cuvmm_value cuvmm_DeviceGet(cuvmm_driver d, int32_t ordinal) {
    int32_t device = 0;
    CUVMM_CALL(d, 0, cuDeviceGet, (&device, ordinal));
    return (cuvmm_value){(uint64_t)device, result};
}

cuvmm_name cuvmm_DeviceGetName(cuvmm_driver d, int32_t device) {
    cuvmm_name name = {0};
    CUVMM_CALL(d, 0, cuDeviceGetName, (name.value, sizeof name.value, device));
    name.value[sizeof name.value - 1] = 0;
    name.result = result;
    return name;
}

cuvmm_uuid_answer cuvmm_DeviceGetUUID(cuvmm_driver d, int32_t device) {
    cuvmm_uuid_answer uuid = {0};
    CUVMM_CALL(d, 0, cuDeviceGetUuid, (&uuid.value, device));
    uuid.result = result;
    return uuid;
}

cuvmm_value cuvmm_DeviceTotalMem(cuvmm_driver d, int32_t device) {
    size_t bytes = 0;
    CUVMM_CALL(d, 0, cuDeviceTotalMem, (&bytes, device));
    return (cuvmm_value){bytes, result};
}

cuvmm_value cuvmm_DeviceGetAttribute(cuvmm_driver d, int32_t attribute, int32_t device) {
    int32_t value = 0;
    CUVMM_CALL(d, 0, cuDeviceGetAttribute, (&value, attribute, device));
    return (cuvmm_value){(uint64_t)value, result};
}

cuvmm_value cuvmm_DeviceCanAccessPeer(cuvmm_driver d, int32_t device, int32_t peer) {
    int32_t can = 0;
    CUVMM_CALL(d, 0, cuDeviceCanAccessPeer, (&can, device, peer));
    return (cuvmm_value){(uint64_t)can, result};
}
