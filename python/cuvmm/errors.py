"""The errors of this package.

Every error derives from :class:`Error`. Its text describes the failure, followed by the remedy in parentheses, which is
also in ``hint``. Errors that have a standard counterpart derive from it, too:
``except TimeoutError`` and ``except MemoryError`` catch them.
"""

from __future__ import annotations

import operator
from typing import Any, Optional, Tuple, overload


class Error(Exception):
    """An error of this package. ``hint`` is the remedy, or empty, and ``what`` the text without it."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what} ({hint})" if hint else what)
        self.what, self.hint = what, hint
        self._given: Tuple[Any, ...] = (what, hint)

    def again(self) -> "Error":
        """A new error with the same content, to raise one that is stored.

        A raised error has the frames of its callers in its traceback. If it were stored it would keep them alive, and
        the arrays and tensors in them.
        """
        return type(self)(*self._given)


class ArgumentError(Error, ValueError):
    """An argument that no call could take."""


def whole(n: Any, what: str) -> int:
    """Returns a number of elements or bytes."""
    try:
        return operator.index(n)
    except TypeError:
        raise ArgumentError(f"{n!r} {what}", "pass a whole number") from None


_FOREVER = 1e9  # seconds, which every wait of a thread can take


@overload
def seconds(timeout: float) -> float: ...


@overload
def seconds(timeout: Optional[float]) -> Optional[float]: ...


def seconds(timeout: Optional[float]) -> Optional[float]:
    """Returns the seconds that a call may wait; infinity is as long as any wait can take. None is the call's own default."""
    if timeout is not None and timeout != timeout:
        raise ArgumentError("a timeout of nan", "pass a number of seconds; inf waits for ever")
    return None if timeout is None else min(timeout, _FOREVER)


def counted(n: int, what: str) -> str:
    """Returns a number with its noun, such as "1 byte" or "2 bytes"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def quoted(text: str) -> str:
    """Returns another process's text in quotes, once: one that ends in a quoted text of its own has no escaped quotes."""
    return '"' + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) + '"'


class FormatError(Error, ValueError):
    """A file, or a manifest, is not what its format demands."""


class ChangedError(Error):
    """A file was written while it was read."""


class DigestError(Error):
    """The bytes that were read do not have the digest that the file, or the manifest of an object, declares."""


class ClosedError(Error):
    """The object was closed in this process."""


class GoneError(Error, ConnectionError):
    """The other process ended, or closed its end of the connection."""


class RefusedError(Error):
    """The other process refused; the reason is quoted."""


class ProtocolError(Error):
    """The other side broke the protocol, and the connection is closed."""


class PeerError(Error, PermissionError):
    """The socket, its folder or its server does not belong to the expected user."""


class UnknownError(Error, LookupError):
    """No publication, lease, follower, object or tensor of that name."""


class AccessError(Error, PermissionError):
    """More access was requested than the publisher grants."""


class WithdrawnError(Error):
    """The publisher withdrew the publication."""


class MovedError(Error):
    """Another process publishes it from now on, at the same socket."""


class EndedError(Error):
    """The publisher ended this follower for a reason of its own, which is quoted."""


class ExcludedError(EndedError):
    """The publisher rewrote what this follower read without waiting any longer, and goes on without it: discard what was computed from it."""


class RewritingError(Error):
    """The publisher rewrites the elements that are shown, or a block that rewrites ended without an announcement."""


class IncompleteError(Error):
    """The publisher ended while it rewrote the elements: they may be a mixture of two generations."""


class UnfinishedError(GoneError):
    """The publisher ended before work that it had announced was done: elements that were shown do not count."""


class WritingError(Error):
    """Another process writes the object, and has not committed it."""


class ExistsError(Error):
    """There is an object of that name already."""


class LostError(Error):
    """The broker no longer has the object: it was removed, or keeper and broker ended."""


class StalledError(Error, TimeoutError):
    """The publisher did not finish announced work within ``max_wait``."""


class WaitTimeout(Error, TimeoutError):
    """The time that the caller, or the protocol, allows was over."""


class CapacityError(Error):
    """The reserved range of addresses is too small."""


class TooLargeError(Error):
    """Something is larger than a limit of this process, of the other one, or of the protocol."""


class MismatchError(Error, TypeError):
    """The memory is something else than was declared or expected."""


class InUseError(Error):
    """Arrays, or another process, still use it."""


class OutOfMemory(Error, MemoryError):
    """The device has no memory of that size left."""


class FilesError(Error, OSError):
    """This process may open no further file descriptors."""


class NotSupported(Error):
    """The driver or the device cannot do it."""


class SuspendedError(Error):
    """The memory sleeps: it was suspended, and not resumed yet."""


class ForkedError(Error):
    """The object belongs to the parent of this process: neither CUDA nor a connection survives ``fork``."""


class DriverError(Error):
    """A call of the CUDA driver failed: ``call`` is its name, ``code`` its result."""

    def __init__(self, call: str, code: int, name: str, what: str = "", hint: str = "") -> None:
        super().__init__(f"{what + ': ' if what else ''}{call} returned {name} ({code})", hint)
        self.call = call
        self.code = code
        self._given = (call, code, name, what, hint)
