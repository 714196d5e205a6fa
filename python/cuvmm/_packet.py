"""Packets: splits messages, and reassembles them. Nothing here reads a socket."""

from __future__ import annotations

import struct
from typing import List, NamedTuple, Optional, Tuple

from .errors import FilesError, ProtocolError, RefusedError, TooLargeError, quoted

MAGIC = b"cuvP"
#: Greetings and refusals are of this version.
FIRST_VERSION = 1
#: The versions that this package speaks.
LEAST_VERSION, LATEST_VERSION = 2, 2
BODY = 32 << 10
FILES = 253
MAX_BODY = 1 << 20
MAX_FILES = 4096
_MAX_KIND = 0xFF00
_LAST_KIND = 0xFF09
GREETING, REFUSAL = 0, 0xFFFF
_REASON = 512
_GREETING_LEAST, _GREETING_MOST = 20, 512
_HEADER = struct.Struct("<4sHH16sQIIII")
HEADER = _HEADER.size
_GREETING = struct.Struct("<16sHH")
#: The optional messages that this package takes, a bit for each: 1 is ``soon``.
_OPTIONAL = struct.pack("<I", 1)
NO_NONCE = bytes(16)


class Message(NamedTuple):
    """A whole message. The receiver owns the descriptors. ``lost``: some did not fit into this process."""

    kind: int
    body: bytes
    files: List[int]
    lost: bool = False


def packet(version: int, kind: int, nonce: bytes, sequence: int, body: bytes, files: int, all_bytes: int, all_files: int) -> bytes:
    return _HEADER.pack(MAGIC, version, kind, nonce, sequence, len(body), files, all_bytes, all_files) + body


def greeting(nonce: bytes) -> bytes:
    body = _GREETING.pack(nonce, LEAST_VERSION, LATEST_VERSION) + _OPTIONAL
    return packet(FIRST_VERSION, GREETING, NO_NONCE, 0, body, 0, len(body), 0)


def refusal(nonce: bytes, sequence: int, reason: bytes) -> bytes:
    return packet(FIRST_VERSION, REFUSAL, nonce, sequence, reason, 0, len(reason), 0)


