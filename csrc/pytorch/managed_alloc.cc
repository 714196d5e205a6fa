// Managed memory for PyTorch: an allocator in the form that
// torch.cuda.memory.CUDAPluggableAllocator takes, which places memory on the
// GPU first and maps it for the CPU. README.md says how to use it.
//
// The library needs only the driver, which it opens at run time. Every call leaves its
// thread's context and capture mode unchanged.

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>

typedef struct CUstream_st *cudaStream_t;

namespace {

// The part of the driver API that is used. Handles are integers, which are passed in the
// same registers and need no casts.
using Context = uintptr_t;
using Pointer = uint64_t;

enum Result : int {
    Success = 0,
    OutOfMemory = 2,
    NotInitialized = 3,
    Deinitialized = 4,
    InvalidDevice = 101,
    CaptureImplicit = 906, // the legacy stream, while a stream that waits for it captures
};
enum : int { AttributeIntegrated = 18, AttributeManaged = 83, AttributeConcurrentManagedAccess = 89 };
enum : int { AdvisePreferredLocation = 3, AdviseAccessedBy = 5 };
enum : int { Host = -1 };
enum : unsigned { AttachGlobal = 1, CaptureRelaxed = 2 };

// Each entry point, the CUDA version its declaration was written for, and the
// declaration. Advice and prefetch are taken in their first form, in which a
// location is a device or the host: every driver still has it.
#define DRIVER_ENTRIES(X)                                                                  \
    X(cuInit, 2000, (unsigned flags))                                                      \
    X(cuGetErrorName, 6000, (int result, const char **name))                               \
    X(cuDeviceGet, 2000, (int *device, int ordinal))                                       \
    X(cuDeviceGetAttribute, 2000, (int *value, int attribute, int device))                 \
    X(cuDevicePrimaryCtxRetain, 7000, (Context * context, int device))                     \
    X(cuCtxPushCurrent, 4000, (Context context))                                           \
    X(cuCtxPopCurrent, 4000, (Context * context))                                          \
    X(cuThreadExchangeStreamCaptureMode, 10010, (unsigned *mode))                          \
    X(cuStreamIsCapturing, 10000, (cudaStream_t stream, int *status))                      \
    X(cuStreamSynchronize, 2000, (cudaStream_t stream))                                    \
    X(cuMemGetInfo, 3020, (size_t *free, size_t *total))                                   \
    X(cuMemAllocManaged, 6000, (Pointer * p, size_t size, unsigned flags))                 \
    X(cuMemAdvise, 8000, (Pointer p, size_t size, int advice, int location))               \
    X(cuMemPrefetchAsync, 8000, (Pointer p, size_t size, int location, cudaStream_t stream)) \
    X(cuMemFree, 3020, (Pointer p))

struct Driver {
#define X(name, version, parameters) int(*name) parameters;
    DRIVER_ENTRIES(X)
#undef X
    Driver();
    const char *name_of(int result) const {
        const char *name = nullptr;
        return cuGetErrorName(result, &name) == Success && name ? name : "an unknown error";
    }
};

__attribute__((format(printf, 1, 2))) std::string text(const char *format, ...) {
    char buffer[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(buffer, sizeof buffer, format, list);
    va_end(list);
    return buffer;
}

[[noreturn]] void fail(const std::string &why) { throw std::runtime_error("managed_malloc: " + why); }

// PyTorch turns it into a RuntimeError with this text, which begins as PyTorch's own
// does: programs look for that, and retry with a smaller batch.
struct OutOfMemoryError : std::bad_alloc {
    char message[512];
    const char *what() const noexcept override { return message; }
};

// Each warning is printed once in a process.
void warn(std::atomic_flag &given, const std::string &what) {
    if (!given.test_and_set()) fprintf(stderr, "cuvmm: warning: %s\n", what.c_str());
}

Driver::Driver() {
    const char *path = secure_getenv("CUVMM_LIBCUDA");
    if (!path || !*path) path = "libcuda.so.1";
    struct stat file; // the loader would wait forever at a named pipe
    if (strchr(path, '/') && stat(path, &file) == 0 && !S_ISREG(file.st_mode)) fail(text("the CUDA driver cannot be opened: %s is not a regular file. Name NVIDIA's libcuda.so.1 in CUVMM_LIBCUDA", path));
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(text("the CUDA driver cannot be opened: %s. Install NVIDIA's driver, or name its libcuda.so.1 in CUVMM_LIBCUDA", dlerror()));
    // The second form, from CUDA 12.0 on, also reports why it found nothing.
    void *second = dlsym(library, "cuGetProcAddress_v2"), *first = dlsym(library, "cuGetProcAddress");
    if (!second && !first) fail(text("%s is not a CUDA driver, or older than 11.3: it has no cuGetProcAddress. Update NVIDIA's driver to release 465 or later", path));
    auto find = [&](const char *name, int version) -> void * {
        void *entry = nullptr;
        int status = 0;
        int result = second ? reinterpret_cast<int (*)(const char *, void **, int, uint64_t, int *)>(second)(name, &entry, version, 0, &status)
                            : reinterpret_cast<int (*)(const char *, void **, int, uint64_t)>(first)(name, &entry, version, 0);
        if (result != Success || !entry) fail(text("the driver %s lacks %s: update it to release 465 or later, and take the toolkit's stubs out of LD_LIBRARY_PATH", path, name));
        return entry;
    };
#define X(entry, version, parameters) entry = reinterpret_cast<int(*) parameters>(find(#entry, version));
    DRIVER_ENTRIES(X)
#undef X
    if (int r = cuInit(0)) fail(text("cuInit returned %d (%s)%s", r, name_of(r), r == NotInitialized ? ": CUDA does not survive a fork, so start this process by spawn" : ""));
}

// CUDA does not survive a fork: a child that inherits this library's memory
// must not touch the driver, nor a lock that another thread held. owner is the
// process that first opened the driver.
std::atomic<pid_t> owner{0};

bool in_forked_child() {
    pid_t first = owner.load(std::memory_order_relaxed);
    return first != 0 && first != getpid();
}

struct Device {
    Context context = 0; // its primary one, as the CUDA runtime's; never given back
    int device = 0;
    bool concurrent = false; // the CPU and the GPU may use managed memory at one time
    bool integrated = false; // its memory is the host's
};

// The state of the process. It is never destroyed: PyTorch may free memory after this
// library's destructors would have run.
struct Allocator {
    Driver driver;
    std::mutex mutex; // guards what follows; the driver is called under it at a device's first use alone
    std::unordered_map<int, Device> devices;
    std::unordered_map<Pointer, int> live; // the device of each allocation
};

std::atomic<Allocator *> opened{nullptr}; // for frees, which open nothing

Allocator &allocator() {
    pid_t none = 0;
    owner.compare_exchange_strong(none, getpid());
    static Allocator *one = opened = new Allocator;
    return *one;
}

// While a Here exists, its thread is in the context, and in the relaxed capture mode, in
// which no call below can end a capture on another stream.
struct Here {
    const Driver &driver;
    unsigned mode = CaptureRelaxed; // then the thread's own, which the destructor restores
    int result;                     // why the thread could not be prepared
    bool exchanged, pushed = false;

    explicit Here(const Driver &d) : driver(d), result(d.cuThreadExchangeStreamCaptureMode(&mode)), exchanged(result == Success) {}
    int enter(Context context) {
        if (result == Success) result = driver.cuCtxPushCurrent(context);
        pushed = result == Success;
        return result;
    }
    ~Here() {
        Context popped;
        if (pushed) driver.cuCtxPopCurrent(&popped);
        if (exchanged) driver.cuThreadExchangeStreamCaptureMode(&mode);
    }
    Here(const Here &) = delete;
};

// The device of an ordinal, prepared at its first use.
Device device_of(Allocator &a, int ordinal) {
    const Driver &d = a.driver;
    std::lock_guard<std::mutex> lock(a.mutex);
    auto known = a.devices.find(ordinal);
    if (known != a.devices.end()) return known->second;
    Device device;
    auto check = [&](const char *call, int r) {
        if (r != Success) fail(text("device %d: %s returned %d (%s)%s", ordinal, call, r, d.name_of(r), r == InvalidDevice ? ": the process does not see so many devices (CUDA_VISIBLE_DEVICES)" : ""));
    };
    check("cuDeviceGet", d.cuDeviceGet(&device.device, ordinal));
    int managed = 0, concurrent = 0, integrated = 0;
    check("cuDeviceGetAttribute", d.cuDeviceGetAttribute(&managed, AttributeManaged, device.device));
    check("cuDeviceGetAttribute", d.cuDeviceGetAttribute(&concurrent, AttributeConcurrentManagedAccess, device.device));
    check("cuDeviceGetAttribute", d.cuDeviceGetAttribute(&integrated, AttributeIntegrated, device.device));
    if (!managed) fail(text("device %d has no managed memory: use PyTorch's own allocator", ordinal));
    device.concurrent = concurrent != 0;
    device.integrated = integrated != 0;
    check("cuDevicePrimaryCtxRetain", d.cuDevicePrimaryCtxRetain(&device.context, device.device));
    return a.devices[ordinal] = device;
}

// The root of the system's files, which tests replace.
#ifndef CUVMM_ROOT
#define CUVMM_ROOT ""
#endif

// The number in a file; a missing file and "max" are no limit.
size_t number(const std::string &file) {
    size_t n;
    return std::ifstream(CUVMM_ROOT + file) >> n ? n : SIZE_MAX;
}

// What a control group may still take: its limit, less its use. Pages of files do not
// count as used, because the kernel drops them when it needs room.
size_t left(const std::string &group, const char *limit_file, const char *used_file, const std::string &sum) {
    size_t limit = number(group + limit_file), used = number(group + used_file), files = 0, n;
    if (limit == SIZE_MAX || used == SIZE_MAX) return limit;
    std::ifstream stat(CUVMM_ROOT + group + "/memory.stat");
    for (std::string key; stat >> key >> n;)
        if (key == sum + "inactive_file" || key == sum + "active_file") files += n;
    used -= std::min(used, files);
    return limit - std::min(limit, used);
}

// The most host memory that an allocation can get: what the kernel reports as available,
// within the limits of the process's control group and of those above it (a container's,
// or a job's).
size_t host_available() {
    size_t available = SIZE_MAX, kib;
    std::ifstream info(CUVMM_ROOT "/proc/meminfo"), groups(CUVMM_ROOT "/proc/self/cgroup");
    for (std::string line; std::getline(info, line);)
        if (sscanf(line.c_str(), "MemAvailable: %zu kB", &kib) == 1) available = kib * 1024;
    for (std::string line; std::getline(groups, line);) { // number:controllers:path, without controllers in the second version
        size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        std::string controllers = line.substr(first, second - first), path = line.substr(second + 1);
        bool second_version = controllers == ":";
        if (!second_version && (controllers + ",").find("memory,") == std::string::npos) continue;
        for (path = path == "/" ? "" : path;; path.erase(path.rfind('/'))) {
            size_t here = second_version ? left("/sys/fs/cgroup" + path, "/memory.max", "/memory.current", "")
                                         : left("/sys/fs/cgroup/memory" + path, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_");
            available = std::min(available, here);
            if (path.rfind('/') == std::string::npos) break;
        }
    }
    return available;
}

double gib(size_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

// The driver grants far more managed memory than the machine has, and the kernel then
// kills the process that touches it. So a request for more than GPU and host together
// have is refused here. An integrated GPU's memory is the host's and counts once.
void check_room(const Driver &d, size_t size, int ordinal, bool integrated, bool refused) {
    size_t free = 0, total = 0;
    bool known = d.cuMemGetInfo(&free, &total) == Success;
    if (!refused && (!known || size <= free)) return;
    size_t host = host_available();
    if (!refused && size - (integrated ? 0 : free) <= host) return;
    OutOfMemoryError e;
    int n = snprintf(e.message, sizeof e.message, "CUDA out of memory. Tried to allocate %.3f GiB of managed memory on device %d, which has %.3f GiB free of %.3f GiB", gib(size), ordinal, gib(free), gib(total));
    if (host != SIZE_MAX) n += snprintf(e.message + n, sizeof e.message - n, "; the host has %.3f GiB available", gib(host));
    snprintf(e.message + n, sizeof e.message - n, "%s. Free tensors, take a smaller batch, or give the process more host memory", refused ? " (the driver refused)" : "");
    throw e;
}

// Prefers the GPU, and maps for the CPU. Memory for which this fails works, but may be
// slower, so a failure is a warning.
void place(const Driver &d, Pointer p, size_t size, const Device &device, cudaStream_t stream) {
    static std::atomic_flag warned = ATOMIC_FLAG_INIT;
    if (!device.concurrent) return; // it accepts neither, and the memory is on the GPU while the GPU works
    auto check = [&](const char *what, int r) {
        if (r != Success) warn(warned, text("%s managed memory (%.3f GiB): %d (%s); it stays usable, but may lie in the host's memory. Later failures are not reported", what, gib(size), r, d.name_of(r)));
    };
    check("setting the preferred location of", d.cuMemAdvise(p, size, AdvisePreferredLocation, device.device));
    check("mapping for the CPU", d.cuMemAdvise(p, size, AdviseAccessedBy, Host));
    check("prefetching", d.cuMemPrefetchAsync(p, size, device.device, stream));
}

// Asking the stream harms no capture. The legacy stream itself never captures, but no
// work may be put on it while a blocking stream captures: the result is then
// CaptureImplicit, and that capture goes on.
void refuse_capture(const Driver &d, cudaStream_t stream) {
    int status = 0;
    int r = d.cuStreamIsCapturing(stream, &status);
    if (r == CaptureImplicit || (r == Success && status != 0))
        fail("memory cannot be allocated while the stream is captured into a graph; the capture was left as it is. Allocate what the graph uses before the capture, and keep it as long as the graph");
    if (r != Success) fail(text("cuStreamIsCapturing returned %d (%s)", r, d.name_of(r)));
}

void *allocate(ssize_t size, int ordinal, cudaStream_t stream) {
    if (size < 0) throw std::invalid_argument(text("managed_malloc: the size is negative: %zd bytes", size));
    if (size == 0) return nullptr; // as PyTorch's own: an empty tensor has no address, and it never frees null
    if (in_forked_child()) fail("CUDA does not survive a fork, and the parent of this process uses it: start workers by spawn or forkserver, and move data to the GPU in the parent");
    Allocator &a = allocator();
    const Driver &d = a.driver;
    Here here(d);
    if (here.result == Deinitialized) fail("the CUDA driver has shut down: the process is ending");
    if (here.result != Success) fail(text("cuThreadExchangeStreamCaptureMode returned %d (%s)", here.result, d.name_of(here.result)));
    Device device = device_of(a, ordinal);
    if (int r = here.enter(device.context)) fail(text("cuCtxPushCurrent returned %d (%s)", r, d.name_of(r)));
    refuse_capture(d, stream);

    check_room(d, size, ordinal, device.integrated, false);
    Pointer p = 0;
    int r = d.cuMemAllocManaged(&p, size, AttachGlobal);
    if (r == OutOfMemory) check_room(d, size, ordinal, device.integrated, true);
    if (r != Success) fail(text("cuMemAllocManaged of %.3f GiB on device %d returned %d (%s)", gib(size), ordinal, r, d.name_of(r)));
    try {
        std::lock_guard<std::mutex> lock(a.mutex);
        a.live[p] = ordinal;
    } catch (...) {
        d.cuMemFree(p);
        throw;
    }
    place(d, p, size, device, stream);
    return reinterpret_cast<void *>(p);
}

// PyTorch frees in destructors, where an exception would end the process, so failures
// are warnings. After the driver has shut down there is nothing to free.
void release(void *ptr, cudaStream_t stream) {
    static std::atomic_flag warned_unknown = ATOMIC_FLAG_INIT, warned_failed = ATOMIC_FLAG_INIT;
    if (!ptr || in_forked_child()) return;
    Allocator *a = opened.load();
    Pointer p = reinterpret_cast<Pointer>(ptr);
    Device device;
    bool known = false;
    if (a) {
        std::lock_guard<std::mutex> lock(a->mutex);
        auto found = a->live.find(p);
        if ((known = found != a->live.end())) {
            device = a->devices[found->second];
            a->live.erase(found); // before the free, after which the address may be another allocation's
        }
    }
    if (!known) return warn(warned_unknown, text("managed_free of %p, which is not a live allocation of managed_malloc: nothing was done", ptr));

    const Driver &d = a->driver;
    Here here(d);
    int r = here.enter(device.context);
    // cuMemFree waits for the context's work in this driver, but does not promise that
    // for managed memory, the stream may be another device's, and while cuMemFree waits
    // other threads cannot launch. So the stream is waited for first. A stream that
    // captures, or the legacy stream while a blocking one does, has no work to wait for
    // and must not be touched.
    int status = 0;
    if (r == Success && d.cuStreamIsCapturing(stream, &status) == Success && status == 0) d.cuStreamSynchronize(stream);
    if (r == Success) r = d.cuMemFree(p);
    if (r != Success && r != Deinitialized && r != NotInitialized)
        warn(warned_failed, text("managed memory was not freed: %d (%s). Later failures are not reported", r, d.name_of(r)));
}

} // namespace

extern "C" {

// Allocates size bytes of managed memory, placed on the device by work on the stream. 0
// bytes are null. If memory is lacking it throws a std::bad_alloc, after other failures a
// std::exception; PyTorch turns either into a RuntimeError with its text. Any thread may
// call it.
__attribute__((visibility("default"))) void *managed_malloc(ssize_t size, int device, cudaStream_t stream) { return allocate(size, device, stream); }

// Waits for the stream's work (null is the legacy stream) and frees the memory.
// It never throws. Any thread may call it.
__attribute__((visibility("default"))) void managed_free(void *ptr, ssize_t, int, cudaStream_t stream) {
    try {
        release(ptr, stream);
    } catch (const std::exception &e) {
        fprintf(stderr, "cuvmm: warning: managed_free: %s\n", e.what());
    }
}
}
