"""Arrays: views of mapped GPU memory for other libraries."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import warnings
import weakref
from ctypes import byref, c_uint64, c_void_p
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _dlpack, _streams
from ._descriptor import ELEMENTS, RECORD, Element
from ._driver import Device, Event, Stream
from ._manifest import contiguous
from ._undo import Owned, Passing, leave, retry
from .errors import ArgumentError, Error, InUseError, counted


_POLL, _LONGEST_POLL = 0.005, 0.25


class ElementType(NamedTuple):
    """The type of an array's elements. ``name`` is NumPy's, "bfloat16", "float8_e4m3" or "float8_e5m2", or "record" for structures of ``size`` bytes."""

    name: str
    size: int
    number: int

    @property
    def element(self) -> Element:
        """Records are shown as bytes."""
        return ELEMENTS[self.number] if self.number != RECORD else ELEMENTS[6]


def _caller() -> Tuple[str, int]:
    """Returns the innermost line of code outside of this package, for messages."""
    frame = sys._getframe(1)
    while (frame.f_globals.get("__name__", "") + ".").startswith("cuvmm.") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Users:
    """Tracks the arrays over an owner's memory, and how far each one reaches."""

    def __init__(self) -> None:
        #: Whether the memory became read-only, for arrays that were made before, too.
        self.protected = False
        self._all: Dict[int, Tuple["weakref.ref[Any]", int, Tuple[str, int]]] = {}

    def add(self, a: Any, to: int) -> None:
        key = id(a)

        def gone(_: "weakref.ref[Any]") -> None:
            self._all.pop(key, None)  # takes no lock, since the collector may run it in any call

        self._all[key] = (weakref.ref(a, gone), to, _caller())

    def behind(self, byte: int) -> List[str]:
        """Returns the lines that made the arrays that reach beyond a byte."""
        _dlpack.release_untaken()
        retry()
        return [f"{file}:{line}" for _, to, (file, line) in list(self._all.values()) if to > byte]

    def wait(self, byte: int, timeout: float) -> None:
        """Waits until no array reaches beyond a byte, for at most ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while self.behind(byte) and time.monotonic() < until:
            time.sleep(_POLL)

    def refuse(self, what: str, byte: int = 0) -> None:
        where = self.behind(byte)
        if where:
            shown = ", ".join(sorted(set(where))[:4])
            raise InUseError(f"{what}: {len(where)} array{'s' if len(where) > 1 else ''} of it, or tensors made of them, still in use (made at {shown})",
                             "delete them first: del the tensors and arrays, or let them go out of scope")


class _Bytes:
    """Device memory for copies. It is freed with its last reference."""

    _owned: Optional[Owned] = None

    def __init__(self, dev: Device, size: int) -> None:
        self._device, self._cell = dev, c_uint64()
        self._owned = Owned(dev.driver, "cuMemFree_v2", self._cell)
        with dev.current() as d:
            code = self._owned.make("cuMemAlloc_v2", byref(self._cell), max(size, 1))
            if code != 0:
                raise d.error("cuMemAlloc_v2", code, f"a copy of {size} bytes")

    @property
    def pointer(self) -> int:
        return int(self._cell.value)

    def close(self) -> None:
        if self._owned is not None and self._owned.live:
            with self._device.current():
                self._owned.close()

    def __del__(self) -> None:
        undo = Passing()  # in a child of fork the memory is the parent's, which it cannot free
        undo.own(self)
        undo.abandon()


def close_at_exit(close: Callable[[], None], error: Any) -> None:
    """Closes at the end of a with statement.

    An InUseError does not replace an exception that ends the block, whose traceback often holds arrays: a thread closes the
    owner once they are gone.
    """
    try:
        close()
    except InUseError as e:
        if error is None:
            raise
        warnings.warn(f"{e}; it is closed when they are gone", ResourceWarning, stacklevel=3)
        close_when_unused(close)


def close_when_unused(close: Callable[[], None]) -> None:
    """Closes, or has a thread close once the arrays and tensors that are in use are gone."""
    try:
        close()
    except InUseError:
        threading.Thread(target=_close_later, args=(close,), name="cuvmm close", daemon=True).start()


def _close_later(close: Callable[[], None]) -> None:
    pause = _POLL
    while True:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)
        try:
            close()
            return
        except InUseError:
            continue
        except Error:
            return  # its owner's close can be called again


class Array:
    """A row of elements in GPU memory (records: rows of bytes). It keeps the memory mapped.

    PyTorch, CuPy and others take it as ``__dlpack__`` or ``__cuda_array_interface__``. Most ignore that memory may be
    read-only, and a write to it destroys the CUDA context of the process: ``__dlpack__`` of read-only memory raises
    BufferError unless :meth:`allow_readonly` was called. A copy always works.

    Its length never changes. It is safe for use by any thread.
    """

    _strides: Tuple[int, ...] = ()  # in elements; none: row-major order without gaps

    def __init__(self, dev: Device, pointer: int, length: int, kind: ElementType, readonly: bool, users: Users, base: int,
                 order: Callable[[List[c_void_p]], None], owner: Any, trusted: bool = False,
                 export: Optional[Callable[[List[c_void_p]], None]] = None) -> None:
        self._device, self._pointer, self._length, self._kind = dev, pointer, length, kind
        self._readonly, self._users, self._base, self._order, self._owner = readonly, users, base, order, owner
        self._trusted, self._export = trusted, export or order  # which orders another program's stream
        users.add(self, pointer - base + length * kind.size)

    def __repr__(self) -> str:
        return f"<cuvmm.Array of {self._length} {self._kind.name} on device {self._device.ordinal}{', read-only' if self.readonly else ''}>"

    def __len__(self) -> int:
        return self._length

    @property
    def dtype(self) -> str:
        """NumPy's name of the element type; "record" for structures."""
        return self._kind.name

    @property
    def itemsize(self) -> int:
        """The size of an element, in bytes."""
        return self._kind.size

    @property
    def nbytes(self) -> int:
        return self._length * self._kind.size

    @property
    def shape(self) -> Tuple[int, ...]:
        """(length,), and for records (length, bytes of a record)."""
        return (self._length,) if self._kind.number != RECORD else (self._length, self._kind.size)

    @property
    def device(self) -> int:
        """The ordinal of the device in this process."""
        return self._device.ordinal

    @property
    def readonly(self) -> bool:
        return self._readonly or self._users.protected

    @property
    def ptr(self) -> int:
        """The address of the first element."""
        return self._pointer

    def __getitem__(self, part: Union[slice, Any]) -> "Array":
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise ArgumentError(f"an array cannot be indexed with {part!r}", "use a slice without a step, or make a tensor of the array")
        start, stop, _ = part.indices(self._length)
        return self._like(start, max(start, stop), self._trusted)

    def _like(self, start: int, stop: int, trusted: bool) -> "Array":
        return Array(self._device, self._pointer + start * self._kind.size, stop - start, self._kind, self._readonly, self._users, self._base, self._order,
                     self._owner, trusted, self._export)

    def allow_readonly(self) -> "Array":
        """Returns the same array, which ``__dlpack__`` exports even if it is read-only. The caller promises not to write through the tensor."""
        return self._like(0, self._length, True)

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        if not self._kind.element.typestr:
            raise AttributeError(f"the CUDA array interface has no {self.dtype}: use __dlpack__")
        self._export([c_void_p(_streams.LEGACY_DEFAULT)])
        return {"shape": self.shape, "typestr": self._kind.element.typestr, "data": (self._pointer if self._length else 0, self.readonly),
                "version": 3, "strides": tuple(n * self._kind.size for n in self._strides) or None, "stream": _streams.LEGACY_DEFAULT}

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _dlpack.CUDA, self._device.ordinal

    def __dlpack__(self, *, stream: Optional[Any] = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None, copy: Optional[bool] = None, allow_readonly: bool = False) -> Any:
        """Returns a capsule. The consumer's stream is ordered behind the publisher's work (-1: not ordered; None: the legacy default stream)."""
        versioned = max_version is not None and max_version[0] >= 1
        own = self.__dlpack_device__()
        target = own if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if target not in (own, (_dlpack.CPU, 0)):
            raise BufferError(f"this array lies on device {own[1]} and can be copied to the CPU, not to {target}: copy the tensor")
        if target != own and copy is False:
            raise BufferError("the CPU needs a copy, which copy=False forbids")
        if target != own or copy:
            return self._copied(stream, target, versioned)
        if self.readonly and not (allow_readonly or self._trusted):
            raise BufferError("this memory is read-only, and a write through a tensor of it would destroy this process's CUDA context: "
                              "pass array.allow_readonly() if nothing writes, follow with write=True if the publisher grants it, or ask for a copy (copy=True)")
        self._export(self._consumer(stream))
        return self._capsule(self, self._pointer, own, versioned, self.readonly, False)

    def _consumer(self, stream: Optional[Any]) -> List[c_void_p]:
        if stream is None:
            return [c_void_p(_streams.LEGACY_DEFAULT)]
        if isinstance(stream, int) and stream == -1:
            return []
        if isinstance(stream, int) and stream == 0:
            raise BufferError("stream 0 is ambiguous: name 1 (legacy default), 2 (per-thread default), or a handle")
        return [c_void_p(_streams.handle_of(stream))]

    def _capsule(self, owner: Any, pointer: int, device: Tuple[int, int], versioned: bool, readonly: bool, copied: bool) -> Any:
        e = self._kind.element
        return _dlpack.capsule(owner, pointer if self._length else 0, self.shape, self._strides or contiguous(self.shape), e.dlpack, 8 * e.size, device, versioned=versioned, readonly=readonly, copied=copied)

    def _copied(self, stream: Optional[Any], target: Tuple[int, int], versioned: bool) -> Any:
        if target[0] == _dlpack.CPU:
            host = (ctypes.c_char * max(self.nbytes, 1))()
            self._read(host)
            return self._capsule(host, ctypes.addressof(host), target, versioned, False, True)
        mine = _Bytes(self._device, self.nbytes)
        with _Work(self, self._consumer(stream), mine) as work:
            work.submit("cuMemcpyDtoDAsync_v2", mine.pointer, self._pointer, self.nbytes)
        return self._capsule(mine, mine.pointer, target, versioned, False, True)

    def tobytes(self) -> bytes:
        """Copies the elements to the host, behind the publisher's work, and returns their bytes."""
        host = (ctypes.c_char * max(self.nbytes, 1))()
        self._read(host)
        return bytes(host.raw[:self.nbytes])

    def tolist(self) -> List[Any]:
        """Returns the elements as Python numbers, for small arrays and tests."""
        code = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
                "float32": "f", "float64": "d"}.get(self._kind.name)
        if code is None:
            raise ArgumentError(f"elements of type {self._kind.name} as a list", "use tobytes, or make a tensor")
        return memoryview(self.tobytes()).cast(code).tolist()

    def write(self, data: Any, at: int = 0) -> None:
        """Copies a bytes-like object to the elements from index ``at`` on, and waits for the copy."""
        raw = memoryview(data).cast("B")
        if self.readonly:
            raise BufferError("this memory is read-only: follow it with write=True, if the publisher grants that")
        if at < 0 or raw.nbytes % self._kind.size or at * self._kind.size + raw.nbytes > self.nbytes:
            raise ArgumentError(f"{counted(raw.nbytes, 'byte')} at element {at} of {counted(self._length, 'element')} of {counted(self._kind.size, 'byte')}")
        if not raw.nbytes:
            return
        host = (ctypes.c_char * raw.nbytes).from_buffer_copy(raw)
        with _Work(self, [], host) as work:
            work.submit("cuMemcpyHtoDAsync_v2", self._pointer + at * self._kind.size, ctypes.addressof(host), raw.nbytes)

    def _read(self, to: Any) -> None:
        if self.nbytes:
            with _Work(self, [], to) as work:
                work.submit("cuMemcpyDtoHAsync_v2", ctypes.addressof(to), self._pointer, self.nbytes)


