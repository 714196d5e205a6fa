"""Tensors by name: loaded from files, or found in memory that another process publishes."""

from __future__ import annotations

import bisect
import itertools
import os
import sys
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import _crc32c
from ._descriptor import ELEMENTS
from ._layout import ALIGN, placed, state_of
from ._manifest import Manifest, Placed, contiguous, parse
from ._pieces import Pieces, Room, usual_threads
from ._safetensors import Block, Model, Stored
from .array import Array, ElementType, close_at_exit
from .errors import ArgumentError, FormatError, UnknownError, counted, quoted, whole
from .shared import Shared, empty

_THREADS_LIMIT = 256


class Tensor(Array):
    """A tensor in GPU memory: an :class:`Array` with a shape. PyTorch, CuPy and others take it as they take arrays.

    ``dtype`` is NumPy's name, or "bfloat16", "float8_e4m3" or "float8_e5m2", which only ``__dlpack__`` passes on.
    """

    def __init__(self, memory: Array, p: Placed, trusted: bool = False) -> None:
        e = ELEMENTS[p.number]
        self._place, self._memory, self._strides = p, memory, p.strides
        super().__init__(memory._device, memory._pointer + p.offset, p.nbytes // e.size, ElementType(e.name, e.size, p.number), memory._readonly, memory._users, memory._base,
                         memory._order, memory._owner, trusted or memory._trusted, memory._export)

    def __repr__(self) -> str:
        return f"<cuvmm.Tensor of shape {self.shape} and {self.dtype} on device {self.device}{', read-only' if self.readonly else ''}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, part: Any) -> "Array":
        raise ArgumentError("a tensor of this package cannot be indexed", "make a tensor of PyTorch of it: torch.from_dlpack(tensor)")

    @property
    def shape(self) -> Tuple[int, ...]:
        return self._place.shape

    @property
    def strides(self) -> Tuple[int, ...]:
        """The distance between neighbours in each dimension, in elements. ``tobytes``, ``write`` and ``nbytes`` are of the
        bytes from the first element to the last, in the order of their addresses."""
        return self._strides or contiguous(self.shape)

    @property
    def kind(self) -> str:
        """What the tensor is in its model, such as "parameter" or "buffer"; empty if the manifest does not say."""
        return self._place.kind

    def allow_readonly(self) -> "Tensor":
        return Tensor(self._memory, self._place, True)


class Shard(NamedTuple):
    """The part of rank ``rank`` of a dimension that is divided evenly among ``ranks``: see :func:`load_file`."""

    dim: int
    rank: int
    ranks: int


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, in one piece of memory. Each look-up returns another :class:`Tensor` of the same elements."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # and not those of Mapping, which compare all tensors

    def __init__(self, memory: Any, placed: Dict[str, Placed]) -> None:
        self.memory, self._placed = memory, placed

    def __repr__(self) -> str:
        return f"<cuvmm.{type(self).__name__} of {counted(len(self), 'tensor')} in {self.memory!r}>"

    def __getitem__(self, name: str) -> Tensor:
        p, memory = self._placed[name], self.memory.array
        if p.offset + p.nbytes > memory.nbytes:
            raise ArgumentError(f"tensor {quoted(name)}, which ends at byte {p.offset + p.nbytes} of {memory.nbytes}", "wait for an announcement that shows it: next")
        return Tensor(memory, p)

    def __iter__(self) -> Iterator[str]:
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)


