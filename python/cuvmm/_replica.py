"""A publication as its follower has it: a state machine without memory, threads or time."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from ._page import LAST_GENERATION
from .errors import MismatchError, ProtocolError, TooLargeError


#: States of a publication, as a view names them.
LIVE, STALE, SUSPENDED, MOVED, ENDED = 1, 2, 3, 4, 5
STATES = {LIVE: "live", STALE: "stale", SUSPENDED: "suspended", MOVED: "moved", ENDED: "ended"}


class Chunk(NamedTuple):
    """A piece of memory: its unique identity, and its size in bytes."""

    identity: int
    size: int


class View(NamedTuple):
    """The view of a generation: a step that brings a follower closer to the publication. See docs/protocol.md."""

    serial: int
    generation: int
    ordered: int
    length: int
    keep: int
    last: bool = True
    over: bool = False
    add: Tuple[Chunk, ...] = ()
    state: int = LIVE
    status: int = 0
    reason: str = ""

    @staticmethod
    def of(f: Dict[str, Any]) -> "View":
        """Makes a view of the fields of a message, and checks that they fit its state."""
        v = View(f["serial"], f["generation"], f["ordered"], f["length"], f["keep"], f["last"], f["over"],
                 tuple(Chunk(c["identity"], c["size"]) for c in f["chunks"]), f["state"], f["status"], f["reason"])
        nothing = v.length == v.keep == 0 and not v.add and v.last and not v.over
        if v.final:
            if v.serial or v.ordered or not nothing or (v.status == 0) != (v.state == MOVED):
                raise _broken(f"a last view in state {STATES[v.state]} that shows something, or with status {v.status}")
        elif v.status or v.reason or (v.state == SUSPENDED and not nothing):
            raise _broken(f"a view in state {STATES[v.state]} with status {v.status}, or with memory")
        return v

    def fields(self, token: bytes) -> Dict[str, Any]:
        """Returns the fields of the message."""
        return dict(self._asdict(), token=token, chunks=[c._asdict() for c in self.add])

    @property
    def final(self) -> bool:
        """Whether this is the last view that the publisher sends."""
        return self.state in (MOVED, ENDED)


def size_of(chunks: Iterable[Chunk]) -> int:
    return sum(c.size for c in chunks)


def _broken(why: str) -> ProtocolError:
    return ProtocolError(why, "the publisher does not follow the protocol")


class Replica:
    """Checks each view before it is carried out (``begin``), and records the outcome (``finish``).

    One view at a time is in progress. It is the next by its serial, of a later generation, and either removes chunks or
    elements, or adds chunks that fit, or reports that they do not fit. A follower that reconnects keeps what it has, and
    counts views from 1 (``restart``).
    """

    def __init__(self, unit: int, granularity: int, room: int, most: int) -> None:
        self.unit, self.granularity, self.room, self.most = unit, granularity, room, most
        self.chunks: List[Chunk] = []
        self.length = 0
        self.generation = 0
        self._serial = 0
        self._busy: Optional[View] = None

    def restart(self) -> None:
        """Begins a new connection."""
        self._serial, self._busy = 0, None

    def shrinks(self, v: View) -> bool:
        """Whether the view removes chunks or elements."""
        return not v.over and (v.keep < len(self.chunks) or (not v.add and v.length < self.length))

    def begin(self, v: View) -> None:
        if self._busy is not None:
            raise _broken(f"view {v.serial} before view {self._serial} was acknowledged")
        if v.serial != self._serial + 1:
            raise _broken(f"view {v.serial}, where {self._serial + 1} is the next")
        if not self.generation < v.generation <= LAST_GENERATION:
            raise _broken(f"generation {v.generation} after generation {self.generation}")
        if v.ordered > v.generation:
            raise _broken(f"generation {v.generation} is ordered behind the later {v.ordered}")
        if v.keep > len(self.chunks):
            raise _broken(f"a view that keeps {v.keep} of {len(self.chunks)} chunks")
        if v.keep < len(self.chunks) and v.add:
            raise _broken("a view that both removes and adds chunks")
        if v.over and (v.keep != len(self.chunks) or v.add or not v.last):
            raise _broken("a view that exceeds the room and changes something")
        self._fits(v)
        self._serial, self._busy = v.serial, v

    def _fits(self, v: View) -> None:
        if v.keep + len(v.add) > self.most:
            raise TooLargeError(f"{v.keep + len(v.add)} chunks, where the limit is {self.most}", "publish memory in larger chunks")
        before = size_of(self.chunks[:v.keep])
        total = before + size_of(v.add)
        for i, c in enumerate(v.add):
            if c.size == 0 or c.size % self.granularity:
                raise MismatchError(f"chunk {v.keep + i} has {c.size} bytes, not a multiple of {self.granularity}", "the publisher is at fault")
        if total > self.room:
            raise TooLargeError(f"chunks of {total} bytes in a range of {self.room}")
        if v.over:
            return
        if self.shrinks(v):
            if v.length > self.length or v.length > before // self.unit:
                raise _broken(f"a view that shrinks from {self.length} to {v.length} elements in {before} bytes")
        elif v.last and not self.length <= v.length <= total // self.unit:
            raise _broken(f"a view of {v.length} elements after {self.length}, in {total} bytes")

    def finish(self, failed: Optional[BaseException]) -> Dict[str, Any]:
        """Records the outcome of the view, and returns the fields of ``done``. A view that failed has changed nothing."""
        v = self._busy
        assert v is not None
        self._busy = None
        if failed is None and not v.over:
            if self.shrinks(v) or v.last:
                self.length = v.length
            self.chunks = [*self.chunks[:v.keep], *v.add]
        if failed is not None or v.last:
            self.generation = v.generation
        return {"serial": v.serial, "status": 0 if failed is None else 6, "chunks": len(self.chunks), "reason": "" if failed is None else str(failed)}
