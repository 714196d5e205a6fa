"""A process that publishes, follows and takes over by commands on its standard input. Element i is i.

    publish SOCKET    publishes "table" at once, and announces 1000 elements
    heirs SOCKET      the same, and names followers that only read as heirs
    silent SOCKET     publishes "table" at once, and announces nothing
    inherit SOCKET NAME, grow NAME LENGTH, unfinished NAME LENGTH
    end               gives the socket back, and keeps the memory
"""

import sys
from array import array as numbers

import cuvmm


def grow(p: cuvmm.Publication, length: int) -> None:
    before = len(p.memory)
    p.memory.resize(length)
    p.memory.array[before:].write(numbers("I", range(before, length)))


published = None
if sys.argv[1] in ("publish", "silent", "heirs"):
    memory = cuvmm.empty(0, "uint32", reserve=64 << 20)
    published = cuvmm.Server(sys.argv[2]).publish("table", memory, writable=True, description="counted", tag="line", heirs=sys.argv[1] == "heirs")
    if sys.argv[1] != "silent":
        grow(published, 1000)
        published.announce()
print("ready", flush=True)
for line in sys.stdin:
    what, *words = line.split()
    if what == "inherit":
        client = cuvmm.connect(words[0])
        table = client.follow(words[1], write=True, keep_descriptors=True, reserve=64 << 20)
        table.next()
        print("following", flush=True)
        server = cuvmm.take_over(client)
        published = server.adopt(table, writable=True)
        print(len(published.memory), flush=True)
        continue
    assert published is not None
    if what == "end":
        server.close()
        print("done", flush=True)
        continue
    grow(published, int(words[1]))
    if what == "grow":
        published.announce()
    else:  # a generation whose word is never written
        with published._lock:
            generation = published._spend()
            published._show(published._view._replace(generation=generation, ordered=generation, length=int(words[1]), chunks=published.memory.show(int(words[1]))))
    print("done", flush=True)
