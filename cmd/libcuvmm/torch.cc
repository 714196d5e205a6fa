//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The functions that PyTorch's pluggable allocator takes. PyTorch's headers are not
// needed: its types here are a pair of integers, and a std::function that is passed
// by value.
//
// PyTorch does not look at what an allocation returns, so one that fails throws;
// PyTorch makes a RuntimeError of it, whose text begins as its own does.
#include "front.h"

#include <sys/types.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using Mempool = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(void *)>;

struct Begun {
	int device;
	Mempool id;
	uint64_t arena;
	std::shared_ptr<Filter> filter;
};

std::mutex mu;
std::vector<uint64_t> pools;                          // by device; under mu until it is filled
std::atomic<const uint64_t *> by_device{nullptr};     // the same, for all calls
std::atomic<int> devices{0};
std::map<std::pair<int, Mempool>, uint64_t> arenas;   // under mu
std::vector<Begun> begun;                             // under mu
std::atomic<int> begun_count{0};
std::atomic<bool> ending{false};

struct Error : cuvmm_error {
	Error() { size = sizeof(cuvmm_error), status = CUVMM_OK, message[0] = 0; }
};

[[noreturn]] void fail(const Error &e) {
	throw std::runtime_error(e.message);
}

// pool_of is the device's pool, made when it is first needed.
uint64_t pool_of(int device) {
	const uint64_t *all = by_device.load(std::memory_order_acquire);
	if (device >= 0 && device < devices.load(std::memory_order_acquire) && all[device] != 0) return all[device];
	std::lock_guard<std::mutex> lock(mu);
	if (device < 0 || device >= 1024) throw std::invalid_argument("cuvmm: device " + std::to_string(device));
	if (pools.empty()) pools.assign(1024, 0);
	if (pools[device] == 0) {
		cuvmm_pool_options o{sizeof o, device, 0};
		Error e;
		if (cuvmm_pool_open(&o, &pools[device], &e) != CUVMM_OK) fail(e);
	}
	by_device.store(pools.data(), std::memory_order_release);
	devices.store(1024, std::memory_order_release);
	return pools[device];
}

// arena_of is the arena of the capture that the stream takes part in, or 0. The
// filters are PyTorch's, and are called without a lock.
uint64_t arena_of(int device, void *stream) {
	if (begun_count.load(std::memory_order_acquire) == 0) return 0;
	std::vector<Begun> all;
	{
		std::lock_guard<std::mutex> lock(mu);
		all = begun;
	}
	for (const Begun &b : all)
		if (b.device == device && (*b.filter)(stream)) return b.arena;
	return 0;
}

}  // namespace

