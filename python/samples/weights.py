"""A trainer hands new weights to two workers after every step, and nothing of it stays behind.

    python3 python/samples/weights.py [--bytes 2147483648] [--steps 5]

The trainer writes the weights where they are, and announces them; each worker's next batch uses the newest that is
complete, in the order of its stream, without a copy or a wait of the host. The weights are two arrays that take turns,
so no worker reads what the trainer writes. At the end the trainer withdraws them, and its memory is its own again:
followers that have gone pin nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from typing import Any, Callable, List, Tuple

import cuvmm

HALVES = ("even", "odd")


def tensor_of(array: cuvmm.Array) -> Tuple[Any, Callable[[], float]]:
    """What a program computes with, and its first element: a tensor if PyTorch is there, else the array itself."""
    if importlib.util.find_spec("torch") is None:
        return array, lambda: float(array[:1].tolist()[0])
    torch: Any = importlib.import_module("torch")
    t = torch.from_dlpack(array.allow_readonly())
    return t, lambda: float(t[0])


def worker(path: str, name: str) -> None:
    with cuvmm.connect(path) as client:
        weights = {half: client.follow(half) for half in HALVES}
        print(f"{name}: ready", flush=True)
        step = 0
        try:
            while True:
                half = weights[HALVES[step % 2]]
                half.next()
                tensor, first = tensor_of(half.array)
                print(f"{name}: works with the weights of step {first():g}, {len(half)} of them", flush=True)
                del tensor, first
                step += 1
        except cuvmm.WithdrawnError:
            pass
        for half in weights.values():
            half.close()


def trainer(bytes_of_weights: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/weights"
        memory = [cuvmm.empty(bytes_of_weights // 4, "float32") for _ in HALVES]
        with cuvmm.Server(path) as server:
            published = [server.publish(half, m) for half, m in zip(HALVES, memory)]
            workers: List["subprocess.Popen[str]"] = [
                subprocess.Popen([sys.executable, __file__, "--worker", path, f"worker {i}"], stdout=subprocess.PIPE, text=True) for i in (1, 2)]
            for w in workers:
                assert w.stdout is not None
                print(w.stdout.readline(), end="")
            for step in range(steps):
                which = step % 2
                # Every worker's line of the step before is read: none works with this half any more.
                write(memory[which], float(step))
                published[which].announce()
                for w in workers:
                    assert w.stdout is not None
                    print(w.stdout.readline(), end="")
            for p in published:
                p.settle(60)
                p.withdraw()
            for w in workers:
                w.wait()
                assert w.stdout is not None
                w.stdout.close()
            pinned = sum(f.pinned for p in published for f in p.followers())
        for m in memory:
            m.resize(0)
            print(f"trainer: {m.trim()} bytes given back, {pinned} pinned by others")
            m.close()


def write(m: cuvmm.Shared, value: float) -> None:
    """A step of training: here every weight is the step's number."""
    if importlib.util.find_spec("torch") is None:
        import array
        m.array.write(array.array("f", [value]) * len(m))
        return
    torch: Any = importlib.import_module("torch")
    torch.from_dlpack(m.array).fill_(value)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of the weights, twice (default: 64 MiB)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--worker", nargs=2, metavar=("SOCKET", "NAME"), help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.worker:
        worker(*o.worker)
    else:
        trainer(o.bytes, o.steps)


if __name__ == "__main__":
    main()