class _Work:
    """An internal stream, ordered behind the array's work. The end of the block orders the given streams behind it, and waits for it.

    ``used`` is what the work uses beside the array. If its end is not known, because no wait for it succeeds, that is kept
    for good, with the stream.
    """

    def __init__(self, a: Array, then: List[c_void_p], used: Any) -> None:
        self._array, self._then, self._used = a, then, used
        self._undo = Passing()

    def __enter__(self) -> "_Work":
        try:
            self._stream = Stream(self._array._device, self._undo)
            self._array._order([self._stream.handle])
            return self
        except BaseException:
            self._undo.abandon()
            raise

    def submit(self, name: str, *args: Any) -> None:
        with self._array._device.current() as d:
            d.call(name, *args, self._stream.handle)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        ended = False
        try:
            if error is None and self._then:
                with Event(self._array._device, self._stream.handle) as e:
                    for s in self._then:
                        e.hold(s)
            self._stream.synchronize()
            ended = True
        finally:
            if ended:
                self._undo.abandon()
            else:
                leave(self)

    def close(self) -> None:
        """Gives the stream back once its work is done."""
        if self._stream.live and not self._stream.done():
            raise InUseError("a copy that was submitted is not done", "wait for the device")
        self._undo.close()


__all__ = ["Array", "ElementType", "Users", "close_at_exit", "close_when_unused"]
