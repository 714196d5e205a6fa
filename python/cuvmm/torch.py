"""PyTorch on cuvmm's pool.

::

    import cuvmm.torch
    cuvmm.torch.use_pool(patch=True)      # before anything of CUDA is used

The pool is then the process's allocator. It holds less memory than PyTorch's own cache, and serves graphs and streams as
that does. The functions of ``torch.cuda.memory`` that ask PyTorch's own cache raise under any custom allocator: this
module has them under the same names, and ``patch=True`` puts them in place of PyTorch's.

The pool is Go code in a C library. Processes that are forked from this one cannot use CUDA, as always, and a process can
load one library with Go's runtime.
"""

from __future__ import annotations

import json
from typing import Any, ContextManager, List, Optional, Sequence

from . import _torch_error, _torch_sleep
from . import _torch_library as _library
from ._torch_extensible import Extensible, Rows
from ._torch_memory import (_record_memory_history, _snapshot, caching_allocator_enable, empty_cache, get_per_process_memory_fraction, max_memory_allocated,
                            max_memory_reserved, memory_allocated, memory_reserved, memory_snapshot, memory_stats, memory_stats_as_nested_dict,
                            reset_accumulated_memory_stats, reset_peak_memory_stats, set_per_process_memory_fraction, torch_module)
from ._torch_memory import _device, patch as _patch
from ._torch_sleep import Suspended, awake, discard, resume, sleeping, suspend, tensors
from .errors import Error, NotSupported

__all__ = ["Extensible", "Rows", "Suspended", "awake", "caching_allocator_enable", "discard", "empty_cache", "extensible", "get_per_process_memory_fraction", "max_memory_allocated", "max_memory_reserved",
           "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats", "memory_stats_as_nested_dict", "pool", "region",
           "reset_accumulated_memory_stats", "reset_peak_memory_stats", "resume", "set_per_process_memory_fraction", "sleeping", "snapshot", "suspend",
           "tensors", "use_pool", "_record_memory_history", "_snapshot"]

_SETTERS = {
    "set_init_fn": "cuvmm_torch_init",
    "set_reset_fn": "cuvmm_torch_reset",
    "set_base_alloc_fn": "cuvmm_torch_base_alloc",
    "set_record_stream_fn": "cuvmm_torch_record_stream",
    "set_begin_allocate_to_pool": "cuvmm_torch_begin",
    "set_end_allocate_to_pool_fn": "cuvmm_torch_end",
    "set_release_pool": "cuvmm_torch_release",
    "set_memory_fraction_fn": "cuvmm_torch_memory_fraction",
}
_made: List[Any] = []  # allocators, through which PyTorch frees until the process ends
_installed: List[None] = []  # one element, which is noted in the step in which PyTorch gets the allocator


def use_pool(library: Optional[str] = None, *, patch: bool = False, own_error: bool = False) -> None:
    """Makes the pool this process's allocator of GPU memory. Call it before anything initialises CUDA.

    ``library`` is the path of libcuvmm.so; by default it is CUVMM_LIBCUVMM, or lies beside this package. ``patch`` puts this
    module's functions in place of those of ``torch.cuda``. With ``own_error``, a request that finds no memory raises
    ``torch.OutOfMemoryError``, by a shim that is compiled once for the installed PyTorch and needs a C++ compiler; without
    it the error is a ``RuntimeError`` that begins with "CUDA out of memory". Later calls do nothing but ``patch``.
    """
    torch = torch_module()
    if not _installed:
        _install(torch, library, own_error)
    if patch:
        _patch()


def _install(torch: Any, library: Optional[str], own_error: bool) -> None:
    if torch.cuda.is_initialized():
        raise Error("CUDA is initialised already, and PyTorch's allocator with it",
                    "call use_pool before the first tensor on a GPU, and before functions such as torch.cuda.get_device_properties")
    lib = _library.load(_library.find(library))
    if own_error:
        _torch_error.install(torch, lib)
    c: Any = torch._C
    made = c._cuda_customAllocator(_library.address("cuvmm_torch_alloc"), _library.address("cuvmm_torch_free"))
    for setter, function in _SETTERS.items():
        if hasattr(made, setter):
            getattr(made, setter)(_library.address(function))
        elif setter != "set_memory_fraction_fn":
            raise NotSupported(f"this PyTorch ({torch.__version__}) has no {setter}", "use PyTorch 2.4 or later")
    _made.append(made)
    _installed.extend(map(c._cuda_changeCurrentAllocator, [made]))


def pool(library: Optional[str] = None, *, tag: str = "") -> Any:
    """A ``torch.cuda.MemPool`` beside PyTorch's own cache, whose segments are allocations of one handle each, which other processes can
    map, and which sleep with their tag (:func:`suspend`). PyTorch has no MemPool under a custom allocator, so it excludes :func:`use_pool`."""
    _beside(library)
    return _torch_sleep.mem_pool(tag)


def region(tag: str, library: Optional[str] = None) -> ContextManager[None]:
    """In the block this thread's tensors come from a pool of the tag, one for each device, which keeps its segments until the process
    ends. The threads of a backward pass are others: call what allocates there under a pool of its own, or use :func:`use_pool`."""
    _beside(library)
    return _torch_sleep.use_region(tag)


def _beside(library: Optional[str]) -> None:
    if _installed:
        raise NotSupported("PyTorch has no MemPool in a process whose allocator is the pool", "use pool() in a process without use_pool()")
    _library.load(_library.find(library))


def extensible(shape: Sequence[int], dtype: Any = "float32", device: Any = None, *, page: int = 0, null: bool = False, tag: str = "",
               library: Optional[str] = None) -> Extensible:
    """Memory for a tensor that grows in place: ``commit(n)`` returns its first ``n`` rows, always at the same address.

    ``shape`` is the most it can have. Memory is made in pages of ``page`` bytes, by default 2 MiB, and larger ones cost less by the
    byte. With ``null`` one page lies under all rows that have no memory, so that the padding of a captured kernel may reach there; each page then
    costs as much as one that has memory when it is made. ``tag`` is what :func:`suspend` calls it. It works with and without :func:`use_pool`."""
    _library.load(_library.find(library))
    return Extensible(shape, dtype, device, page, null, tag)


def snapshot(device: Any = None) -> Any:
    """What the pool has: segments with their blocks, as package vmm/pool describes them. None if the device has no pool yet."""
    handle = _library.loaded().cuvmm_torch_pool(_device(device))
    return None if handle == 0 else json.loads(_library.read("cuvmm_snapshot", handle).rstrip(b"\0"))
