#!/usr/bin/env python3
"""Replays allocation traces through the pool and through the allocators of other
libraries on one GPU, and compares them in one table.

    pool-peers.py compare -pool ./cuvmm TRACE...         runs all and prints the table
    pool-peers.py compare -results FILE TRACE...         keeps the measurements, too
    pool-peers.py table FILE...                          prints the table of kept ones
    pool-peers.py convert -out FOLDER SNAPSHOT...        makes traces of PyTorch's snapshots

A TRACE is a file in any form that cuvmm replay reads, or a snapshot
that torch.cuda.memory._dump_snapshot wrote while its history was recorded.

Each allocator runs in a process of its own, since PyTorch reads its settings once,
and each trace twice over the same pool, which is new or emptied before. A compiled
loop calls the allocators (PyTorch's through its C++ interface, the driver's pool
directly), and the time is that of the allocating and freeing calls alone, without
that of reading the clock. CuPy's allocator has no compiled interface: it is called
from Python, with the time of the same loop around a call that does nothing
subtracted, and it is no rival in the table. The modes are those of cuvmm replay: idle, behind,
streams, goroutines (threads, here).
"""

import argparse
import array
import ctypes
import gc
import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

MAGIC = b"cuvmmtr\x01"
ALLOC, FREE, USE, SYNC = range(4)
FREED, WAIT = -1, -2
RUN = 256  # operations in a row that a spread trace has on one stream, as in cuvmm replay


class TraceError(Exception):
    pass


class Trace:
    """ops are (block, bytes, stream), with FREED bytes for a free and WAIT for a wait."""

    def __init__(self, name):
        self.name, self.streams, self.ops, self.sizes = name, 1, [], []
        self.live, self.now, self.requested = {}, 0, 0

    def alloc(self, key, size, stream=0):
        """key names the block until it is freed."""
        if key in self.live:
            raise TraceError(f"operation {len(self.ops)}: block {key} is allocated, but lives: free it first")
        self.live[key] = block = len(self.sizes)
        self.sizes.append(size)
        self.ops.append((block, max(size, 1), stream))
        self.now += size
        self.requested = max(self.requested, self.now)

    def free(self, key):
        block = self.live.pop(key, None)
        if block is None:
            raise TraceError(f"operation {len(self.ops)}: block {key} is freed, but is not allocated: remove this free")
        self.ops.append((block, FREED, 0))
        self.now -= self.sizes[block]

    def operations(self):
        return sum(1 for _, size, _ in self.ops if size != WAIT)


def read_trace(path):
    """Reads a trace of any form, or a snapshot."""
    name = os.path.basename(path)
    for end in (".gz", ".json", ".pickle", ".pkl"):
        name = name.removesuffix(end)
    try:
        with open(path, "rb") as f:
            data = f.read()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        if data.startswith(MAGIC):
            return read_binary(data)
        if data.startswith((b"\x80", b"PK")):
            return read_snapshot(data, name)
        if data.lstrip().startswith(b"{"):
            return read_text(data)
        if data.lstrip().startswith(b"["):
            return read_list(data, name)
        raise TraceError("it is neither a trace nor a snapshot: see pool-peers.py -h")
    except (TraceError, OSError, EOFError, ValueError, KeyError, TypeError, IndexError, pickle.UnpicklingError) as e:
        raise SystemExit(f"{path}: {type(e).__name__ + ': ' if not isinstance(e, TraceError) else ''}{e}") from None


def read_list(data, name):
    t = Trace(name)
    for entry in json.loads(data):
        if not (isinstance(entry, list) and len(entry) == 2 and all(type(n) is int and n >= 0 for n in entry)):
            raise TraceError(f"operation {len(t.ops)}: {str(entry)[:40]} is not [block, bytes]: use unsigned integers")
        block, size = entry
        t.alloc(block, size) if size else t.free(block)
    return t


