"""CuPy and Numba on the pool, each in a process of its own: python -m tests.allocator_programs cupy|numba [DRIVER].

With DRIVER, the software driver as a library, Numba's requests go there instead of to the pool: a process holds one library with Go's
runtime.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from typing import Any, List


def cupy() -> None:
    import cuvmm.cupy
    cp: Any = importlib.import_module("cupy")
    cuvmm.cupy.use_pool()
    streams = [cp.cuda.Stream.null, cp.cuda.Stream(), cp.cuda.Stream(non_blocking=True)]
    for i in range(60):
        with streams[i % 3]:
            x = cp.arange(100_000 + i, dtype=cp.float64)
            y = (x * 2 + 1).sum()
            n = len(x)
            assert float(y) == n * (n - 1) + n, (i, float(y))
            assert cp.empty(0).size == 0
            del x, y
    stats = _stats()
    assert stats.allocs >= 120 and stats.requested < 1 << 20, (stats.allocs, stats.requested)


def _stats() -> Any:
    from cuvmm import _torch_library as library
    stats = library.Stats(size=ctypes.sizeof(library.Stats))
    library.call("cuvmm_pool_stats", library.loaded().cuvmm_torch_pool(0), ctypes.byref(stats))
    return stats


def numba(driver: str = "") -> None:
    import cuvmm.numba
    from cuvmm import _pool
    asked: List[int] = []
    if driver:
        lib, live = ctypes.CDLL(driver), {}

        def allocate(device: int, size: int, stream: int) -> int:
            at = ctypes.c_uint64()
            assert (device, stream) == (0, 0) and lib.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)) == 0
            live[at.value] = size
            asked.append(size)
            return at.value

        def free(device: int, block: int) -> None:
            del live[block]
            assert lib.cuMemFree_v2(ctypes.c_uint64(block)) == 0

        _pool.load, _pool.allocate, _pool.free = lambda path: None, allocate, free
    cuda: Any = importlib.import_module("numba.cuda")
    np: Any = importlib.import_module("numpy")
    cuvmm.numba.use_pool()
    host = np.arange(100_000, dtype=np.float64)
    for i in range(20):
        there = cuda.to_device(host + i)
        copy = cuda.device_array_like(there)
        copy.copy_to_device(there)
        assert (copy.copy_to_host() == host + i).all()
        assert cuda.device_array(0).size == 0
    info = cuda.current_context().get_memory_info()
    assert 0 < info.free < info.total
    pinned = cuda.pinned_array(100)
    try:
        there.get_ipc_handle()
        raise AssertionError("an IPC handle")
    except cuvmm.NotSupported as e:
        assert "chunks move" in str(e)
    del there, copy, pinned
    gc.collect()
    if driver:
        assert not live and asked.count(800_000) == 40, (live, asked)
    else:
        stats = _stats()
        assert stats.allocs >= 40 and stats.requested == 0, (stats.allocs, stats.requested)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("ok")
