"""Who took a publication over last: a file beside the socket, read and written under the lock of their folder.

A follower may sleep through a take-over whose process no longer serves the socket, and still writes the memory. So whoever
takes over records itself there, once the process that is recorded has ended. docs/protocol.md has the file's form.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from functools import partial
from typing import Any, List, NamedTuple, Optional

from ._conn import await_end
from ._undo import File
from .errors import FilesError, NotSupported, PeerError, ProtocolError, SupersededError, TooLargeError, counted

_HEADER, _CLAIM = struct.Struct("<4sHI"), struct.Struct("<16sQIQQ")
_MAGIC, _VERSION = b"cuvO", 1
_MOST = 4096
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class Claim(NamedTuple):
    """The process that took a publication over last, and how many have."""

    publication: bytes
    epoch: int
    pid: int
    namespace: int  # of the pid
    start: int  # of the process, in clock ticks since the system's


def encode(claims: List[Claim]) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, len(claims)) + b"".join(_CLAIM.pack(*c) for c in claims)


def decode(raw: bytes) -> List[Claim]:
    if not raw:
        return []  # there is no file
    magic, version, count = _HEADER.unpack_from(raw) if len(raw) >= _HEADER.size else (b"", 0, 0)
    if magic != _MAGIC or version != _VERSION or count > _MOST or len(raw) != _HEADER.size + count * _CLAIM.size:
        raise ProtocolError(f"{counted(len(raw), 'byte')} that are no claims of version {_VERSION}")
    return [Claim(*c) for c in _CLAIM.iter_unpack(raw[_HEADER.size:])]


class Claims:
    """The file beside a socket, in its open folder, whose lock the caller holds."""

    def __init__(self, folder: int, path: str) -> None:
        self._folder, self._path, self._name = folder, path + ".owners", os.path.basename(path) + ".owners"

    def take(self, publication: bytes, replaced: List[Optional[Claim]]) -> None:
        """Records this process, unless another one lives that took the publication over. The claim that it replaces is noted first, for ``restore``."""
        claims, mine = self._read(), _by_this_process(publication)
        before = next((c for c in claims if c.publication == publication), None)
        if before is not None:
            mine = mine._replace(epoch=before.epoch + 1)
            if before[2:] != mine[2:] and _lives(before, mine):
                raise SupersededError(f"process {before.pid} took the publication over and has not ended, although it no longer serves the socket",
                                      "end it, or wait for its end, and adopt again")
        kept = [c for c in claims if c is not before]
        if len(kept) >= _MOST:
            kept = [c for c in kept if c.namespace != mine.namespace or _lives(c, mine)]
        if len(kept) >= _MOST:
            raise TooLargeError(f"{len(kept) + 1} publications of one socket that were taken over", "end some of the processes that took them over")
        replaced.append(before)
        self._write([*kept, mine])

    def restore(self, publication: bytes, before: Optional[Claim]) -> None:
        """Takes back a take."""
        self._write([c for c in self._read() if c.publication != publication] + ([] if before is None else [before]))

    def _read(self) -> List[Claim]:
        f = File()
        try:
            self._open(f, self._name, _READ)
            s = os.fstat(f.number)
            if not stat.S_ISREG(s.st_mode) or s.st_uid != os.fstat(self._folder).st_uid:
                raise PeerError(f"{self._path!r} is not a file of the folder's owner", "remove it")
            return decode(os.read(f.number, _HEADER.size + _MOST * _CLAIM.size + 1))
        except FileNotFoundError:
            return []
        except ProtocolError as e:
            raise ProtocolError(f"file {self._path!r}: {e}", "remove it once every process has ended that published at the socket") from None
        except OSError as e:
            raise self._failed(e) from None
        finally:
            f.close()

    def _write(self, claims: List[Claim]) -> None:
        """Replaces the file as a whole."""
        f, new, raw = File(), self._name + ".new", encode(claims)
        try:
            self._open(f, new, _WRITE, 0o600)
            if os.write(f.number, raw) != len(raw):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            f.close()
            os.rename(new, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as e:
            raise self._failed(e) from None
        finally:
            f.close()

    def _open(self, f: File, *args: Any) -> None:
        f.open(partial(os.open, dir_fd=self._folder), *args)

    def _failed(self, e: OSError) -> Exception:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            return FilesError(f"file {self._path!r}: {e.strerror}", "raise this process's limit of open files (ulimit -n)")
        return PeerError(f"file {self._path!r}: {e.strerror}", "let this user write in the socket's folder")


def _by_this_process(publication: bytes) -> Claim:
    start = _started(os.getpid())
    if start is None:
        raise NotSupported("this process is not in /proc", "mount /proc of its pid namespace")
    return Claim(publication, 1, os.getpid(), os.stat("/proc/self/ns/pid").st_ino, start)


def _started(pid: int) -> Optional[int]:
    """Returns when a process began, None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            said = f.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(said[said.rindex(b")") + 1:].split()[22 - 3])  # the command's name, in parentheses, may contain anything


def _lives(c: Claim, mine: Claim) -> bool:
    """Whether the process of a claim has not ended."""
    if c.namespace != mine.namespace:
        raise NotSupported(f"the end of process {c.pid} of another pid namespace, which took the publication over", "run both in one pid namespace")
    f = File()
    try:
        f.open(os.pidfd_open, c.pid)
        return _started(c.pid) == c.start and not await_end(f.number, 0)
    except OSError as e:
        if e.errno in (errno.ESRCH, errno.EINVAL):
            return False  # no process has that number, or only a thread
        raise
    finally:
        f.close()
