// A stand-in for libcuda.so.1 with the rules that managed_alloc.cc meets: what
// belongs to a thread, what ends a capture, and that the entry points are taken
// in the version that was declared. Its memory is addresses alone.

#include "fake_driver.h"

#include <cstdlib>
#include <cstring>

namespace {

enum { Success = 0, InvalidValue = 1, OutOfMemory = 2, Deinitialized = 4, InvalidDevice = 101, InvalidContext = 201, NotFound = 500, CaptureUnsupported = 900, CaptureImplicit = 906 };

// Never destroyed, as a driver's is not: it ends when the process does.
Fake &state = *new Fake;
struct End {
    ~End() { state.ended = true; }
} end;

uint64_t next = uint64_t{1} << 40;
thread_local uintptr_t stack[8];
thread_local size_t depth;
thread_local unsigned mode;

using Lock = std::lock_guard<std::recursive_mutex>;

int begin(const char *entry, const std::string &arguments = "") {
    Lock lock(state.mutex);
    state.calls.push_back(entry + arguments);
    if (state.ended) return Deinitialized;
    auto r = state.results.find(entry);
    return r == state.results.end() ? int(Success) : r->second;
}

// A call that may end captures on other streams: what it does depends on the
// capture's mode, its thread, and the calling thread's own mode.
bool kills() {
    bool killed = false;
    for (auto *s : state.streams) {
        bool reached = s->mode == 0 || (s->mode == 1 && s->capturer == std::this_thread::get_id());
        if (s->status == 1 && reached && mode != 2) s->status = 2, killed = true;
    }
    return killed;
}

// Work put on a stream, or waiting for it, while it is captured, or while one
// that the legacy stream waits for is.
bool kills_own(CUstream_st *stream) {
    bool killed = false;
    for (auto *s : state.streams)
        if (s->status == 1 && (s == stream || (!stream && s->blocking))) s->status = 2, killed = true;
    return killed;
}

std::string arg(uint64_t v) { return "(" + std::to_string(v) + ")"; }
std::string arg(const void *p) { return arg(reinterpret_cast<uintptr_t>(p)); }
uintptr_t current() { return depth ? stack[depth - 1] : 0; }

int Init(unsigned) { return begin("cuInit"); }
int GetErrorName(int result, const char **name) {
    *name = result == OutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return Success;
}
int DeviceGet(int *device, int ordinal) {
    *device = ordinal + 40;
    return ordinal < 0 || ordinal > 1 ? int(InvalidDevice) : begin("cuDeviceGet");
}
int DeviceGetAttribute(int *value, int attribute, int) {
    if (attribute != 18 && attribute != 83 && attribute != 89) abort();
    *value = attribute == 18 ? state.integrated : attribute == 83 ? state.managed : state.concurrent;
    return begin("cuDeviceGetAttribute");
}
int PrimaryCtxRetain(uintptr_t *context, int device) {
    Lock lock(state.mutex);
    *context = 0xc0de0000 + device;
    state.retained++;
    return begin("cuDevicePrimaryCtxRetain");
}
int CtxPush(uintptr_t context) {
    if (int r = begin("cuCtxPushCurrent")) return r;
    stack[depth++] = context;
    return Success;
}
int CtxPop(uintptr_t *context) {
    if (!depth) return InvalidContext;
    *context = stack[--depth];
    return begin("cuCtxPopCurrent");
}
int ExchangeMode(unsigned *m) {
    if (int r = begin("cuThreadExchangeStreamCaptureMode")) return r;
    std::swap(*m, mode);
    return Success;
}
int IsCapturing(CUstream_st *s, int *status) {
    Lock lock(state.mutex);
    if (int r = begin("cuStreamIsCapturing")) return r;
    if (!current()) return InvalidContext;
    *status = s ? s->status : 0;
    if (!s)
        for (auto *other : state.streams)
            if (other->blocking && other->status) return CaptureImplicit;
    return Success;
}
int StreamSynchronize(CUstream_st *s) {
    Lock lock(state.mutex);
    if (int r = begin("cuStreamSynchronize", arg(s))) return r;
    if (!current()) return InvalidContext;
    return kills() | kills_own(s) ? int(CaptureUnsupported) : int(Success);
}
int MemGetInfo(size_t *free, size_t *total) {
    Lock lock(state.mutex);
    *free = state.free, *total = state.total;
    return current() ? begin("cuMemGetInfo") : int(InvalidContext);
}
int MemAllocManaged(uint64_t *p, size_t size, unsigned flags) {
    Lock lock(state.mutex);
    if (int r = begin("cuMemAllocManaged", arg(size))) return r;
    if (!current()) return InvalidContext;
    if (flags != 1 || size == 0) return InvalidValue;
    if (kills()) return CaptureUnsupported;
    if (state.granted-- <= 0) return OutOfMemory;
    *p = next;
    next += (size + 0xfffff) & ~uint64_t{0xfffff};
    state.memory[*p] = size;
    return Success;
}
int MemAdvise(uint64_t p, size_t size, int advice, int location) {
    Lock lock(state.mutex);
    if (int r = begin("cuMemAdvise", "(" + std::to_string(advice) + "," + std::to_string(location) + ")")) return r;
    auto m = state.memory.find(p);
    return m == state.memory.end() || m->second != size || !current() ? int(InvalidValue) : int(Success);
}
int MemPrefetchAsync(uint64_t p, size_t size, int location, CUstream_st *s) {
    Lock lock(state.mutex);
    if (int r = begin("cuMemPrefetchAsync", "(" + std::to_string(location) + "," + std::to_string(reinterpret_cast<uintptr_t>(s)) + ")")) return r;
    if (kills_own(s)) return CaptureUnsupported;
    auto m = state.memory.find(p);
    return m == state.memory.end() || m->second != size || !current() ? int(InvalidValue) : int(Success);
}
int MemFree(uint64_t p) {
    Lock lock(state.mutex);
    if (int r = begin("cuMemFree", arg(p))) return r;
    if (!current()) return InvalidContext;
    if (kills()) return CaptureUnsupported;
    return state.memory.erase(p) ? int(Success) : int(InvalidValue);
}
// The second form of advice and prefetch, and anything else that was not
// declared: calling it is the mistake that the test looks for.
int WrongForm() { abort(); }

const struct {
    const char *name;
    int from, until; // the versions that give this form
    void *entry;
} entries[] = {
#define X(name, from, until, f) {name, from, until, reinterpret_cast<void *>(f)},
    X("cuInit", 2000, 1 << 30, Init) X("cuGetErrorName", 6000, 1 << 30, GetErrorName) X("cuDeviceGet", 2000, 1 << 30, DeviceGet)
    X("cuDeviceGetAttribute", 2000, 1 << 30, DeviceGetAttribute) X("cuDevicePrimaryCtxRetain", 7000, 1 << 30, PrimaryCtxRetain)
    X("cuCtxPushCurrent", 4000, 1 << 30, CtxPush) X("cuCtxPopCurrent", 4000, 1 << 30, CtxPop)
    X("cuThreadExchangeStreamCaptureMode", 10010, 1 << 30, ExchangeMode) X("cuStreamIsCapturing", 10000, 1 << 30, IsCapturing)
    X("cuStreamSynchronize", 2000, 1 << 30, StreamSynchronize) X("cuMemGetInfo", 3020, 1 << 30, MemGetInfo)
    X("cuMemAllocManaged", 6000, 1 << 30, MemAllocManaged) X("cuMemAdvise", 8000, 12020, MemAdvise) X("cuMemAdvise", 12020, 1 << 30, WrongForm)
    X("cuMemPrefetchAsync", 8000, 12020, MemPrefetchAsync) X("cuMemPrefetchAsync", 12020, 1 << 30, WrongForm) X("cuMemFree", 3020, 1 << 30, MemFree)
#undef X
};

} // namespace

extern "C" {

int cuGetProcAddress(const char *name, void **entry, int version, uint64_t flags) {
    *entry = nullptr;
    for (auto &e : entries)
        if (!strcmp(e.name, name) && version >= e.from && version < e.until && flags == 0) *entry = e.entry;
    return *entry ? Success : NotFound;
}

// FAKE_FIRST_FORM builds a driver before 12.0.
#ifndef FAKE_FIRST_FORM
int cuGetProcAddress_v2(const char *name, void **entry, int version, uint64_t flags, int *status) {
    int r = cuGetProcAddress(name, entry, version, flags);
    *status = r == Success ? 0 : 1;
    return *entry ? r : int(Success); // the real one returns success and a null entry
}
#endif

Fake *fake() { return &state; }
void fake_set_thread(uintptr_t context, unsigned m) {
    stack[0] = context;
    depth = context != 0;
    mode = m;
}
uintptr_t fake_context() { return current(); }
size_t fake_depth() { return depth; }
unsigned fake_mode() { return mode; }
}
