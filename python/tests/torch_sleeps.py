"""Programs of PyTorch that sleep, on a GPU, each in a process of its own: python -m tests.torch_sleeps NAME regions|pool [GIB [CYCLES]].

``model`` trains a model that has GIB with its optimizer, and suspends both between steps. The losses must be those without, each
suspension and each return are to reach 0.97 of the rate of raw copies by pieces of 4 MiB on two streams (ratio), and CYCLES more cycles
must leave the GPU's and the host's memory as they were. "ms" says where the time goes: a cycle without bytes is all but the copies, and
one with a pause in it lets the driver clean what it got back. ``mistaken`` uses a tensor that sleeps.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import statistics
import sys
import time
from typing import Any, Callable, ContextManager, Dict, Iterator, List

from .torch_programs import begin, _used

GIB, PIECE, WIDTH = 1 << 30, 4 << 20, 8192


def _region(allocator: str) -> ContextManager[Any]:
    import cuvmm.torch
    return cuvmm.torch.region("model") if allocator == "regions" else contextlib.nullcontext()


class Trained:
    """A model with its optimizer: 12 bytes a parameter between steps."""

    def __init__(self, torch: Any, allocator: str, size: int) -> None:
        self.torch, self.allocator, layers = torch, allocator, max(1, size // (12 * WIDTH * WIDTH))
        torch.manual_seed(1)
        with _region(allocator), torch.device("cuda"):
            self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.bytes = layers * 12 * WIDTH * WIDTH
        self.step(0)  # which makes the optimizer's state

    def step(self, i: int) -> str:
        torch = self.torch
        g = torch.Generator("cuda").manual_seed(i)
        x = torch.randn(64, WIDTH, generator=g, device="cuda")
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        with _region(self.allocator):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.item()).hex()


def _raw(torch: Any, host: Any) -> Dict[str, float]:
    """The rates of copies by pieces of 4 MiB on two streams, to and from pinned memory, in bytes a second."""
    there = torch.empty(host.numel(), dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def once(to: Any, source: Any) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(host.numel() // PIECE):
            with torch.cuda.stream(streams[i % 2]):
                to[i * PIECE:(i + 1) * PIECE].copy_(source[i * PIECE:(i + 1) * PIECE], non_blocking=True)
        torch.cuda.synchronize()
        return float(host.numel() / (time.perf_counter() - began))

    return {"out": statistics.median(once(host, there) for _ in range(5)), "in": statistics.median(once(there, host) for _ in range(5))}


@contextlib.contextmanager
def _registered(torch: Any, size: int) -> Iterator[Any]:
    """Host memory in huge pages that the driver pins where it is, as that which the library retains."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    host.zero_()
    cuda = torch.cuda.cudart()
    assert int(cuda.cudaHostRegister(host.data_ptr(), size, 0)) == 0
    yield host
    assert int(cuda.cudaHostUnregister(host.data_ptr())) == 0


def _kilobytes(file: str, name: str) -> int:
    with open(file) as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(name))


def _resident() -> int:
    return _kilobytes("/proc/self/status", "VmRSS")


def _slept(pause: float, keep: bool) -> Dict[str, float]:
    """The milliseconds of a cycle, out and in, with a pause between them."""
    import cuvmm.torch
    times: Dict[str, List[float]] = {"out": [], "in": []}
    for _ in range(5):
        began = time.perf_counter()
        cuvmm.torch.suspend(keep=keep)
        times["out"].append(time.perf_counter() - began)
        time.sleep(pause)
        began = time.perf_counter()
        cuvmm.torch.resume()
        times["in"].append(time.perf_counter() - began)
        time.sleep(pause)
    return {way: round(statistics.median(t) * 1e3, 1) for way, t in times.items()}


def model(torch: Any, allocator: str, size: int, cycles: int) -> Dict[str, Any]:
    import cuvmm.torch
    trained = Trained(torch, allocator, size)
    want = [trained.step(i) for i in range(1, 11)]
    del trained
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    raw = _raw(torch, torch.empty(min(size, 4 * GIB), dtype=torch.uint8, pin_memory=True))
    with _registered(torch, size) as host:
        registered = _raw(torch, host)
        del host
    torch.cuda.empty_cache()

    trained = Trained(torch, allocator, size)
    times: Dict[str, List[float]] = {"out": [], "in": []}
    moved, used, resident = 0, [], []

    def timed(way: str, do: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = do()
        times[way].append(time.perf_counter() - began)
        return result

    def cycle() -> None:
        nonlocal moved
        torch.cuda.empty_cache()
        moved = timed("out", cuvmm.torch.suspend).host
        timed("in", cuvmm.torch.resume)
        used.append(_used(torch))
        resident.append(_resident())

    losses = []
    for i in range(1, 11):
        cycle()  # the first pins host memory
        losses.append(trained.step(i))
    for way in times:
        del times[way][0]
    for _ in range(cycles):
        cycle()
    rates = {way: moved / statistics.median(times[way]) for way in times}
    ratios = {way: round(rates[way] / raw[way], 3) for way in rates}
    flat = {"GPU": used[-1] - used[9], "host": resident[-1] - resident[9]} if cycles else {}
    same = losses == want
    where = {way: {"all": round(statistics.median(t) * 1e3, 1), "raw": round(moved / raw[way] * 1e3, 1), "raw, registered": round(moved / registered[way] * 1e3, 1)}
             for way, t in times.items()}
    for name, pause, keep in (("with a pause", 0.3, True), ("without bytes", 0.0, False), ("without bytes, with a pause", 0.3, False)):
        for way, took in _slept(pause, keep).items():
            where[way][name] = took
    return {"ok": same and all(n <= 64 << 20 for n in flat.values()), "same losses": same, "GiB": trained.bytes / GIB, "moved": moved,
            "GiB/s": {w: round(r / GIB, 2) for w, r in rates.items()}, "raw GiB/s": {w: round(r / GIB, 2) for w, r in raw.items()}, "ratio": ratios, "grown": flat, "ms": where, "huge": _kilobytes("/proc/self/smaps_rollup", "AnonHugePages")}


def mistaken(torch: Any, allocator: str, size: int, cycles: int) -> Dict[str, Any]:
    """In the pool, what needs a block, as a result does, is refused with a text. With a guard a stray access finds memory. Without one it
    would fault, which ends the process's use of the GPU: that is not provoked."""
    import cuvmm.torch
    with _region(allocator):
        x = torch.ones(128 << 20, dtype=torch.uint8, device="cuda")
    found = [t.data_ptr() for t in cuvmm.torch.tensors("model" if allocator == "regions" else "")]
    cuvmm.torch.suspend(guard=True)
    refused = ""
    if allocator == "pool":
        try:
            x + x
        except RuntimeError as e:
            refused = str(e)
    else:
        x.add_(1)
        torch.cuda.synchronize()
    cuvmm.torch.resume()
    intact = bool((x == 1).all())
    ok = x.data_ptr() in found and intact and (allocator == "regions" or "suspended" in refused)
    return {"ok": ok, "found": len(found), "intact": intact, "refused": refused[:200]}


def main() -> None:
    name, allocator = sys.argv[1:3]
    size, cycles = [int(a) for a in (sys.argv[3:] + ["1", "10"][len(sys.argv) - 3:])][:2]
    torch = begin("pool" if allocator == "pool" else "native")
    torch.use_deterministic_algorithms(False)
    print("RESULT " + json.dumps(globals()[name](torch, allocator, size * GIB, cycles)), flush=True)


if __name__ == "__main__":
    main()
