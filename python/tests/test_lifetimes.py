"""What outlives what: captures, forks, cancelled waits, the end of the process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
import unittest
from ctypes import byref, c_int, c_void_p
from typing import Any

import cuvmm
from cuvmm import _driver
from cuvmm._driver import Stream

from .consumer import Tensor
from .support import DriverTest, await_that, environment


class Lifetimes(DriverTest):
    def publish(self, length: int = 100) -> None:
        self.memory = cuvmm.empty(length, "uint8", reserve=16 << 20)
        self.memory.array.write(bytes([1]) * length)
        self.server = cuvmm.Server(self.path())
        self.table = self.server.publish("table", self.memory)
        self.addCleanup(self.memory.close)
        self.addCleanup(self.server.close)

    def run_child(self, code: str) -> str:
        done = subprocess.run([sys.executable, "-X", "dev", "-c", textwrap.dedent(code), self.path()], env=environment(), capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_nothing_kills_a_capture_of_another_stream(self) -> None:
        self.publish()
        self.table.announce()
        dev = _driver.device(0)
        captured, other = Stream(dev), Stream(dev)
        lib: Any = ctypes.CDLL(dev.driver.path)
        with dev.current():
            self.assertEqual(lib.cuStreamBeginCapture_v2(captured.handle, c_int(0)), 0)  # global mode, which forbids most
        with cuvmm.connect(self.path()) as client, client.follow("table") as follower:
            follower.next(other.handle.value, timeout=60)
            self.memory.resize(5_000_000)
            self.memory.array[4_999_999:].write(b"\7")
            self.table.announce(stream=other.handle.value)
            follower.next(other.handle.value, timeout=60)
            self.assertEqual(follower.array[4_999_999:].tolist(), [7])
            t = Tensor(follower.array.__dlpack__(copy=True, stream=other.handle.value, max_version=(1, 0)))
            t.free()
            del t
            self.table.shrink(5)
            self.table.settle(60)
            self.memory.resize(5)
            self.memory.trim()
            follower.next(timeout=60)
            with self.assertRaises(cuvmm.NotSupported):
                follower.next(captured.handle.value)
        cuvmm.memory_info()
        cuvmm.empty(1).close()
        graph = c_void_p()
        with dev.current():
            self.assertEqual(lib.cuStreamEndCapture(captured.handle, byref(graph)), 0)
            lib.cuGraphDestroy(graph)
        captured.close()
        other.close()

    def test_closing_waits_for_all_work(self) -> None:
        """Work of a stream that was never passed to the package is done before the memory is unmapped."""
        memory = cuvmm.empty(1 << 20, "uint8")
        stream = Stream(_driver.device(0))
        with _driver.device(0).current() as d:
            for i in range(50):
                d.call("cuMemsetD8Async", memory.array.ptr, i, 1 << 20, stream.handle)
        gc.collect()
        memory.close()
        self.assertTrue(stream.done())
        stream.close()

    def test_a_cancelled_wait_loses_nothing(self) -> None:
        self.publish()

        async def main(table: cuvmm.Follower) -> None:
            for generation in range(1, 20):
                waiting = asyncio.ensure_future(table.next_async())
                await asyncio.sleep(0)
                self.table.announce()
                await asyncio.sleep(0.002 * (generation % 3))
                waiting.cancel()
                try:
                    got = await waiting
                except asyncio.CancelledError:
                    got = await table.next_async(timeout=60)
                self.assertEqual(got, generation)
            with self.assertRaises(cuvmm.WaitTimeout):
                await table.next_async(timeout=0.05)

        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            asyncio.run(main(table))
            self.assertEqual(len(table._wakers), 0)

    def test_many_coroutines_wait_at_once(self) -> None:
        """More than the executor of asyncio has threads."""
        self.publish()

        async def main(tables: Any) -> Any:
            waits = [asyncio.ensure_future(t.next_async(timeout=60)) for t in tables]
            await asyncio.sleep(0.01)
            self.table.announce()
            return await asyncio.gather(*waits)

        with cuvmm.connect(self.path()) as client:
            tables = [client.follow("table") for _ in range(60)]
            self.assertEqual(asyncio.run(main(tables)), [1] * 60)
            for t in tables:
                t.close()

    def test_a_child_of_fork_closes_what_its_parent_has(self) -> None:
        """A with statement that ends in a child hangs nothing, and takes nothing from the parent."""
        out = self.run_child("""
            import os, sys, warnings, cuvmm
            warnings.simplefilter("ignore")
            with cuvmm.empty(10, "uint8") as memory, cuvmm.Server(sys.argv[1]) as server:
                p = server.publish("table", memory)
                p.announce()
                with cuvmm.connect(sys.argv[1]) as client, client.follow("table") as table:
                    table.next()
                    pid = os.fork()
                    if pid == 0:
                        for use in (table.next, lambda: table.array, lambda: client.list(), p.announce, lambda: memory.resize(3), lambda: client.follow("table"),
                                    lambda: server.publish("x", memory), lambda: cuvmm.empty(1)):
                            try:
                                use()
                                os._exit(1)
                            except cuvmm.ForkedError:
                                pass
                    else:
                        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
                        p.announce()
                        print(table.next(timeout=60), [e.name for e in client.list()], os.path.exists(sys.argv[1]))
            if pid == 0:
                os._exit(7)
        """)
        self.assertEqual(out, "2 ['table'] True\n")

    def test_a_child_of_fork_does_not_hide_the_end_of_its_parent(self) -> None:
        """Of a publisher, from its followers, and of a follower, from a publisher that rewrites."""
        self.publish()
        self.table.announce()
        program = textwrap.dedent("""
            import os, sys, warnings, cuvmm
            warnings.simplefilter("ignore")
            memory = cuvmm.empty(10, "uint8")
            server = cuvmm.Server(sys.argv[1] + ".2")
            server.publish("table", memory).announce()
            client = cuvmm.connect(sys.argv[1])
            table = client.follow("table")
            table.next()
            print("follows", flush=True)
            sys.stdin.readline()
            if os.fork():
                print("forked", flush=True)
            sys.stdin.read()
            os._exit(0)
        """)
        with subprocess.Popen([sys.executable, "-c", program, self.path()], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdin is not None and parent.stdout is not None
            self.assertEqual(parent.stdout.readline(), "follows\n")
            with cuvmm.connect(self.path() + ".2") as client, client.follow("table") as table:
                generation = table.next(timeout=60)
                parent.stdin.write("\n")
                parent.stdin.flush()
                self.assertEqual(parent.stdout.readline(), "forked\n")
                parent.kill()  # the child lives until its input ends
                parent.wait()
                with self.assertRaises(cuvmm.GoneError):
                    table.next(timeout=60)
                self.assertFalse(table.intact(generation))
                with self.table.rewrite(timeout=60):
                    self.table.announce()

    def test_the_process_ends_with_everything_open(self) -> None:
        self.publish()
        self.table.announce()

        def announce() -> None:
            await_that(lambda: bool(self.table.followers()), "the child follows")
            with self.table._changed:  # as if its work were never done
                self.table._show(self.table._view._replace(generation=9, ordered=9))

        announcing = threading.Thread(target=announce)
        announcing.start()
        self.addCleanup(announcing.join)
        out = self.run_child("""
            import sys, cuvmm
            from cuvmm._driver import Stream
            client = cuvmm.connect(sys.argv[1])
            table = client.follow("table")
            stream = Stream(table._device)
            while table.generation != 9:
                table.next(stream.handle.value, timeout=60)  # which waits for ever
            print(stream.done())
            memory = cuvmm.empty(10)
            capsule, tensor = memory.array.__dlpack__(), memory.array.__dlpack__(max_version=(1, 0))
            array = table.array
        """)
        self.assertEqual(out, "False\n")
        await_that(lambda: not self.table.followers(), "the child's follower has left")

    def test_every_error_can_be_raised_again(self) -> None:
        for kind in (getattr(cuvmm, name) for name in cuvmm.__all__):
            if isinstance(kind, type) and issubclass(kind, cuvmm.Error):
                e = cuvmm.DriverError("cuX", 2, "NAME", "what", "hint") if kind is cuvmm.DriverError else kind("what", "hint")
                again = e.again()
                self.assertEqual((str(again), again.hint, type(again), again.__dict__), (str(e), "hint", kind, e.__dict__))

    def test_an_error_keeps_no_array_of_its_catcher(self) -> None:
        self.publish()
        self.table.announce()

        def work(table: cuvmm.Follower) -> None:
            try:
                while True:
                    table.next(timeout=60)
                    rows = table.array
                    self.assertEqual(len(rows), 100)
                    self.table.withdraw()
            except cuvmm.WithdrawnError:
                pass

        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            work(table)
            gc.disable()
            try:
                self.assertEqual(table._users.behind(0), [])
            finally:
                gc.enable()
            self.assertIsInstance(table.error, cuvmm.WithdrawnError)
            self.server.close()
            for _ in range(2):
                with self.assertRaises(cuvmm.Error):
                    client.list(timeout=60)

    def test_threads_share_a_follower(self) -> None:
        self.publish()
        seen, errors = set(), []

        def run(table: cuvmm.Follower) -> None:
            try:
                while True:
                    seen.add(table.next(timeout=60))
                    a = table.array
                    self.assertEqual(set(a[:50].tolist()), {1})
            except cuvmm.WithdrawnError:
                pass
            except BaseException as e:  # noqa: BLE001
                errors.append(e)

        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            threads = [threading.Thread(target=run, args=(table,)) for _ in range(6)]
            for t in threads:
                t.start()
            for _ in range(100):
                self.table.announce()
            self.table.settle(60)
            self.table.withdraw()
            for t in threads:
                t.join(60)
            self.assertEqual([repr(e) for e in errors], [])
            self.assertIn(100, seen)


if __name__ == "__main__":
    unittest.main()
