"""Words of pages, written in their turn."""

from __future__ import annotations

import time
from ctypes import c_void_p
from typing import Optional

from ._driver import Device, Event, Stream
from ._page import Slot
from ._undo import Undo

_POLL = 0.0001


class Timeline:
    """Writes words of pages, each when the work that precedes it is done, and never a later number before an earlier one.

    It writes on an internal stream, which waits for events of the streams that the caller names: so no stream of the caller
    has a write that a capture could record. Where streams cannot write words (``words`` is false), the CPU waits and writes.
    The owner serializes the calls.
    """

    def __init__(self, dev: Device, words: bool, undo: Undo) -> None:
        self._device = dev
        self.stream: Optional[Stream] = Stream(dev, undo) if words else None

    def behind(self, stream: c_void_p) -> None:
        """Orders later writes behind the work that is on a stream now."""
        with Event(self._device, stream) as e:
            if self.stream is not None:
                e.hold(self.stream.handle)
                return
            while not e.passed():
                time.sleep(_POLL)

    def write(self, slot: Slot, word: int, number: int) -> None:
        if self.stream is None:
            slot.store(word, number)
            return
        with self._device.current() as d:
            d.call("cuStreamWriteValue64_v2", self.stream.handle, slot.at(word), number, 0)

    def done(self) -> bool:
        """Whether all writes so far are done."""
        return self.stream is None or not self.stream.live or self.stream.done()

    def finish(self) -> None:
        """Waits until all writes so far are done."""
        if self.stream is not None and self.stream.live:
            self.stream.synchronize()
