"""cuvmm.torch on the software driver, with a stand-in for PyTorch: CUVMM_LIBCUVMM names the library."""

from __future__ import annotations

import ctypes
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from typing import Any, Callable, Dict
from unittest import mock

import cuvmm
from cuvmm import _torch_error, _torch_library, _torch_memory

from .support import ROOT, environment, lacks

MIB = 1 << 20


def compiler() -> str:
    return shutil.which("c++") or lacks("c++ in PATH")


class Allocator:
    """What PyTorch makes of two addresses."""

    def __init__(self, alloc: int, free: int) -> None:
        self.alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(alloc)
        self.free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(free)
        self.functions: Dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[[int], None]:
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda address: self.functions.__setitem__(name, address)


def stand_in() -> Any:
    """A module with what cuvmm.torch uses of PyTorch, and functions of the cache that raise."""
    torch: Any = types.ModuleType("torch")
    torch.__version__, torch.__file__ = "2.11.0+stand.in", "/nowhere/torch/__init__.py"
    torch.cuda, torch._C = types.SimpleNamespace(memory=types.SimpleNamespace()), types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True, current=None)

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("does not yet support it")

    for function in _torch_memory.PATCHED:
        setattr(torch.cuda.memory, function.__name__, raising)
        if not function.__name__.startswith("_"):
            setattr(torch.cuda, function.__name__, raising)
    torch.accelerator = types.SimpleNamespace(memory_allocated=raising, memory=types.SimpleNamespace(memory_allocated=raising))
    torch.cuda.initialized = False
    torch.cuda.is_initialized = lambda: torch.cuda.initialized
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda n: types.SimpleNamespace(total_memory=1 << 30)
    torch.cuda.MemPool = lambda allocator: ("MemPool", allocator)
    torch.device = lambda d: types.SimpleNamespace(index=int(str(d).split(":")[1]) if ":" in str(d) else None)
    torch._C._cuda_customAllocator = Allocator
    torch._C._cuda_changeCurrentAllocator = lambda a: setattr(torch._C, "current", a)
    return torch


