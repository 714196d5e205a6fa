"""Publications that outlive their publishers: followers in Python take over from Go, and the other way round."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
import unittest
from array import array as numbers
from typing import Iterator, List, Optional, Union
from unittest import mock

import cuvmm
from cuvmm._claims import Claim, Claims, _started, decode, encode

from .go import GoTest, Peer
from .support import DriverTest, await_that, environment, root_text

CHILD = root_text("python/tests/heir.py")


class Heir:
    """A process of tests/heir.py, with the commands of the Go side that it shares."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", CHILD, *args], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def done(self, *words: object) -> None:
        self.start(*words)
        said = self.read()
        assert said == "done", said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for f in (self.process.stdin, self.process.stdout):
            assert f is not None
            f.close()


@contextlib.contextmanager
def open_folder(path: str) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY)
    try:
        yield folder
    finally:
        os.close(folder)


def reach(table: cuvmm.Follower, length: int) -> None:
    """Follows until a length is shown by a live publisher."""
    until = time.monotonic() + 60
    while len(table) != length or table.state != "live":
        assert time.monotonic() < until, f"{table} is {table.state}, and {length} are published"
        try:
            table.next(timeout=0.2)
        except cuvmm.WaitTimeout:
            pass


class TakingOver(GoTest):
    def heir(self, *args: str) -> Heir:
        h = Heir(*args)
        self.addCleanup(h.kill)
        return h

    def test_from_go(self) -> None:
        go, reader = self.serving(table=1_000_000), self.peer()
        reader.start("track", self.path(), "table")
        self.assertTrue(reader.read().startswith("1 1000000 "))
        with cuvmm.connect(self.path(), reconnect=True) as other, other.follow("table") as seen:
            seen.next(timeout=60)
            client = cuvmm.connect(self.path())
            table = client.follow("table", write=True, keep_descriptors=True, reserve=64 << 20)
            self.assertEqual(table.description, b"made by Go")
            table.next(timeout=60)
            at, before = table.array, len(os.listdir("/proc/self/fd"))
            with self.assertRaises(cuvmm.WaitTimeout):
                cuvmm.take_over(client, timeout=0.1)
            go.kill()
            with cuvmm.take_over(client, timeout=60) as server:
                published = server.adopt(table)
                with self.assertRaises(cuvmm.ClosedError):
                    table.next()
                table.close()
                memory = published.memory
                self.assertEqual((memory.array.ptr, len(memory)), (at.ptr, 1_000_000))
                first = published.generation
                self.check(at, 1_000_000)  # arrays of the follower stay
                del at
                self.assertEqual(reader.read(), f"{first} 1000000 {sum(range(1_000_000))}")
                memory.resize(3_000_000)
                memory.array[1_000_000:].write(numbers("I", range(1_000_000, 3_000_000)))
                published.announce()
                self.assertEqual(reader.read(), f"{first + 1} 3000000 {sum(range(3_000_000))}")
                where = seen.array.ptr
                reach(seen, 3_000_000)
                self.check(seen.array, 3_000_000)
                self.assertEqual(seen.array.ptr, where)
                published.shrink(10)
                published.settle(60)
                self.assertEqual(reader.read(), f"{first + 2} 10 45")
                memory.resize(10)
                self.assertGreater(memory.trim(), 0)
                published.withdraw()
                self.assertEqual(reader.read(), "done")
                with self.assertRaises(cuvmm.WithdrawnError):
                    while True:
                        seen.next(timeout=60)
                memory.close()
            self.assertLess(len(os.listdir("/proc/self/fd")), before)
        self.assertEqual(reader.end(), 0)

    def test_from_python(self) -> None:
        publisher, go = self.heir("publish", self.path()), self.peer()
        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table", reserve=64 << 20) as table:
            table.next(timeout=60)
            identities = [c.identity for c in table._replica.chunks]
            at = table.array.ptr
            go.start("inherit", self.path(), "table")
            self.assertEqual(go.read(), "following")
            publisher.kill()
            self.assertEqual(go.read(), "1000")
            reach(table, 1000)
            self.check(table.array, 1000)
            self.assertEqual((table.array.ptr, [c.identity for c in table._replica.chunks]), (at, identities))
            go.done("grow", "table", 2_000_000)
            reach(table, 2_000_000)
            self.check(table.array, 2_000_000)
            go.done("shrink", "table", 5)
            reach(table, 5)
            go.done("withdraw", "table")
            with self.assertRaises(cuvmm.WithdrawnError):
                while True:
                    table.next(timeout=60)
        self.assertEqual(go.end(), 0)

    def test_a_follower_that_only_reads_hands_memory_on(self) -> None:
        """If its publisher names it an heir; it changes nothing, and is followed in either language."""
        publisher, reader = self.heir("heirs", self.path()), self.peer()
        client = cuvmm.connect(self.path())
        table = client.follow("table", keep_descriptors=True)
        table.next(timeout=60)
        reader.start("track", self.path(), "table")
        self.assertTrue(reader.read().startswith("1 1000 "))
        publisher.kill()
        with cuvmm.take_over(client, timeout=60) as server:
            published = server.adopt(table)
            with cuvmm.connect(self.path()) as late, late.follow("table") as other:
                other.next(timeout=60)
                self.check(other.array, 1000)
            self.assertTrue(reader.read().startswith(f"{published.generation} 1000 "))
            memory = published.memory
            self.assertTrue(memory.readonly and memory.array.readonly)
            with self.assertRaises(BufferError):
                memory.array.write(b"1234")
            with self.assertRaises(cuvmm.AccessError):
                published.rewrite()
            with self.assertRaises(cuvmm.AccessError):
                memory.resize(1_000_000)
            published.withdraw()
            self.assertEqual(reader.read(), "done")
            memory.close()
        self.assertEqual(reader.end(), 0)

    def test_a_line_of_heirs(self) -> None:
        """Publishers in either language are killed one after the other; a reader keeps its address, and shows what each heir took over."""
        for seed in range(int(os.environ.get("CUVMM_TEST_SEEDS", "2"))):
            with self.subTest(seed=seed):
                self._line(random.Random(seed))
                os.unlink(self.path())

    def _line(self, r: random.Random) -> None:
        publisher: Union[Heir, Peer] = self.heir("publish", self.path())
        length = 1000
        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table", reserve=64 << 20) as table:
            reach(table, length)
            at = table.array.ptr
            for _ in range(4):
                heir: Union[Heir, Peer]
                heir = self.peer() if r.random() < 0.5 else self.heir("follow")
                heir.start("inherit", self.path(), "table")
                self.assertEqual(heir.read(), "following")
                before = length
                if r.random() < 0.5:
                    length += r.choice([1, 700_000])
                    publisher.done("grow", "table", length)
                    reach(table, length)
                publisher.kill()
                took = int(heir.read())
                self.assertIn(took, (before, length))  # the kill may come before the GPU's word that the last elements are there
                length, publisher = took, heir
                length += r.choice([1, 700_000])
                publisher.done("grow", "table", length)
                reach(table, length)
                self.check(table.array, length)
                self.assertEqual(table.array.ptr, at)
                self.assertEqual((table.description, table.tag), (b"counted", "line"))  # which every heir passes on
            publisher.kill()


    def test_a_sleeper_is_told_who_took_over(self) -> None:
        """Whoever took over in between still has the memory, although it gave the socket back."""
        for language in ("Go", "Python"):
            with self.subTest(language):
                socket = self.path(language)
                publisher = self.heir("publish", socket)
                client = cuvmm.connect(socket)
                sleeper = client.follow("table", write=True, keep_descriptors=True)
                sleeper.next(timeout=60)
                heir: Union[Heir, Peer] = self.peer() if language == "Go" else self.heir("follow")
                heir.start("inherit", socket, "table")
                self.assertEqual(heir.read(), "following")
                publisher.kill()
                self.assertEqual(heir.read(), "1000")
                heir.done("end")
                with cuvmm.take_over(client, timeout=60) as server:
                    with self.assertRaisesRegex(cuvmm.SupersededError, f"^process {heir.process.pid} took the publication over"):
                        server.adopt(sleeper)
                    heir.process.kill()
                    heir.process.wait()
                    published = server.adopt(sleeper)
                    self.assertEqual(len(published.memory), 1000)
                    with open(socket + ".owners", "rb") as f:
                        self.assertEqual([(c.epoch, c.pid) for c in decode(f.read())], [(2, os.getpid())])
                published.memory.close()


