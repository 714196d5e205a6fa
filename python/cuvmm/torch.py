"""PyTorch on cuvmm's pool.

::

    import cuvmm.torch
    cuvmm.torch.use_pool()      # before anything of CUDA is used

The pool is then the process's allocator: it holds less than PyTorch's own cache, and serves graphs and streams as that
does. What PyTorch asks its own cache for by name (``torch.cuda.memory_allocated`` and the like) raises under any custom
allocator; the functions here have the same names, and ``patch=True`` puts them in place of PyTorch's.

The library is Go in C's clothes: processes that were forked from this one cannot use CUDA, as ever, and loading a second
library with Go's runtime into the process is refused.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import pathlib
import struct
import threading
from ctypes import POINTER, byref, c_char, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, Dict, List, Optional, Tuple

from .errors import ArgumentError, Error, NotSupported, OutOfMemory

_NAME = "libcuvmm.so"


class _Error(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("status", c_int32), ("message", c_char * 2036)]


class _Stats(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(n, c_uint64) for n in (
        "requested", "peak_requested", "allocated", "reserved", "peak_reserved", "blocks", "peak_blocks", "allocs", "frees", "limit", "captures")]


_OUT_OF_MEMORY = 2
_VERSION = 1
_lock = threading.Lock()
_library: Optional[ctypes.CDLL] = None
_allocator: Any = None
_peaks: Dict[Tuple[int, str], int] = {}


def _path(given: Optional[str]) -> str:
    if given is not None:
        return given
    named = os.environ.get("CUVMM_LIBCUVMM")
    beside = pathlib.Path(__file__).with_name(_NAME)
    if named:
        return named
    if beside.exists():
        return str(beside)
    raise NotSupported(f"{_NAME} was not found", "build it with go build -buildmode=c-shared -o libcuvmm.so ./cmd/libcuvmm, and name it in CUVMM_LIBCUVMM or pass library=")


def _go_build_id(path: str) -> bool:
    """Whether a shared library holds Go's runtime: it has a note of the owner "Go"."""
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
                if kind == 4:  # PT_NOTE
                    f.seek(at)
                    if b"\x04\x00\x00\x00" in f.read(min(length, 4096)) and _has_go_note(f, at, length):
                        return True
    except (OSError, struct.error):
        pass
    return False


def _has_go_note(f: Any, at: int, length: int) -> bool:
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
    """Another library in this process that holds Go's runtime: two of them crash."""
    with open("/proc/self/maps") as f:
        paths = {line.split(maxsplit=5)[5].strip() for line in f if line.count("/") and "r-x" in line.split()[1]}
    for p in sorted(paths):
        if p.endswith(".so") or ".so." in p:
            if os.path.realpath(p) != os.path.realpath(own) and _go_build_id(p):
                return p
    return None


def _load(path: str) -> ctypes.CDLL:
    global _library
    with _lock:
        if _library is not None:
            return _library
        other = _other_go(path)
        if other is not None:
            raise NotSupported(f"{other} holds Go's runtime, and a second one in a process crashes", "use the pool in a process without that library")
        try:
            lib = ctypes.CDLL(path)
        except OSError as e:
            raise NotSupported(f"{path} could not be loaded: {e}", "build it for this machine") from None
        lib.cuvmm_version.restype = c_int32
        if lib.cuvmm_version() != _VERSION:
            raise NotSupported(f"{path} is version {lib.cuvmm_version()}, and this package speaks {_VERSION}", "build both from one source")
        for name, types in {
            "cuvmm_torch_pool": [c_int32, POINTER(c_uint64), POINTER(_Error)],
            "cuvmm_torch_limit": [c_int32, c_int64, POINTER(_Error)],
            "cuvmm_pool_stats": [c_uint64, POINTER(_Stats), POINTER(_Error)],
            "cuvmm_trim": [c_uint64, POINTER(c_uint64), POINTER(_Error)],
            "cuvmm_snapshot": [c_uint64, c_void_p, POINTER(c_size_t), POINTER(_Error)],
        }.items():
            call = getattr(lib, name)
            call.argtypes, call.restype = types, c_int32
        atexit.register(lib.cuvmm_torch_ending)
        _library = lib
        return lib


def _call(name: str, *args: Any) -> None:
    e = _Error(size=ctypes.sizeof(_Error))
    if _library is None:
        raise NotSupported("the pool is not in use", "call cuvmm.torch.use_pool first")
    status = getattr(_library, name)(*args, byref(e))
    if status != 0:
        text = e.message.decode("utf-8", "replace")
        raise (OutOfMemory if status == _OUT_OF_MEMORY else Error)(text)


def _address(function: str) -> int:
    assert _library is not None
    address = ctypes.cast(getattr(_library, function), c_void_p).value
    assert address is not None
    return address