class TorchMemory(unittest.TestCase):
    torch: Any
    front: Any
    allocator: Allocator

    @classmethod
    def setUpClass(cls) -> None:
        if not os.environ.get("CUVMM_LIBCUVMM") or os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("CUVMM_LIBCUVMM names the library: scripts/test-python.sh builds it, and runs this in a process of its own")
        cls.torch = stand_in()
        sys.modules["torch"] = cls.torch
        cls.addClassCleanup(sys.modules.pop, "torch")
        cls.front = importlib.import_module("cuvmm.torch")
        cls.torch.cuda.initialized = True
        try:
            cls.front.use_pool()
            raise AssertionError("it is too late")
        except cuvmm.Error as e:
            assert "call use_pool before the first tensor" in str(e)
        cls.torch.cuda.initialized = False
        cls.front.use_pool(patch=True)
        cls.front.use_pool(patch=True)
        cls.allocator = cls.torch._C.current

    def setUp(self) -> None:
        self.torch.cuda.reset_peak_memory_stats()
        self.torch.cuda.reset_accumulated_memory_stats()

    def test_every_setter_is_used(self) -> None:
        self.assertEqual(set(self.allocator.functions), {
            "set_init_fn", "set_reset_fn", "set_base_alloc_fn", "set_record_stream_fn", "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn",
            "set_release_pool", "set_memory_fraction_fn"})
        self.assertEqual(len(set(self.allocator.functions.values())), 8)

    def test_statistics(self) -> None:
        cuda = self.torch.cuda
        before = cuda.memory_allocated()
        p = self.allocator.alloc(3 * MIB + 1, 0, None)
        self.assertEqual(cuda.memory_allocated("cuda:0") - before, 3 * MIB + 1)
        self.assertGreaterEqual(cuda.memory_reserved(), 3 * MIB)
        self.assertEqual(self.torch.accelerator.memory_allocated(), cuda.memory_allocated())
        self.allocator.free(p, 3 * MIB + 1, 0, None)
        self.assertEqual(cuda.memory_allocated(), before)
        self.assertEqual(cuda.max_memory_allocated(), before + 3 * MIB + 1)
        s = cuda.memory_stats()
        self.assertEqual(s["allocated_bytes.all.peak"], before + 3 * MIB + 1)
        self.assertEqual(s["allocation.all.allocated"] - s["allocation.all.freed"], s["allocation.all.current"])
        self.assertEqual(s["requested_bytes.all.allocated"] - s["requested_bytes.all.freed"], s["requested_bytes.all.current"])
        self.assertEqual(s["allocation.all.freed"], 1)
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        cuda.reset_accumulated_memory_stats()
        s = cuda.memory.memory_stats()
        self.assertEqual((s["allocated_bytes.all.peak"], s["allocation.all.freed"], cuda.max_memory_reserved()), (before, 0, cuda.memory_reserved()))

    def test_all_keys_of_a_summary(self) -> None:
        """torch.cuda.memory_summary formats these for all, large_pool and small_pool."""
        nested, flat = self.torch.cuda.memory_stats_as_nested_dict(), self.torch.cuda.memory_stats()
        for metric in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes", "allocation", "active", "segment", "inactive_split"):
            for group in ("all", "large_pool", "small_pool"):
                for count in ("current", "peak", "allocated", "freed"):
                    self.assertEqual(flat[f"{metric}.{group}.{count}"], nested[metric][group][count])
        for metric in ("oversize_allocations", "oversize_segments"):
            self.assertIn(f"{metric}.current", flat)
        self.assertEqual((flat["num_alloc_retries"], flat["num_ooms"]), (0, 0))

    def test_a_device_without_a_pool(self) -> None:
        """Asking makes none: a context would take memory of that device."""
        self.assertEqual(self.torch.cuda.memory_allocated(1), 0)
        self.torch.cuda.reset_peak_memory_stats(1)
        self.assertIsNone(self.front.snapshot(1))
        self.assertEqual(_torch_library.loaded().cuvmm_torch_pool(1), 0)

    def test_history_and_snapshots(self) -> None:
        self.torch.cuda.memory._record_memory_history(max_entries=sys.maxsize)  # PyTorch's default
        p = self.allocator.alloc(2 * MIB, 0, None)
        q = self.allocator.alloc(777, 0, None)
        self.allocator.free(q, 777, 0, None)
        s = self.torch.cuda.memory._snapshot()
        events = [(e["action"], e["addr"] - p if e["addr"] == p else e["size"]) for e in s["device_traces"][0]]
        self.assertEqual(events, [("alloc", 0), ("alloc", 777), ("free_requested", 777), ("free_completed", 777)])
        block = [b for g in self.torch.cuda.memory_snapshot() for b in g["blocks"] if b["address"] == p]
        self.assertEqual([(b["state"], b["requested_size"]) for b in block], [("active_allocated", 2 * MIB)])
        trace = s["device_traces"][0]
        for frames in (block[0]["frames"], trace[0]["frames"], trace[1]["frames"]):
            self.assertEqual((frames[0]["name"], frames[0]["filename"]), ("test_history_and_snapshots", __file__))
        self.assertEqual(trace[1]["frames"][0]["line"], trace[0]["frames"][0]["line"] + 1)
        self.assertEqual(trace[2]["frames"], [])
        self.assertEqual(self.torch.cuda.memory_snapshot(mempool_id=(5, 5)), [])
        self.torch.cuda.memory._record_memory_history(enabled=None)
        self.assertEqual(self.torch.cuda.memory._snapshot()["device_traces"][0], [])
        self.allocator.free(p, 2 * MIB, 0, None)
        self.assertIn("segments", self.front.snapshot())

    def test_stacks_belong_to_their_allocations(self) -> None:
        record = self.torch.cuda.memory._record_memory_history
        record(max_entries=6)

        def again() -> int:
            p: int = self.allocator.alloc(777, 0, None)
            return p

        old = self.allocator.alloc(777, 0, None)
        self.allocator.free(old, 777, 0, None)
        live = [again() for _ in range(3)]
        self.assertEqual(live[0], old)
        trace = self.torch.cuda.memory._snapshot()["device_traces"][0]
        names = [(e["addr"], e["frames"][0]["name"]) for e in trace if e["action"] == "alloc"]
        self.assertEqual(names, [(old, "test_stacks_belong_to_their_allocations")] + [(p, "again") for p in live])
        self.allocator.free(old, 777, 0, None)
        record(context=None)
        p = self.allocator.alloc(777, 0, None)
        self.assertEqual([e["frames"] for e in self.torch.cuda.memory._snapshot()["device_traces"][0]], [[]])
        record(enabled=None)
        for q in [p] + live[1:]:
            self.allocator.free(q, 777, 0, None)

    def test_a_limit(self) -> None:
        cuda = self.torch.cuda
        self.assertEqual(cuda.get_per_process_memory_fraction(), 1.0)
        cuda.set_per_process_memory_fraction(0.25)
        self.assertAlmostEqual(cuda.get_per_process_memory_fraction(0), 0.25)
        cuda.set_per_process_memory_fraction(1.0)
        self.assertEqual(cuda.get_per_process_memory_fraction(), 1.0)
        for wrong in (0, -0.5, 1.01, float("nan")):
            with self.assertRaisesRegex(cuvmm.ArgumentError, "a fraction of"):
                cuda.set_per_process_memory_fraction(wrong)

    def test_what_is_not_supported_says_why(self) -> None:
        with self.assertRaisesRegex(cuvmm.NotSupported, "leave out"):
            self.torch.cuda.caching_allocator_enable(False)
        self.torch.cuda.caching_allocator_enable(True)
        with self.assertRaisesRegex(cuvmm.NotSupported, "process without use_pool"):
            self.front.pool()

    def test_the_front_in_cpp(self) -> None:
        cxx = compiler()
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "front")
            subprocess.run([cxx, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", program, str(ROOT / "python/tests/torch_front.cc"), "-ldl"], check=True)
            done = subprocess.run([program, os.environ["CUVMM_LIBCUVMM"]], env=environment(), capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "ok\n", ""))


class OwnError(unittest.TestCase):
    """The shim, compiled against a stand-in for PyTorch's headers."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        cache = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder / "cache")})
        cache.start()
        self.addCleanup(cache.stop)
        self.torch = stand_in()
        self.torch.__file__ = str(self.folder / "torch/__init__.py")
        (self.folder / "torch/include/c10/util").mkdir(parents=True)
        (self.folder / "torch/lib").mkdir()

    def test_it_is_compiled_once(self) -> None:
        cxx = compiler()
        (self.folder / "torch/include/c10/util/Exception.h").write_text("#include <new>\n#define TORCH_CHECK_WITH(type, condition, text) throw std::bad_alloc()\n")
        (self.folder / "empty.cc").write_text("")
        subprocess.run([cxx, "-shared", "-fPIC", "-o", str(self.folder / "torch/lib/libc10.so"), str(self.folder / "empty.cc")], check=True)
        path = _torch_error.build(self.torch)
        made = os.stat(path).st_mtime_ns
        self.assertEqual((_torch_error.build(self.torch), os.stat(path).st_mtime_ns), (path, made))
        self.assertEqual(os.listdir(self.folder / "cache/cuvmm"), [os.path.basename(path)])
        self.torch.__version__ = "2.12.0"
        self.assertNotEqual(_torch_error.build(self.torch), path)

    def test_what_is_missing_is_said(self) -> None:
        if shutil.which("c++"):
            with self.assertRaisesRegex(cuvmm.NotSupported, "(?s)was not compiled.*leave own_error out"):
                _torch_error.build(self.torch)  # there are no headers
        with mock.patch.dict(os.environ, {"CXX": "/nowhere/c++ -O2"}):
            with self.assertRaisesRegex(cuvmm.NotSupported, "/nowhere/c.. is not in PATH"):
                _torch_error.build(self.torch)


if __name__ == "__main__":
    unittest.main()
