"""Go and Python on one machine: each publishes, follows, sends and leases to the other. scripts/test-python.sh builds the Go side."""

from __future__ import annotations

import os
import random
import tempfile
import time
import unittest
from array import array as numbers
from typing import List

import cuvmm

from .go import GoTest
from .support import await_that
from .test_weights import flip


class BesideGo(GoTest):
    def test_a_file_of_go(self) -> None:
        """Python compares the digests of files that Go saves."""
        path = self.path("saved.safetensors")
        self.peer().done("save", path, 5_000_000)
        with cuvmm.load_file(path) as weights:
            self.assertEqual(weights["first"].tobytes(), numbers("I", range(3)).tobytes())
            self.assertTrue(weights["all"].tobytes() == numbers("I", range(5_000_000)).tobytes())
        flip(path, os.path.getsize(path) - 1)
        with self.assertRaises(cuvmm.DigestError):
            cuvmm.load_file(path)

    def test_python_follows_go(self) -> None:
        go = self.serving(table=1000)
        with cuvmm.connect(self.path()) as client:
            (entry,) = client.list()
            self.assertEqual((entry.name, entry.dtype, entry.itemsize, entry.length, entry.writable), ("table", "uint32", 4, 1000, True))
            with client.follow("table") as table:
                table.next(timeout=60)
                at = table.array.ptr
                self.check(table.array, 1000)
                for length in (100_000, 3_000_000, 9_000_000):
                    go.done("grow", "table", length)
                    table.next(timeout=60)
                    self.check(table.array, length)
                    self.assertEqual(table.array.ptr, at)
                self.assertEqual(go.do("followers", "table"), "1")
                go.done("shrink", "table", 10)
                table.next(timeout=60)
                self.check(table.array, 10)
                go.done("withdraw", "table")
                with self.assertRaises(cuvmm.WithdrawnError):
                    table.next(timeout=60)
        self.assertEqual(go.end(), 0)

    def test_go_follows_python(self) -> None:
        go = self.peer()
        with cuvmm.empty(1000, "uint32", reserve=64 << 20) as memory, cuvmm.Server(self.path()) as server:
            memory.array.write(numbers("I", range(1000)))
            table = server.publish("table", memory)
            table.announce()
            go.start("follow", self.path(), "table")
            self.assertEqual(go.read(), f"1 1000 {sum(range(1000))}")
            for length in (2_000_000, 5_000_000):
                before = len(memory)
                memory.resize(length)
                memory.array[before:].write(numbers("I", range(before, length)))
                generation = table.announce()
                self.assertEqual(go.read(), f"{generation} {length} {sum(range(length))}")
            table.shrink(5)
            table.settle(60)
            self.assertEqual(go.read(), "4 5 10")
            memory.resize(5)
            self.assertGreater(memory.trim(), 0)
            table.withdraw()
            self.assertEqual(go.read(), "done")
        self.assertEqual(go.end(), 0)

    def test_writers_both_ways(self) -> None:
        go = self.serving(table=100)
        with cuvmm.connect(self.path()) as client, client.follow("table", write=True) as table:
            table.next(timeout=60)
            table.array.write(numbers("I", [77]), at=5)
            self.assertEqual(go.do("read", "table", 5), "77")
        with cuvmm.empty(10, "uint32") as memory, cuvmm.Server(self.path("python")) as server:
            memory.array.write(bytes(40))
            server.publish("back", memory, writable=True).announce()
            go.done("write", self.path("python"), "back", 88)
            self.assertEqual(memory.array[:1].tolist(), [88])
        self.assertEqual(go.end(), 0)

    def test_sent_memory(self) -> None:
        go = self.peer()
        go.start("send", self.path(), 3_000_000)
        self.assertEqual(go.read(), "listening")
        with cuvmm.dial(self.path()) as channel:
            memory = channel.receive(timeout=60)
            self.assertEqual(channel.message(timeout=60)[:2], (7, b"hello"))
            self.assertEqual(go.read(), "done")
        self.assertEqual(go.end(), 0)
        self.check(memory.array, 3_000_000)  # it stays when its maker is gone
        memory.close()

    def test_a_sender_that_fails_before_its_offer(self) -> None:
        go = self.peer()
        go.start("fail", self.path(), 1000)
        self.assertEqual(go.read(), "listening")
        with cuvmm.dial(self.path()) as channel:
            with self.assertRaisesRegex(cuvmm.RefusedError, "closed"):
                channel.receive(timeout=60)
            with channel.receive(timeout=60) as memory:
                self.check(memory.array, 1000)
            self.assertEqual(go.read(), "done")
        self.assertEqual(go.end(), 0)

    def test_memory_that_is_refused(self) -> None:
        go = self.peer()
        go.start("send", self.path(), 1000)
        self.assertEqual(go.read(), "listening")
        with cuvmm.dial(self.path()) as channel:
            with self.assertRaises(cuvmm.TooLargeError):
                channel.receive(timeout=60, max_bytes=1000)
            self.assertIn("error", go.read())

    def test_a_lease(self) -> None:
        go = self.peer()
        text = go.do("lease", 1000)
        if text.startswith("error"):
            self.assertTrue(os.environ.get("CUVMM_TEST_GPU"), text)  # the software driver has a fabric
            self.skipTest("this machine has no fabric: " + text)
        memory, receipt = cuvmm.open_lease(text)
        self.assertTrue(receipt.startswith("cuvmmreceipt1:"))
        with memory:
            self.check(memory.array, 1000)
        for wrong in (text[:-1], text + "A", "cuvmm1:" + text, text.replace("cuvmmoffer1:", ""), text + "\n"):
            with self.assertRaises(cuvmm.Error):
                cuvmm.open_lease(wrong)

    def test_a_publisher_that_returns(self) -> None:
        go = self.serving(table=1_000_000)
        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table") as table:
            table.next(timeout=60)
            for length in (10, 2_000_000):
                go.kill()
                await_that(lambda: table.state == "stale", "the follower knows that its publisher has ended")
                with self.assertRaises(cuvmm.WaitTimeout):
                    table.next(timeout=0.01)
                go = self.serving(table=length)
                table.next(timeout=60)
                self.check(table.array, length)
            go.done("withdraw", "table")
            with self.assertRaises(cuvmm.WithdrawnError):
                table.next(timeout=60)

    def test_model(self) -> None:
        """A publisher in Go, and followers in Python that come, go and read in random order, with kills of the publisher."""
        for seed in range(int(os.environ.get("CUVMM_TEST_SEEDS", "3"))):
            with self.subTest(seed=seed), tempfile.TemporaryDirectory() as self.folder:
                self._model(random.Random(seed))

    def _model(self, r: random.Random) -> None:
        go = self.serving(table=100)
        length = 100
        clients: List[cuvmm.Client] = [cuvmm.connect(self.path(), reconnect=True) for _ in range(2)]
        followers: List[cuvmm.Follower] = []
        for _ in range(40):
            what = r.choice(["grow", "grow", "shrink", "follow", "leave", "read", "read", "kill"])
            if what == "grow":
                length += r.choice([1, 1000, 600_000])
                go.done("grow", "table", length)
            elif what == "shrink":
                length = r.randrange(length + 1)
                go.done("shrink", "table", length)
            elif what == "follow" and len(followers) < 4:
                followers.append(self._follow(r.choice(clients)))
            elif what == "leave" and followers:
                followers.pop(r.randrange(len(followers))).close()
            elif what == "read" and followers:
                self._read(r.choice(followers), length)
            elif what == "kill" and r.random() < 0.3:
                go.kill()
                length = r.choice([1, 50_000])
                go = self.serving(table=length)
        for f in followers:
            self._read(f, length)
            f.close()
        for c in clients:
            c.close()
        self.assertEqual(go.end(), 0)

    def _follow(self, c: cuvmm.Client) -> cuvmm.Follower:
        for _ in range(600):
            try:
                return c.follow("table")
            except (cuvmm.GoneError, cuvmm.UnknownError):  # while the client dials again, or the publisher is not ready
                time.sleep(0.1)
        raise AssertionError("the publisher did not return")

    def _read(self, f: cuvmm.Follower, length: int) -> None:
        """The follower reaches what is published, and each element is right."""
        until = time.monotonic() + 60
        while len(f) != length or f.state != "live":
            self.assertLess(time.monotonic(), until, f"{f} is {f.state}, and {length} are published")
            try:
                f.next(timeout=0.2)
            except cuvmm.WaitTimeout:
                pass
        self.check(f.array, length)


if __name__ == "__main__":
    unittest.main()
