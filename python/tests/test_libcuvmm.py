"""The C library of the pool, called as C programs call it, on the software driver: CUVMM_LIBCUVMM names it, built with the tag
cuvmm_fault_hook."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any, List

from cuvmm import _crc32c
from cuvmm import _torch_library as front

from .support import ROOT, environment, lacks

INVALID, OUT_OF_MEMORY, CLOSED, IN_USE, FORKED, FAULT, SUSPENDED = 1, 2, 5, 6, 9, 10, 11


class Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("device", ctypes.c_int32), ("limit", ctypes.c_int64), ("tag", ctypes.c_char_p)]


class Library(unittest.TestCase):
    lib: Any

    @classmethod
    def setUpClass(cls) -> None:
        path = os.environ.get("CUVMM_LIBCUVMM")
        if not path or os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("CUVMM_LIBCUVMM names the library: scripts/test-python.sh builds it, and runs this in a process of its own")
        cls.lib = ctypes.CDLL(path)

    def setUp(self) -> None:
        self.error = front.CError(size=ctypes.sizeof(front.CError))
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
        s = front.Stats(size=ctypes.sizeof(front.Stats))
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
        self.assertTrue(self.error.message.startswith(b"CUDA out of memory. Tried to allocate 32768.00 GiB."), self.error.message)
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
        self.assertGreater(n.value, 10)
        text, n = ctypes.create_string_buffer(10), c_size_t(10)
        self.ok("snapshot", self.pool, text, byref(n))
        self.assertGreater(n.value, 10)
        self.assertEqual(text.raw, bytes(10))  # nothing was written
        self.assertEqual(self.snapshot()["stats"]["blocks"], 1)
        self.ok("free", self.pool, p)

    def test_segments(self) -> None:
        p = c_void_p()
        self.ok("segment_alloc", self.pool, c_size_t(20 << 20), None, byref(p))
        self.assertEqual(self.call("pool_close", self.pool), IN_USE)
        self.assertIn(b"1 segments", self.error.message)
        other = c_uint64()
        self.ok("pool_open", byref(Options(ctypes.sizeof(Options), 0, 0)), byref(other))
        self.assertEqual(self.call("segment_free", other, p, c_void_p(0)), INVALID)  # another pool's
        self.ok("pool_close", other)
        self.assertEqual(self.call("segment_free", self.pool, p, c_void_p(2)), INVALID)  # the per-thread stream: the segment stays
        self.assertEqual(self.call("segment_alloc", self.pool, c_size_t(0), None, byref(c_void_p())), INVALID)
        self.ok("segment_free", self.pool, p, c_void_p(0))
        self.assertEqual(self.call("segment_free", self.pool, p, c_void_p(0)), INVALID)

    def test_tags(self) -> None:
        block, p, names = self.alloc(1000), c_void_p(), (ctypes.c_char_p * 2)(b"kv", b"")
        self.ok("segment_alloc", self.pool, c_size_t(2 << 20), b"kv", byref(p))
        done = (c_uint64 * 4)(32)
        drop = struct.pack("=qii", 16, 1, 0)
        self.ok("suspend", names, c_size_t(1), drop, done)
        self.assertEqual(list(done), [32, 2 << 20, 0, 0])
        self.assertEqual(self.call("segment_alloc", self.pool, c_size_t(1), b"kv", byref(c_void_p())), SUSPENDED)
        self.assertIn(b'tag "kv", which sleeps', self.error.message)
        self.ok("suspend", None, c_size_t(0), None, done)  # the pool
        self.assertGreater(done[3], 0)
        q = c_void_p()
        self.assertEqual(self.call("alloc", self.pool, c_size_t(1), None, c_uint64(0), byref(q)), SUSPENDED)
        n, text = c_size_t(4096), ctypes.create_string_buffer(4096)
        self.ok("tags", text, byref(n))
        self.assertEqual([(t["tag"], t["suspended"]) for t in json.loads(text.value)], [("", True), ("kv", True)])
        self.assertEqual(json.loads(text.value)[1]["ranges"], [[p.value, 2 << 20]])
        self.assertEqual(self.call("suspend", names, c_size_t(2), None, done), SUSPENDED)
        self.ok("resume", names, c_size_t(2), ctypes.c_int64(0))
        for name, args in {"resume": (ctypes.c_int64(0),), "discard": (), "suspend": (None, done)}.items():
            self.assertEqual(self.call(name, None, c_size_t(1), *args), INVALID, name)
            self.assertIn(b"a tag that is NULL", self.error.message)
            self.assertEqual(self.call(name, (ctypes.c_char_p * 1)(b"unknown"), c_size_t(1), *args), INVALID, name)
        self.assertEqual(self.call("suspend", names, c_size_t(1), b"\0" * 16, done), INVALID)
        self.ok("segment_free", self.pool, p, None)
        self.ok("free", self.pool, block)

    def test_sums(self) -> None:
        """The digests of files are those that Python has without the library."""
        for data in (bytearray(), bytearray(b"123456789"), bytearray(random.Random(1).randbytes(200_001))):
            self.assertEqual(_crc32c.fastest()(memoryview(data)), _crc32c.in_python(memoryview(data)))
        self.assertIsNot(_crc32c.fastest(), _crc32c.in_python)
        self.ok("crc32c", None, c_size_t(0), byref(ctypes.c_uint32()))

    def test_ranges(self) -> None:
        p, o = c_void_p(), struct.pack("=QQQQq", 40, 64 << 20, 4 << 20, 0, 0)
        self.ok("range_open", self.pool, o, byref(p))
        self.ok("range_commit", self.pool, p, c_size_t(9 << 20), None)
        self.assertEqual(self.call("range_commit", self.pool, p, c_size_t((64 << 20) + 1), None), INVALID)
        self.ok("range_release", self.pool, p, c_size_t(1))
        self.assertEqual(self.call("range_open", self.pool, b"\0" * 40, byref(p)), INVALID)
        self.assertEqual(self.call("range_commit", self.pool, None, c_size_t(1), None), INVALID)
        self.assertEqual(self.call("pool_close", self.pool), IN_USE)
        self.ok("range_close", self.pool, p)
        self.assertEqual(self.call("range_close", self.pool, p), INVALID)

    def test_out_parameters_must_not_be_null(self) -> None:
        for name, args in {
            "pool_open": (byref(Options(ctypes.sizeof(Options), 0, 0)), None), "alloc": (self.pool, c_size_t(1), None, c_uint64(0), None),
            "find": (self.pool, None, None), "trim": (self.pool, None), "total_memory": (self.pool, None), "pool_stats": (self.pool, None),
            "snapshot": (self.pool, None, None), "torch_snapshot": (None, None), "arena_open": (self.pool, None),
            "segment_alloc": (self.pool, c_size_t(1), None, None), "range_open": (self.pool, b"\0" * 40, None),
            "suspend": (None, c_size_t(0), None, None), "tags": (None, None), "crc32c": (b"", c_size_t(0), None),
        }.items():
            self.assertEqual(self.call(name, *args), INVALID, name)
            self.assertIn(b"NULL", self.error.message, name)
        self.assertEqual(self.call("pool_open", None, byref(c_uint64())), INVALID)
        self.assertEqual(self.call("crc32c", None, c_size_t(1), byref(ctypes.c_uint32())), INVALID)
        self.ok("free", self.pool, self.alloc(1))  # nothing has panicked

    def test_sizes_of_structs(self) -> None:
        larger = (ctypes.c_char * 256)()
        ctypes.memmove(larger, (c_size_t * 1)(256), 8)
        self.assertEqual(self.call("pool_open", larger, byref(c_uint64())), INVALID)  # of a later version, which may mean more
        p = self.alloc(1000)
        stats = (c_uint64 * 4)(24, 7, 7, 7)  # room for two counts
        self.ok("pool_stats", self.pool, stats)
        self.assertEqual(list(stats), [24, 1000, 1000, 7])
        self.ok("free", self.pool, p)

    def test_numbers_that_are_no_handles(self) -> None:
        for handle in (0, 1 << 63, (1 << 64) - 1, self.pool.value + 1):
            n, h = c_size_t(), c_uint64(handle)
            self.assertEqual(self.call("trim", h, byref(c_uint64())), CLOSED)
            self.assertEqual(self.call("arena_end", self.pool, h), CLOSED)
            self.assertEqual(self.call("arena_release", self.pool, h), CLOSED)
            self.assertEqual(self.call("find", self.pool, c_void_p(handle), byref(n)), INVALID)
            self.assertEqual(self.call("free", self.pool, c_void_p(handle)), INVALID)
            self.ok("use", self.pool, c_void_p(handle), c_void_p(0))
        closed = c_uint64()
        self.ok("pool_open", byref(Options(ctypes.sizeof(Options), 0, 0)), byref(closed))
        self.ok("pool_close", closed)
        self.assertEqual(self.call("pool_close", closed), CLOSED)
        again = c_uint64()
        self.ok("pool_open", byref(Options(ctypes.sizeof(Options), 0, 0)), byref(again))
        self.assertNotEqual(again.value, closed.value)
        self.ok("pool_close", again)

    def test_arenas(self) -> None:
        arena = c_uint64()
        self.ok("arena_open", self.pool, byref(arena))
        self.assertEqual(self.call("pool_close", self.pool), IN_USE)
        self.ok("arena_end", self.pool, arena)
        self.ok("arena_release", self.pool, arena)
        self.assertEqual(self.call("arena_release", self.pool, arena), CLOSED)
        self.ok("pool_close", self.pool)  # at once
        self.ok("pool_open", byref(Options(ctypes.sizeof(Options), 0, 0)), byref(self.pool))

    def test_an_arena_that_is_none(self) -> None:
        arena = c_uint64()
        self.ok("arena_open", self.pool, byref(arena))
        for stream in (0, 1):
            p = c_void_p()
            self.ok("alloc", self.pool, c_size_t(1000), c_void_p(stream), arena, byref(p))
            self.ok("free", self.pool, p)
        self.ok("arena_release", self.pool, arena)
        for wrong in (arena.value, 99):
            self.assertEqual(self.call("alloc", self.pool, c_size_t(1000), c_void_p(0), c_uint64(wrong), byref(c_void_p())), CLOSED)
        self.ok("pool_close", self.pool)  # at once
        self.ok("pool_open", byref(Options(ctypes.sizeof(Options), 0, 0)), byref(self.pool))

    def test_peaks_begin_anew(self) -> None:
        p = self.alloc(10 << 20)
        self.ok("free", self.pool, p)
        self.ok("trim", self.pool, byref(c_uint64()))
        self.assertGreaterEqual(self.stats().peak_reserved, 10 << 20)
        q = self.alloc(1000)
        self.ok("reset_peaks", self.pool)
        s = self.stats()
        self.assertEqual((s.peak_requested, s.peak_blocks, s.peak_reserved), (1000, 1, s.reserved))
        self.assertEqual((s.requested_total, s.allocs, s.frees), ((10 << 20) + 1000, 2, 1))
        self.ok("free", self.pool, q)

    def test_a_history(self) -> None:
        self.ok("record_history", self.pool, c_uint64(10))
        self.ok("free", self.pool, self.alloc(777))
        self.assertEqual([(e["op"], e["bytes"]) for e in self.snapshot()["history"]], [("alloc", 777), ("free", 777)])
        self.ok("record_history", self.pool, c_uint64(0))
        self.assertNotIn("history", self.snapshot())
        self.assertEqual(self.call("record_history", self.pool, c_uint64((1 << 22) + 1)), INVALID)
        self.assertIn(b"keep at most 4194304", self.error.message)

    def snapshot(self) -> Any:
        text, n = ctypes.create_string_buffer(1 << 16), c_size_t(1 << 16)
        self.ok("snapshot", self.pool, text, byref(n))
        self.assertLessEqual(n.value, 1 << 16)
        return json.loads(text.value)

    def test_the_per_thread_stream_is_refused(self) -> None:
        self.assertEqual(self.call("alloc", self.pool, c_size_t(1), c_void_p(2), c_uint64(0), byref(c_void_p())), INVALID)
        self.assertIn(b"per-thread default stream", self.error.message)

    def test_a_stream_is_given_back(self) -> None:
        p = self.alloc(100)
        self.ok("free", self.pool, p)
        self.ok("stream_close", self.pool, c_void_p(0))
        self.ok("stream_close", self.pool, c_void_p(0))  # unknown by now
        self.ok("free", self.pool, self.alloc(100))

    def test_errno_stays(self) -> None:
        lib = ctypes.CDLL(os.environ["CUVMM_LIBCUVMM"], use_errno=True)
        ctypes.set_errno(123)
        for _ in range(100):
            p = c_void_p()
            lib.cuvmm_alloc(self.pool, c_size_t(5 << 20), c_void_p(0), c_uint64(0), byref(p), None)
            lib.cuvmm_free(self.pool, p, None)
            lib.cuvmm_trim(self.pool, byref(c_uint64()), None)
        self.assertEqual(ctypes.get_errno(), 123)

    def test_threads_that_end(self) -> None:
        """Go gives back what it keeps for a thread."""
        def threads() -> int:
            return len(os.listdir("/proc/self/task"))

        def work() -> None:
            p = c_void_p()
            self.lib.cuvmm_alloc(self.pool, c_size_t(1000), c_void_p(0), c_uint64(0), byref(p), None)
            self.lib.cuvmm_free(self.pool, p, None)

        def run(n: int) -> None:
            for _ in range(n):
                t = threading.Thread(target=work)
                t.start()
                t.join()

        run(20)
        before = threads()
        run(200)
        self.assertLess(threads(), before + 20)
        self.assertEqual(self.stats().blocks, 0)

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

    def run_python(self, code: str) -> "subprocess.CompletedProcess[str]":
        """Runs code in a process of its own, with the library as lib and an error, and a pool whose number is pool."""
        begin = """
            import ctypes, faulthandler, os, signal, sys, threading, time
            from ctypes import byref, c_size_t, c_uint64, c_void_p
            from cuvmm import _torch_library as front
            from tests.test_libcuvmm import Options
            lib, error, pool = ctypes.CDLL(os.environ["CUVMM_LIBCUVMM"]), front.CError(size=ctypes.sizeof(front.CError)), c_uint64()
            assert lib.cuvmm_pool_open(byref(Options(ctypes.sizeof(Options), 0, 0)), byref(pool), byref(error)) == 0
            def alloc():
                return lib.cuvmm_alloc(pool, c_size_t(1000), c_void_p(0), c_uint64(0), byref(c_void_p()), byref(error))
            def use():
                block = c_void_p()
                status = lib.cuvmm_alloc(pool, c_size_t(1000), c_void_p(0), c_uint64(0), byref(block), byref(error))
                return status or lib.cuvmm_free(pool, block, byref(error))
            assert alloc() == 0
        """
        return subprocess.run([sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(code)], env=environment(), capture_output=True, text=True, timeout=120)

    def run_library(self, code: str, **variables: str) -> None:
        """Runs code that loads the library in a process of its own."""
        begin = """
            import ctypes, os, signal, threading, time
            from ctypes import byref, c_size_t, c_uint64, c_void_p
            from cuvmm import _torch_library as front
            from tests.test_libcuvmm import Options
            def load():
                global lib, error
                lib, error = ctypes.CDLL(os.environ["CUVMM_LIBCUVMM"]), front.CError(size=ctypes.sizeof(front.CError))
                lib.cuvmm_torch_alloc.restype = c_void_p
                lib.cuvmm_torch_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, c_void_p]
            def open_pool(device=0):
                pool = c_uint64()
                return lib.cuvmm_pool_open(byref(Options(ctypes.sizeof(Options), device, 0)), byref(pool), byref(error)), pool
        """
        code = textwrap.dedent(begin) + textwrap.dedent(code)
        done = subprocess.run([sys.executable, "-c", code], env={**environment(), **variables}, capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)

    def test_what_the_program_sets_before_it_loads_the_library_counts(self) -> None:
        self.run_library("""
            os.environ["CUVMM_SIM"] = '{"Devices": [{}, {}, {"Memory": 1073741824}]}'
            load()
            assert open_pool(2)[0] == 0, error.message
            total = c_size_t()
            assert lib.cuvmm_total_memory(open_pool(2)[1], byref(total), byref(error)) == 0 and total.value == 1 << 30
        """)
        self.run_library("""
            os.environ["CUVMM_DRIVER"] = "nothing"
            load()
            assert open_pool()[0] != 0 and b'driver "nothing"' in error.message, error.message
        """)

    def test_a_history_that_no_pool_takes(self) -> None:
        self.run_library("""
            load()
            assert lib.cuvmm_torch_history(c_uint64(2**64 - 1), byref(error)) == 1, error.message
            assert lib.cuvmm_torch_alloc(1000, 0, None)
            assert lib.cuvmm_torch_history(c_uint64((1 << 22) + 1), byref(error)) == 1 and b"4194304" in error.message
            assert lib.cuvmm_torch_history(c_uint64(1 << 22), byref(error)) == 0
        """)

    def test_limits_in_a_child_of_fork(self) -> None:
        """Also if another thread of the parent is inside the library at the fork."""
        self.run_library("""
            load()
            assert lib.cuvmm_torch_alloc(1000, 0, None)
            over = False
            def busy():
                while not over:
                    lib.cuvmm_torch_history(c_uint64(1 << 20), None)
            thread = threading.Thread(target=busy)
            thread.start()
            for _ in range(20):
                time.sleep(0.001)
                child = os.fork()
                if child == 0:
                    signal.alarm(5)
                    os._exit(lib.cuvmm_torch_limit(1, ctypes.c_int64(1 << 20), byref(error)))
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            over = True
            thread.join()
        """)

    def test_a_pool_closes_after_a_wait_for_its_arenas_that_failed(self) -> None:
        self.run_library("""
            load()
            status, pool = open_pool()
            arena, block = c_uint64(), c_void_p()
            assert status == 0 and lib.cuvmm_alloc(pool, c_size_t(1000), None, c_uint64(0), byref(block), byref(error)) == 0
            assert lib.cuvmm_free(pool, block, byref(error)) == 0
            assert lib.cuvmm_arena_open(pool, byref(arena), byref(error)) == 0 and lib.cuvmm_arena_release(pool, arena, byref(error)) == 0
            assert lib.cuvmm_pool_close(pool, byref(error)) != 6, error.message
            assert lib.cuvmm_pool_close(pool, byref(error)) in (0, 5), error.message
        """, CUVMM_SIM_FAULTS='[{"Call": "cuEventSynchronize", "Result": 999}]')

    def test_a_second_go_runtime(self) -> None:
        """The package refuses to load the library beside another one with Go's runtime."""
        libcuda = os.environ.get("CUVMM_LIBCUDA")
        if not libcuda:
            lacks("CUVMM_LIBCUDA, the software driver's library (scripts/test-python.sh sets it)")
        code = """
            import ctypes, os, cuvmm
            from cuvmm import _torch_library as front
            ctypes.CDLL(os.environ["CUVMM_LIBCUDA"])
            try:
                front.load(os.environ["CUVMM_LIBCUVMM"])
            except cuvmm.NotSupported as e:
                print("Go's runtime" in str(e))
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment(), capture_output=True, text=True, timeout=60)
        self.assertEqual((done.stdout, done.stderr), ("True\n", ""))

    def test_a_fault_of_the_library(self) -> None:
        """A panic ends the library and not the process: every later call is refused with it, and its stacks are on standard error."""
        for behind in (0, 1):
            done = self.run_python(f"""
                status = lib.cuvmm_fault_hook({behind}, byref(error))
                end = time.monotonic() + 60
                while status == 0 and time.monotonic() < end:
                    status = use()
                assert status == {FAULT} == alloc(), status
                assert error.message.startswith(b"cuvmm failed, and refuses all further calls: a fault for a test\\ngoroutine "), error.message
                print("alive")
            """)
            self.assertEqual((done.returncode, done.stdout), (0, "alive\n"), done.stderr)
            self.assertIn("fault_hook.go", done.stderr)
            self.assertEqual(done.stderr.count("a fault for a test"), 1)

    def test_signals_stay_with_python(self) -> None:
        """Go's runtime handles the signals of its own faults only."""
        done = self.run_python("""
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
            working = threading.Event()
            threading.Thread(target=lambda: working.wait(60) and os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                while True:
                    assert use() == 0
                    working.set()
            except KeyboardInterrupt:
                print("interrupted")
            r, w = os.pipe()
            os.close(r)
            try:
                os.write(w, b"x")
            except BrokenPipeError:
                print("broken pipe")
            rang = []
            signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            while len(rang) < 100:
                assert use() == 0
            signal.setitimer(signal.ITIMER_REAL, 0)
            print("rang")
        """)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "interrupted\nbroken pipe\nrang\n", ""))

    def test_a_crash_of_other_code_is_reported_as_ever(self) -> None:
        for before in ("faulthandler.enable(); alloc()", "alloc(); faulthandler.enable()"):
            done = self.run_python(f"""
                {before}
                ctypes.string_at(0)
            """)
            self.assertEqual(done.returncode, -signal.SIGSEGV, done.stderr)
            self.assertIn("Fatal Python error: Segmentation fault", done.stderr)

    def test_a_call_when_the_interpreter_has_ended(self) -> None:
        """Python has freed the alternate signal stack on which Go's runtime took the main thread's signals. The call is long enough for one."""
        compiler = shutil.which("cc") or lacks("cc")
        with tempfile.TemporaryDirectory(prefix="cuvmm-") as folder:
            source, late = os.path.join(folder, "late.c"), os.path.join(folder, "late.so")
            with open(source, "w") as f:
                f.write(textwrap.dedent("""
                    #include <stdint.h>
                    #include <stdio.h>
                    #include <stdlib.h>
                    static int32_t (*crc32c)(const void *, size_t, uint32_t *, void *);
                    static void call(void) {
                        size_t n = 256 << 20;
                        uint32_t sum;
                        void *bytes = calloc(1, n);
                        for (int i = 0; i < 8; i++)
                            if (crc32c(bytes, n, &sum, NULL) != 0) abort();
                        puts("called");
                    }
                    void at_exit(void *f) { *(void **)&crc32c = f; atexit(call); }
                """))
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", late, source], check=True)
            code = f"""
                import atexit, ctypes, os
                lib = ctypes.CDLL(os.environ["CUVMM_LIBCUVMM"])
                atexit.register(lib.cuvmm_torch_ending)
                assert lib.cuvmm_crc32c(b"abc", ctypes.c_size_t(3), ctypes.byref(ctypes.c_uint32()), None) == 0
                ctypes.CDLL({late!r}).at_exit(ctypes.cast(lib.cuvmm_crc32c, ctypes.c_void_p))
            """
            done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)], env=environment(), capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stdout), (0, "called\n"), done.stderr)

    def test_a_child_of_fork_that_crashes_ends(self) -> None:
        done = self.run_python("""
            pid = os.fork()
            if pid == 0:
                ctypes.string_at(0)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    print("ended", status != 0)
                    break
                time.sleep(0.01)
            else:
                os.kill(pid, signal.SIGKILL)
                print("hangs")
        """)
        self.assertEqual(done.stdout, "ended True\n", done.stderr)


