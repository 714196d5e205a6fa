"""cuvmm.torch's tags and cuvmm.vllm on the software driver, with stand-ins for PyTorch and vLLM, which have what the two use of them:
CUVMM_LIBCUVMM names the library."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import types
import unittest
from typing import Any, Iterator, List, Tuple
from unittest import mock

import cuvmm

from .test_torch_memory import Allocator, stand_in

MIB = 1 << 20


class MemPool:
    """Segments of one allocator, without a cache of its own."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator


class Tensor:
    """A block of the thread's pool. It is on a GPU."""

    is_cuda = True
    pools = threading.local()

    def __init__(self, size: int) -> None:
        self._allocator, self._size = Tensor.pools.current.allocator, size
        self._at = self._allocator.alloc(size, 0, None)

    def data_ptr(self) -> int:
        return int(self._at)

    def untyped_storage(self) -> "Tensor":
        return self

    def __del__(self) -> None:
        if getattr(self, "_at", None):
            self._allocator.free(self._at, self._size, 0, None)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool) -> Iterator[None]:
    before = getattr(Tensor.pools, "current", None)
    Tensor.pools.current = pool
    try:
        yield
    finally:
        Tensor.pools.current = before


class SleepTest(unittest.TestCase):
    """A test with PyTorch's stand-in."""

    front: Any

    @classmethod
    def setUpClass(cls) -> None:
        if not os.environ.get("CUVMM_LIBCUVMM") or os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("CUVMM_LIBCUVMM names the library: scripts/test-python.sh builds it, and runs this in a process of its own")
        torch = stand_in()
        torch.Tensor, torch.cuda.MemPool, torch.cuda.use_mem_pool = Tensor, MemPool, use_mem_pool
        patched = mock.patch.dict(sys.modules, {"torch": torch})
        patched.start()
        cls.addClassCleanup(patched.stop)
        cls.front = importlib.import_module("cuvmm.torch")
        installed: Any = mock.patch.object(cls.front, "_installed", [])  # by another test of this process
        installed.start()
        cls.addClassCleanup(installed.stop)

    def setUp(self) -> None:
        self.addCleanup(self.front.resume)
        self.tag = self.id().rsplit(".", 1)[-1]  # tags are the process's

    def tensor(self, tag: str, size: int = 2 * MIB) -> Tensor:
        with self.front.region(tag):
            return Tensor(size)


class TorchSleep(SleepTest):
    def test_regions_sleep_by_their_tags(self) -> None:
        weights, cache = self.tag + ".weights", self.tag + ".cache"
        w, c = self.tensor(weights, 4 * MIB), self.tensor(cache, 6 * MIB)
        self.assertEqual(self.front.suspend([weights, cache], keep=[weights]), (10 * MIB, 0, 4 * MIB))
        self.assertEqual(self.front.sleeping(), [cache, weights])
        with self.assertRaisesRegex(cuvmm.SuspendedError, "sleeps already"):
            self.front.suspend(cache)
        self.front.resume(weights)
        self.assertEqual(self.front.sleeping(), [cache])
        self.assertIn(weights, self.front.awake())
        self.front.discard([weights])
        self.assertEqual(self.front.sleeping(), [cache, weights])
        del w, c  # memory that sleeps can be freed
        self.front.resume()
        self.assertEqual(self.front.sleeping(), [])
        with self.assertRaisesRegex(cuvmm.ArgumentError, "no memory has"):
            self.front.suspend(weights)

    def test_what_a_sleeping_tag_refuses(self) -> None:
        held = self.tensor(self.tag)
        pool = self.front.pool(tag=self.tag)
        self.front.suspend(self.tag, guard=True)
        with self.assertRaisesRegex(cuvmm.SuspendedError, "resume it first"):
            with self.front.region(self.tag):
                self.fail("it sleeps")
        self.front.resume(self.tag)  # a MemPool of the tag refuses in C++, which torch_front.cc sees
        with use_mem_pool(pool):
            Tensor(MIB)
        del held

    def test_mistakes_in_the_call_change_nothing(self) -> None:
        held = [self.tensor(self.tag), self.tensor(self.tag + ".other")]
        for wrong in ({"tags": []}, {"tags": ["a\0b"]}, {"tags": self.tag, "keep": self.tag + ".other"}, {"tags": [self.tag, "wieghts"]}):
            with self.assertRaises(cuvmm.ArgumentError):
                self.front.suspend(**wrong)
        self.assertEqual(self.front.sleeping(), [])
        with mock.patch.dict(self.front.__dict__, {"_installed": [None]}):
            with self.assertRaisesRegex(cuvmm.NotSupported, "without use_pool"):
                self.front.region(self.tag)
        del held

    def test_half_of_a_suspension_is_undone(self) -> None:
        kept, lost = self.tensor(self.tag + ".kept"), self.tensor(self.tag + ".lost")
        sleep = importlib.import_module("cuvmm._torch_sleep")
        real = sleep._suspend

        def second_fails(named: List[str], drop: bool, guard: bool) -> Any:
            if drop:
                raise cuvmm.InUseError("a test")
            return real(named, drop, guard)

        with mock.patch.object(sleep, "_suspend", second_fails), self.assertRaises(cuvmm.InUseError):
            self.front.suspend([self.tag + ".kept", self.tag + ".lost"], keep=self.tag + ".kept")
        self.assertEqual(self.front.sleeping(), [])
        del kept, lost

    def test_tensors_of_a_tag(self) -> None:
        mine, other = [self.tensor(self.tag), self.tensor(self.tag)], self.tensor(self.tag + ".other")
        found = self.front.tensors(self.tag)
        self.assertEqual({id(t) for t in found}, {id(t) for t in mine})
        self.front.suspend(self.tag)
        self.assertEqual(len(self.front.tensors(self.tag)), 2)
        self.assertEqual(self.front.tensors("no such tag"), [])
        del other


