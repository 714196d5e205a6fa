"""What a publisher knows of one follower: a state machine without memory, threads or time."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ._tracker import Chunk, View, size_of
from .errors import ProtocolError


class Shown(NamedTuple):
    """What a publication shows at one moment. The bytes are there when the words have reached ``ordered``."""

    generation: int
    ordered: int
    length: int
    chunks: Tuple[Chunk, ...]


def common(a: Sequence[Chunk], b: Sequence[Chunk]) -> int:
    """How many chunks at the front are the same."""
    n = 0
    while n < len(a) and n < len(b) and a[n].identity == b[n].identity:
        n += 1
    return n


class Feed:
    """``next`` is what the follower is to be told, and ``took`` hears what became of it.

    A follower gives back before it gets, chunks never change places, and a slow one misses what was between. After a
    refusal it is left alone until the next generation. A follower that comes back has chunks, elements and a generation
    already.
    """

    def __init__(self, unit: int, room: int, has: Sequence[Chunk] = (), length: int = 0, generation: int = 0) -> None:
        self._unit, self.room = unit, room
        self._has: List[Chunk] = list(has)
        self._length = length
        self.told = generation
        self._serial = 0
        self._low: Optional[int] = None  # the least length shown since the last view was made
        self._out: Optional[View] = None
        self.reason = ""

    def lower(self, length: int) -> None:
        """Hears that less is shown."""
        self._low = length if self._low is None else min(self._low, length)

    def next(self, s: Shown, batch: int) -> Optional[View]:
        """The next view; None while nothing is to be said."""
        if self._out is not None or self.told == s.generation:
            return None
        keep = common(self._has, s.chunks)
        low = s.length if self._low is None else min(self._low, s.length)
        add: Tuple[Chunk, ...] = ()
        length, last, over = s.length, True, False
        if keep < len(self._has) or low < self._length:
            length = min(low, self._length, size_of(self._has[:keep]) // self._unit)
            last = length == s.length and keep == len(s.chunks)
        elif size_of(s.chunks) > self.room:
            over = True
        else:
            add = s.chunks[keep:]
            if len(add) > batch:
                add, last = add[:batch], False
        self._serial, self._low = self._serial + 1, None
        self._out = View(self._serial, s.generation, s.ordered, length, keep, last, over, add)
        return self._out

    def took(self, fields: Dict[str, Any]) -> None:
        """Hears ``done``."""
        v = self._out
        if v is None or fields["serial"] != v.serial:
            raise ProtocolError(f"done for view {fields['serial']}, and {self._serial} is the last that was sent")
        refused = fields["status"] != 0
        want = len(self._has) if refused else v.keep + len(v.add)
        if fields["chunks"] != want:
            raise ProtocolError(f"done that names {fields['chunks']} chunks instead of {want}")
        before = len(self._has)
        self._out, self.reason = None, ""
        if refused:
            self.told, self.reason = v.generation, fields["reason"]
            return
        shorter = v.keep < before or v.length < self._length
        self._has = [*self._has[:v.keep], *v.add]
        if v.over:
            self.told, self.reason = v.generation, "its room is too small"
        elif v.last:
            self.told, self._length = v.generation, v.length
        elif shorter:
            self._length = v.length

    def pinned(self, s: Shown) -> int:
        """The bytes that the follower may still have mapped and that are no longer shown."""
        have = [*self._has, *(self._out.add if self._out is not None else ())]
        return size_of(have[common(have, s.chunks):])
