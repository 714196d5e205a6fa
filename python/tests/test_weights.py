"""Files of tensors, loaded into one piece of memory, and found by name in memory that is followed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import random
import struct
import types
import unittest.mock
from typing import Any, Callable, Dict, List, Sequence, Tuple

import cuvmm
from cuvmm import _crc32c
from cuvmm._layout import placed
from cuvmm._manifest import parse
from cuvmm._safetensors import DTYPES
from cuvmm.weights import _Loading

from .consumer import Tensor as Consumer
from .support import DriverTest
from .test_sharing import child

_SIZES = {"F64": 8, "I64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class Given:
    """A tensor that a test writes to a file."""

    def __init__(self, name: str, dtype: str, *shape: int) -> None:
        self.name, self.dtype, self.shape, self.size = name, dtype, shape, _SIZES.get(dtype, 1)
        n = self.size
        for d in shape:
            n *= d
        self.data = random.Random(name).randbytes(n)

    def block(self, bounds: Sequence[Tuple[int, int]]) -> bytes:
        """The bytes of a block, by the definition."""
        def cut(data: bytes, dim: int) -> bytes:
            if dim == len(self.shape):
                return data
            stride = len(data) // self.shape[dim] if self.shape[dim] else 0
            return b"".join(cut(data[i * stride:(i + 1) * stride], dim + 1) for i in range(*bounds[dim]))
        return cut(self.data, 0)


def file_of(given: Sequence[Given], metadata: Any = None) -> bytes:
    header: Dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for g in given:
        header[g.name] = {"dtype": g.dtype, "shape": list(g.shape), "data_offsets": [len(data), len(data) + len(g.data)]}
        data += g.data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def assorted() -> List[Given]:
    return [Given("embed", "BF16", 500, 777), Given("scale", "F32"), Given("norm", "F32", 4097), Given("empty", "F16", 0, 7), Given("mask", "BOOL", 3, 5, 7),
            Given("codes", "F8_E4M3", 65537), Given("sign é", "F8_E5M2", 11), Given("ids", "I64", 3, 2), Given("big", "F16", 3, 1001, 1003), Given("wave", "C64", 5)]


READER = """
    import cuvmm, sys
    with cuvmm.connect(sys.argv[1]) as client, client.follow("policy", expect=sys.argv[2].encode()) as policy:
        weights = policy.tensors
        print("ready", flush=True)
        seen, places = -1, set()
        while seen < 39:
            generation = policy.next(timeout=60)
            read = {name: weights[name].tobytes() for name in weights}
            places.add(weights["layer.0.w"].ptr)
            assert policy.intact(generation)  # the publisher excludes nobody
            (value,) = {b for data in read.values() for b in (min(data), max(data))}
            assert value > seen, (value, seen)
            seen = value
            policy.release()
        print("whole", "once" if len(places) == 1 else places, seen, flush=True)
