// What the test sees of the stand-in driver: its state, and switches that make
// it fail.

#ifndef CUVMM_FAKE_DRIVER_H
#define CUVMM_FAKE_DRIVER_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct CUstream_st {
    bool blocking = false;   // the legacy stream waits for it
    int status = 0;          // 1 is captured, 2 its capture was killed
    int mode = 0;            // of the capture: 0 global, 1 thread-local, 2 relaxed
    std::thread::id capturer;
};

struct Fake {
    std::recursive_mutex mutex;
    // Switches.
    std::map<std::string, int> results; // what an entry point returns instead
    bool ended = false;                 // every call returns that the driver has shut down
    bool concurrent = true, managed = true, integrated = false;
    int granted = 0x7fffffff;           // how many allocations succeed
    size_t free = size_t{100} << 30, total = size_t{140} << 30;
    std::vector<CUstream_st *> streams;
    // What happened.
    std::vector<std::string> calls;
    std::map<uint64_t, size_t> memory;
    int retained = 0, wrong_context = 0;

    size_t count(const std::string &call) {
        std::lock_guard<std::recursive_mutex> lock(mutex);
        size_t n = 0;
        for (auto &c : calls) n += c.compare(0, call.size(), call) == 0;
        return n;
    }
    void clear() {
        std::lock_guard<std::recursive_mutex> lock(mutex);
        calls.clear();
    }
};

// Exported by the stand-in.
extern "C" {
Fake *fake();
void fake_set_thread(uintptr_t context, unsigned mode); // what the thread is before the library is called
uintptr_t fake_context();
size_t fake_depth();
unsigned fake_mode();
}

#endif
