"""Programs that test_torch_pool runs, each in a process of its own: python -m tests.torch_programs NAME native|expandable|pool."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import pickle
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import Any, Callable, Dict, List, Tuple


def begin(allocator: str) -> Any:
    if allocator == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch = importlib.import_module("torch")
    if allocator in ("pool", "own_error"):
        import cuvmm.torch
        cuvmm.torch.use_pool(patch=True, own_error=allocator == "own_error")
    elif allocator == "trivial":
        torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(_trivial(), "trivial_malloc", "trivial_free"))
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    return torch


def _trivial() -> str:
    """The trivial allocator, compiled for this process."""
    out = os.path.join(tempfile.mkdtemp(prefix="cuvmm-"), "trivial.so")
    subprocess.run(shlex.split(os.environ.get("CXX", "c++")) + ["-O2", "-shared", "-fPIC", "-o", out, str(pathlib.Path(__file__).with_name("trivial_allocator.cc")), "-ldl"],
                   check=True)
    return out


def _peak(torch: Any, allocator: str) -> int:
    return int(torch.cuda.max_memory_reserved())


def _used(torch: Any) -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class Training:
    """A model on the GPU, trained on batches that are made there: no copy from the host is in a step's time."""

    def __init__(self, torch: Any, model: Any, batch: Callable[[int], Any]) -> None:
        self.torch, self.model, self.batch = torch, model.cuda(), batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, i: int) -> Tuple[float, float]:
        """The loss of step i, and the seconds it took."""
        x, y = self.batch(i)
        self.torch.cuda.synchronize()
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.torch.nn.functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        loss.backward()
        self.optimizer.step()
        value = loss.item()
        return value, time.perf_counter() - began


def transformer_training(torch: Any) -> Training:
    """A language model; the lengths of its texts vary."""
    nn, width = torch.nn, 512

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, width)
            layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 6)
            self.head = nn.Linear(width, 1000)

        def forward(self, x: Any) -> Any:
            return self.head(self.body(self.embed(x)))

    lengths = _sizes(torch, 2, 64, 1024)
    g = torch.Generator("cuda").manual_seed(2)

    def batch(i: int) -> Any:
        x = torch.randint(0, 1000, (8, lengths[i % 50]), generator=g, device="cuda")
        return x, x.roll(-1, 1)

    return Training(torch, Model(), batch)


def vision_training(torch: Any) -> Training:
    """Convolutions over batches of one size."""
    nn = torch.nn
    blocks: List[Any] = []
    width = 3
    for out in (64, 128, 256, 256):
        blocks += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.AvgPool2d(2)]
        width = out
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256 * 8 * 8, 100))
    g = torch.Generator("cuda").manual_seed(3)

    def batch(_: int) -> Any:
        return torch.randn(64, 3, 128, 128, generator=g, device="cuda"), torch.randint(0, 100, (64,), generator=g, device="cuda")

    return Training(torch, model, batch)


def graph_layers_training(torch: Any) -> Training:
    """Sparse products over a graph whose size varies."""
    nn = torch.nn

    class Layers(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 50)

        def forward(self, x: Any) -> Any:
            n = x.shape[0]
            near = torch.arange(n, device=x.device).roll(1)
            far = torch.arange(n, device=x.device).roll(7)
            x = self.a(x).relu()
            x = self.b(x + x[near] + x[far]).relu()
            return self.c(x + x[near])

    sizes = _sizes(torch, 4, 20_000, 400_000)
    g = torch.Generator("cuda").manual_seed(4)

    def batch(i: int) -> Any:
        return torch.randn(sizes[i % 50], 256, generator=g, device="cuda"), torch.randint(0, 50, (sizes[i % 50],), generator=g, device="cuda")

    return Training(torch, Layers(), batch)


def _sizes(torch: Any, seed: int, least: int, most: int) -> List[int]:
    return [int(n) for n in torch.randint(least, most, (50,), generator=torch.Generator().manual_seed(seed))]


def small_training(torch: Any) -> Training:
    """Many small layers, so that the CPU is what a step waits for: the allocator's own time shows most."""
    nn = torch.nn
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(24)], nn.Linear(128, 10))
    g = torch.Generator("cuda").manual_seed(5)

    def batch(_: int) -> Any:
        return torch.randn(32, 128, generator=g, device="cuda"), torch.randint(0, 10, (32,), generator=g, device="cuda")

    return Training(torch, model, batch)


