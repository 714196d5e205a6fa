"""Objects of one process: neither CUDA nor a connection survives ``fork``."""

from __future__ import annotations

import enum
import os
import threading
from typing import Any, Optional

from .errors import ForkedError


class State(enum.Enum):
    """The state of an owner of memory or of connections.

    ======== ==================================================== =============================
    state    means                                                leaves it by
    ======== ==================================================== =============================
    OPEN     all calls are allowed                                ``close``: CLOSING
    CLOSING  a close began; it may have failed or been            ``close`` to its end: CLOSED
             interrupted, and goes on when it is called again
    CLOSED   nothing is left
    ======== ==================================================== =============================
    """

    OPEN, CLOSING, CLOSED = range(3)


class OfProcess:
    """Belongs to the process that made it.

    In a child of ``fork`` its locks may be held by threads that do not exist there, so a call asks for the process before
    it takes any.
    """

    _made_in: int

    def __new__(cls, *_: Any, **__: Any) -> Any:
        self = super().__new__(cls)
        self._made_in = os.getpid()
        return self

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._made_in

    def _check_process(self) -> None:
        if self._forked:
            raise ForkedError(f"this {type(self).__name__} was made before the process forked", "make it in the process that uses it; start workers with the spawn method")


class Condition(threading.Condition):
    """A condition of an RLock that is held once, whose wait has the lock again even if Ctrl-C ends it."""

    def wait(self, timeout: Optional[float] = None) -> bool:
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]  # it was interrupted between the release and the wait
                self.acquire()
            raise