def read_text(data):
    lines = data.decode().splitlines()
    head = json.loads(lines[0])
    t = Trace(head["trace"])
    t.streams = head["streams"]
    for line in lines[1:]:
        op = json.loads(line)
        if op["op"] == "alloc":
            t.alloc(op["id"], op["bytes"], op["stream"])
        elif op["op"] == "free":
            t.free(op["id"])
        elif op["op"] == "sync":
            t.ops.append((0, WAIT, 0))
        else:
            raise TraceError("it uses blocks on other streams, which is not compared with peers")
    return t


def read_binary(data):
    at = len(MAGIC)

    def number():
        nonlocal at
        result = shift = 0
        while True:
            byte = data[at]
            at += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result
            shift += 7

    def text():
        nonlocal at
        n = number()
        at += n
        return data[at - n : at].decode()

    t = Trace(text())
    t.streams = number()
    for _ in range(number()):
        text()
    for _ in range(number()):
        head = number()
        kind, value = head & 3, head >> 2
        if kind == ALLOC:
            stream = number()
            number()  # the tag
            t.alloc(len(t.sizes), value, stream)
        elif kind == FREE:
            t.free(len(t.sizes) - value)
        elif kind == SYNC:
            t.ops.append((0, WAIT, 0))
        else:
            raise TraceError("it uses blocks on other streams, which is not compared with peers")
    if at != len(data):
        raise TraceError("it is longer than its trace")
    return t


class PlainUnpickler(pickle.Unpickler):
    """A snapshot is made of lists, dictionaries, numbers and text. Anything else in
    a pickle could run code."""

    def find_class(self, module, name):
        raise TraceError(f"the pickle names {module}.{name}, which no snapshot of PyTorch's memory has: do not trust it")


def read_snapshot(data, name):
    import io

    snapshot = PlainUnpickler(io.BytesIO(data)).load()
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not traces or not any(traces):
        raise TraceError("the snapshot has no history: call torch.cuda.memory._record_memory_history() before the program")
    t = Trace(name)
    streams = {}
    for e in max(traces, key=len):
        if e["action"] == "alloc":
            t.alloc(e["addr"], e["size"], streams.setdefault(e["stream"], len(streams)))
        elif e["action"] == "free_requested" and e["addr"] in t.live:  # or allocated before the history began
            t.free(e["addr"])
    t.streams = max(len(streams), 1)
    return t


def binary(t):
    out = bytearray(MAGIC)

    def number(n):
        while n >= 0x80:
            out.append(n & 0x7F | 0x80)
            n >>= 7
        out.append(n)

    def text(s):
        b = s.encode()[:255]
        number(len(b))
        out.extend(b)

    text(t.name)
    number(t.streams)
    number(1)
    text("")
    number(len(t.ops))
    taken = 0
    for block, size, stream in t.ops:
        if size == WAIT:
            number(SYNC)
        elif size == FREED:
            number((taken - block) * 4 + FREE)
        else:
            number(t.sizes[block] * 4 + ALLOC)
            number(stream)
            number(0)
            taken += 1
    return bytes(out)


def convert(args):
    os.makedirs(args.out, exist_ok=True)
    for path in args.traces:
        t = read_trace(path)
        to = os.path.join(args.out, t.name.replace("/", "_") + ".trace")
        with open(to, "wb") as f:
            f.write(binary(t))
        print(f"{to}: {t.operations()} operations on {t.streams} streams, at most {t.requested / 2**30:.2f} GiB")
    return 0


