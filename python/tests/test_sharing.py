"""Publishing and following between processes, both in Python."""

from __future__ import annotations

import array
import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from typing import Any, List

import cuvmm
from cuvmm import _driver, _page
from cuvmm._driver import Stream
from cuvmm._undo import Undo

from .consumer import Tensor as Consumer
from .support import DriverTest, await_that, environment


def child(code: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *args], env=environment(), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


FOLLOWER = """
    import cuvmm, sys
    with cuvmm.connect(sys.argv[1]) as client, client.follow("table", write=len(sys.argv) > 2) as table:
        print("ready", flush=True)
        while True:
            try:
                generation = table.next()
            except cuvmm.Error as e:
                print("end", type(e).__name__, len(table), flush=True)
                break
            a = table.array
            print(generation, len(a), sum(a.tolist()), flush=True)
            if len(sys.argv) > 2:
                a.write(b"\\x01")
            del a
"""

PUBLISHER = """
    import cuvmm, sys
    value, length = (int(v) for v in sys.argv[2:4]) if len(sys.argv) > 2 else (1, 100)
    memory = cuvmm.empty(length, "uint8", reserve=8 << 20)
    memory.array.write(bytes([value]) * length)
    server = cuvmm.Server(sys.argv[1])
    table = server.publish("table", memory)
    table.announce()
    print("ready", flush=True)
    sys.stdin.readline()
"""


