"""Trains on a table that a Go process grows, and publishes the model, which another Go process serves.

    go run ./python/samples/embeddings -dir FOLDER             # one terminal
    python3 python/samples/train.py FOLDER/table FOLDER/model  # another
    go run ./python/samples/serve -socket FOLDER/model         # a third

With PyTorch the rows are a tensor over the publisher's memory, without a copy, and the weights are written where they
are published. Without PyTorch the newest rows are read and computed in Python.
"""

from __future__ import annotations

import argparse
import array
import importlib.util
from typing import Any, Tuple

import cuvmm

FEATURES = 8
ROW = FEATURES + 1  # and the label
STEPS, RATE = 10, 1.0
torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") is not None else None


def learn(table: cuvmm.Array, weights: Any) -> Tuple[Any, float]:
    """Some steps of gradient descent on the newest rows; returns the weights and the loss before them."""
    if torch:
        rows = torch.from_dlpack(table.allow_readonly()).view(-1, ROW)
        x, y = rows[:, :FEATURES], rows[:, FEATURES]
        loss = float(((x @ weights - y) ** 2).mean())
        for _ in range(STEPS):
            weights = weights - RATE * (x.T @ (x @ weights - y)) / len(y)
        return weights, loss
    raw = memoryview(table[max(0, len(table) - 200 * ROW):].tobytes()).cast("f")
    examples = [(raw[i:i + FEATURES], raw[i + FEATURES]) for i in range(0, len(raw), ROW)]
    loss = sum(error(weights, x, y) ** 2 for x, y in examples) / len(examples)
    for _ in range(STEPS):
        gradient = [0.0] * FEATURES
        for x, y in examples:
            e = error(weights, x, y)
            for i in range(FEATURES):
                gradient[i] += e * x[i] / len(examples)
        weights = [w - RATE * g for w, g in zip(weights, gradient)]
    return weights, loss


def error(weights: Any, x: Any, y: float) -> float:
    return float(sum(w * v for w, v in zip(weights, x)) - y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", help="the socket of the table's publisher")
    parser.add_argument("model", help="the socket to publish the model on")
    o = parser.parse_args()
    stream = torch.cuda.current_stream() if torch else None
    weights: Any = torch.zeros(FEATURES, device="cuda") if torch else [0.0] * FEATURES
    with cuvmm.connect(o.table) as client, client.follow("embeddings") as table, cuvmm.empty(0, "float32", reserve=64 << 20) as memory:
        with cuvmm.Server(o.model) as server:
            model = server.publish("model", memory)
            try:
                while True:
                    table.next(stream)
                    weights, loss = learn(table.array, weights)
                    print(f"generation {table.generation}: {len(table) // ROW} rows, loss {loss:.6f}", flush=True)
                    memory.resize(len(memory) + FEATURES)  # behind what readers may be using
                    newest = memory.array[len(memory) - FEATURES:]
                    if torch:
                        torch.from_dlpack(newest).copy_(weights)
                    else:
                        newest.write(array.array("f", weights))
                    del newest
                    model.announce(stream=stream)
            except cuvmm.WithdrawnError:
                print("the table is complete", flush=True)
            model.settle(10)


if __name__ == "__main__":
    try:
        main()
    except cuvmm.Error as e:
        raise SystemExit(f"train.py: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
