"""Digests of the tensors in memory: CRC-32C, as load.Verify in Go computes them."""

from __future__ import annotations

import bisect
import itertools
from typing import List, Sequence, Tuple

from . import _crc32c
from ._driver import Device
from ._manifest import Placed
from ._pieces import Pieces, Room, usual_threads

_NAME = "crc32c:"


def digests_of(dev: Device, pointer: int, tensors: Sequence[Placed]) -> List[str]:
    """Returns the digest of each of the tensors, in the order of their offsets, of memory at an address. No work may write it."""
    sums = _Sums(dev, pointer, tensors)
    sums.run(usual_threads())
    joined = _crc32c.joined(sums.all)
    return [f"{_NAME}{joined.get(i, 0):08x}" for i in range(len(tensors))]


class _Sums(Pieces):
    """Pieces that are copied to the host, each while the one before is summed."""

    def __init__(self, dev: Device, pointer: int, tensors: Sequence[Placed]) -> None:
        self._tensors, self._reached = tensors, list(itertools.accumulate((p.offset + p.nbytes for p in tensors), max))
        super().__init__(dev, pointer, self._reached[-1] if tensors else 0)
        self.all: List[_crc32c.Run] = []
        self._digest = _crc32c.fastest()

    def work(self, rooms: List[Room]) -> None:
        pending: List[Tuple[Room, int, int]] = []
        for room in itertools.cycle(rooms):
            at, n = self.next()
            if n:
                self.copy("cuMemcpyDtoHAsync_v2", room.address, self.pointer + at, n, room.stream)
            for before, start, size in pending:
                before.stream.synchronize()
                self._sum(before.view[:size], start)
            if not n:
                return
            pending = [(room, at, n)]

    def _sum(self, piece: memoryview, at: int) -> None:
        """Sums what a piece, which begins at byte ``at`` of the memory, has of each tensor. Tensors may share bytes."""
        for i in range(bisect.bisect_right(self._reached, at), len(self._tensors)):
            p = self._tensors[i]
            if p.offset >= at + len(piece):
                return
            begin, end = max(p.offset, at), min(p.offset + p.nbytes, at + len(piece))
            if begin < end:
                self.all.append(_crc32c.Run(i, begin - p.offset, end - begin, self._digest(piece[begin - at:end - at])))
