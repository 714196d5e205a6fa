"""GPU memory that other processes can map."""

from __future__ import annotations

import math
import os
import threading
from ctypes import c_void_p
from typing import Any, List, NamedTuple, Optional, Sequence, TypeVar

from . import _driver, _memory
from ._descriptor import ELEMENTS, NUMBERS, element_name
from ._process import OfProcess, State
from ._replica import Chunk
from ._undo import Undo
from .array import Array, ElementType, Users, close_at_exit
from .errors import ArgumentError, CapacityError, ClosedError, InUseError, counted, whole

S = TypeVar("S", bound="Shared")

_MOST_RESERVED = 1 << 60  # more than any device has addresses for


class _Piece(NamedTuple):
    """A chunk, and the handle from which it is exported."""

    chunk: Chunk
    handle: _memory.Exportable


class Shared(OfProcess):
    """A growing array at an address fixed for life, in memory that other processes can map: see :func:`empty`.

    All methods are safe for use by any thread. The caller closes it, after it has deleted all arrays and tensors of it.
    """

    #: What ends its publication, for remedies.
    to_end = "withdraw the publication"

    def __init__(self, kind: ElementType, dev: _driver.Device, users: Users) -> None:
        self._device, self._kind, self._users = dev, kind, users
        self._granularity = dev.granularity(dev.properties())
        self._lock = threading.RLock()
        self._undo = Undo()  # the range, and every handle until it is released
        self._range: _memory.Range
        self._pieces: List[_Piece] = []  # the chunks of the range
        self._length = 0
        self._publisher: Any = None  # the publication that shows it
        self._shown = 0  # pieces that a publication may show
        self._state = State.OPEN

    def __repr__(self) -> str:
        return f"<cuvmm.{type(self).__name__} of {self._length} {self._kind.name} on device {self._device.ordinal}>"

    def __enter__(self: S) -> S:
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
        self._check()
        return self._range.size

    @property
    def array(self) -> Array:
        """The current elements, for PyTorch, CuPy and others, to read and write."""
        self._check_process()
        with self._lock:
            self._check()
            at = self._range.address
            return Array(self._device, at, self._length, self._kind, False, self._users, at, _no_order, self)

    def _check(self) -> None:
        if self._state is not State.OPEN:
            raise ClosedError("the memory is closed")

    def _rounded(self, n: int) -> int:
        return -(-n // self._granularity) * self._granularity

    def _settle(self) -> None:
        """Gives back what a call that failed, or was interrupted, has left. No array ever reached into it."""
        self._range.detach(len(self._pieces))
        used = {id(p.handle) for p in self._pieces}
        for h in list(self._undo):
            if isinstance(h, (_memory.Handle, _memory.PinnedFile)) and id(h) not in used:
                h.close()
                self._undo.forget(h)

    def resize(self, length: int) -> None:
        """Sets the length. It adds memory as needed, and keeps it if the array gets shorter. New elements are undefined."""
        self._check_process()
        length = whole(length, "elements")
        with self._lock:
            self._check()
            if length < 0:
                raise ArgumentError(counted(length, "element"), "sizes are not negative")
            if length * self._kind.size > self._range.size:
                raise CapacityError(f"{counted(length, 'element')} of {counted(self._kind.size, 'byte')} in {counted(self._range.size, 'byte')} of addresses", "pass a larger reserve to empty")
            self._settle()
            need = self._rounded(length * self._kind.size) - self._range.mapped
            if need > 0:
                h = _memory.create(self._device, need, self._undo)
                self._range.attach([h])
                self._pieces.append(_Piece(_chunk(need), h))
            self._length = length

    def adopt(self, r: _memory.Range, undo: Undo, length: int, chunks: Sequence[Chunk], handles: Sequence[_memory.Exportable]) -> None:
        """Takes over a range with its memory, which ``undo`` holds, for its first elements."""
        self._undo, self._range, self._pieces, self._length = undo, r, [_Piece(c, h) for c, h in zip(chunks, handles)], length

    # For its publication.

    def claim(self, publication: Any) -> None:
        """Notes that a publication shows it, or raises InUseError if another one does."""
        with self._lock:
            self._check()
            if self._publisher not in (None, publication):
                raise InUseError(f"the memory is published as {self._publisher.name!r}", f"{self.to_end} first: memory is published once")
            self._publisher = publication

    def disclaim(self, publication: Any) -> None:
        with self._lock:
            if self._publisher is publication:
                self._publisher, self._shown = None, 0

    def chunks(self, length: int) -> "tuple[tuple[Chunk, ...], List[_memory.Exportable]]":
        """Returns the chunks that a length needs, and their handles, which this object owns."""
        with self._lock:
            self._check()
            at = n = 0
            while at < length * self._kind.size:
                at += self._pieces[n].chunk.size
                n += 1
            return tuple(p.chunk for p in self._pieces[:n]), [p.handle for p in self._pieces[:n]]

    def show(self, length: int) -> "tuple[Chunk, ...]":
        """Returns the chunks that a length needs. None of them is given back before ``shown`` allows it."""
        with self._lock:
            chunks = self.chunks(length)[0]
            self._shown = max(self._shown, len(chunks))
            return chunks

    def shown(self, count: int) -> None:
        """Notes how many chunks the publication shows now."""
        with self._lock:
            self._shown = count

    def export(self, identity: int, undo: Undo) -> int:
        """Returns a new descriptor of a chunk that is shown."""
        with self._lock:
            self._check()
            return next(p.handle for p in self._pieces if p.chunk.identity == identity).export(undo)

    def trim(self) -> int:
        """Frees the chunks behind the length, and returns their bytes.

        InUseError while arrays reach into them, or its publication shows them.
        """
        self._check_process()
        with self._lock:
            self._check()
            keep = len(self.chunks(self._length)[0])
            if keep < self._shown:
                raise InUseError(f"{counted(self._shown - keep, 'chunk')} behind the length {'is' if self._shown - keep == 1 else 'are'} shown by publication {self._publisher.name!r}",
                                 "shrink the publication first, and settle it")
            kept = sum(p.chunk.size for p in self._pieces[:keep])
            self._users.refuse("giving memory back", kept)
            if not self._range.owned:
                return 0
            self._settle()
            freed = sum(p.chunk.size for p in self._pieces[keep:])
            if freed:
                self._device.synchronize()
                self._pieces = self._pieces[:keep]
                self._settle()
            return freed

    def close(self) -> None:
        """Waits for all work of the device and frees the memory. Other processes keep what they have mapped. Idempotent.

        While it is published, or arrays or tensors of it are in use, it raises InUseError and changes nothing. After
        another error, or Ctrl-C, it can be repeated.
        """
        if self._forked:
            return
        with self._lock:
            if self._state is State.CLOSED:
                return
            if self._publisher is not None:
                raise InUseError(f"the memory is published as {self._publisher.name!r}", f"{self.to_end} first")
            self._users.refuse("closing the memory")
            self._state, self._length = State.CLOSING, 0
            self._device.synchronize()
            self._undo.close()
            self._pieces = []
            self._state = State.CLOSED


def _no_order(_: List[c_void_p]) -> None:
    """Orders nothing: the streams are this process's own."""


def empty(length: int, dtype: Any = "float32", device: int = 0, *, reserve: int = 0) -> Shared:
    """Makes a growing array of undefined elements, in memory that other processes can map, unlike that of PyTorch's allocator.

    ``dtype`` is a name of NumPy's ("float32"), "bfloat16", "float8_e4m3" or "float8_e5m2", or an object with such a name
    (torch.bfloat16, numpy.dtype). ``reserve`` is the
    size to which it can grow, in bytes. ``torch.from_dlpack(shared.array)`` is a tensor of it.
    """
    kind = kind_of(dtype)
    length, reserve = whole(length, "elements"), whole(reserve, "bytes to reserve")
    if length < 0 or reserve < 0 or max(reserve, length * kind.size) > _MOST_RESERVED:
        raise ArgumentError(f"{length} elements of {kind.size} bytes, and {reserve} bytes to reserve", f"pass sizes from 0 to {_MOST_RESERVED} bytes")
    dev = _driver.device(device)
    granularity = dev.granularity(dev.properties())
    size = -(-max(reserve, length * kind.size, 1) // granularity) * granularity
    shared = Shared(kind, dev, Users())
    try:
        shared._range = _memory.Range(dev, size, granularity, _driver.READ_WRITE, shared._undo)
        shared.resize(length)
        return shared
    except BaseException:
        shared._undo.abandon()
        raise


def kind_of(dtype: Any) -> ElementType:
    """Returns the type of elements that a caller names, as ``empty`` takes it."""
    name = element_name(dtype)
    if name not in NUMBERS:
        raise ArgumentError(f"elements of type {dtype!r}", "use one of " + ", ".join(sorted(NUMBERS)))
    number = NUMBERS[name]
    return ElementType(name, ELEMENTS[number].size, number)


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
    undo = Undo()
    try:
        dev, handles = _memory.chunks_at(address, length * kind.size, undo)
        r = _memory.Foreign(dev, address, sum(h.size for h in handles), tensor, undo)
        shared = Shared(kind, dev, Users())
        shared.adopt(r, undo, length, [_chunk(h.size) for h in handles], handles)
        return shared
    except BaseException:
        undo.abandon()
        raise


def _contiguous(shape: Sequence[int], strides: Optional[Sequence[int]], size: int) -> bool:
    for n, stride in zip(reversed(shape), reversed(strides or ())):
        if n != 1 and stride != size:
            return False
        size *= n
    return True


def _chunk(size: int) -> Chunk:
    return Chunk(int.from_bytes(os.urandom(8), "little") or 1, size)
