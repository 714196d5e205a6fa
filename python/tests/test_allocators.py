"""CuPy and Numba on the pool: with themselves on a GPU, if they are installed; without one CuPy is a stand-in, and Numba, which is
Debian's, has another allocator behind it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import types
import unittest
from typing import Any, List
from unittest import mock

import cuvmm

from .support import ROOT, DriverTest, environment, lacks


def run(test: unittest.TestCase, python: str, *arguments: str, **env: str) -> None:
    done = subprocess.run([python, "-m", "tests.allocator_programs", *arguments], env=environment(**env), cwd=ROOT / "python", capture_output=True, text=True,
                          timeout=120)
    test.assertEqual((done.returncode, done.stdout), (0, "ok\n"), done.stderr)


class OnAGPU(unittest.TestCase):
    def test_they_run_on_the_pool(self) -> None:
        if not os.environ.get("CUVMM_TEST_GPU"):
            self.skipTest("set CUVMM_TEST_GPU=1 on a machine with a GPU, CuPy and Numba")
        for name in ("cupy", "numba"):
            with self.subTest(name):
                if importlib.util.find_spec(name) is None:
                    lacks(name)
                run(self, sys.executable, name)


class Numba(DriverTest):
    def test_its_interface_for_allocators(self) -> None:
        python = "/usr/bin/python3"
        if os.environ.get("CUVMM_TEST_GPU"):
            self.skipTest("it runs on the pool there")
        if subprocess.run([python, "-c", "import numba"], stderr=subprocess.DEVNULL).returncode != 0:
            lacks("Debian's python3-numba")
        driver = os.environ["CUVMM_LIBCUDA"]
        run(self, python, "numba", driver, NUMBA_CUDA_DRIVER=driver)


class Allocator:
    """CuPy's PythonFunctionAllocator."""

    def __init__(self, malloc: Any, free: Any) -> None:
        self.malloc, self.free = malloc, free


class CuPy(unittest.TestCase):
    """A stand-in for what cuvmm.cupy meets of CuPy."""

    @classmethod
    def setUpClass(cls) -> None:
        if not os.environ.get("CUVMM_LIBCUVMM") or os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("CUVMM_LIBCUVMM names the library: scripts/test-python.sh builds it, and runs this in a process of its own")

    def test_the_stream_is_the_current_one(self) -> None:
        cupy: Any = types.ModuleType("cupy")
        current: List[int] = [0]
        made: List[Any] = []
        cupy.cuda = types.SimpleNamespace(PythonFunctionAllocator=Allocator, get_current_stream=lambda device: types.SimpleNamespace(ptr=current[0]),
                                          set_allocator=made.append)
        with mock.patch.dict(sys.modules, {"cupy": cupy}):
            front: Any = importlib.import_module("cuvmm.cupy")
            front.use_pool()
            front.use_pool()
            self.assertEqual(made[0], made[1])
            allocator = front._made[0]
            block = allocator.malloc(5000, 0)
            self.assertGreater(block, 0)
            allocator.free(block, 0)
            self.assertEqual(allocator.malloc(0, 0), 0)
            allocator.free(0, 0)
            with self.assertRaises(cuvmm.OutOfMemory):
                allocator.malloc(1 << 45, 0)
            current[0] = 2
            with self.assertRaisesRegex(cuvmm.ArgumentError, "per-thread"):
                allocator.malloc(5000, 0)
            with self.assertRaises(cuvmm.ArgumentError):
                allocator.free(block, 0)
