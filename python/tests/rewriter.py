"""A process that publishes elements that are all the same, and rewrites them in two halves, by commands on its standard input.

The commands are those of tests/peer for this, about the publication "table".
"""

import sys
from typing import Optional, Tuple

import cuvmm
from cuvmm import _driver
from cuvmm._driver import Stream

dev = _driver.device(0)
stream = Stream(dev)
published: Optional[cuvmm.Publication] = None


def fill(p: cuvmm.Publication, part: int, value: int) -> None:
    half = p.memory.array.nbytes // 2
    with dev.current() as d:
        d.call("cuMemsetD8Async", p.memory.array.ptr + part * half, value % 256, half, stream.handle)


def rewrite(p: cuvmm.Publication, exclude_after: Optional[float] = None) -> None:
    with p.rewrite(60, exclude_after):
        for part in (0, 1):
            fill(p, part, p.generation)
        p.announce(stream=stream.handle.value)


def keep(broker: str, socket: str, length: int, incomplete: bool) -> "Tuple[Optional[cuvmm.Publication], str]":
    """Publishes memory that a broker keeps, as in tests/peer."""
    memory = cuvmm.connect_broker(broker, wait=True).keep("table", length, "uint32", wait=True, timeout=60)
    try:
        p = cuvmm.Server(socket).publish("table", memory, writable=True, incomplete=incomplete)
    except cuvmm.IncompleteError:
        return None, "incomplete"
    said = f"{p.generation > 0} {p.rewriting}".lower()
    if not p.generation or p.rewriting:
        memory.array.write(bytes(memory.array.nbytes))
        p.announce()
    return p, said


def check(socket: str, times: int) -> int:
    """Reads by three kinds of next."""
    mixed = 0
    with cuvmm.connect(socket) as client, client.follow("table") as table:
        for n in range(times):
            table.next(stream.handle.value if n % 3 else None, timeout=60)
            read = table.array.tobytes()
            if n % 3 == 2:
                table.release(stream.handle.value)
            mixed += read != read[:1] * len(read)
    return mixed


def main() -> None:
    global published
    print("ready", flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        said: object = "done"
        if what == "publish":
            memory = cuvmm.empty(int(words[1]), "uint32", reserve=64 << 20)
            memory.array.write(bytes(memory.array.nbytes))
            published = cuvmm.Server(words[0]).publish("table", memory, writable=True)
            published.announce()
        elif what in ("keep", "anew"):
            published, said = keep(words[0], words[1], int(words[3]), what == "anew")
        elif what == "check":
            said = check(words[0], int(words[2]))
        else:
            assert published is not None
            if what == "rewrite":
                n = 0
                while not int(words[0]) or n < int(words[0]):
                    rewrite(published)
                    n += 1
                published.settle(60)
                published.finish()  # the words tell that the last generation is complete
            elif what == "exclude":
                rewrite(published, 0.05)
            elif what == "half":
                published.rewrite(60)
                fill(published, 0, published.generation)
                stream.synchronize()
        print(said, flush=True)


main()
