"""CuPy on cuvmm's pool::

    import cuvmm.cupy
    cuvmm.cupy.use_pool()

A block is for work of the stream that was CuPy's current one when it was allocated, and is free behind the work that is on this stream when its
array goes. An array that another stream uses must live until that work is done, as with CuPy's own pool. Streams must live as long as the
process: the next one may get the handle of one that was destroyed. CuPy's per-thread default streams are refused.
"""

from __future__ import annotations

import importlib
from typing import Any, List, Optional

from . import _pool

__all__ = ["use_pool"]

_made: List[Any] = []  # the allocator, by which CuPy frees until the process ends


def _allocate(size: int, device: int) -> int:
    if size == 0:
        return 0
    stream = importlib.import_module("cupy").cuda.get_current_stream(device)
    return _pool.allocate(device, size, int(stream.ptr))


def _free(block: int, device: int) -> None:
    if block:
        _pool.free(device, block)


def use_pool(library: Optional[str] = None) -> None:
    """Makes the pool CuPy's allocator for arrays from now on, in all threads. It is the pool of :func:`cuvmm.torch.use_pool`, if that is in
    use, too. ``library`` is the path of libcuvmm.so; by default it is CUVMM_LIBCUVMM, or lies beside this package."""
    cupy: Any = importlib.import_module("cupy")
    _pool.load(library)
    if not _made:
        _made.append(cupy.cuda.PythonFunctionAllocator(_allocate, _free))
    cupy.cuda.set_allocator(_made[0].malloc)
