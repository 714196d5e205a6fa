//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

// The functions that PyTorch's pluggable allocator takes. They need none of PyTorch's
// headers: the types of its setters are a pair of integers, and a std::function that is
// passed by value.
//
// PyTorch does not check what an allocation returns, so one that fails throws. PyTorch
// turns the exception into a RuntimeError. A shim that is compiled against PyTorch's
// headers can throw PyTorch's own error instead: see cuvmm_torch_throw_with.
#include "front.h"

#include <signal.h>
#include <sys/types.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using Mempool = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(void *)>;
using Throw = void (*)(const char *message);
using Allocated = void (*)(int device, void *block);
using Alloc = void *(*)(ssize_t size, int device, void *stream);

// Begun is a capture, or several, whose streams a filter of PyTorch's recognises.
struct Begun {
	int device;
	Mempool id;
	uint64_t arena;
	std::shared_ptr<Filter> filter;
};

constexpr int max_devices = 128, max_tags = 64;

struct alignas(64) State {
	// What every call reads, in one line of the processor's caches.
	std::atomic<int> begun_count{0}; // of begun; written under capturing
	std::atomic<bool> ending{false};
	std::atomic<Allocated> allocated{nullptr};
	std::atomic<uint64_t> pools[max_devices]{}; // 0 until the device's pool is opened

	std::atomic<int> end{0}; // one more than the last device with a pool
	std::atomic<Throw> throw_with{nullptr};

	std::mutex opening;
	uint64_t history = 0;       // events that a new pool keeps; under opening
	std::string tags[max_tags]; // of segments, the first the empty one; set once, under opening, before its function is known

	std::mutex capturing; // over the fields that follow
	std::map<std::pair<int, Mempool>, uint64_t> arenas;
	std::vector<Begun> begun;
};

// Kept is never destroyed: threads allocate and free until the very end of the process.
union Kept {
	State state;
	Kept() : state() {}
	~Kept() {}
} kept;

State &state = kept.state;

struct Error : cuvmm_error {
	Error() { size = sizeof(cuvmm_error), status = CUVMM_OK, message[0] = 0; }
};

[[noreturn]] void fail(const Error &e) {
	Throw t = state.throw_with.load(std::memory_order_acquire);
	if (t != nullptr && e.status == CUVMM_OUT_OF_MEMORY) t(e.message);
	throw std::runtime_error(e.message);
}

// report prints the error of a call that cannot throw: PyTorch frees in destructors.
void report(const Error &e) {
	if (e.status != CUVMM_LOST) fprintf(stderr, "cuvmm: %s\n", e.message);
}

// opened returns the device's pool, or 0.
uint64_t opened(int device) {
	return device < 0 || device >= max_devices ? 0 : state.pools[device].load(std::memory_order_acquire);
}

// pool_of returns the device's pool, and opens it if it is needed for the first time.
uint64_t pool_of(int device) {
	if (uint64_t pool = opened(device)) return pool;
	if (device < 0 || device >= max_devices) throw std::invalid_argument("cuvmm: device " + std::to_string(device) + " is not one of 0 to " + std::to_string(max_devices - 1));
	std::lock_guard<std::mutex> lock(state.opening);
	if (uint64_t pool = opened(device)) return pool;
	cuvmm_pool_options o{sizeof o, device, 0, nullptr};
	uint64_t pool = 0;
	Error e;
	if (cuvmm_pool_open(&o, &pool, &e) != CUVMM_OK) fail(e);
	if (state.history != 0 && cuvmm_record_history(pool, state.history, &e) != CUVMM_OK) {
		cuvmm_pool_close(pool, nullptr);
		fail(e);
	}
	state.pools[device].store(pool, std::memory_order_release);
	if (state.end.load() <= device) state.end.store(device + 1);
	return pool;
}

// each calls f with every pool, until f returns true.
template <class F> void each(F f) {
	for (int i = 0, end = state.end.load(); i < end; i++)
		if (uint64_t pool = opened(i))
			if (f(pool)) return;
}

// arena_of returns the arena of the capture in which the stream takes part, or 0. The
// filters are PyTorch's code, so no lock is held over them.
uint64_t arena_of(int device, void *stream) {
	if (state.begun_count.load(std::memory_order_acquire) == 0) return 0;
	std::vector<Begun> all;
	{
		std::lock_guard<std::mutex> lock(state.capturing);
		all = state.begun;
	}
	for (const Begun &b : all)
		if (b.device == device && (*b.filter)(stream)) return b.arena;
	return 0;
}

void refuse_child() {
	if (!cuvmm_forked()) return;
	Error e;
	cuvmm_refuse_child(&e);
	fail(e);
}

// noted returns a block whose allocation PyTorch's side has noted.
void *noted(int device, void *block) {
	Allocated note = state.allocated.load(std::memory_order_acquire);
	if (note != nullptr && !state.ending) note(device, block); // which may wait for Python
	return block;
}

