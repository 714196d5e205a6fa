"""The page of fence words by which the GPUs of two processes order their work."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from typing import Any, Optional

from ._driver import Device, HostPin
from ._undo import File, Undo
from .errors import FilesError, OutOfMemory, ProtocolError

#: The final value of a word, above every generation, which satisfies all waits.
RELEASE = 1 << 62
LAST_GENERATION = RELEASE - 1

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SEAL") else 7
_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_NOEXEC_SEAL = 8


class Page:
    """A page of fence words, mapped into this process, and pinned if the device's streams can use words."""

    def __init__(self, memory: mmap.mmap, dev: Optional[Device], undo: Undo) -> None:
        words = (ctypes.c_uint64 * (len(memory) // 8)).from_buffer(memory)
        self._words: Optional[Any] = words
        self.words = len(words)
        self._pin: Optional[HostPin] = None
        undo.own(self)
        if dev is not None:
            self._pin = HostPin(dev, words)
            self._pin.make()

    def load(self, slot: int) -> int:
        """Returns a word; of a page that is closed, the final value."""
        words = self._words
        return RELEASE if words is None else int(words[slot])  # aligned, 8 bytes: one load

    def store(self, slot: int, value: int) -> None:
        words = self._words
        if words is not None:
            words[slot] = value

    def at(self, slot: int) -> int:
        """Returns the device address of a word."""
        assert self._pin is not None
        return self._pin.base + 8 * slot

    def close(self) -> None:
        """Unpins and unmaps the page, once no other thread reads it. The caller has waited for the streams that use it. Idempotent."""
        if self._pin is not None:
            self._pin.close()
        self._pin = self._words = None  # which keep the mapping


def open_page(fd: int, dev: Optional[Device], undo: Undo) -> Page:
    """Maps a page that another process sent. The caller keeps the descriptor."""
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        raise ProtocolError("not a page of fence words: it takes no seals") from None
    s = os.fstat(fd)
    if seals & _SEALS != _SEALS or s.st_size != mmap.PAGESIZE or not stat.S_ISREG(s.st_mode):
        raise ProtocolError(f"not a page of fence words: {s.st_size} bytes, seals {seals:#x}")
    try:
        memory = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise FilesError(f"the page of fence words could not be mapped: {e.strerror}", "raise this process's limit of open files (ulimit -n)") from None
        if e.errno in (errno.ENOMEM, errno.EAGAIN):
            raise OutOfMemory(f"the page of fence words could not be mapped: {e.strerror}", "check this process's limits of memory and mappings (ulimit -v, vm.max_map_count)") from None
        raise ProtocolError(f"not a page of fence words: {e.strerror}") from None
    return Page(memory, dev, undo)


def make_page(dev: Optional[Device], undo: Undo) -> "tuple[Page, File]":
    """Makes a page of zeros, and a descriptor of it for the other process."""
    file = undo.own(File())
    try:
        fd = file.open(os.memfd_create, "cuvmm words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise FilesError(f"a page of fence words could not be made: {e.strerror}", "raise this process's limit of open files (ulimit -n)") from None
        fd = file.open(os.memfd_create, "cuvmm words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # kernels before 6.3
    os.ftruncate(fd, mmap.PAGESIZE)
    fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    return open_page(fd, dev, undo), file
