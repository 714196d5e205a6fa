// usage: software_test LIBRARY LIBCUDA
//
// Runs managed_alloc.cc on the software driver, built as libcuda by cmd/libcuda. Where the
// stand-in of managed_test.cc shows which calls are made, this shows what they do: the
// memory has bytes, streams have order, and captures go on.

#include <dlfcn.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#define CHECK(condition)                                                   \
    do {                                                                   \
        if (!(condition)) {                                                \
            printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

namespace {

using Stream = struct CUstream_st *;
void *libcuda;
void *(*managed_malloc)(ssize_t, int, Stream);
void (*managed_free)(void *, ssize_t, int, Stream);

// driver calls an entry point, which must succeed.
template <class... Args> void driver(const char *name, Args... args) {
    auto f = reinterpret_cast<int (*)(Args...)>(dlsym(libcuda, name));
    if (!f) printf("%s is missing\n", name), exit(1);
    if (int r = f(args...)) printf("%s returned %d\n", name, r), exit(1);
}

template <class T> void find(T &to, void *library, const char *name) {
    to = reinterpret_cast<T>(dlsym(library, name));
    CHECK(to != nullptr);
}

std::string error(ssize_t size, int device, Stream stream) {
    try {
        managed_malloc(size, device, stream);
    } catch (const std::exception &e) {
        return e.what();
    }
    return "";
}

bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

size_t available() {
    size_t free, total;
    driver("cuMemGetInfo_v2", &free, &total);
    return free;
}

void *current() {
    void *context;
    driver("cuCtxGetCurrent", &context);
    return context;
}

constexpr ssize_t MiB = 1 << 20;

void placement(Stream s) {
    auto *p = static_cast<unsigned char *>(managed_malloc(8 * MiB, 0, s));
    driver("cuStreamSynchronize", s);
    int preferred = -2, prefetched = -2;
    driver("cuMemRangeGetAttribute", &preferred, sizeof preferred, 2, reinterpret_cast<uint64_t>(p), size_t(8 * MiB));
    driver("cuMemRangeGetAttribute", &prefetched, sizeof prefetched, 4, reinterpret_cast<uint64_t>(p), size_t(8 * MiB));
    CHECK(preferred == 0 && prefetched == 0);
    driver("cuMemsetD8Async", reinterpret_cast<uint64_t>(p), 0x5au, size_t(8 * MiB), s);
    driver("cuStreamSynchronize", s);
    CHECK(p[0] == 0x5a && p[8 * MiB - 1] == 0x5a); // the CPU reads what the GPU wrote
    memset(p, 3, 1000);
    unsigned char copy[1001];
    driver("cuMemcpyDtoH_v2", static_cast<void *>(copy), reinterpret_cast<uint64_t>(p), sizeof copy);
    CHECK(copy[999] == 3 && copy[1000] == 0x5a); // and the GPU what the CPU wrote
    driver("cuMemsetD8Async", reinterpret_cast<uint64_t>(p), 1u, size_t(8 * MiB), s);
    managed_free(p, 8 * MiB, 0, s); // waits for the work
}

void capture(Stream s, Stream other) {
    for (int mode : {0, 1, 2}) {
        void *before = managed_malloc(MiB, 0, s), *graph = nullptr;
        driver("cuStreamBeginCapture_v2", s, mode);
        CHECK(has(error(MiB, 0, s), "captured into a graph"));
        managed_free(before, MiB, 0, s);
        managed_free(managed_malloc(MiB, 0, other), MiB, 0, other);
        std::thread([&] { managed_free(managed_malloc(MiB, 0, other), MiB, 0, other); }).join();
        driver("cuStreamEndCapture", s, &graph); // it lives on
        driver("cuGraphDestroy", graph);
        managed_free(managed_malloc(MiB, 0, s), MiB, 0, s);
    }
}

void refusals() {
    CHECK(managed_malloc(0, 0, nullptr) == nullptr);
    CHECK(has(error(ssize_t(1) << 44, 0, nullptr), "CUDA out of memory. Tried to allocate 16384.000 GiB"));
    CHECK(has(error(MiB, 7, nullptr), "CUDA_VISIBLE_DEVICES"));
    CHECK(has(error(-1, 0, nullptr), "the size is negative"));
}

void threads(Stream s) {
    std::vector<std::thread> all;
    for (int t = 0; t < 4; t++)
        all.emplace_back([=] {
            CHECK(current() == nullptr);
            for (int i = 1; i < 50; i++) {
                auto *p = static_cast<unsigned char *>(managed_malloc(1000 * i, 0, s));
                p[1000 * i - 1] = static_cast<unsigned char>(t);
                CHECK(p[1000 * i - 1] == t);
                managed_free(p, 1000 * i, 0, s);
            }
            CHECK(current() == nullptr); // as it was found
        });
    for (auto &t : all) t.join();
}

void child(Stream s) {
    void *inherited = managed_malloc(MiB, 0, s);
    pid_t pid = fork();
    if (pid == 0) {
        managed_free(inherited, MiB, 0, s);
        _exit(has(error(MiB, 0, s), "does not survive a fork") ? 7 : 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    managed_free(inherited, MiB, 0, s);
}

} // namespace

int main(int, char **argv) {
    setenv("CUVMM_LIBCUDA", argv[2], 1);
    libcuda = dlopen(argv[2], RTLD_NOW);
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!libcuda || !library) return printf("%s\n", dlerror()), 1;
    find(managed_malloc, library, "managed_malloc");
    find(managed_free, library, "managed_free");
    managed_free(managed_malloc(MiB, 0, nullptr), MiB, 0, nullptr); // without a context of the thread's
    CHECK(current() == nullptr);

    void *context = nullptr;
    Stream s = nullptr, other = nullptr;
    driver("cuDevicePrimaryCtxRetain", &context, 0);
    driver("cuCtxSetCurrent", context);
    driver("cuStreamCreate", &s, 1u);
    driver("cuStreamCreate", &other, 1u);
    size_t before = available();
    placement(s);
    capture(s, other);
    refusals();
    threads(s);
    child(s);
    CHECK(available() == before && current() == context);
    puts("ok");
    return 0;
}
