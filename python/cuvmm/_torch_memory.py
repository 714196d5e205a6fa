"""The functions of ``torch.cuda.memory`` for the pool, under their names there, where they raise under any custom allocator."""

from __future__ import annotations

import ctypes
import importlib
import pickle
from collections import OrderedDict
from ctypes import byref, c_uint64
from typing import Any, Dict, List, Optional, Tuple

from . import _torch_library as library
from ._torch_stacks import Stacks
from .errors import ArgumentError, NotSupported

_COUNTS = ("current", "peak", "allocated", "freed")
_stacks = Stacks()
_since: Dict[int, Dict[str, int]] = {}  # by device: the totals at the last reset_accumulated_memory_stats


def torch_module() -> Any:
    """PyTorch, whose types differ by version, or are missing."""
    return importlib.import_module("torch")


def _device(device: Any) -> int:
    torch = torch_module()
    if device is None:
        return int(torch.cuda.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.cuda.current_device()) if index is None else int(index)


def _counts(device: int) -> Dict[str, int]:
    """The counts of the device's pool since it was made: zeros if there is none yet."""
    s = library.Stats(size=ctypes.sizeof(library.Stats))
    pool = library.loaded().cuvmm_torch_pool(device)
    if pool != 0:
        library.call("cuvmm_pool_stats", pool, byref(s))
    return {name: int(getattr(s, name)) for name, _ in library.Stats._fields_[1:]}


def _stats(device: Any) -> Dict[str, int]:
    """The counts of the device's pool since the last resets."""
    n = _device(device)
    counts = _counts(n)
    for name, before in _since.get(n, {}).items():
        counts[name] -= before
    return counts


def memory_allocated(device: Any = None) -> int:
    """The bytes of live blocks, as requested."""
    return _stats(device)["requested"]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes of live blocks since the start, or since :func:`reset_peak_memory_stats`."""
    return _stats(device)["peak_requested"]


def memory_reserved(device: Any = None) -> int:
    """The bytes of physical memory that the pool has."""
    return _stats(device)["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes of physical memory since the start, or since :func:`reset_peak_memory_stats`."""
    return _stats(device)["peak_reserved"]


def memory_stats_as_nested_dict(device: Any = None) -> Dict[str, Any]:
    """The statistics under PyTorch's names. The pool has no pools for small and large blocks, so ``all`` and ``large_pool`` are equal,
    and what it does not count is 0: segments, splits, and the totals of reserved bytes."""
    s = _stats(device)

    def group(current: int = 0, peak: int = 0, total: int = 0, freed: int = 0) -> Dict[str, Dict[str, int]]:
        values = dict(zip(_COUNTS, (current, peak, total, freed)))
        return {"all": values, "large_pool": dict(values), "small_pool": dict.fromkeys(_COUNTS, 0)}

    in_bytes = (s["requested"], s["peak_requested"], s["requested_total"], s["requested_total"] - s["requested"])
    in_blocks = (s["blocks"], s["peak_blocks"], s["allocs"], s["frees"])
    return {
        "allocation": group(*in_blocks), "active": group(*in_blocks), "segment": group(), "inactive_split": group(),
        "allocated_bytes": group(*in_bytes), "active_bytes": group(*in_bytes), "requested_bytes": group(*in_bytes),
        "reserved_bytes": group(s["reserved"], s["peak_reserved"]), "inactive_split_bytes": group(),
        "oversize_allocations": dict.fromkeys(_COUNTS, 0), "oversize_segments": dict.fromkeys(_COUNTS, 0),
        "max_split_size": -1, "num_alloc_retries": 0, "num_ooms": s["refused"], "num_sync_all_streams": 0, "num_device_alloc": 0, "num_device_free": 0,
    }


