"""Memory of a device in pieces, which threads copy from or to pinned memory of the host."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from typing import List, NamedTuple, Tuple

from ._driver import Device, HostPin, Stream
from ._undo import Passing

#: The bytes of a piece.
PIECE = 4 << 20
_MOST_THREADS = 16


def usual_threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)


class Room(NamedTuple):
    """Pinned memory for one piece, and the stream of the copies from or to it."""

    view: memoryview
    address: int
    stream: Stream


class Pieces:
    """``nbytes`` bytes from an address of a device on. What each thread does with its two rooms is its ``work``."""

    def __init__(self, dev: Device, pointer: int, nbytes: int) -> None:
        self.device, self.pointer, self.nbytes = dev, pointer, nbytes
        self._lock, self._taken = threading.Lock(), 0
        self._failed: List[BaseException] = []

    def run(self, threads: int) -> None:
        self.device.driver.check_process()
        workers = [threading.Thread(target=self._run, name="cuvmm pieces", daemon=True) for _ in range(min(threads, -(-self.nbytes // PIECE)))]
        started: List[threading.Thread] = []
        try:
            for w in workers:
                started.append(w)
                w.start()
            for w in started:
                w.join()
        except BaseException as e:  # Ctrl-C: the workers end with their pieces
            self._failed.append(e)
            raise
        finally:
            for w in started:
                if w.ident is not None:
                    w.join()
        if self._failed:
            raise self._failed[0]

    def work(self, rooms: List[Room]) -> None:
        raise NotImplementedError

    def next(self) -> Tuple[int, int]:
        """Returns the place and the bytes of the next piece: no bytes if there is none."""
        with self._lock:
            at = self._taken
            self._taken += PIECE
        return at, max(0, min(PIECE, self.nbytes - at)) if not self._failed else 0

    def copy(self, call: str, to: int, source: int, nbytes: int, stream: Stream) -> None:
        with self.device.current() as d:
            d.call(call, to, source, nbytes, stream.handle)

    def _run(self) -> None:
        try:
            mine = Passing()
            try:
                self._make_rooms(mine)
            except BaseException:
                mine.abandon()
                raise
            mine.close()
        except BaseException as e:
            self._failed.append(e)

    def _make_rooms(self, mine: Passing) -> None:
        memory = mmap.mmap(-1, 2 * PIECE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        raw = (ctypes.c_char * (2 * PIECE)).from_buffer(memory)
        pin: HostPin = mine.own(HostPin(self.device, raw))
        pin.make()
        address, view = ctypes.addressof(raw), memoryview(raw).cast("B")
        rooms = [Room(view[at:at + PIECE], address + at, Stream(self.device, mine)) for at in (0, PIECE)]
        try:
            self.work(rooms)
        finally:
            for r in rooms:
                r.stream.synchronize()
