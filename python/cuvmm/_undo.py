"""What an interruption or a failing call at any place leaves: nothing that no code can give back, and nothing given back twice.

Ctrl-C raises KeyboardInterrupt between any two steps of a program, and any call of the driver or the system may fail. A
change of state and its effect outside of this process are therefore one step, or ordered, by four rules:

- Spend a number before it is written: a generation that was written anywhere is never given away again.
- Note a resource with its owner before it is acquired, and forget it once the call that frees it has recorded that it
  succeeded (:class:`Owned`). Only a result that is an error leaves it to be freed again.
- Set "done" last: a close that was interrupted, or failed, goes on where it stopped when it is called again.
- Register before the reply: what a message promises is there before the message is sent.

Locks are taken by with statements over the interpreter's own locks: entering one is a single step, unlike
``threading.Condition``'s and ``Event``'s.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional

from .errors import Error

if TYPE_CHECKING:
    from ._driver import Driver


class Results(List[int]):
    """Passed as the last argument of a call of the driver, which records its result here in the step in which it is made."""


class Owned:
    """What the driver gives once and takes back once. ``cells`` are the arguments of the call that frees it."""

    def __init__(self, d: "Driver", free: str, *cells: Any) -> None:
        self._driver, self._free, self._cells = d, free, cells
        self._made, self._freed = Results(), Results()

    @property
    def live(self) -> bool:
        return self._made[-1:] == [0] and self._freed[-1:] != [0]

    def make(self, name: str, *args: Any) -> int:
        """Makes the call that acquires it, and returns the result."""
        return self._driver.raw(name, *args, self._made)

    def close(self) -> None:
        """Frees it. Idempotent; after an error it can be repeated."""
        if self.live:
            code = self._driver.raw(self._free, *self._cells, self._freed)
            if code != 0:
                raise self._driver.error(self._free, code)


class Undo:
    """What an owner has, in the order of its making. The owner's lock guards it."""

    _all: List[Any] = []  # of one that was interrupted before it had a list of its own

    def __init__(self) -> None:
        self._all = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def own(self, what: Any) -> Any:
        """Notes something that has an idempotent ``close``, before it is acquired."""
        self._all.append(what)
        return what

    def forget(self, what: Any) -> None:
        self._all[:] = [w for w in self._all if w is not what]

    def close(self) -> None:
        """Closes all, the last first. What cannot be closed stays for the next call, with what was made before it."""
        while self._all:
            self._all[-1].close()
            del self._all[-1]

    def abandon(self) -> None:
        """Closes all after a failure, which is what the caller is told. What cannot be closed now is closed later."""
        try:
            self.close()
        except Error:
            leave(self)
        except BaseException:
            leave(self)
            raise


class Passing(Undo):
    """What a call has for its own use. What an interrupted call did not give back is closed later."""

    def __del__(self) -> None:
        if self._all:
            leave(self)


_retrying = threading.RLock()
#: What could not be given back, and has no owner any more.
_leftovers: List[Any] = []


def leave(what: Any) -> None:
    """Keeps what could not be closed, for another try."""
    _leftovers.append(what)


def retry() -> None:
    """Tries again to close what could not be closed. Owners do so when they close."""
    if not _leftovers:
        return
    with _retrying:
        for what in list(_leftovers):
            try:
                what.close()
            except Error:
                continue
            _leftovers.remove(what)


class Gate:
    """Opens once, and lets all that wait for it pass."""

    def __init__(self) -> None:
        self._open = False
        self._passing: "queue.SimpleQueue[None]" = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._open

    def set(self) -> None:
        self._open = True
        self._passing.put(None)

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits until it is open; False at the deadline."""
        if not self._open:
            try:
                self._passing.get(timeout=timeout)
            except queue.Empty:
                return self._open
            self._passing.put(None)  # for the next one
        return True


class File:
    """A file descriptor, which is closed once."""

    _opened: List[int] = []  # of one that was interrupted before it had a list of its own

    def __init__(self) -> None:
        self._closed: List[Optional[int]] = []
        self._opened = []

    def open(self, call: Callable[..., int], *args: Any) -> int:
        """Makes the call that returns the descriptor, and notes it in the same step."""
        self._opened.extend(map(call, *([a] for a in args)) if args else [call()])
        return self._opened[0]

    @property
    def number(self) -> int:
        return self._opened[0]

    @property
    def live(self) -> bool:
        return bool(self._opened) and not self._closed

    def close(self) -> None:
        if self.live:
            try:
                self._closed.extend(map(os.close, [self.number]))
            except OSError:
                self._closed.append(None)  # the number is free, whatever was not written

    __del__ = close


def _in_child() -> None:
    """Nothing of the parent is this process's, and a thread that does not exist here may have held the lock."""
    global _retrying
    _retrying = threading.RLock()
    del _leftovers[:]


os.register_at_fork(after_in_child=_in_child)
