"""PyTorch and CuPy over followed memory, on a GPU: set CUVMM_TEST_GPU=1 where both are installed."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import textwrap
import unittest
from typing import Any

import cuvmm

from .go import GoTest
from .support import DriverTest, environment

PUBLISHER = """
    import sys, torch, cuvmm
    memory = cuvmm.empty(1 << 20, torch.float32, reserve=1 << 30)
    tensor = torch.from_dlpack(memory.array)
    tensor.fill_(1)
    torch.cuda.synchronize()
    server = cuvmm.Server(sys.argv[1])
    table = server.publish("table", memory, writable=True)
    held = torch.cuda.Stream()
    print("ready", flush=True)
    for line in sys.stdin:
        what, n = line.split()
        n = int(n)
        if what == "grow":
            memory.resize(n)
            with torch.cuda.stream(held):
                torch.from_dlpack(memory.array).copy_(torch.arange(n, device="cuda", dtype=torch.float32))
            table.announce(stream=held)
        elif what == "hold":  # what is announced takes a while
            memory.resize(n)
            with torch.cuda.stream(held):
                torch.cuda._sleep(2_000_000_000)
                torch.from_dlpack(memory.array).fill_(7)
            table.announce(stream=held)
        elif what == "shrink":
            table.shrink(n)
            table.settle(60)
            memory.resize(n)
            memory.trim()
        elif what == "sum":
            torch.cuda.synchronize()
            print(float(torch.from_dlpack(memory.array)[:n].sum()), flush=True)
            continue
        print("done", flush=True)
