#!/usr/bin/env python3
"""Replays allocation traces through the allocators of other libraries, on a
machine with a GPU, PyTorch and CuPy, and compares them with the pool.

    pooltrace generate -out FOLDER              writes the traces (cmd/pooltrace)
    pool-peers.py run FOLDER/*.trace > peers    one JSON object for each trace and allocator
    run.sh -bench -run Replay vmm/pool          measures the pool, and the driver's pool from C
    pool-peers.py table peers cuvmm-gpu.log     joins both in Markdown

Each allocator runs in a process of its own, since PyTorch reads its settings
once. Its cache is emptied before each trace. Time is that of the calls which
allocate and free; waiting at the end of a step is not part of it. Allocators
whose name ends in -c are called from compiled code; the others from Python, by
the fastest call that the library has, and what the same loop takes with calls
that do nothing is subtracted (and given as loop_us). No kernel runs meanwhile.

"run -dry-run" needs no GPU: it decodes the traces, replays them through an
allocator that only counts, and prints what they ask for.
"""

import argparse
import gc
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

MAGIC = b"cuvmmtr\x01"
ALLOC, FREE, USE, SYNC = range(4)
FREED = -1


class Trace:
    """A trace in the form that the loops below want: for each stretch between
    two waits the operations as (block, bytes), with FREED bytes for a free."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.data = f.read()
        if not self.data.startswith(MAGIC):
            raise SystemExit(f"{path} is no trace of this version")
        self.at = len(MAGIC)
        self.name = self.text()
        streams = self.number()
        for _ in range(self.number()):
            self.text()
        if streams != 1:
            raise SystemExit(f"{path} has {streams} streams: peers are compared on traces of one")
        self.steps, self.operations, self.requested = [[]], 0, 0
        sizes, live = [], 0
        for _ in range(self.number()):
            head = self.number()
            kind, value = head & 3, head >> 2
            if kind == ALLOC:
                self.number(), self.number()  # stream and tag
                value = max(value, 1)
                self.steps[-1].append((len(sizes), value))
                sizes.append(value)
                live += value
                self.requested = max(self.requested, live)
                self.operations += 1
            elif kind == FREE:
                block = len(sizes) - value
                self.steps[-1].append((block, FREED))
                live -= sizes[block]
                self.operations += 1
            elif kind == SYNC:
                self.steps.append([])
            else:
                raise SystemExit(f"{path} uses blocks on other streams: peers are compared on traces of one")
        if self.at != len(self.data):
            raise SystemExit(f"{path} is longer than its trace")
        self.blocks = len(sizes)
        del self.data

    def number(self):
        result = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result
            shift += 7

    def text(self):
        n = self.number()
        self.at += n
        return self.data[self.at - n : self.at].decode()


def replay(trace, alloc, free, stream, wait):
    """For allocators that free by address. Answers the seconds it took."""
    live, took, clock = [0] * trace.blocks, 0.0, time.perf_counter
    try:
        for step in trace.steps:
            start = clock()
            for block, size in step:
                if size >= 0:
                    live[block] = alloc(size, stream)
                else:
                    free(live[block])
                    live[block] = 0
            took += clock() - start
            wait()
        return took
    finally:
        for pointer in live:
            if pointer:
                free(pointer)


def replay_objects(trace, alloc, wait):
    """For allocators whose blocks are objects, and free when these go."""
    live, took, clock = [None] * trace.blocks, 0.0, time.perf_counter
    for step in trace.steps:
        start = clock()
        for block, size in step:
            if size >= 0:
                live[block] = alloc(size)
            else:
                live[block] = None
        took += clock() - start
        wait()
    return took


def nothing():
    pass


class Dry:
    """Counts, and holds exactly what is asked for."""

    def __init__(self, name, fraction):
        del name, fraction

    def run(self, trace):
        self.now = self.peak = 0
        sizes = {}

        def alloc(size, stream):
            pointer = stream + len(sizes) + 1
            sizes[pointer] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            return pointer

        def free(pointer):
            self.now -= sizes[pointer]

        took = replay(trace, alloc, free, 0, nothing)
        if self.now != 0:
            raise RuntimeError(f"{self.now} bytes were not given back")
        return took, 0.0, self.peak


class Torch:
    def __init__(self, name, fraction):
        import torch

        self.torch, self.compiled = torch, None
        if name.endswith("-c"):
            self.compiled = compile_loop()
        torch.cuda.init()
        torch.cuda.set_per_process_memory_fraction(fraction)
        torch.zeros(1, device="cuda")
        want = "cudaMallocAsync" if name.startswith("torch-async") else "native"
        got = torch.cuda.get_allocator_backend()
        if got != want:
            raise RuntimeError(f"PyTorch uses {got}, not {want}")
        self.stream = torch.cuda.current_stream().cuda_stream
        # Without the checks and the switch of device of the public functions.
        self.alloc = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
        self.free = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
        if self.alloc is None or self.free is None:
            self.alloc = lambda size, stream: torch.cuda.caching_allocator_alloc(size, None, stream)
            self.free = torch.cuda.caching_allocator_delete

    def run(self, trace):
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        if self.compiled:
            flat = [n for step in trace.steps for op in step + [(FREED, FREED)] for n in op]
            took = self.compiled.replay(self.torch.tensor(flat, dtype=self.torch.int64), trace.blocks, self.stream)
            loop = 0.0
        else:
            loop = replay(trace, operator.add, operator.index, 0, nothing)
            took = replay(trace, self.alloc, self.free, self.stream, cuda.synchronize)
        return took, loop, cuda.memory_stats()["reserved_bytes.all.peak"]


TORCH_LOOP = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#include <chrono>
#include <vector>

double replay(torch::Tensor ops, int64_t blocks, int64_t stream_handle) {
    using clock = std::chrono::steady_clock;
    namespace caching = c10::cuda::CUDACachingAllocator;
    auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    const int64_t* op = ops.data_ptr<int64_t>();
    const int64_t* end = op + ops.numel();
    std::vector<void*> live(blocks, nullptr);
    auto give_back = [&] { for (void* p : live) if (p) caching::raw_delete(p); };
    double took = 0;
    try {
        auto start = clock::now();
        for (; op < end; op += 2) {
            if (op[1] >= 0) {
                live[op[0]] = caching::raw_alloc_with_stream(op[1], stream);
            } else if (op[0] >= 0) {
                caching::raw_delete(live[op[0]]);
                live[op[0]] = nullptr;
            } else {
                took += std::chrono::duration<double>(clock::now() - start).count();
                cudaStreamSynchronize(stream);
                start = clock::now();
            }
        }
    } catch (...) {
        give_back();
        throw;
    }
    give_back();
    return took;
}
"""


