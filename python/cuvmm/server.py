"""Servers of publications, for followers in Go and in Python."""

from __future__ import annotations

import enum
import os
import queue
import threading
import time
from ctypes import c_void_p
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple, Union

from . import _conn, _driver, _page, _streams, _wire
from ._description import Description, describe, text_file
from ._descriptor import ARRAY, Descriptor, this_process
from ._page import Slot
from ._progress import Progress, Shown
from ._process import Condition, OfProcess, State
from ._replica import ENDED, MOVED, View, size_of
from ._timeline import Timeline
from ._undo import File, Passing, Undo, leave, retry
from .errors import (ArgumentError, ClosedError, Error, FilesError, GoneError, InUseError, IncompleteError, NotSupported, RefusedError, RewritingError, TooLargeError,
                     WaitTimeout, counted, quoted, seconds, whole)
from .kept import Kept
from .shared import Shared
from .weights import Weights

_DONE, _UNKNOWN, _LIMIT, _WITHDRAWN, _LEFT, _FORBIDDEN, _FAILED, _EXCLUDED = range(8)
_MAX_FOLLOWERS = 256
_MOST_AHEAD = 1 << 20  # generations of a follower that comes back, beyond this publisher's and those of one that began now

_SETTLE_POLL = 0.05
_SHORTEST_POLL, _LONGEST_POLL = 20e-6, 1e-3  # of followers that release what they read
_MOST_RECEIVING = 0.01  # how long a rewrite waits before followers may not begin to read
_MOST_NAMED = 4  # followers in an error
_FLUSH = 1.0
_PAUSE = 0.1  # after a client that could not be served


