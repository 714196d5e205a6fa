"""Layouts: where the tensors of a model go in one piece of memory."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from ._descriptor import ELEMENTS, NUMBERS, element_name
from ._manifest import MAX_NAME, Manifest, Placed, contiguous, extent
from .errors import ArgumentError, quoted, whole

#: Where tensors begin, in bytes: what kernels load best from, as PyTorch's allocator has it.
ALIGN = 256


class _Given(NamedTuple):
    """A tensor that is to be placed, and the bytes in which it lies now: none if it says no address."""

    place: Placed
    address: int

    @property
    def end(self) -> int:
        return self.address + self.place.nbytes


def state_of(like: Any) -> Mapping[str, Any]:
    """The tensors of a module of PyTorch, or the mapping that they are."""
    state: Mapping[str, Any] = like.state_dict() if hasattr(like, "state_dict") else like
    return state


def placed(like: Any) -> Manifest:
    """Lays out the tensors of a mapping, or of a module of PyTorch, in one piece of memory.

    Each is anything with a ``dtype`` and a ``shape``, or a tuple of both. Those with an address, as PyTorch's, share memory
    if they do there, and keep their strides if nothing lies between their elements.
    """
    parameters = {name for name, _ in like.named_parameters(remove_duplicate=False)} if hasattr(like, "named_parameters") else None
    given = [_given(name, of, "" if parameters is None else "parameter" if name in parameters else "buffer") for name, of in state_of(like).items()]
    rows: List[Placed] = []
    end = groups = 0
    for cluster in _clusters(given):
        first = min(g.address for g in cluster)
        start = -(-end // ALIGN) * ALIGN
        if len(cluster) > 1:
            groups += 1
            start += first % ALIGN  # an element that was aligned stays so
        for g in cluster:
            p = g.place._replace(offset=start + g.address - first, alias=groups if len(cluster) > 1 else 0)
            rows.append(p if len(cluster) > 1 or _dense(p) else p._replace(strides=()))
            end = max(end, rows[-1].offset + rows[-1].nbytes)
    return Manifest(max(end, 1), rows)


def _given(name: Any, of: Any, kind: str) -> _Given:
    dtype, shape = of if isinstance(of, tuple) else (of.dtype, of.shape)
    number = NUMBERS.get(element_name(dtype))
    if number is None or not isinstance(name, str) or not 1 <= len(name.encode()) <= MAX_NAME:
        raise ArgumentError(f"tensor {quoted(str(name))} of {dtype}", f"use a name of 1 to {MAX_NAME} bytes, and one of {', '.join(NUMBERS)}")
    lengths = tuple(whole(n, "in a shape") for n in shape)
    if min(lengths, default=0) < 0:
        raise ArgumentError(f"tensor {quoted(name)} of shape {lengths}", "use lengths from 0")
    strides: Tuple[int, ...] = tuple(of.stride()) if hasattr(of, "stride") and hasattr(of, "data_ptr") else ()
    if all(n < 2 or s == c for n, s, c in zip(lengths, strides, contiguous(lengths))) or 0 in lengths:
        strides = ()
    return _Given(Placed(name, number, lengths, 0, strides=strides, kind=kind), int(of.data_ptr()) if hasattr(of, "data_ptr") else 0)


def _clusters(all: List[_Given]) -> List[List[_Given]]:
    """Tensors that share memory, together, in the order of the first of each."""
    order = {id(g): i for i, g in enumerate(all)}
    clusters: List[List[_Given]] = []
    end = 0
    for g in sorted(all, key=lambda g: g.address):
        if g.address and g.place.nbytes and clusters and g.address < end:
            clusters[-1].append(g)
        else:
            clusters.append([g])
        if g.address:
            end = max(end, g.end)
    return sorted(clusters, key=lambda c: min(order[id(g)] for g in c))


def _dense(p: Placed) -> bool:
    """Whether the elements, in some order of the dimensions, lie side by side."""
    step = 1
    for s, n in sorted((s, n) for n, s in zip(p.shape, p.strides) if n > 1):
        if s != step:
            return False
        step *= n
    return True
