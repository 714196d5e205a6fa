"""Publications of memory that a broker keeps: each publisher, in Go or in Python, goes on where the one before ended."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
import unittest
from typing import Callable, List, Tuple
from unittest import mock

import cuvmm
from cuvmm import _page
from cuvmm._driver import Stream

from .go import GoTest, Peer
from .serving import ServedTest
from .support import await_that
from .test_rewrite import LENGTH, Reader, Rewriter, whole

LANGUAGES = ("Go", "Python")


class Successions(GoTest, ServedTest):
    """Publishers that are killed, and the next ones."""

    def publisher(self, language: str) -> Peer:
        p = self.peer() if language == "Go" else Rewriter()
        self.addCleanup(p.kill)
        return p

    def keeps(self, p: Peer, how: str = "keep") -> str:
        """Has a process publish what the one before did, once that has ended."""
        return p.do(how, self.socket, self.path(), "table", LENGTH)

    def test_the_next_one_goes_on(self) -> None:
        for first, second in itertools.product(LANGUAGES, LANGUAGES):
            with self.subTest(f"{second} behind {first}"):
                self._succeeds(self.publisher(first), self.publisher(second))
                self.connect().remove("table")

    def _succeeds(self, first: Peer, second: Peer) -> None:
        """Followers in both languages keep their memory, and its elements, and see what the next publisher announces."""
        go = self.peer()
        self.assertEqual(self.keeps(first), "false false")
        go.start("track", self.path(), "table")
        self.assertTrue(go.read().endswith(f" {LENGTH} 0"))
        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table") as table:
            first.done("rewrite", 3)
            table.next(timeout=60)
            before, at, identities = table.array.tobytes(), table.array.ptr, [c.identity for c in table._replica.chunks]
            self.assertTrue(whole(before) and before[0])
            last = table.generation
            table.release()
            sums = [go.read().split()[-1]]
            second.start("keep", self.socket, self.path(), "table", LENGTH)
            time.sleep(0.05)  # in which it waits
            first.kill()
            self.assertEqual(second.read(), "true false")
            generation = table.next(timeout=60)
            self.assertGreater(generation, last)
            self.assertEqual((table.array.ptr, [c.identity for c in table._replica.chunks]), (at, identities))
            self.assertTrue(table.array.tobytes() == before)
            while not sums[-1].endswith(str(before[0] * 0x01010101 * LENGTH)):
                sums.append(go.read().split()[-1])
            self.assertLess(int(sums[0]), int(sums[-1]) + 1)
            table.release()
            second.done("rewrite", 2)
            await_that(lambda: table.next(timeout=60) >= generation + 2, "what the next publisher announces")
            self.assertTrue(whole(table.array.tobytes()) and table.intact(table.generation))
        second.kill()
        go.kill()

    def test_nobody_takes_over_in_place_of_the_next_publisher(self) -> None:
        p, go = self.publisher("Python"), self.peer()
        self.keeps(p)
        go.start("inherit", self.path(), "table")
        self.assertEqual(go.read(), "following")
        p.kill()
        self.assertEqual(go.read(), "not permitted")
        self.assertEqual(go.end(), 0)

    def test_killed_half_way(self) -> None:
        """Half written memory is refused, by both, and written anew by a publisher that asks for that."""
        for language in LANGUAGES:
            with self.subTest(language):
                p = self.publisher(language)
                self.assertEqual(self.keeps(p), "false false")
                with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table") as table:
                    table.next(timeout=60)
                    for other in LANGUAGES:
                        table.release()
                        p.done("half")
                        p.kill()
                        with self.assertRaises(cuvmm.UnfinishedError):
                            table.next(timeout=60)
                        refused, p = self.publisher(other), self.publisher(other)
                        self.assertEqual(self.keeps(refused), "incomplete")
                        refused.kill()
                        self.assertEqual(self.keeps(p, "anew"), "true true")
                        table.next(timeout=60)
                        self.assertEqual(table.array.tobytes(), bytes(4 * LENGTH))
                    p.kill()
                self.connect().remove("table")

    def test_killed_at_any_moment(self) -> None:
        """What was announced is whole, or the next publisher is told that it may not be."""
        for language in LANGUAGES:
            for seed in range(int(os.environ.get("CUVMM_TEST_SEEDS", "3"))):
                with self.subTest(language=language, seed=seed):
                    r, p = random.Random(seed), self.publisher(language)
                    self.keeps(p)
                    with cuvmm.connect(self.path()) as client, client.follow("table") as table:
                        table.next(timeout=60)  # so something was complete
                    p.start("rewrite", 0)
                    time.sleep(r.random() * 0.2)
                    p.kill()
                    b = self.connect()
                    with b.keep("table", LENGTH, "uint32", wait=True, timeout=60) as memory, cuvmm.Server(self.path()) as server:
                        try:
                            self.assertGreater(server.publish("table", memory).generation, 0)
                            self.assertTrue(whole(memory.array.tobytes()))
                        except cuvmm.IncompleteError:
                            pass
                    b.remove("table")

    def test_halves_in_turn(self) -> None:
        """The half that was shown is whole, whenever a publisher in Go is killed in a turn, and shown by one in Python."""
        p = self.publisher("Go")
        self.keeps(p)
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            table.next(timeout=60)
        p.start("turn", 0)
        time.sleep(0.1)
        p.kill()
        with self.connect().keep("table", LENGTH, "uint32", wait=True) as memory, cuvmm.Server(self.path()) as server:
            published, middle = server.publish("table", memory), 2 * LENGTH
            self.assertGreater(published.generation, 0)
            read = memory.array.tobytes()
            self.assertTrue(whole(read[middle:] if published.generation % 2 else read[:middle]))

    def test_a_reader_while_publishers_are_killed(self) -> None:
        """Each rewrites at once what the one before left; the reader reads no mixture, or is told."""
        for seed in range(int(os.environ.get("CUVMM_TEST_SEEDS", "2"))):
            with self.subTest(seed=seed):
                self._line(random.Random(seed))
                self.connect().remove("table")

    def _line(self, r: random.Random) -> None:
        publisher = self.publisher(r.choice(LANGUAGES))
        self.assertEqual(self.keeps(publisher), "false false")
        ended, failed = threading.Event(), []  # type: threading.Event, List[BaseException]

        def reads() -> None:
            suspect = False  # what was read last is proven by nothing, so it must be whole, or the next call says that it does not count
            while not ended.is_set():
                try:
                    before = reader.mixed
                    reader.read(r.randrange(3), timeout=0.05)
                    assert not suspect, "a mixture of which no error told"
                    suspect = reader.mixed > before
                except cuvmm.UnfinishedError:
                    suspect = False
                except cuvmm.WaitTimeout:
                    pass
                except BaseException as e:
                    failed.append(e)
                    return

        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table") as table:
            reader = Reader(table)
            reading = threading.Thread(target=reads)
            reading.start()
            try:
                for _ in range(4):
                    publisher.done("rewrite", 3)
                    publisher.kill()  # while the reader reads
                    publisher = self.publisher(r.choice(LANGUAGES))
                    self.assertEqual(self.keeps(publisher), "true false")
                    before = reader.reads
                    publisher.done("rewrite", 10)
                    await_that(lambda: reader.reads > before or bool(failed), "the reader goes on")
            finally:
                ended.set()
                reading.join()
            self.assertEqual(failed, [])
        publisher.kill()


class Rules(ServedTest):
    """A publisher after the other in one process."""

    def following(self, server: cuvmm.Server) -> cuvmm.Follower:
        client = cuvmm.connect(server.path)
        self.addCleanup(client.close)
        table = client.follow("table")
        self.addCleanup(table.close)
        return table

    def test_memory_goes_on(self) -> None:
        b, last = self.connect(), 0
        for n in range(3):
            with b.keep("table", 100, "uint8") as memory, cuvmm.Server(self.path()) as server:
                self.assertEqual((len(memory), memory.dtype, memory.about.name, memory.about.publication, memory.about.pid), (100, "uint8", "table", True, os.getpid()))
                published = server.publish("table", memory)
                if n:
                    self.assertGreater(published.generation, last)
                    self.assertEqual(memory.array.tolist(), [n - 1] * 100)
                    published.rewrite(60)
                else:
                    self.assertEqual(published.generation, 0)
                memory.array.write(bytes([n]) * 100)
                last = published.announce()
                table = self.following(server)
                self.assertEqual((table.next(timeout=60), table.array.tolist()), (last, [n] * 100))
                memory.check()
                pid = self.broker_pid()
                assert pid is not None
                os.kill(pid, signal.SIGKILL)  # which changes nothing
        self.assertEqual([(x.name, x.publication, x.holders) for x in b.list()], [("table", True, 0)])
        b.remove("table")
        with b.keep("table", 100, "uint8") as memory, cuvmm.Server(self.path()) as server:
            self.assertEqual(server.publish("table", memory).generation, 0)

    def test_what_cannot_be(self) -> None:
        b, other = self.connect(), self.connect()
        with b.writer("object", {"w": ("uint8", (10,))}):
            pass
        cases: List[Tuple[type, Callable[[], object]]] = [
            (cuvmm.ExistsError, lambda: b.keep("object", 10)), (cuvmm.ArgumentError, lambda: b.keep("", 10)), (cuvmm.ArgumentError, lambda: b.keep("none", 0)),
            (cuvmm.ArgumentError, lambda: b.keep("none", 10, "quaternion")), (cuvmm.TooLargeError, lambda: b.keep("none", 1 << 30))]
        with b.keep("table", 100, "uint8") as memory, cuvmm.Server(self.path()) as server:
            published = server.publish("table", memory)
            cases += [(cuvmm.WritingError, lambda: other.keep("table", 100, "uint8")), (cuvmm.WaitTimeout, lambda: other.keep("table", 100, "uint8", wait=True, timeout=0.1)),
                      (cuvmm.NotSupported, lambda: published.announce(50)), (cuvmm.NotSupported, lambda: published.announce(101)), (cuvmm.NotSupported, lambda: published.shrink(0)),
                      (cuvmm.NotSupported, lambda: memory.resize(50)), (cuvmm.InUseError, memory.close), (cuvmm.InUseError, b.close),
                      (cuvmm.InUseError, lambda: server.publish("twice", memory))]
            for kind, call in cases:
                with self.assertRaises(kind):
                    call()
            self.assertEqual(memory.trim(), 0)
        memory.close()
        with self.assertRaises(cuvmm.ArgumentError):
            b.keep("table", 101, "uint8")

    def test_memory_that_is_half_written(self) -> None:
        """It is nobody's to read until all of it is announced anew."""
        with self.connect().keep("table", 100, "uint8") as memory:
            with cuvmm.Server(self.path()) as server:
                published = server.publish("table", memory)
                memory.array.write(bytes(100))
                published.announce()
                published.rewrite()
                memory.array[:50].write(b"\1" * 50)
            for _ in range(2):
                with cuvmm.Server(self.path()) as server:
                    with self.assertRaisesRegex(cuvmm.IncompleteError, "incomplete=True"):
                        server.publish("table", memory)
                    published = server.publish("table", memory, incomplete=True)
                    self.assertTrue(published.rewriting)
                    table = self.following(server)
                    with self.assertRaises(cuvmm.WaitTimeout):
                        table.next(timeout=0.1)
                    with self.assertRaises(cuvmm.InUseError):
                        published.rewrite()
            with cuvmm.Server(self.path()) as server:
                published = server.publish("table", memory, incomplete=True)
                table = self.following(server)
                memory.array.write(b"\2" * 100)
                last = published.announce()
                self.assertEqual((table.next(timeout=60), table.array.tolist()), (last, [2] * 100))
            with cuvmm.Server(self.path()) as server:
                self.assertGreater(server.publish("table", memory).generation, last)

    def test_work_that_is_not_done(self) -> None:
        """What is announced behind a stream counts when that is done. A withdrawal waits for it, before another publication has the memory."""
        with self.connect().keep("table", 100, "uint8") as memory, cuvmm.Server(self.path()) as server:
            published = server.publish("table", memory)
            memory.array.write(bytes(100))
            first, slot = published.announce(), published._kept[0]
            await_that(lambda: slot.load(_page.COMPLETE) == first, "the word")
            stream, gate = Stream(memory.device), cuvmm.empty(1, "uint64")
            gate.array.write(bytes(8))
            withdrawing = threading.Thread(target=published.withdraw)
            with memory.device.current() as d:
                d.call("cuStreamWaitValue64_v2", stream.handle, gate.array.ptr, 1, 0)
            try:
                published.rewrite(60)
                last = published.announce(stream=stream.handle.value)
                self.assertEqual(slot.seen()[::2], (first, first), "complete, and flux")
                withdrawing.start()
                withdrawing.join(0.1)
                self.assertTrue(withdrawing.is_alive())
                with self.assertRaises(cuvmm.InUseError):
                    server.publish("table", memory)
            finally:
                gate.array.write(b"\1" + bytes(7))
            withdrawing.join(60)
            with self.assertRaisesRegex(cuvmm.IncompleteError, "withdrawn"):
                server.publish("table", memory)
            self.assertGreater(server.publish("table", memory, incomplete=True).generation, last)
            stream.close()
            gate.close()

    def test_remedies_keep_what_was_announced(self) -> None:
        """None says to withdraw, after which nothing is whole."""
        b = self.connect()
        with b.keep("table", 100, "uint8") as memory:
            with cuvmm.Server(self.path()) as server:
                server.publish("table", memory).announce()
                calls: List[Callable[[], object]] = [memory.close, lambda: server.publish("table", memory), lambda: server.publish("twice", memory)]
                for call in calls:
                    with self.assertRaisesRegex(cuvmm.InUseError, "[(]close its server first"):
                        call()
                own = "[(]close the Kept that this connection has of that name first"
                with self.assertRaisesRegex(cuvmm.WritingError, own):
                    b.keep("table", 100, "uint8")
                with self.assertRaisesRegex(cuvmm.WaitTimeout, own):
                    b.keep("table", 100, "uint8", wait=True, timeout=0.05)
            with cuvmm.Server(self.path()) as server:
                self.assertGreater(server.publish("table", memory).generation, 0)

    def test_what_is_open_never_looks_whole(self) -> None:
        """Whatever fails, and whoever comes, while it is written."""
        with self.connect().keep("table", 100, "uint8") as memory:
            for how in ("interrupted", "joined"):
                with self.subTest(how), cuvmm.Server(self.path()) as server:
                    published = server.publish("table", memory, incomplete=True)
                    memory.array.write(bytes(100))
                    last = published.announce()
                    slot, write = published._kept[0], published._timeline.write
                    published.rewrite(60)
                    if how == "interrupted":

                        def interrupted(to: _page.Slot, word: int, number: int) -> None:
                            write(to, word, number)
                            raise KeyboardInterrupt

                        with mock.patch.object(published._timeline, "write", interrupted), self.assertRaises(KeyboardInterrupt):
                            published.announce()
                    else:
                        with published._lock:
                            published._renumber(published.generation + 5)  # for a follower that comes back and is ahead
                    published.finish()
                    if how == "joined":
                        self.assertEqual(slot.load(_page.COMPLETE), last, "the GPU's word could come before the host's")
                    self.assertTrue(published.rewriting and slot.load(_page.FLUX) >= slot.load(_page.COMPLETE) > 0)
                    self.assertGreaterEqual(slot.load(_page.INTENT), slot.load(_page.FLUX))
                with cuvmm.Server(self.path()) as server, self.assertRaises(cuvmm.IncompleteError):
                    server.publish("table", memory)

    def test_tensors_by_name(self) -> None:
        like = {"w": ("float32", (3,)), "b": ("uint8", (2, 2))}
        b = self.connect()
        for n in range(2):
            with b.keep_weights("model", like) as weights, cuvmm.Server(self.path()) as server:
                published = server.publish("model", weights)
                if not n:
                    weights.update({"w": b"abcdefghijkl", "b": b"mnop"})
                    published.announce()
                with cuvmm.connect(server.path) as client, client.follow("model", expect=cuvmm.manifest_of(like)) as model:
                    model.next(timeout=60)
                    self.assertEqual([t.tobytes() for t in model.tensors.values()], [b"abcdefghijkl", b"mnop"])


if __name__ == "__main__":
    unittest.main()