def _uptime() -> int:
    """Returns for how many nanoseconds the machine has run, which is the same for all its processes."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class FollowerStats(NamedTuple):
    """A follower: its process, the generation that it has, the bytes that it still maps although they are no longer shown, why it refused
    the last generation, and whether it has not released what it reads."""

    pid: int
    generation: int
    pinned: int
    reason: str
    reads: bool


class _Replicator:
    """The publisher's side of one follower. The publication's lock guards it."""

    def __init__(self, session: "_Session", token: bytes, slot: Slot, progress: Progress) -> None:
        self.session, self.token, self.slot, self.progress = session, token, slot, progress
        self.file: File  # the page's
        self.ending: Optional[Tuple[int, int, str]] = None  # state, status and reason of the last view

    def reads(self) -> bool:
        """Whether it may read what is shown. One that was told of its end is not waited for."""
        if self.ending is not None:
            return False
        held = self.slot.load(_page.HELD)  # before the other: a hold that begins between the two is refused
        return not _page.reached(self.slot.load(_page.RELEASED), held)

    def receives(self, shown: Shown) -> bool:
        """Whether it is about to acknowledge what is shown."""
        return self.ending is None and self.progress.receives(shown)

    def stats(self, shown: Shown) -> FollowerStats:
        return FollowerStats(self.session.pid, self.progress.reached, self.progress.pinned(shown), self.progress.reason, self.reads())


class Rewriting(enum.Enum):
    """Whether the elements that were announced may change in place.

    ======= ============================================== ============================== ========= ===============
    state   means                                          leaves it by                   announce  shrink, rewrite
    ======= ============================================== ============================== ========= ===============
    SETTLED nothing that was announced changes             ``rewrite``: OPENING           permitted permitted
    OPENING ``rewrite`` waits until no follower reads      all released: OPEN; an error:  InUse     InUse
                                                           SETTLED
    OPEN    the publisher writes                           ``announce``: SETTLED          permitted InUse
    ======= ============================================== ============================== ========= ===============

    While it is OPENING or OPEN the followers' intent words read the generation of the view: no follower begins to read that.
    While it is OPEN the flux words read it, too: what a reader was late for is no longer intact. A rewrite that fails shows
    the same elements as another generation, for followers that would not show the one before. ``withdraw`` ends the
    publication in any state: followers that were cut off from an OPEN one show nothing. Memory of a broker whose last publisher
    ended in OPEN is OPEN from the beginning, if it is published all the same (``incomplete``).
    """

    SETTLED, OPENING, OPEN = range(3)


class Rewrite:
    """Elements that are open for rewriting, which :meth:`Publication.rewrite` returns. Use it in a with statement.

    The block writes, and calls ``announce``, which ends the rewriting. At its end without an announcement the elements are
    still open, since they may be half written: the block raises RewritingError. If an exception leaves the block it goes on,
    with a note that says so (from Python 3.11 on). Either way write the elements anew, and announce them, or withdraw.
    """

    def __init__(self, publication: "Publication", number: int) -> None:
        self._publication, self._number = publication, number

    @property
    def open(self) -> bool:
        """Whether no announcement has ended it yet, and the publication was not withdrawn."""
        return self._publication.rewrites(self._number)

    def __enter__(self) -> "Rewrite":
        return self

    def __exit__(self, _: object, error: Optional[BaseException], __: object) -> None:
        if not self.open:
            return
        what = f"publication {self._publication.name!r} is still open for rewriting, and followers show nothing"
        if error is None:
            raise RewritingError(what, "call announce within the block")
        if hasattr(error, "add_note"):
            error.add_note(f"{what} (write the elements anew and announce them, or withdraw)")


class Publication(OfProcess):
    """Shared memory under a name. Followers see what ``announce`` has shown. All methods are safe for use by any thread.

    Its state is OPEN until ``withdraw``, or the server's close; it is CLOSED when the words of all announcements are written.
    """

    def __init__(self, server: "Server", name: str, memory: Shared, writable: bool, told: Description) -> None:
        self.name, self._server, self._memory, self.writable = name, server, memory, writable
        self._told, self._text = told, File()  # what followers are told of the memory, and the file of its text
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._state = State.OPEN
        self._last_view = MOVED, _DONE, ""  # what followers are told last, once it ends
        self._rewriting = Rewriting.SETTLED
        self._opened = 0  # how often it was
        self._followers: List[_Replicator] = []
        self._finishing = threading.Lock()  # guards the end of the stream
        self._undo = Undo()
        self._words = memory.device.stream_words()
        self._timeline: Timeline
        self._flux = self._cut = 0  # what the words of that name read in the followers' slots
        self._view, self._identity = Shown(0, 0, 0, ()), os.urandom(16)
        self._last = 0  # the last number that was spent
        self._kept: List[Slot] = []  # of memory that outlives this process: the words by which the next one goes on

    def __repr__(self) -> str:
        return f"<cuvmm.Publication of {self.name!r}: generation {self.generation}, {counted(len(self._followers), 'follower')}>"

    def open(self, incomplete: bool) -> None:
        """Claims the memory, goes on where its last publisher ended, and makes the stream that writes the words."""
        self._memory.claim(self)
        if isinstance(self._memory, Kept):
            self._go_on(self._memory, incomplete)
        if self._told.form:
            text_file(self._told.text, self._undo.own(self._text))
        self._timeline = Timeline(self._memory.device, self._words, self._undo)

    def _go_on(self, memory: Kept, incomplete: bool) -> None:
        """Shows what was complete last, as a generation that is later than all that any follower may have of the publishers before."""
        past = memory.past(memory.device, self._words, self._undo)
        if past.torn and not incomplete:
            raise IncompleteError(f"memory of {self.name!r}, which was being rewritten when its publisher ended, or whose publication was withdrawn",
                                  "write all of it anew: publish it with incomplete=True, which opens it for rewriting, and announce it then")
        self._identity, self._flux, self._cut = memory.identity, past.flux, past.cut
        self._last = max(past.latest, _uptime())  # a generation takes longer than a nanosecond
        self._kept = [past.slot]
        if not past.complete:
            return
        generation = self._spend_like(past.complete)
        self._view = Shown(generation, generation, len(memory), memory.show(len(memory)))
        if past.torn:
            self._rewriting, self._flux = Rewriting.OPEN, generation
        self._tell(past.slot)  # before it is complete: what is open must never look whole
        past.slot.store(_page.COMPLETE, generation)

    def abandon(self) -> None:
        """Undoes ``open``, of a publication that no client saw."""
        self._state = State.CLOSED
        self._memory.disclaim(self)
        self._undo.abandon()

    @property
    def generation(self) -> int:
        """The generation that is shown; 0 before the first. An announcement that failed leaves a gap."""
        return self._view.generation

    @property
    def rewriting(self) -> bool:
        """Whether ``rewrite`` was called, and no ``announce`` has ended that yet."""
        return self._rewriting is not Rewriting.SETTLED

    @property
    def memory(self) -> Shared:
        """The memory that is published."""
        return self._memory

    def about(self) -> Descriptor:
        dev = self._memory.device
        return Descriptor(ARRAY, self._memory.kind.number, self._memory.kind.size, 0, _driver.DEVICE_LOCATION, dev.handle, dev.uuid, False, False, _driver.POSIX_FD, 0,
                          this_process(), [])

    def announce(self, length: Optional[int] = None, stream: Any = None) -> int:
        """Shows the first ``length`` elements (by default all) and returns the generation.

        If streams are passed (one, or a list), followers order their work behind the work that is on them now. Otherwise
        the elements must be complete. It cannot show fewer elements: see :meth:`shrink`. A call that fails shows nothing.

        Elements that were announced must not be written without :meth:`rewrite`, which this call ends. Elements behind them may
        be written at any time.
        """
        self._check_process()
        streams = _streams.handles_of(self._memory.device, stream)
        with self._lock:
            self._check()
            if self._rewriting is Rewriting.OPENING:
                self._check_settled()
            length = len(self._memory) if length is None else whole(length, "elements to announce")
            self._check_shows_all(length)
            if not self._view.length <= length <= len(self._memory):
                raise ArgumentError(f"{counted(length, 'element')} to announce, after {self._view.length}, of {len(self._memory)}", "resize the memory first; shrink shows fewer")
            chunks = self._memory.show(length)
            # What was not rewritten is shown again, since the other half may be torn.
            generation = self._spend() if self._rewriting is Rewriting.OPEN else self._spend_like(self._view.generation)
            try:
                self._write(generation, streams, self._slots())
                self._rewriting = Rewriting.SETTLED  # first: whatever interrupts this call, nothing that is shown is open
            except BaseException:
                if self._rewriting is Rewriting.OPEN:
                    self._flux = generation  # if its words were written, what is open must not look whole
                    self._tell_all()
                raise
            self._show(Shown(generation, generation, length, chunks))
            return generation

    def rewrite(self, timeout: Optional[float] = None, exclude_after: Optional[float] = None, on_excluded: Optional[Callable[[FollowerStats], Any]] = None) -> Rewrite:
        """Opens the elements that were announced for rewriting: when it returns they may be written, until the ``announce`` that shows them as a new generation.

        ::

            with publication.rewrite():
                weights.copy_(trained)
                publication.announce(stream=torch.cuda.current_stream())

        It waits, on the host, until every follower has released what it reads (``Follower.release``, or its next ``next``), and
        until the work behind the last announcement is done; from its beginning on no follower begins to read. Before, it waits up
        to 10 ms until followers have received the last announcement: a ``next`` that waits for it has begun to read it. Between ``rewrite`` and ``announce`` no generation can
        be read: publish two arrays in turn, if readers must always have one. Whatever reads on streams which the follower's
        package was not told of is not waited for.

        Only ``announce`` ends it; until then ``shrink`` and another ``rewrite`` raise InUseError, and so does ``announce`` while
        this call waits. An ``announce`` that fails leaves it open, and so does a block that ends without one: see
        :class:`Rewrite`. If the publisher ends meanwhile followers show nothing, and their error is an UnfinishedError.

        ``timeout`` limits the wait, in seconds. WaitTimeout names the followers that were waited for, and nothing may be written
        then: followers go on with what was there, as another generation. With ``exclude_after``, followers that have not
        released so many seconds later are excluded: they get an ExcludedError and show nothing, and ``on_excluded`` is called with each; if
        it raises, the call fails.
        """
        self._check_process()
        timeout = seconds(timeout)
        if exclude_after is not None and not exclude_after >= 0:
            raise ArgumentError(f"a limit of {exclude_after} s", "pass 0 or more, or None to exclude no follower")
        opening, excluded = False, []  # type: bool, List[FollowerStats]
        try:
            with self._lock:
                self._await_received(timeout)
                self._check()
                self._check_settled()
                opening = True
                self._set_rewriting(Rewriting.OPENING)
                _page.full_barrier()
                self._await_released(timeout, exclude_after, excluded)
            for f in excluded:
                if on_excluded is not None:
                    on_excluded(f)
            with self._lock:
                self._check()
                self._opened += 1
                self._set_rewriting(Rewriting.OPEN)
                return Rewrite(self, self._opened)
        except BaseException:
            with self._lock:
                if opening and self._state is State.OPEN:
                    self._set_rewriting(Rewriting.SETTLED)
                    self._renumber()  # for followers that would not show the generation before
            raise

    def rewrites(self, number: int) -> bool:
        """Whether the rewriting of a number is open."""
        with self._lock:
            return self._state is State.OPEN and self._rewriting is Rewriting.OPEN and self._opened == number

    def _await_received(self, timeout: Optional[float]) -> None:
        """Waits until the followers have received what was announced last: each ``next`` that waits for it holds it by then.

        Others have the lock meanwhile. A follower that lags further behind is not waited for, and none for long, since nothing
        tells a slow one from one that is stopped.
        """
        until = time.monotonic() + min(_MOST_RECEIVING, _MOST_RECEIVING if timeout is None else timeout)
        while any(f.receives(self._view) for f in self._followers):
            left = until - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _await_released(self, timeout: Optional[float], exclude_after: Optional[float], excluded: List[FollowerStats]) -> None:
        """Waits until no follower reads and the work behind the last announcement is done, and excludes followers that are late.

        Others have the lock meanwhile, which the caller holds.
        """
        began, pause = time.monotonic(), _SHORTEST_POLL
        while True:
            self._check()
            reading = [f for f in self._followers if f.reads()]
            waited = time.monotonic() - began
            if not reading and self._timeline.done():  # the next writes may be on other streams than the last
                return
            if reading and exclude_after is not None and waited >= exclude_after:
                for f in reading:
                    excluded.append(f.stats(self._view))
                    for word in (_page.INTENT, _page.FLUX):  # it shows nothing, even if it has gone when the rewriting begins
                        f.slot.store(word, self._view.generation)
                    self._go_on_without(f)
                    f.ending = (ENDED, _EXCLUDED, f"what it read was not released within {exclude_after:g} s")
                    f.session.wake()
                continue
            if timeout is not None and waited >= timeout:
                if not reading:
                    raise WaitTimeout(f"the work behind the last announcement of {self.name!r} is not done", "nothing may be written; try again when it is done, or with a longer timeout")
                raise WaitTimeout(f"{counted(len(reading), 'follower')} of {self.name!r}, in processes {sorted({f.session.pid for f in reading})[:_MOST_NAMED]}, did not release what they read",
                                  "nothing may be written; have followers release what they have read, or exclude late ones with exclude_after")
            self._changed.wait(pause)
            pause = min(2 * pause, _LONGEST_POLL)

    def _check_settled(self) -> None:
        """Refuses what cannot be done while elements are open for rewriting."""
        if self._rewriting is Rewriting.OPENING:
            raise InUseError(f"publication {self.name!r}, for which a rewrite waits", "wait until it returns")
        if self._rewriting is Rewriting.OPEN:
            raise InUseError(f"publication {self.name!r}, which is being rewritten", "announce ends that")

    def _check_shows_all(self, length: int) -> None:
        """Refuses what the words do not tell the next publisher."""
        if self._kept and length != len(self._memory):
            raise NotSupported(f"{counted(length, 'element')} shown of memory that a broker keeps", f"show all {len(self._memory)} at once")

    def _set_rewriting(self, to: Rewriting) -> None:
        """Changes the state, and with it the words."""
        self._rewriting = to
        self._tell_all()

    def _tell_all(self) -> None:
        """Writes the words that say what is rewritten."""
        if self._rewriting is Rewriting.OPEN:
            self._flux = max(self._flux, self._view.generation)
        for slot in self._slots():
            self._tell(slot)

    def _slots(self) -> List[Slot]:
        """Whose words tell how far the publication is: each follower's, and those of memory that outlives this process."""
        return [*(f.slot for f in self._followers), *self._kept]

    def _tell(self, slot: Slot) -> None:
        flux = max(self._flux, slot.load(_page.FLUX))  # more for a follower that was excluded
        slot.store(_page.INTENT, self._view.generation if self._rewriting is Rewriting.OPENING else flux)
        slot.store(_page.FLUX, flux)

    def _renumber(self, beyond: int = 0) -> None:
        """Shows the same elements as another generation."""
        if self._view.generation:
            generation = self._spend_like(self._view.generation, beyond)
            for slot in self._kept if self._rewriting is not Rewriting.OPEN else ():  # what is open must not look whole
                self._timeline.write(slot, _page.COMPLETE, generation)
            self._show(self._view._replace(generation=generation))

    def _check(self) -> None:
        if self._state is not State.OPEN:
            raise ClosedError(f"publication {self.name!r} was withdrawn")

    def _spend(self, beyond: int = 0) -> int:
        """Returns a generation that was never given away, and never will be again: it may be in a word even if it is never shown."""
        self._last = max(self._last, beyond) + 1
        return self._last

    def _spend_like(self, other: int, beyond: int = 0) -> int:
        """Returns a generation of the same elements as another one: of the same half, if a publisher before rewrote halves in turn."""
        generation = self._spend(beyond)
        return self._spend() if self._flux and generation % 2 != other % 2 else generation

    def _show(self, v: Shown) -> None:
        self._view = v
        self._tell_all()  # before anything of the view is sent
        self._memory.shown(len(v.chunks))
        self._changed.notify_all()
        for s in {f.session for f in self._followers}:
            s.wake()

    def _write(self, generation: int, streams: List[c_void_p], to: List[Slot]) -> None:
        """Writes the generation to the fence words once the work that is on the streams now is done."""
        for h in streams:
            self._timeline.behind(h)
        for slot in to:
            self._timeline.write(slot, _page.COMPLETE, generation)

    def shrink(self, length: int) -> None:
        """Shows fewer elements. It waits for no follower.

        Once :meth:`settle` has returned, every follower has unmapped what is no longer shown, and the memory may be
        overwritten, or freed with ``Shared.trim``.
        """
        self._check_process()
        length = whole(length, "elements")
        with self._lock:
            self._check()
            self._check_settled()
            self._check_shows_all(length)
            if not 0 <= length <= self._view.length:
                raise ArgumentError(f"shrinking from {self._view.length} to {counted(length, 'element')}", "pass a length from 0 to what was announced; announce shows more")
            chunks = self._memory.show(length)
            self._cut = self._view.generation
            for f in self._followers:
                f.progress.lower(length)
                if f.ending is None:
                    f.slot.store(_page.CUT, self._cut)
            self._show(Shown(self._spend(), self._view.ordered, length, chunks))

    def settle(self, timeout: Optional[float] = None) -> None:
        """Waits until every follower has the last generation, and maps nothing that is no longer shown.

        WaitTimeout names the followers that still map it, and InUseError one that refused.
        """
        self._check_process()
        timeout = seconds(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                behind = [f for f in self._followers if f.progress.reached < self._view.generation or f.progress.pinned(self._view)]
                if not behind:
                    return
                refused = [f for f in behind if f.progress.reached >= self._view.generation]
                if len(refused) == len(behind):
                    raise InUseError(f"process {refused[0].session.pid} still maps memory that was taken back: {quoted(refused[0].progress.reason)}", "the reason is the follower's")
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeout(f"followers in processes {sorted({f.session.pid for f in behind})} are not at generation {self._view.generation}", "check what blocks them")
                for f in behind:
                    f.session.wake()  # which an interrupted announcement may not have done
                self._changed.wait(_SETTLE_POLL if left is None else min(left, _SETTLE_POLL))

    def followers(self) -> List[FollowerStats]:
        self._check_process()
        with self._lock:
            return [f.stats(self._view) for f in self._followers]

    def withdraw(self) -> None:
        """Ends the publication. Followers keep what they have mapped, and get the work that was announced.

        It waits for nothing, unless a broker keeps the memory: then for the work behind the announcements, and nothing of the memory is whole
        after that, since it may be written: to hand it on, close the server. Idempotent.
        """
        self.end(ENDED, _WITHDRAWN, "")

    def end(self, state: int, status: int, reason: str) -> None:
        """Ends the publication with a last view for all followers. Idempotent; after an interruption it can be repeated."""
        if self._forked or self._state is State.CLOSED:
            return
        with self._lock:
            if self._state is State.OPEN:
                self._state, self._last_view = State.CLOSING, (state, status, reason)
            # Also if it has ended so: a call before may have been interrupted here.
            if self._rewriting is Rewriting.OPENING:
                self._set_rewriting(Rewriting.SETTLED)  # nothing was written
            for f in self._followers:
                f.slot.store(_page.CUT, _page.CUT_WITHDRAWN)
                f.ending = f.ending or self._last_view
            for slot in self._kept if self._last_view[0] == ENDED else ():
                slot.store(_page.FLUX, self._last)  # its owner may write from now on
            sessions = {f.session for f in self._followers}
            self._changed.notify_all()
        for s in sessions:
            s.wake()
        if not self._kept:
            self._memory.disclaim(self)
        self._server.retire(self)  # last: the server's close ends what is not retired
        if self._kept:
            self.close(True)  # before the memory has another publisher, the last word of this one is written

    # For sessions and the server.

    def finish(self) -> None:
        """Waits until the fence words of all announcements so far are written."""
        with self._finishing:
            self._timeline.finish()

    def close(self, wait: bool) -> bool:
        """Gives the stream of a publication that has ended back, once its words are written. False if they are not, and it was not to wait."""
        if not wait and self._finishing.locked():
            return False  # another call waits for them
        with self._finishing:
            if wait:
                self._timeline.finish()
            elif not self._timeline.done():
                return False
            self._undo.close()
            self._memory.disclaim(self)
            self._state = State.CLOSED
            return True

    def join(self, session: "_Session", m: Dict[str, Any], text: File) -> "Tuple[_Replicator, Dict[str, Any]]":
        """Adds a follower. Its fence word gets the shown generation once that is complete. ``text`` gets a descriptor of the description, if there is one."""
        room = m["room"]
        with self._lock:
            self._check()
            if self._told.form:
                text.open(os.dup, self._text.number)
            most = max(self._view.generation, _uptime()) + _MOST_AHEAD
            if m["generation"] > most:
                raise TooLargeError(f"a follower at generation {m['generation']}, where {most} is the most")
            reserved = min(room, self._memory.reserved) if room else self._memory.reserved
            slot = session.slot(self._memory.device if self._words else None)
            if m["generation"] >= self._view.generation:  # the publisher that it had was ahead
                self._renumber(m["generation"])
            progress = Progress(self._memory.kind.size, reserved)
            progress.resume([c["identity"] for c in m["chunks"]], m["length"], m["generation"], self._view)
            f = _Replicator(session, os.urandom(16), slot, progress)
            self._tell(slot)
            slot.store(_page.CUT, self._cut)
            self._write(self._view.generation, [], [slot])
            session.add(self, f)
            self._followers.append(f)
            return f, {"token": f.token, "publication": self._identity, "reserved": reserved, "slot": slot.index, "descriptor": self.about().encode(),
                       "tag": self._told.tag, "form": self._told.form, "description": self._told.digest, "heir": False,
                       "kept": bool(self._kept)}

    def step(self, f: _Replicator) -> Optional[View]:
        """Returns the next view for a follower; None if there is none now."""
        with self._lock:
            if f.ending is not None:
                state, status, reason = f.ending
                self.drop(f)
                return View(0, self._view.generation, 0, 0, 0, state=state, status=status, reason=reason)
            return f.progress.next(self._view, _wire.MAX_BATCH)

    def refuse(self, f: _Replicator, why: Exception) -> None:
        """Ends a follower that cannot be sent what it needs. It affects no other."""
        with self._lock:
            if f.ending is None:
                self._go_on_without(f)
                f.ending = (ENDED, _FAILED, str(why))
        f.session.wake()

    def acknowledge(self, f: _Replicator, fields: Dict[str, Any]) -> None:
        with self._lock:
            if f in self._followers:
                f.progress.acknowledge(fields)
                self._changed.notify_all()

    def leave(self, f: _Replicator) -> None:
        with self._lock:
            self._go_on_without(f)
            f.ending = (ENDED, _LEFT, "")
        f.session.wake()

    def drop(self, f: _Replicator) -> None:
        """Removes a follower, whose words are written no more."""
        with self._lock:
            if f in self._followers:
                self._go_on_without(f)
                self._followers.remove(f)
                self._changed.notify_all()

    def _go_on_without(self, f: _Replicator) -> None:
        """Tells a follower by its word that it is not waited for any more. In the end of the publication that is nothing new."""
        if self._state is State.OPEN and f in self._followers:
            f.slot.store(_page.CUT, _page.CUT_LEFT)

    def entry(self) -> Dict[str, Any]:
        with self._lock:
            return {"name": self.name, "kind": ARRAY, "access": 2 if self.writable else 1, "element": self._memory.kind.number, "element size": self._memory.kind.size,
                    "length": self._view.length, "bytes": size_of(self._view.chunks), "generation": self._view.generation, "publication": self._identity, "tag": self._told.tag, "description": self._told.digest}


class _Session:
    """The session of one client: one thread reads its requests, another one sends its followers views.

    ======= ==================================================== =================================
    state   means                                                leaves it by
    ======= ==================================================== =================================
    OPEN    requests are served                                  the end of the connection: CLOSING
    CLOSING no follower joins; those that there are get dropped  both threads ended, and the pages
                                                                 are closed: CLOSED
    CLOSED  the server has forgotten it
    ======= ==================================================== =================================

    A page that cannot be closed, or whose words may still be written, stays, and is tried again later: its addresses
    must not get another owner before.
    """

    def __init__(self, server: "Server", conn: _conn.Conn) -> None:
        self.server, self._conn = server, conn
        self.pid = conn.peer.pid if conn.peer is not None else 0
        self._lock = threading.Lock()
        self._state = State.OPEN
        self._followers: Dict[bytes, Tuple[Publication, _Replicator, bool]] = {}  # and whether the client was told of it
        self._undo = Undo()  # the pages and their descriptors
        self._page: Optional[Tuple[_page.Page, File]] = None
        self._next_slot = 0
        self._page_of: Optional[_driver.Device] = None
        self._joined: Set[Publication] = set()
        self._awake: "queue.SimpleQueue[None]" = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._finishing = False
        self._threads = [threading.Thread(target=run, args=(what,), name="cuvmm session", daemon=True)
                         for run, what in ((self._run, self._read), (self._run, self._tell))]

    def start(self) -> None:
        """Starts the threads. If one cannot be started the connection ends, and the server serves the others."""
        try:
            for t in reversed(self._threads):  # the reading thread joins the other one
                t.start()
        except BaseException as e:
            self._conn.fail(Error(f"the server has no threads left: {e}", "try again later"))
            self._end()
            raise

    def wake(self) -> None:
        if self._awake.empty():
            self._awake.put(None)

    def flush(self) -> None:
        """Makes the sending thread end after the views that are due now."""
        self._finishing = True
        self.wake()

    def close(self, until: float) -> None:
        """Ends the connection, once the last views are sent or at a deadline."""
        if self._threads[1].ident is not None:
            self._threads[1].join(max(0.0, until - time.monotonic()))
        self._conn.close()
        self.wake()
        for t in self._threads:
            if t.ident is not None and t is not threading.current_thread():
                t.join()
        self._end()

    def slot(self, dev: Optional[_driver.Device]) -> Slot:
        """Returns a slot that no follower has used, whose words are 0."""
        with self._lock:
            if self._page is None or self._page_of is not dev or self._next_slot == self._page[0].slots:
                self._page, self._page_of, self._next_slot = _page.make_page(dev, self._undo), dev, 0
            self._next_slot += 1
            return Slot(self._page[0], self._next_slot - 1)

    def add(self, p: Publication, f: _Replicator) -> None:
        """Notes a follower that joins, which is dropped when the session ends."""
        with self._lock:
            if self._state is not State.OPEN or self._page is None:
                raise ClosedError("the client is gone")
            f.file = self._page[1]
            self._joined.add(p)
            self._followers[f.token] = (p, f, False)

    def _run(self, loop: Callable[[], None]) -> None:
        """A thread's last frame: whatever ends it ends the session."""
        try:
            loop()
        except (GoneError, ClosedError, RefusedError):
            pass
        except Error as e:
            self._conn.fail(e)
        except BaseException as e:  # noqa: BLE001: the client must not wait for a thread that has ended
            self._conn.fail(Error(f"the server failed: {e!r}", "report this"))
        if loop == self._read:
            self._end()

    def _end(self) -> None:
        """Drops the followers, and gives the pages back. Idempotent."""
        with self._lock:
            if self._state is State.CLOSED:
                return
            self._state = State.CLOSING
            left = list(self._followers.values())
        for p, f, _ in left:
            p.drop(f)
        self._conn.shutdown()
        self.wake()
        tell = self._threads[1]
        if tell.ident is not None and tell is not threading.current_thread():
            tell.join()
        with self._ending:
            if self._state is not State.CLOSED:
                try:
                    self._give_back()
                except Error:
                    leave(_Leftover(self._give_back))
                self._conn.close()
                with self._lock:
                    self._followers, self._state = {}, State.CLOSED
        self.server.ended(self)

    def _give_back(self) -> None:
        for p in list(self._joined):
            p.finish()  # its stream may still write to the pages
            self._joined.discard(p)
        self._undo.close()

    def _read(self) -> None:
        while True:
            m = self._conn.receive()
            _conn.close_all(m.files)
            try:
                self._handle(*_wire.read(m, "server"))
            except (GoneError, ClosedError, RefusedError):
                raise
            except Error as e:
                raise self._conn.fail(e) from None

    def _handle(self, name: str, m: Dict[str, Any]) -> None:
        if name == "list":
            self._send("listing", {"number": m["number"], "entries": [p.entry() for p in self.server.publications()]})
        elif name == "follow":
            self._follow(m)
        elif name in ("done", "leave"):
            with self._lock:
                found = self._followers.get(m["token"])
            if found is None or not found[2]:
                self._send("view", View(0, 0, 0, 0, 0, state=ENDED, status=_UNKNOWN, reason="no follower of that token").fields(m["token"]))
            elif name == "done":
                found[0].acknowledge(found[1], m)
                self.wake()
            else:
                found[0].leave(found[1])

    def _follow(self, m: Dict[str, Any]) -> None:
        p = self.server.find(m["name"])
        if p is None:
            self._deny(m, _UNKNOWN, f"no publication of the name {m['name']!r}")
        elif m["access"] == 2 and not p.writable:
            self._deny(m, _FORBIDDEN, f"publication {p.name!r} may only be read")
        elif len(self._followers) >= _MAX_FOLLOWERS:
            self._deny(m, _LIMIT, f"{_MAX_FOLLOWERS} followers of one client")
        else:
            text = File()
            try:
                try:
                    f, accepted = p.join(self, m, text)
                except ClosedError as e:
                    self._deny(m, _UNKNOWN, str(e))
                    return
                except (Error, OSError) as e:
                    self._deny(m, _LIMIT if isinstance(e, TooLargeError) else _FAILED, str(e))
                    return
                self._send("accepted", dict(accepted, number=m["number"]), [f.file.number] + ([text.number] if text.live else []))
            finally:
                text.close()
            with self._lock:  # the follower receives no view before this message
                if f.token in self._followers:
                    self._followers[f.token] = (p, f, True)
            self.wake()

    def _deny(self, m: Dict[str, Any], status: int, reason: str) -> None:
        self._send("denied", {"number": m["number"], "status": status, "reason": reason})

    def _send(self, name: str, fields: Dict[str, Any], files: Optional[List[int]] = None) -> None:
        self._conn.send(*_wire.encode(name, fields), files or [])

    def _tell(self) -> None:
        while self._state is State.OPEN:
            self._awake.get()
            finishing = self._finishing  # before the views are sent, or one could be missed
            with self._lock:
                told = [(token, p, f) for token, (p, f, known) in self._followers.items() if known]
            for token, p, f in told:
                self._step(token, p, f)
            if finishing:
                return

    def _step(self, token: bytes, p: Publication, f: _Replicator) -> None:
        v = p.step(f)
        if v is None:
            return
        files = Passing()
        try:
            try:
                numbers = [p.memory.export(c.identity, files) for c in v.add]
            except (Error, OSError) as e:
                p.refuse(f, e)
                return
            self._send("view", v.fields(token), numbers)
        finally:
            files.close()
        if v.final:
            with self._lock:
                self._followers.pop(token, None)


class _Leftover:
    """A part of a close that failed."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


class Server(OfProcess):
    """Publishes shared memory on a socket, to processes of the same user. All methods are safe for use by any thread.

    The socket lies in a folder of mode 0700, which is created if it does not exist. The caller closes the server, which
    ends its publications; it still owns their memory.
    """

    def __init__(self, path: str, timeout: float = _conn.TIMEOUT) -> None:
        self._lock = threading.RLock()
        self._state = State.OPEN
        self._publications: Dict[str, Publication] = {}
        self._retired: List[Publication] = []  # that have ended, with words that may not be written yet
        self._sessions: List[_Session] = []
        self._accepting = threading.Thread(target=self._accept, name="cuvmm server", daemon=True)
        undo = Undo()
        try:
            self._listener = _conn.Listener(path, timeout, undo)
            self._accepting.start()
        except BaseException:
            self._state = State.CLOSING
            undo.abandon()
            if self._accepting.ident is not None:
                self.close()  # clients may be connected already
            raise

    def __repr__(self) -> str:
        return f"<cuvmm.Server at {self._listener.path!r}: {counted(len(self._publications), 'publication')}>"

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> str:
        return self._listener.path

    def publish(self, name: str, memory: Union[Shared, Weights], *, writable: bool = False, tag: str = "", description: Any = None, manifest: Any = None, incomplete: bool = False) -> Publication:
        """Publishes memory under a name. Followers see nothing before the first ``announce``. ``writable`` permits them to write.

        They are told the rest before they map anything: ``tag``, the group that the memory belongs to; and either ``description``, text or bytes of up to 64 MiB that are the program's own, or ``manifest``, which says what tensors
        there are (:attr:`Follower.tensors`). :class:`Weights` are published with theirs.

        Memory of :meth:`Broker.keep` goes on where its last publisher ended: see there. If that was while it rewrote the memory, or it
        withdrew, it is an IncompleteError, unless ``incomplete``: then the publication is open for rewriting (``rewriting``), and followers
        show nothing until all elements are written and announced.
        """
        if isinstance(memory, Weights):
            memory, manifest = memory.memory, memory if manifest is None else manifest
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= 255:
            raise ArgumentError(f"publication {name!r}", "a name has 1 to 255 bytes")
        if not isinstance(memory, Shared):
            raise ArgumentError(f"{type(memory).__name__} cannot be published", "make the memory with cuvmm.empty, and a tensor of it with torch.from_dlpack(shared.array); cuvmm.export takes tensors whose allocator can share them")
        told = describe(tag, description, manifest)
        if told.manifest is not None and told.manifest.nbytes > memory.reserved:
            raise ArgumentError(f"a manifest of {told.manifest.nbytes} bytes, for memory of at most {memory.reserved}", "publish the memory that the manifest describes")
        self._check_process()
        with self._lock:
            self._sweep()
            self._check_name(name)
            return self._add(Publication(self, name, memory, writable, told), incomplete)

    def _check_name(self, name: str) -> None:
        if self._state is not State.OPEN:
            raise ClosedError("the server is closed")
        if name in self._publications:
            raise InUseError(f"a publication of the name {name!r}", f"{self._publications[name].memory.to_end} first, or use another name")

    def _add(self, p: Publication, incomplete: bool) -> Publication:
        """Makes a publication known."""
        try:
            p.open(incomplete)
            self._publications[p.name] = p
            return p
        except BaseException:
            self._publications.pop(p.name, None)
            p.abandon()
            raise

    def _sweep(self) -> None:
        """Gives back what ended publications have, if their words are written."""
        self._retired[:] = [p for p in self._retired if not p.close(False)]

    def publications(self) -> List[Publication]:
        self._check_process()
        with self._lock:
            return list(self._publications.values())

    def find(self, name: str) -> Optional[Publication]:
        with self._lock:
            return self._publications.get(name)

    def retire(self, p: Publication) -> None:
        """Takes a publication that has ended off the list, and keeps it until its words are written."""
        with self._lock:
            if p not in self._retired:
                self._retired.append(p)
            if self._publications.get(p.name) is p:
                del self._publications[p.name]

    def ended(self, s: _Session) -> None:
        with self._lock:
            if s in self._sessions:
                self._sessions.remove(s)

    def _accept(self) -> None:
        while self._state is State.OPEN:
            try:
                conn = self._listener.accept()
            except FilesError:
                time.sleep(_PAUSE)
                continue
            except Error:
                return
            s: Optional[_Session] = None
            try:
                s = _Session(self, conn)
                with self._lock:
                    self._sessions.append(s)
                s.start()
            except BaseException:  # noqa: BLE001: no memory, or no thread, for this client: the next one may be served
                conn.close()
                if s is not None:
                    s.close(0)
                time.sleep(_PAUSE)

    def close(self) -> None:
        """Ends all publications and connections, and removes the socket. Idempotent; after Ctrl-C it can be repeated.

        Followers that reconnect wait for the next server at the socket; for the others it is a MovedError. To end followers
        for good, withdraw the publications first.
        """
        if self._forked:
            self._listener.close()
            return
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSING
        failed: List[Error] = []  # the close goes on, and can be repeated
        for p in self.publications():
            try:
                p.finish()  # a publisher that has moved completes nothing more
            except Error as e:
                failed.append(e)
            p.end(MOVED, _DONE, "the publisher's server was closed")
        self._listener.close()
        self._accepting.join()
        with self._lock:
            sessions = list(self._sessions)
        for s in sessions:
            s.flush()
        until = time.monotonic() + _FLUSH
        for s in sessions:
            s.close(until)
        with self._lock:
            retired = list(self._retired)
        for p in retired:
            try:
                p.close(True)
            except Error as e:
                failed.append(e)
        retry()
        if failed:
            raise failed[0]
        self._state = State.CLOSED