"""


class Frameworks(DriverTest):
    torch: Any

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if not os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("set CUVMM_TEST_GPU=1 on a machine with a GPU, PyTorch and CuPy")
        import torch
        cls.torch = torch

    def setUp(self) -> None:
        super().setUp()
        self.child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PUBLISHER), self.path()], env=environment(), stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.end)
        self.assertEqual(self.read(), "ready")

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        for f in (self.child.stdin, self.child.stdout):
            assert f is not None
            f.close()

    def read(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def tell(self, what: str, n: int) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{what} {n}\n")
        self.child.stdin.flush()
        return self.read()

    def test_tensors_grow_in_place(self) -> None:
        torch = self.torch
        import cupy
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            stream = torch.cuda.Stream()
            at = None
            for n in (1 << 20, 5 << 20, 40 << 20, 200 << 20):
                self.assertEqual(self.tell("grow", n), "done")
                table.next(stream, timeout=60)
                a = table.array
                with torch.cuda.stream(stream):
                    t = torch.from_dlpack(a.allow_readonly())
                    self.assertEqual(t.numel(), n)
                    self.assertTrue(bool((t == torch.arange(n, device="cuda", dtype=torch.float32)).all()))
                c = cupy.asarray(a)
                self.assertEqual(float(c[n - 1]), float(torch.tensor(n - 1, dtype=torch.float32)))
                self.assertTrue(at is None or at == t.data_ptr() == c.data.ptr)
                at = t.data_ptr()
                with self.assertRaises(BufferError):
                    torch.from_dlpack(a)
                copied = torch.from_dlpack(a, copy=True)
                copied.fill_(0)
                with self.assertRaises(cuvmm.InUseError):
                    table.close()
                del a, t, c, copied
                gc.collect()

    def test_order_without_a_wait_of_the_host(self) -> None:
        torch = self.torch
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            stream = torch.cuda.Stream()
            float(torch.ones(1 << 20, device="cuda").sum())  # loads its kernels, which would wait for all streams
            self.assertEqual(self.tell("grow", 1 << 20), "done")
            table.next(stream, timeout=60)
            self.assertEqual(self.tell("hold", 2 << 20), "done")
            table.next(stream, timeout=60)  # returns although the publisher's work takes a second
            with torch.cuda.stream(stream):
                total = torch.from_dlpack(table.array.allow_readonly()).sum()
            self.assertFalse(stream.query(), "the publisher's work was over too soon to prove anything")
            stream.synchronize()
            self.assertEqual(float(total), 7.0 * (2 << 20))
            del total
            gc.collect()

    def test_a_capture_of_a_graph_lives_on(self) -> None:
        """While PyTorch captures in the mode that forbids most, a follower grows, shrinks and is closed."""
        torch = self.torch
        with cuvmm.connect(self.path()) as client:
            table = client.follow("table")
            self.tell("grow", 1 << 20)
            table.next(timeout=60)
            x = torch.ones(1000, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                y = x * 2
                self.tell("grow", 20 << 20)
                table.next(timeout=60)
                self.assertEqual(len(table), 20 << 20)
                self.assertEqual(self.tell("shrink", 1000), "done")
                table.next(timeout=60)
                self.assertEqual(len(table.array), 1000)
                table.close()
                y = y + 1
            x.fill_(5)
            graph.replay()
            self.assertEqual(float(y.sum()), 11000.0)

    def test_a_writer(self) -> None:
        torch = self.torch
        with cuvmm.connect(self.path()) as client, client.follow("table", write=True) as table:
            self.tell("grow", 1 << 20)
            table.next(timeout=60)
            t = torch.from_dlpack(table.array)
            t.fill_(3)
            torch.cuda.synchronize()
            self.assertEqual(self.tell("sum", 1 << 20), str(3.0 * (1 << 20)))
            del t
            gc.collect()

    def test_a_publisher_that_dies_with_work_under_way(self) -> None:
        torch = self.torch
        with cuvmm.connect(self.path()) as client, client.follow("table") as table:
            stream = torch.cuda.Stream()
            self.tell("hold", 2 << 20)
            table.next(stream, timeout=60)
            self.child.kill()
            stream.synchronize()  # no stream hangs
            with self.assertRaises(cuvmm.GoneError):
                while True:
                    table.next(timeout=60)

    def test_a_thousand_cycles_leave_nothing(self) -> None:
        torch = self.torch
        self.tell("grow", 8 << 20)

        def cycle() -> None:
            with cuvmm.connect(self.path()) as client, client.follow("table") as table:
                table.next(timeout=60)
                t = torch.from_dlpack(table.array.allow_readonly())
                self.assertEqual(float(t[-1]), float((8 << 20) - 1))
                del t

        def state() -> Any:
            gc.collect()
            torch.cuda.synchronize()
            with open("/proc/self/maps") as f:
                return torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd")), len(f.readlines()), len(os.listdir(f"/proc/{self.child.pid}/fd"))

        for _ in range(10):
            cycle()
        before = state()
        for _ in range(int(os.environ.get("CUVMM_TEST_CYCLES", "1000"))):
            cycle()
        after = state()
        self.assertGreaterEqual(after[0] + (2 << 20), before[0], "GPU memory in bytes")
        self.assertLessEqual(after[1], before[1] + 1, "open files")
        self.assertLessEqual(after[2], before[2] + 8, "mappings")
        self.assertLessEqual(after[3], before[3] + 1, "the publisher's open files")

    def test_tensors_of_their_own_allocators_are_refused(self) -> None:
        import cupy
        for tensor in (self.torch.ones(1 << 20, device="cuda"), cupy.ones(1 << 20)):
            with self.assertRaises(cuvmm.NotSupported) as raised:
                cuvmm.export(tensor)
            self.assertIn("cuvmm.torch.pool()", raised.exception.hint)
        with self.assertRaises(cuvmm.ArgumentError):
            cuvmm.export(self.torch.ones(3))


    def test_tensors_that_can_be_exported(self) -> None:
        """Expandable segments of PyTorch, and cuvmm's own pool where its library is named."""
        code = """
            import sys, torch, cuvmm
            if sys.argv[2] == "pool":
                import cuvmm.torch
                with torch.cuda.use_mem_pool(cuvmm.torch.pool()):
                    t = torch.full((60 << 20,), 7.0, device="cuda")
            else:
                t = torch.full((60 << 20,), 7.0, device="cuda")
            with cuvmm.export(t) as memory, cuvmm.Server(sys.argv[1]) as server:
                table = server.publish("tensor", memory)
                table.announce(stream=torch.cuda.current_stream())
                print("ready", flush=True)
                sys.stdin.readline()
                t.fill_(8)
                table.announce(stream=torch.cuda.current_stream())
                sys.stdin.readline()
            del t
        """
        kinds = {"segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
        if os.environ.get("CUVMM_LIBCUVMM"):
            kinds["pool"] = {}
        for kind, more in kinds.items():
            with self.subTest(kind):
                path = self.path(kind)
                child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), path, kind], env=environment(**more), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert child.stdin is not None and child.stdout is not None
                try:
                    self.assertEqual(child.stdout.readline(), "ready\n")
                    with cuvmm.connect(path) as client, client.follow("tensor") as table:
                        for value in (7.0, 8.0):
                            table.next(timeout=60)
                            t = self.torch.from_dlpack(table.array.allow_readonly())
                            self.assertEqual((t.numel(), bool((t == value).all())), (60 << 20, True))
                            del t
                            child.stdin.write("\n")
                            child.stdin.flush()
                        self.assertEqual(child.wait(60), 0)
                finally:
                    child.kill()
                    child.communicate()


class WritersBesideGo(GoTest):
    """Tensors over memory that a Go process publishes and reads."""

    def test_tensors_write_what_go_reads(self) -> None:
        if not os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("set CUVMM_TEST_GPU=1 on a machine with a GPU, PyTorch and CuPy")
        cupy, torch = (importlib.import_module(name) for name in ("cupy", "torch"))
        go = self.serving(table=1000)
        with cuvmm.connect(self.path()) as client, client.follow("table", write=True) as table:
            table.next(timeout=60)
            at = table.array.ptr
            go.done("grow", "table", 50_000_000)
            stream = torch.cuda.Stream()
            table.next(stream, timeout=60)
            with torch.cuda.stream(stream):
                t = torch.from_dlpack(table.array).view(torch.int32)
                self.assertTrue(bool((t == torch.arange(50_000_000, device="cuda", dtype=torch.int32)).all()))
                t[7::1000] = 123
            stream.synchronize()
            c = cupy.asarray(table.array)
            self.assertEqual((int(c[49_999_007]), c.data.ptr, t.data_ptr()), (123, at, at))
            c[49_999_999] = 456
            cupy.cuda.runtime.deviceSynchronize()
            for index, value in ((6, 6), (7, 123), (49_999_007, 123), (49_999_999, 456)):
                self.assertEqual(go.do("read", "table", index), str(value))
            del t, c
            gc.collect()
        self.assertEqual(go.end(), 0)


if __name__ == "__main__":
    unittest.main()