def memory_stats(device: Any = None) -> "OrderedDict[str, int]":
    """:func:`memory_stats_as_nested_dict` with one key for each number, such as ``allocated_bytes.all.peak``."""
    flat: List[Tuple[str, int]] = []

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                add(f"{prefix}.{name}" if prefix else name, inner)
        else:
            flat.append((prefix, value))

    add("", memory_stats_as_nested_dict(device))
    return OrderedDict(sorted(flat))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Makes the peaks what is there now."""
    pool = library.loaded().cuvmm_torch_pool(_device(device))
    if pool != 0:
        library.call("cuvmm_reset_peaks", pool)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Makes the totals that only grow count from 0 again."""
    n = _device(device)
    s = _counts(n)
    live = {"requested_total": s["requested"], "allocs": s["blocks"]}  # what is live counts as allocated, so that freed is never below 0
    _since[n] = {name: s[name] - live.get(name, 0) for name in ("allocs", "frees", "requested_total", "refused")}


def empty_cache() -> None:
    """Returns free memory that the GPU has finished with to the driver."""
    library.loaded().cuvmm_torch_reset()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limits the pool to a fraction of the device's memory: above 0, and at most 1, which is no limit."""
    if not 0 < fraction <= 1:
        raise ArgumentError(f"a fraction of {fraction}", "use more than 0 and at most 1")
    n = _device(device)
    library.call("cuvmm_torch_limit", n, 0 if fraction == 1 else int(_total(n) * fraction))


def get_per_process_memory_fraction(device: Any = None) -> float:
    """The fraction of the device's memory that the pool is limited to."""
    n = _device(device)
    limit = _stats(n)["limit"]
    return limit / _total(n) if limit else 1.0


def _total(device: int) -> int:
    return int(torch_module().cuda.get_device_properties(device).total_memory)


def _snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> Dict[str, Any]:
    """The memory of the pool and of :func:`cuvmm.torch.pool` in the form of PyTorch's snapshots, for all devices. While a history is kept,
    allocations and live blocks have Python's stacks; frees have none."""
    whole: Dict[str, Any] = {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}
    text = library.read("cuvmm_torch_snapshot")
    if text:  # there is a pool
        whole.update(pickle.loads(text))
        _stacks.annotate(whole)
    return whole


def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> List[Dict[str, Any]]:
    """The segments of :func:`_snapshot`."""
    segments = list(_snapshot()["segments"])
    return segments if mempool_id is None else [s for s in segments if tuple(s["segment_pool_id"]) == tuple(mempool_id)]


def _record_memory_history(enabled: Optional[str] = "all", context: Optional[str] = "all", *args: Any, max_entries: int = 1 << 16, **options: Any) -> None:
    """Keeps the latest ``max_entries`` allocations and frees, at most 2^20, for :func:`_snapshot`, with Python's stacks unless ``context`` is
    None; with ``enabled=None`` it stops. A stack costs some microseconds. Stacks of C++ are not kept."""
    if isinstance(enabled, bool):  # the older form: whether to record
        enabled = "all" if enabled else None
    events = 0 if enabled is None or enabled == "state" else min(max_entries, 1 << 20)
    library.call("cuvmm_torch_history", events)
    _stacks.record(events if context is not None else 0)


def caching_allocator_enable(value: bool = True) -> None:
    """Raises: the pool cannot be switched off while its blocks are in use. Enabling it does nothing."""
    if not value:
        raise NotSupported("the pool cannot be switched off in a process that uses it", "leave out cuvmm.torch.use_pool")


PATCHED = (memory_allocated, max_memory_allocated, memory_reserved, max_memory_reserved, memory_stats, memory_stats_as_nested_dict, reset_peak_memory_stats,
           reset_accumulated_memory_stats, empty_cache, set_per_process_memory_fraction, get_per_process_memory_fraction, memory_snapshot, _snapshot,
           _record_memory_history, caching_allocator_enable)


def patch() -> None:
    """Puts these functions in place of PyTorch's, those of ``torch.accelerator`` among them, which are zeros under a custom allocator. The
    others of ``torch.cuda.memory`` call them, or work under any allocator."""
    torch = torch_module()
    accelerator = getattr(torch, "accelerator", None)
    for function in PATCHED:
        for module in (torch.cuda, torch.cuda.memory, accelerator, getattr(accelerator, "memory", None)):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
