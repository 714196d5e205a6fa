"""Tensors that grow in place: addresses for many rows, of which the first have memory."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from ctypes import byref, c_char_p, c_int32, c_size_t, c_uint64, c_void_p
from typing import Any, Dict, Optional, Sequence, Tuple

from . import _dlpack, _streams
from . import _torch_library as library
from ._descriptor import ELEMENTS, NUMBERS, element_name
from ._manifest import contiguous
from ._torch_memory import _device, torch_module
from ._torch_sleep import encoded
from .array import Users, close_at_exit
from .errors import ArgumentError, ClosedError, InUseError, whole

_MOST = 1 << 46  # bytes of addresses


class _Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("bytes", c_size_t), ("page", c_size_t), ("tag", c_char_p), ("null", c_int32)]


class Rows:
    """The first rows of an :class:`Extensible`, for DLPack and the CUDA array interface. It keeps them committed."""

    def __init__(self, of: "Extensible", n: int) -> None:
        self._of, self.shape = of, (n,) + of.shape[1:]

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _dlpack.CUDA, self._of.device

    def __dlpack__(self, *, stream: Optional[Any] = None, max_version: Optional[Tuple[int, int]] = None, dl_device: Optional[Tuple[int, int]] = None,
                   copy: Optional[bool] = None) -> Any:
        """A capsule. It orders no stream, since the memory is this process's own."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("extensible memory is exported where it lies: copy the tensor")
        e = self._of.element
        return _dlpack.capsule(self, self._of.ptr, self.shape, contiguous(self.shape), e.dlpack, 8 * e.size, self.__dlpack_device__(),
                               versioned=bool(max_version and max_version[0] >= 1), readonly=False, copied=False)

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        e = self._of.element
        if not e.typestr:
            raise AttributeError(f"the CUDA array interface has no {e.name}: use DLPack")
        return {"shape": self.shape, "typestr": e.typestr, "data": (self._of.ptr, False), "version": 3, "strides": None}


class Extensible:
    """Memory for a tensor that grows at an address that never changes, so that graphs which were captured before go on working.

    ``shape`` is the most that it can have: addresses are reserved for it, and memory is there for the rows that :meth:`commit`
    asked for. What lies behind them must not be used, unless it was made with ``null``. Safe for use by any thread.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, device: Any, page: int, null: bool, tag: str) -> None:
        name = element_name(dtype)
        if name not in NUMBERS:
            raise ArgumentError(f"elements of type {dtype!r}", "use one of " + ", ".join(sorted(NUMBERS)))
        self.element, self.device = ELEMENTS[NUMBERS[name]], _device(device)
        self.shape = tuple(whole(n, "as a length") for n in shape)
        if not self.shape or min(self.shape) < 1 or math.prod(self.shape) * self.element.size > _MOST:
            raise ArgumentError(f"a shape of {self.shape}", f"name at least one row of one element, and at most {_MOST} bytes")
        self._row, self._null, self._lock = math.prod(self.shape[1:]) * self.element.size, null, threading.Lock()
        self._users, self._graphs, self.rows = Users(), weakref.WeakSet[Any](), 0
        pool, at = c_uint64(), c_void_p()
        library.call("cuvmm_torch_open", self.device, byref(pool))
        self._pool = pool.value
        o = _Options(ctypes.sizeof(_Options), self.shape[0] * self._row, whole(page, "bytes a page"), encoded(tag), null)
        library.call("cuvmm_range_open", self._pool, byref(o), byref(at))
        self.ptr = int(at.value or 0)
        self._finalizer = weakref.finalize(self, library.call, "cuvmm_range_close", self._pool, self.ptr)
        self._finalizer.atexit = False  # what is live ends with the process

    def __repr__(self) -> str:
        return f"<cuvmm.torch.Extensible of {self.rows} of {self.shape[0]} rows of {self.element.name} on device {self.device}>"

    def __len__(self) -> int:
        return self.rows

    def commit(self, n: int, stream: Any = None) -> Any:
        """Has memory lie under the first ``n`` rows, and returns a tensor of them. Their address is the same as before, and what was
        there stays; new rows are undefined. It never takes memory away.

        ``stream``, by default PyTorch's current one, is the one whose work uses new rows first: order others behind it. On a stream
        that captures, nothing new can be committed. With ``null`` it waits for the GPU, and meanwhile no work may be submitted.
        """
        return torch_module().from_dlpack(self.commit_rows(n, stream))

    def commit_rows(self, n: int, stream: Any = None) -> Rows:
        """:meth:`commit` for libraries other than PyTorch, which take the result by DLPack or the CUDA array interface."""
        if not 0 <= whole(n, "rows") <= self.shape[0]:
            raise ArgumentError(f"{n} of {self.shape[0]} rows", "reserve more")
        handle = _streams.handle_of(torch_module().cuda.current_stream(self.device) if stream is None else stream)
        with self._lock:
            self._open()
            library.call("cuvmm_range_commit", self._pool, self.ptr, n * self._row, handle)
            self.rows = max(self.rows, n)
            rows = Rows(self, n)
            self._users.add(rows, n * self._row)
        return rows

    def release(self, n: int = 0) -> None:
        """Gives back the memory behind the first ``n`` rows, but for what shares a page with them. It waits for the GPU.

        InUseError while tensors reach behind them, or a graph may use them (:meth:`used_by`), unless it was made with ``null``: then
        the graph reads and writes something of no meaning there.
        """
        if whole(n, "rows") < 0:
            raise ArgumentError(f"{n} rows", "keep 0 or more")
        with self._lock:
            self._open()
            self._users.refuse("giving rows back", n * self._row)
            if self._graphs and not self._null:
                raise InUseError(f"{len(self._graphs)} graphs use the memory", "delete them, or say unused_by, or make it with null=True")
            if n < self.rows:
                library.call("cuvmm_range_release", self._pool, self.ptr, n * self._row)
                self.rows = n

    def used_by(self, graph: Any) -> None:
        """Says that a captured graph (``torch.cuda.CUDAGraph``) uses the rows, until it is deleted or :meth:`unused_by` is called with it."""
        self._graphs.add(graph)

    def unused_by(self, graph: Any) -> None:
        self._graphs.discard(graph)

    def close(self) -> None:
        """Waits for the GPU and gives memory and addresses back. InUseError while tensors or graphs use it. Idempotent."""
        with self._lock:
            if self._finalizer.alive:
                self._users.refuse("closing the memory", -1)
                if self._graphs:
                    raise InUseError(f"{len(self._graphs)} graphs use the memory", "delete them, or say unused_by")
                library.call("cuvmm_range_close", self._pool, self.ptr)
                self._finalizer.detach()
                self.rows = 0

    def __enter__(self) -> "Extensible":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        close_at_exit(self.close, error)

    def _open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("the memory was closed")
