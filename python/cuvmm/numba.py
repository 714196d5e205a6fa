"""Numba on cuvmm's pool, by its interface for external memory managers. Before the first use of a GPU::

    import cuvmm.numba
    cuvmm.numba.use_pool()                            # or NUMBA_CUDA_MEMORY_MANAGER=cuvmm.numba in the environment

Numba does not say which stream a request is for, so there is one: every block is for work of the legacy default stream, and is free
behind the work that is on it when the array goes. Numba's own streams are ordered with it. An array that a non-blocking stream of
another library uses must live until that work is done.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Optional

from . import _driver, _pool
from .errors import NotSupported

__all__ = ["PoolManager", "use_pool"]

_cuda: Any = importlib.import_module("numba.cuda")


def _pointer(address: int) -> Any:
    """An address as Numba takes it: from NVIDIA's bindings, if it uses them, as versions of today always do."""
    binding = getattr(importlib.import_module("numba.cuda.cudadrv.driver"), "binding", None)
    return ctypes.c_uint64(address) if binding is None else binding.CUdeviceptr(address)


class PoolManager(_cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Device memory from the pool; pinned host memory stays Numba's own."""

    @property
    def interface_version(self) -> int:
        return 1

    def initialize(self) -> None:
        super().initialize()
        _pool.load(None)

    def memalloc(self, size: int) -> Any:
        device = int(self.context.device.id)
        block = _pool.allocate(device, max(size, 1), 0)
        return _cuda.MemoryPointer(self.context, _pointer(block), size, finalizer=lambda: _pool.free(device, block))

    def get_memory_info(self) -> Any:
        info = _driver.memory_info(int(self.context.device.id))
        return _cuda.MemoryInfo(free=info.free, total=info.total)

    def get_ipc_handle(self, memory: Any) -> Any:
        raise NotSupported("the pool's memory has no IPC handles, since its chunks move", "share memory of cuvmm.empty, or put it into a queue (cuvmm.multiprocessing)")


_numba_memory_manager = PoolManager  # what NUMBA_CUDA_MEMORY_MANAGER looks for


def use_pool(library: Optional[str] = None) -> None:
    """Makes the pool Numba's allocator of device memory. ``library`` is the path of libcuvmm.so; by default it is CUVMM_LIBCUVMM, or lies
    beside this package."""
    _pool.load(library)
    _cuda.set_memory_manager(PoolManager)
