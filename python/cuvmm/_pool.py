"""The pool of a device for allocators of other libraries: the same pool that :func:`cuvmm.torch.use_pool` makes PyTorch's."""

from __future__ import annotations

from ctypes import byref, c_uint64, c_void_p
from typing import Optional

from . import _torch_library as library


def load(path: Optional[str]) -> None:
    library.load(library.find(path))


def allocate(device: int, size: int, stream: int) -> int:
    """The address of a block for work that is submitted to the stream from now on. OutOfMemory if there is no room."""
    pool, block = c_uint64(), c_void_p()
    library.call("cuvmm_torch_open", device, byref(pool))
    library.call("cuvmm_alloc", pool, size, stream, 0, byref(block))
    return int(block.value or 0)


def free(device: int, block: int) -> None:
    """Frees a block once the work that is now on its stream is done. It does not wait."""
    library.call("cuvmm_free", library.loaded().cuvmm_torch_pool(device), block)