"""


def end_child(p: Any) -> None:
    p.kill()
    p.wait()
    for f in (p.stdout, p.stdin):
        f.close()


class Loads(DriverTest):
    def write(self, data: bytes, name: str = "model.safetensors") -> str:
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
        return path

    def holds(self, weights: Any, given: Sequence[Given]) -> None:
        self.assertEqual(set(weights), {g.name for g in given})
        for g in given:
            t = weights[g.name]
            self.assertEqual((t.dtype, t.shape, t.nbytes), (DTYPES[g.dtype], g.shape, len(g.data)))
            self.assertTrue(t.tobytes() == g.data, g.name)
            self.assertEqual(t.ptr % 256, 0)

    def test_all_tensors(self) -> None:
        given = assorted()
        path = self.write(file_of(given, {"format": "pt"}))
        for threads in (0, 1, 3):
            with cuvmm.load_file(path, threads=threads) as weights:
                self.assertEqual(weights.metadata, {"format": "pt"})
                self.assertEqual(len(weights), len(given))
                self.holds(weights, given)
                gc.collect()

    @unittest.skipUnless(importlib.util.find_spec("safetensors") and importlib.util.find_spec("numpy"), "the packages safetensors and numpy are not installed")
    def test_files_of_the_package_safetensors(self) -> None:
        numpy: Any = importlib.import_module("numpy")
        package: Any = importlib.import_module("safetensors.numpy")
        names = {"F16": "float16", "F32": "float32", "I64": "int64", "BOOL": "bool"}  # of those that NumPy has
        given = [g for g in assorted() if g.dtype in names]
        path = os.path.join(self.folder, "theirs.safetensors")
        package.save_file({g.name: numpy.ndarray(g.shape, names[g.dtype], bytearray(g.data) or None) for g in given}, path, {"format": "pt"})
        with cuvmm.load_file(path) as weights:
            self.assertEqual(weights.metadata, {"format": "pt"})
            self.holds(weights, given)
            self.assertEqual({n: x.tobytes() for n, x in package.load_file(path).items()}, {n: t.tobytes() for n, t in weights.items()})
            gc.collect()

    def test_digests(self) -> None:
        """Whole tensors have the digests that their file declares, in however many pieces they are read."""
        given = [Given("small", "U8", 9), Given("large", "F32", 3, 400_001), Given("empty", "F16", 0)]
        given[0].data = b"123456789"
        digests = [0xE3069283, _crc32c.in_python(memoryview(given[1].data)), 0]

        def write(declared: str) -> str:
            return self.write(file_of(given, {"cuvmm.crc32c": declared, "format": "pt"}))

        path = write("".join(f"{d:08x}" for d in digests))
        with cuvmm.load_file(path) as weights:
            self.assertEqual(weights.metadata, {"format": "pt"})
            self.holds(weights, given)
            gc.collect()
        flip(path, os.path.getsize(path) - 5)
        with self.assertRaises(cuvmm.DigestError) as raised:
            cuvmm.load_file(path)
        self.assertRegex(str(raised.exception), f'^"{path}", tensor "large": crc32c:[0-9a-f]{{8}}, where the file declares crc32c:{digests[1]:08x} \\(fetch the file again')
        uncompared: List[Dict[str, Any]] = [{"digests": False}, {"parts": {"small": ..., "large": slice(0, 2)}}, {"parts": {"large": cuvmm.Shard(0, 2, 3)}}]
        for options in uncompared:
            cuvmm.load_file(path, **options).close()
        with self.assertRaises(cuvmm.DigestError):
            cuvmm.load_file(path, parts={"large": (slice(0, 3), slice(None))})
        for bad in ("", "e3069283", "E3069283" * 3, "0x069283" * 3, "e3069283" * 4):
            with self.assertRaises(cuvmm.FormatError):
                cuvmm.load_file(write(bad))

    def test_sums(self) -> None:
        data = memoryview(random.Random(1).randbytes(200_000))
        sums = [0]
        crc = 0xFFFFFFFF  # by the definition
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
            sums.append(crc ^ 0xFFFFFFFF)
        for n in (0, 1, 3, 4, 6776, 6777, 6778, 6779, 65535, 65536, 65537, 72_313, 72_314, len(data)):
            self.assertEqual(_crc32c.in_python(data[:n]), sums[n], n)
            self.assertEqual(_crc32c.combined(sums[n], _crc32c.in_python(data[n:]), len(data) - n), sums[-1], n)

    def test_capsules(self) -> None:
        given = assorted()
        with cuvmm.load_file(self.write(file_of(given))) as weights:
            for g, code, bits in ((given[0], 4, 16), (given[8], 2, 16), (given[5], 10, 8), (given[6], 12, 8), (given[2], 2, 32), (given[1], 2, 32)):
                c = Consumer(weights[g.name].__dlpack__(max_version=(1, 0)))
                kind = c.managed.tensor.dtype
                self.assertEqual((c.shape, kind.code, kind.bits, kind.lanes), (g.shape, code, bits, 1))
                self.assertEqual(c.pointer, weights[g.name].ptr)
                with self.assertRaises(cuvmm.InUseError):
                    weights.close()
                c.free()
            self.assertEqual(weights["norm"].__cuda_array_interface__["shape"], (4097,))
            self.assertFalse(hasattr(weights["embed"], "__cuda_array_interface__"))
            with self.assertRaises(cuvmm.ArgumentError):
                weights["norm"][0:1]
            self.assertEqual(len(weights["big"]), 3)
            with self.assertRaises(TypeError):
                len(weights["scale"])
            gc.collect()

    def test_parts(self) -> None:
        given = [Given("a", "F32", 6, 10, 14), Given("b", "BF16", 90, 120), Given("c", "F16", 2, 3, 4, 5, 6), Given("d", "F64")]
        path = self.write(file_of(given))
        r = random.Random(7)
        for _ in range(20):
            parts: Dict[str, Any] = {}
            want: Dict[str, bytes] = {}
            for g in r.sample(given, r.randrange(1, 5)):
                bounds = [_bounds(r, n) for n in g.shape]
                parts[g.name] = tuple(slice(*b) for b in bounds) if bounds else ...
                want[g.name] = g.block(bounds)
            with cuvmm.load_file(path, parts=parts) as weights:
                self.assertEqual(set(weights), set(want))
                for name, data in want.items():
                    self.assertTrue(weights[name].tobytes() == data, parts)
                gc.collect()
        for dim, ranks in ((0, 3), (1, 5), (2, 7)):
            for rank in range(ranks):
                with cuvmm.load_file(path, parts={"a": cuvmm.Shard(dim, rank, ranks), "b": slice(3, None)}) as weights:
                    bounds = [(0, n) for n in given[0].shape]
                    n = given[0].shape[dim] // ranks
                    bounds[dim] = (rank * n, rank * n + n)
                    self.assertTrue(weights["a"].tobytes() == given[0].block(bounds))
                    self.assertEqual(weights["b"].shape, (87, 120))
                    gc.collect()
        wrong: List[Dict[str, Any]] = [{"a": cuvmm.Shard(0, 0, 4)}, {"a": cuvmm.Shard(3, 0, 1)}, {"a": cuvmm.Shard(0, 6, 6)}, {"d": slice(0, 1)}, {"b": slice(0, 9, 2)}, {"b": 3}]
        for bad in wrong:
            with self.assertRaises(cuvmm.ArgumentError):
                cuvmm.load_file(path, parts=bad)
        with self.assertRaises(cuvmm.UnknownError):
            cuvmm.load_file(path, parts={"x": ...})

    def test_published_memory(self) -> None:
        """Memory that is published is loaded anew, and a follower finds the tensors by name."""
        given, path = assorted(), self.write(file_of(assorted()))
        memory = cuvmm.empty(0, "uint8", reserve=64 << 20)
        with cuvmm.Server(self.path()) as server:
            publication = server.publish("weights", memory)
            weights = cuvmm.load_file(path, into=memory)
            publication.announce()
            with cuvmm.connect(self.path()) as client, client.follow("weights") as follower:
                follower.next()
                found = cuvmm.tensors(follower.array, weights.manifest())
                self.holds(found, given)
                self.assertTrue(found["norm"].readonly)
                with self.assertRaises(BufferError):
                    found["norm"].__dlpack__()
                c = Consumer(found["norm"].allow_readonly().__dlpack__(max_version=(1, 0)))
                self.assertEqual((c.shape, c.pointer), ((4097,), found["norm"].ptr))
                c.free()
                cuvmm.load_file(path, into=memory)
                publication.announce()
                follower.next()
                self.holds(found, given)
                del found
                gc.collect()
            publication.withdraw()
        weights.close()  # which leaves the caller's memory alone
        memory.close()
        with self.assertRaises(cuvmm.ArgumentError):
            with cuvmm.empty(1, "float32") as other:
                cuvmm.load_file(path, into=other)

    def test_layouts(self) -> None:
        """Tensors that share memory share it in their place, and keep their strides if they leave no gaps. The tensors stand in for PyTorch's."""
        def of(address: int, shape: Tuple[int, ...], strides: Tuple[int, ...], dtype: str = "torch.float32") -> Any:
            return types.SimpleNamespace(dtype=dtype, shape=shape, stride=lambda: strides, data_ptr=lambda: address)

        m = placed({"embed": of(0x1000, (16, 8), (8, 1)), "turned": of(0x9000, (3, 5), (1, 3)), "row": of(0x1020, (8,), (1,)), "head": of(0x1000, (8, 16), (1, 8)), "gaps": of(0x5000, (4, 2), (100, 1)),
                    "spread": of(0x7000, (4, 2), (0, 1)), "beside": of(0x1200, (1,), (1,), "torch.bfloat16"), "empty": of(0, (0, 4), (4, 1)), "one": of(0x8000, (1, 1), (9, 7)), "plain": ("int8", (3,))})
        self.assertEqual({p.name: (p.offset, p.strides, p.alias) for p in m.tensors}, {
            "embed": (0, (), 1), "row": (32, (), 1), "head": (0, (1, 8), 1), "turned": (512, (1, 3), 0), "gaps": (768, (), 0), "spread": (1024, (), 0), "beside": (1280, (), 0),
            "empty": (1536, (), 0), "one": (1536, (), 0), "plain": (1792, (), 0)})
        self.assertEqual(parse(m.text()).identity(), m.identity())
        module: Any = types.SimpleNamespace(state_dict=lambda: {"w": ("float32", (2,)), "mean": ("float32", (2,))}, named_parameters=lambda remove_duplicate: [("w", None)])
        with cuvmm.Weights.of(module) as weights:
            self.assertEqual([(name, t.kind) for name, t in weights.items()], [("w", "parameter"), ("mean", "buffer")])
            self.assertEqual(weights.manifest(), cuvmm.manifest_of(module))
        for bad in ({"": ("int8", (1,))}, {"x": ("float31", (1,))}, {"x": ("int8", (-1,))}):
            with self.assertRaises(cuvmm.ArgumentError):
                cuvmm.Weights.of(bad)

    def test_updates_by_pytorch(self) -> None:
        """Tensors of PyTorch are copied by PyTorch, for which a stand-in notes what it is asked."""
        copied: List[Any] = []

        class Stand:
            dtype, shape = "torch.bfloat16", (2, 3)

            def detach(self) -> "Stand":
                return self

        torch: Any = types.SimpleNamespace(Tensor=Stand, from_dlpack=lambda to: types.SimpleNamespace(copy_=lambda v: copied.append((to.ptr, to.shape, v))))
        with unittest.mock.patch.dict("sys.modules", torch=torch):
            value = Stand()
            with cuvmm.Weights.of({"w": value}) as weights:
                self.assertEqual(copied, [(weights.memory.array.ptr, (2, 3), value)])
                value.shape = (3, 2)
                with self.assertRaises(cuvmm.ArgumentError):
                    weights.update({"w": value})
                with self.assertRaises(cuvmm.UnknownError):
                    weights.update({"v": value})
                self.assertEqual(len(copied), 1)

    def test_rewritten_under_three_readers(self) -> None:
        """Three processes follow tensors by name, in one mapping each, while they are updated in place: each read is whole."""
        with cuvmm.Weights.of({"layer.0.w": ("float32", (300, 100)), "layer.1.w": ("bfloat16", (70_001,))}) as weights, cuvmm.Server(self.path()) as server:
            publication = server.publish("policy", weights)
            readers = [child(READER, self.path(), weights.manifest().decode()) for _ in range(3)]
            for r in readers:
                self.addCleanup(end_child, r)
                assert r.stdout is not None
                self.assertEqual(r.stdout.readline(), "ready\n")
            for step in range(40):
                with contextlib.ExitStack() as stack:
                    if step:
                        stack.enter_context(publication.rewrite(60))
                    weights.update({name: bytes([step]) * t.nbytes for name, t in weights.items()})
                    publication.announce()
            for r in readers:
                assert r.stdout is not None
                self.assertEqual(r.stdout.readline(), "whole once 39\n")
                self.assertEqual(r.wait(60), 0)
            publication.withdraw()

    def test_manifests_are_checked(self) -> None:
        with cuvmm.empty(4096, "uint8") as memory:
            good = {"name": "x", "element": "float32", "shape": [8], "offset": 0}
            def of(*tensors: Any, size: Any = 4096) -> bytes:
                return json.dumps({"bytes": size, "tensors": list(tensors)}).encode()
            self.assertEqual(cuvmm.tensors(memory.array, of(good, dict(good, name="y", offset=32, digest="z")))["y"].shape, (8,))
            self.assertEqual(cuvmm.tensors(memory.array, b'{"bytes":4096,"tensors":null}'), {})
            tied = dict(good, name="y", shape=[2, 4], strides=[1, 2], alias=1, kind="parameter")
            y = cuvmm.tensors(memory.array, of(dict(good, alias=1), tied))["y"]
            self.assertEqual((y.shape, y.strides, y.nbytes, y.kind, y.ptr), ((2, 4), (1, 2), 32, "parameter", memory.array.ptr))
            c = Consumer(y.__dlpack__(max_version=(1, 0)))
            self.assertEqual((c.shape, c.strides), ((2, 4), (1, 2)))
            self.assertEqual(y.__cuda_array_interface__["strides"], (4, 8))
            c.free()
            del y
            for bad in (b"", b"\xff", b"[" * 100000, b"[]", b"{}", b'{"bytes":4096,"tensors":5}', of(good, size=4095), of(good, size="4096"), of(5), of({}), of(good, good), of(dict(good, name="")),
                        of(dict(good, element="float31")), of(dict(good, element=[])), of(dict(good, shape=[1025])), of(dict(good, shape=[-1])), of(dict(good, shape=[True])),
                        of(dict(good, shape=[2.0])), of(dict(good, offset=-1)), of(dict(good, offset=4065)), of(dict(good, more=1)), of(good, dict(good, name="y", offset=31)),
                        of(dict(good, offset=1), dict(good, name="y", alias=1)), of(dict(good, alias=1), dict(tied, alias=2)), of(dict(good, alias=1), dict(good, name="y")), of(dict(good, strides=[1, 1])),
                        of(dict(good, strides=[147])), of(dict(good, strides=[-1])), of(dict(good, kind=1)), of(dict(good, kind="x" * 65)), of(dict(good, alias=-1)), of(dict(good, alias=1 << 63)),
                        of(dict(good, name="x" * 4097)), of(dict(good, name="\ud800")), of(dict(good, shape=[1] * 65)), of(dict(good, shape=[0, 1 << 63])), of(size=-1), b'{"bytes":4096,"tensors":[' + b"{}," * (1 << 20) + b"{}]}"):
                with self.assertRaises(cuvmm.FormatError, msg=str(bad[:80])):
                    cuvmm.tensors(memory.array, bad)
            gc.collect()
        with cuvmm.empty(4, "float32") as memory, self.assertRaises(cuvmm.ArgumentError):
            cuvmm.tensors(memory.array, of())

    def test_headers_are_checked(self) -> None:
        x = '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        y = '"y":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
        for header, data in ((x, 7), (x, 9), (x, 0), ("", 0), ("[]", 0), (" " + x, 8), (x[:30], 8), (x + "{", 8), (x.replace("[2]", "[-2]"), 8), (x.replace("[2]", "[2.0]"), 8),
                             (x.replace("[2]", "[true,2]"), 8), (x.replace("[2]", "2"), 8), (x.replace("F32", "F31"), 8), (x.replace('"F32"', "32"), 8), (x.replace('"x"', '""'), 8),
                             (x.replace('"x"', '"\\ud800"'), 8), (x.replace('"x"', '"' + "x" * 4097 + '"'), 8), (x.replace("[0,8]", "[8]"), 8), (x.replace("[0,8]", "[4,12]"), 12),
                             (x.replace("[0,8]", "[8,0]"), 8), (x.replace("[2]", "[2" + ",1" * 64 + "]"), 8), (x.replace('"shape":[2],', ""), 8), (x.replace('"shape"', '"more":1,"shape"'), 8),
                             (x.replace('"shape":[2]', '"shape":[2],"shape":[2]'), 8), (x[:-1] + "," + x[1:], 8), (x[:-1] + "," + y + "}", 8), (x.replace("[2]", "[4611686018427387905,2]"), 8),
                             (x.replace("[2]", "[18446744073709551618]"), 8), ('{"__metadata__":{"a":1}}', 0), ('{"__metadata__":[]}', 0), ('{"__metadata__":' + "[" * 100000, 0), ("{\"\xff\":1}", 0)):
            raw = header.encode("latin-1")
            path = self.write(struct.pack("<Q", len(raw)) + raw + bytes(data), "bad")
            with self.assertRaises(cuvmm.FormatError, msg=header[:80]) as raised:
                cuvmm.load_file(path)
            self.assertIn(path, str(raised.exception))
        for whole in (b"", bytes(7), struct.pack("<Q", 9), struct.pack("<Q", 100_000_001), struct.pack("<Q", 1 << 63)):
            with self.assertRaises(cuvmm.FormatError):
                cuvmm.load_file(self.write(whole, "bad"))
        os.mkfifo(self.path("pipe"))
        with self.assertRaises(cuvmm.FormatError):
            cuvmm.load_file(self.path("pipe"))
        with self.assertRaises(FileNotFoundError):
            cuvmm.load_file(self.path("absent"))

    def test_folders(self) -> None:
        a, b, c = Given("a", "F32", 100), Given("b", "BF16", 33, 3), Given("c", "U8", 5)
        index = {"metadata": {"total_size": 1}, "weight_map": {"a": "1", "b": "2", "c": "1"}}

        def folder(name: str, about: Any) -> str:
            self.write(file_of([c, a], {"k": "1"}), f"{name}/1")
            self.write(file_of([b], {"k": "2"}), f"{name}/2")
            if about is not None:
                self.write(json.dumps(about).encode(), f"{name}/model.safetensors.index.json")
            return os.path.join(self.folder, name)

        with cuvmm.load_file(folder("good", index)) as weights:
            self.holds(weights, [a, b, c])
            self.assertEqual(weights.metadata, {"k": "1"})
            gc.collect()
        wrong: List[Any] = [None, [], {}, {"weight_map": {}}, {"weight_map": {"a": "../1"}}, {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": ".."}},
                                 {"weight_map": {"a": ""}}, {"weight_map": {"a": 1}}, {"weight_map": {"b": "1"}}, {"weight_map": {"a": "1\0"}}]
        for i, bad in enumerate(wrong):
            with self.assertRaises(cuvmm.FormatError, msg=str(bad)):
                cuvmm.load_file(folder(f"bad{i}", bad))
        with self.assertRaises(FileNotFoundError):
            cuvmm.load_file(folder("missing", {"weight_map": {"a": "3"}}))
        self.write(file_of([a]), "single/model.safetensors")
        with cuvmm.load_file(self.path("single")) as weights:
            self.holds(weights, [a])
            gc.collect()

    def test_files_that_change(self) -> None:
        path = self.write(b"")
        changes: List[Callable[[], None]] = [lambda: os.truncate(path, 200), lambda: os.utime(path, (1, 1)), lambda: os.truncate(path, 10000)]
        for change in changes:
            self.write(file_of([Given("a", "F32", 100)]))
            with unittest.mock.patch.object(_Loading, "run", _after(change)):
                with self.assertRaises(cuvmm.ChangedError):
                    cuvmm.load_file(path)


def flip(path: str, at: int) -> None:
    """Changes a bit of a file, of which its time does not tell."""
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 4]))


def _bounds(r: random.Random, n: int) -> Tuple[int, int]:
    i, j = r.randrange(n + 1), r.randrange(n + 1)
    return min(i, j), max(i, j)


def _after(change: Callable[[], None]) -> Any:
    """Loading, with a change before it begins."""
    run = _Loading.run

    def changed(self: _Loading, threads: int) -> None:
        change()
        run(self, threads)
    return changed
