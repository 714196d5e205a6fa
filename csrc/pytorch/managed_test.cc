// usage: managed_test LIBRARY FAKE FAKE_FIRST_FORM [CASE]
//
// Tests managed_alloc.cc on the stand-in driver. Each case runs in a process of its own,
// because the library's state lasts as long as the process. A case lists exactly what it
// writes to standard error.

#include "fake_driver.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>
#include <stdexcept>

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);          \
            fflush(stdout);                                                        \
            _exit(1);                                                              \
        }                                                                          \
    } while (0)

namespace {

using Stream = CUstream_st *;
void *(*managed_malloc)(ssize_t, int, Stream);
void (*managed_free)(void *, ssize_t, int, Stream);
Fake *(*driver)();
void (*set_thread)(uintptr_t, unsigned);
uintptr_t (*context)();
size_t (*depth)();
unsigned (*mode)();

constexpr ssize_t KiB = 1 << 10;
constexpr ssize_t GiB = 1 << 30;

// A stream of the stand-in, known to it while it lives.
struct TestStream : CUstream_st {
    explicit TestStream(bool is_blocking = false) {
        blocking = is_blocking;
        driver()->streams.push_back(this);
    }
    ~TestStream() { driver()->streams.clear(); }
    void capture(int capture_mode) { status = 1, this->mode = capture_mode, capturer = std::this_thread::get_id(); }
};

// The text of the exception that a call throws, "" if it throws none.
template <class E> std::string thrown(const std::function<void()> &call) {
    try {
        call();
    } catch (const E &e) {
        return e.what();
    }
    return "";
}

bool has(const std::string &all, const char *part) {
    bool found = all.find(part) != std::string::npos;
    if (!found) printf("%s\nlacks: %s\n", all.c_str(), part);
    return found;
}

std::string error(ssize_t size, int device, Stream stream) {
    return thrown<std::exception>([&] { managed_malloc(size, device, stream); });
}

// The cases.

void placement() {
    TestStream s;
    void *p = managed_malloc(3 * GiB, 1, &s);
    CHECK(p);
    Fake &f = *driver();
    CHECK(f.memory.size() == 1);
    auto order = [&](const std::string &call) {
        for (size_t i = 0; i < f.calls.size(); i++)
            if (f.calls[i] == call) return int(i);
        return -1;
    };
    int preferred = order("cuMemAdvise(3,41)"), host = order("cuMemAdvise(5,-1)");
    int prefetch = order("cuMemPrefetchAsync(41," + std::to_string(reinterpret_cast<uintptr_t>(&s)) + ")");
    CHECK(preferred > order("cuMemAllocManaged(3221225472)") && host > preferred && prefetch > host);
    managed_free(p, 3 * GiB, 1, &s);
    CHECK(f.memory.empty());
}

void waits_before_free() {
    TestStream s;
    Fake &f = *driver();
    for (Stream stream : {Stream(nullptr), Stream(&s)}) {
        void *p = managed_malloc(KiB, 0, stream);
        f.clear();
        managed_free(p, KiB, 0, stream);
        std::string wait = "cuStreamSynchronize(" + std::to_string(reinterpret_cast<uintptr_t>(stream)) + ")";
        size_t waited = 0, freed = 0;
        for (size_t i = 0; i < f.calls.size(); i++) {
            if (f.calls[i] == wait) waited = i;
            if (f.calls[i].rfind("cuMemFree", 0) == 0) freed = i;
        }
        CHECK(waited > 0 && freed > waited);
        CHECK(f.memory.empty());
    }
}

void thread_as_found() {
    Fake &f = *driver();
    for (uintptr_t before : {uintptr_t(0), uintptr_t(0xabc), uintptr_t(0xc0de0000 + 41)})
        for (unsigned m : {0u, 1u, 2u}) {
            set_thread(before, m);
            auto as_found = [&] { return context() == before && depth() == (before ? 1u : 0u) && mode() == m; };
            void *p = managed_malloc(KiB, 0, nullptr);
            CHECK(as_found());
            managed_free(p, KiB, 0, nullptr);
            CHECK(as_found());
            // However it fails.
            for (const char *call : {"cuMemAllocManaged", "cuStreamIsCapturing", "cuCtxPushCurrent", "cuMemGetInfo"}) {
                f.results[call] = 700;
                bool failed = !error(KiB, 0, nullptr).empty();
                CHECK(failed == (strcmp(call, "cuMemGetInfo") != 0));
                CHECK(as_found());
                f.results.clear();
            }
            CHECK(!error(PTRDIFF_MAX, 0, nullptr).empty());
            CHECK(as_found());
        }
    CHECK(f.retained == 1); // once a device
}

void out_of_memory() {
    // More than the machine has, which the driver would promise.
    std::string message = thrown<std::bad_alloc>([] { managed_malloc(ssize_t(16384) * GiB, 0, nullptr); });
    CHECK(message.rfind("CUDA out of memory. ", 0) == 0); // what programs look for
    CHECK(has(message, "16384.000 GiB") && has(message, "device 0") && has(message, "100.000 GiB free of 140.000 GiB") && has(message, "GiB available") && has(message, "smaller batch"));
    CHECK(driver()->count("cuMemAllocManaged") == 0);

    // The driver's own result.
    driver()->granted = 1;
    void *p = managed_malloc(GiB, 1, nullptr);
    message = thrown<std::bad_alloc>([] { managed_malloc(GiB + GiB / 2, 1, nullptr); });
    CHECK(has(message, "1.500 GiB") && has(message, "device 1") && has(message, "the driver refused"));
    CHECK(driver()->memory.size() == 1);

    // Afterwards everything works.
    driver()->granted = 1;
    managed_free(managed_malloc(GiB, 0, nullptr), GiB, 0, nullptr);
    managed_free(p, GiB, 1, nullptr);
    CHECK(driver()->memory.empty());
}

// The system's files as the library sees them, of which there are no others.
void system_files(const std::map<std::string, std::string> &files) {
    std::filesystem::remove_all("system");
    for (auto &f : files) {
        std::filesystem::path path = "system" + f.first;
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << f.second;
    }
}

// What the host has is what the limits leave of it, those of containers and of
// jobs too.
void limits_of_the_host() {
    const std::string GiB_1 = "1073741824", GiB_7 = "7516192768", GiB_8 = "8589934592", none = "9223372036854771712";
    const std::pair<const char *, std::map<std::string, std::string>> hosts[] = {
        {"4.000", {{"/proc/meminfo", "MemTotal: 99999999 kB\nMemAvailable: 4194304 kB\n"}}},
        {"4.000", {{"/proc/meminfo", "MemAvailable: 4194304 kB\n"}, {"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/memory.max", "max\n"}, {"/sys/fs/cgroup/memory.current", GiB_7}}},
        {"1.000", {{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/memory.max", GiB_8}, {"/sys/fs/cgroup/memory.current", GiB_7}}},
        {"0.000", {{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/memory.max", GiB_7}, {"/sys/fs/cgroup/memory.current", GiB_8}}},
        {"2.000", {{"/proc/self/cgroup", "0::/job/step\n"}, {"/sys/fs/cgroup/job/step/memory.max", "max\n"}, {"/sys/fs/cgroup/job/memory.max", GiB_8},
                   {"/sys/fs/cgroup/job/memory.current", GiB_7}, {"/sys/fs/cgroup/job/memory.stat", "anon 5\nactive_file 536870912\ninactive_file 536870912\nslab 7\n"}}},
        {"2.000", {{"/proc/self/cgroup", "3:cpuset:/\n2:cpu,memory:/job\n1:name=systemd:/\n0::/\n"}, {"/sys/fs/cgroup/memory/memory.limit_in_bytes", none},
                   {"/sys/fs/cgroup/memory/memory.usage_in_bytes", GiB_8}, {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes", GiB_8}, {"/sys/fs/cgroup/memory/job/memory.usage_in_bytes", GiB_7},
                   {"/sys/fs/cgroup/memory/job/memory.stat", "inactive_file 5\ntotal_inactive_file " + GiB_1 + "\n"}}},
    };
    driver()->free = 0;
    for (auto &host : hosts) {
        system_files(host.second);
        ssize_t most = static_cast<ssize_t>(atof(host.first) * GiB);
        CHECK(has(error(most + 1, 0, nullptr), (std::string("the host has ") + host.first + " GiB available").c_str()));
        if (most > 0) managed_free(managed_malloc(most, 0, nullptr), most, 0, nullptr);
    }
    CHECK(driver()->memory.empty());
}

// A GPU whose memory is the host's has no other beside it.
void integrated() {
    driver()->free = GiB;
    for (bool is : {true, false}) {
        system_files({{"/proc/meminfo", "MemAvailable: 2097152 kB\n"}});
        driver()->integrated = is;
        ssize_t most = (is ? 2 : 3) * GiB;
        managed_free(managed_malloc(most, is, nullptr), most, is, nullptr); // each is seen by a device at its first use
        CHECK(has(error(most + 1, is, nullptr), "the host has 2.000 GiB available"));
    }
    system_files({}); // nothing is known of the host
    managed_free(managed_malloc(GiB, 1, nullptr), GiB, 1, nullptr);
}

// What does not fit into the GPU's free memory, and does into the host's.
void spills_to_the_host() {
    driver()->free = 0;
    void *p = managed_malloc(KiB, 0, nullptr);
    CHECK(p);
    managed_free(p, KiB, 0, nullptr);
}

void sizes() {
    CHECK(managed_malloc(0, 0, nullptr) == nullptr);
    CHECK(managed_malloc(0, 7, nullptr) == nullptr);
    managed_free(nullptr, 0, 0, nullptr);
    CHECK(driver()->calls.empty());
    CHECK(has(error(-1, 0, nullptr), "negative: -1 bytes"));
    CHECK(has(error(PTRDIFF_MIN, 0, nullptr), "negative"));
    CHECK(has(error(KiB, 2, nullptr), "device 2") && has(error(KiB, 2, nullptr), "CUDA_VISIBLE_DEVICES"));
    CHECK(has(error(KiB, -1, nullptr), "device -1"));
    CHECK(driver()->count("cuMemAllocManaged") == 0);
}

// In a capture of any kind, allocation is refused and the capture lives; so it
// does when memory is freed.
void capture_refused() {
    TestStream s;
    void *before = managed_malloc(KiB, 0, &s), *legacy = managed_malloc(KiB, 0, nullptr);
    for (int m : {0, 1, 2}) {
        s.capture(m);
        driver()->clear();
        std::string message = error(KiB, 0, &s);
        CHECK(has(message, "captured into a graph") && has(message, "before the capture"));
        for (const char *harmful : {"cuMemAllocManaged", "cuMemAdvise", "cuMemPrefetchAsync", "cuStreamSynchronize", "cuMemFree"}) CHECK(driver()->count(harmful) == 0);
        CHECK(s.status == 1);
    }
    s.status = 2; // invalidated by another call, and not ended yet
    CHECK(has(error(KiB, 0, &s), "captured into a graph"));
    s.capture(0);
    managed_free(before, KiB, 0, &s);
    managed_free(legacy, KiB, 0, nullptr);
    CHECK(s.status == 1 && driver()->memory.empty());
}

// While another stream is captured, on this thread or another, nothing of it
// is harmed.
void capture_elsewhere() {
    for (bool same_thread : {true, false})
        for (int m : {0, 1, 2}) {
            TestStream captured, mine;
            std::thread other([&] { captured.capture(m); });
            other.join();
            if (same_thread) captured.capture(m);
            for (Stream stream : {Stream(nullptr), Stream(&mine)}) {
                void *p = managed_malloc(KiB, 0, stream);
                CHECK(p);
                managed_free(p, KiB, 0, stream);
                CHECK(captured.status == 1 && driver()->memory.empty());
            }
        }
}

// A blocking stream is captured: the legacy stream must not be touched.
void capture_of_a_blocking_stream() {
    TestStream blocking(true);
    void *p = managed_malloc(KiB, 0, nullptr);
    blocking.capture(0);
    CHECK(has(error(KiB, 0, nullptr), "captured into a graph"));
    managed_free(p, KiB, 0, nullptr);
    CHECK(blocking.status == 1 && driver()->memory.empty());
}

void advice_fails() {
    for (const char *call : {"cuMemAdvise", "cuMemPrefetchAsync"}) {
        driver()->results[call] = 101;
        for (int i = 0; i < 3; i++) managed_free(managed_malloc(GiB, 0, nullptr), GiB, 0, nullptr);
    }
    CHECK(driver()->memory.empty());
}

void no_concurrent_access() {
    driver()->concurrent = false;
    void *p = managed_malloc(KiB, 0, nullptr);
    CHECK(p && driver()->count("cuMemAdvise") == 0 && driver()->count("cuMemPrefetchAsync") == 0);
    managed_free(p, KiB, 0, nullptr);
}

void no_managed_memory() {
    driver()->managed = false;
    CHECK(has(error(KiB, 0, nullptr), "no managed memory"));
    driver()->managed = true; // nothing of the failure is remembered
    managed_free(managed_malloc(KiB, 0, nullptr), KiB, 0, nullptr);
}

void unknown_pointers() {
    managed_free(reinterpret_cast<void *>(0x1000), KiB, 0, nullptr); // before anything was allocated
    void *p = managed_malloc(KiB, 0, nullptr);
    managed_free(reinterpret_cast<void *>(0x1000), KiB, 0, nullptr);
    managed_free(p, KiB, 0, nullptr);
    managed_free(p, KiB, 0, nullptr); // twice
    CHECK(driver()->count("cuMemFree") == 1);
}

void free_fails() {
    driver()->results["cuMemFree"] = 700;
    for (int i = 0; i < 2; i++) managed_free(managed_malloc(KiB, 0, nullptr), KiB, 0, nullptr);
}

void driver_ended() {
    void *p = managed_malloc(KiB, 0, nullptr), *q = managed_malloc(KiB, 0, nullptr);
    driver()->ended = true;
    driver()->clear();
    managed_free(p, KiB, 0, nullptr);
    std::thread([&] { managed_free(q, KiB, 0, nullptr); }).join();
    CHECK(driver()->count("cuMemFree") == 0);
    CHECK(has(error(KiB, 0, nullptr), "shut down"));
}

void forked() {
    void *p = managed_malloc(KiB, 0, nullptr);
    driver()->clear();
    pid_t child = fork();
    if (child == 0) {
        managed_free(p, KiB, 0, nullptr);
        managed_free(reinterpret_cast<void *>(0x1000), KiB, 0, nullptr);
        CHECK(has(error(KiB, 0, nullptr), "fork"));
        CHECK(managed_malloc(0, 0, nullptr) == nullptr);
        CHECK(driver()->calls.empty());
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    managed_free(p, KiB, 0, nullptr);
    CHECK(driver()->memory.empty());
}

// A process forks while other threads hold whatever locks there are.
void forked_among_threads() {
    void *p = managed_malloc(KiB, 0, nullptr);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&] {
            while (!stop) managed_free(managed_malloc(KiB, 0, nullptr), KiB, 0, nullptr);
        });
    for (int i = 0; i < 50; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20); // a lock that is never released would hold it for ever
            managed_free(p, KiB, 0, nullptr);
            managed_free(reinterpret_cast<void *>(0x1000), KiB, 0, nullptr);
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    stop = true;
    for (auto &t : threads) t.join();
    managed_free(p, KiB, 0, nullptr);
    CHECK(driver()->memory.empty());
}

// A process that forks before it uses CUDA may use it in the child.
void forked_before_use() {
    pid_t child = fork();
    if (child == 0) {
        managed_free(managed_malloc(KiB, 0, nullptr), KiB, 0, nullptr);
        _exit(driver()->memory.empty() ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void many_threads() {
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; t++)
        threads.emplace_back([t] {
            std::vector<void *> mine;
            for (int i = 0; i < 300; i++) {
                mine.push_back(managed_malloc(KiB * (1 + i % 7), t % 2, nullptr));
                if (i % 3 == 0) {
                    managed_free(mine.front(), KiB, t % 2, nullptr);
                    mine.erase(mine.begin());
                }
            }
            for (void *p : mine) managed_free(p, KiB, t % 2, nullptr);
        });
    for (auto &t : threads) t.join();
    CHECK(driver()->memory.empty() && driver()->retained == 2);
    CHECK(driver()->count("cuMemAllocManaged") == 2400);
}

// Memory freed when the driver, and this library's destructors, are through.
void *leftover;
void free_leftover() {
    if (!leftover) return;
    CHECK(driver()->ended);
    managed_free(leftover, KiB, 0, nullptr);
}
void freed_at_exit() { leftover = managed_malloc(KiB, 0, nullptr); }

void first_form() { placement(); }

// The loader would wait at it for a writer.
void named_pipe() {
    CHECK(has(error(KiB, 0, nullptr), "not a regular file"));
    unlink(getenv("CUVMM_LIBCUDA"));
}

void no_library() {
    CHECK(has(error(KiB, 0, nullptr), "CUVMM_LIBCUDA"));
    managed_free(reinterpret_cast<void *>(0), 0, 0, nullptr);
    CHECK(has(error(KiB, 0, nullptr), "cannot be opened")); // asked again, it says it again
}

void no_driver() { CHECK(has(error(KiB, 0, nullptr), "is not a CUDA driver")); }

void init_fails() {
    driver()->results["cuInit"] = 3;
    CHECK(has(error(KiB, 0, nullptr), "cuInit returned 3") && has(error(KiB, 0, nullptr), "spawn"));
    driver()->results.clear();
    managed_free(managed_malloc(KiB, 0, nullptr), KiB, 0, nullptr);
}

const struct Case {
    const char *name;
    void (*run)();
    const char *errors; // all that it writes to standard error
} cases[] = {
    {"placement", placement, ""},
    {"waits before free", waits_before_free, ""},
    {"thread as found", thread_as_found, ""},
    {"out of memory", out_of_memory, ""},
    {"limits of the host", limits_of_the_host, ""},
    {"integrated", integrated, ""},
    {"spills to the host", spills_to_the_host, ""},
    {"sizes", sizes, ""},
    {"capture refused", capture_refused, ""},
    {"capture elsewhere", capture_elsewhere, ""},
    {"capture of a blocking stream", capture_of_a_blocking_stream, ""},
    {"advice fails", advice_fails,
     "cuvmm: warning: setting the preferred location of managed memory (1.000 GiB): 101 (CUDA_ERROR_FAKE); it stays usable, but may lie in the host's memory. Later failures are not reported\n"},
    {"no concurrent access", no_concurrent_access, ""},
    {"no managed memory", no_managed_memory, ""},
    {"unknown pointers", unknown_pointers,
     "cuvmm: warning: managed_free of 0x1000, which is not a live allocation of managed_malloc: nothing was done\n"},
    {"free fails", free_fails, "cuvmm: warning: managed memory was not freed: 700 (CUDA_ERROR_FAKE). Later failures are not reported\n"},
    {"driver ended", driver_ended, ""},
    {"forked", forked, ""},
    {"forked among threads", forked_among_threads, ""},
    {"forked before use", forked_before_use, ""},
    {"many threads", many_threads, ""},
    {"freed at exit", freed_at_exit, ""},
    {"first form", first_form, ""},
    {"no library", no_library, ""},
    {"no driver", no_driver, ""},
    {"named pipe", named_pipe, ""},
    {"init fails", init_fails, ""},
};

template <class F> void symbol(void *library, const char *name, F &f) {
    f = reinterpret_cast<F>(dlsym(library, name));
    CHECK(f);
}

void *open_library(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) printf("%s\n", dlerror());
    CHECK(library);
    return library;
}

int run_case(const Case &c, char **files) {
    // What is not there, and what is no driver.
    const char *stand_in = files[1], *name = c.name;
    if (!strcmp(name, "first form")) stand_in = files[2];
    setenv("CUVMM_LIBCUDA", !strcmp(name, "no library") ? "/nonexistent/libcuda.so.1" : !strcmp(name, "no driver") ? files[0] : stand_in, 1);
    char pipe[] = "/tmp/managed_testXXXXXX";
    if (!strcmp(name, "named pipe")) CHECK(mktemp(pipe) && mkfifo(pipe, 0600) == 0 && setenv("CUVMM_LIBCUDA", pipe, 1) == 0);
    void *library = open_library(files[0]), *fake = open_library(stand_in);
    symbol(library, "managed_malloc", managed_malloc);
    symbol(library, "managed_free", managed_free);
    symbol(fake, "fake", driver);
    symbol(fake, "fake_set_thread", set_thread);
    symbol(fake, "fake_context", context);
    symbol(fake, "fake_depth", depth);
    symbol(fake, "fake_mode", mode);
    c.run();
    return 0;
}

bool passes(const Case &c, char **argv) {
    system_files({{"/proc/meminfo", "MemAvailable: 67108864 kB\n"}});
    char path[] = "/tmp/managed_testXXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    unlink(path);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(fd, 2);
        execl("/proc/self/exe", argv[0], argv[1], argv[2], argv[3], c.name, nullptr);
        _exit(127);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    std::string errors;
    char buffer[4096];
    lseek(fd, 0, SEEK_SET);
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) errors.append(buffer, n);
    close(fd);
    bool ok = status == 0 && errors == c.errors;
    printf("%s %s\n", ok ? "ok  " : "FAIL", c.name);
    if (!ok) printf("status %d, standard error:\n%s", status, errors.c_str());
    return ok;
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "usage: managed_test LIBRARY FAKE FAKE_FIRST_FORM [CASE]\n"), 2;
    atexit(free_leftover); // registered before the libraries are loaded, so called after theirs
    bool ok = true;
    for (const Case &c : cases) {
        if (argc == 4)
            ok = passes(c, argv) && ok;
        else if (!strcmp(argv[4], c.name))
            return run_case(c, argv + 1);
    }
    return argc == 4 && ok ? 0 : 1;
}