class Weights(Tensors):
    """Tensors by name, in one piece of memory. Close it, after the tensors and arrays of it are deleted.

    :meth:`Server.publish` takes them, with their manifest; ``memory`` is the memory itself. :func:`load_file` makes them of files, and
    :meth:`of` of the tensors of a model.
    """

    def __init__(self, memory: Shared, placed: Sequence[Placed], metadata: Dict[str, str], owned: bool) -> None:
        super().__init__(memory, {p.name: p for p in placed})
        self.metadata, self._owned = metadata, owned

    @classmethod
    def of(cls, like: Any, device: int = 0) -> "Weights":
        """Copies the tensors of a ``state_dict``, or of a module of PyTorch, into one piece of new memory on a device.

        Of a tuple of dtype and shape the place is made, and what is in it is undefined.
        Tensors that share memory, as tied weights do, share it here, too, and transposed ones stay transposed. Of a module the manifest
        says which tensors are parameters and which are buffers.
        """
        m = placed(like)
        memory = empty(m.nbytes, "uint8", device)
        try:
            w = cls(memory, m.tensors, {}, True)
            w.update({name: v for name, v in state_of(like).items() if not isinstance(v, tuple)})
            return w
        except BaseException:
            close_at_exit(memory.close, True)
            raise

    def update(self, values: Any) -> None:
        """Copies values to the tensors of the same names: those of a ``state_dict``, or of a module of PyTorch, by PyTorch on its current
        stream; and bytes, or what has a buffer, on the host.

        Memory that was announced is updated within :meth:`Publication.rewrite`, and announced behind that stream.
        """
        values = state_of(values)
        for name in values:
            if name not in self._placed:
                raise UnknownError(f"no tensor {quoted(str(name))} to update", "update the tensors that there are, or lay the memory out anew: Weights.of")
        torch = sys.modules.get("torch")
        for name, value in values.items():
            to = self[name]
            if torch is None or not isinstance(value, torch.Tensor):
                to.write(value)
            elif tuple(value.shape) != to.shape:
                raise ArgumentError(f"tensor {quoted(name)} of shape {tuple(value.shape)}, where {to.shape} is laid out", "lay the memory out anew: Weights.of")
            else:
                torch.from_dlpack(to).copy_(value.detach())

    def manifest(self) -> bytes:
        """What tensors there are and where, as followers in Go (handles.Manifest) and Python (:func:`tensors`) read it."""
        return Manifest(len(self.memory), self._placed.values()).text()

    def close(self) -> None:
        """Frees the memory, unless it was the caller's. InUseError while it is published, or tensors of it are in use. Idempotent."""
        if self._owned:
            self.memory.close()

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        close_at_exit(self.close, error)


def manifest_of(like: Any) -> bytes:
    """The manifest that :meth:`Weights.of` would have, of a ``state_dict``, a module of PyTorch, or tuples of dtype and shape: for ``expect``."""
    return placed(like).text()


def tensors(memory: Array, manifest: Any) -> Dict[str, Tensor]:
    """Returns the tensors of memory that another process shares, by name. ``manifest`` is the text that came with it, which is checked.

    They keep the memory mapped as other arrays do, and are as readable and writable as ``memory``, an array of bytes.
    """
    if memory.itemsize != 1:
        raise ArgumentError(f"an array of {memory.dtype}", "pass the array of bytes that the manifest came with")
    return {p.name: Tensor(memory, p) for p in within(memory.nbytes, parse(manifest)).tensors}


def within(nbytes: int, m: Manifest) -> Manifest:
    """Returns the manifest, if it is that of memory of a size."""
    if m.nbytes != nbytes:
        raise FormatError(f"a manifest of {m.nbytes} bytes, for memory of {nbytes}", "the publisher is at fault")
    return m