class Mode:
    def __init__(self, name, work, spread, threads):
        self.name, self.work, self.spread, self.threads = name, work, spread, threads

    def ops(self, t):
        """The trace as each thread of the mode replays it, (block, bytes, stream) after one
        another, and how many streams it has."""
        spread = self.spread if t.streams == 1 and self.spread > 1 else 0
        flat = array.array("q")
        for i, (block, size, stream) in enumerate(t.ops):
            if size >= 0:
                size = max((t.sizes[block] + self.threads - 1) // self.threads, 1)
                stream = i // RUN % spread if spread else stream
            flat.extend((block, size, stream))
        return flat, spread or t.streams


def modes(many):
    return {m.name: m for m in (Mode("idle", False, 0, 1), Mode("behind", True, 0, 1), Mode("streams", True, many, 1), Mode("goroutines", True, 0, many))}


# The loop that calls the allocators. It is built without PyTorch for the driver's
# own pool, and finds the driver's entry points by itself.
LOOP = r"""
#include <dlfcn.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
#ifdef WITH_TORCH
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace {
struct Location { int type, id; };
struct PoolProps {
    int allocation, handles;
    Location location;
    void* security;
    size_t most;
    unsigned short usage;
    unsigned char reserved[54];
};
static_assert(sizeof(PoolProps) == 88, "the driver's layout");
void* library;
int (*ctx_get)(void**), (*ctx_set)(void*);
int (*stream_create)(void**, unsigned), (*stream_wait)(void*);
int (*set_bytes)(uint64_t, unsigned char, size_t, void*);
int (*pool_create)(void**, const PoolProps*), (*pool_destroy)(void*);
int (*pool_set)(void*, int, void*), (*pool_get)(void*, int, void*);
int (*pool_alloc)(uint64_t*, size_t, void*, void*), (*pool_free)(uint64_t, void*);
void* pool;

template <class F> void find(F& f, const char* name) {
    f = reinterpret_cast<F>(dlsym(library, name));
    if (!f) throw std::runtime_error(std::string("the driver lacks ") + name);
}
void check(int result, const char* what) {
    if (result) throw std::runtime_error(std::string(what) + " returned " + std::to_string(result));
}

struct Driver {
    static uint64_t alloc(size_t n, void* stream) {
        uint64_t p = 0;
        check(pool_alloc(&p, n, pool, stream), "cuMemAllocFromPoolAsync");
        return p;
    }
    static void free(uint64_t p, void* stream) { check(pool_free(p, stream), "cuMemFreeAsync"); }
};
#ifdef WITH_TORCH
struct Torch {
    static uint64_t alloc(size_t n, void* stream) {
        return reinterpret_cast<uint64_t>(c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(n, static_cast<cudaStream_t>(stream)));
    }
    static void free(uint64_t p, void*) { c10::cuda::CUDACachingAllocator::raw_delete(reinterpret_cast<void*>(p)); }
};
#endif

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What two readings of the clock in a row show.
double clock_cost() {
    double least = 1e18;
    for (int batch = 0; batch < 16; batch++) {
        int64_t total = 0;
        for (int i = 0; i < 256; i++) {
            int64_t start = now();
            total += now() - start;
        }
        least = std::min(least, total / 256.0);
    }
    return least;
}

struct Op { int64_t block, bytes, stream; };
struct Pass { double us, longest_us; int64_t longest_bytes, requested; char error[400]; };

// The bytes of live blocks and of requests under way, of all threads together.
std::atomic<int64_t> living, most;

template <class A> void pass(const Op* ops, int64_t n, int64_t blocks, void* const* streams, int64_t count, bool work, Pass* r) {
    struct Block { uint64_t p; int64_t bytes, stream; };
    std::vector<Block> live(blocks, Block{0, 0, 0});
    double cost = clock_cost(), took = 0;
    int64_t i = 0;
    try {
        for (; i < n; i++) {
            const Op& op = ops[i];
            if (op.bytes == -2) {
                for (int64_t s = 0; s < count; s++) check(stream_wait(streams[s]), "cuStreamSynchronize");
                continue;
            }
            Block& b = live[op.block];
            int64_t start, end;
            if (op.bytes >= 0) {
                void* stream = streams[op.stream];
                int64_t all = living += op.bytes, seen = most;
                while (all > seen && !most.compare_exchange_weak(seen, all)) {}
                start = now();
                uint64_t p = A::alloc(op.bytes, stream);
                end = now();
                b = Block{p, op.bytes, op.stream};
                if (work) check(set_bytes(p, 0, op.bytes, stream), "cuMemsetD8Async");
            } else {
                void* stream = streams[b.stream];
                uint64_t p = b.p;
                b.p = 0;
                start = now();
                A::free(p, stream);
                end = now();
                living -= b.bytes;
            }
            double ns = end - start - cost;
            took += ns;
            if (ns / 1e3 > r->longest_us) r->longest_us = ns / 1e3, r->longest_bytes = b.bytes;
        }
    } catch (const std::exception& e) {
        std::string text = e.what();
        snprintf(r->error, sizeof r->error, "operation %lld: %s", (long long)i, text.substr(0, text.find('\n')).c_str());
    }
    r->us = took / 1e3;
    try {
        for (Block& b : live)
            if (b.p) A::free(b.p, streams[b.stream]);
        for (int64_t s = 0; s < count; s++) check(stream_wait(streams[s]), "cuStreamSynchronize");
    } catch (const std::exception& e) {
        if (!r->error[0]) snprintf(r->error, sizeof r->error, "at the end: %.300s", e.what());
    }
}

// They are never destroyed: PyTorch waits for the streams of what it keeps.
std::vector<void*> streams;

template <class A> void replay(const Op* ops, int64_t n, int64_t blocks, int64_t count, int64_t threads, bool work, Pass* passes) {
    try {
        while ((int64_t)streams.size() < count * threads) {
            void* s = nullptr;
            check(stream_create(&s, 1 /* unordered with the default stream */), "cuStreamCreate");
            streams.push_back(s);
        }
        void* context = nullptr;
        check(ctx_get(&context), "cuCtxGetCurrent");
        for (int k = 0; k < 2; k++) {
            std::vector<Pass> all(threads, Pass{});
            living = 0, most = 0;
            std::vector<std::thread> running;
            for (int64_t t = 1; t < threads; t++)
                running.emplace_back([&, t] {
                    ctx_set(context);
                    pass<A>(ops, n, blocks, &streams[t * count], count, work, &all[t]);
                });
            pass<A>(ops, n, blocks, &streams[0], count, work, &all[0]);
            for (auto& t : running) t.join();
            passes[k].requested = most;
            for (Pass& p : all) {
                passes[k].us += p.us;
                if (p.longest_us > passes[k].longest_us) passes[k].longest_us = p.longest_us, passes[k].longest_bytes = p.longest_bytes;
                if (p.error[0] && !passes[k].error[0]) memcpy(passes[k].error, p.error, sizeof p.error);
            }
        }
    } catch (const std::exception& e) {
        snprintf(passes[0].error, sizeof passes[0].error, "%.399s", e.what());
    }
}
}  // namespace

extern "C" {
// Returns why the driver cannot be used, or nothing.
const char* peers_open(const char* path) {
    static std::string reason;
    try {
        library = dlopen(path, RTLD_NOW);
        if (!library) throw std::runtime_error(dlerror());
        find(ctx_get, "cuCtxGetCurrent");
        find(ctx_set, "cuCtxSetCurrent");
        find(stream_create, "cuStreamCreate");
        find(stream_wait, "cuStreamSynchronize");
        find(set_bytes, "cuMemsetD8Async");
        find(pool_create, "cuMemPoolCreate");
        find(pool_destroy, "cuMemPoolDestroy");
        find(pool_set, "cuMemPoolSetAttribute");
        find(pool_get, "cuMemPoolGetAttribute");
        find(pool_alloc, "cuMemAllocFromPoolAsync");
        find(pool_free, "cuMemFreeAsync");
        return nullptr;
    } catch (const std::exception& e) {
        reason = e.what();
        return reason.c_str();
    }
}

// Makes the driver's pool, of at most so many bytes, that keeps so many free ones over a wait.
int pool_open(int device, uint64_t most, uint64_t keep) {
    PoolProps props;
    memset(&props, 0, sizeof props);
    props.allocation = 1, props.location = Location{1, device}, props.most = most;
    int result = pool_create(&pool, &props);
    return result ? result : pool_set(pool, 4 /* the release threshold */, &keep);
}
// Closes it, and stores the most bytes that it reserved.
int pool_close(uint64_t* reserved) {
    int result = pool_get(pool, 6 /* the most reserved */, reserved), closed = pool_destroy(pool);
    return result ? result : closed;
}
void replay_driver(const Op* ops, int64_t n, int64_t blocks, int64_t streams, int64_t threads, int work, Pass* passes) {
    replay<Driver>(ops, n, blocks, streams, threads, work, passes);
}
#ifdef WITH_TORCH
void replay_torch(const Op* ops, int64_t n, int64_t blocks, int64_t streams, int64_t threads, int work, Pass* passes) {
    replay<Torch>(ops, n, blocks, streams, threads, work, passes);
}
#endif
}
"""


class Pass(ctypes.Structure):
    _fields_ = [("us", ctypes.c_double), ("longest_us", ctypes.c_double), ("longest_bytes", ctypes.c_int64), ("requested", ctypes.c_int64), ("error", ctypes.c_char * 400)]


def compile_loop(folder, torch=None):
    """Builds the loop once in the folder, and returns its path."""
    path = os.path.join(folder, "torch.so" if torch else "driver.so")
    if os.path.exists(path):
        return path
    source = os.path.join(folder, "loop.cpp")
    with open(source, "w", encoding="utf-8") as f:
        f.write(LOOP)
    flags = []
    if torch:
        from torch.utils import cpp_extension

        flags = ["-DWITH_TORCH", *("-isystem" + p for p in cpp_extension.include_paths("cuda"))]
        libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-L" + libraries, "-lc10_cuda", "-lc10"]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-shared", "-fPIC", "-o", path + ".new", source, *flags, "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise RuntimeError("building the loop: " + errors[0][:250])
    os.rename(path + ".new", path)
    return path


def load_loop(path, libcuda):
    loop = ctypes.CDLL(path)
    loop.peers_open.restype = ctypes.c_char_p
    if reason := loop.peers_open(libcuda.encode()):
        raise RuntimeError(reason.decode())
    return loop


def call_loop(function, flat, blocks, streams, mode):
    """Both passes, as microseconds in all, the longest operation, and the most that lived."""
    address, items = flat.buffer_info()
    passes = (Pass * 2)()
    n = ctypes.c_int64
    function(ctypes.c_void_p(address), n(items // 3), n(blocks), n(streams), n(mode.threads), int(mode.work), passes)
    for p in passes:
        if p.error:
            raise RuntimeError(p.error.decode(errors="replace"))
    longest = max(passes, key=lambda p: p.longest_us)
    return passes[0].us, passes[1].us, longest.longest_us, longest.longest_bytes, max(p.requested for p in passes)


class Dry:
    """Counts, and holds exactly what is requested."""

    def __init__(self, args, name, keep):
        del args, name, keep

    def run(self, flat, blocks, streams, mode):
        del blocks, streams
        now = most = 0
        sizes = {}
        start = time.perf_counter()
        for block, size in zip(flat[0::3], flat[1::3]):
            if size >= 0:
                sizes[block] = size
                now += size
                most = max(most, now)
            elif size == FREED:
                now -= sizes.pop(block)
        us = (time.perf_counter() - start) * 1e6 * mode.threads
        return (us, us, 0.0, 0, most * mode.threads), most * mode.threads


class Torch:
    def __init__(self, args, name, keep):
        import torch

        del keep
        self.cuda = torch.cuda
        self.cuda.init()
        self.cuda.set_per_process_memory_fraction(args.fraction)
        torch.zeros(1, device="cuda")
        want = "cudaMallocAsync" if name == "torch-async" else "native"
        if self.cuda.get_allocator_backend() != want:
            raise RuntimeError(f"PyTorch uses {self.cuda.get_allocator_backend()}, not {want}")
        self.loop = load_loop(compile_loop(args.build, torch), args.libcuda)

    def run(self, flat, blocks, streams, mode):
        self.cuda.synchronize()
        self.cuda.empty_cache()
        self.cuda.reset_peak_memory_stats()
        took = call_loop(self.loop.replay_torch, flat, blocks, streams, mode)
        return took, self.cuda.memory_stats()["reserved_bytes.all.peak"]


class Cuda:
    """The driver's library, and the current context of its first device."""

    def __init__(self, path, context):
        self.lib = ctypes.CDLL(path)
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        total = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), self.device)
        self.total = total.value
        if context:
            c = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(c), self.device)
            self.call("cuCtxSetCurrent", c)

    def call(self, name, *args):
        if result := getattr(self.lib, name)(*args):
            raise RuntimeError(f"{name} returned {result}")


