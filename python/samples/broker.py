"""An engine is killed in mid-request. Its successor finds the weights in place, loads nothing, and answers.

    cuvmm serve &                        # or go run -C cmd/cuvmm . serve
    python3 python/samples/broker.py [--layers 8] [--width 1024]

Both engines are the same program: whichever comes first loads the weights into memory of the broker, which keeps it when the engine is
gone. Without PyTorch an engine computes sums of bytes in place of products of matrices.
"""

from __future__ import annotations

import argparse
import array
import importlib.util
import os
import random
import subprocess
import sys
import time
import zlib
from typing import Any, Dict, List, Tuple

import cuvmm

NAME = "weights of samples/broker.py"
TOKENS, HEARD = 16, 3  # of an answer; those that are there when the engine is killed
torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") is not None else None


def model(layers: int, width: int) -> Dict[str, Tuple[str, Tuple[int, ...]]]:
    """What a module's state_dict would say: dtype and shape of each tensor."""
    return {f"layer.{i}.w": ("float32", (width, width)) for i in range(layers)}


def load(weights: cuvmm.Writer) -> None:
    """What takes minutes in an engine: here every weight is a random number."""
    for i, w in enumerate(weights.values()):
        if torch:
            torch.manual_seed(i)
            torch.from_dlpack(w).copy_(torch.randn(w.shape, device="cuda") / w.shape[0] ** 0.5)
        else:
            w.write(array.array("f", [random.Random(i).random()]) * (w.shape[0] * w.shape[1]))


class Engine:
    """Answers from the weights of an object."""

    def __init__(self, weights: cuvmm.Object) -> None:
        self.layers = [torch.from_dlpack(w.allow_readonly()) if torch else w for w in weights.values()]

    def next(self, token: int) -> int:
        if not torch:
            return zlib.crc32(b"".join([str(token).encode(), *(w.tobytes() for w in self.layers)]))
        x = torch.zeros(self.layers[0].shape[1], device="cuda")
        x[token % len(x)] = len(x) ** 0.5
        for w in self.layers:
            x = torch.tanh(w @ x)
        return int(x.argmax())


def serve(socket: str, layers: int, width: int) -> None:
    """An engine's process: a request is a token on standard input, and an answer some lines of them."""
    cuvmm.memory_info()  # makes the context, which is no part of what is measured
    with cuvmm.connect_broker(socket) as broker:
        began = time.monotonic()
        with broker.ensure(NAME, model(layers, width), load) as weights:
            engine = Engine(weights)
            took = 1000 * (time.monotonic() - began)
            who = "loaded them" if weights.about.pid == os.getpid() else f"found what process {weights.about.pid} had loaded"
            print(f"engine {os.getpid()}: {len(weights)} tensors, {weights.about.nbytes} bytes, in {took:.1f} ms: {who}", flush=True)
            for line in sys.stdin:
                token = int(line)
                for _ in range(TOKENS):
                    time.sleep(0.01)  # a larger model takes longer
                    token = engine.next(token)
                    print(token, flush=True)
            del engine


def start(o: argparse.Namespace) -> "subprocess.Popen[str]":
    e = subprocess.Popen([sys.executable, __file__, "--socket", o.socket, "--layers", str(o.layers), "--width", str(o.width), "--engine"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(line(e))
    return e


def ask(e: "subprocess.Popen[str]", token: int, tokens: int = TOKENS) -> List[int]:
    """Sends a request, and returns the first tokens of the answer."""
    assert e.stdin is not None
    e.stdin.write(f"{token}\n")
    e.stdin.flush()
    return [int(line(e)) for _ in range(tokens)]


def line(e: "subprocess.Popen[str]") -> str:
    assert e.stdout is not None
    said = e.stdout.readline()
    if not said:
        raise SystemExit(f"an engine ended with status {e.wait()}")
    return said.rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", default="", help="the broker's (default: that of cuvmm serve)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="a layer has the square of it in float32 (default: 1024, 4 MiB)")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if min(o.layers, o.width) < 1:
        parser.error(f"--layers {o.layers} --width {o.width}: use at least 1 of each")
    if o.engine:
        serve(o.socket, o.layers, o.width)
        return
    with cuvmm.connect_broker(o.socket) as broker:
        first = start(o)
        ask(first, 1)
        heard = ask(first, 2, HEARD)
        first.kill()
        first.wait()
        print(f"engine {first.pid}: killed when {HEARD} tokens of {TOKENS} were there")
        second = start(o)
        answer = ask(second, 2)
        second.communicate()
        broker.remove(NAME)
    if second.returncode:
        raise SystemExit(f"an engine ended with status {second.returncode}")
    if answer[:HEARD] != heard:
        raise SystemExit(f"the successor has other weights: it answered {answer[:HEARD]}, where {heard} was there")
    print(f"engine {second.pid}: answered all {TOKENS}, of which the first {HEARD} are the same")


if __name__ == "__main__":
    try:
        main()
    except cuvmm.Error as e:
        raise SystemExit(f"broker.py: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
