"""What errors say, to readers of Python, and what they do about it."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
from typing import Any, Callable, Dict, List

import cuvmm

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
