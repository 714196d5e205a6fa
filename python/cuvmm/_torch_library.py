"""Loads libcuvmm.so, the pool as a C library, and calls it."""

from __future__ import annotations

import atexit
import ctypes
import os
import pathlib
import struct
import threading
from ctypes import POINTER, byref, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, BinaryIO, Dict, List, Optional, Type

from .errors import ArgumentError, ClosedError, Error, ForkedError, InUseError, NotSupported, OutOfMemory, SuspendedError

NAME = "libcuvmm.so"
VERSION = 3


class CError(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("status", c_int32), ("message", c_char * 2036)]


class Stats(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(n, c_uint64) for n in (
        "requested", "peak_requested", "reserved", "peak_reserved", "blocks", "peak_blocks", "allocs", "frees", "requested_total", "waiting", "refused", "limit",
        "captures")]


_ERRORS: Dict[int, Type[Error]] = {1: ArgumentError, 2: OutOfMemory, 3: NotSupported, 5: ClosedError, 6: InUseError, 9: ForkedError,
                                11: SuspendedError}
_CALLS: Dict[str, List[Any]] = {
    "cuvmm_torch_limit": [c_int32, c_int64],
    "cuvmm_torch_history": [c_uint64],
    "cuvmm_torch_snapshot": [c_void_p, POINTER(c_size_t)],
    "cuvmm_snapshot": [c_uint64, c_void_p, POINTER(c_size_t)],
    "cuvmm_pool_stats": [c_uint64, POINTER(Stats)],
    "cuvmm_reset_peaks": [c_uint64],
    "cuvmm_alloc": [c_uint64, c_size_t, c_void_p, c_uint64, POINTER(c_void_p)],
    "cuvmm_free": [c_uint64, c_void_p],
    "cuvmm_trim": [c_uint64, POINTER(c_uint64)],
    "cuvmm_torch_open": [c_int32, POINTER(c_uint64)],
    "cuvmm_range_open": [c_uint64, c_void_p, POINTER(c_void_p)],
    "cuvmm_range_commit": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuvmm_range_release": [c_uint64, c_void_p, c_size_t],
    "cuvmm_range_close": [c_uint64, c_void_p],
    "cuvmm_suspend": [POINTER(c_char_p), c_size_t, c_void_p, c_void_p],
    "cuvmm_resume": [POINTER(c_char_p), c_size_t, c_int64],
    "cuvmm_discard": [POINTER(c_char_p), c_size_t],
    "cuvmm_tags": [c_void_p, POINTER(c_size_t)],
    "cuvmm_crc32c": [c_void_p, c_size_t, POINTER(c_uint32)],
}
_lock = threading.Lock()
_library: Optional[ctypes.CDLL] = None


def find(given: Optional[str]) -> str:
    if given is not None:
        return given
    named = os.environ.get("CUVMM_LIBCUVMM")
    if named:
        return named
    beside = pathlib.Path(__file__).with_name(NAME)
    if beside.exists():
        return str(beside)
    raise NotSupported(f"{NAME} was not found",
                       "build it with go build -buildmode=c-shared -o libcuvmm.so ./cmd/libcuvmm, and name it in CUVMM_LIBCUVMM or pass library=")


def _has_go(path: str) -> bool:
    """Whether a shared library contains Go's runtime: it has a note of the owner "Go"."""
    try:
        with open(path, "rb") as f:
            head = f.read(64)
            if head[:5] != b"\x7fELF\x02":
                return False
            (offset,) = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            f.seek(offset)
            table = f.read(size * count)
            for i in range(count):
                kind, _, at, _, _, length = struct.unpack_from("<IIQQQQ", table, i * size)
                if kind == 4 and _has_go_note(f, at, length):  # PT_NOTE
                    return True
    except (OSError, struct.error):
        pass
    return False


def _has_go_note(f: BinaryIO, at: int, length: int) -> bool:
    f.seek(at)
    notes = f.read(min(length, 1 << 16))
    i = 0
    while i + 12 <= len(notes):
        n, d, _ = struct.unpack_from("<III", notes, i)
        if notes[i + 12:i + 12 + n].rstrip(b"\0") == b"Go":
            return True
        i += 12 + -(-n // 4) * 4 + -(-d // 4) * 4
    return False


def _other_go(own: str) -> Optional[str]:
    """Another library in this process that contains Go's runtime, if any."""
    with open("/proc/self/maps") as f:
        paths = {line.split(maxsplit=5)[5].strip() for line in f if "/" in line and "x" in line.split()[1]}
    for p in sorted(paths):
        if p.endswith(".so") or ".so." in p:
            if os.path.realpath(p) != os.path.realpath(own) and _has_go(p):
                return p
    return None


def load(path: str) -> ctypes.CDLL:
    """Loads the library, once in a process."""
    global _library
    with _lock:
        if _library is not None:
            return _library
        other = _other_go(path)
        if other is not None:
            raise NotSupported(f"{other} contains Go's runtime, and a second one crashes the process", "use the pool in a process without that library")
        try:
            lib = ctypes.CDLL(path)
        except OSError as e:
            raise NotSupported(f"{path} could not be loaded: {e}", "build it for this machine") from None
        lib.cuvmm_version.restype = c_int32
        if lib.cuvmm_version() != VERSION:
            raise NotSupported(f"{path} is version {lib.cuvmm_version()}, and this package needs {VERSION}", "build both from one source")
        for name, types in _CALLS.items():
            function = getattr(lib, name)
            function.argtypes, function.restype = types + [POINTER(CError)], c_int32
        lib.cuvmm_torch_pool.argtypes, lib.cuvmm_torch_pool.restype = [c_int32], c_uint64
        lib.cuvmm_torch_segment_alloc.argtypes, lib.cuvmm_torch_segment_alloc.restype = [c_char_p], c_void_p
        lib.cuvmm_torch_allocated.argtypes, lib.cuvmm_torch_allocated.restype = [c_void_p], None
        lib.cuvmm_torch_throw_with.argtypes, lib.cuvmm_torch_throw_with.restype = [c_void_p], None
        atexit.register(lib.cuvmm_torch_ending)
        _library = lib
        return lib


def loaded() -> ctypes.CDLL:
    if _library is None:
        raise NotSupported("no memory of cuvmm.torch is in use", "call use_pool, pool, region or extensible first")
    return _library


def address(function: str) -> int:
    value = ctypes.cast(getattr(loaded(), function), c_void_p).value
    assert value is not None
    return value


def call(name: str, *args: Any) -> None:
    """Calls a function that fills in an error, and raises that."""
    e = CError(size=ctypes.sizeof(CError))
    status = getattr(loaded(), name)(*args, byref(e))
    if status != 0:
        raise _ERRORS.get(status, Error)(e.message.decode("utf-8", "replace"))


def read(name: str, *args: Any) -> bytes:
    """Calls a function that writes to a buffer, which it says the size of."""
    n = c_size_t(0)
    call(name, *args, None, byref(n))
    while True:
        room = n.value + (n.value >> 3) + 4096  # it may have grown by the next call
        buffer = ctypes.create_string_buffer(room)
        n = c_size_t(room)
        call(name, *args, buffer, byref(n))
        if n.value <= room:
            return buffer.raw[:n.value]