if __name__ == "__main__":
    unittest.main()


class OnADriverInC(unittest.TestCase):
    """The C front calls such a driver itself: testdata/front/driver.c of cmd/libcuvmm, which runs nothing."""

    def setUp(self) -> None:
        if not os.environ.get("CUVMM_LIBCUVMM") or os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("CUVMM_LIBCUVMM names the library: scripts/test-python.sh builds it")
        compiler = shutil.which("cc") or lacks("cc")
        self.folder = tempfile.mkdtemp(prefix="cuvmm-")
        self.addCleanup(shutil.rmtree, self.folder, True)
        source = ROOT / "cmd/libcuvmm/testdata/front"
        self.pair = os.path.join(self.folder, "pair")
        self.driver = os.path.join(self.folder, "driver.so")
        subprocess.run([compiler, "-O2", "-w", "-shared", "-fPIC", "-o", self.driver, str(source / "driver.c"), "-ldl"], check=True)
        subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", self.pair, str(source / "pair.c"), "-ldl"], check=True)
        self.environment = {**environment(), "CUVMM_DRIVER": "real", "CUVMM_LIBCUDA": self.driver}

    def test_a_warm_pair_does_not_enter_go(self) -> None:
        done = subprocess.run([self.pair, os.environ["CUVMM_LIBCUVMM"]], env=self.environment, capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual([line.split("; ")[1] for line in done.stdout.splitlines()], ["0.0000 entries into Go"] * 5)

    def test_the_runtime_sleeps_and_a_capture_is_seen(self) -> None:
        code = """
            import ctypes, os, time
            from ctypes import byref, c_size_t, c_uint64, c_void_p
            from cuvmm import _torch_library as front
            from tests.test_libcuvmm import Options
            before = set(os.listdir("/proc/self/task"))
            lib, error, pool = ctypes.CDLL(os.environ["CUVMM_LIBCUVMM"]), front.CError(size=ctypes.sizeof(front.CError)), c_uint64()
            assert lib.cuvmm_pool_open(byref(Options(ctypes.sizeof(Options), 0, 0)), byref(pool), byref(error)) == 0, error.message
            driver = ctypes.CDLL(os.environ["CUVMM_LIBCUDA"])
            capturing, asked = (t.in_dll(driver, n) for t, n in ((ctypes.c_uint32, "stand_in_capturing"), (c_uint64, "stand_in_calls")))
            lib.cuvmm_entries.restype = c_uint64
            def pairs(n):
                for _ in range(n):
                    p = c_void_p()
                    status = lib.cuvmm_alloc(pool, c_size_t(1000), c_void_p(0x70), c_uint64(0), byref(p), byref(error))
                    if status != 0:
                        return status
                    assert lib.cuvmm_free(pool, p, byref(error)) == 0
                return 0
            assert pairs(10) == 0
            time.sleep(0.5)
            go = set(os.listdir("/proc/self/task")) - before
            def woken():
                return sum(int(l.split()[1]) for t in go for l in open(f"/proc/self/task/{t}/status") if l.startswith("voluntary_ctxt"))
            was, calls, entries = woken(), asked.value, lib.cuvmm_entries()
            assert pairs(20000) == 0 and lib.cuvmm_entries() == entries and asked.value == calls + 20000
            assert len(go) > 0 and woken() - was <= 5, woken() - was
            for status in (1, 2):  # the stream captures; its capture is broken
                capturing.value = status
                assert pairs(1) == 4 and lib.cuvmm_entries() > entries
            capturing.value, entries = 0, lib.cuvmm_entries()
            assert pairs(100) == 0 and lib.cuvmm_entries() == entries
            print("done")
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=self.environment, cwd=ROOT / "python", capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)