class DriverPool:
    """The driver's own pool. keep is how many free bytes it keeps over a wait."""

    def __init__(self, args, name, keep):
        del name
        self.cuda = Cuda(args.libcuda, context=True)
        self.loop = load_loop(compile_loop(args.build), args.libcuda)
        self.most, self.keep = int(self.cuda.total * args.fraction), keep

    def run(self, flat, blocks, streams, mode):
        u64 = ctypes.c_uint64
        if result := self.loop.pool_open(self.cuda.device, u64(self.most), u64(self.keep)):
            raise RuntimeError(f"making the driver's pool returned {result}")
        reserved = u64()
        try:
            took = call_loop(self.loop.replay_driver, flat, blocks, streams, mode)
        finally:
            closed = self.loop.pool_close(ctypes.byref(reserved))
        if closed:
            raise RuntimeError(f"closing the driver's pool returned {closed}")
        return took, reserved.value


class CuPy:
    """Called from Python, on an idle GPU and one stream."""

    def __init__(self, args, name, keep):
        import cupy

        del name, keep
        self.cupy, self.stream = cupy, cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.limit = int(cupy.cuda.runtime.memGetInfo()[1] * args.fraction)

    def run(self, flat, blocks, streams, mode):
        if mode.work or mode.threads > 1 or streams > 1:
            raise RuntimeError("only compared on an idle GPU and one stream")
        pool = self.cupy.cuda.MemoryPool()
        pool.set_limit(size=self.limit)
        first, second = (self.replay(flat, blocks, pool.malloc) - self.replay(flat, blocks, float) for _ in range(2))
        peak = pool.total_bytes()  # it gives nothing back by itself
        pool.free_all_blocks()
        return (first, second, 0.0, 0, None), peak

    def replay(self, flat, blocks, alloc):
        live, clock = [None] * blocks, time.perf_counter
        start = clock()
        for block, size in zip(flat[0::3], flat[1::3]):
            if size >= 0:
                live[block] = alloc(size)
            elif size == FREED:
                live[block] = None
        took = clock() - start
        live.clear()
        self.stream.synchronize()
        return took * 1e6


