// Calls the functions that PyTorch takes as PyTorch does, in C++: exceptions and a std::function pass between the two.
#include <dlfcn.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using Mempool = std::pair<unsigned long long, unsigned long long>;
using Alloc = void *(ssize_t, int, void *);
using Filter = std::function<bool(void *)>;

struct OwnError {
	std::string text;
};

static void *library;

template <class T> static T *function(const char *name) {
	void *p = dlsym(library, name);
	if (p == nullptr) fprintf(stderr, "%s is missing\n", name), exit(1);
	return reinterpret_cast<T *>(p);
}

static void check(bool ok, const char *what) {
	if (!ok) fprintf(stderr, "not so: %s\n", what), exit(1);
}

template <class F> static std::string text_of(F f) {
	try {
		f();
	} catch (const OwnError &e) {
		return "own: " + e.text;
	} catch (const std::exception &e) {
		return e.what();
	}
	return "no error";
}

static bool begins(const std::string &text, const char *with) { return text.compare(0, strlen(with), with) == 0; }

// Frees behind all destructors of this program, as PyTorch's threads may.
static struct Late {
	void *block = nullptr;
	~Late() {
		if (block != nullptr) function<void(void *, ssize_t, int, void *)>("cuvmm_torch_free")(block, 100, 0, nullptr);
	}
} late;

int main(int, char **argv) {
	library = dlopen(argv[1], RTLD_NOW);
	if (library == nullptr) return fprintf(stderr, "%s\n", dlerror()), 1;
	auto alloc = function<void *(ssize_t, int, void *)>("cuvmm_torch_alloc");
	auto free = function<void(void *, ssize_t, int, void *)>("cuvmm_torch_free");
	auto record = function<void(void *, void *)>("cuvmm_torch_record_stream");
	auto base = function<void *(void *, size_t *)>("cuvmm_torch_base_alloc");
	auto fraction = function<void(double, int)>("cuvmm_torch_memory_fraction");
	auto begin = function<void(int, Mempool, Filter)>("cuvmm_torch_begin");
	auto end = function<void(int, Mempool)>("cuvmm_torch_end");
	auto release = function<void(int, Mempool)>("cuvmm_torch_release");
	auto throw_with = function<void(void (*)(const char *))>("cuvmm_torch_throw_with");
	auto alloc_of_tag = function<Alloc *(const char *)>("cuvmm_torch_segment_alloc");
	auto segment_free = function<void(void *, ssize_t, int, void *)>("cuvmm_torch_segment_free");
	function<void()>("cuvmm_torch_reset")(); // before there is a pool

	check(alloc(0, 0, nullptr) == nullptr, "0 bytes are null");
	free(nullptr, 0, 0, nullptr);
	check(begins(text_of([&] { alloc(-1, 0, nullptr); }), "cuvmm: a request of -1 bytes"), "a negative size");
	for (int device : {-1, 77, 128, 1 << 30}) check(text_of([&] { alloc(100, device, nullptr); }) != "no error", "an absent device");
	late.block = alloc(100, 0, nullptr);

	void *block = alloc(5000, 0, nullptr);
	size_t size = 0;
	check(base(block, &size) == block && size == 5000, "the base of a block");
	check(text_of([&] { base(&size, &size); }) == "cuvmm: no block begins at that address", "the base of something else");
	record(block, nullptr);
	record(&size, nullptr); // foreign pointers are ignored
	free(block, 5000, 0, nullptr);

	std::string text = text_of([&] { alloc(ssize_t(1) << 45, 0, nullptr); });
	check(begins(text, "CUDA out of memory. Tried to allocate 32768.00 GiB. GPU 0"), text.c_str());
	throw_with([](const char *message) { throw OwnError{message}; });
	text = text_of([&] { alloc(ssize_t(1) << 45, 0, nullptr); });
	check(begins(text, "own: CUDA out of memory."), text.c_str());
	check(begins(text_of([&] { alloc(-1, 0, nullptr); }), "cuvmm:"), "other errors stay");
	throw_with(nullptr);

	for (double f : {0.0, -1.0, 1.5, 0.0 / 0.0}) check(begins(text_of([&] { fraction(f, 0); }), "cuvmm: a memory fraction of"), "a wrong fraction");
	fraction(0.5, 0);
	fraction(1, 0);

	// A filter is copied, called without a lock, and destroyed.
	int calls = 0;
	auto count = std::make_shared<int>(0);
	begin(0, {0, 1}, [&calls, alloc, free, count](void *stream) {
		if (++calls == 1) free(alloc(50, 0, stream), 50, 0, stream);
		return false;
	});
	check(count.use_count() > 1, "the filter is kept");
	free(alloc(100, 0, nullptr), 100, 0, nullptr);
	check(calls >= 2, "the filter is asked, in a request of its own too");
	end(0, {0, 1});
	check(count.use_count() == 1, "the filter is gone");
	end(0, {0, 1});
	release(0, {0, 1});
	release(0, {0, 1});
	int before = calls;
	free(alloc(100, 0, nullptr), 100, 0, nullptr);
	check(calls == before, "the filter is asked no more");

	Alloc *segment_alloc = alloc_of_tag("");
	void *segment = segment_alloc(20 << 20, 0, nullptr);
	check(segment != nullptr && segment_alloc(ssize_t(1) << 45, 0, nullptr) == nullptr && segment_alloc(0, 0, nullptr) == nullptr, "segments");
	segment_free(segment, 20 << 20, 0, nullptr);

	Alloc *weights = alloc_of_tag("weights"), *cache = alloc_of_tag("cache");
	check(weights == alloc_of_tag("weights") && weights != cache && weights != segment_alloc, "a function for each tag");
	segment = weights(2 << 20, 0, nullptr);
	const char *tag = "weights";
	check(function<int32_t(const char **, size_t, void *)>("cuvmm_discard")(&tag, 1, nullptr) == 0, "a tag sleeps");
	text = text_of([&] { weights(2 << 20, 0, nullptr); });
	check(text.find("tag \"weights\", which sleeps") != std::string::npos, text.c_str());
	segment_free(cache(2 << 20, 0, nullptr), 2 << 20, 0, nullptr);
	segment_free(segment, 2 << 20, 0, nullptr);
	check(function<int32_t(const char **, size_t, int64_t, void *)>("cuvmm_resume")(&tag, 1, 0, nullptr) == 0, "a tag is awake");
	for (int i = 2; i < 62; i++) alloc_of_tag(std::to_string(i).c_str());
	check(alloc_of_tag("last") != nullptr && alloc_of_tag("one more") == nullptr, "63 tags, and the empty one");

	std::vector<std::thread> threads;
	for (int t = 0; t < 8; t++)
		threads.emplace_back([&, t] {
			for (int i = 1; i < 300; i++) free(alloc(1000 * i + t, 0, nullptr), 1000 * i + t, 0, nullptr);
		});
	for (auto &t : threads) t.join();

	void *inherited = alloc(100, 0, nullptr);
	pid_t child = fork();
	if (child == 0) {
		free(inherited, 100, 0, nullptr);
		std::string refused = text_of([&] { alloc(100, 0, nullptr); });
		_exit(refused.find("spawn") != std::string::npos && text_of([&] { begin(0, {0, 9}, [](void *) { return true; }); }) == refused ? 7 : 1);
	}
	int status = 0;
	check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "a child of fork");
	free(inherited, 100, 0, nullptr);
	puts("ok");
	return 0;
}