def use_pool(library: Optional[str] = None, *, patch: bool = False) -> None:
    """Makes the pool this process's allocator of GPU memory. It must come before anything initialises CUDA.

    ``library`` is the path of libcuvmm.so (default: CUVMM_LIBCUVMM, or beside this package). ``patch`` puts this
    module's functions in place of those of ``torch.cuda``. Idempotent.
    """
    global _allocator
    torch = _torch()
    if _allocator is not None:
        return
    if torch.cuda.is_initialized():
        raise Error("CUDA is initialised already, and PyTorch's allocator with it",
                    "call use_pool before the first tensor on a GPU, and before functions such as torch.cuda.get_device_properties")
    _load(_path(library))
    c: Any = torch._C
    made = c._cuda_customAllocator(_address("cuvmm_torch_alloc"), _address("cuvmm_torch_free"))
    for setter, function in {
        "set_init_fn": "cuvmm_torch_init",
        "set_reset_fn": "cuvmm_torch_reset",
        "set_base_alloc_fn": "cuvmm_torch_base_alloc",
        "set_record_stream_fn": "cuvmm_torch_record_stream",
        "set_begin_allocate_to_pool": "cuvmm_torch_begin",
        "set_end_allocate_to_pool_fn": "cuvmm_torch_end",
        "set_release_pool": "cuvmm_torch_release",
        "set_memory_fraction_fn": "cuvmm_torch_memory_fraction",
    }.items():
        if hasattr(made, setter):
            getattr(made, setter)(_address(function))
        elif setter != "set_memory_fraction_fn":
            raise NotSupported(f"this PyTorch ({torch.__version__}) has no {setter}", "use PyTorch 2.4 or later")
    c._cuda_changeCurrentAllocator(made)
    _allocator = made
    if patch:
        for name in _PATCHED:
            setattr(torch.cuda, name, globals()[name])
            setattr(torch.cuda.memory, name, globals()[name])


def pool(library: Optional[str] = None) -> Any:
    """A ``torch.cuda.MemPool`` beside PyTorch's own cache, whose segments are allocations of one handle each, which other processes can map."""
    torch = _torch()
    _load(_path(library))
    c: Any = torch._C
    made = c._cuda_customAllocator(_address("cuvmm_torch_segment_alloc"), _address("cuvmm_torch_segment_free"))
    _pools.append(made)
    return torch.cuda.MemPool(made)


_pools: List[Any] = []


def _device(device: Any) -> int:
    torch = _torch()
    if device is None:
        return int(torch.cuda.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.cuda.current_device()) if index is None else int(index)


def _pool_of(device: Any) -> c_uint64:
    handle = c_uint64()
    _call("cuvmm_torch_pool", _device(device), byref(handle))
    return handle


def _stats(device: Any) -> Dict[str, int]:
    s = _Stats(size=ctypes.sizeof(_Stats))
    _call("cuvmm_pool_stats", _pool_of(device), byref(s))
    return {name: int(getattr(s, name)) for name, _ in _Stats._fields_[1:]}


def memory_allocated(device: Any = None) -> int:
    """The bytes of live blocks, as they were requested."""
    return _stats(device)["requested"]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes of live blocks since the pool was made."""
    return _stats(device)["peak_requested"]


def memory_reserved(device: Any = None) -> int:
    """The bytes of physical memory that the pool holds."""
    return _stats(device)["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes of physical memory since the pool was made."""
    return _stats(device)["peak_reserved"]


def memory_stats(device: Any = None) -> Dict[str, int]:
    """The statistics that the pool has, under PyTorch's names."""
    s = _stats(device)
    return {
        "requested_bytes.all.current": s["requested"], "requested_bytes.all.peak": s["peak_requested"],
        "allocated_bytes.all.current": s["requested"], "allocated_bytes.all.peak": s["peak_requested"],
        "active_bytes.all.current": s["allocated"],
        "reserved_bytes.all.current": s["reserved"], "reserved_bytes.all.peak": s["peak_reserved"],
        "allocation.all.current": s["blocks"], "allocation.all.peak": s["peak_blocks"], "allocation.all.allocated": s["allocs"], "allocation.all.freed": s["frees"],
        "num_alloc_retries": 0,
    }


def empty_cache() -> None:
    """Gives free memory that the GPU has passed back to the driver."""
    torch = _torch()
    freed = c_uint64()
    for i in range(torch.cuda.device_count()):
        _call("cuvmm_trim", _pool_of(i), byref(freed))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limits the pool to a part of the device's memory."""
    torch = _torch()
    if not 0 < fraction <= 1:
        raise ArgumentError(f"a fraction of {fraction}", "use more than 0 and at most 1")
    n = _device(device)
    total = torch.cuda.get_device_properties(n).total_memory
    _call("cuvmm_torch_limit", n, 0 if fraction == 1 else int(total * fraction))


def snapshot(device: Any = None) -> Any:
    """What the pool holds: segments with their blocks, as package vmm/pool describes them."""
    handle, n = _pool_of(device), c_size_t(0)
    _call("cuvmm_snapshot", handle, None, byref(n))
    while True:
        room = n.value + (n.value >> 3) + 4096
        text = ctypes.create_string_buffer(room)
        n = c_size_t(room)
        _call("cuvmm_snapshot", handle, text, byref(n))
        if n.value <= room:
            return json.loads(text.value)


def _torch() -> Any:
    """PyTorch, which has types of its own, or none, by version."""
    return importlib.import_module("torch")


_PATCHED = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "empty_cache", "set_per_process_memory_fraction")