# Class, what keep is, and PyTorch's settings.
PEERS = {
    "torch": (Torch, 0, ""),
    "torch-expandable": (Torch, 0, "expandable_segments:True"),
    "torch-async": (Torch, 0, "backend:cudaMallocAsync"),
    "driver-pool": (DriverPool, 2**64 - 1, ""),
    "driver-pool-trim": (DriverPool, 0, ""),
    "cupy": (CuPy, 0, ""),
    "dry": (Dry, 0, ""),
}


def run_peer(args):
    """The child: prints a line for each trace and mode."""

    def say(trace, mode, **facts):
        print(json.dumps({"trace": trace, "allocator": args.name, "mode": mode, **facts}), flush=True)

    kind, keep, _ = PEERS[args.name]
    known = modes(args.many)
    try:
        peer, failed = kind(args, args.name, keep), None
    except Exception as e:  # a peer that is not here must not end the others
        failed = f"{type(e).__name__}: {e}"[:300]
    gc.disable()
    for path in args.traces:
        t = read_trace(path)
        for name in args.modes.split(","):
            try:
                if failed:
                    raise RuntimeError(failed)
                flat, streams = known[name].ops(t)
                gc.collect()
                (first, second, longest, of, requested), reserved = peer.run(flat, len(t.sizes), streams, known[name])
            except Exception as e:
                say(t.name, name, error=failed or f"{type(e).__name__}: {e}"[:300])
                continue
            n = t.operations() * known[name].threads
            say(t.name, name, operations=n, requested=requested or t.requested, reserved=reserved, first_us=first / n, second_us=second / n,
                longest_us=longest, longest_bytes=of)  # fmt: skip
    return 0


