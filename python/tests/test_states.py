"""The states of a follower, with a publisher that the test plays."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
import unittest
from typing import Any, Callable, Dict, List
from unittest import mock

import cuvmm
from cuvmm import _conn, _descriptor, _driver, _page, _wire
from cuvmm._driver import Stream
from cuvmm._undo import Undo
from cuvmm.errors import Error

from .support import DriverTest, await_that

TOKEN = b"t" * 16
UNKNOWN, LIMIT, FORBIDDEN, FAILED = 1, 2, 5, 6


class Publisher:
    """Plays a server of one publication of bytes for one client, view by view."""

    def __init__(self, path: str) -> None:
        self._listener = _conn.Listener(path)
        self._undo = Undo()
        self._page, file = _page.make_page(None, self._undo)
        self._fd = file.number
        self._page.store(0, 1 << 40)  # all that is announced is done
        self._serial = 0
        self.publication = b"p" * 16

    def listen(self) -> None:
        self._conn = self._listener.accept()

    def asked(self) -> int:
        """Reads a request to follow; returns its number."""
        name, fields = self.read()
        assert name == "follow", name
        return int(fields["number"])

    def accept(self, element: int = 6, size: int = 1) -> None:
        """Accepts a connection and its follower."""
        self.listen()
        self.take_in(self.asked(), element, size)

    def take_in(self, number: int, element: int = 6, size: int = 1) -> None:
        """Accepts the follower that asked with a number."""
        self._serial = 0
        about = _descriptor.Descriptor(_descriptor.ARRAY, element, size, 0, 1, 0, _driver.device(0).uuid, False, False, 1, 0, _descriptor.this_process(), [])
        self._conn.send(*_wire.encode("accepted", {"number": number, "token": TOKEN, "publication": self.publication, "reserved": 16 << 20, "slot": 0, "tag": "", "form": 0, "description": bytes(32), "heir": False, "kept": False,
                                                   "descriptor": about.encode()}), [self._fd])

    def deny(self, number: int, status: int) -> None:
        self._conn.send(*_wire.encode("denied", {"number": number, "status": status, "reason": "for a test"}))

    def refuse(self) -> None:
        """Accepts a connection, and refuses it."""
        self.listen()
        self._conn.greet()
        self._conn.fail(cuvmm.TooLargeError("2 clients, where 1 is the most"))
        self._conn.close()

    def read(self) -> Any:
        return _wire.read(self._conn.receive(60), "server")

    def view(self, memory: Any = None, reply: bool = True, **fields: Any) -> Dict[str, Any]:
        """Sends a view; returns its done."""
        self._serial += 1
        chunks, handles = memory.chunks(len(memory)) if memory is not None else ((), [])
        undo = Undo()
        files = [h.export(undo) for h in handles]
        said = dict(token=TOKEN, serial=self._serial, generation=self._serial, state=1, ordered=1, length=0, keep=0, last=True, over=False, status=0, reason="",
                    chunks=[c._asdict() for c in chunks])
        said.update(fields)
        self._conn.send(*_wire.encode("soon", {}))  # it may precede any message
        self._conn.send(*_wire.encode("view", said), files)
        undo.close()
        if said["state"] in (4, 5) or not reply:
            return {}
        name, done = self.read()
        assert name == "done", name
        return dict(done)

    def close(self) -> None:
        self._conn.close()
        self._listener.close()
        self._undo.close()


def watched(f: cuvmm.Follower, waiting: threading.Event) -> Any:
    """Sets the event when the follower looks at its fence word."""
    def reached(generation: int) -> bool:
        waiting.set()
        return f._link.page.load(0) >= generation

    return mock.patch.object(f._link, "reached", reached)


class States(DriverTest):
    def setUp(self) -> None:
        super().setUp()
        self.memory = cuvmm.empty(100, "uint8")
        self.addCleanup(self.memory.close)
        self.memory.array.write(bytes([7]) * 100)

    def following(self, do: Callable[[Publisher, cuvmm.Follower], None], reconnect: bool = False, **options: Any) -> None:
        publisher = Publisher(self.path())
        accepting = threading.Thread(target=publisher.accept)
        accepting.start()
        with cuvmm.connect(self.path(), reconnect=reconnect) as client, client.follow("x", **options) as follower:
            accepting.join()
            try:
                do(publisher, follower)
            finally:
                publisher.close()

    def test_suspended_memory_is_unmapped_and_comes_back(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            self.assertEqual(p.view(self.memory, length=100)["chunks"], 1)
            f.next(timeout=60)
            self.assertEqual((f.state, f.array.tolist()), ("live", [7] * 100))
            at = f.array.ptr
            self.assertEqual(p.view(state=3)["chunks"], 0)
            self.assertEqual((f.state, len(f), f.error), ("suspended", 0, None))
            with self.assertRaises(cuvmm.WaitTimeout):
                f.next(timeout=0.02)  # there is nothing to show
            self.assertEqual((f.state, len(f.array)), ("suspended", 0))
            self.assertEqual(p.view(self.memory, length=100)["chunks"], 1)
            self.assertEqual(f.next(timeout=60), 3)
            self.assertEqual((f.state, f.array.tolist(), f.array.ptr), ("live", [7] * 100, at))

        self.following(do)

    def test_arrays_are_kept_while_memory_is_suspended(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            f.next(timeout=60)
            kept = f.array
            self.assertEqual(p.view(state=3)["chunks"], 0)
            uses: List[Callable[[], Any]] = [kept.tolist, lambda: kept.__dlpack__(stream=1, allow_readonly=True), lambda: f.order(0)]
            for use in uses:
                with self.assertRaises(cuvmm.SuspendedError):
                    use()
            p.view(self.memory, length=100)
            f.next(timeout=60)
            self.assertEqual(kept.tolist(), [7] * 100)
            self.assertEqual(p.view(keep=0)["status"], 6)  # taken back for good

        self.following(do, keep_arrays=True, shrink_wait=0.01)

    def test_on_shrink_refuses_that_memory_is_suspended(self) -> None:
        refusing = True

        def on_shrink(length: int) -> None:
            self.assertEqual(length, 0)
            if refusing:
                raise RuntimeError("in a collective")

        def do(p: Publisher, f: cuvmm.Follower) -> None:
            nonlocal refusing
            p.view(self.memory, length=100)
            self.assertEqual(f.next(timeout=60), 1)
            done = p.view(state=3)
            self.assertEqual((done["status"], done["chunks"]), (6, 1))
            self.assertIn("in a collective", done["reason"])
            self.assertEqual((f.state, f.error), ("live", None))
            p.view(keep=1, length=100)  # the same elements, again
            self.assertEqual((f.next(timeout=60), f.array.tolist()), (3, [7] * 100))
            refusing = False
            self.assertEqual(p.view(state=3)["chunks"], 0)
            self.assertEqual(f.state, "suspended")

        self.following(do, on_shrink=on_shrink)

    def test_a_publisher_that_dies_while_its_memory_is_suspended(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            self.assertEqual(f.next(timeout=60), 1)
            p.view(state=3)
            p._conn.close()
            with self.assertRaises(cuvmm.GoneError) as raised:
                f.next(timeout=60)
            self.assertNotIsInstance(raised.exception, cuvmm.UnfinishedError)

        self.following(do)

    def test_work_that_is_always_one_announcement_behind(self) -> None:
        """A generation that is complete is shown, even if a later one has arrived meanwhile."""
        def waits(f: cuvmm.Follower) -> int:
            return f.next(timeout=60)

        def waits_async(f: cuvmm.Follower) -> int:
            return asyncio.run(f.next_async(timeout=60))

        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=10)
            for generation, way in ((1, waits), (2, waits_async), (3, waits)):
                waiting = threading.Event()
                with watched(f, waiting):
                    with concurrent.futures.ThreadPoolExecutor(1) as other:
                        shown = other.submit(way, f)
                        self.assertTrue(waiting.wait(60))
                        p.view(generation=generation + 1, ordered=generation + 1, keep=1, length=10 * (generation + 1))
                        p._page.store(0, generation)
                        self.assertEqual(shown.result(60), generation)
                self.assertEqual((f.generation, len(f.array)), (generation, 10 * generation))

        self.following(do)

    def test_what_is_taken_back_while_next_waits_is_not_shown(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=100)
            waiting = threading.Event()
            with watched(f, waiting):
                with concurrent.futures.ThreadPoolExecutor(1) as other:
                    shown = other.submit(f.next, timeout=60)
                    self.assertTrue(waiting.wait(60))
                    p.view(generation=2, ordered=1, keep=1, length=30)
                    p.view(generation=3, ordered=3, keep=1, length=40)
                    p._page.store(0, 3)
                    self.assertEqual(shown.result(60), 3)
            self.assertEqual((f.generation, len(f.array)), (3, 40))

        self.following(do)

    def test_the_array_has_what_len_says_beside_next(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=1, ordered=0)
            ended = threading.Event()

            def read() -> int:
                looks = 0
                while not ended.is_set():
                    generation, length = f.generation, len(f)
                    assert generation <= length <= len(f.array), (generation, length)
                    looks += 1
                return looks

            with concurrent.futures.ThreadPoolExecutor(1) as other:
                reading = other.submit(read)
                try:
                    for generation in range(2, 300):
                        p.view(generation=generation, ordered=0, keep=1, length=generation)
                        f.next(timeout=60)
                finally:
                    ended.set()
                self.assertGreater(reading.result(60), 0)

        self.following(do)

    def test_the_end_right_behind_a_view_and_before_the_connections(self) -> None:
        """The last view may come while another is worked on, and the connection may end right behind it."""
        for i in range(30):
            with self.subTest(i):
                self.folder = os.path.join(self.folder, str(i))

                def do(p: Publisher, f: cuvmm.Follower) -> None:
                    with contextlib.suppress(Error):
                        p.view(self.memory, length=100, reply=False)
                        p.view(serial=0, state=5, ordered=0, status=3)
                    p._conn.close()
                    with self.assertRaises(cuvmm.WithdrawnError):
                        while True:
                            f.next(timeout=60)
                    self.assertEqual(f.array.tolist(), [7] * 100)

                self.following(do)

    def test_a_suspension_waits_for_arrays(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            f.next(timeout=60)
            kept: List[cuvmm.Array] = [f.array]
            threading.Timer(0.2, kept.clear).start()
            self.assertEqual(p.view(state=3)["status"], 0)
            self.assertEqual(kept, [])

        self.following(do)

    def test_stale_memory_stays(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            f.next(timeout=60)
            p.view(state=2, length=100, keep=1)
            self.assertEqual(f.next(timeout=60), 2)
            self.assertEqual((f.state, f.error, f.array.tolist()), ("stale", None, [7] * 100))

        self.following(do)

    def test_stale_followers_give_their_memory_back(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            f.next(timeout=60)
            client = f._client
            self.assertEqual(client.close_stale(), 0)
            have = f._range.mapped
            p._conn.close()
            await_that(lambda: f.error is not None or f.state == "stale", "the end")
            kept = [f.array]
            with self.assertRaises(cuvmm.InUseError):
                client.close_stale()
            kept.clear()
            self.assertEqual(client.close_stale(), have)
            self.assertEqual(client.close_stale(), 0)
            with self.assertRaises(cuvmm.ClosedError):
                f.next(timeout=60)

        self.following(do)

    def test_a_publisher_that_moved(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            f.next(timeout=60)
            p.view(serial=0, state=4, ordered=0, reason="to another process")
            with self.assertRaises(cuvmm.MovedError) as raised:
                f.next(timeout=60)
            self.assertIn("to another process", str(raised.exception))
            self.assertEqual((f.state, f.array.tolist()), ("ended", [7] * 100))

        self.following(do)

    def test_an_end_for_a_reason_of_the_publisher(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(serial=0, state=5, ordered=0, status=2, reason="too many")
            with self.assertRaises(cuvmm.EndedError) as raised:
                f.next(timeout=60)
            self.assertIn("too many", str(raised.exception))

        self.following(do)

    def test_a_publisher_that_moved_is_followed_to_the_next(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            f.next(timeout=60)
            p.view(serial=0, state=4, ordered=0)
            with contextlib.suppress(Error):
                p._conn.receive(60)
            p._conn.close()
            p.accept()
            p._serial = 0
            self.assertEqual(p.view(state=1, generation=9, length=50, keep=1)["chunks"], 1)
            self.assertEqual(f.next(timeout=60), 9)
            self.assertEqual((f.state, f.array.tolist()), ("live", [7] * 50))

        self.following(do, reconnect=True)

    def test_a_follower_comes_back_when_there_is_room(self) -> None:
        """Neither a connection that ends or is refused, nor a publisher that has no room or is not ready, ends it."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=100)
            f.next(timeout=60)
            p._conn.close()
            for _ in range(3):
                p.refuse()
                p.listen()
                p._conn.close()
            os.chmod(self.folder, 0o755)  # in which no client trusts the socket
            why = ""
            while "has mode 0o755" not in why:
                with self.assertRaisesRegex(cuvmm.GoneError, "the client is not connected: .*connects again by itself") as raised:
                    f._client.list(timeout=60)
                why = str(raised.exception)
            os.chmod(self.folder, 0o700)
            p.listen()
            for status in (LIMIT, UNKNOWN, LIMIT):
                p.deny(p.asked(), status)
            self.assertEqual((f.state, f.error, f.array.tolist()), ("stale", None, [7] * 100))
            p.take_in(p.asked())
            p.view(generation=2, length=50, keep=1)
            self.assertEqual(f.next(timeout=60), 2)
            self.assertEqual((f.state, f.array.tolist()), ("live", [7] * 50))

        self.following(do, reconnect=True)

    def test_a_follower_that_is_denied_ends(self) -> None:
        for status, kind in ((FORBIDDEN, cuvmm.AccessError), (FAILED, cuvmm.RefusedError)):
            def do(p: Publisher, f: cuvmm.Follower, status: int = status, kind: Any = kind) -> None:
                p._conn.close()
                p.listen()
                p.deny(p.asked(), status)
                with self.assertRaises(kind):
                    f.next(timeout=60)
                self.assertIsInstance(f.error, kind)

            with self.subTest(status):
                self.following(do, reconnect=True)

    def test_another_publication_of_the_name(self) -> None:
        """A follower of other elements ends, and leaves the publisher, which would otherwise wait for it."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._conn.close()
            p.accept(element=10, size=4)
            self.assertEqual(p.read()[0], "leave")
            with self.assertRaisesRegex(cuvmm.MismatchError, "is an array of .* now, and was an array of uint8"):
                f.next(timeout=60)

        self.following(do, reconnect=True)

    def test_a_fault_of_the_package_ends_the_follower(self) -> None:
        """Neither next nor the publisher waits for a thread that failed while it came back, also if ending it fails."""
        for again in (False, True):
            def do(p: Publisher, f: cuvmm.Follower, again: bool = again) -> None:
                p._conn.close()
                leaving: Any = mock.patch.object(f._client, "leave", side_effect=ValueError("another")) if again else contextlib.nullcontext()
                with mock.patch.object(f, "_check_same", side_effect=ValueError("a fault")), mock.patch.object(threading, "excepthook"), leaving:
                    p.accept()
                    if not again:
                        self.assertEqual(p.read()[0], "leave")
                    with self.assertRaisesRegex(Error, "the follower failed: ValueError"):
                        f.next(timeout=10)

            with self.subTest(again=again):
                self.following(do, reconnect=True)

    def test_a_client_that_is_refused_does_not_dial_at_once(self) -> None:
        pauses: List[float] = []

        def do(p: Publisher, f: cuvmm.Follower) -> None:
            client, wait = f._client, f._client.wait

            def waits(seconds: float) -> bool:
                if threading.current_thread() is client._reader:
                    pauses.append(seconds)
                return wait(0.001)

            with mock.patch.object(client, "wait", waits):
                p._conn.close()
                for _ in range(8):
                    p.refuse()
                p.accept()
            self.assertEqual(pauses[:7], [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])

        self.following(do, reconnect=True)

    def test_elements_that_were_shown_and_are_not_complete(self) -> None:
        """A follower that comes back says once that they are not shown any more."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=10, ordered=0)
            f.next(timeout=60)
            p.view(generation=2, ordered=2, keep=1, length=20)
            with mock.patch.object(f, "_order_behind"):  # as if a stream waited for them
                self.assertEqual(f.next(timeout=60), 2)
            self.assertEqual(len(f), 20)
            p._conn.close()
            with self.assertRaisesRegex(cuvmm.UnfinishedError, "discard what was computed"):
                f.next(timeout=60)
            self.assertEqual((len(f), f.state, f.error), (10, "stale", None))
            with self.assertRaises(cuvmm.WaitTimeout):
                f.next(timeout=0.01)
            p._page.store(0, 9)
            p.accept()
            p.view(generation=3, ordered=3, keep=1, length=15, chunks=[])
            self.assertEqual(f.next(timeout=60), 3)
            self.assertEqual((len(f), f.state, f.error), (15, "live", None))

        self.following(do, reconnect=True)

    def test_what_is_complete_and_was_skipped(self) -> None:
        """It is shown when what was shown instead is not complete, and the caller was told."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=10, ordered=0)
            p.view(generation=2, ordered=2, keep=1, length=20)
            with mock.patch.object(f, "_order_behind"):  # as if a stream waited for them
                self.assertEqual(f.next(timeout=60), 2)
            p._conn.close()
            with self.assertRaisesRegex(cuvmm.UnfinishedError, "discard what was computed"):
                f.next(timeout=60)
            self.assertIsInstance(f.error, cuvmm.UnfinishedError)
            self.assertEqual((f.next(timeout=60), len(f)), (1, 10))
            self.assertNotIsInstance(f.error, cuvmm.UnfinishedError)
            with self.assertRaises(cuvmm.GoneError):
                f.next(timeout=60)

        self.following(do)

    def test_a_close_before_the_publishers_work_is_done(self) -> None:
        """Streams that waited for it are released: what was computed from that does not count."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=10, ordered=0)
            f.next(timeout=60)
            p.view(generation=2, ordered=2, keep=1, length=20)
            stream = Stream(f._device)
            self.assertEqual(f.next(stream.handle.value, timeout=60), 2)
            self.assertFalse(stream.done())
            f.close()
            stream.synchronize()
            stream.close()
            with self.assertRaises(cuvmm.ClosedError):
                f.next(timeout=60)
            self.assertIsInstance(f.error, cuvmm.UnfinishedError)
            self.assertIn("discard what was computed", str(f.error))
            self.assertEqual(len(f), 10)

        self.following(do)

    def test_a_close_behind_the_publishers_work(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=10)
            f.next(timeout=60)
            f.close()
            self.assertIsInstance(f.error, cuvmm.ClosedError)

        self.following(do)

    def test_a_publisher_that_dies_before_it_rewrites(self) -> None:
        """Elements that it wanted to rewrite, and did not begin to, are whole."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=10)
            f.next(timeout=60)
            p.view(generation=2, length=20, keep=1)
            p._page.store(_page.INTENT, 2)
            with self.assertRaises(cuvmm.WaitTimeout):
                f.next(timeout=0.05)
            p._conn.close()
            self.assertEqual((f.next(timeout=60), len(f)), (2, 20))
            with self.assertRaises(cuvmm.GoneError) as raised:
                f.next(timeout=60)
            self.assertIs(type(raised.exception), cuvmm.GoneError)

        self.following(do)

    def test_an_unfinished_generation_behind_a_rewriting(self) -> None:
        """What ends a rewriting and is not complete has nothing before it to return to."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=10)
            f.next(timeout=60)
            f.release()
            for word in (_page.INTENT, _page.FLUX):
                p._page.store(word, 1)
            p.view(generation=2, ordered=2, keep=1, length=10)
            p._page.store(0, 1)
            with mock.patch.object(f, "_order_behind"):  # as if a stream waited for them
                self.assertEqual(f.next(timeout=60), 2)
            p._conn.close()
            with self.assertRaisesRegex(cuvmm.UnfinishedError, "discard what was computed"):
                f.next(timeout=60)
            self.assertEqual((len(f), f.state, f.error), (0, "stale", None))

        self.following(do, reconnect=True)

    def test_what_was_not_opened_for_rewriting_is_shown_although_its_publisher_died(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=10)
            p.view(generation=2, length=20, keep=1)
            p.view(generation=3, length=30, keep=1)
            f.next(timeout=60)
            p.view(generation=4, length=40, keep=1)
            for word in (_page.INTENT, _page.FLUX):
                p._page.store(word, 3)
            p._conn.close()
            await_that(lambda: f.error is not None, "the end")
            self.assertEqual((len(f), f.generation), (0, 0))
            with self.assertRaisesRegex(cuvmm.UnfinishedError, "were being rewritten.*discard"):
                f.next(timeout=60)
            self.assertEqual((f.next(timeout=60), len(f)), (4, 40))

        self.following(do)

    def test_a_hold_outlives_a_publisher(self) -> None:
        """The next one is told of it. If that may not have waited for it, the follower says that what it showed does not count."""
        for wanted, length in ((0, 10), (1, 0)):
            with self.subTest(wanted=wanted):
                self.folder = os.path.join(self.folder, str(wanted))

                def do(p: Publisher, f: cuvmm.Follower, wanted: int = wanted, length: int = length) -> None:
                    p.view(self.memory, length=10)
                    f.next(timeout=60)
                    self.assertEqual((p._page.load(_page.HELD), p._page.load(_page.RELEASED)), (1, 0))
                    f.release()
                    await_that(lambda: p._page.load(_page.RELEASED) == 1, "the release")
                    p.view(generation=2, length=10, keep=1)
                    f.next(timeout=60)
                    self.assertEqual(p._page.load(_page.HELD), 2)
                    p._conn.close()
                    for word in (_page.HELD, _page.RELEASED):
                        p._page.store(word, 0)
                    p._page.store(_page.INTENT, 2 * wanted)
                    p.accept()
                    await_that(lambda: p._page.load(_page.HELD) == 1, "the hold")
                    if wanted:
                        with self.assertRaisesRegex(cuvmm.UnfinishedError, "discard"):
                            f.next(timeout=60)
                    self.assertEqual(len(f), length)
                    with self.assertRaises(cuvmm.WaitTimeout):
                        f.next(timeout=0.01)
                    await_that(lambda: p._page.load(_page.RELEASED) == 1, "the release")
                    p.view(generation=3, length=30, keep=1)
                    self.assertEqual((f.next(timeout=60), len(f), f.error), (3, 30, None))

                self.following(do, reconnect=True)

    def test_generations_of_another_publication_are_not_proven(self) -> None:
        for publication, proven in ((b"p" * 16, True), (b"q" * 16, False)):
            with self.subTest(proven=proven):
                self.folder = os.path.join(self.folder, str(proven))

                def do(p: Publisher, f: cuvmm.Follower, publication: bytes = publication, proven: bool = proven) -> None:
                    p.view(self.memory, length=10)
                    f.next(timeout=60)
                    self.assertTrue(f.intact(1))
                    p._conn.close()
                    await_that(lambda: f.state == "stale", "the end")
                    self.assertFalse(f.intact(1))
                    p.publication = publication
                    p.accept()
                    await_that(lambda: not f._link.died, "another connection")
                    self.assertEqual(f.intact(1), proven)
                    p.view(generation=2, length=30, keep=1)
                    f.next(timeout=60)
                    self.assertTrue(f.intact(2))

                self.following(do, reconnect=True)

    def test_what_is_complete_is_shown_although_its_publisher_died(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=10, ordered=0)
            f.next(timeout=60)
            for generation in (2, 3, 4):
                p.view(generation=generation, ordered=generation, keep=1, length=10 * generation)
            p._page.store(0, 3)
            p._conn.close()
            self.assertEqual((f.next(timeout=60), len(f)), (3, 30))
            with self.assertRaises(cuvmm.GoneError) as raised:
                f.next(timeout=60)
            self.assertIs(type(raised.exception), cuvmm.GoneError)  # nothing that was shown is missing
            self.assertEqual(len(f), 30)

        self.following(do)

    def test_the_end_is_known_when_what_was_incomplete_is_gone(self) -> None:
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p.view(self.memory, length=10)
            f.next(timeout=60)
            die, go_on = f._die, threading.Event()

            def dies(link: Any, why: Error) -> None:
                go_on.wait(60)
                die(link, why)

            with mock.patch.object(f, "_die", dies):
                p._conn.close()
                self.assertTrue(f._link.mailbox.disconnected.wait(60))
                f._threads[0].join(0.2)
                self.assertIsNone(f.error)
                go_on.set()
                with self.assertRaises(cuvmm.GoneError):
                    f.next(timeout=60)
                self.assertIsInstance(f.error, cuvmm.GoneError)

        self.following(do)

    def test_a_close_beside_the_end_of_the_publisher(self) -> None:
        """The thread that maps waits for the one that watches, which may see that the follower is closed first."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            mailbox, watching = f._link.mailbox, threading.Event()

            def waits(_: float) -> bool:
                watching.set()
                while not f._closing:
                    time.sleep(0.001)
                return False

            with mock.patch.object(mailbox.ended, "wait", waits):
                self.assertTrue(watching.wait(60))
                p._conn.close()
                self.assertTrue(mailbox.disconnected.wait(60))
                f._threads[0].join(0.1)  # it waits for the other one
                closing = threading.Thread(target=f.close, daemon=True)
                closing.start()
                closing.join(60)
                self.assertFalse(closing.is_alive(), "close waits for ever")

        self.following(do, reconnect=True)

    def test_a_connection_that_is_used_when_another_replaces_it(self) -> None:
        """Threads that are about to wait for the old publisher's word wait for nothing: it has ended."""
        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=10)
            old, stream = f._link, Stream(f._device)
            p._conn.close()
            p.accept()
            await_that(lambda: old.page._words is None, "the old connection's page is closed")
            p._page.store(0, 0)
            old.release_waits()
            old.close()
            both: List[List[Any]] = [[], [stream.handle]]
            for streams in both:
                f._order_behind(old, 1, streams, None)
            self.assertTrue(stream.done())
            stream.close()
            p._page.store(0, 1 << 40)

        self.following(do, reconnect=True)

    def test_timeouts_that_are_shorter_than_the_publishers_lag(self) -> None:
        """Calls that end before the publisher's work is done go on waiting for the same generation."""
        def waits(f: cuvmm.Follower) -> int:
            return f.next(timeout=0.01)

        def waits_async(f: cuvmm.Follower) -> int:
            return asyncio.run(f.next_async(timeout=0.01))

        def do(p: Publisher, f: cuvmm.Follower) -> None:
            p._page.store(0, 0)
            p.view(self.memory, length=10)
            for generation, way in ((1, waits), (2, waits_async), (3, waits)):
                with self.assertRaises(cuvmm.WaitTimeout):
                    way(f)
                p.view(generation=generation + 1, ordered=generation + 1, keep=1, length=10 * (generation + 1))
                with self.assertRaises(cuvmm.WaitTimeout):
                    way(f)
                p._page.store(0, generation)
                self.assertEqual(f.next(timeout=60), generation)
            p.view(generation=5, ordered=5, keep=1, length=50)
            with self.assertRaises(cuvmm.WaitTimeout):
                f.next(timeout=0.01)
            p._page.store(0, 5)
            self.assertEqual(f.next(timeout=60), 5)  # the newest, since it is complete
            p.view(generation=6, ordered=6, keep=1, length=60)
            with self.assertRaises(cuvmm.WaitTimeout):
                f.next(timeout=0.01)
            p.view(generation=7, ordered=5, keep=1, length=30)  # which takes back what was awaited
            self.assertEqual((f.next(timeout=60), len(f.array)), (7, 30))

        self.following(do)



if __name__ == "__main__":
    unittest.main()
