"""Memory of other allocators, which the driver can export or cannot."""

from __future__ import annotations

import ctypes
import os
from array import array as numbers
from ctypes import byref, c_uint64
from typing import Any, Dict, List, Optional, Tuple

import cuvmm
from cuvmm import _driver, _memory
from cuvmm._undo import Undo

from .support import DriverTest


class Tensor:
    """What another allocator makes, as PyTorch's tensors show it."""

    def __init__(self, pointer: int, shape: Tuple[int, ...], typestr: str = "<u4", strides: Optional[Tuple[int, ...]] = None) -> None:
        self.__cuda_array_interface__: Dict[str, Any] = {"shape": shape, "typestr": typestr, "data": (pointer, False), "version": 3, "strides": strides}


class Exports(DriverTest):
    def setUp(self) -> None:
        super().setUp()
        self.device = _driver.device(0)
        self.granule = self.device.granularity(self.device.properties())

    def allocate(self, sizes: List[int], handles: int = _driver.POSIX_FD) -> int:
        """Maps chunks behind each other, as an allocator of virtual memory does."""
        undo = Undo()
        self.addCleanup(undo.close)
        r = _memory.Range(self.device, sum(sizes), self.granule, _driver.READ_WRITE, undo)
        for size in sizes:
            handle = _memory.Handle(self.device, size, undo)
            self.assertEqual(handle.make("cuMemCreate", size, byref(self.device.properties(handles)), 0), 0)
            r.attach([handle])
            handle.close()
        return r.address

    def write(self, at: int, values: numbers) -> None:  # type: ignore[type-arg]
        host = (ctypes.c_char * (4 * len(values))).from_buffer_copy(values)
        with self.device.current() as d:
            d.call("cuMemcpyHtoDAsync_v2", at, ctypes.addressof(host), 4 * len(values), None)
        self.device.synchronize()

    def test_shareable_memory_is_published(self) -> None:
        at = self.allocate([self.granule, 3 * self.granule])
        length = self.granule // 4 + 1000
        self.write(at, numbers("I", range(length)))
        tensor = Tensor(at, (length // 2, 2))
        with cuvmm.export(tensor) as memory, cuvmm.Server(self.path()) as server:
            self.assertEqual((len(memory), memory.dtype, memory.reserved, memory.array.ptr), (length, "uint32", 4 * self.granule, at))
            server.publish("tensor", memory).announce()
            with cuvmm.connect(self.path()) as client, client.follow("tensor") as follower:
                follower.next(timeout=60)
                self.assertEqual(follower.array[length - 3:].tolist(), [length - 3, length - 2, length - 1])
                self.assertEqual([c.size for c in follower._replica.chunks], [self.granule, 3 * self.granule])
            with self.assertRaises(cuvmm.CapacityError):
                memory.resize(2 * self.granule)
            with self.assertRaises(cuvmm.InUseError):
                memory.close()
        with self.assertRaises(cuvmm.ClosedError):
            memory.array  # noqa: B018
        self.write(at, numbers("I", [1]))  # it is its allocator's still

    def test_memory_without_handles_is_refused(self) -> None:
        plain = c_uint64()
        with self.device.current() as d:
            d.call("cuMemAlloc_v2", byref(plain), 4096)
        self.addCleanup(lambda: self.device.driver.raw("cuMemFree_v2", plain.value))
        for what, at in {"cudaMalloc": int(plain.value), "virtual memory without handles": self.allocate([self.granule], 0),
                         "inside of an allocation": self.allocate([2 * self.granule]) + self.granule, "not aligned": self.allocate([self.granule]) + 512}.items():
            with self.subTest(what), self.assertRaises(cuvmm.NotSupported) as raised:
                cuvmm.export(Tensor(at, (10,)))
            self.assertIn("cuvmm.torch.pool()", str(raised.exception))
            self.assertIn("cuvmm.empty", raised.exception.hint)

    def test_what_is_no_row_of_elements_is_refused(self) -> None:
        at = self.allocate([self.granule])
        for tensor in (Tensor(at, (10, 10), strides=(80, 8)), Tensor(at, (10, 10), strides=(4, 40)), Tensor(at, (0,)), Tensor(at, (4,), "<U1"), numbers("f", [1])):
            with self.assertRaises(cuvmm.ArgumentError):
                cuvmm.export(tensor)
        for tensor in (Tensor(at, (10, 10), strides=(40, 4)), Tensor(at, (10, 1), strides=(4, 999))):
            cuvmm.export(tensor).close()

    def test_exports_leave_nothing(self) -> None:
        at = self.allocate([self.granule] * 4)
        before, files = cuvmm.memory_info().free, len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            with cuvmm.export(Tensor(at, (self.granule,))) as memory, cuvmm.Server(self.path()) as server:
                server.publish("tensor", memory).announce()
        self.assertEqual((cuvmm.memory_info().free, len(os.listdir("/proc/self/fd"))), (before, files))
