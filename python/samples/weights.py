"""A trainer hands new weights, tensors by name, to two workers after every step, without a copy, and gets all of its memory back.

    python3 python/samples/weights.py [--bytes 2147483648] [--steps 5]

The trainer rewrites the weights in place and announces them. Each worker's next batch uses the newest weights, behind
the trainer's work in the order of the streams: no worker's host waits for a GPU. ``rewrite`` waits until the workers have
released what they read, so none computes with a mixture of two steps. Two arrays take turns: while one is rewritten, the
workers have the other. Each is published with a manifest, which the workers compare with the model that they were written for. At the end the trainer takes the weights back while both workers go on running: when ``settle``
returns, no worker has any of them mapped, and as much memory of the device is free as before.
"""

from __future__ import annotations

import argparse
import array
import importlib.util
import struct
import subprocess
import sys
import tempfile
from typing import Any, Dict, List, Tuple

import cuvmm

HALVES = ("even", "odd")
LAYERS = 2
torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") is not None else None


def model(nbytes: int) -> Dict[str, Tuple[str, Tuple[int, ...]]]:
    """What a module's state_dict would say: dtype and shape of each tensor."""
    return {f"layer.{i}.w": ("float32", (nbytes // 4 // LAYERS,)) for i in range(LAYERS)}


def worker(path: str, name: str, nbytes: int) -> None:
    expected = cuvmm.manifest_of(model(nbytes))
    with cuvmm.connect(path) as client, client.follow(HALVES[0], expect=expected) as even, client.follow(HALVES[1], expect=expected) as odd:
        print(f"{name}: ready", flush=True)
        step = 0
        try:
            while True:
                weights = (even, odd)[step % 2]
                generation = weights.next(streams())
                if len(weights) > 0:  # otherwise the trainer has taken them back
                    values = [first(w) for w in weights.tensors.values()]
                    if not weights.intact(generation):  # which rewrite prevents, unless the trainer excludes this worker
                        raise SystemExit(f"{name}: the weights changed while they were read")
                    print(f"{name}: computes with the weights of step {values[0]:g}, {len(values)} tensors", flush=True)
                    step += 1
                weights.release(*streams())  # this batch is the last that reads them
        except cuvmm.WithdrawnError:
            pass


def streams() -> List[Any]:
    """The stream of this program's work; none without PyTorch: then the host waits."""
    return [torch.cuda.current_stream()] if torch else []


def first(w: cuvmm.Tensor) -> float:
    """A batch: here it reads the first weight of a tensor."""
    if torch:
        return float(torch.from_dlpack(w.allow_readonly())[0])
    return float(struct.unpack_from("f", w.tobytes())[0])


def train(weights: List[cuvmm.Weights], published: List[cuvmm.Publication], workers: List["subprocess.Popen[str]"], nbytes: int, steps: range) -> None:
    for step in steps:
        which = step % 2
        with published[which].rewrite(60):
            weights[which].memory.resize(nbytes)
            write(weights[which], float(step))
            published[which].announce(stream=streams())
        for w in workers:
            print(line(w))
    for p, half in zip(published, weights):
        p.shrink(0)
        p.settle(60)
        half.memory.resize(0)
        half.memory.trim()


def write(weights: cuvmm.Weights, value: float) -> None:
    """A step of training: here every weight becomes the step's number. A trainer of a module calls weights.update(module)."""
    for name, w in weights.items():
        if torch:
            torch.from_dlpack(w).fill_(value)
        else:
            weights.update({name: array.array("f", [value]) * w.shape[0]})


def line(w: "subprocess.Popen[str]") -> str:
    assert w.stdout is not None
    said = w.stdout.readline()
    if not said:
        raise SystemExit(f"a worker ended with status {w.wait()}")
    return said.rstrip()


def trainer(bytes_of_weights: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder, cuvmm.Server(f"{folder}/weights") as server:
        weights = [cuvmm.Weights.of(model(bytes_of_weights)) for _ in HALVES]
        nbytes = len(weights[0].memory)
        published = [server.publish(half, w) for half, w in zip(HALVES, weights)]
        workers: List["subprocess.Popen[str]"] = [
            subprocess.Popen([sys.executable, __file__, "--bytes", str(bytes_of_weights), "--worker", server.path, f"worker {i}"], stdout=subprocess.PIPE, text=True) for i in (1, 2)]
        for w in workers:
            print(line(w))
        train(weights, published, workers, nbytes, range(2))  # loads what the libraries load once
        before = cuvmm.memory_info().free
        train(weights, published, workers, nbytes, range(2, 2 + steps))
        after = cuvmm.memory_info().free
        print(f"trainer: {before} bytes were free before the weights, and {after} are afterwards, with both workers still following")
        for p in published:
            p.withdraw()
        for w in workers:
            w.communicate()
        for each in weights:
            each.close()
        if after < before:
            raise SystemExit(f"{before - after} bytes stayed behind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of the weights, twice (default: 64 MiB)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--worker", nargs=2, metavar=("SOCKET", "NAME"), help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.bytes < 4 * LAYERS or o.steps < 1:
        parser.error(f"--bytes {o.bytes} --steps {o.steps}: use at least {4 * LAYERS} bytes and 1 step")
    if o.worker:
        path, name = o.worker
        worker(path, name, o.bytes)
    else:
        trainer(o.bytes, o.steps)


if __name__ == "__main__":
    try:
        main()
    except cuvmm.Error as e:
        raise SystemExit(f"weights.py: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
