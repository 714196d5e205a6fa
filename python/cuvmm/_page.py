"""The page of words by which two processes, and their GPUs, agree about the memory that they share."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from typing import Any, NamedTuple, Optional

from ._driver import Device, HostPin
from ._undo import File, Undo
from .errors import FilesError, OutOfMemory, ProtocolError

#: The words of a follower's slot: docs/protocol.md says who writes each, and what it reads.
COMPLETE, INTENT, FLUX, CUT, HELD, RELEASED = range(6)
SLOT_WORDS = 8

#: The final value of the complete word, above every generation, which satisfies all waits.
RELEASE = 1 << 62
LAST_GENERATION = RELEASE - 1
#: Values of the cut word above all generations: the publisher goes on without the follower, or the publication is over.
CUT_LEFT, CUT_WITHDRAWN = RELEASE, RELEASE + 1

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SEAL") else 7
_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_NOEXEC_SEAL = 8


def full_barrier() -> None:
    """Orders what this thread wrote to a page before what it reads from one next.

    A processor may run a later load before an earlier store, and CPython has no fence. The release of a lock and its
    acquisition behind it, in this order, are one. Both are atomic read-modify-writes in every CPython: a semaphore's of the C
    library, or since 3.13 CPython's own compare-and-exchange. On x86-64 each is a locked instruction, which no load or store
    passes. On ARMv8 a store-release stays behind all accesses before it, a load-acquire before all accesses after it, and a
    load-acquire is never performed before an earlier store-release. The lock is the caller's own, so no call waits.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def reached(word: int, number: int) -> bool:
    """Compares as streams do: by the sign of the difference."""
    return (word - number) & 1 << 63 == 0


class Seen(NamedTuple):
    """What the publisher's words in a slot read."""

    complete: int
    intent: int
    flux: int
    cut: int


class Page:
    """A page of words, mapped into this process, and pinned if the device's streams can use words."""

    def __init__(self, memory: mmap.mmap, dev: Optional[Device], undo: Undo) -> None:
        words = (ctypes.c_uint64 * (len(memory) // 8)).from_buffer(memory)
        self._words: Optional[Any] = words
        self.words = len(words)
        self._pin: Optional[HostPin] = None
        undo.own(self)
        if dev is not None:
            self._pin = HostPin(dev, words)
            self._pin.make()

    @property
    def slots(self) -> int:
        return self.words // SLOT_WORDS

    def load(self, word: int) -> int:
        """Returns a word; of a page that is closed, the final value."""
        words = self._words
        return RELEASE if words is None else int(words[word])  # aligned, 8 bytes: one load

    def store(self, word: int, value: int) -> None:
        words = self._words
        if words is not None:
            words[word] = value

    def at(self, word: int) -> int:
        """Returns the device address of a word."""
        assert self._pin is not None
        return self._pin.base + 8 * word

    def close(self) -> None:
        """Unpins and unmaps the page, once no other thread reads it. The caller has waited for the streams that use it. Idempotent."""
        if self._pin is not None:
            self._pin.close()
        self._pin = self._words = None  # which keep the mapping


class Slot:
    """A follower's part of a page, on either side."""

    def __init__(self, page: Page, index: int) -> None:
        self.page, self.index = page, index

    def load(self, word: int) -> int:
        return self.page.load(SLOT_WORDS * self.index + word)

    def store(self, word: int, value: int) -> None:
        self.page.store(SLOT_WORDS * self.index + word, value)

    def at(self, word: int) -> int:
        return self.page.at(SLOT_WORDS * self.index + word)

    def seen(self) -> Seen:
        return Seen(self.load(COMPLETE), self.load(INTENT), self.load(FLUX), self.load(CUT))


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
