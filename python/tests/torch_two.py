"""PyTorch on two GPUs: python -m tests.torch_two peers|ddp|fsdp native|expandable|pool

``peers`` is one process that uses both: copies each way, a gather, staging through pinned memory, and NCCL with a communicator for
each GPU. ``ddp`` and ``fsdp`` train one model with a process for each GPU. Each prints RESULT and a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, Dict, List

from .support import ROOT, environment
from .torch_programs import begin

STEPS = 120


def peers(allocator: str) -> Dict[str, Any]:
    torch = begin(allocator)
    comm = importlib.import_module("torch.nn.parallel.comm")
    nccl = importlib.import_module("torch.cuda.nccl")
    assert torch.cuda.device_count() >= 2, "two GPUs are needed"
    free = [torch.cuda.mem_get_info(d)[0] for d in range(2)]
    checks: Dict[str, bool] = {}
    for n in (1000, 1 << 20, 64 << 20):
        near = torch.arange(n, device="cuda:0", dtype=torch.float32)
        far = near.to("cuda:1")
        checks[f"to {n}"] = bool((far.cpu() == near.cpu()).all())
        back = torch.empty_like(near)
        back.copy_(far + 1)
        checks[f"copy_ {n}"] = bool((back == near + 1).all())
        pinned = torch.empty(n, dtype=torch.float32, pin_memory=True)
        pinned.copy_(far, non_blocking=True)
        torch.cuda.synchronize(1)
        checks[f"pinned {n}"] = bool((pinned == torch.arange(n)).all())
        parts = [torch.full((n,), float(d), device=f"cuda:{d}") for d in range(2)]
        together = comm.gather(parts, destination=0)
        checks[f"gather {n}"] = bool((together.cpu() == torch.cat([p.cpu() for p in parts])).all())
        nccl.all_reduce(parts)
        checks[f"NCCL {n}"] = all(bool((p == 1).all()) for p in parts)
    # A stream of the other device uses a block, which is freed at once.
    with torch.cuda.device(1):
        other = torch.cuda.Stream()
    for i in range(200):
        block = torch.full((1 << 20,), float(i), device="cuda:0")
        done = torch.cuda.current_stream(0).record_event()
        with torch.cuda.stream(other):
            other.wait_event(done)
            far = block.to("cuda:1", non_blocking=True)
            block.record_stream(other)
        del block
        torch.full((1 << 20,), -1.0, device="cuda:0")
        other.synchronize()
        if not bool((far == i).all()):
            checks["record_stream"] = False
    checks.setdefault("record_stream", True)
    # The price of peers: memory that both devices reach, beside that of one device.
    times: List[float] = []
    for _ in range(9):
        torch.cuda.empty_cache()
        torch.cuda.synchronize(0)
        began = time.perf_counter()
        torch.empty(4 << 30, dtype=torch.uint8, device="cuda:0")
        times.append(time.perf_counter() - began)
    rate = _rate(torch)
    torch.cuda.empty_cache()
    return {"ok": all(checks.values()), "failed": [k for k, v in checks.items() if not v], "alloc_4GiB_ms": round(statistics.median(times) * 1e3, 3),
            "copy_GBps": rate, "free_before": free}


def _rate(torch: Any) -> float:
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
    b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
    times = []
    for _ in range(9):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.perf_counter() - began)
    return round((1 << 30) / statistics.median(times) / 1e9, 1)


def rank(kind: str, allocator: str) -> None:
    """A process of a group: torch.distributed's environment says which."""
    torch = begin(allocator)
    torch.use_deterministic_algorithms(False)
    dist = importlib.import_module("torch.distributed")
    me = int(os.environ["RANK"])
    torch.cuda.set_device(me)
    dist.init_process_group("nccl", device_id=torch.device("cuda", me))
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 8).cuda()
    wrapped: Any
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[me])
    else:
        fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
        for block in model.layers:
            fully_shard(block)
        wrapped = fully_shard(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    g = torch.Generator("cuda").manual_seed(5 + me)
    losses, times = [], []
    for i in range(STEPS):
        x = torch.randn(8, 128 + 32 * (i * 7 % 9), 1024, generator=g, device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = (wrapped(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    if me == 0:
        print("RESULT " + json.dumps({"losses": losses, "step_ms": [statistics.median(times[i:i + STEPS // 3]) * 1e3 for i in range(0, STEPS, STEPS // 3)], "peak": torch.cuda.max_memory_reserved()}), flush=True)
    dist.destroy_process_group()


def group(kind: str, allocator: str) -> Dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, "-m", "tests.torch_two", kind, allocator], cwd=ROOT / "python", stdout=subprocess.PIPE, text=True,
                              env=dict(environment(), RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
             for r in range(2)]
    outputs = [p.communicate(timeout=300)[0] for p in ranks]
    assert not any(p.returncode for p in ranks), [p.returncode for p in ranks]
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
    result: Dict[str, Any] = json.loads(line[len("RESULT "):])
    return result


def compare(kind: str) -> Dict[str, Any]:
    """A group on the pool beside one on expandable segments, in turn, twice: steps and their ratios are of each third of the steps."""
    results: Dict[str, List[Dict[str, Any]]] = {"expandable": [], "pool": []}
    for a in ("expandable", "pool", "pool", "expandable"):
        results[a].append(group(kind, a))
    pool, other = results["pool"][-1], results["expandable"][-1]
    best = {a: [min(third) for third in zip(*(r["step_ms"] for r in results[a]))] for a in results}
    differ = max(abs(a - b) / abs(b) for a, b in zip(pool["losses"], other["losses"]))
    return {"ok": differ < 1e-3, "losses_differ_by": differ, "step": [round(a / b, 3) for a, b in zip(best["pool"], best["expandable"])],
            "step_ms": [round(t, 2) for t in best["pool"]], "memory": round(pool["peak"] / other["peak"], 3), "peak_GiB": round(pool["peak"] / (1 << 30), 2)}


def main() -> None:
    kind, allocator = sys.argv[1:3]
    if "RANK" in os.environ:
        rank(kind, allocator)
        return
    result = peers(allocator) if kind == "peers" else compare(kind)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
