"""The C library of the pool, called as C programs call it, on the software driver: CUVMM_LIBCUVMM names it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
import threading
import unittest
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any, List

import cuvmm.torch as front

from .support import environment

INVALID, OUT_OF_MEMORY, CLOSED, IN_USE, FORKED = 1, 2, 5, 6, 9


class Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("device", ctypes.c_int32), ("limit", ctypes.c_int64)]


class Library(unittest.TestCase):
    lib: Any

    @classmethod
    def setUpClass(cls) -> None:
        path = os.environ.get("CUVMM_LIBCUVMM")
        if not path or os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("CUVMM_LIBCUVMM names the library: scripts/test-python.sh builds it, and runs this in a process of its own")
        cls.lib = ctypes.CDLL(path)

    def setUp(self) -> None:
        self.error = front._Error(size=ctypes.sizeof(front._Error))
        self.pool = c_uint64()
        self.ok("pool_open", byref(Options(ctypes.sizeof(Options), 0, 0)), byref(self.pool))

    def tearDown(self) -> None:
        self.ok("pool_close", self.pool)

    def call(self, name: str, *args: Any) -> int:
        return int(getattr(self.lib, "cuvmm_" + name)(*args, byref(self.error)))

    def ok(self, name: str, *args: Any) -> None:
        self.assertEqual(self.call(name, *args), 0, self.error.message)

    def alloc(self, n: int) -> c_void_p:
        p = c_void_p()
        self.ok("alloc", self.pool, c_size_t(n), c_void_p(0), c_uint64(0), byref(p))
        return p

    def stats(self) -> Any:
        s = front._Stats(size=ctypes.sizeof(front._Stats))
        self.ok("pool_stats", self.pool, byref(s))
        return s

    def test_blocks(self) -> None:
        blocks = [self.alloc(n) for n in (1, 512, 100_000, 3 << 20, 100 << 20)]
        self.assertEqual(len({p.value for p in blocks}), 5)
        s = self.stats()
        self.assertEqual((s.blocks, s.requested), (5, 1 + 512 + 100_000 + (3 << 20) + (100 << 20)))
        n = c_size_t()
        self.ok("find", self.pool, blocks[2], byref(n))
        self.assertGreaterEqual(n.value, 100_000)
        self.ok("use", self.pool, blocks[4], c_void_p(0))
        self.assertEqual(self.call("pool_close", self.pool), IN_USE)
        for p in blocks:
            self.ok("free", self.pool, p)
        self.assertEqual(self.call("free", self.pool, blocks[0]), INVALID)
        self.assertIn(b"no live block", self.error.message)
        self.assertEqual(self.call("find", self.pool, blocks[2], byref(n)), INVALID)
        freed = c_uint64()
        self.ok("trim", self.pool, byref(freed))
        self.assertEqual(self.stats().reserved, 0)

    def test_memory_that_cannot_be_had(self) -> None:
        p = c_void_p()
        self.assertEqual(self.call("alloc", self.pool, c_size_t(1 << 45), c_void_p(0), c_uint64(0), byref(p)), OUT_OF_MEMORY)
        self.assertTrue(self.error.message.startswith(b"CUDA out of memory. Tried to allocate 32 TiB."), self.error.message)
        self.ok("set_limit", self.pool, ctypes.c_int64(64 << 20))
        self.assertEqual(self.call("alloc", self.pool, c_size_t(128 << 20), c_void_p(0), c_uint64(0), byref(p)), OUT_OF_MEMORY)
        self.ok("set_limit", self.pool, ctypes.c_int64(0))
        self.ok("free", self.pool, self.alloc(128 << 20))

    def test_what_is_wrong_is_said(self) -> None:
        self.assertEqual(self.call("free", c_uint64(99), c_void_p(1)), CLOSED)
        self.assertEqual(self.call("pool_open", byref(Options(0, 0, 0)), byref(c_uint64())), INVALID)
        self.assertNotEqual(self.call("pool_open", byref(Options(ctypes.sizeof(Options), 77, 0)), byref(c_uint64())), 0)
        self.assertIn(b"device", self.error.message.lower())
        small = (ctypes.c_char * 24)()
        ctypes.memmove(small, (c_size_t * 1)(24), 8)
        self.assertEqual(self.lib.cuvmm_free(c_uint64(99), c_void_p(1), small), CLOSED)  # an error with little room
        self.assertEqual(small.raw[23:], b"\0")
        self.assertEqual(self.lib.cuvmm_free(c_uint64(99), c_void_p(1), None), CLOSED)

    def test_a_snapshot(self) -> None:
        p = self.alloc(5 << 20)
        n = c_size_t(0)
        self.ok("snapshot", self.pool, None, byref(n))
        text = ctypes.create_string_buffer(n.value)
        self.ok("snapshot", self.pool, text, byref(n))
        self.assertEqual(json.loads(text.value)["stats"]["blocks"], 1)
        self.ok("free", self.pool, p)

    def test_segments(self) -> None:
        p = c_void_p()
        self.ok("segment_alloc", self.pool, c_size_t(20 << 20), byref(p))
        self.ok("segment_free", self.pool, p, c_void_p(0))
        self.assertEqual(self.call("segment_free", self.pool, p, c_void_p(0)), INVALID)

    def test_threads(self) -> None:
        errors: List[BaseException] = []

        def work() -> None:
            try:
                for i in range(200):
                    p = c_void_p()
                    if self.lib.cuvmm_alloc(self.pool, c_size_t(1000 * i + 1), c_void_p(0), c_uint64(0), byref(p), None) or self.lib.cuvmm_free(self.pool, p, None):
                        raise AssertionError("refused")
            except BaseException as e:  # noqa: BLE001
                errors.append(e)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(errors, [])
        self.assertEqual(self.stats().blocks, 0)

    def test_a_child_of_fork(self) -> None:
        p = self.alloc(100)
        pid = os.fork()
        if pid == 0:
            status = self.lib.cuvmm_alloc(self.pool, c_size_t(1), c_void_p(0), c_uint64(0), byref(c_void_p()), byref(self.error))
            good = status == FORKED and b"spawn" in self.error.message and self.lib.cuvmm_free(self.pool, p, None) == 0
            os._exit(7 if good else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 7)
        self.ok("free", self.pool, p)

    def test_a_second_go_runtime(self) -> None:
        """The Python side refuses to load the library beside another one of Go's, and the other way round says why."""
        libcuda = os.environ.get("CUVMM_LIBCUDA")
        if not libcuda:
            self.skipTest("needs CUVMM_LIBCUDA")
        code = """
            import ctypes, os, cuvmm
            import cuvmm.torch as front
            ctypes.CDLL(os.environ["CUVMM_LIBCUDA"])
            try:
                front._load(os.environ["CUVMM_LIBCUVMM"])
            except cuvmm.NotSupported as e:
                print("Go's runtime" in str(e))
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment(), capture_output=True, text=True, timeout=60)
        self.assertEqual((done.stdout, done.stderr), ("True\n", ""))


if __name__ == "__main__":
    unittest.main()
