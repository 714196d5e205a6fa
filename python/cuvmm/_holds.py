"""What may still read the elements that a follower shows: a state machine without driver, threads or time."""

from __future__ import annotations

import weakref
from typing import Iterable, List, Optional, Set

from ._page import FLUX, HELD, INTENT, RELEASED, Slot, full_barrier, reached


class Wait:
    """A call of ``next`` that waits. It is forgotten with the call, however that ends."""


class Holds:
    """The publisher rewrites nothing before all holds have ended. The follower's lock guards it.

    ========== =================================================== ==============================================
    holder     begins with                                         ends with
    ========== =================================================== ==============================================
    a stream   a ``next`` or ``order`` that names it               a ``next`` or ``release`` that names it
    the caller a ``next`` without streams                          any ``next``, or a ``release`` without streams
    an export  an array that is exported to a stream (DLPack, the  as the caller's, behind the work of that stream
               CUDA array interface), unless the stream holds
    a waiting  the arrival of what it waits for                    its end, when what it shows is held
    ``next``
    ========== =================================================== ==============================================

    The two processes agree by words of the follower's slot. The follower writes that it holds, and then looks whether
    the publisher wants to rewrite that; the publisher writes that it does, and then looks who holds. So at least one of them sees the
    other. While one hold lasts, others begin and end without any word: that there is one is all that the publisher asks.

    A ``next`` that waits would hold nothing until its thread runs, and by then a publisher that rewrites again at once wants
    what has arrived. So the thread that maps it begins the hold for the ``next``, before it acknowledges, which is what
    ``rewrite`` waits for.

    What interrupts a begin leaves a number that the next end tells, and what interrupts an end leaves holds that the next
    one ends.
    """

    def __init__(self) -> None:
        self._streams: Set[int] = set()
        self._exports: Set[int] = set()
        self._caller = False
        self._waits: "weakref.WeakSet[Wait]" = weakref.WeakSet()
        self._early: Optional[int] = None  # there is a hold for them: the last generation that was to be rewritten when it began
        self._number = 0  # of the last hold that began while there was none
        self._told = 0  # the last one of which the publisher is told that it has ended

    def any(self) -> bool:
        return self._caller or self._early is not None or bool(self._streams or self._exports)

    def wanted(self, slot: Slot) -> int:
        """Returns the last generation that is not to be shown: the publisher wants to rewrite it, or, since it waits for a hold that began early, wanted to before."""
        return slot.load(INTENT) if self._early is None else max(self._early, slot.load(FLUX))

    def begin(self, slot: Slot, generation: int, streams: List[int], *, counts: bool, anew: bool, export: bool = False) -> bool:
        """Lets the streams hold a generation, or without streams the caller. False, without effect, if the publisher wants to rewrite it.

        ``counts`` is whether the publisher's words do: one that has ended rewrites nothing more. ``anew`` is a generation that nothing holds yet. One that is shown and held stays as it is, although the publisher may
        wait to rewrite it.
        """
        if self._enter(slot, generation, counts=counts, anew=anew) is None:
            return False
        if export:
            self._exports.update(s for s in streams if s not in self._streams)
        else:
            self._streams.update(streams)
            self._caller = self._caller or not streams
        return True

    def _enter(self, slot: Slot, generation: int, *, counts: bool, anew: bool) -> Optional[int]:
        """Tells the publisher that there is a hold, and returns what it wants to rewrite; None, without effect, if that is this generation."""
        first, held = not self.any(), self._caller or bool(self._streams or self._exports)  # an early hold is of what comes next
        if first:
            self._number += 1
            slot.store(HELD, self._number)
            full_barrier()
        wanted = self.wanted(slot)
        if counts and wanted >= generation and (anew or not held or slot.load(FLUX) >= generation):
            if first:
                slot.store(HELD, self._number - 1)
                self._number -= 1
            return None
        return wanted

    def wait(self, call: Wait) -> None:
        """Notes that a ``next`` waits."""
        self._waits.add(call)

    def begin_early(self, slot: Slot, generation: int, *, counts: bool) -> None:
        """Begins a hold of a generation that has arrived, for those that wait."""
        if self._waits and self._early is None:
            self._early = self._enter(slot, generation, counts=counts, anew=True)

    def end_wait(self, call: Wait) -> None:
        """Ends the early hold: what its ``next`` has shown is held."""
        self._waits.discard(call)
        self._early = None

    def restart(self, old: Slot, slot: Slot, generation: int) -> bool:
        """Tells another publisher, whose slot it is, whether anything holds, or was released while its work is not done, whose end is untold
        again. False if that publisher may not have waited for it.
        """
        done = reached(old.load(RELEASED), self._told)
        self._told = self._number = 0
        self._early = None
        if done and not self.any():
            return True
        self._number = 1
        slot.store(HELD, 1)
        full_barrier()
        return generation == 0 or slot.load(INTENT) < generation

    def holding(self, streams: Iterable[int], caller: bool) -> List[int]:
        """Returns the streams whose work must be done before the holds of these streams, and the caller's, have ended."""
        return [s for s in {*streams, *(self._exports if caller else ())} if s in self._streams or s in self._exports]

    def end(self, stream: int, named: bool) -> None:
        """Ends the holds of a stream, or, if it is not named, those of exports."""
        self._exports.discard(stream)
        if named:
            self._streams.discard(stream)

    def end_caller(self) -> None:
        self._caller = False

    def untold(self) -> Optional[int]:
        """Returns the number to write to the released word, if nothing holds any more."""
        return None if self.any() or self._told == self._number else self._number

    def tell(self, number: int) -> None:
        self._told = number
