"""Follows a publication of another process, and prints each generation.

    go run ./samples/11-ipc-server -dir FOLDER publish      # one terminal
    python3 python/samples/follow.py FOLDER/server numbers  # another

Kill the publisher and start it again: this process prints that its memory is stale, and continues at the same address.
"""

from __future__ import annotations

import argparse

import cuvmm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("socket")
    parser.add_argument("name")
    parser.add_argument("--generations", type=int, default=0, help="how many to show (default: all)")
    o = parser.parse_args()
    with cuvmm.connect(o.socket, reconnect=True) as client, client.follow(o.name) as table:
        shown = 0
        while o.generations == 0 or shown < o.generations:
            try:
                table.next(timeout=5)
            except cuvmm.WaitTimeout:
                print(f"{table.state}: nothing new for 5 seconds", flush=True)
                continue
            a = table.array
            print(f"generation {table.generation}: {len(a)} of {a.dtype} at {a.ptr:#x}, the last are {a[max(0, len(a) - 3):].tolist()}", flush=True)
            del a
            shown += 1


if __name__ == "__main__":
    try:
        main()
    except cuvmm.Error as e:
        raise SystemExit(f"follow.py: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