def compile_loop():
    from torch.utils.cpp_extension import load_inline

    return load_inline(name="cuvmm_pool_peers", cpp_sources=[TORCH_LOOP], functions=["replay"],
                       with_cuda=True, extra_cflags=["-O2"], verbose=False)  # fmt: skip


class CuPy:
    def __init__(self, name, fraction):
        import cupy

        self.cupy, self.stream = cupy, cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.is_async = name.startswith("cupy-async")
        if self.is_async:
            # Attributes of the driver's pool: its release threshold, and its peak.
            self.runtime, self.threshold, self.high = cupy.cuda.runtime, 4, 6
            self.pool = cupy.cuda.MemoryAsyncPool("default")
            self.handle = cupy.cuda.runtime.deviceGetDefaultMemPool(0)
            keep = 2**63 if name == "cupy-async-keep" else 0
            self.runtime.memPoolSetAttribute(self.handle, self.threshold, keep)
        else:
            self.limit = int(cupy.cuda.runtime.memGetInfo()[1] * fraction)

    def run(self, trace):
        if self.is_async:
            self.pool.free_all_blocks()
            self.runtime.memPoolSetAttribute(self.handle, self.high, 0)
        else:
            self.pool = self.cupy.cuda.MemoryPool()
            self.pool.set_limit(size=self.limit)
        loop = replay_objects(trace, float, nothing)
        took = replay_objects(trace, self.pool.malloc, self.stream.synchronize)
        if self.is_async:
            return took, loop, self.runtime.memPoolGetAttribute(self.handle, self.high)
        # It gives nothing back by itself, so what it has at the end is the most.
        peak = self.pool.total_bytes()
        self.pool.free_all_blocks()
        return took, loop, peak


