"""Arrays in queues and pipes, between processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import pickle
import sys
import types
import unittest
from multiprocessing import reduction
from typing import Any, List
from unittest import mock

import cuvmm
import cuvmm.multiprocessing  # noqa: F401

from .support import DriverTest, await_that


def relay(tasks: Any, results: Any) -> None:
    """Sends what it gets, changed, until there is None. Of arrays it says what is in them."""
    while True:
        a = tasks.get()
        if a is None:
            results.put(None)
            return
        before = a.tolist()
        a.write(a.tobytes()[::-1])  # it is the receiver's own
        results.put((before, a))


class Queues(DriverTest):
    def setUp(self) -> None:
        super().setUp()
        self.context = multiprocessing.get_context("spawn")
        self.tasks, self.results = self.context.Queue(), self.context.Queue()
        self.worker: Any = self.context.Process(target=relay, args=(self.tasks, self.results))
        self.worker.start()
        self.addCleanup(self.worker.kill)

    def test_arrays_travel_as_copies_and_leave_nothing(self) -> None:
        free = cuvmm.memory_info().free
        back: List[Any] = []
        with cuvmm.empty(100_000, "uint8") as memory:
            for n in (0, 1, 1000, 100_000):
                memory.resize(n)
                memory.array.write(bytes(i % 251 for i in range(n)))
                self.tasks.put(memory.array)
                before, a = self.results.get(timeout=60)
                self.assertEqual(before, [i % 251 for i in range(n)])
                self.assertEqual(a.tobytes(), bytes(before)[::-1])
                self.assertEqual(memory.array.tolist(), before)
                self.assertEqual((a.dtype, a.device, a.readonly), ("uint8", 0, False))
                back.append(a[n // 2:])
            del a
        self.assertLess(cuvmm.memory_info().free, free)
        self.assertEqual(back[-1].tolist(), [i % 251 for i in range(50_000)][::-1])
        back.clear()
        gc.collect()
        self.tasks.put(None)
        self.assertIsNone(self.results.get(timeout=60))
        self.worker.join(60)
        await_that(lambda: cuvmm.memory_info().free >= free, "all memory is free again")

    def test_what_is_sent_outlives_its_sender(self) -> None:
        with cuvmm.empty(10, "int64") as memory:
            memory.array.write(bytes(range(80)))
            self.tasks.put(memory.array)
            _, a = self.results.get(timeout=60)
        self.worker.kill()
        self.worker.join(60)
        self.assertEqual(a.tobytes(), bytes(range(80))[::-1])

    def test_what_a_dead_sender_did_not_hand_over(self) -> None:
        with cuvmm.empty(10, "int64") as memory:
            self.tasks.put(memory.array)
            await_that(lambda: not self.results.empty(), "it sends back")
        self.worker.kill()
        self.worker.join(60)
        with self.assertRaises(OSError):
            self.results.get(timeout=60)


class Tensor:
    """A stand-in for PyTorch's: bytes on the GPU with a shape and a type, and what is asked before it is sent."""

    is_cuda, layout, dtype, device = True, "strided", "float32", "cuda:0"

    def __init__(self, array: Any, shape: Any = (), requires_grad: bool = False, is_leaf: bool = True) -> None:
        self.array, self.shape, self.requires_grad, self.is_leaf = array, shape, requires_grad, is_leaf

    def get_device(self) -> int:
        return 0

    def itself(self) -> Any:
        return self

    detach = resolve_conj = resolve_neg = contiguous = itself

    def data_ptr(self) -> int:
        return int(self.array.ptr)

    def numel(self) -> int:
        return int(self.array.nbytes) // 4

    def element_size(self) -> int:
        return 4

    def view(self, of: Any) -> "Tensor":
        return Tensor(self.array, self.shape if isinstance(of, str) else of)

    def requires_grad_(self, value: bool) -> "Tensor":
        self.requires_grad = value
        return self


class Parameter(Tensor):
    def __init__(self, data: Any, requires_grad: bool = True) -> None:
        super().__init__(data.array, data.shape, requires_grad)


class Own(Exception):
    """PyTorch's own reducer was called."""


def own_reducer(t: Any) -> Any:
    raise Own


class Tensors(DriverTest):
    def setUp(self) -> None:
        super().setUp()
        torch: Any = types.ModuleType("torch")
        torch.Tensor, torch.nn, torch.strided = Tensor, types.SimpleNamespace(Parameter=Parameter), "strided"
        torch.cuda, torch.no_grad = types.SimpleNamespace(device=contextlib.nullcontext), contextlib.nullcontext
        torch.from_dlpack = Tensor
        reductions: Any = types.ModuleType("torch.multiprocessing.reductions")
        reductions.reduce_tensor = own_reducer
        patched = mock.patch.dict(sys.modules, {"torch": torch, "torch.multiprocessing.reductions": reductions})
        patched.start()
        self.addCleanup(patched.stop)
        cuvmm.multiprocessing.use_tensors()

    def test_a_tensor_is_the_same_on_the_other_side(self) -> None:
        with cuvmm.empty(6, "float32") as memory:
            memory.array.write(bytes(range(24)))
            for t in (Tensor(memory.array, (2, 3)), Tensor(memory.array, (6,), True), Parameter(Tensor(memory.array, (3, 2)), False)):
                got = pickle.loads(reduction.ForkingPickler.dumps(t))
                self.assertEqual((type(got), got.shape, got.requires_grad, got.array.tobytes()), (type(t), t.shape, t.requires_grad, bytes(range(24))))
                self.assertNotEqual(got.data_ptr(), t.data_ptr())
                del t, got

    def test_what_pytorch_sends_itself(self) -> None:
        on_cpu, sparse = Tensor(None), Tensor(None)
        on_cpu.is_cuda, sparse.layout = False, "sparse"
        for t in (on_cpu, sparse, Tensor(None, (), True, False)):
            with self.assertRaises(Own):
                reduction.ForkingPickler.dumps(t)


if __name__ == "__main__":
    unittest.main()