// alloc_slowly serves what the cache does not.
[[gnu::noinline]] void *alloc_slowly(ssize_t size, int device, void *stream) {
	if (size == 0) return nullptr;
	if (size < 0) throw std::invalid_argument("cuvmm: a request of " + std::to_string(size) + " bytes");
	refuse_child();
	void *block = nullptr;
	Error e;
	if (cuvmm_alloc(pool_of(device), size, stream, arena_of(device, stream), &block, &e) != CUVMM_OK) fail(e);
	return noted(device, block);
}

// leave does with a block what the cache cannot do alone.
[[gnu::noinline]] void leave(int device, void *block, const cuvmm_leaving &rest) {
	Error e;
	if (cuvmm_leave(opened(device), block, &rest, &e) != CUVMM_OK) report(e);
}

// segment_alloc serves a MemPool. There null is out of memory, and PyTorch raises its own error.
void *segment_alloc(ssize_t size, int device, const char *tag) {
	if (size <= 0) return nullptr;
	refuse_child();
	void *segment = nullptr;
	Error e;
	int32_t status = cuvmm_segment_alloc(pool_of(device), size, tag, &segment, &e);
	if (status != CUVMM_OK && status != CUVMM_OUT_OF_MEMORY) fail(e);
	return segment;
}

// PyTorch says nothing of the MemPool to the function that allocates for it, so each tag has a
// function of its own.
template <int N> void *segment_alloc_of(ssize_t size, int device, void *) { return segment_alloc(size, device, state.tags[N].c_str()); }

template <int... N> struct Allocs {
	static constexpr Alloc all[] = {segment_alloc_of<N>...};
};
template <int... N> constexpr auto allocs_of(std::integer_sequence<int, N...>) { return Allocs<N...>::all; }
constexpr const Alloc *segment_allocs = allocs_of(std::make_integer_sequence<int, max_tags>());

int32_t caught(cuvmm_error *e, const std::exception &x) { return cuvmm_say(e, CUVMM_FAILED, x.what()); }

}  // namespace

