"""GPU memory that other processes can map."""

from __future__ import annotations

import math
import os
import threading
from ctypes import c_void_p
from typing import Any, List, Optional, Sequence

from . import _driver, _memory
from ._descriptor import ELEMENTS, NUMBERS
from ._process import OfProcess
from ._replica import Chunk
from .array import Array, ElementType, Users, close_at_exit
from .errors import ArgumentError, CapacityError, ClosedError, InUseError, whole

_MOST_RESERVED = 1 << 60  # more than any device has addresses for


class Shared(OfProcess):
    """A growing array at an address fixed for life, in memory that other processes can map: see :func:`empty`.

    All methods are safe for use by any thread. The caller closes it, after it has deleted all arrays and tensors of it.
    """

    def __init__(self, kind: ElementType, r: _memory.Range, users: Users, length: int = 0, chunks: Sequence[Chunk] = (),
                 handles: Sequence[_memory.Exportable] = ()) -> None:
        self._device, self._kind = r.device, kind
        self._granularity = r.device.granularity(r.device.properties())
        self._lock = threading.RLock()
        self._users = users
        self._handles, self._chunks = list(handles), list(chunks)
        self._length = length
        self.holder: Optional[str] = None  # which publication uses it
        self._range: Optional[_memory.Range] = r

    def __repr__(self) -> str:
        return f"<cuvmm.Shared of {self._length} {self._kind.name} on device {self._device.ordinal}>"

    def __enter__(self) -> "Shared":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        close_at_exit(self.close, error)

    def __len__(self) -> int:
        return self._length

    @property
    def dtype(self) -> str:
        return self._kind.name

    @property
    def kind(self) -> ElementType:
        return self._kind

    @property
    def device(self) -> _driver.Device:
        return self._device

    @property
    def reserved(self) -> int:
        """The size of the address range, in bytes."""
        return self._open().size

    @property
    def array(self) -> Array:
        """The current elements, for PyTorch, CuPy and others, to read and write."""
        with self._lock:
            at = self._open().address
            return Array(self._device, at, self._length, self._kind, False, self._users, at, _no_order, self)

    def _open(self) -> _memory.Range:
        if self._range is None:
            raise ClosedError("the memory is closed")
        return self._range

    def _rounded(self, n: int) -> int:
        return -(-n // self._granularity) * self._granularity

    def resize(self, length: int) -> None:
        """Sets the length. It adds memory as needed, and keeps it if the array gets shorter. New elements are undefined."""
        self._check_process()
        length = whole(length, "elements")
        with self._lock:
            r = self._open()
            if length < 0:
                raise ArgumentError(f"{length} elements", "sizes are not negative")
            if length * self._kind.size > r.size:
                raise CapacityError(f"{length} elements of {self._kind.size} bytes in {r.size} bytes of addresses", "pass a larger reserve to empty")
            need = self._rounded(length * self._kind.size) - r.mapped
            if need > 0:
                h = _memory.create(self._device, need)
                try:
                    r.attach([h])
                except BaseException:
                    h.release()
                    raise
                self._handles.append(h)
                self._chunks.append(_chunk(need))
            self._length = length

    def chunks(self, length: int) -> "tuple[tuple[Chunk, ...], List[_memory.Exportable]]":
        """Returns the chunks that a length needs, and their handles, which this object owns."""
        with self._lock:
            self._open()
            at = n = 0
            while at < length * self._kind.size:
                at += self._chunks[n].size
                n += 1
            return tuple(self._chunks[:n]), self._handles[:n]

    def trim(self) -> int:
        """Frees the chunks behind the length, and returns their bytes. InUseError while arrays reach into them."""
        with self._lock:
            r = self._open()
            keep = len(self.chunks(self._length)[0])
            kept = sum(c.size for c in self._chunks[:keep])
            self._users.refuse("giving memory back", kept)
            freed = r.mapped - kept
            if freed and r.owned:
                self._device.synchronize()
                r.detach(keep)
                for h in self._handles[keep:]:
                    h.release()
                del self._handles[keep:], self._chunks[keep:]
            return freed if r.owned else 0

    def close(self) -> None:
        """Waits for all work of the device and frees the memory. Other processes keep what they have mapped. Idempotent.

        While it is published, or arrays or tensors of it are in use, it raises InUseError and changes nothing.
        """
        if self._forked:
            return
        with self._lock:
            if self._range is None:
                return
            if self.holder is not None:
                raise InUseError(f"the memory is {self.holder}", "withdraw the publication first")
            self._users.refuse("closing the memory")
            self._device.synchronize()
            self._range.close()
            for h in self._handles:
                h.release()
            self._range, self._length = None, 0
            self._handles, self._chunks = [], []


def _no_order(_: List[c_void_p]) -> None:
    """Orders nothing: the streams are this process's own."""


def empty(length: int, dtype: Any = "float32", device: int = 0, *, reserve: int = 0) -> Shared:
    """Makes a growing array of undefined elements, in memory that other processes can map, unlike that of PyTorch's allocator.

    ``dtype`` is a name of NumPy's ("float32"), or an object with such a name (torch.float32, numpy.dtype). ``reserve`` is the
    size to which it can grow, in bytes. ``torch.from_dlpack(shared.array)`` is a tensor of it.
    """
    name = str(getattr(dtype, "name", dtype)).split(".")[-1]
    if name not in NUMBERS:
        raise ArgumentError(f"elements of type {dtype!r}", "use one of " + ", ".join(sorted(NUMBERS)))
    length, reserve = whole(length, "elements"), whole(reserve, "bytes to reserve")
    number = NUMBERS[name]
    kind = ElementType(name, ELEMENTS[number].size, number)
    if length < 0 or reserve < 0 or max(reserve, length * kind.size) > _MOST_RESERVED:
        raise ArgumentError(f"{length} elements of {kind.size} bytes, and {reserve} bytes to reserve", f"pass sizes from 0 to {_MOST_RESERVED} bytes")
    dev = _driver.device(device)
    granularity = dev.granularity(dev.properties())
    size = -(-max(reserve, length * kind.size, 1) // granularity) * granularity
    shared = Shared(kind, _memory.Range(dev, size, granularity, _driver.READ_WRITE), Users())
    try:
        shared.resize(length)
    except BaseException:
        shared.close()
        raise
    return shared


def export(tensor: Any) -> Shared:
    """Makes memory of another allocator (a tensor of PyTorch, an array of CuPy) available to :meth:`Server.publish`, without a copy.

    The driver must be able to export the memory. That needs an allocator that creates shareable handles, such as
    ``cuvmm.torch.pool()`` or PyTorch's expandable segments, and not cudaMalloc (NotSupported). Followers map whole
    allocations, so the tensor must be contiguous and begin one, and they can see everything else in it. The result has
    the tensor's elements in one row, and a fixed size. It keeps the tensor alive until it is closed.
    """
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if not isinstance(interface, dict):
        raise ArgumentError(f"{type(tensor).__name__} is not an array on a GPU", "pass a tensor of PyTorch on a GPU, an array of CuPy, or what has __cuda_array_interface__")
    number = next((n for n, e in ELEMENTS.items() if e.typestr == interface["typestr"]), None)
    if number is None:
        raise ArgumentError(f"elements of type {interface['typestr']}, which publications do not have", "view it as integers of the same size: tensor.view(torch.int16)")
    kind = ElementType(ELEMENTS[number].name, ELEMENTS[number].size, number)
    length = math.prod(interface["shape"])
    address = int(interface["data"][0])
    if length == 0 or not _contiguous(interface["shape"], interface.get("strides"), kind.size):
        raise ArgumentError(f"an array of shape {tuple(interface['shape'])} and strides {interface.get('strides')}", "pass one that is not empty, and contiguous")
    dev, handles = _memory.chunks_at(address, length * kind.size)
    sizes = [h.size for h in handles]
    return Shared(kind, _memory.Foreign(dev, address, sizes, tensor), Users(), length, [_chunk(size) for size in sizes], handles)


def _contiguous(shape: Sequence[int], strides: Optional[Sequence[int]], size: int) -> bool:
    for n, stride in zip(reversed(shape), reversed(strides or ())):
        if n != 1 and stride != size:
            return False
        size *= n
    return True


def _chunk(size: int) -> Chunk:
    return Chunk(int.from_bytes(os.urandom(8), "little") or 1, size)
