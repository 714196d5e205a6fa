"""The safetensors format: headers, the index of a folder, and the blocks of tensors in their files.

A file may come from anywhere, so all of a header is checked before memory is touched, by the same rules as in Go.
"""

from __future__ import annotations

import json
import math
import os
import stat
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ._descriptor import ELEMENTS, NUMBERS, Element
from .errors import ChangedError, DigestError, FormatError, counted, quoted

_MAX_HEADER = 100_000_000
_MAX_NAME, _MAX_DIMS = 4096, 64
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_AGAIN = "fetch the file again, or have it written anew"
_DIGESTS = "cuvmm.crc32c"  # the metadata with eight hexadecimal digits for each tensor, in the order of their places

#: The format's names of element types, by the library's.
DTYPES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
          "F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64"}


class File:
    """An open file, and its state when it was opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            s = os.fstat(self.fd)
            if not stat.S_ISREG(s.st_mode):
                raise FormatError(f"{quoted(path)} is not a regular file", "pass a file, or a folder with files")
            self.state = (s.st_size, s.st_mtime_ns)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return self.state[0]

    def read(self, n: int, at: int) -> bytes:
        data = bytearray(n)
        self.read_into(memoryview(data), at)
        return bytes(data)

    def read_into(self, to: memoryview, at: int) -> None:
        while to:
            n = os.preadv(self.fd, [to], at)
            if n == 0:
                raise ChangedError(f"{quoted(self.path)} is shorter than it was", "load it again, once nothing writes the file")
            to, at = to[n:], at + n

    def check(self) -> None:
        """Raises an error if the file was written since it was opened."""
        s = os.fstat(self.fd)
        if (s.st_size, s.st_mtime_ns) != self.state:
            raise ChangedError(f"{quoted(self.path)} was written while it was loaded", "load it again, once nothing writes the file")

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Stored(NamedTuple):
    """A tensor in a file, from byte ``offset`` on."""

    name: str
    number: int
    shape: Tuple[int, ...]
    file: File
    offset: int
    digest: Optional[int] = None  # the CRC-32C that the file declares

    @property
    def element(self) -> Element:
        return ELEMENTS[self.number]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element.size

    def check(self, digest: int) -> None:
        """Raises an error if the bytes that were read do not have the digest that the file declares."""
        if self.digest not in (None, digest):
            raise DigestError(f"{quoted(self.file.path)}, tensor {quoted(self.name)}: crc32c:{digest:08x}, where the file declares crc32c:{self.digest:08x}", _AGAIN)


def _bad(file: File, what: str, tensor: str = "") -> FormatError:
    return FormatError(f"{quoted(file.path)}{', tensor ' + quoted(tensor) if tensor else ''}: {what}", _AGAIN)


class _Twice(Exception):
    pass


def _once(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise _Twice("a key that occurs twice")
    return keys


def _parse(file: File, text: bytes) -> Any:
    try:
        return json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError, _Twice) as e:
        raise _bad(file, f"{e}") from None


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def read_header(file: File) -> Tuple[Dict[str, str], List[Stored]]:
    """Returns the metadata and the tensors, in the order of their places."""
    if file.size < 8:
        raise _bad(file, f"{file.size} bytes, which is less than the length of a header")
    n = int.from_bytes(file.read(8, 0), "little")
    if n > _MAX_HEADER:
        raise _bad(file, f"a header of {n} bytes, where the format allows {_MAX_HEADER}")
    if n > file.size - 8:
        raise _bad(file, f"a header of {n} bytes in a file of {file.size}")
    text = file.read(n, 8)
    if not text.startswith(b"{"):
        raise _bad(file, "a header that does not begin with {")
    header = _parse(file, text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(file, "metadata that are not texts")
    found = sorted((_tensor(file, name, about) for name, about in header.items()), key=lambda t: (t.offset, t.nbytes))
    start, end, placed = n + 8, 0, []
    for t in found:
        if t.offset != end:
            raise _bad(file, f"it begins at {t.offset} of the data, and the tensor before it ends at {end}", t.name)
        end += t.nbytes
        placed.append(t._replace(offset=t.offset + start))
    if end != file.size - start:
        raise _bad(file, f"{file.size - start} bytes of data for tensors of {end}: the file was cut short, or has more")
    return metadata, _declared(file, metadata.pop(_DIGESTS, None), placed)


def _declared(file: File, digests: Optional[str], tensors: List[Stored]) -> List[Stored]:
    """Returns the tensors with the digests that this library's files declare."""
    if digests is None:
        return tensors
    if len(digests) != 8 * len(tensors) or digests.strip("0123456789abcdef"):
        raise _bad(file, f"metadata {_DIGESTS} of {counted(len(digests), 'character')} for {counted(len(tensors), 'tensor')}")
    return [t._replace(digest=int(digests[8 * i:8 * i + 8], 16)) for i, t in enumerate(tensors)]


