"""The Go side of tests, tests/peer, which scripts/test-python.sh builds."""

from __future__ import annotations

import os
import subprocess

import cuvmm

from .support import DriverTest, environment, lacks


class Peer:
    """A process that reads commands, and prints the result of each: by default the Go one of tests/peer."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command or [os.environ["CUVMM_TEST_PEER"]], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def do(self, *words: object) -> str:
        self.start(*words)
        return self.read()

    def done(self, *words: object) -> None:
        said = self.do(*words)
        assert said == "done", said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def end(self) -> int:
        """Ends it in order, and returns its exit status: not 0 if something was left."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            status = self.process.wait(60)
        finally:
            self.process.kill()
        self._close()
        return status

    def _close(self) -> None:
        for f in (self.process.stdin, self.process.stdout):
            if f is not None:
                f.close()


class GoTest(DriverTest):
    """A test beside Go processes."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if not os.environ.get("CUVMM_TEST_PEER"):
            lacks("CUVMM_TEST_PEER, the Go side (scripts/test-python.sh builds it)")

    def peer(self) -> Peer:
        p = Peer()
        self.addCleanup(p.kill)
        return p

    def serving(self, **arrays: int) -> Peer:
        p = self.peer()
        p.done("serve", self.folder, "socket")
        for name, length in arrays.items():
            p.done("publish", name, length)
        return p

    def check(self, a: cuvmm.Array, length: int) -> None:
        self.assertEqual(len(a), length)
        for at in sorted({0, length // 3, length - 1} & set(range(length))):
            self.assertEqual(a[at:at + 1].tolist(), [at])