def measure(args, results):
    """Runs the pool and each peer, and writes their lines to the file."""
    peers = [p for p in args.peers.split(",") if p]
    for name in peers:
        if name not in PEERS:
            raise SystemExit(f"-peers {name}: there are {', '.join(PEERS)}")
    known = modes(args.many)
    wanted = list(known) if args.modes == "all" else args.modes.split(",")
    for name in wanted:
        if name not in known:
            raise SystemExit(f"-modes {name}: use {', '.join(known)} or all")
    for path in args.traces:
        read_trace(path)  # so that a wrong file is told before anything runs

    def run(name, command, env=None):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        for line in lines:
            print(line, file=results, flush=True)
        if done.returncode and not any("error" in json.loads(line) for line in lines):
            raise SystemExit(f"the process of {name} failed: {done.stderr.strip()[-600:]}")

    with tempfile.TemporaryDirectory() as build:
        paths = []
        for i, path in enumerate(args.traces):
            # What cuvmm cannot read is converted for it.
            with open(path, "rb") as f:
                head = f.read(2)
            if head[:1] == b"\x80" or head == b"PK":
                t = read_trace(path)
                path = os.path.join(build, f"{i}.trace")
                with open(path, "wb") as f:
                    f.write(binary(t))
            paths.append(path)
        common = ["-modes", ",".join(wanted), "-many", str(args.many)]
        if args.pool:
            limit = []
            if not args.software:
                limit = ["-limit", str(int(Cuda(args.libcuda, context=False).total * args.fraction) >> 30)]
            driver = ["-driver", "sim" if args.software else "real"]
            run("the pool", [args.pool, "replay", "-json", *driver, *limit, *common, *paths])
        for name in peers:
            env = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
            if PEERS[name][2]:
                env["PYTORCH_CUDA_ALLOC_CONF"] = PEERS[name][2]
            run(name, [sys.executable, os.path.abspath(__file__), "peer", "-name", name, "-build", build, "-fraction", str(args.fraction),
                       "-libcuda", args.libcuda, *common, *args.traces], env)  # fmt: skip


