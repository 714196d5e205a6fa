"""What a follower knows of its publication: a state machine without memory, threads or time."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from ._page import LAST_GENERATION
from .errors import MismatchError, ProtocolError, TooLargeError


#: States of a publication, as a view names them.
LIVE, STALE, SUSPENDED, MOVED, ENDED = 1, 2, 3, 4, 5
STATES = {LIVE: "live", STALE: "stale", SUSPENDED: "suspended", MOVED: "moved", ENDED: "ended"}


class Chunk(NamedTuple):
    """A piece of memory: its identity, which no other piece has, and its bytes."""

    identity: int
    size: int


class View(NamedTuple):
    """The view of a generation: a step of a follower towards the publication. See docs/protocol.md."""

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
        """The view of a message's fields, which must fit its state."""
        v = View(f["serial"], f["generation"], f["ordered"], f["length"], f["keep"], f["last"], f["over"],
                 tuple(Chunk(c["identity"], c["size"]) for c in f["chunks"]), f["state"], f["status"], f["reason"])
        nothing = v.length == v.keep == 0 and not v.add and v.last and not v.over
        if v.final:
            if v.serial or v.ordered or not nothing or (v.status == 0) != (v.state == MOVED):
                raise _broken(f"a last view in state {STATES[v.state]} that shows something, or with status {v.status}")
        elif v.status or v.reason or (v.state == SUSPENDED and not nothing):
            raise _broken(f"a view in state {STATES[v.state]} with status {v.status}, or that shows what is away")
        return v

    def fields(self, token: bytes) -> Dict[str, Any]:
        """The message's fields."""
        return dict(self._asdict(), token=token, chunks=[c._asdict() for c in self.add])

    @property
    def final(self) -> bool:
        """Whether this is the publisher's last word."""
        return self.state in (MOVED, ENDED)


def size_of(chunks: Iterable[Chunk]) -> int:
    return sum(c.size for c in chunks)


def _broken(why: str) -> ProtocolError:
    return ProtocolError(why, "the publisher does not follow the protocol")


class Tracker:
    """Checks views before anything is done with them (``take``), and hears what became of each (``took``).

    One view at a time is worked on: it is the next by its serial, of a later generation, and either takes chunks or
    length away, or adds chunks that fit, or says that they do not. A follower that comes back to a publisher keeps what
    it has (``again``), and counts views anew.
    """

    def __init__(self, unit: int, granularity: int, room: int, most: int) -> None:
        self.unit, self.granularity, self.room, self.most = unit, granularity, room, most
        self.chunks: List[Chunk] = []
        self.length = 0
        self.generation = 0
        self._serial = 0
        self._busy: Optional[View] = None

    def again(self) -> None:
        """Hears that a new connection begins."""
        self._serial, self._busy = 0, None

    def less(self, v: View) -> bool:
        """Whether the view takes something away."""
        return not v.over and (v.keep < len(self.chunks) or (not v.add and v.length < self.length))

    def take(self, v: View) -> None:
        if v.final:
            return
        if self._busy is not None:
            raise _broken(f"view {v.serial} before view {self._serial} was acknowledged")
        if v.serial != self._serial + 1:
            raise _broken(f"view {v.serial}, and {self._serial + 1} is the next")
        if not self.generation < v.generation <= LAST_GENERATION:
            raise _broken(f"generation {v.generation} after generation {self.generation}")
        if v.ordered > v.generation:
            raise _broken(f"generation {v.generation} is ordered behind the later {v.ordered}")
        if v.keep > len(self.chunks):
            raise _broken(f"a view that keeps {v.keep} of {len(self.chunks)} chunks")
        if v.keep < len(self.chunks) and v.add:
            raise _broken("a view that takes chunks away and adds others")
        if v.over and (v.keep != len(self.chunks) or v.add or not v.last):
            raise _broken("a view that is beyond the room and not alone")
        self._fits(v)
        self._serial, self._busy = v.serial, v

    def _fits(self, v: View) -> None:
        if v.keep + len(v.add) > self.most:
            raise TooLargeError(f"{v.keep + len(v.add)} chunks, and {self.most} is the most", "publish memory in larger chunks")
        before = size_of(self.chunks[:v.keep])
        total = before + size_of(v.add)
        for i, c in enumerate(v.add):
            if c.size == 0 or c.size % self.granularity:
                raise MismatchError(f"chunk {v.keep + i} has {c.size} bytes, not a multiple of {self.granularity}", "the publisher declared it wrong")
        if total > self.room:
            raise TooLargeError(f"chunks of {total} bytes, and the publisher was told of {self.room}")
        if v.over:
            return
        if self.less(v):
            if v.length > self.length or v.length > before // self.unit:
                raise _broken(f"a view that takes away and leaves {v.length} of {self.length} elements in {before} bytes")
        elif v.last and not self.length <= v.length <= total // self.unit:
            raise _broken(f"a view of {v.length} elements after {self.length}, in {total} bytes")

    def took(self, failed: Optional[Exception]) -> Dict[str, Any]:
        """Hears what became of the view, and returns the fields of ``done``. After a failure nothing of it was done."""
        v = self._busy
        assert v is not None
        self._busy = None
        if failed is None and not v.over:
            if self.less(v) or v.last:
                self.length = v.length
            self.chunks = [*self.chunks[:v.keep], *v.add]
        if failed is not None or v.last:
            self.generation = v.generation
        return {"serial": v.serial, "status": 0 if failed is None else 6, "chunks": len(self.chunks), "reason": "" if failed is None else str(failed)}