PEERS = {
    "torch": (Torch, ""),
    "torch-expandable": (Torch, "expandable_segments:True"),
    "torch-async": (Torch, "backend:cudaMallocAsync"),
    "torch-c": (Torch, ""),
    "torch-expandable-c": (Torch, "expandable_segments:True"),
    "torch-async-c": (Torch, "backend:cudaMallocAsync"),
    "cupy": (CuPy, None),
    "cupy-async": (CuPy, None),
    "cupy-async-keep": (CuPy, None),
    "dry": (Dry, None),
}


def run_peer(name, fraction, paths):
    """The child: prints a line for each trace."""

    def say(trace, **facts):
        print(json.dumps({"trace": trace, "allocator": name, **facts}), flush=True)

    try:
        peer = PEERS[name][0](name, fraction)
    except Exception as e:  # a peer that is not here must not end the others
        for path in paths:
            say(Trace(path).name, error=f"{type(e).__name__}: {e}"[:300])
        return
    gc.disable()
    for path in paths:
        trace = Trace(path)
        gc.collect()
        try:
            took, loop, reserved = peer.run(trace)
        except Exception as e:
            say(trace.name, error=f"{type(e).__name__}: {e}"[:300])
            continue
        say(trace.name, requested=trace.requested, reserved=reserved, operations=trace.operations,
            us=(took - loop) * 1e6 / trace.operations, loop_us=loop * 1e6 / trace.operations)  # fmt: skip


def run(args):
    names = ["dry"] if args.dry_run else args.peers.split(",")
    for name in names:
        if name not in PEERS:
            raise SystemExit(f"-peers {name}: there are {', '.join(PEERS)}")
    failed = False
    with tempfile.TemporaryDirectory() as build:
        for name in names:
            env = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
            env["TORCH_EXTENSIONS_DIR"] = build
            if PEERS[name][1]:
                env["PYTORCH_CUDA_ALLOC_CONF"] = PEERS[name][1]
            command = [sys.executable, os.path.abspath(__file__), "peer", name, str(args.fraction), *args.traces]
            sys.stdout.flush()
            if subprocess.run(command, env=env, check=False).returncode != 0:
                print(f"pool-peers.py: the process of {name} failed", file=sys.stderr)
                failed = True
    return 1 if failed else 0


# The lines of Go's benchmarks: BenchmarkReplay/TRACE/ALLOCATOR-PROCS N VALUE UNIT...
BENCHMARK = re.compile(r"^\s*Benchmark(?:Replay|Curve)/([a-z]+-\d+)/(\S+?)(?:-\d+)?\s+\d+\s+(.*)$")
FAILED = re.compile(r"^\s*--- FAIL: Benchmark(?:Replay|Curve)/([a-z]+-\d+)/(\S+?)(?:-\d+)?(?:\s|$)")


