"""A follower's progress, as its publisher tracks it: a state machine without memory, threads or time."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ._replica import LIVE, Chunk, View, size_of
from .errors import ProtocolError


class Shown(NamedTuple):
    """What a publication shows at one time. The bytes are complete when the fence words have reached ``ordered``."""

    generation: int
    ordered: int
    length: int
    chunks: Tuple[Chunk, ...]
    state: int = LIVE


def common(a: Sequence[Chunk], b: Sequence[Chunk]) -> int:
    """Returns how many leading chunks are the same."""
    n = 0
    while n < len(a) and n < len(b) and a[n].identity == b[n].identity:
        n += 1
    return n


class Progress:
    """``next`` returns the view to send; ``acknowledge`` takes the follower's reply to it.

    A follower unmaps before it maps, chunks never change places, and a slow follower skips generations. After a refusal it
    is sent nothing until the next generation. A follower that reconnects begins with chunks, elements and a generation.
    ``reached`` is the generation that it has, or refused.
    """

    def __init__(self, unit: int, room: int) -> None:
        self._unit, self.room = unit, room
        self._has: List[Chunk] = []
        self._length = 0
        self.reached = 0
        self._serial = 0
        self._low: Optional[int] = None  # the least length shown since the last view was made
        self._out: Optional[View] = None
        self.reason = ""

    def resume(self, identities: Sequence[int], length: int, generation: int, s: Shown) -> None:
        """Begins with the chunks of a follower that reconnects. The sizes of those that are not shown are unknown."""
        shown = [*s.chunks[:len(identities)], *[Chunk(0, 0)] * len(identities)]
        self._has = [c if c.identity == i else Chunk(i, 0) for i, c in zip(identities, shown)]
        self._length, self.reached = length, generation

    def lower(self, length: int) -> None:
        """Notes that fewer elements are shown."""
        self._low = length if self._low is None else min(self._low, length)

    def receives(self, s: Shown) -> bool:
        """Whether the follower is about to have what is shown, or to refuse it."""
        return self.reached < s.generation and (self._out is None or self._out.generation == s.generation)

    def next(self, s: Shown, batch: int) -> Optional[View]:
        """Returns the next view, or None if the follower needs none now."""
        if self._out is not None or self.reached >= s.generation:
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
        self._out = View(self._serial, s.generation, s.ordered, length, keep, last, over, add, s.state)
        return self._out

    def acknowledge(self, fields: Dict[str, Any]) -> None:
        """Takes the fields of ``done``."""
        v = self._out
        if v is None or fields["serial"] != v.serial:
            raise ProtocolError(f"done for view {fields['serial']}, where {self._serial} was the last one")
        refused = fields["status"] != 0
        want = len(self._has) if refused else v.keep + len(v.add)
        if fields["chunks"] != want:
            raise ProtocolError(f"done that names {fields['chunks']} chunks instead of {want}")
        before = len(self._has)
        self._out, self.reason = None, ""
        if refused:
            self.reached, self.reason = v.generation, fields["reason"]
            return
        shorter = v.keep < before or v.length < self._length
        self._has = [*self._has[:v.keep], *v.add]
        if v.over:
            self.reached, self.reason = v.generation, "its room is too small"
        elif v.last:
            self.reached, self._length = v.generation, v.length
        elif shorter:
            self._length = v.length

    def pinned(self, s: Shown) -> int:
        """Returns the bytes that the follower may still map although they are no longer shown."""
        have = [*self._has, *(self._out.add if self._out is not None else ())]
        return size_of(have[common(have, s.chunks):])
