"""Memory of PyTorch that sleeps by its tag: it goes back to the driver, and its addresses stay."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
from ctypes import byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

from . import _torch_library as library
from ._torch_memory import torch_module
from .errors import ArgumentError, NotSupported, SuspendedError, seconds

Tags = Union[str, Iterable[str]]

_allocators: List[Any] = []  # through which PyTorch frees until the process ends
_regions: Dict[Tuple[str, int], Any] = {}  # the MemPools of region, by tag and device


class Suspended(NamedTuple):
    """What :func:`suspend` did, in bytes: what went back to the driver, what stayed because another process may have it, and how much
    host memory keeps the contents."""

    given: int
    held: int
    host: int


class _Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("drop", c_int32), ("guard", c_int32)]


class _Suspended(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("given", c_uint64), ("held", c_uint64), ("host", c_uint64)]


def mem_pool(tag: str) -> Any:
    """A new ``torch.cuda.MemPool`` whose segments have the tag."""
    torch = torch_module()
    function = library.loaded().cuvmm_torch_segment_alloc(encoded(tag))
    if not function:
        raise NotSupported(f"tag {tag!r} beside 63 others", "use a tag for several pools")
    made = torch._C._cuda_customAllocator(function, library.address("cuvmm_torch_segment_free"))
    _allocators.append(made)
    return torch.cuda.MemPool(made)


@contextlib.contextmanager
def use_region(tag: str) -> Iterator[None]:
    torch = torch_module()
    if _states().get(tag, {}).get("suspended"):
        raise SuspendedError(f"tag {tag!r} sleeps", "resume it first")
    key = tag, int(torch.cuda.current_device())
    if key not in _regions:
        _regions[key] = mem_pool(tag)
    with torch.cuda.use_mem_pool(_regions[key]):
        yield


def suspend(tags: Optional[Tags] = None, *, keep: Union[bool, Tags] = True, guard: bool = False) -> Suspended:
    """Gives the memory of tags back to the driver, once the work on the GPU is done. Tensors keep their addresses, and must not be used
    until :func:`resume`: work on them faults, and a fault ends the process's use of the GPU.

    Without ``tags`` it is for all tags that are awake, and with :func:`use_pool` for the pool, whose tag is the empty one. ``keep`` says
    whose bytes are kept, in pinned host memory: all, none, or those of some of the tags. ``guard`` has scratch memory lie under the
    addresses, so that a stray access mostly does no harm. A tag that sleeps already is a :class:`SuspendedError`; after an error all is
    as before.
    """
    named = _names(tags)
    if isinstance(keep, bool):
        return _suspend(named, not keep, guard)
    names = awake() if named is None else named
    kept = _names(keep) or []
    for tag in kept:
        if tag not in names:
            raise ArgumentError(f"tag {tag!r} to be kept, which is not among those to be suspended", "name it in tags, too")
    parts = [(part, drop) for part, drop in ((kept, False), ([t for t in names if t not in kept], True)) if part]
    done = Suspended(0, 0, 0)
    for i, (part, drop) in enumerate(parts):
        try:
            more = _suspend(part, drop, guard)
        except BaseException:
            if i > 0:
                resume(kept)
            raise
        done = Suspended(*(a + b for a, b in zip(done, more)))
    return done


def _suspend(named: Optional[List[str]], drop: bool, guard: bool) -> Suspended:
    o, r = _Options(ctypes.sizeof(_Options), drop, guard), _Suspended(ctypes.sizeof(_Suspended))
    library.call("cuvmm_suspend", *_list(named), byref(o), byref(r))
    return Suspended(int(r.given), int(r.held), int(r.host))


def resume(tags: Optional[Tags] = None, *, timeout: float = 0) -> None:
    """Brings the memory of tags back, of all that sleep by default, and waits up to ``timeout`` seconds while the GPU has no room for it.
    Then OutOfMemory is raised, and the memory sleeps on, with its bytes."""
    library.call("cuvmm_resume", *_list(_names(tags)), c_int64(int(seconds(timeout) * 1000)))


def discard(tags: Tags) -> None:
    """Gives back the memory of tags without keeping its bytes, and for tags that sleep what is kept of them. After :func:`resume` the
    contents are undefined."""
    library.call("cuvmm_discard", *_list(_names(tags)))


def awake() -> List[str]:
    """The tags whose memory is there."""
    return [tag for tag, state in _states().items() if not state["suspended"]]


def sleeping() -> List[str]:
    """The tags that sleep."""
    return [tag for tag, state in _states().items() if state["suspended"]]


def tensors(tag: str) -> List[Any]:
    """The tensors that lie in a tag's memory, as far as Python's collector knows them: before the bytes of a tag are dropped it shows what
    is lost, such as tables that a layer computed once. What only C++ has, such as what autograd saved, is not among them."""
    torch = torch_module()
    ranges = _states().get(tag, {}).get("ranges", [])
    found = []
    for o in gc.get_objects():
        if not issubclass(type(o), torch.Tensor):
            continue
        try:
            at = o.untyped_storage().data_ptr() if o.is_cuda else 0
        except (RuntimeError, NotImplementedError):  # it has no storage
            continue
        if any(start <= at < start + size for start, size in ranges):
            found.append(o)
    return found


def _states() -> Dict[str, Dict[str, Any]]:
    return {state["tag"]: state for state in json.loads(library.read("cuvmm_tags").rstrip(b"\0"))}


def _names(tags: Optional[Tags]) -> Optional[List[str]]:
    if tags is None:
        return None
    return [tags] if isinstance(tags, str) else list(dict.fromkeys(tags))


def encoded(tag: str) -> bytes:
    """A tag as the library takes it."""
    if not isinstance(tag, str) or "\0" in tag:
        raise ArgumentError(f"{tag!r} as a tag", "pass a string without NUL")
    return tag.encode()


def _list(named: Optional[List[str]]) -> Tuple[Any, c_size_t]:
    if named is None:
        return None, c_size_t(0)
    if not named:
        raise ArgumentError("no tags", "name at least one, or pass None for all")
    return (c_char_p * len(named))(*map(encoded, named)), c_size_t(len(named))