def read(paths):
    """What was measured: by trace and allocator, memory over what was requested
    and the microseconds of an operation, or None where it failed."""
    results = defaultdict(dict)
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith("{"):
                    r = json.loads(line)
                    ok = "error" not in r
                    results[r["trace"]][r["allocator"]] = (r["reserved"] / r["requested"], r["us"]) if ok else None
                elif m := BENCHMARK.match(line):
                    values = m[3].split()
                    units = dict(zip(values[1::2], map(float, values[0::2])))
                    if "us/op" in units:
                        results[m[1]][m[2]] = (units["reserved/requested"], units["us/op"])
                elif m := FAILED.match(line):
                    results[m[1]][m[2]] = None
    return results


# Whom the pool is measured against: of these, the one that holds least.
BARS = {
    "from Python": ("torch-expandable", "cupy-async", "cupy-async-keep"),
    "compiled": ("torch-expandable-c", "cuda-async-c", "cuda-async-keep-c"),
}


def table(args):
    results = read(args.files)
    if not results:
        raise SystemExit("no result in these files")
    kinds, allocators = [], []
    for trace, by in results.items():
        kind = trace.rsplit("-", 1)[0]
        if kind not in kinds:
            kinds.append(kind)
        allocators += [a for a in by if a not in allocators]

    def of(kind):
        return [by for trace, by in results.items() if trace.rsplit("-", 1)[0] == kind]

    print("Peak reserved over peak requested, and microseconds of an operation: the worst of the traces (and the median).\n")
    print("| allocator | " + " | ".join(f"{k} memory | {k} µs" for k in kinds) + " |")
    print("| --- |" + " --- | --- |" * len(kinds))
    for allocator in allocators:
        cells = []
        for kind in kinds:
            got = [by[allocator] for by in of(kind) if by.get(allocator)]
            failed = sum(1 for by in of(kind) if allocator in by and by[allocator] is None)
            note = f", {failed} failed" if failed else ""
            for i, form in ((0, "{:.3f} ({:.3f})"), (1, "{:.2f} ({:.2f})")):
                values = sorted(r[i] for r in got)
                cells.append(form.format(values[-1], values[len(values) // 2]) + note if values else "–" + note)
                note = ""
        print(f"| {allocator} | " + " | ".join(cells) + " |")

    for bar, peers in BARS.items():
        print(f"\n{args.pool} beside whichever of {', '.join(peers)} holds least on a trace ({bar}); ratios, the worst trace:\n")
        print("| traces | number | memory | time | held no more | and took no longer |\n| --- | --- | --- | --- | --- | --- |")
        for kind in kinds:
            memory, times, less, both, n = [], [], 0, 0, 0
            for by in of(kind):
                rivals = [by[p] for p in peers if by.get(p)]
                if not rivals or args.pool not in by:
                    continue
                n += 1
                if by[args.pool] is None:
                    continue  # it failed, so it met nothing
                best, ours = min(rivals), by[args.pool]
                memory.append(ours[0] / best[0])
                times.append(ours[1] / best[1])
                less += memory[-1] <= 1
                both += memory[-1] <= 1 and times[-1] <= 1
            if memory:
                print(f"| {kind} | {n} | {max(memory):.3f} | {max(times):.2f} | {less} | {both} |")
            elif n:
                print(f"| {kind} | {n} | – | – | 0 | 0 |")
    return 0


def main():
    if sys.argv[1:2] == ["peer"]:  # a child of run
        run_peer(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    r = commands.add_parser("run", help="replay traces")
    r.add_argument("-dry-run", action="store_true", help="without a GPU: decode and count")
    r.add_argument("-peers", default=",".join(p for p in PEERS if p != "dry"), help="which allocators, with commas between")
    r.add_argument("-fraction", type=float, default=0.5, help="of the GPU's memory that an allocator may take (default 0.5)")
    r.add_argument("traces", nargs="+")
    r.set_defaults(do=run)
    t = commands.add_parser("table", help="join results in Markdown")
    t.add_argument("-pool", default="pool", help="the allocator that is compared with the others (default pool)")
    t.add_argument("files", nargs="+")
    t.set_defaults(do=table)
    args = parser.parse_args()
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main())
