"""Tensors that grow in place, on the software driver, with a stand-in for PyTorch: CUVMM_LIBCUVMM names the library."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import cuvmm

from .consumer import Tensor
from .test_torch_sleep import SleepTest


class Graph:
    """PyTorch's, as far as it matters: something that can be referred to weakly."""


class TorchExtensible(SleepTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        torch: Any = sys.modules["torch"]
        torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
        torch.from_dlpack = lambda rows: Tensor(rows.__dlpack__(max_version=(1, 0)))

    def made(self, rows: int, **options: Any) -> Any:
        e = self.front.extensible((rows, 256, 1024), "float32", **options)  # a row is a MiB
        self.addCleanup(e.close)
        return e

    def test_it_grows_where_it_is(self) -> None:
        e = self.made(64)
        first, more = e.commit(3), e.commit(17)
        self.assertEqual((first.pointer, more.pointer, first.shape, more.shape), (e.ptr, e.ptr, (3, 256, 1024), (17, 256, 1024)))
        self.assertEqual((len(e), e.shape), (17, (64, 256, 1024)))
        self.assertEqual(e.commit_rows(2).shape[0], 2)
        self.assertEqual(len(e), 17)
        interface = e.commit_rows(5).__cuda_array_interface__
        self.assertEqual((interface["data"], interface["typestr"], interface["shape"]), ((e.ptr, False), "<f4", (5, 256, 1024)))
        none = e.commit(0)
        self.assertEqual((none.pointer, none.shape), (e.ptr, (0, 256, 1024)))
        for t in (first, more, none):
            t.free()

    def test_release_is_refused_while_something_uses_it(self) -> None:
        e = self.made(64)
        t, graph = e.commit(20), Graph()
        with self.assertRaisesRegex(cuvmm.InUseError, "made at .*test_torch_extensible"):
            e.release(19)
        e.release(20)
        with self.assertRaises(cuvmm.InUseError):
            e.close()
        t.free()
        e.used_by(graph)
        with self.assertRaisesRegex(cuvmm.InUseError, "graph"):
            e.release(1)
        with self.assertRaisesRegex(cuvmm.InUseError, "graph"):
            e.close()
        e.unused_by(graph)
        e.release(1)
        self.assertEqual(len(e), 1)
        e.commit(30).free()
        e.used_by(graph)
        del graph
        gc.collect()
        e.release()
        with_null = self.made(8, null=True)
        graph = Graph()
        with_null.commit(8).free()
        with_null.used_by(graph)
        with_null.release()
        with_null.unused_by(graph)

    def test_its_end(self) -> None:
        with self.made(8) as e:
            e.commit(8).free()
        e.close()
        for call in (lambda: e.commit(1), e.release):
            with self.assertRaises(cuvmm.ClosedError):
                call()
        lost = self.front.extensible((8,), "int64", tag=self.tag)
        t = lost.commit(8)
        del lost
        gc.collect()
        self.assertEqual(self.front.awake().count(self.tag), 1)  # its tensor keeps it
        t.free()
        gc.collect()
        self.assertNotIn(self.tag, self.front.awake())

    def test_it_sleeps_with_its_tag(self) -> None:
        e = self.made(8, tag=self.tag)
        self.front.suspend(self.tag)
        with self.assertRaises(cuvmm.SuspendedError):
            e.commit(4)
        self.assertEqual(len(e), 0)
        self.front.resume(self.tag)
        e.commit(4).free()

    def test_what_is_wrong_is_said(self) -> None:
        for shape, dtype in (((), "float32"), ((0,), "float32"), ((1, -1), "float32"), ((8,), "float31"), ((1 << 60,), "int8"), ((1.5,), "int8")):
            with self.assertRaises(cuvmm.ArgumentError, msg=str((shape, dtype))):
                self.front.extensible(shape, dtype)
        with self.assertRaises(cuvmm.ArgumentError):
            self.front.extensible((8,), "int8", page=1000)
        e = self.made(8)
        for call, n in ((e.commit, 9), (e.commit, -1), (e.commit, 1.5), (e.release, -1)):
            with self.assertRaises(cuvmm.ArgumentError):
                call(n)
        rows = e.commit_rows(1)
        with self.assertRaises(BufferError):
            rows.__dlpack__(copy=True)
        half = self.front.extensible((8,), "bfloat16")
        with self.assertRaisesRegex(AttributeError, "use DLPack"):
            half.commit_rows(1).__cuda_array_interface__
        half.close()