def compare(args):
    with open(args.results, "w+", encoding="utf-8") if args.results else tempfile.TemporaryFile("w+", encoding="utf-8") as results:
        measure(args, results)
        results.seek(0)
        print_table(list(results), args.name)
    return 0


def table(args):
    lines = []
    for path in args.files:
        with open(path, encoding="utf-8", errors="replace") as f:
            lines += [line for line in f if line.startswith("{")]
    print_table(lines, args.name)
    return 0


# With which the pool is compared: of these, the one that reserves least.
RIVALS = ("torch", "torch-expandable", "torch-async", "driver-pool", "driver-pool-trim")


def stall(r):
    """Whether the longest operation is over the pool's bound: 2 ms, above 1.5 GiB 1.5 ms for each GiB.
    Waiting for memory in use does not count."""
    gib = r["longest_bytes"] / 2**30
    return r.get("over", 0) > 0 or worked(r, "longest_us") > (2000 if gib <= 1.5 else 1500 * gib)


def worked(r, key):
    """A time without waiting for memory in use, which the peers do not do."""
    return r.get({"longest_us": "worked_us"}.get(key, key.replace("_us", "_worked_us")), r[key])


def judge(by, name):
    """The rival and the ways in which the pool misses: more than 1.01 of its memory, more time, a stall."""
    ours = by.get(name)
    ratio = lambda r: r["reserved"] / max(r["requested"], 1)  # noqa: E731
    rivals = [(round(ratio(by[p]), 4), by[p]["first_us"] + by[p]["second_us"], p) for p in RIVALS if p in by and "error" not in by[p]]
    best = min(rivals)[2] if rivals else None
    if ours is None or best is None:
        return best, []
    if "error" in ours:
        return best, ["failed"]
    theirs, misses = by[best], []
    if ratio(ours) > 1.01 * ratio(theirs):
        misses.append("memory")
    misses += [f"{k} pass" for k in ("first", "second") if ours[f"{k}_us"] > theirs[f"{k}_us"]]
    if stall(ours):
        misses.append("longest")
    return best, misses