class SleepModeBackend:
    """vLLM's base class, and Factory its registry."""

    def __init__(self) -> None:
        self._state = "RUNNING"


class Factory:
    registry: "dict[str, Tuple[str, str]]" = {}

    @classmethod
    def register_backend(cls, name: str, module: str, class_name: str) -> None:
        if name in cls.registry:
            raise ValueError("already registered")
        cls.registry[name] = module, class_name

    @classmethod
    def get_backend_class(cls, name: str) -> Any:
        if name not in cls.registry:
            raise ValueError("unsupported")
        module, class_name = cls.registry[name]
        return getattr(importlib.import_module(module), class_name)


class GPUWorker:
    """vLLM's worker: it allocates in a context."""

    def __init__(self, **model: Any) -> None:
        self.vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(**model))

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        return contextlib.nullcontext("vLLM's own")

    def load(self, tag: str) -> Tensor:
        with self._maybe_get_memory_pool_context(tag):
            return Tensor(2 * MIB)


class VLLM(SleepTest):
    """A stand-in with the functions of vLLM's sleep registry and of its worker that cuvmm.vllm meets, by their names there."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        names = ["vllm", "vllm.device_allocator", "vllm.device_allocator.sleep_mode_backend", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker"]
        modules: Any = {name: types.ModuleType(name) for name in names}
        modules[names[2]].SleepModeBackend, modules[names[2]].SleepModeBackendFactory = SleepModeBackend, Factory
        modules[names[-1]].Worker = GPUWorker
        patched = mock.patch.dict(sys.modules, modules)
        patched.start()
        cls.addClassCleanup(patched.stop)
        sys.modules.pop("cuvmm.vllm", None)
        cls.plugin = importlib.import_module("cuvmm.vllm")

    plugin: Any

    def test_the_backend(self) -> None:
        self.plugin.register()
        self.plugin.register()
        backend = Factory.get_backend_class("cuvmm")
        self.assertTrue(issubclass(backend, SleepModeBackend))
        self.assertTrue(backend.is_supported() and backend.preserves_communicators() and not backend.supports_durable_storage())
        worker = self.plugin.Worker(sleep_mode_backend="cuvmm", enable_sleep_mode=True)
        made = backend()
        self.assertEqual(made.state(), "RUNNING")
        held = [worker.load("weights"), worker.load("kv_cache"), self.tensor("")]
        for level, host in ((1, 2 * MIB), (2, 0)):
            with mock.patch.object(self.front, "suspend", wraps=self.front.suspend) as suspend:
                made.suspend(level)
            self.assertEqual(suspend.call_args[1]["keep"], ["weights"] if host else [])
            self.assertEqual(made.state(), "SUSPENDED")
            self.assertIn("", self.front.awake())
            made.suspend(level)  # nothing is left
            made.resume(["weights"])
            self.assertEqual((made.state(), self.front.sleeping()), ("SUSPENDED", [t for t in self.front.sleeping() if t != "weights"]))
            made.resume()
            self.assertEqual(made.state(), "RUNNING")
        made.discard(("kv_cache",))
        self.assertEqual(self.front.sleeping(), ["kv_cache"])
        made.resume(["kv_cache"])
        with self.assertRaisesRegex(cuvmm.ArgumentError, "level 3"):
            made.suspend(3)
        with mock.patch.object(self.front, "awake", lambda: [""]), self.assertRaisesRegex(cuvmm.Error, "--worker-cls"):
            made.suspend(1)
        del held

    def test_the_worker_of_another_backend(self) -> None:
        other = self.plugin.Worker(sleep_mode_backend="cumem", enable_sleep_mode=True)
        with other._maybe_get_memory_pool_context("weights") as own:
            self.assertEqual(own, "vLLM's own")
        without = self.plugin.Worker(sleep_mode_backend="cuvmm", enable_sleep_mode=False)
        with without._maybe_get_memory_pool_context("weights") as nothing:
            self.assertIsNone(nothing)
        with self.assertRaises(AttributeError):
            self.plugin.Other


if __name__ == "__main__":
    unittest.main()