def _tensor(file: File, name: str, about: Any) -> Stored:
    """Checks what a header says of a tensor. The offset of what it returns counts from the start of the data."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        length = 0
    if not 0 < length <= _MAX_NAME:
        raise _bad(file, f"a tensor with a name of {length} bytes of UTF-8, where 1 to {_MAX_NAME} are allowed")
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(file, "it needs dtype, shape and data_offsets, and nothing else", name)
    dtype, shape, place = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad(file, f"elements of type {quoted(str(dtype))}, which this library has not", name)
    if not _whole(shape) or len(shape) > _MAX_DIMS:
        raise _bad(file, f"a shape that is not of at most {_MAX_DIMS} integers from 0 up", name)
    if not _whole(place) or len(place) != 2:
        raise _bad(file, "data_offsets that are no begin and end", name)
    t = Stored(name, NUMBERS[DTYPES[dtype]], tuple(shape), file, place[0])
    if t.nbytes != place[1] - place[0]:
        raise _bad(file, f"{place[1] - place[0]} bytes for a shape of {t.shape} and elements of type {dtype}", name)
    return t


class Model:
    """The tensors of a file or a folder. Close it."""

    def __init__(self, path: str) -> None:
        self.files: List[File] = []
        self.metadata: Dict[str, str] = {}
        self.tensors: Dict[str, Stored] = {}
        try:
            if os.path.isdir(path):
                self._folder(path)
            else:
                self._add(path, None)
        except BaseException:
            self.close()
            raise

    def _add(self, path: str, names: Any) -> None:
        file = File(path)
        self.files.append(file)
        metadata, tensors = read_header(file)
        self.metadata = {**metadata, **self.metadata}
        mine = {t.name: t for t in tensors if names is None or t.name in names}
        for name in names or ():
            if name not in mine:
                raise _bad(file, f"the index {_INDEX} places it in this file, which lacks it", name)
        self.tensors.update(mine)

    def _folder(self, folder: str) -> None:
        index, single = os.path.join(folder, _INDEX), os.path.join(folder, _SINGLE)
        if not os.path.exists(index):
            if not os.path.exists(single):
                raise FormatError(f"{quoted(folder)} has neither {_INDEX} nor {_SINGLE}", "fetch the index too, or load a file by its name")
            return self._add(single, None)
        file = File(index)
        try:
            if file.size > _MAX_HEADER:
                raise _bad(file, f"an index of {file.size} bytes, where {_MAX_HEADER} are allowed")
            about = _parse(file, file.read(file.size, 0))
            places = about.get("weight_map") if isinstance(about, dict) else None
            if not isinstance(places, dict) or not places:
                raise _bad(file, "no weight_map, or an empty one")
            by_file: Dict[str, List[str]] = {}
            for name, where in places.items():
                if not isinstance(where, str) or where in ("", ".", "..") or "\0" in where or os.path.basename(where) != where:
                    raise _bad(file, f"it is in the file {quoted(str(where))}, which is not a name in the folder", name)
                by_file.setdefault(where, []).append(name)
        finally:
            file.close()
        for where in sorted(by_file):
            self._add(os.path.join(folder, where), set(by_file[where]))

    def check(self) -> None:
        for f in self.files:
            f.check()

    def close(self) -> None:
        for f in self.files:
            f.close()


class Block(NamedTuple):
    """A block of a tensor: runs of ``run`` bytes, of which there are ``counts`` at ``strides`` in the outer dimensions."""

    file: File
    offset: int
    run: int
    counts: Tuple[int, ...]
    strides: Tuple[int, ...]
    shape: Tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(t: Stored, bounds: List[Tuple[int, int]]) -> "Block":
        shape = tuple(to - start for start, to in bounds)
        stride, offset, dim = t.element.size, t.offset, len(bounds) - 1
        nbytes = math.prod(shape) * stride
        while dim >= 0 and bounds[dim] == (0, t.shape[dim]):
            stride *= t.shape[dim]
            dim -= 1
        run = stride
        counts: List[int] = []
        strides: List[int] = []
        if dim >= 0:
            run *= shape[dim]
            offset += stride * bounds[dim][0]
            stride *= t.shape[dim]
        for dim in range(dim - 1, -1, -1):
            counts.insert(0, shape[dim])
            strides.insert(0, stride)
            offset += stride * bounds[dim][0]
            stride *= t.shape[dim]
        return Block(t.file, offset, run, tuple(counts), tuple(strides), shape, nbytes)

    def runs(self, at: int, n: int) -> Iterator[Tuple[int, int]]:
        """Yields the places in the file of n bytes of the block, from byte at on, and their lengths."""
        while n > 0:
            i, within = divmod(at, self.run)
            part, offset = min(self.run - within, n), self.offset + within
            for count, stride in zip(reversed(self.counts), reversed(self.strides)):
                i, k = divmod(i, count)
                offset += k * stride
            yield offset, part
            at, n = at + part, n - part