def cell(results):
    """Of one trace, or the worst of several and the mean."""
    good = [r for r in results if r and "error" not in r]
    failed = sum(1 for r in results if r and "error" in r)
    if not good:
        return "failed" if failed else "–"
    memory = [r["reserved"] / max(r["requested"], 1) for r in good]
    parts = []
    for key, unit, form in (("", 1, "{:.3f}"), ("first_us", 1, "{:.2f}"), ("second_us", 1, "{:.2f}"), ("longest_us", 1000, "{:.1f}")):
        values = [r[key] / unit for r in good] if key else memory
        working = [worked(r, key) / unit for r in good] if key else memory
        part = form.format(max(values)) + ("" if len(good) == 1 else " (" + form.format(sum(values) / len(values)) + ")")
        if sum(values) > 1.1 * sum(working):
            part += " [" + form.format(max(working)) + "]"
        parts.append(part)
    return ", ".join(parts) + (f", {failed} failed" if failed else "")


def print_table(lines, name):
    """A row for each trace and mode; seeds of a generator (training-3) share one."""
    groups, allocators = defaultdict(lambda: defaultdict(dict)), []
    for line in lines:
        r = json.loads(line)
        family = re.sub(r"-\d+$", "", r["trace"])
        groups[family, r["mode"]][r["trace"]][r["allocator"]] = r
        if r["allocator"] not in allocators:
            allocators.append(r["allocator"])
    if not groups:
        raise SystemExit("no result in these files: make some with compare -results FILE")
    print("Peak reserved over peak requested, µs of an operation in the first and the second pass, the longest in ms [without waiting for memory in use]; of several traces the worst (and the mean).\n")
    print("| traces | mode | " + " | ".join(allocators) + f" | least memory of peers | {name} misses |")
    print("| --- | --- |" + " --- |" * len(allocators) + " --- | --- |")
    for (family, mode), traces in groups.items():
        verdicts = [judge(by, name) for by in traces.values()]
        bests = [b for b, _ in verdicts if b]
        counts = defaultdict(int)
        for _, misses in verdicts:
            for m in misses:
                counts[m] += 1
        n = len(traces)
        label = family if n > 1 else next(iter(traces))
        if n > 1:
            label += f" ({n})"
        told = "–" if not bests else ", ".join(f"**{m}**" + (f" {c} of {n}" if n > 1 else "") for m, c in counts.items()) or "none"
        best = ", ".join(sorted(set(bests), key=bests.count, reverse=True)) or "–"
        print(f"| {label} | {mode} | " + " | ".join(cell([by.get(a) for by in traces.values()]) for a in allocators) + f" | {best} | {told} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def common(p):
        p.add_argument("-modes", default="idle,behind", help="with commas between them, or all (default idle,behind)")
        p.add_argument("-many", type=int, default=4, help="streams or threads of the modes that have several (default 4)")
        p.add_argument("-fraction", type=float, default=0.5, help="of the GPU's memory that an allocator may take (default 0.5)")
        p.add_argument("-libcuda", default="libcuda.so.1", help="the driver's library")
        p.add_argument("traces", nargs="+", metavar="TRACE")

    c = commands.add_parser("compare", help="measure and print the table")
    c.add_argument("-pool", help="the program cuvmm; without it only the peers are measured")
    c.add_argument("-software", action="store_true", help="the pool runs on the software driver")
    c.add_argument("-peers", default=",".join(p for p in PEERS if p != "dry"), help="which, with commas between them; dry only counts")
    c.add_argument("-results", metavar="FILE", help="where to keep the measurements: one JSON object per line")
    common(c)
    c.set_defaults(do=compare)
    t = commands.add_parser("table", help="print the table of kept measurements")
    t.add_argument("files", nargs="+", metavar="FILE")
    t.set_defaults(do=table)
    for p in (c, t):
        p.add_argument("-name", default="pool", help="the allocator that is compared with the peers (default pool)")
    v = commands.add_parser("convert", help="write snapshots, or traces of any form, in the binary form")
    v.add_argument("-out", required=True, metavar="FOLDER")
    v.add_argument("traces", nargs="+", metavar="SNAPSHOT")
    v.set_defaults(do=convert)
    child = commands.add_parser("peer")
    child.add_argument("-name", required=True)
    child.add_argument("-build", required=True)
    common(child)
    child.set_defaults(do=run_peer)
    args = parser.parse_args()
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main())