def load_file(path: Any, device: int = 0, *, parts: Optional[Mapping[str, Any]] = None, into: Optional[Shared] = None, threads: int = 0,
              digests: bool = True) -> Weights:
    """Loads a file in the safetensors format, or a folder with its index, into one piece of GPU memory, and returns the tensors by name.

    ``parts`` says which tensors, and what of them: ``...`` for a whole tensor, :class:`Shard` for a rank's part, a slice of the first
    dimension, or a tuple of slices. Without it all tensors are loaded. The memory can be published: it is new, or
    ``into``, memory of "uint8" from :func:`empty` that grows as needed and stays the caller's. Work that still uses it
    must be done.

    Threads read into pinned memory while earlier pieces are copied. The headers are checked before memory is touched
    (FormatError). A file that is written meanwhile is a ChangedError, and a whole tensor that does not have the digest (CRC-32C) that the
    file declares is a DigestError, unless ``digests`` is False. After an error the contents of ``into`` are undefined.
    """
    threads = whole(threads, "threads") or usual_threads()
    if not 1 <= threads <= _THREADS_LIMIT:
        raise ArgumentError(counted(threads, "thread"), f"pass 1 to {_THREADS_LIMIT}, or 0")
    if into is not None and into.dtype != "uint8":
        raise ArgumentError(f"memory of {into.dtype}", 'pass memory of cuvmm.empty(..., "uint8")')
    model = Model(os.fspath(path))
    try:
        chosen = model.tensors if parts is None else {name: _named(model, name) for name in parts}
        blocks, placed, end = [], [], 0
        for t in sorted(chosen.values(), key=lambda t: (t.file.path, t.offset)):
            block = Block.of(t, _bounds(t, ... if parts is None else parts[t.name]))
            start = -(-end // ALIGN) * ALIGN
            placed.append(Placed(t.name, t.number, block.shape, start))
            blocks.append(_Part(start, block, t if digests and t.digest is not None and block.nbytes == t.nbytes else None))
            end = start + block.nbytes
        memory = empty(end, "uint8", device) if into is None else into
        try:
            if len(memory) < end:
                memory.resize(end)
            loading = _Loading(memory, [p for p in blocks if p.block.nbytes], end)
            if end:
                loading.run(threads)
            model.check()
            loading.compare()
            return Weights(memory, placed, model.metadata, into is None)
        except BaseException:
            if into is None:
                memory.close()
            raise
    finally:
        model.close()


def _named(model: Model, name: str) -> Stored:
    t = model.tensors.get(name)
    if t is None:
        raise UnknownError(f"no tensor {quoted(str(name))} in {quoted(model.files[0].path)}", "take a name from the file")
    return t


def _bounds(t: Stored, part: Any) -> List[Tuple[int, int]]:
    """Returns begin and end in each dimension."""
    bounds = [(0, n) for n in t.shape]
    if part is ...:
        return bounds
    if isinstance(part, Shard):
        dim, rank, ranks = (whole(n, "in a Shard") for n in part)
        if not 0 <= dim < len(bounds) or not 0 <= rank < ranks or t.shape[dim] % ranks:
            raise ArgumentError(f"{part} of tensor {quoted(t.name)}, of shape {t.shape}", "pass a rank below the number of ranks, which divides the dimension")
        n = t.shape[dim] // ranks
        bounds[dim] = (rank * n, rank * n + n)
        return bounds
    slices = part if isinstance(part, tuple) else (part,)
    if len(slices) > len(bounds) or not all(isinstance(s, slice) and s.step in (None, 1) for s in slices):
        raise ArgumentError(f"part {part!r} of tensor {quoted(t.name)}, of shape {t.shape}", "pass ..., a Shard, or at most a slice without a step for each dimension")
    for i, s in enumerate(slices):
        start, stop, _ = s.indices(t.shape[i])
        bounds[i] = (start, max(start, stop))
    return bounds


class _Part(NamedTuple):
    """A block and its place in memory. ``declared`` is the tensor of which it is all, if the file declares a digest."""

    start: int
    block: Block
    declared: Optional[Stored]


class _Loading(Pieces):
    """Bytes that threads read into pinned memory and copy: blocks at their places in memory, with zeros between them."""

    def __init__(self, memory: Shared, blocks: List[_Part], nbytes: int) -> None:
        super().__init__(memory.device, memory.array.ptr, nbytes)  # no array, which would be in use in the traceback of an error
        self.blocks, self.ends = blocks, [p.start + p.block.nbytes for p in blocks]
        self.sums: List[_crc32c.Run] = []  # of what was read of blocks
        self._digest = _crc32c.fastest() if any(p.declared for p in blocks) else _crc32c.in_python

    def work(self, rooms: List[Room]) -> None:
        for room in itertools.cycle(rooms):
            at, n = self.next()
            if not n:
                return
            room.stream.synchronize()
            self._read(room.view[:n], at)
            self.copy("cuMemcpyHtoDAsync_v2", self.pointer + at, room.address, n, room.stream)

    def _read(self, to: memoryview, at: int) -> None:
        """Fills a piece, which begins at byte ``at`` of the memory."""
        done, i = 0, bisect.bisect_right(self.ends, at)
        while i < len(self.blocks) and self.blocks[i].start < at + len(to):
            start, b, declared = self.blocks[i]
            begin = max(start - at, 0)
            to[done:begin] = bytes(begin - done)
            done = begin
            for offset, n in b.runs(at + begin - start, min(start + b.nbytes - at, len(to)) - begin):
                b.file.read_into(to[done:done + n], offset)
                done += n
            if declared is not None:
                self.sums.append(_crc32c.Run(i, at + begin - start, done - begin, self._digest(to[begin:done])))
            i += 1
        to[done:] = bytes(len(to) - done)

    def compare(self) -> None:
        """Raises an error if what was read of a whole tensor is not what its file declares."""
        for i, digest in _crc32c.joined(self.sums).items():
            declared = self.blocks[i].declared
            assert declared is not None
            declared.check(digest)


__all__ = ["Shard", "Tensor", "Weights", "load_file", "tensors"]
