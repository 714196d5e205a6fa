"""Step times of the models of torch_programs on several allocators, each in a process of its own, whose rounds take turns.

::

    CUVMM_LIBCUVMM=$PWD/libcuvmm.so python3 -m tests.torch_steps        # in python/, on a machine with a GPU and PyTorch

A round is the same steps on each allocator, in an order that rotates, so what the machine does meanwhile hits all alike.
Ratios are of rounds, to those of the first allocator: of the median and the mean step, and of the process's CPU time. Each is the median of
all rounds, with the interval that it is in with 95 %: many short rounds tell more than few long ones. That is of these processes; others on the
same allocators may differ by more. The pool's wake-ups are those of the threads that Go's runtime began with, a step. The trivial allocator
(trivial_allocator.cc) shows what PyTorch's way to any pluggable allocator costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Dict, List, Set

from .support import ROOT, environment
from .torch_programs import MODELS, begin


def _go_threads(allocator: str) -> Set[str]:
    """The threads that the library begins when it is loaded."""
    before = set(os.listdir("/proc/self/task"))
    if allocator == "pool":
        from cuvmm import _torch_library
        _torch_library.load(_torch_library.find(None))
        time.sleep(0.1)
    return set(os.listdir("/proc/self/task")) - before


def _switches(threads: Set[str]) -> int:
    """How often threads have gone to sleep."""
    n = 0
    for thread in threads:
        with open(f"/proc/self/task/{thread}/status") as f:
            n += sum(int(line.split()[1]) for line in f if line.startswith("voluntary_ctxt_switches"))
    return n


def work(name: str, allocator: str) -> None:
    """A worker: each line of its input is a range of steps to run, and each line of its output their times."""
    threads = _go_threads(allocator)
    torch = begin(allocator)
    training = MODELS[name](torch)
    for line in sys.stdin:
        first, end = map(int, line.split())
        woken, cpu = _switches(threads), time.process_time()
        seconds = [training.step(i)[1] for i in range(first, end)]
        cpu, woken = time.process_time() - cpu, _switches(threads) - woken
        reserved = 0 if allocator == "trivial" else torch.cuda.max_memory_reserved()
        print("TIMES " + json.dumps({"seconds": seconds, "cpu": cpu / len(seconds), "woken": woken / len(seconds), "reserved": reserved}), flush=True)


class Worker:
    def __init__(self, name: str, allocator: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "tests.torch_steps", "--worker", name, allocator], env=environment(), cwd=ROOT / "python",
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, first: int, end: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first} {end}\n")
        self.process.stdin.flush()

    def times(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("TIMES "):
                return json.loads(line[len("TIMES "):])
        raise RuntimeError(f"a worker ended with {self.process.wait()}")

    def close(self) -> None:
        self.process.communicate("")


def measure(name: str, allocators: List[str], warm: int, rounds: int, steps: int) -> None:
    workers = {a: Worker(name, a) for a in allocators}
    try:
        for w in workers.values():
            w.ask(0, 1)  # all start side by side
        for w in workers.values():
            w.times()
        for w in workers.values():
            w.ask(1, warm)
            w.times()
        medians: Dict[str, List[float]] = {a: [] for a in allocators}
        means: Dict[str, List[float]] = {a: [] for a in allocators}
        cpus: Dict[str, List[float]] = {a: [] for a in allocators}
        woken: Dict[str, List[float]] = {a: [] for a in allocators}
        reserved: Dict[str, int] = {}
        for n in range(rounds):
            turn = n % len(allocators)
            for a in allocators[turn:] + allocators[:turn]:
                workers[a].ask(warm + n * steps, warm + (n + 1) * steps)
                result = workers[a].times()
                medians[a].append(statistics.median(result["seconds"]))
                means[a].append(statistics.fmean(result["seconds"]))
                cpus[a].append(result["cpu"])
                woken[a].append(result["woken"])
                reserved[a] = result["reserved"]
    finally:
        for w in workers.values():
            w.close()
    for a in allocators:
        line = f"{name:13} {a:11} {statistics.median(medians[a]) * 1e3:8.3f} ms  reserved {reserved[a] / (1 << 30):7.3f} GiB"
        for what, values in (("median", medians), ("mean", means), ("CPU", cpus)):
            ratios = sorted(x / y for x, y in zip(values[a], values[allocators[0]]))
            low = max(0, int(rounds / 2 - 0.98 * rounds**0.5))  # of the binomial distribution
            line += f"  {what} {statistics.median(ratios):.4f} ({ratios[low]:.3f} to {ratios[-1 - low]:.3f})"
        if a == "pool":
            line += f"  {statistics.median(woken[a]):.1f} wake-ups a step"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "ALLOCATOR"), help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--allocators", nargs="+", default=["expandable", "pool", "native"], help="or trivial")
    parser.add_argument("--warm", type=int, default=30, help="steps before the first round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    o = parser.parse_args()
    if o.worker:
        work(*o.worker)
        return
    for name in o.models:
        measure(name, o.allocators, o.warm, o.rounds, o.steps)


if __name__ == "__main__":
    main()