class Rules(DriverTest):
    def heir(self, *args: str) -> Heir:
        h = Heir(*args)
        self.addCleanup(h.kill)
        return h

    def test_what_cannot_be_adopted(self) -> None:
        publisher = self.heir("publish", self.path())
        client, foreign = cuvmm.connect(self.path()), cuvmm.connect(self.path())
        kept, unkept, unwritten = (client.follow("table", write=w, keep_descriptors=k) for w, k in ((True, True), (True, False), (False, True)))
        other = foreign.follow("table", write=True, keep_descriptors=True)
        publisher.kill()
        with cuvmm.take_over(client, timeout=60) as server:
            for follower, kind in ((unkept, cuvmm.NotSupported), (unwritten, cuvmm.AccessError), (other, cuvmm.ArgumentError)):
                with self.assertRaises(kind):
                    server.adopt(follower)
                follower.close()
            published = server.adopt(kept)
            with self.assertRaises(cuvmm.ArgumentError), cuvmm.Server(self.path("plain")) as plain:
                plain.adopt(kept)
            with self.assertRaises(cuvmm.InUseError):
                published.memory.close()
        published.memory.close()
        foreign.close()

    def test_one_takes_over(self) -> None:
        publisher = self.heir("publish", self.path())
        first, second = cuvmm.connect(self.path()), cuvmm.connect(self.path())
        table, late = (c.follow("table", write=True, keep_descriptors=True) for c in (first, second))
        late.next(timeout=60)
        publisher.kill()
        with cuvmm.take_over(first, timeout=60) as server:
            published = server.adopt(table)
            with self.assertRaises(cuvmm.SupersededError):
                cuvmm.take_over(second, timeout=60)
            self.assertEqual(len(late), 1000)  # it keeps what it has
        late.close()
        second.close()
        published.memory.close()
        with self.assertRaises(cuvmm.ClosedError):
            cuvmm.take_over(first)

    def test_a_take_over_that_is_interrupted_when_others_have_connected(self) -> None:
        """Their connections end with it, so that they find the server that takes over in the end."""
        publisher = self.heir("publish", self.path())
        client = cuvmm.connect(self.path())
        table = client.follow("table", write=True, keep_descriptors=True)
        table.next(timeout=60)
        with cuvmm.connect(self.path(), reconnect=True) as other, other.follow("table") as seen:
            reach(seen, 1000)
            publisher.kill()

            def interrupted() -> None:
                await_that(lambda: other.peer is not None and other.peer.pid == os.getpid(), "the other client has connected again")
                raise KeyboardInterrupt

            with mock.patch.object(client, "end", interrupted), self.assertRaises(KeyboardInterrupt):
                cuvmm.take_over(client, timeout=60)
            with cuvmm.take_over(client, timeout=60) as server:
                published = server.adopt(table)
                published.memory.resize(2000)
                published.announce()
                reach(seen, 2000)
                published.withdraw()
        published.memory.close()

    def test_claims(self) -> None:
        """The file's form is that of docs/protocol.md, and nothing else is read. A process that ended counts no more."""
        publication = bytes([1, *[0] * 14, 2])
        raw = encode([Claim(publication, 3, 4711, 5, 6)])
        self.assertEqual(raw.hex(), "6375764f010001000000" + publication.hex() + "030000000000000067120000" + "05000000000000000600000000000000")
        self.assertEqual(decode(raw), [Claim(publication, 3, 4711, 5, 6)])
        for bad in (raw[:-1], raw + b"\0", raw[1:], raw[:4], b"cuvO\x02\x00" + raw[6:], b"cuvO\x01\x00\xff\xff\xff\xff" + raw[10:]):
            with self.assertRaises(cuvmm.ProtocolError):
                decode(bad)
        socket = self.path()
        with cuvmm.Server(socket), open_folder(os.path.dirname(socket)) as folder:
            claims = Claims(folder, socket)
            replaced: List[Optional[Claim]] = []
            claims.take(publication, replaced)
            self.assertEqual(replaced, [None])
            mine, = claims._read()
            claims.restore(publication, None)
            self.assertEqual(claims._read(), [])
            other, gone = Claim(bytes(16), 1, *mine[2:]), mine._replace(epoch=4, start=mine.start - 1)
            claims._write([gone, other])
            claims.take(publication, replaced)
            self.assertEqual(replaced, [None, gone])
            self.assertEqual(claims._read(), [other, mine._replace(epoch=5)])
            claims.restore(publication, gone)
            self.assertEqual(claims._read(), [other, gone])
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
                start = _started(process.pid)
                assert start is not None
                claims._write([mine._replace(pid=process.pid, start=start)])
                with self.assertRaises(cuvmm.SupersededError):
                    claims.take(publication, [])
                process.kill()
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie until the end of the block
                claims.take(publication, [])
            claims._write([mine._replace(namespace=mine.namespace + 1)])
            with self.assertRaises(cuvmm.NotSupported):
                claims.take(publication, [])
            with open(socket + ".owners", "wb") as f:
                f.write(b"cuvX")
            with self.assertRaisesRegex(cuvmm.ProtocolError, "owners"):
                claims.take(publication, [])

    def test_another_folder(self) -> None:
        """Processes agree on who publishes in the folder in which they met."""
        there = os.path.join(self.folder, "there")
        publisher = self.heir("publish", os.path.join(there, "socket"))
        client = cuvmm.connect(os.path.join(there, "socket"))
        publisher.kill()
        os.rename(there, there + ".old")
        os.mkdir(there, 0o700)
        with self.assertRaises(cuvmm.PeerError):
            cuvmm.take_over(client, timeout=60)
        client.close()

    def test_elements_that_were_never_complete_are_not_taken_over(self) -> None:
        publisher = self.heir("publish", self.path())
        client = cuvmm.connect(self.path())
        table = client.follow("table", write=True, keep_descriptors=True)
        table.next(timeout=60)
        publisher.done("unfinished", "table", 2_000_000)
        await_that(lambda: table._replica.generation == 2, "the follower has what is not complete")
        publisher.kill()
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)  # its predecessor cannot have announced so many
        with cuvmm.take_over(client, timeout=60) as server:
            published = server.adopt(table)
            self.assertEqual(len(published.memory), 1000)
            self.assertGreater(published.generation, before)
            with cuvmm.connect(self.path()) as c, c.follow("table") as seen:
                self.assertEqual(seen.next(timeout=60), published.generation)
                self.assertEqual(seen.array[998:].tolist(), [998, 999])
        published.memory.close()

    def test_nothing_that_was_complete(self) -> None:
        """A publication without a complete generation is taken over as one: no follower is shown an array without elements."""
        for unfinished in (False, True):
            with self.subTest(unfinished=unfinished):
                socket = self.path(f"unfinished {unfinished}")
                publisher = self.heir("silent", socket)
                client, other = cuvmm.connect(socket), cuvmm.connect(socket, reconnect=True)
                table, seen = client.follow("table", write=True, keep_descriptors=True), other.follow("table")
                if unfinished:
                    publisher.done("unfinished", "table", 1000)
                    await_that(lambda: table._replica.generation == 1 and seen._replica.generation == 1, "both have what is not complete")
                publisher.kill()
                with cuvmm.take_over(client, timeout=60) as server:
                    published = server.adopt(table)
                    self.assertEqual((published.generation, len(published.memory)), (0, 0))
                    with cuvmm.connect(socket) as late, late.follow("table") as fresh:
                        for f in (fresh, seen):
                            with self.assertRaises(cuvmm.WaitTimeout):
                                f.next(timeout=0.2)
                        published.memory.resize(500)
                        published.memory.array.write(numbers("I", range(500)))
                        generation = published.announce()
                        for f in (fresh, seen):
                            self.assertEqual(f.next(timeout=60), generation)
                            self.assertEqual(f.array[498:].tolist(), [498, 499])
                    published.withdraw()
                seen.close()
                other.close()
                published.memory.close()


if __name__ == "__main__":
    unittest.main()
