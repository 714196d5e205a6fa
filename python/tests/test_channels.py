"""Messages of programs: threads that share a channel, limits of time and of size, and descriptors that come where none belong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import unittest
from typing import Any, Callable, Iterator, List, Tuple
from unittest import mock

import cuvmm
from cuvmm import _conn, _packet, _wire, broker
from cuvmm.broker import Broker

from .support import DriverTest, await_that


class Channels(unittest.TestCase):
    def setUp(self) -> None:
        conn, fd = _conn.pair()
        self.here, self.there = cuvmm.Channel(conn), cuvmm.inherit(fd)
        self.addCleanup(self.here.close)
        self.addCleanup(self.there.close)

    @contextlib.contextmanager
    def receiving(self, c: cuvmm.Channel, body: bytes) -> Iterator[None]:
        """Has a thread wait for a message meanwhile."""
        got: List[cuvmm.Message] = []
        t = threading.Thread(target=lambda: got.append(c.message()))
        t.start()
        await_that(c._conn._receiving.locked, "the thread waits")
        try:
            yield
        except BaseException:
            c.close()  # which ends the wait
            raise
        t.join(60)
        self.assertEqual([m.body for m in got], [body])

    def test_a_limit_of_time_beside_a_thread_that_waits(self) -> None:
        with self.receiving(self.there, b"for the thread"):
            calls: Tuple[Callable[..., Any], ...] = (self.there.message, self.there.receive)
            for call in calls:
                with self.assertRaises(cuvmm.WaitTimeout):
                    call(timeout=0.01)
            self.here.send(7, b"for the thread")

    def test_what_is_there_is_received_without_waiting(self) -> None:
        self.here.send(7, b"there")
        self.assertEqual(self.there.message(timeout=0).body, b"there")
        with self.assertRaises(cuvmm.WaitTimeout):
            self.there.message(timeout=0)

    def test_a_send_beside_a_thread_that_waits_for_the_greeting(self) -> None:
        conn, fd = _conn.pair()
        child = os.dup(fd)
        os.close(fd)
        with cuvmm.Channel(conn) as parent, self.receiving(parent, b"a reply"):
            sent = threading.Thread(target=lambda: parent.send(7, b"a request"))
            sent.start()
            with cuvmm.inherit(child) as c:
                self.assertEqual(c.message(timeout=60).body, b"a request")
                c.send(7, b"a reply")
                sent.join(60)

    def test_messages_that_are_too_large_cost_nothing(self) -> None:
        with open(os.devnull, "rb") as f:
            for body, files in ((bytes(_packet.MAX_BODY + 1), 0), (b"", _packet.MAX_FILES + 1)):
                with self.assertRaisesRegex(cuvmm.TooLargeError, "send several messages"):
                    self.here.send(7, body, [f.fileno()] * files)
        self.here.send(7, b"small")
        self.assertEqual(self.there.message(timeout=60).body, b"small")

    def test_files_that_are_not_open(self) -> None:
        with open(os.devnull, "rb") as f:
            with self.assertRaisesRegex(cuvmm.ArgumentError, "not open"):
                self.here.send(7, b"", [1 << 20])
            self.here.send(7, b"goes on")
            self.assertEqual(self.there.message(timeout=60).body, b"goes on")
            with self.assertRaisesRegex(cuvmm.ArgumentError, "not open"):
                self.here.send(7, b"", [f.fileno()] * _packet.FILES + [1 << 20])
        with self.assertRaisesRegex(cuvmm.GoneError, "halfway"):  # no part of another message comes behind
            self.here.send(7, b"later")
        with self.assertRaisesRegex(cuvmm.RefusedError, "halfway"):
            self.there.message(timeout=60)


class Timeouts(DriverTest):
    def test_a_time_that_is_over(self) -> None:
        with cuvmm.Server(self.path()), cuvmm.connect(self.path()) as client, self.assertRaises(cuvmm.WaitTimeout):
            client.list(timeout=-1)


class Brokers(DriverTest):
    """Beside a broker that breaks the protocol."""

    @contextlib.contextmanager
    def broker(self, reply: Callable[[_conn.Conn, str, int], None]) -> Iterator[Broker]:
        """Connects to a broker that has that reply to each request."""
        listener = _conn.Listener(self.path())

        def serve() -> None:
            with contextlib.suppress(cuvmm.Error):
                while True:
                    c = listener.accept()
                    with contextlib.suppress(cuvmm.Error), contextlib.closing(c):
                        while True:
                            m = c.receive(60)
                            said, fields = _wire.decode(m.kind, m.body, "broker")
                            if said != "join":
                                reply(c, said, fields["number"])

        t = threading.Thread(target=serve)
        t.start()
        try:
            with cuvmm.connect_broker(self.path()) as b:
                yield b
        finally:
            listener.close()
            t.join(60)

    def closing(self, call: Callable[[], Any]) -> List[int]:
        """The descriptors that a call closes for which nothing is open."""
        twice: List[int] = []

        def close(f: int, real: Callable[[int], None] = os.close) -> None:
            try:
                real(f)
            except OSError:
                twice.append(f)
                raise

        with mock.patch.object(os, "close", close):
            call()
        return twice

    def test_files_where_none_belong(self) -> None:
        requests: Tuple[Tuple[int, bytes], ...] = (_wire.encode("wanted", {"number": 0, "key": bytes(16)}), (_wire.KINDS["wanted"], b"none"),
                                                   _wire.encode("object done", {"number": 1 << 20, "version": 0}))
        for kind, body in requests:
            def reply(c: _conn.Conn, said: str, number: int) -> None:
                with open(os.devnull, "rb") as f:
                    c.send(kind, body, [f.fileno()])
                c.send(*_wire.encode("objects", {"number": number, "last": True, "entries": []}))

            def fails() -> None:
                with self.broker(reply) as b:
                    with self.assertRaises(cuvmm.Error):
                        b.list(timeout=0)

            before = len(os.listdir("/proc/self/fd"))
            self.assertEqual(self.closing(fails), [])
            await_that(lambda: len(os.listdir("/proc/self/fd")) <= before, "nothing is left open")  # the broker's thread may be connecting

    def test_files_with_what_was_not_asked(self) -> None:
        for kind, body in (_wire.encode("wanted", {"number": 0, "key": bytes(16)}), (_wire.KINDS["wanted"], b"none"), _wire.encode("object done", {"number": 0, "version": 0})):
            def reply(c: _conn.Conn, said: str, number: int) -> None:
                c.send(*_wire.encode("objects", {"number": number, "last": True, "entries": []}))
                with open(os.devnull, "rb") as f:
                    c.send(kind, body, [f.fileno()])

            def attends() -> None:
                with self.broker(reply) as b:
                    first = b._channel
                    b.list(timeout=60)
                    await_that(lambda: b._channel is not first, "the connection is given up")

            before = len(os.listdir("/proc/self/fd"))
            self.assertEqual(self.closing(attends), [])
            await_that(lambda: len(os.listdir("/proc/self/fd")) <= before, "nothing is left open")  # the broker's thread may be connecting

    def test_a_release_that_is_denied(self) -> None:
        def reply(c: _conn.Conn, said: str, number: int) -> None:
            if said == "release":
                c.send(*_wire.encode("object denied", {"number": number, "cause": 0, "reason": "no"}))
            else:
                c.send(*_wire.encode("objects", {"number": number, "last": True, "entries": []}))

        with self.broker(reply) as b:
            b._loose[bytes(16)] = None
            self.assertEqual(b.list(timeout=60), [])
            self.assertEqual(b._loose, {})

    def test_a_wait_whose_time_is_over_as_it_connects(self) -> None:
        left = iter([1e-9])
        with self.broker(lambda *_: None) as b, mock.patch.object(broker, "_left", lambda _: next(left, 0.0)), self.assertRaises(cuvmm.WaitTimeout):
            b._await("model", time.monotonic(), cuvmm.WritingError("being written"))

    def test_a_fork_beside_a_thread_that_connects(self) -> None:
        with broker._default_lock:
            child = os.fork()
            if child == 0:
                try:
                    signal.alarm(20)
                    with mock.patch.object(broker, "connect_broker", side_effect=cuvmm.GoneError("nobody serves")), contextlib.suppress(cuvmm.GoneError):
                        cuvmm.attach("model")
                finally:
                    os._exit(0)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
