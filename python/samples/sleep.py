"""Trains a model whose process has the GPU for a turn, and then sleeps: start it in several terminals.

    python3 python/samples/sleep.py /tmp/turn

Who has locked the file has the GPU. Weights, optimizer and workspaces leave it between two turns, into pinned host memory, and come back
at their addresses. All of PyTorch's memory is in the pool: in a region (cuvmm.torch.region) a backward pass would allocate outside of
it, because its threads are others. It needs PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.util
from typing import Any

import cuvmm
import cuvmm.torch

WIDTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lock", help="a file that all trainers of the GPU name")
    parser.add_argument("--layers", type=int, default=16, help="of 64 MiB of weights each")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    if min(o.layers, o.turns) < 1:
        parser.error("use at least one layer and one turn")
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("sleep.py: PyTorch is not installed (python3 -m pip install torch)")
    cuvmm.torch.use_pool()  # before CUDA is initialised
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(o.seed)
    with open(o.lock, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(o.layers))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for turn in range(o.turns):
            if turn:
                fcntl.flock(lock, fcntl.LOCK_EX)
                cuvmm.torch.resume(timeout=60)
            for _ in range(20):
                x = torch.randn(64, WIDTH, device="cuda")
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)  # or the gradients would be kept, too
            text = f"loss {loss.item():.4f}"
            del x, loss
            gone = cuvmm.torch.suspend()
            print(f"turn {turn}: {text}; {gone.given >> 20} MiB went back, and {cuvmm.memory_info().free >> 20} are free", flush=True)
            fcntl.flock(lock, fcntl.LOCK_UN)


if __name__ == "__main__":
    try:
        main()
    except cuvmm.Error as e:
        raise SystemExit(f"sleep.py: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
