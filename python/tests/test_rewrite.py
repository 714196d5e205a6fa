"""Elements that change in place: no follower reads a mixture of two generations, or it is told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import sys
import time
import unittest
from typing import Any, Callable, List, Tuple, Union
from unittest import mock

import cuvmm
from cuvmm import _driver, _page, _streams
from cuvmm._driver import Stream
from cuvmm._holds import Holds, Wait
from cuvmm._undo import Undo

from .go import GoTest, Peer
from .support import DriverTest, await_that, root_text

LENGTH = 1 << 18
TIMES = int(os.environ.get("CUVMM_TEST_REWRITES", "60"))
REWRITER = root_text("python/tests/rewriter.py")


class Rewriter(Peer):
    """A process of tests/rewriter.py."""

    def __init__(self) -> None:
        super().__init__(sys.executable, "-c", REWRITER)


def whole(read: bytes) -> bool:
    return read == read[:1] * len(read)


class Reader:
    """Reads a follower, in one of the ways that a program does: on the host, on a stream, and with a release behind the read."""

    def __init__(self, table: cuvmm.Follower) -> None:
        self.table, self.stream = table, Stream(table._device)
        self.reads = self.mixed = self.lost = 0

    def read(self, way: int, timeout: float = 60) -> None:
        if not way:
            self.table.release(self.stream.handle.value)  # or it would hold what was shown
        generation = self.table.next(self.stream.handle.value if way else None, timeout=timeout)
        read = self.table.array.tobytes()
        intact = self.table.intact(generation)
        if way == 2:
            self.table.release(self.stream.handle.value)
        self.reads += 1
        self.mixed += not whole(read)
        self.lost += not intact
        assert whole(read) or not intact, "a mixture that is called intact"


class Rewriting(GoTest):
    def test_memory_that_go_suspends(self) -> None:
        go = self.publisher("Go")
        assert isinstance(go, Peer)
        with cuvmm.connect(self.path()) as client, client.follow("table", keep_arrays=True) as table:
            table.next(timeout=60)
            kept, reads = table.array, 0
            table.release()
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                go.start("sleep", 10)
                done = other.submit(go.read)
                while not done.done() or reads == 0:
                    try:
                        generation = table.next(timeout=0.1)
                    except cuvmm.WaitTimeout:
                        continue
                    read = kept.tobytes()
                    self.assertTrue(whole(read))
                    self.assertTrue(table.intact(generation))
                    table.release()
                    reads += 1
                self.assertEqual(done.result(), "done")
            self.assertGreaterEqual(reads, 5)
            del kept
        self.assertEqual(go.end(), 0)

    def rewriter(self) -> Rewriter:
        r = Rewriter()
        self.addCleanup(r.kill)
        return r

    def publisher(self, language: str) -> Union[Rewriter, Peer]:
        """Serves "table" from a process."""
        if language == "Go":
            go = self.peer()
            go.done("serve", self.folder, "socket")
            go.done("uniform", "table", LENGTH)
            return go
        r = self.rewriter()
        r.done("publish", self.path(), LENGTH)
        return r

    def test_no_mixture(self) -> None:
        for language in ("Go", "Python"):
            with self.subTest(language):
                publisher = self.publisher(language)
                with cuvmm.connect(self.path()) as client, client.follow("table") as table, client.follow("table") as other:
                    readers, last = [Reader(table), Reader(other)], TIMES + 1

                    def reads(r: Reader) -> None:
                        while r.table.generation < last:
                            r.read(r.reads % 3)

                    for r in readers:
                        r.read(1)
                    with concurrent.futures.ThreadPoolExecutor(2) as both:
                        reading = [both.submit(reads, r) for r in readers]
                        publisher.start("rewrite", TIMES)
                        for each in concurrent.futures.as_completed(reading):
                            each.result()  # the first one that fails, or the publisher would wait for it
                        self.assertEqual(publisher.read(), "done")
                    self.assertEqual([(r.mixed, r.lost, r.table.generation) for r in readers], [(0, 0, last)] * 2)
                    for r in readers:  # although the publisher rewrites again at once
                        self.assertGreater(r.reads, TIMES // 4)
                publisher.kill()
                self.restart()

    def restart(self) -> None:
        if os.path.exists(self.path()):
            os.unlink(self.path())

    def test_halves_in_turn(self) -> None:
        """One half is whole at any time, also when the publisher has died."""
        publisher = self.publisher("Go")
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            stream = Stream(table._device)
            self.addCleanup(stream.close)

            def half(f: cuvmm.Follower) -> bytes:
                begin, end = f.half
                self.assertEqual(end - begin, LENGTH // 2)
                return bytes(f.array.tobytes())[4 * begin:4 * end]

            publisher.start("turn", 0)
            for n in range(TIMES):
                way = stream.handle.value if n % 2 else None
                table.release(stream.handle.value)
                generation = table.next(way, timeout=60)
                self.assertTrue(whole(half(table)))
                self.assertTrue(table.intact(generation))
            publisher.kill()
            with contextlib.suppress(cuvmm.GoneError):
                while True:
                    table.next(timeout=60)
            self.assertTrue(whole(half(table)))

    def test_go_reads_no_mixture(self) -> None:
        publisher, go = self.publisher("Python"), self.peer()
        publisher.start("rewrite", 0)
        self.assertEqual(go.do("check", self.path(), "table", TIMES), "0")

    def test_each_reads_both(self) -> None:
        """Two readers in two languages hold the publisher up, in turn."""
        for language in ("Go", "Python"):
            with self.subTest(language):
                publisher, go, python = self.publisher(language), self.peer(), self.rewriter()
                publisher.start("rewrite", 0)
                readers: List[Union[Rewriter, Peer]] = [go, python]
                for each in readers:
                    each.start("check", self.path(), "table", TIMES // 2)
                self.assertEqual((go.read(), python.read()), ("0", "0"))
                publisher.kill()
                self.restart()

    def test_a_publisher_that_dies_while_it_rewrites(self) -> None:
        """At any moment: what a reader has is whole, or it is told."""
        seeds = int(os.environ.get("CUVMM_TEST_SEEDS", "3"))
        for language in ("Go", "Python"):
            for seed in range(seeds):
                with self.subTest(language=language, seed=seed):
                    self._dies(language, random.Random(seed))
                    self.restart()

    def _dies(self, language: str, r: random.Random) -> None:
        publisher = self.publisher(language)
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            reader = Reader(table)
            publisher.start("rewrite", 0)
            until = time.monotonic() + r.random() * 0.3
            while time.monotonic() < until:
                reader.read(r.randrange(3))
            publisher.kill()
            with self.assertRaises(cuvmm.GoneError):  # and UnfinishedError is one
                while True:
                    reader.read(1)
            self.assertEqual(reader.mixed, 0)
            self.assertTrue(whole(table.array.tobytes()), "what is still shown")

    def test_a_publisher_that_dies_half_way(self) -> None:
        for language in ("Go", "Python"):
            with self.subTest(language):
                publisher = self.publisher(language)
                client, other = cuvmm.connect(self.path()), cuvmm.connect(self.path(), reconnect=True)
                with other.follow("table") as lasting, client.follow("table") as table:
                    for f in (table, lasting):
                        f.next(timeout=60)
                        f.release()
                    publisher.done("half")
                    self.assertFalse(table.intact(table.generation))
                    late = client.follow("table")
                    with self.assertRaises(cuvmm.WaitTimeout):
                        late.next(timeout=0.2)
                    late.close()
                    publisher.kill()
                    with self.assertRaisesRegex(cuvmm.UnfinishedError, "elements that were shown were being rewritten.*discard"):
                        table.next(timeout=60)
                    with self.assertRaisesRegex(cuvmm.UnfinishedError, "discard"):
                        lasting.next(timeout=60)
                    self.assertEqual((len(table), table.generation, len(lasting), lasting.state), (0, 0, 0, "stale"))
                    self.assertIsInstance(table.error, cuvmm.UnfinishedError)
                    with self.assertRaises(cuvmm.WaitTimeout):
                        lasting.next(timeout=0.1)
                for c in (client, other):
                    c.close()
                self.restart()

    def test_go_takes_over_from_python(self) -> None:
        """A follower in Go that may write goes on with what a publisher in Python had; one in Python keeps its memory."""
        publisher, go = self.publisher("Python"), self.peer()
        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table") as table:
            publisher.done("rewrite", 2)
            table.next(timeout=60)
            read, at, generation = table.array.tobytes(), table.array.ptr, table.generation
            go.start("inherit", self.path(), "table")
            self.assertEqual(go.read(), "following")
            publisher.kill()
            self.assertEqual(go.read(), str(LENGTH))
            self.assertGreater(table.next(timeout=60), generation)
            self.assertTrue(table.array.tobytes() == read and table.array.ptr == at)
            table.release()
            go.done("rewrite", 1)
            table.next(timeout=60)
            self.assertTrue(whole(table.array.tobytes()))
        self.assertEqual(go.end(), 0)

    def test_exclusions_between_languages(self) -> None:
        for language in ("Go", "Python"):
            with self.subTest(language):
                publisher, go = self.publisher(language), self.peer()
                go.start("late", self.path(), "table")
                self.assertEqual(go.read(), "holds")
                with cuvmm.connect(self.path()) as client, client.follow("table") as table:
                    table.next(timeout=60)
                    publisher.done("exclude")
                    with self.assertRaisesRegex(cuvmm.ExcludedError, "was not released within"):
                        table.next(timeout=60)
                    self.assertFalse(table.intact(1))
                    with client.follow("table") as again:
                        self.assertEqual(again.next(timeout=60), 2)
                self.assertEqual(go.read(), "excluded true, intact false")
                publisher.kill()
                self.restart()


class Rules(DriverTest):
    """A publisher and its followers in one process."""

    def setUp(self) -> None:
        super().setUp()
        self.dev = _driver.device(0)
        self.memory = cuvmm.empty(100, "uint8", reserve=16 << 20)
        self.memory.array.write(bytes([1]) * 100)
        self.server = cuvmm.Server(self.path())
        self.published = self.server.publish("table", self.memory, writable=True)
        self.published.announce()
        self.client = cuvmm.connect(self.path())
        self.table = self.client.follow("table")
        self.stream = Stream(self.dev)
        for close in (self.memory.close, self.server.close, self.client.close, self.table.close, self.stream.close):
            self.addCleanup(close)

    @property
    def handle(self) -> int:
        return int(self.stream.handle.value or 0)

    def refused(self) -> None:
        """Rewriting waits in vain, and followers go on with what was there."""
        with self.assertRaisesRegex(cuvmm.WaitTimeout, f"1 follower of 'table', in processes .{os.getpid()}., did not release.*nothing may be written"):
            self.published.rewrite(timeout=0.05)

    def permitted(self) -> None:
        with self.published.rewrite(timeout=60):
            self.published.announce()

    def test_who_holds(self) -> None:
        self.permitted()  # nothing was shown yet
        self.table.next(timeout=60)
        self.refused()
        self.table.release(self.handle)  # which holds nothing
        self.refused()
        self.table.release()
        self.permitted()
        self.table.next(self.handle, timeout=60)
        self.table.release()
        self.refused()
        self.table.release(self.handle)
        self.permitted()
        self.table.next([self.handle, 0], timeout=60)
        self.table.release(self.handle)
        self.refused()
        self.table.release(1)  # 0 and 1 are one stream
        self.permitted()
        self.table.close()
        self.permitted()

    def test_a_rewriting_that_was_given_up_shows_the_same_elements_again(self) -> None:
        self.table.next(timeout=60)
        late = self.client.follow("table")
        self.addCleanup(late.close)
        self.refused()
        self.published.settle(60)  # or the one that is late may show what it got first
        for f in (self.table, late):
            self.assertEqual(f.next(timeout=60), 2)
            self.assertEqual(f.array.tolist(), [1] * 100)
        self.assertTrue(self.table.intact(1))
        self.assertEqual(self.published.generation, 2)
        self.assertFalse(self.published.rewriting)

    def test_a_follower_without_room_shows_nothing_that_was_rewritten(self) -> None:
        with self.client.follow("table", reserve=1) as small:
            small.next(self.handle, timeout=60)
            self.memory.resize(4 << 20)
            self.published.announce()
            self.published.settle(60)  # or next would wait, and release
            with self.assertRaises(cuvmm.CapacityError):
                small.next(self.handle, timeout=60)
            self.assertEqual((len(small), small.array.tolist()), (100, [1] * 100))
            self.refused()
            self.published.settle(60)
            with self.assertRaises(cuvmm.CapacityError):  # the same elements again
                small.next(self.handle, timeout=60)
            self.assertEqual(len(small), 100)
            small.release(self.handle)
            self.permitted()
            with self.assertRaises(cuvmm.CapacityError):
                small.next(self.handle, timeout=60)
            self.assertEqual((len(small), small.error), (0, None))
            self.permitted()

    def test_an_empty_generation_is_not_held(self) -> None:
        for way in (None, self.handle):
            self.table.next(way, timeout=60)
            self.published.shrink(0)
            self.published.settle(60)
            self.table.next(way, timeout=60)
            self.table.order(self.handle)
            with self.published.rewrite(timeout=60):
                self.published.announce()

    def test_next_releases_before_it_waits(self) -> None:
        for way in (None, self.handle):
            self.table.next(way, timeout=60)
            with self.assertRaises(cuvmm.WaitTimeout):
                self.table.next(way, timeout=0)
            self.permitted()
            self.assertEqual(asyncio.run(self.table.next_async(way, timeout=60)), self.published.generation)
            self.refused()
            asyncio.run(self.table.next_async(way, timeout=60))
            with self.assertRaises(cuvmm.WaitTimeout):
                asyncio.run(self.table.next_async(way, timeout=0.01))
            self.permitted()

    def test_work_on_a_released_stream_is_awaited(self) -> None:
        undo = Undo()
        page, _ = _page.make_page(self.dev, undo)
        self.table.next(self.handle, timeout=60)
        with self.dev.current() as d:
            d.call("cuStreamWaitValue64_v2", self.stream.handle, page.at(0), 1, 0)
        self.table.release(self.handle)
        self.refused()
        page.store(0, 1)
        self.permitted()
        self.table.close()
        undo.close()

    def test_work_that_was_released_is_awaited_by_the_next_publisher(self) -> None:
        undo = Undo()
        page, _ = _page.make_page(None, undo)
        holds, old, after, last = Holds(), _page.Slot(page, 0), _page.Slot(page, 1), _page.Slot(page, 2)
        self.assertTrue(holds.begin(old, 1, [5], counts=True, anew=True))
        holds.end(5, True)
        holds.tell(holds.untold() or 0)  # a stream writes it, behind the work
        after.store(_page.INTENT, 1)
        self.assertFalse(holds.restart(old, after, 1), "the next publisher may have begun")
        self.assertEqual((after.load(_page.HELD), holds.untold()), (1, 1))
        holds.tell(1)
        after.store(_page.RELEASED, 1)
        self.assertTrue(holds.restart(after, last, 1))
        self.assertEqual((last.load(_page.HELD), holds.untold()), (0, None))
        undo.close()

    def test_the_work_behind_the_last_announcement_is_awaited(self) -> None:
        """Or what is written next, on another stream, could be overwritten by it."""
        undo = Undo()
        page, _ = _page.make_page(self.dev, undo)
        with self.dev.current() as d:
            d.call("cuStreamWaitValue64_v2", self.stream.handle, page.at(0), 1, 0)
        self.published.announce(stream=self.handle)
        try:
            with self.assertRaisesRegex(cuvmm.WaitTimeout, "the work behind the last announcement of 'table' is not done.*nothing may be written"):
                self.published.rewrite(timeout=0.05)
        finally:
            page.store(0, 1)
        self.permitted()
        self.stream.synchronize()
        undo.close()

    def test_without_words_that_streams_write(self) -> None:
        with mock.patch.object(_driver.Device, "stream_words", lambda _: False), self.client.follow("table") as plain:
            plain.next(self.handle, timeout=60)
            self.refused()
            plain.release(self.handle)
            self.permitted()

    def test_streams_of_exports_hold_with_the_caller(self) -> None:
        ends: List[Callable[[], Any]] = [self.table.release, lambda: self.assertRaises(cuvmm.WaitTimeout, self.table.next, self.handle, 0)]
        for end in ends:
            self.table.next(timeout=60)
            self.table.array.allow_readonly().__dlpack__(stream=self.handle)
            self.assertEqual(self.table.array.__cuda_array_interface__["version"], 3)
            with self.published._lock:  # as if the caller had released, and the programs that have the array had not
                self.table._holds.end_caller()
            self.refused()
            self.table.next(timeout=60)
            end()
            self.permitted()

    def test_exports_and_orders_while_the_publisher_waits(self) -> None:
        """What is held can be used in further ways; what is not held, and is to be rewritten, cannot."""
        self.table.next(timeout=60)
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            waiting = other.submit(self.published.rewrite, 60)
            await_that(lambda: self.table._link.slot.load(_page.INTENT) == 1, "the publisher wants to rewrite")
            self.table.order(self.handle)
            self.table.release()
            self.table.array.allow_readonly().__dlpack__(stream=self.handle)
            calls: List[Callable[[], Any]] = [self.published.announce, self.published.rewrite, lambda: self.published.shrink(1)]
            for refused in calls:
                with self.assertRaisesRegex(cuvmm.InUseError, "for which a rewrite waits"):
                    refused()
            self.assertFalse(waiting.done())
            self.assertTrue(self.table.intact(1))
            self.table.release(self.handle)
            waiting.result(60)
        calls = [lambda: self.table.order(self.handle), lambda: self.table.array.allow_readonly().__dlpack__(stream=self.handle)]
        for call in calls:
            with self.assertRaisesRegex(cuvmm.RewritingError, "rewrites generation 1.*call next"):
                call()
        self.published.announce()
        self.table.next(self.handle, timeout=60)

    def test_what_a_waiting_next_holds_early_permits_nothing_of_before(self) -> None:
        """As beside a next whose thread does not run yet, when what it waits for has arrived."""
        self.table.next(self.handle, timeout=60)
        self.table.release(self.handle)
        wait = Wait()
        self.table._begin_wait(wait, [])
        with self.published.rewrite(60):
            self.published.announce()
        self.published.settle(60)
        calls: List[Callable[[], Any]] = [lambda: self.table.order(self.handle), lambda: self.table.array.allow_readonly().__dlpack__(stream=self.handle)]
        for call in calls:
            with self.assertRaisesRegex(cuvmm.RewritingError, "rewrites generation 1.*call next"):
                call()
        self.refused()
        self.table._end_wait(wait)
        self.permitted()

    def test_only_an_announcement_ends_it(self) -> None:
        late: List[cuvmm.Follower] = []
        with self.published.rewrite(60) as r:
            self.assertTrue(r.open and self.published.rewriting)
            calls: List[Callable[[], Any]] = [self.published.rewrite, lambda: self.published.shrink(1)]
            for refused in calls:
                with self.assertRaisesRegex(cuvmm.InUseError, "being rewritten .announce ends that"):
                    refused()
            late.append(self.client.follow("table"))
            for f in (self.table, late[0]):
                with self.assertRaises(cuvmm.WaitTimeout):
                    f.next(timeout=0.1)
            with self.assertRaises(cuvmm.ArgumentError):
                self.published.announce(101)
            self.assertTrue(r.open)
            self.memory.array.write(bytes([2]) * 100)
            self.published.announce()
            self.assertFalse(r.open)
        for f in (self.table, late[0]):
            self.assertEqual((f.next(timeout=60), f.array.tolist()), (2, [2] * 100))
        late[0].close()
        self.published.shrink(50)

    def test_blocks_that_do_not_announce(self) -> None:
        with self.assertRaisesRegex(cuvmm.RewritingError, "still open for rewriting.*call announce within the block"):
            with self.published.rewrite(60):
                pass
        with self.assertRaises(cuvmm.InUseError):
            self.published.rewrite()
        self.published.announce()
        with self.assertRaises(ZeroDivisionError) as raised:
            with self.published.rewrite(60):
                raise ZeroDivisionError
        if sys.version_info >= (3, 11):
            self.assertIn("still open for rewriting", raised.exception.__notes__[0])
        with self.assertRaises(cuvmm.WaitTimeout):
            self.table.next(timeout=0.1)
        self.assertEqual(self.published.announce(), self.table.next(timeout=60))
        self.table.release()
        with self.published.rewrite(60):
            self.published.withdraw()

    def test_a_withdrawal_while_elements_are_open(self) -> None:
        self.table.next(timeout=60)
        self.table.release()
        self.published.rewrite()
        self.published.withdraw()
        with self.assertRaises(cuvmm.UnfinishedError):
            self.table.next(timeout=60)
        self.assertEqual((len(self.table), self.table.state), (0, "ended"))

    def test_a_withdrawal_while_a_rewrite_waits(self) -> None:
        self.table.next(timeout=60)
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            waiting = other.submit(self.published.rewrite)
            await_that(lambda: self.table._link.slot.load(_page.INTENT) == 1, "the publisher wants to rewrite")
            self.published.withdraw()
            with self.assertRaises(cuvmm.ClosedError):
                waiting.result(60)
        with self.assertRaises(cuvmm.WithdrawnError):
            self.table.next(timeout=60)
        self.assertEqual(self.table.array.tolist(), [1] * 100)

    def test_a_late_follower_is_excluded(self) -> None:
        other = self.client.follow("table")
        self.addCleanup(other.close)
        for f in (self.table, other):
            f.next(timeout=60)
        other.release()
        told: List[cuvmm.FollowerStats] = []
        with self.published.rewrite(60, exclude_after=0.05, on_excluded=told.append):
            self.assertEqual([(f.pid, f.reads) for f in told], [(os.getpid(), True)])
            self.assertEqual({f.reads for f in self.published.followers()}, {False})
            self.assertFalse(self.table.intact(1))
            self.published.announce()
        for _ in range(2):
            with self.assertRaisesRegex(cuvmm.ExcludedError, "not released within 0.05 s.*discard"):
                self.table.next(timeout=60)
        self.assertIsInstance(self.table.error, cuvmm.ExcludedError)
        self.assertEqual((len(self.table), self.table.state), (0, "ended"))
        self.assertEqual(other.next(timeout=60), 2)
        with self.client.follow("table") as again:
            self.assertEqual(again.next(timeout=60), 2)

    def test_the_publishers_last_words(self) -> None:
        """A follower that the publisher goes on without is told apart from one that was withdrawn from."""
        ends: List[Tuple[Callable[[], Any], int]] = [
            (lambda: self.published.rewrite(60, exclude_after=0), _page.CUT_LEFT), (lambda: self.client.close(), _page.CUT_LEFT),
            (lambda: self.published.withdraw(), _page.CUT_WITHDRAWN), (lambda: self.server.close(), _page.CUT_WITHDRAWN)]
        for n, (end, last) in enumerate(ends):
            with self.subTest(n):
                if n:
                    self.doCleanups()
                    self.setUp()
                self.table.next(timeout=60)
                self.assertEqual(self.table._link.slot.load(_page.CUT), 0)
                end()
                await_that(lambda: self.table._link.slot.load(_page.CUT) == last, "the last word")

    def test_exclusions_that_cannot_be(self) -> None:
        with self.assertRaisesRegex(cuvmm.ArgumentError, "a limit of -1 s"):
            self.published.rewrite(exclude_after=-1)
        self.table.next(timeout=60)

        def fails(_: cuvmm.FollowerStats) -> None:
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.published.rewrite(exclude_after=0, on_excluded=fails)
        self.permitted()

    def test_intact(self) -> None:
        self.assertFalse(self.table.intact(1), "which was not shown")
        self.table.next(timeout=60)
        self.table.release()
        self.assertTrue(self.table.intact(1))
        self.assertFalse(self.table.intact(0))
        self.assertFalse(self.table.intact(2))
        self.published.announce()
        self.table.next(timeout=60)
        self.table.release()
        self.assertTrue(self.table.intact(1))
        self.published.shrink(50)
        self.assertFalse(self.table.intact(2))
        self.table.next(timeout=60)
        self.table.release()
        self.assertTrue(self.table.intact(3))
        self.permitted()
        self.assertFalse(self.table.intact(3))
        self.table.next(timeout=60)
        self.assertTrue(self.table.intact(4))
        self.server.close()
        self.assertFalse(self.table.intact(4))

    def test_intact_is_not_asked_of_a_closed_one(self) -> None:
        self.table.next(timeout=60)
        self.table.close()
        self.assertFalse(self.table.intact(1))
        with self.assertRaises(cuvmm.ClosedError):
            self.table.release()

    def test_a_hostile_follower_holds_itself_up(self) -> None:
        """Whatever it writes, the publisher waits, excludes it, or goes on, and others are shown what is announced."""
        with self.client.follow("table") as other:
            for held, released in ((7, 0), (0, 1 << 63), (9, 5)):
                hostile = self.client.follow("table")
                hostile._link.slot.store(_page.RELEASED, released)
                hostile._link.slot.store(_page.HELD, held)
                self.refused()
                with self.published.rewrite(60, exclude_after=0):
                    last = self.published.announce()
                self.assertEqual(other.next(timeout=60), last)
                other.release()
                hostile.close()
            hostile = self.client.follow("table")
            hostile._link.slot.store(_page.RELEASED, 5)  # what it has not held: it is not waited for
            self.permitted()
            hostile.close()

    def test_a_stream_that_captures_is_refused(self) -> None:
        self.table.next(self.handle, timeout=60)
        with mock.patch.object(_driver.Driver, "call", autospec=True, side_effect=captures_of(_driver.Driver.call)):
            with self.assertRaises(cuvmm.NotSupported):
                self.table.release(self.handle)
        self.refused()
        self.table.release(self.handle)
        self.permitted()

    def test_an_export_whose_stream_captures_is_released_later(self) -> None:
        self.table.next(timeout=60)
        self.table.array.allow_readonly().__dlpack__(stream=self.handle)
        with mock.patch.object(_streams, "captures", lambda *_: True):
            self.table.release()
        self.refused()
        self.table.release()
        self.permitted()


class Waiting(DriverTest):
    """Programs that start before their publisher."""

    def test_a_server_and_a_publication_that_come_later(self) -> None:
        began = time.monotonic()
        with self.assertRaises(cuvmm.GoneError):
            cuvmm.connect(self.path())
        self.assertLess(time.monotonic() - began, 5)
        with self.assertRaisesRegex(cuvmm.WaitTimeout, "not served within 0.1 s.*start the process that serves it"):
            cuvmm.connect(self.path(), 0.1, wait=True)
        with concurrent.futures.ThreadPoolExecutor(1) as other, cuvmm.empty(10, "uint8") as memory:
            connecting = other.submit(cuvmm.connect, self.path(), wait=True)
            time.sleep(0.1)
            with cuvmm.Server(self.path()) as server, connecting.result(60) as client:
                with self.assertRaises(cuvmm.UnknownError):
                    client.follow("table")
                with self.assertRaisesRegex(cuvmm.WaitTimeout, "'table' was not there within 0.1 s.*start the process that publishes it"):
                    client.follow("table", timeout=0.1, wait=True)
                following = other.submit(client.follow, "table", wait=True)
                time.sleep(0.1)
                server.publish("table", memory).announce()
                with following.result(60) as table:
                    self.assertEqual(table.next(timeout=60), 1)
                waiting = other.submit(client.follow, "never", wait=True)
                time.sleep(0.1)
                client.close()
                with self.assertRaises(cuvmm.ClosedError):
                    waiting.result(60)


def captures_of(call: Any) -> Callable[..., None]:
    """The driver's call, on a machine all of whose streams capture."""
    def captures(d: Any, name: str, *args: Any, **kw: Any) -> None:
        if name == "cuStreamIsCapturing":
            args[1]._obj.value = 1
            return
        call(d, name, *args, **kw)

    return captures


if __name__ == "__main__":
    unittest.main()
