"""Memory of a broker for a publication that outlives its publishers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from . import _page
from ._driver import Device
from ._page import Slot
from ._replica import Chunk
from ._undo import File, Undo
from .array import ElementType, Users
from .errors import NotSupported, TooLargeError, counted
from .shared import Shared

if TYPE_CHECKING:
    from .broker import Object, ObjectListing


class Kept(Shared):
    """Memory that a broker keeps for a publication: see :meth:`Broker.keep`. It has one size, and all of it is announced at once.

    A publisher that ends by itself closes its server and then this, and writes nothing in between: followers that reconnect go on with
    the next publisher. A withdrawal ends them, and nothing is whole after that.
    """

    to_end = "close its server"

    def __init__(self, o: "Object", kind: ElementType, page: File) -> None:
        memory = o.memory
        super().__init__(kind, memory.device, Users())
        self._object, self._page = o, page
        #: What every publisher of the memory calls the publication, so that followers of the one before keep what they have mapped.
        self.identity = hashlib.sha256(b"cuvmm publication " + o.key).digest()[:16]
        first = int.from_bytes(self.identity[:8], "little")
        range, undo, pinned, sizes = memory.hand_over()
        self.adopt(range, undo, len(memory) // kind.size, [Chunk((first + i) % (1 << 64), n) for i, n in enumerate(sizes)], pinned)

    @property
    def about(self) -> "ObjectListing":
        """Describes the memory, as of when it was kept for this process."""
        return self._object.about

    def check(self) -> None:
        """LostError once a broker that this process came back to does not keep the memory for it."""
        self._object.check()

    def resize(self, length: int) -> None:
        raise NotSupported(f"{counted(length, 'element')} of memory that a broker keeps, which has one size: {len(self)}", "remove it from the broker, and keep it with another size")

    def past(self, dev: Device, words: bool, undo: Undo) -> "Past":
        """Maps the words for a publication, and returns what they say. The words are the publication's until ``undo`` closes."""
        slot = Slot(_page.open_page(self._page.number, dev if words else None, undo), 0)
        complete, _, flux, cut = slot.seen()
        latest = max(complete, flux, cut)
        if latest >= _page.LAST_GENERATION:
            raise TooLargeError(f"{latest} generations", "remove the memory from the broker, and keep it anew")
        return Past(slot, latest, complete, flux, cut)

    def close(self) -> None:
        """Waits for all work of the device, unmaps the memory, and tells the broker, by which the next process may publish it. Idempotent.

        While it is published, or arrays or tensors of it are in use, it raises InUseError and changes nothing.
        """
        super().close()
        self._page.close()
        self._object.let_go()


class Past(NamedTuple):
    """Where the publisher before has ended, as the words of the page say: docs/protocol.md."""

    slot: Slot
    latest: int  # the highest generation that any word has
    complete: int  # the last generation that is complete; 0 if nothing was announced
    flux: int  # the last generation that it began to rewrite
    cut: int

    @property
    def torn(self) -> bool:
        """Whether it rewrote what was complete, or withdrew: the elements may be a mixture."""
        return 0 < self.complete <= self.flux
