"""The states of a follower, with a publisher that the test plays."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import unittest
from typing import Any, Callable, Dict, List
from unittest import mock

import cuvmm
from cuvmm import _conn, _descriptor, _driver, _page, _wire
from cuvmm.errors import Error

from .support import DriverTest

TOKEN = b"t" * 16


class Publisher:
    """Plays a server of one publication of bytes for one client, view by view."""

    def __init__(self, path: str) -> None:
        self._listener = _conn.Listener(path)
        self._page, self._fd = _page.make_page(None)
        self._page.store(0, 1 << 40)  # all that is announced is done
        self._serial = 0

    def accept(self) -> None:
        self._conn = self._listener.accept()
        self._serial = 0
        _, fields = self.read()
        about = _descriptor.Descriptor(_descriptor.ARRAY, 6, 1, 0, 1, 0, _driver.device(0).uuid, False, False, 1, 0, _descriptor.this_process(), [])
        self._conn.send(*_wire.encode("accepted", {"number": fields["number"], "token": TOKEN, "publication": b"p" * 16, "reserved": 16 << 20, "slot": 0,
                                                   "descriptor": about.encode()}), [self._fd])

    def read(self) -> Any:
        return _wire.read(self._conn.receive(60), "server")

    def view(self, memory: Any = None, reply: bool = True, **fields: Any) -> Dict[str, Any]:
        """Sends a view; returns its done."""
        self._serial += 1
        chunks, handles = memory.chunks(len(memory)) if memory is not None else ((), [])
        files = [h.export() for h in handles]
        said = dict(token=TOKEN, serial=self._serial, generation=self._serial, state=1, ordered=1, length=0, keep=0, last=True, over=False, status=0, reason="",
                    chunks=[c._asdict() for c in chunks])
        said.update(fields)
        self._conn.send(*_wire.encode("soon", {}))  # it may precede any message
        self._conn.send(*_wire.encode("view", said), files)
        _conn.close_all(files)
        if said["state"] in (4, 5) or not reply:
            return {}
        name, done = self.read()
        assert name == "done", name
        return dict(done)

    def close(self) -> None:
        self._conn.close()
        self._listener.close()
        self._page.close()
        os.close(self._fd)


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

    def following(self, do: Callable[[Publisher, cuvmm.Follower], None], reconnect: bool = False) -> None:
        publisher = Publisher(self.path())
        accepting = threading.Thread(target=publisher.accept)
        accepting.start()
        with cuvmm.connect(self.path(), reconnect=reconnect) as client, client.follow("x") as follower:
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
            self.assertEqual(f.next(timeout=60), 2)
            self.assertEqual((f.state, len(f.array)), ("suspended", 0))
            self.assertEqual(p.view(self.memory, length=100)["chunks"], 1)
            self.assertEqual(f.next(timeout=60), 3)
            self.assertEqual((f.state, f.array.tolist(), f.array.ptr), ("live", [7] * 100, at))

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


if __name__ == "__main__":
    unittest.main()
