"""Arrays, as other libraries take them."""

from __future__ import annotations

import array
import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
import unittest
from typing import Any, Dict, List

import cuvmm

from .consumer import Tensor
from .support import DriverTest, environment


class Arrays(DriverTest):
    def setUp(self) -> None:
        super().setUp()
        self.shared = cuvmm.empty(1000, "float32", reserve=8 << 20)
        self.shared.array.write(array.array("f", range(1000)))

    def tearDown(self) -> None:
        gc.collect()
        self.shared.close()

    def readonly(self) -> Any:
        a = self.shared.array
        a._readonly = True
        return a

    def test_values_and_slices(self) -> None:
        a = self.shared.array
        self.assertEqual((len(a), a.dtype, a.itemsize, a.nbytes, a.shape), (1000, "float32", 4, 4000, (1000,)))
        self.assertEqual(a[10:13].tolist(), [10.0, 11.0, 12.0])
        self.assertEqual(a[10:].ptr, a.ptr + 40)
        self.assertEqual(a[5:2].tolist(), [])
        a[1:].write(array.array("f", [7, 8]), at=1)
        self.assertEqual(a[1:5].tolist(), [1.0, 7.0, 8.0, 4.0])
        for bad in (3, slice(0, 4, 2), (1, 2)):
            with self.assertRaises(cuvmm.ArgumentError):
                a[bad]
        with self.assertRaises(cuvmm.ArgumentError):
            a.write(bytes(8), at=999)
        with self.assertRaises(cuvmm.ArgumentError):
            a.write(b"odd")

    def test_capsules_of_both_forms(self) -> None:
        a = self.shared.array
        for version, name in ((None, b"dltensor"), ((0, 8), b"dltensor"), ((1, 0), b"dltensor_versioned"), ((1, 3), b"dltensor_versioned"), ((9, 9), b"dltensor_versioned")):
            with self.subTest(version=version):
                t = Tensor(a.__dlpack__(max_version=version))
                self.assertEqual((t.name, t.pointer, t.shape, t.strides), (name, a.ptr, (1000,), (1,)))
                kind = t.managed.tensor.dtype
                self.assertEqual((kind.code, kind.bits, kind.lanes), (2, 32, 1))
                self.assertEqual((t.managed.tensor.device.device_type, t.managed.tensor.device.device_id), (2, 0))
                if name == b"dltensor_versioned":
                    self.assertEqual((t.managed.version.major, t.managed.version.minor, t.managed.flags), (1, 1, 0))
                t.free()

    def test_a_tensor_keeps_the_memory_mapped(self) -> None:
        t = Tensor(self.shared.array[10:].__dlpack__())
        gc.collect()
        with self.assertRaises(cuvmm.InUseError) as raised:
            self.shared.close()
        self.assertIn("test_array.py", str(raised.exception))
        freeing = threading.Thread(target=t.free)
        freeing.start()
        freeing.join()
        gc.collect()
        self.shared.close()

    def test_a_capsule_that_is_not_taken(self) -> None:
        capsule = self.shared.array.__dlpack__(max_version=(1, 0))
        with self.assertRaises(cuvmm.InUseError):
            self.shared.close()
        del capsule
        gc.collect()
        self.shared.close()

    def test_a_consumer_that_fails(self) -> None:
        """It destroys the capsule while its exception is pending."""
        for version in (None, (1, 0)):
            with self.assertRaises(TypeError):
                len(self.shared.array.__dlpack__(max_version=version))
        self.shared.close()

    def test_read_only_memory(self) -> None:
        a = self.readonly()
        with self.assertRaises(BufferError):
            a.__dlpack__(max_version=(1, 0))
        with self.assertRaises(BufferError):
            a.write(bytes(4))
        for capsule, flags in ((a.__dlpack__(max_version=(1, 0), allow_readonly=True), 1), (a.allow_readonly().__dlpack__(max_version=(1, 0)), 1),
                               (a[1:].allow_readonly()[1:].__dlpack__(max_version=(1, 0)), 1), (a.__dlpack__(max_version=(1, 0), copy=True), 2)):
            t = Tensor(capsule)
            self.assertEqual(t.managed.flags, flags)
            t.free()
        self.assertTrue(a.__cuda_array_interface__["data"][1])

    def test_copies(self) -> None:
        a = self.shared.array
        t = Tensor(a.__dlpack__(copy=True, max_version=(1, 0)))
        self.assertNotEqual(t.pointer, a.ptr)
        self.assertEqual(t.managed.flags, 2)
        t.free()
        host = Tensor(a.__dlpack__(dl_device=(1, 0), max_version=(1, 0)))
        self.assertEqual((ctypes.c_float * 4).from_address(host.pointer)[:], [0.0, 1.0, 2.0, 3.0])
        host.free()
        refused: List[Dict[str, Any]] = [{"dl_device": (1, 0), "copy": False}, {"dl_device": (10, 0)}, {"stream": 0}]
        for wrong in refused:
            with self.assertRaises(BufferError):
                a.__dlpack__(**wrong)

    def test_the_array_interface(self) -> None:
        a = self.shared.array
        i = a.__cuda_array_interface__
        self.assertEqual((i["shape"], i["typestr"], i["data"], i["version"], i["strides"]), ((1000,), "<f4", (a.ptr, False), 3, None))
        self.assertEqual(a[3:3].__cuda_array_interface__["data"][0], 0)

    def test_every_element_type(self) -> None:
        for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64", "complex64", "complex128"):
            with self.subTest(name), cuvmm.empty(3, name) as m:
                t = Tensor(m.array.__dlpack__())
                self.assertEqual(t.managed.tensor.dtype.bits, 8 * m.array.itemsize)
                t.free()
                del t
        with self.assertRaises(cuvmm.ArgumentError):
            cuvmm.empty(3, "float128")

    def test_growing_keeps_address_and_values(self) -> None:
        before = self.shared.array.ptr
        self.shared.resize(2_000_000)
        self.assertEqual(self.shared.array.ptr, before)
        self.assertEqual(self.shared.array[:3].tolist(), [0.0, 1.0, 2.0])
        with self.assertRaises(cuvmm.CapacityError):
            self.shared.resize(3_000_000)
        far = self.shared.array
        self.shared.resize(10)
        with self.assertRaises(cuvmm.InUseError):
            self.shared.trim()
        del far
        self.assertGreater(self.shared.trim(), 0)

    def test_the_end_of_the_process(self) -> None:
        """A consumer that frees its tensor after the interpreter's atexit functions calls no Python."""
        code = """
            import atexit, sys
            sys.path.insert(0, %r)
            from tests.consumer import Tensor
            import cuvmm
            shared = cuvmm.empty(10)
            t = Tensor(shared.array.__dlpack__(max_version=(1, 0)))
            capsule = shared.array.__dlpack__()
            class Late:
                def __del__(self):
                    print("deleter", bool(t.managed.deleter), flush=True)
            sys.modules["late"] = Late()
        """ % str(environment()["PYTHONPATH"])
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment(), capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "deleter False\n", ""))

    def test_a_child_of_fork(self) -> None:
        """A child's use is an error, and its end leaves the parent's memory alone."""
        code = """
            import os, warnings, cuvmm
            warnings.simplefilter("ignore")  # newer versions warn of a fork beside threads
            shared = cuvmm.empty(10)
            a = shared.array
            pid = os.fork()
            if pid == 0:
                try:
                    a.tobytes()
                except cuvmm.ForkedError as e:
                    del a
                    os._exit(7)
                os._exit(1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(a.tobytes()))
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment(), capture_output=True, text=True, timeout=60)
        self.assertEqual((done.stdout, done.stderr), ("7 40\n", ""))


if __name__ == "__main__":
    unittest.main()