extern "C" {

void *cuvmm_torch_alloc(ssize_t size, int device, void *stream) {
	if (size == 0) return nullptr;
	if (size < 0) throw std::invalid_argument("cuvmm: a negative size");
	if (cuvmm_forked()) {
		Error e;
		cuvmm_alloc(0, 1, nullptr, 0, nullptr, &e);
		fail(e);
	}
	void *block = nullptr;
	Error e;
	if (cuvmm_alloc(pool_of(device), size, stream, arena_of(device, stream), &block, &e) != CUVMM_OK) fail(e);
	return block;
}

void cuvmm_torch_free(void *block, ssize_t, int device, void *) {
	if (block == nullptr || ending || cuvmm_forked()) return;
	Error e;
	if (cuvmm_free(pool_of(device), block, &e) != CUVMM_OK && e.status != CUVMM_LOST) fprintf(stderr, "cuvmm: %s\n", e.message);
}

void cuvmm_torch_record_stream(void *block, void *stream) {
	if (block == nullptr || cuvmm_forked()) return;
	const uint64_t *all = by_device.load(std::memory_order_acquire);
	if (all == nullptr) return;
	for (int i = 0; i < 1024; i++) {  // the pool that has the block takes it, and the others ignore it
		if (all[i] == 0) continue;
		size_t n;
		if (cuvmm_find(all[i], block, &n, nullptr) != CUVMM_OK) continue;
		Error e;
		if (cuvmm_use(all[i], block, stream, &e) != CUVMM_OK) fail(e);
		return;
	}
}

void *cuvmm_torch_base_alloc(void *block, size_t *size) {
	const uint64_t *all = by_device.load(std::memory_order_acquire);
	for (int i = 0; all != nullptr && i < 1024; i++)
		if (all[i] != 0 && cuvmm_find(all[i], block, size, nullptr) == CUVMM_OK) return block;
	throw std::runtime_error("cuvmm: no block begins at that address");
}

void cuvmm_torch_init(int) {}

void cuvmm_torch_reset(void) {
	const uint64_t *all = by_device.load(std::memory_order_acquire);
	for (int i = 0; all != nullptr && i < 1024; i++) {
		uint64_t freed;
		if (all[i] != 0) cuvmm_trim(all[i], &freed, nullptr);
	}
}

// The two functions of a MemPool: null is out of memory there, and PyTorch raises
// its own error.
void *cuvmm_torch_segment_alloc(ssize_t size, int device, void *) {
	void *segment = nullptr;
	if (size <= 0 || cuvmm_forked()) return nullptr;
	Error e;
	int32_t status = cuvmm_segment_alloc(pool_of(device), size, &segment, &e);
	if (status != CUVMM_OK && status != CUVMM_OUT_OF_MEMORY) fail(e);
	return segment;
}

void cuvmm_torch_segment_free(void *segment, ssize_t, int device, void *stream) {
	if (segment == nullptr || ending || cuvmm_forked()) return;
	Error e;
	if (cuvmm_segment_free(pool_of(device), segment, stream, &e) != CUVMM_OK) fprintf(stderr, "cuvmm: %s\n", e.message);
}

void cuvmm_torch_memory_fraction(double fraction, int device) {
	size_t total = 0;
	Error e;
	if (cuvmm_total_memory(pool_of(device), &total, &e) != CUVMM_OK) fail(e);
	if (cuvmm_set_limit(pool_of(device), fraction >= 1 ? 0 : int64_t(double(total) * fraction), &e) != CUVMM_OK) fail(e);
}

// cuvmm_torch_limit is the device's limit in bytes; 0 is none.
int32_t cuvmm_torch_limit(int device, int64_t bytes, cuvmm_error *e) {
	try {
		return cuvmm_set_limit(pool_of(device), bytes, e);
	} catch (const std::exception &x) {
		return cuvmm_say(e, CUVMM_FAILED, x.what());
	}
}

// cuvmm_torch_pool is the device's pool, for the calls of libcuvmm.h.
int32_t cuvmm_torch_pool(int device, uint64_t *pool, cuvmm_error *e) {
	try {
		*pool = pool_of(device);
		return CUVMM_OK;
	} catch (const std::exception &x) {
		return cuvmm_say(e, CUVMM_FAILED, x.what());
	}
}

void cuvmm_torch_begin(int device, Mempool id, Filter filter) {
	uint64_t pool = pool_of(device);
	std::lock_guard<std::mutex> lock(mu);
	uint64_t &arena = arenas[{device, id}];
	if (arena == 0) {
		Error e;
		if (cuvmm_arena_open(pool, &arena, &e) != CUVMM_OK) fail(e);
	}
	begun.push_back({device, id, arena, std::make_shared<Filter>(std::move(filter))});
	begun_count.store(int(begun.size()), std::memory_order_release);
}

void cuvmm_torch_end(int device, Mempool id) {
	uint64_t arena = 0;
	{
		std::lock_guard<std::mutex> lock(mu);
		for (size_t i = begun.size(); i-- > 0;)
			if (begun[i].device == device && begun[i].id == id) {
				arena = begun[i].arena;
				begun.erase(begun.begin() + i);
				break;
			}
		begun_count.store(int(begun.size()), std::memory_order_release);
	}
	Error e;
	if (arena != 0 && cuvmm_arena_end(pool_of(device), arena, &e) != CUVMM_OK) fail(e);
}

void cuvmm_torch_release(int device, Mempool id) {
	uint64_t arena = 0;
	{
		std::lock_guard<std::mutex> lock(mu);
		auto at = arenas.find({device, id});
		if (at == arenas.end()) return;
		arena = at->second;
		arenas.erase(at);
	}
	if (ending || cuvmm_forked()) return;
	Error e;
	if (cuvmm_arena_release(pool_of(device), arena, &e) != CUVMM_OK) fprintf(stderr, "cuvmm: %s\n", e.message);
}

// cuvmm_torch_ending says that the process ends: what is freed from now on goes
// with it.
void cuvmm_torch_ending(void) { ending = true; }

}  // extern "C"
