//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

#include "api.h"

cuvmm_value cuvmm_StreamIsCapturing(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    uint32_t status = 0;
    CUVMM_CALL(d, ctx, cuStreamIsCapturing, (s, &status));
    return (cuvmm_value){status, result};
}

cuvmm_pair cuvmm_StreamGetCaptureInfo(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    uint32_t status = 0;
    uint64_t id = 0;
    CUVMM_CALL(d, ctx, cuStreamGetCaptureInfo, (s, &status, &id));
    return (cuvmm_pair){status, id, result};
}

int32_t cuvmm_StreamBeginCapture(cuvmm_driver d, uintptr_t ctx, uintptr_t s, uint32_t mode) {
    CUVMM_CALL(d, ctx, cuStreamBeginCapture, (s, mode));
    return result;
}

cuvmm_value cuvmm_StreamEndCapture(cuvmm_driver d, uintptr_t ctx, uintptr_t s) {
    uintptr_t graph = 0;
    CUVMM_CALL(d, ctx, cuStreamEndCapture, (s, &graph));
    return (cuvmm_value){graph, result};
}

// Never through CUVMM_CALL, which exchanges the mode itself.
cuvmm_value cuvmm_ThreadExchangeStreamCaptureMode(cuvmm_driver d, uint32_t mode) {
    const cuvmm_table *table = cuvmm_table_of(d);
    int32_t result = CUVMM_MISSING_ENTRY_POINT;
    if (table->api.cuThreadExchangeStreamCaptureMode) result = table->api.cuThreadExchangeStreamCaptureMode(&mode);
    return (cuvmm_value){mode, result};
}

cuvmm_value cuvmm_GraphInstantiate(cuvmm_driver d, uintptr_t ctx, uintptr_t graph) {
    uintptr_t exec = 0;
    CUVMM_CALL(d, ctx, cuGraphInstantiateWithFlags, (&exec, graph, 0));
    return (cuvmm_value){exec, result};
}

int32_t cuvmm_GraphLaunch(cuvmm_driver d, uintptr_t ctx, uintptr_t exec, uintptr_t s) {
    CUVMM_CALL(d, ctx, cuGraphLaunch, (exec, s));
    return result;
}

int32_t cuvmm_GraphDestroy(cuvmm_driver d, uintptr_t graph) {
    CUVMM_CALL(d, 0, cuGraphDestroy, (graph));
    return result;
}

int32_t cuvmm_GraphExecDestroy(cuvmm_driver d, uintptr_t exec) {
    CUVMM_CALL(d, 0, cuGraphExecDestroy, (exec));
    return result;
}

// Without a list to fill, cuGraphGetNodes answers the count.
cuvmm_value cuvmm_GraphGetNodeCount(cuvmm_driver d, uintptr_t graph) {
    size_t count = 0;
    CUVMM_CALL(d, 0, cuGraphGetNodes, (graph, NULL, &count));
    return (cuvmm_value){count, result};
}