extern "C" {

__attribute__((hot)) void *cuvmm_torch_alloc(ssize_t size, int device, void *stream) {
	if (size <= 0 || state.begun_count.load(std::memory_order_acquire) != 0) return alloc_slowly(size, device, stream);
	void *block = cuvmm_serve(opened(device), size, stream);
	return block == nullptr ? alloc_slowly(size, device, stream) : noted(device, block);
}

__attribute__((hot)) void cuvmm_torch_free(void *block, ssize_t, int device, void *) {
	if (block == nullptr || state.ending) return;
	cuvmm_leaving rest;
	if (!cuvmm_keep(opened(device), block, &rest)) leave(device, block, rest);
}

void cuvmm_torch_record_stream(void *block, void *stream) {
	if (block == nullptr || cuvmm_forked()) return;
	each([&](uint64_t pool) { // the pools that do not have the block ignore it
		Error e;
		if (cuvmm_use(pool, block, stream, &e) != CUVMM_OK) fail(e);
		return false;
	});
}

void *cuvmm_torch_base_alloc(void *block, size_t *size) {
	bool found = false;
	each([&](uint64_t pool) {
		size_t bytes;
		found = cuvmm_find(pool, block, &bytes, nullptr) == CUVMM_OK;
		if (found && size != nullptr) *size = bytes;
		return found;
	});
	if (!found) throw std::runtime_error("cuvmm: no block begins at that address");
	return block;
}

void cuvmm_torch_init(int) {}

// cuvmm_torch_reset is empty_cache.
void cuvmm_torch_reset(void) {
	if (cuvmm_forked()) return;
	each([](uint64_t pool) {
		uint64_t freed;
		cuvmm_trim(pool, &freed, nullptr);
		return false;
	});
}

// cuvmm_torch_segment_alloc returns the function of a MemPool that allocates segments with a tag,
// or NULL if there are too many tags. cuvmm_torch_segment_free frees all of them.
Alloc cuvmm_torch_segment_alloc(const char *tag) {
	std::lock_guard<std::mutex> lock(state.opening);
	if (*tag == 0) return segment_allocs[0];
	for (int n = 1; n < max_tags; n++) {
		if (state.tags[n].empty()) state.tags[n] = tag;
		if (state.tags[n] == tag) return segment_allocs[n];
	}
	return nullptr;
}

void cuvmm_torch_segment_free(void *segment, ssize_t, int device, void *stream) {
	if (segment == nullptr || state.ending || cuvmm_forked()) return;
	Error e;
	if (cuvmm_segment_free(opened(device), segment, stream, &e) != CUVMM_OK) report(e);
}

void cuvmm_torch_memory_fraction(double fraction, int device) {
	if (!(fraction > 0 && fraction <= 1)) throw std::invalid_argument("cuvmm: a memory fraction of " + std::to_string(fraction) + ": use more than 0 and at most 1");
	refuse_child();
	uint64_t pool = pool_of(device);
	size_t total = 0;
	Error e;
	if (cuvmm_total_memory(pool, &total, &e) != CUVMM_OK) fail(e);
	if (cuvmm_set_limit(pool, fraction == 1 ? 0 : int64_t(double(total) * fraction), &e) != CUVMM_OK) fail(e);
}

// cuvmm_torch_limit limits the device's pool to a number of bytes; 0 is no limit.
int32_t cuvmm_torch_limit(int device, int64_t bytes, cuvmm_error *e) {
	if (cuvmm_forked()) return cuvmm_refuse_child(e); // whose locks other threads of the parent may have held
	try {
		return cuvmm_set_limit(pool_of(device), bytes, e);
	} catch (const std::exception &x) {
		return caught(e, x);
	}
}

// cuvmm_torch_history is cuvmm_record_history for every pool, including pools that are
// opened later.
int32_t cuvmm_torch_history(uint64_t events, cuvmm_error *e) {
	if (cuvmm_forked()) return cuvmm_refuse_child(e);
	int32_t status = cuvmm_check_events(events, e);
	if (status != CUVMM_OK) return status;
	std::lock_guard<std::mutex> lock(state.opening);
	each([&](uint64_t pool) { return (status = cuvmm_record_history(pool, events, e)) != CUVMM_OK; });
	if (status == CUVMM_OK) state.history = events;
	return status;
}

// cuvmm_torch_pool returns the device's pool for the calls of libcuvmm.h, or 0 if the
// device has none yet.
uint64_t cuvmm_torch_pool(int device) { return opened(device); }

// cuvmm_torch_open is cuvmm_torch_pool, which opens the pool if there is none.
int32_t cuvmm_torch_open(int device, uint64_t *pool, cuvmm_error *e) {
	if (cuvmm_forked()) return cuvmm_refuse_child(e);
	try {
		*pool = pool_of(device);
		return CUVMM_OK;
	} catch (const std::exception &x) {
		return caught(e, x);
	}
}

// cuvmm_torch_throw_with sets the function that throws PyTorch's out-of-memory error, and
// does not return. Without one the error is a std::runtime_error.
void cuvmm_torch_throw_with(Throw t) { state.throw_with.store(t, std::memory_order_release); }

// cuvmm_torch_allocated sets a function that is called behind each allocation, or none.
void cuvmm_torch_allocated(Allocated note) { state.allocated.store(note, std::memory_order_release); }

void cuvmm_torch_begin(int device, Mempool id, Filter filter) {
	refuse_child();
	uint64_t pool = pool_of(device);
	std::lock_guard<std::mutex> lock(state.capturing);
	uint64_t &arena = state.arenas[{device, id}];
	if (arena == 0) {
		Error e;
		if (cuvmm_arena_open(pool, &arena, &e) != CUVMM_OK) fail(e);
	}
	state.begun.push_back({device, id, arena, std::make_shared<Filter>(std::move(filter))});
	state.begun_count.store(int(state.begun.size()), std::memory_order_release);
}

void cuvmm_torch_end(int device, Mempool id) {
	refuse_child();
	uint64_t arena = 0;
	std::shared_ptr<Filter> last; // destroyed without the lock
	{
		std::lock_guard<std::mutex> lock(state.capturing);
		std::vector<Begun> &begun = state.begun;
		for (size_t i = begun.size(); i-- > 0;)
			if (begun[i].device == device && begun[i].id == id) {
				arena = begun[i].arena;
				last = begun[i].filter;
				begun.erase(begun.begin() + i);
				break;
			}
		state.begun_count.store(int(begun.size()), std::memory_order_release);
	}
	Error e;
	if (arena != 0 && cuvmm_arena_end(opened(device), arena, &e) != CUVMM_OK) fail(e);
}

void cuvmm_torch_release(int device, Mempool id) {
	if (state.ending || cuvmm_forked()) return;
	uint64_t arena = 0;
	{
		std::lock_guard<std::mutex> lock(state.capturing);
		auto at = state.arenas.find({device, id});
		if (at == state.arenas.end()) return;
		arena = at->second;
		state.arenas.erase(at);
	}
	Error e;
	if (cuvmm_arena_release(opened(device), arena, &e) != CUVMM_OK) report(e);
}

// cuvmm_torch_ending says that the process is about to end: what would be freed from now
// on goes with it. The calling thread, Python's main one, gets an alternate signal stack for later
// calls: Go's runtime goes on with one that it finds, and Python frees that of faulthandler before
// the process has ended.
void cuvmm_torch_ending(void) {
	if (state.ending.exchange(true)) return;
	alignas(16) static char stack[64 << 10];
	stack_t own{};
	own.ss_sp = stack;
	own.ss_size = sizeof stack;
	sigaltstack(&own, nullptr);
}

}  // extern "C"
