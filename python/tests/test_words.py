"""What errors say, to readers of Python, and what they do about it."""

from __future__ import annotations

import asyncio
import math
import os
import re
import resource
import signal
from typing import Any, Callable, Dict, List

import cuvmm
from cuvmm._conn import Listener, pair
from cuvmm.imported import Channel

from .serving import ServedTest
from .support import DriverTest, await_that

LIKE = {"w": ("uint8", (1 << 20,))}


class BrokersWords(ServedTest):
    def test_denials_are_of_no_language(self) -> None:
        b, other = self.connect(), self.connect()
        calls: Dict[str, Callable[[], Any]] = {
            "have a process write it": lambda: other.attach("none"),
            "see whether the name is right": lambda: other.remove("none"),
            "wait until its writer commits it, or ends": lambda: other.attach("written"),
            "wait until that process closes it, or ends": lambda: other.keep("kept", 1),
            "use another name, or keep it to publish it": lambda: other.writer("kept", LIKE),
            "follow that publication": lambda: other.attach("kept"),
            "have that limit raised (cuvmm serve -limit)": lambda: other.writer("large", {"w": ("uint8", (65 << 20,))}),
        }
        with b.writer("written", LIKE), b.keep("kept", 1):
            for remedy, call in calls.items():
                with self.assertRaises(cuvmm.Error) as said:
                    call()
                self.assertIn(remedy, str(said.exception))
                self.assertIsNone(re.search(r"\w\.[A-Z]", str(said.exception)), said.exception)

    def test_a_client_too_many_learns_why(self) -> None:
        """From its calls, if it comes back to a broker that has as many clients as it takes, or when it connects."""
        clients = [self.connect() for _ in range(17)]
        for process in (self.process.pid, self.broker_pid()):
            assert process is not None
            resource.prlimit(process, resource.RLIMIT_NOFILE, (64, 64))  # of which a quarter are clients
        assert process is not None
        os.kill(process, signal.SIGKILL)
        reason = '"limit reached: 17 clients, where 16 are the most; try again when another has left"'
        said: List[str] = []

        def one_is_refused() -> bool:
            said.clear()
            for b in clients:
                try:
                    b.list(timeout=0.2)
                except cuvmm.WaitTimeout as e:
                    said.append(str(e))
            return len(said) == 1 and reason in said[0]

        await_that(one_is_refused, "all others are back")

        def refused() -> bool:
            try:
                cuvmm.connect_broker(self.socket).close()
            except cuvmm.RefusedError as e:
                self.assertIn(reason, str(e))
                return True
            return False

        await_that(refused, "it is refused when it joins")

    def test_a_limit_of_any_length(self) -> None:
        b = cuvmm.connect_broker(self.socket, math.inf, wait=True)
        self.addCleanup(b.close)
        with b.ensure("model", LIKE, lambda w: None, timeout=math.inf), b.keep("kept", 1, wait=True, timeout=math.inf):
            self.assertEqual(len(b.list(math.inf)), 2)


class PublishersWords(DriverTest):
    """A limit of a wait may be infinite, and is nowhere nan."""

    def setUp(self) -> None:
        super().setUp()
        self.memory = cuvmm.empty(4, "uint8")
        self.addCleanup(self.memory.close)
        self.server = cuvmm.Server(self.path(), math.inf)
        self.addCleanup(self.server.close)
        self.publication = self.server.publish("table", self.memory)

    def calls(self, timeout: float, client: cuvmm.Client, table: cuvmm.Follower) -> "Dict[str, Callable[[], Any]]":
        """Every call that waits for at most so many seconds, in an order in which none has to."""
        return {
            "Server": cuvmm.Server(self.path("other"), timeout).close if timeout > 0 else lambda: cuvmm.Server(self.path("other"), timeout),
            "connect": lambda: cuvmm.connect(self.path(), timeout, wait=True).close(),
            "list": lambda: client.list(timeout),
            "follow": lambda: client.follow("table", timeout=timeout, wait=True).close(),
            "shrink_wait": lambda: client.follow("table", shrink_wait=timeout).close(),
            "max_wait": lambda: client.follow("table", max_wait=timeout).close(),
            "announce": self.publication.announce,
            "settle": lambda: self.publication.settle(timeout),
            "next": lambda: table.next(timeout=timeout),
            "release": table.release,
            "rewrite": lambda: self.publication.rewrite(timeout),
            "rewritten": self.publication.announce,
            "next_async": lambda: asyncio.run(table.next_async(timeout=timeout)),
            "release too": table.release,
            "exclude_after": lambda: self.publication.rewrite(exclude_after=timeout),
            "done": self.publication.announce,
        }

    def test_infinite(self) -> None:
        with cuvmm.connect(self.path(), 1e300) as client, client.follow("table") as table:
            for name, call in self.calls(math.inf, client, table).items():
                with self.subTest(name):
                    call()

    def test_nan(self) -> None:
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            self.publication.announce()
            calls = self.calls(math.nan, client, table)
            calls["dial"] = lambda: cuvmm.dial(self.path(), math.nan)
            calls["connect_broker"] = lambda: cuvmm.connect_broker(self.path(), math.nan)
            conn, other = pair()
            self.addCleanup(os.close, other)
            with Channel(conn) as ch:
                calls["message"] = lambda: ch.message(math.nan)
                calls["receive"] = lambda: ch.receive(timeout=math.nan)
                for name in ("announce", "rewritten", "done", "release", "release too"):
                    del calls[name]
                for name, call in calls.items():
                    with self.subTest(name), self.assertRaisesRegex(cuvmm.ArgumentError, "nan"):
                        call()

    def test_a_remedy_comes_once(self) -> None:
        with self.assertRaisesRegex(cuvmm.WaitTimeout, r"^'.*none' was not served within 0.01 s: no process serves '.*none' \(start the process that serves it\)$"):
            cuvmm.connect(self.path("none"), 0.01, wait=True)

    def test_a_client_that_reconnects_need_not_connect_again(self) -> None:
        for reconnect, remedy in ((True, "; next shows what another publisher announces"), (False, ", and connect again after it has restarted")):
            with cuvmm.connect(self.path(), reconnect=reconnect) as client, client.follow("table") as table:
                self.publication.announce()
                table.next(timeout=60)
                table.release()
                self.publication.rewrite()
                for s in list(self.server._sessions):
                    s._conn.shutdown()
                with self.assertRaises(cuvmm.UnfinishedError) as said:
                    table.next(timeout=60)
                self.assertEqual(said.exception.hint, "discard what was computed from them" + remedy)
                self.assertEqual(str(said.exception).count("connect again"), 0 if reconnect else 1)
                self.publication.announce()

    def test_a_process_that_does_not_greet_is_named(self) -> None:
        listening = Listener(self.path("still"))
        self.addCleanup(listening.close)
        with self.assertRaisesRegex(cuvmm.WaitTimeout, f"process {os.getpid()} of user {os.geteuid()}, which serves '.*still', did not greet within 0.01 s"):
            cuvmm.connect(self.path("still"), 0.01)