class Outbound:
    """Splits messages into packets, once the peer has greeted."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        self.peer = NO_NONCE
        self.sequence = 1

    def packets(self, kind: int, body: bytes, files: List[int]) -> List[Tuple[bytes, List[int]]]:
        out: List[Tuple[bytes, List[int]]] = []
        at = fds = 0
        while not out or at < len(body) or fds < len(files):
            part, some = body[at:at + BODY], files[fds:fds + FILES]
            out.append((packet(self.version, kind, self.peer, self.sequence + len(out), part, len(some), len(body), len(files)), some))
            at, fds = at + len(part), fds + len(some)
        return out


def _broken(why: str) -> ProtocolError:
    return ProtocolError(why, "connect only to a process that speaks this protocol")


class Inbound:
    """Reassembles messages of packets, and trusts nothing in them. It is unusable after an error."""

    def __init__(self, nonce: bytes, may_lose: Tuple[int, ...] = (), max_files: int = MAX_FILES) -> None:
        self._own = nonce
        self._may_lose = may_lose
        self._max_files = max_files
        self.greeted = False
        self.version = FIRST_VERSION
        self.peer = NO_NONCE
        self.sequence = 0  # of the next packet
        self._first: Optional[Tuple[int, int, int]] = None  # kind, bytes in all, files in all
        self._body = bytearray()
        self._files: List[int] = []
        self._count = 0
        self._lost = False

    def pending(self) -> bool:
        """Whether part of a message has arrived."""
        return self._first is not None

    def rewind(self, sequence: int) -> None:
        """Has it take a message once more from its first packet on, which has that number."""
        self.sequence, self._first, self._files, self.greeted = sequence, None, [], sequence > 0

    def discard(self) -> List[int]:
        """Returns the descriptors of an incomplete message, for the caller to close."""
        files, self._files = self._files, []
        return files

    def take(self, p: bytes, files: List[int], lost: bool) -> Optional[Message]:
        """Takes a packet, and returns a message if this completes it.

        On an error the caller keeps the descriptors in ``files``.
        """
        if len(p) < HEADER:
            raise _broken(f"a packet of {len(p)} bytes, where the header has {HEADER}")
        magic, version, kind, to, sequence, n, fds, all_n, all_fds = _HEADER.unpack_from(p)
        body = p[HEADER:]
        self._check(magic, version, kind, n, fds, all_n, all_fds, len(body), len(files), lost)
        if sequence != self.sequence:
            raise _broken(f"packet {sequence}, where {self.sequence} is the next")
        self.sequence += 1
        if kind == REFUSAL:
            if to not in (self._own, NO_NONCE):
                raise _broken("a refusal of another connection")
            raise RefusedError("the other process closed the connection: " + quoted(body[:_REASON].decode("utf-8", "replace")))
        if not self.greeted:
            self._greet(kind, to, body, all_n, n, all_fds)
            return None
        if to != self._own:
            raise _broken("a packet of another connection")
        return self._join(kind, body, files, lost, fds, all_n, all_fds)

    def _check(self, magic: bytes, version: int, kind: int, n: int, fds: int, all_n: int, all_fds: int, have: int, came: int, lost: bool) -> None:
        if magic != MAGIC:
            raise _broken(f"a packet that begins with {magic!r} instead of {MAGIC!r}")
        want = FIRST_VERSION if kind == REFUSAL or not self.greeted else self.version
        if version != want:
            raise _broken(f"a packet of version {version}, where {want} was negotiated")
        if n != have or have > BODY:
            raise _broken(f"a packet that declares {n} bytes and has {have}")
        if fds > FILES or (not lost and fds < came):
            raise _broken(f"a packet that declares {fds} file descriptors and has {came}")
        if not lost and fds > came:
            lost = True
        if lost and kind not in self._may_lose:
            raise FilesError("file descriptors of a packet were dropped", "raise this process's limit of open files (ulimit -n)")
        if n > all_n or fds > all_fds:
            raise _broken("a packet that exceeds its message")

    def _greet(self, kind: int, to: bytes, body: bytes, all_n: int, n: int, all_fds: int) -> None:
        if kind != GREETING or to != NO_NONCE or not _GREETING_LEAST <= len(body) <= _GREETING_MOST or all_n != n or all_fds:
            raise _broken(f"something other than a greeting (kind {kind}, {all_n} bytes)")
        self.peer, least, most = _GREETING.unpack_from(body)
        self.version = min(most, LATEST_VERSION)
        if self.version < max(least, LEAST_VERSION):
            raise ProtocolError(f"the peer speaks versions {least} to {most}, and this package {LEAST_VERSION} to {LATEST_VERSION}",
                                "install versions that have one in common")
        self.greeted = True

    def _join(self, kind: int, body: bytes, files: List[int], lost: bool, fds: int, all_n: int, all_fds: int) -> Optional[Message]:
        if self._first is None:
            if not 1 <= kind <= _LAST_KIND:
                raise _broken(f"a message of kind {kind}")
            if all_n > MAX_BODY or all_fds > self._max_files:
                raise TooLargeError(f"a message of {all_n} bytes and {all_fds} file descriptors, where the limits are {MAX_BODY} and {self._max_files}")
            self._first, self._body, self._files, self._count, self._lost = (kind, all_n, all_fds), bytearray(), [], 0, False
        elif self._first != (kind, all_n, all_fds):
            raise _broken("the parts of a message differ")
        have_n, have_fds = len(self._body) + len(body), self._count + fds
        if have_n > all_n or have_fds > all_fds:
            raise _broken("the parts of a message exceed what they declare")
        whole = have_n == all_n and have_fds == all_fds
        if not whole and not body and not fds:
            raise _broken("an empty part of a message")
        self._body += body
        self._files += files
        self._count = have_fds
        self._lost = self._lost or lost or fds > len(files)
        if not whole:
            return None
        self._first = None
        return Message(kind, bytes(self._body), self.discard(), self._lost)