class Decoding:
    """A language model that continues 8 sequences, a token a step, with caches that grow by concatenation. Every 128 tokens it begins anew."""

    prompt, tokens, layers, width, heads = 64, 128, 8, 512, 8

    def __init__(self, torch: Any) -> None:
        nn, width = torch.nn, self.width
        self.torch = torch

        def part(*modules: Any) -> Any:
            return nn.Sequential(*modules).cuda().half().requires_grad_(False)

        self.embed = part(nn.Embedding(1000, width))
        self.qkv = [part(nn.LayerNorm(width), nn.Linear(width, 3 * width)) for _ in range(self.layers)]
        self.out = [part(nn.Linear(width, width)) for _ in range(self.layers)]
        self.mlp = [part(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(self.layers)]
        self.head = part(nn.LayerNorm(width), nn.Linear(width, 1000))
        self.caches: List[Any] = []

    def _forward(self, x: Any, causal: bool) -> Any:
        torch = self.torch
        h = self.embed(x)
        for i in range(self.layers):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv[i](h).chunk(3, -1))
            if len(self.caches) > i:
                k, v = torch.cat((self.caches[i][0], k), 2), torch.cat((self.caches[i][1], v), 2)
                self.caches[i] = (k, v)
            else:
                self.caches.append((k, v))
            h = h + self.out[i](torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))
            h = h + self.mlp[i](h)
        return self.head(h[:, -1:]).argmax(-1)

    def step(self, i: int) -> Tuple[float, float]:
        """The sum of the tokens of step i, and the seconds it took."""
        torch = self.torch
        if i % self.tokens == 0 or not self.caches:
            self.caches = []
            self.last = self._forward(torch.randint(0, 1000, (8, self.prompt), device="cuda"), True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.last = self._forward(self.last, False)
        value = float(self.last.sum().item())
        return value, time.perf_counter() - began


TRAININGS = {"transformer": transformer_training, "vision": vision_training, "graph_layers": graph_layers_training, "small": small_training}
MODELS: Dict[str, Callable[[Any], Any]] = {**TRAININGS, "decoding": Decoding}


def _train(torch: Any, name: str) -> Dict[str, Any]:
    training = TRAININGS[name](torch)
    steps = [training.step(i) for i in range(50)]
    return {"losses": [loss.hex() for loss, _ in steps], "step": statistics.median(seconds for _, seconds in steps[30:])}


def transformer(torch: Any, allocator: str) -> Dict[str, Any]:
    return _train(torch, "transformer")


def vision(torch: Any, allocator: str) -> Dict[str, Any]:
    return _train(torch, "vision")


def graph_layers(torch: Any, allocator: str) -> Dict[str, Any]:
    return _train(torch, "graph_layers")


def small(torch: Any, allocator: str) -> Dict[str, Any]:
    return _train(torch, "small")


def graphs(torch: Any, allocator: str) -> Dict[str, Any]:
    """Captures, their replays, and the return of their memory."""
    torch.use_deterministic_algorithms(False)
    x = torch.randn(512, 512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            (x @ x).relu().sum()
    torch.cuda.current_stream().wait_stream(side)
    out: List[float] = []
    made = []
    for i in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x @ x).relu() * (i + 1)
            total = y.sum()
        made.append((graph, y, total))
    junk = [torch.randn(1 << 20, device="cuda") for _ in range(8)]  # must not lie where the graphs work
    for graph, y, total in made:
        graph.replay()
        out.append(float(total))
    want = [float(((x @ x).relu() * (i + 1)).sum()) for i in range(3)]
    del junk, y, total, graph
    made.clear()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    sample = torch.randn(16, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    loss = graphed(torch.randn(16, 64, device="cuda", requires_grad=True)).sum()
    loss.backward()
    torch.cuda.synchronize()
    return {"ok": all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(out, want)), "out": out, "want": want}


def streams(torch: Any, allocator: str) -> Dict[str, Any]:
    """A tensor that a second stream uses, freed while that still works on it."""
    torch.use_deterministic_algorithms(False)
    side = torch.cuda.Stream()
    bad = 0
    for i in range(20):
        x = torch.full((1 << 22,), float(i), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            y = x + 1
        x.record_stream(side)
        del x
        z = torch.full((1 << 22,), -1.0, device="cuda")  # must not have x's memory yet
        torch.cuda.synchronize()
        bad += int((y != i + 1).sum())
        del y, z
    return {"ok": bad == 0, "bad": bad}


class Numbers:
    """A data set whose workers fork."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return importlib.import_module("torch").tensor([float(i)])


def _load(torch: Any, **options: Any) -> float:
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork", **options)
    return sum(float(batch.cuda(non_blocking=True).sum()) for batch in loader)


def forks(torch: Any, allocator: str) -> Dict[str, Any]:
    """Workers that fork before the library was called, and after."""
    torch.use_deterministic_algorithms(False)
    totals = [_load(torch), _load(torch), _load(torch, pin_memory=True)]
    held = torch.ones(10, device="cuda")
    pid = os.fork()
    if pid == 0:
        del held  # freed silently
        try:
            torch.ones(1, device="cuda")
        except RuntimeError:
            os._exit(7)
        os._exit(1)
    return {"ok": totals == [sum(range(64))] * 3 and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, "totals": totals}


def ends(torch: Any, allocator: str) -> Dict[str, Any]:
    """The process ends with live tensors, and work under way."""
    torch.use_deterministic_algorithms(False)
    _held.extend(torch.randn(2048, 2048, device="cuda") for _ in range(4))
    for _ in range(50):
        _held[0] = _held[1] @ _held[2]
    return {"ok": True}


_held: List[Any] = []


def interrupted(torch: Any, allocator: str) -> Dict[str, Any]:
    """Ctrl-C, and a timer's signals."""
    torch.use_deterministic_algorithms(False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    caught = False
    try:
        while True:
            torch.ones(1000, device="cuda")
    except KeyboardInterrupt:
        caught = True
    rang: List[int] = []
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    while len(rang) < 100:
        torch.ones(1000, device="cuda")
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"ok": caught and float(torch.ones(10, device="cuda").sum()) == 10}


def compiled(torch: Any, allocator: str) -> Dict[str, Any]:
    """torch.compile in its default mode works, and graph trees do not."""
    torch.use_deterministic_algorithms(False)
    x = torch.randn(1 << 16, device="cuda")
    f = torch.compile(lambda x: (x.sin() * x.cos()).relu().sum())
    trees = torch.compile(lambda x: (x.sin() + x.cos()).relu().sum(), mode="reduce-overhead")
    text = ""
    try:
        trees(x)
    except RuntimeError as e:
        text = str(e)
    same = abs(float(f(x)) - float((x.sin() * x.cos()).relu().sum())) < 1
    return {"ok": same and "does not yet support checkPoolLiveAllocations" in text, "text": text[:200]}


def workspaces(torch: Any, allocator: str) -> Dict[str, Any]:
    """The workspaces of cuBLAS are live blocks, one for each stream, until they are cleared."""
    torch.use_deterministic_algorithms(False)
    x = torch.randn(64, 64, device="cuda")
    sizes = [torch.cuda.memory_allocated()]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x @ x
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    torch._C._cuda_clearCublasWorkspaces()
    sizes.append(torch.cuda.memory_allocated())
    return {"ok": sizes[0] + (1 << 20) < sizes[1] < sizes[2] and sizes[3] == sizes[0], "sizes": sizes}


def own_error(torch: Any, allocator: str) -> Dict[str, Any]:
    """With the shim, being out of memory is PyTorch's own error."""
    torch.use_deterministic_algorithms(False)
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as e:
        return {"ok": str(e).startswith("CUDA out of memory. Tried to allocate 32768.00 GiB") and torch.cuda.memory_stats()["num_ooms"] == 1, "text": str(e)}
    return {"ok": False}


# What every function of torch.cuda.memory does on the pool: it returns, with these arguments, or says why not.
MEMORY_FUNCTIONS: Dict[str, Any] = {
    "caching_allocator_alloc": (4096,), "caching_allocator_delete": None, "caching_allocator_enable": (True,), "empty_cache": (), "get_allocator_backend": (),
    "get_per_process_memory_fraction": (), "host_memory_stats": (), "host_memory_stats_as_nested_dict": (), "list_gpu_processes": (),
    "max_memory_allocated": (), "max_memory_cached": (), "max_memory_reserved": (), "mem_get_info": (), "memory_allocated": (), "memory_cached": (),
    "memory_reserved": (), "memory_snapshot": (), "memory_stats": (), "memory_stats_as_nested_dict": (), "memory_summary": (),
    "reset_accumulated_host_memory_stats": (), "reset_accumulated_memory_stats": (), "reset_max_memory_allocated": (), "reset_max_memory_cached": (),
    "reset_peak_host_memory_stats": (), "reset_peak_memory_stats": (), "set_per_process_memory_fraction": (1.0,), "_record_memory_history": ("all",), "_snapshot": (),
    "MemPool": "does not yet support createOrIncrefPool", "change_current_allocator": None, "CUDAPluggableAllocator": None, "use_mem_pool": None,
}
# The keys of memory_stats that programs use, as PyTorch's own cache has them.
GROUPS = ("active", "active_bytes", "allocated_bytes", "allocation", "inactive_split", "inactive_split_bytes", "requested_bytes", "reserved_bytes", "segment")


def memory_functions(torch: Any, allocator: str) -> Dict[str, Any]:
    """The list is walked; a function that it lacks is a failure, since nothing says what that does."""
    torch.use_deterministic_algorithms(False)
    warnings.simplefilter("ignore")
    memory, wrong = torch.cuda.memory, []
    x = torch.ones(1000, device="cuda")
    public = set(memory.__all__)
    if public - set(MEMORY_FUNCTIONS):
        wrong.append(f"not in the list: {sorted(public - set(MEMORY_FUNCTIONS))}")
    for name, arguments in MEMORY_FUNCTIONS.items():
        if arguments is None or not hasattr(memory, name):
            continue
        try:
            result = getattr(memory, name)(*(arguments if isinstance(arguments, tuple) else ()))
            if name == "caching_allocator_alloc":
                memory.caching_allocator_delete(result)
            if isinstance(arguments, str):
                wrong.append(f"{name} returned {result!r}")
        except Exception as e:  # noqa: BLE001
            if not isinstance(arguments, str) or arguments not in str(e):
                wrong.append(f"{name}: {type(e).__name__}: {e}")
    y = torch.ones(100_000, device="cuda")
    address = y.data_ptr()
    del y
    with tempfile.NamedTemporaryFile() as f:
        memory._dump_snapshot(f.name)
        snapshot = pickle.load(f)
    events = [e["action"] for e in snapshot["device_traces"][0] if e["addr"] == address]
    if events[-3:] != ["alloc", "free_requested", "free_completed"]:
        wrong.append(f"events {events}")
    if not any(b["address"] == x.data_ptr() and b["state"] == "active_allocated" for s in snapshot["segments"] for b in s["blocks"]):
        wrong.append("the snapshot lacks a live block")
    memory._record_memory_history(enabled=None)
    missing = [f"{g}.{p}.{c}" for g in GROUPS for p in ("all", "large_pool", "small_pool") for c in ("current", "peak", "allocated", "freed")
               if f"{g}.{p}.{c}" not in memory.memory_stats()]
    if missing:
        wrong.append(f"keys {missing}")
    same = getattr(getattr(torch, "accelerator", None), "memory_allocated", memory.memory_allocated)
    if same() != memory.memory_allocated():
        wrong.append("torch.accelerator has other statistics")
    return {"ok": not wrong, "wrong": wrong}


def gradients(torch: Any, allocator: str) -> Dict[str, Any]:
    """use_mem_pool belongs to a thread: what the backward pass allocates in its own is elsewhere."""
    import cuvmm.torch
    torch.use_deterministic_algorithms(False)
    pool = cuvmm.torch.pool()
    with torch.cuda.use_mem_pool(pool):
        weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
        (weight * 2).sum().backward()
    segments = [(s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    inside = [any(a <= t.data_ptr() < b for a, b in segments) for t in (weight, weight.grad)]
    return {"ok": inside == [True, False], "inside": inside}


def exhausted(torch: Any, allocator: str) -> Dict[str, Any]:
    """What cannot be had is an error as PyTorch words it, and nothing is lost by it."""
    torch.use_deterministic_algorithms(False)
    keep = torch.ones(1 << 20, device="cuda")
    text = ""
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    except RuntimeError as e:
        text = str(e)
    torch.cuda.set_per_process_memory_fraction(0.01)
    limited = ""
    try:
        torch.empty(int(torch.cuda.get_device_properties(0).total_memory * 0.02), dtype=torch.uint8, device="cuda")
    except RuntimeError as e:
        limited = str(e)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {"ok": "CUDA out of memory" in text and "CUDA out of memory" in limited and float(keep.sum()) == 1 << 20, "text": text, "limited": limited}


def segments(torch: Any, allocator: str) -> Dict[str, Any]:
    """A MemPool beside PyTorch's own cache, of shareable segments."""
    import cuvmm.torch
    torch.use_deterministic_algorithms(False)
    pool = cuvmm.torch.pool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.ones(1 << 22, device="cuda")
    y = x * 2
    ok = float(y.sum()) == 2 * (1 << 22)
    del x, y, pool
    torch.cuda.empty_cache()
    return {"ok": ok}


def extensible(torch: Any, allocator: str) -> Dict[str, Any]:
    """A tensor grows in place under a graph that was captured before."""
    import cuvmm.torch
    torch.use_deterministic_algorithms(False)
    rows = cuvmm.torch.extensible((4096, 1024, 1024), torch.bfloat16)
    first = rows.commit(8).zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.add_(1)
        refused = ""
        try:
            rows.commit(64)
        except cuvmm.Error as e:
            refused = str(e)
    rows.used_by(graph)
    more = rows.commit(1024).fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    ok = more.data_ptr() == first.data_ptr() and bool((more[:8] == 6).all()) and bool((more[8:] == 5).all()) and "captur" in refused
    try:
        rows.release(8)
        ok = False
    except cuvmm.InUseError:
        pass
    before = _used(torch)
    del more
    rows.unused_by(graph)
    rows.release(8)
    graph.replay()
    ok = ok and bool((first == 7).all()) and before - _used(torch) >= 1000 << 21
    del first, graph
    rows.close()
    return {"ok": ok, "refused": refused}


def _relay(tasks: Any, results: Any) -> None:
    import cuvmm.multiprocessing
    cuvmm.multiprocessing.use_tensors()
    t: Any
    for t in iter(tasks.get, None):
        results.put((float(t.sum()), t * 2))
        del t
    results.get(timeout=60)  # stays until what it sent was received


def queues(torch: Any, allocator: str) -> Dict[str, Any]:
    """Tensors in queues, to a process and back: the last work on them counts, and their memory is free again afterwards."""
    import cuvmm.multiprocessing
    torch.use_deterministic_algorithms(False)
    cuvmm.multiprocessing.use_tensors()
    context = torch.multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    worker = context.Process(target=_relay, args=(tasks, results))
    worker.start()
    bad = []
    side = torch.cuda.Stream()  # one: PyTorch's own allocator has free memory for each
    for i in range(40):
        with torch.cuda.stream(side):
            x = torch.zeros(1 << 20, device="cuda", dtype=torch.float64)
            torch.cuda._sleep(20_000_000)
            x += i
        tasks.put(x.view(1024, 1024).t()[1:])
        total, twice = results.get(timeout=60)
        if total != i * 1023 * 1024 or twice.shape != (1023, 1024) or not bool((twice == 2 * i).all()):
            bad.append((i, total))
        side.synchronize()
        del x, twice
        if i == 3:
            torch.cuda.synchronize()
            time.sleep(1)
            before = _used(torch)
    time.sleep(1)
    grown = _used(torch) - before
    tasks.put(None)
    results.put(None)
    worker.join(60)
    return {"ok": not bad and grown <= 32 << 20, "bad": bad, "grown": grown}


def main() -> None:
    name, allocator = sys.argv[1:3]
    torch = begin(allocator)
    result = globals()[name](torch, allocator)
    torch.cuda.synchronize()
    if allocator != "none":
        result["peak"] = _peak(torch, allocator)
        result["used"] = _used(torch)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