class Sharing(DriverTest):
    def lines(self, p: "subprocess.Popen[str]") -> Any:
        def end() -> None:
            p.kill()
            p.wait()
            for f in (p.stdout, p.stdin):
                if f is not None:
                    f.close()

        self.addCleanup(end)
        assert p.stdout is not None
        return p.stdout

    def publish(self, length: int = 100, writable: bool = False) -> None:
        self.memory = cuvmm.empty(length, "uint8", reserve=16 << 20)
        self.memory.array.write(bytes([1]) * length)
        self.server = cuvmm.Server(self.path())
        self.table = self.server.publish("table", self.memory, writable=writable)
        self.addCleanup(self.memory.close)
        self.addCleanup(self.server.close)

    def test_growth_shrinking_and_the_end(self) -> None:
        self.publish()
        out = self.lines(child(FOLLOWER, self.path()))
        self.assertEqual(out.readline(), "ready\n")
        want = []
        for length in (100, 1_000_000, 5_000_000):
            self.memory.resize(length)
            self.memory.array.write(bytes([1]) * length)
            generation = self.table.announce()
            self.table.settle(60)
            want.append(f"{generation} {length} {length}\n")
            self.assertEqual(out.readline(), want[-1])
        self.table.shrink(7)
        self.table.settle(60)
        self.assertEqual([f.pinned for f in self.table.followers()], [0])
        self.assertEqual(out.readline(), "4 7 7\n")
        self.memory.resize(7)
        self.assertGreater(self.memory.trim(), 0)
        self.table.withdraw()
        self.assertEqual(out.readline(), "end WithdrawnError 7\n")

    def test_elements_of_models(self) -> None:
        """Elements that NumPy has no numbers of are published and followed as such, by DLPack alone."""
        with cuvmm.Server(self.path()) as server, cuvmm.connect(self.path()) as client:
            for dtype, size, code in (("bfloat16", 2, 4), ("float16", 2, 2), ("float8_e4m3", 1, 10), ("float8_e5m2", 1, 12)):
                with cuvmm.empty(8, dtype) as memory:
                    publication = server.publish(dtype, memory)
                    memory.array.write(bytes(range(8 * size)))
                    publication.announce()
                    with client.follow(dtype) as follower:
                        follower.next()
                        self.assertEqual((follower.array.dtype, follower.array.tobytes()), (dtype, bytes(range(8 * size))))
                        c = Consumer(follower.array.allow_readonly().__dlpack__(max_version=(1, 0)))
                        kind = c.managed.tensor.dtype
                        self.assertEqual((c.shape, kind.code, kind.bits), ((8,), code, 8 * size))
                        c.free()
                        self.assertEqual(hasattr(follower.array, "__cuda_array_interface__"), dtype == "float16")
                    self.assertEqual([(p.dtype, p.itemsize) for p in client.list()], [(dtype, size)])
                    publication.withdraw()

    def test_what_a_publication_says(self) -> None:
        manifest = json.dumps({"bytes": 100, "tensors": [
            {"name": "a", "element": "float32", "shape": [2, 3], "offset": 0, "kind": "parameter"},
            {"name": "b", "element": "uint8", "shape": [10], "offset": 90, "digest": "x"}]}).encode()
        with cuvmm.empty(100, "uint8") as memory, cuvmm.Server(self.path()) as server, cuvmm.connect(self.path()) as client:
            publication = server.publish("table", memory, manifest=manifest, tag="model")
            (listed,) = client.list()
            expected = manifest.replace(b"digest", b"kind").replace(b'"x"', b'""')
            with client.follow("table", expect=expected) as follower:
                assert follower.manifest is not None
                self.assertEqual((listed.tag, listed.description), ("model", hashlib.sha256(follower.manifest).digest()))
                self.assertEqual((follower.tag, follower.description), ("model", follower.manifest))
                self.assertEqual(list(follower.tensors), ["a", "b"])
                with self.assertRaises(cuvmm.ArgumentError):
                    follower.tensors["b"]  # nothing is shown yet
                memory.array.write(bytes(range(100)))
                publication.announce(50)
                follower.next()
                self.assertEqual((follower.tensors["a"].shape, follower.tensors["a"].tobytes()), ((2, 3), bytes(range(24))))
                with self.assertRaises(cuvmm.ArgumentError):
                    follower.tensors["b"]
                publication.announce()
                follower.next()
                self.assertEqual(follower.tensors["b"].tobytes(), bytes(range(90, 100)))
                with self.assertRaises(KeyError):
                    follower.tensors["c"]
            with self.assertRaises(cuvmm.MismatchError) as raised:
                client.follow("table", expect=manifest.replace(b"float32", b"int32").replace(b"[10]", b"[9]"))
            self.assertIn('publication "table"', str(raised.exception))
            self.assertIn('tensor "a" has element float32 instead of int32; tensor "b" has shape [10] instead of [9] (follow', str(raised.exception))  # one remedy
            self.assertIn("instead of [9]", raised.exception.what)
            await_that(lambda: not publication.followers(), "both followers have left")
            self.assertEqual(repr(publication), "<cuvmm.Publication of 'table': generation 2, 0 followers>")
            self.assertEqual((repr(server), repr(client)), (f"<cuvmm.Server at '{self.path()}': 1 publication>", f"<cuvmm.Client of '{self.path()}'>"))
            publication.withdraw()
            server.publish("table", memory, description="größe")
            with client.follow("table") as follower:
                self.assertEqual((follower.description, follower.manifest, follower.tag), ("größe".encode(), None, ""))
                with self.assertRaises(cuvmm.UnknownError):
                    follower.tensors
            with self.assertRaises(cuvmm.MismatchError):
                client.follow("table", expect=manifest)
            wrong: List[Any] = [{"manifest": b"{}"}, {"manifest": b'{"bytes":%d,"tensors":[]}' % (memory.reserved + 1)}, {"manifest": manifest, "description": "x"}, {"description": bytes((64 << 20) + 1)},
                                {"tag": " x"}, {"tag": "x" * 129}, {"tag": "\n"}, {"tag": 5}]
            for bad in wrong:
                with self.assertRaises(cuvmm.ArgumentError, msg=str(bad)[:80]):
                    server.publish("other", memory, **bad)
            with self.assertRaisesRegex(cuvmm.ArgumentError, r"^[^()]*\(pass what manifest\(\) returned\)$"):
                client.follow("table", expect=b"{}")

    def test_a_writer(self) -> None:
        self.publish(writable=True)
        out = self.lines(child(FOLLOWER, self.path(), "write"))
        self.assertEqual(out.readline(), "ready\n")
        self.memory.array.write(b"\x05")
        self.table.announce()
        self.assertEqual(out.readline(), "1 100 104\n")
        self.table.withdraw()
        self.assertEqual(out.readline(), "end WithdrawnError 100\n")
        self.assertEqual(self.memory.array[:1].tolist(), [1])

    def test_access_is_the_publishers(self) -> None:
        self.publish()
        with cuvmm.connect(self.path()) as client:
            self.assertEqual(client.list()[0]._replace(nbytes=0), cuvmm.Listing("table", "uint8", 1, 0, 0, 0, False, "", bytes(32)))
            with self.assertRaises(cuvmm.AccessError):
                client.follow("table", write=True)
            with self.assertRaises(cuvmm.UnknownError):
                client.follow("other")

    def test_a_publisher_that_dies(self) -> None:
        p = child(PUBLISHER, self.path())
        out = self.lines(p)
        self.assertEqual(out.readline(), "ready\n")
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            table.next(timeout=60)
            p.send_signal(signal.SIGKILL)
            p.wait()
            with self.assertRaises(cuvmm.GoneError):
                table.next(timeout=60)
            self.assertIsInstance(table.error, cuvmm.GoneError)
            self.assertEqual(sum(table.array.tolist()), 100)  # what is mapped stays

    def test_a_publisher_that_returns(self) -> None:
        """Followers keep their address, say that they are stale, and show one publication or the other, never both."""
        p = child(PUBLISHER, self.path(), "1", "3000000")
        self.assertEqual(self.lines(p).readline(), "ready\n")
        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table") as table:
            self.assertEqual(table.next(timeout=60), 1)
            at = table.array.ptr
            for value, length in ((2, 100), (3, 5_000_000), (4, 5_000_000)):
                shown = table.array
                p.kill()
                p.wait()
                await_that(lambda: table.state == "stale", "the follower knows that its publisher has ended")
                with self.assertRaises(cuvmm.WaitTimeout):
                    table.next(timeout=0.01)
                self.assertEqual((table.state, table.error), ("stale", None))
                self.assertEqual(set(shown.tobytes()), {value - 1})
                del shown
                p = child(PUBLISHER, self.path(), str(value), str(length))
                self.assertEqual(self.lines(p).readline(), "ready\n")
                before = table.generation
                self.assertGreater(table.next(timeout=60), before)
                self.assertEqual((table.state, table.array.ptr), ("live", at))
                self.assertEqual(table.array.tobytes(), bytes([value]) * length)
            client.close()
            with self.assertRaises(cuvmm.Error):
                table.next(timeout=60)
            self.assertEqual(table.state, "ended")

    def test_a_stopped_stream_of_a_dead_publisher(self) -> None:
        """What was announced behind work that is never done is not shown any more, and no stream hangs."""
        self.publish()
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            self.table.announce()
            table.next(timeout=60)
            self.memory.resize(200)
            self.table._view = self.table._view._replace(ordered=99)  # as if its work were never done
            with self.table._changed:
                self.table._show(self.table._view._replace(generation=99, ordered=99, length=200))
            stream = Stream(table._device)
            self.assertEqual(table.next(stream.handle.value, timeout=60), 99)
            self.assertEqual(len(table), 200)
            self.assertFalse(stream.done())
            self.server.close()
            stream.synchronize()
            stream.close()
            await_that(lambda: table.error is not None, "the follower knows that the server has ended")
            self.assertIsInstance(table.error, cuvmm.UnfinishedError)
            self.assertEqual(len(table), 100)

    def test_announced_work_is_awaited_after_a_withdrawal(self) -> None:
        """A withdrawal, or the end of the server, does not release followers from work that is still under way."""
        dev = _driver.device(0)
        for name, end in (("withdraw", lambda: self.table.withdraw()), ("close", lambda: self.server.close())):
            with self.subTest(name), tempfile.TemporaryDirectory() as self.folder:
                await_that(lambda: not [t for t in threading.enumerate() if t.name == "cuvmm session"], "no page is given back while a stream waits, for which that would wait")
                self.publish()
                undo = Undo()
                page, _ = _page.make_page(dev, undo)
                writer, reader = Stream(dev), Stream(dev)
                with dev.current() as d:
                    d.call("cuStreamWaitValue64_v2", writer.handle, page.at(0), 1, 0)
                    d.call("cuMemsetD8Async", self.memory.array.ptr, 9, 100, writer.handle)
                with cuvmm.connect(self.path()) as client, client.follow("table") as table:
                    self.table.announce(stream=writer.handle.value)
                    table.next(reader.handle.value, timeout=60)
                    ending = threading.Thread(target=end)
                    ending.start()
                    time.sleep(0.2)
                    released = reader.done()
                    page.store(0, 1)
                    ending.join()
                    self.assertFalse(released, "the follower's stream went on before the publisher's")
                    with self.assertRaises(cuvmm.WithdrawnError if name == "withdraw" else cuvmm.MovedError):
                        table.next(timeout=60)
                    reader.synchronize()
                    self.assertEqual(set(table.array.tolist()), {9})
                writer.close()
                reader.close()
                undo.close()

    def test_a_server_that_restarts_is_followed_again(self) -> None:
        self.publish()
        self.table.announce()
        with cuvmm.connect(self.path(), reconnect=True) as client, client.follow("table") as table:
            table.next(timeout=60)
            self.server.close()
            self.memory.array.write(bytes([2]) * 100)
            self.server = cuvmm.Server(self.path())
            self.server.publish("table", self.memory).announce()
            table.next(timeout=60)
            self.assertEqual((table.state, set(table.array.tolist())), ("live", {2}))
            self.server.close()

    def test_a_shrink_waits_for_tensors(self) -> None:
        self.publish()
        self.memory.resize(5_000_000)
        self.memory.array[4_999_999:].write(b"\x01")
        self.table.announce()
        with cuvmm.connect(self.path()) as client, client.follow("table", shrink_wait=0.2) as table:
            table.next(timeout=60)
            a = table.array
            with self.assertRaises(cuvmm.InUseError) as raised:
                self.table.shrink(10)
                self.table.settle(60)
            self.assertIn("test_sharing.py", str(raised.exception))
            self.assertEqual(a[4_999_999:].tolist(), [1])  # it is still there
            del a
            with self.assertRaises(cuvmm.InUseError):
                table.next(timeout=60)  # the follower is told why it missed that generation
            self.table.announce(10)
            self.assertEqual(table.next(timeout=60), 3)
            self.table.settle(60)

    def test_a_range_that_is_too_small(self) -> None:
        self.publish()
        self.table.announce()
        with cuvmm.connect(self.path()) as client, client.follow("table", reserve=1) as table:
            table.next(timeout=60)
            self.memory.resize(5_000_000)
            self.table.announce()
            with self.assertRaises(cuvmm.CapacityError):
                table.next(timeout=60)
            self.assertIsNone(table.error)
            self.assertEqual(len(table), 100)

    def test_asyncio(self) -> None:
        self.publish()
        self.table.announce()

        async def main() -> List[int]:
            seen = []
            async for generation in table.generations():
                seen.append(generation)
                if generation < 3:
                    self.table.announce()
                else:
                    self.table.withdraw()
            return seen

        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            self.assertEqual(asyncio.run(main()), [1, 2, 3])
            self.assertIsInstance(table.error, cuvmm.WithdrawnError)

    def test_a_close_ends_a_wait(self) -> None:
        self.publish()
        with cuvmm.connect(self.path()) as client:
            table = client.follow("table")
            errors: List[BaseException] = []

            def wait() -> None:
                try:
                    table.next()
                except cuvmm.Error as e:
                    errors.append(e)

            t = threading.Thread(target=wait)
            t.start()
            time.sleep(0.1)
            table.close()
            t.join(60)
            self.assertIsInstance(errors[0], cuvmm.ClosedError)
            table.close()

    def test_cycles_leave_nothing(self) -> None:
        self.publish(3_000_000)
        self.table.announce()

        def open_files() -> int:
            return len(os.listdir("/proc/self/fd"))

        def mappings() -> int:
            with open("/proc/self/maps") as f:
                return len(f.readlines())

        def cycle() -> None:
            with cuvmm.connect(self.path()) as client, client.follow("table") as table:
                table.next(timeout=60)
                self.assertEqual(table.array[2_999_999:].tolist(), [1])

        for _ in range(3):
            cycle()
        files, maps = open_files(), mappings()
        for _ in range(100):
            cycle()
        await_that(lambda: not self.table.followers(), "the last follower has left")
        await_that(lambda: open_files() <= files, "no file is open that was not open before")
        self.assertLess(mappings(), maps + 60)

    def test_a_socket_that_exists(self) -> None:
        self.publish()
        with self.assertRaises(cuvmm.PeerError):
            cuvmm.Server(self.path())
        self.server.close()
        cuvmm.Server(self.path()).close()
        os.chmod(self.folder, 0o755)
        with self.assertRaises(cuvmm.PeerError):
            cuvmm.connect(self.path())
        os.chmod(self.folder, 0o700)
        with self.assertRaises(cuvmm.GoneError):
            cuvmm.connect(self.path())

    def test_arguments_that_no_call_takes(self) -> None:
        with self.assertRaisesRegex(cuvmm.PeerError, "/nowhere/folder' cannot be made: No such file or directory .name one in an existing folder"):
            cuvmm.Server("/nowhere/folder/socket")
        with self.assertRaisesRegex(cuvmm.ArgumentError, "descriptor 999: Bad file descriptor .pass the file"):
            cuvmm.inherit(999)
        with cuvmm.empty(10) as memory:
            with self.assertRaisesRegex(cuvmm.ArgumentError, "-1 elements .sizes are not negative"):
                memory.resize(-1)
        refused: List[Any] = [lambda: cuvmm.empty(1.5), lambda: cuvmm.empty("3"), lambda: cuvmm.empty(1, reserve=1.5)]  # type: ignore[arg-type]
        with cuvmm.empty(10) as memory:
            refused += [lambda: memory.resize(1.5), lambda: memory.resize(None)]  # type: ignore[arg-type]
            for wrong in refused:
                with self.assertRaisesRegex(cuvmm.ArgumentError, "pass a whole number"):
                    wrong()
            memory.resize(20)
            self.assertEqual(len(memory.array), 20)
        with self.assertRaisesRegex(cuvmm.ArgumentError, "pass sizes from 0 to"):
            cuvmm.empty(1 << 62)
        for seconds in (0, -1, float("nan")):
            for wrong in (lambda: cuvmm.connect(self.path(), seconds), lambda: cuvmm.Server(self.path(), seconds), lambda: cuvmm.dial(self.path(), seconds), lambda: cuvmm.inherit(0, seconds)):
                with self.assertRaisesRegex(cuvmm.ArgumentError, "pass a positive number of seconds"):
                    wrong()
        self.publish()
        with self.assertRaisesRegex(cuvmm.ArgumentError, "shrinking from 0 to 5 elements .pass a length from 0"):
            self.table.shrink(5)
        with self.assertRaisesRegex(cuvmm.CapacityError, "of addresses, which this process does not have left .reserve fewer"):
            cuvmm.empty(1, reserve=1 << 60)

    def test_what_cannot_be_published(self) -> None:
        self.publish()
        for memory in (array.array("f"), None):
            with self.assertRaises(cuvmm.ArgumentError) as raised:
                self.server.publish("x", memory)  # type: ignore[arg-type]
            self.assertIn("cuvmm.empty", str(raised.exception))
        with self.assertRaises(cuvmm.InUseError):
            self.server.publish("y", self.memory)
        with self.assertRaises(cuvmm.InUseError):
            self.memory.close()


if __name__ == "__main__":
    unittest.main()
