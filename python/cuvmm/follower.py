"""Followers of publications of other processes."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable, List, NamedTuple, Optional, Set, Tuple

from . import _conn, _driver, _memory, _page, _streams
from ._description import Description
from ._descriptor import ARRAY, ELEMENTS, RECORD, Descriptor
from ._driver import Device, Event, Stream
from ._holds import Holds, Wait
from ._manifest import Manifest
from ._page import full_barrier
from ._process import Condition, OfProcess
from ._replica import LIVE, MOVED, STALE, STATES, SUSPENDED, Replica, View, size_of
from ._timeline import Timeline
from ._undo import File, Passing, Undo, leave
from .array import Array, ElementType, Users, close_at_exit
from .errors import (CapacityError, ClosedError, EndedError, Error, ExcludedError, FilesError, GoneError, MismatchError, MovedError, NotSupported,
                     OutOfMemory, ProtocolError, RefusedError, RewritingError, StalledError, SuspendedError, TooLargeError, UnfinishedError, UnknownError, WaitTimeout, WithdrawnError, counted, quoted, seconds)
from .weights import Tensors

if TYPE_CHECKING:
    from .client import Client, Mailbox

_SHORTEST_POLL, _LONGEST_POLL = 20e-6, 1e-3
_MOST_RECEIVED = 1024  # of a publisher whose work is stalled


class Options(NamedTuple):
    """How a publication is followed: see Client.follow."""

    name: str
    write: bool
    max_chunks: int
    max_wait: Optional[float]
    on_shrink: Optional[Callable[[int], Any]]
    shrink_wait: float
    keep_arrays: bool
    expect: Optional[Manifest]


class Possession(NamedTuple):
    """What a follower already has of the publication that it requests: nothing, unless it reconnects."""

    publication: bytes = bytes(16)
    generation: int = 0
    length: int = 0
    identities: Tuple[int, ...] = ()


class Accepted(NamedTuple):
    """What a server grants a follower, on one connection. The receiver owns the descriptor of the page."""

    line: Any
    mailbox: "Mailbox"
    token: bytes
    publication: bytes
    reserved: int
    slot: int
    about: Descriptor
    page: File
    told: Description


class _Shown(NamedTuple):
    generation: int
    ordered: int
    length: int


class _News(NamedTuple):
    """What had arrived over a connection, after elements had been taken back so many times."""

    shown: _Shown
    cuts: int
    link: "_Link"  # whose word its generation is compared with


class Phase(enum.Enum):
    """Where a follower is.

    ========= ==================================================== ===========================================
    phase     means                                                leaves it by
    ========= ==================================================== ===========================================
    FOLLOWING views arrive                                         the end of the connection: AWAY
    AWAY      the publisher is gone, and what was not complete is  another one accepts: FOLLOWING;
              not shown                                            none will: OVER
    OVER      nothing more is announced                            ``close``: CLOSING
    CLOSING   a close began; it may have failed or been            ``close`` to its end: CLOSED
              interrupted, and goes on when it is called again
    CLOSED    nothing is left
    ========= ==================================================== ===========================================

    ``close`` leaves FOLLOWING and AWAY, too.
    """

    FOLLOWING, AWAY, OVER, CLOSING, CLOSED = range(5)


class _Link:
    """A follower's side of one connection: its words, the stream that waits for one, and the stream that writes another."""

    def __init__(self, a: Accepted, dev: Device) -> None:
        self.line, self.mailbox, self.token, self._index = a.line, a.mailbox, a.token, a.slot
        self.waiting = threading.RLock()  # guards the stream
        self.waited = 0
        self.died = False  # the publisher's word no longer counts
        self.dead = False  # all waits for the word have ended
        self.stream: Optional[Stream] = None
        self.releases: Optional[Timeline] = None
        self._device, self._undo = dev, Undo()

    def open(self, page: int) -> None:
        """Maps the page of which it gets the descriptor."""
        words = self._device.stream_words()
        try:
            self.page = _page.open_page(page, self._device if words else None, self._undo)
            if self._index >= self.page.slots:
                raise ProtocolError(f"slot {self._index} of a page with {self.page.slots}")
        except ProtocolError as e:
            raise self.line.conn.fail(e) from None
        self.slot = _page.Slot(self.page, self._index)
        if words:
            self.stream = Stream(self._device, self._undo)
        self.releases = Timeline(self._device, words, self._undo)

    def reached(self, generation: int) -> bool:
        """Whether a generation is complete, or never will be."""
        return self.died or self.slot.load(_page.COMPLETE) >= generation

    def end_waits(self) -> None:
        """The publisher's word does not count any more."""
        self.died = True
        self.slot.store(_page.COMPLETE, _page.RELEASE)

    def release_waits(self) -> None:
        """Writes the final value until the stream has seen it, since a late write of the publisher's GPU may replace it."""
        failed = 0.0
        while failed < 1.0:
            with self.waiting:
                self.slot.store(_page.COMPLETE, _page.RELEASE)
                try:
                    if self.stream is None or self.stream.done():
                        return
                except Error:
                    failed += _LONGEST_POLL  # nothing waits on a lost device
            time.sleep(_LONGEST_POLL)

    def close(self) -> None:
        """Closes the stream and the page. All waits for the word have ended; other threads may still use the link. Idempotent."""
        if self.releases is not None:
            self.releases.finish()
        with self.waiting:
            self.stream = self.releases = None
            self._undo.close()


class Follower(OfProcess):
    """A publication of another process: an array that grows and shrinks as its publisher announces, at an address fixed for life.

    Memory is mapped as it arrives. :meth:`next` shows it; before the first call the array is empty. If the publisher ends
    or withdraws, the follower keeps what it has mapped, ``next`` raises and :attr:`error` is the reason; no stream hangs.
    If the client reconnects, ``next`` waits for the next publisher instead, whose first announcement replaces what is
    shown as a whole.

    A publisher that changes elements in place (:meth:`Publication.rewrite`) waits until no follower reads them: each stream
    that ``next`` or :meth:`order` names holds what is shown until its :meth:`release`, or its own next ``next``. What another
    program, or a stream that this package was not told of, reads is not waited for; :meth:`intact` tells whether what was
    read is one generation and no mixture.

    While the publisher has the memory suspended (``vmm.Suspend`` in Go), ``state`` is "suspended" and the follower has no
    elements; ``next`` waits until the memory is back, at the same address. The publisher waits for what holds it, as before it
    rewrites. An exception of ``on_shrink(0)`` refuses that the memory goes, and so do arrays and tensors that are in use,
    unless the follower was made with ``keep_arrays``: then they stay, and are the same elements when the memory is back. Used
    meanwhile, arrays raise SuspendedError, and kernels fault.

    All methods are safe for use by any thread. The caller closes the follower, after it has deleted all arrays and tensors
    of it.
    """

    def __init__(self, client: "Client", dev: Device, room: int, o: Options) -> None:
        self._client, self._device, self._options, self._room = client, dev, o, room
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._wakers: Set[Callable[[], None]] = set()  # of coroutines that wait for a change
        self._pending: Optional[Any] = None  # a _Shown, or the Error that prevents it
        self._shown: List[_Shown] = [_Shown(0, 0, 0)]
        self._received: List[_Shown] = []  # what arrived, back to the last that was complete
        self._cuts = 0  # how often what had arrived was taken back
        self._said = LIVE  # the publication's state, as the publisher sent it last
        self._away = False  # the publisher has suspended the memory, and nothing is mapped until it shows it again
        self._phase = Phase.FOLLOWING
        self._gone: Optional[Error] = None  # why it is AWAY or OVER
        self._completed = _page.LAST_GENERATION
        self._unfinished: Optional[Error] = None  # what was shown and dropped, until something else is shown
        self._told = False  # a next has raised it
        self._flux = 0  # the last value of the publisher's word of that name, once it does not count
        self._torn = 0  # the last generation that arrived of those that flux has reached: its elements may be a mixture
        self._spoiled = 0  # the last generation of which nothing can be proven: its memory was another publication's
        self._holding = threading.RLock()  # guards the holds, over the driver's calls that end them; taken before _lock
        self._holds = Holds()
        self._awaited: Optional[_News] = None  # what the host waits for, or waited for when its time was over
        self._since: List[Tuple[int, float]] = []  # with max_wait: the generations that are awaited, and since when
        self._users = Users()
        self._closing_lock = threading.Lock()
        self._undo = Undo()  # the range
        self._request: Any = None  # the first
        self._link: _Link
        self._range: _memory.Range
        self._threads = [threading.Thread(target=self._run, args=(run,), name=f"cuvmm {what} {o.name}", daemon=True)
                         for what, run in (("follow", self._work), ("watch", self._watch))]

    def open(self, timeout: Optional[float], wait: bool) -> None:
        """Requests the publication, and makes room for it. If that fails, ``abandon`` undoes it."""
        o, dev = self._options, self._device
        a = self._first(timeout, wait)
        try:
            a.told.check(o.name, o.expect)
            self._link = _Link(a, dev)
            self._publication, self._room, self._about, self._description = a.publication, a.reserved, a.about, a.told
            about = a.about
            self._kind = ElementType("uint8", 1, 6) if about.kind != ARRAY else ElementType(
                ELEMENTS[about.element].name if about.element != RECORD else "record", about.element_size, about.element)
            self._importer = _memory.Importer(dev, about)
            granularity = self._importer.granularity
            if not 0 < a.reserved <= 1 << 60 or a.reserved % granularity:
                raise a.line.conn.fail(ProtocolError(f"a publication with room for {counted(a.reserved, 'byte')}, in memory with a granularity of {granularity}"))
            self._replica = Replica(about.unit, granularity, a.reserved, 1 << 16)
            self._link.open(a.page.number)
            self._range = _memory.Range(dev, a.reserved, granularity, _driver.READ_WRITE if o.write else _driver.READ, self._undo)
            for t in self._threads:
                t.start()
        except RuntimeError as e:
            raise Error(f"a follower's thread could not be started: {e}", "raise this process's limit of threads (ulimit -u)") from None
        finally:
            a.page.close()

    def _first(self, timeout: Optional[float], wait: bool) -> Accepted:
        """Requests the publication for the first time, and again while there is none, if it is to wait."""
        client, limit = self._client, self._client.timeout if timeout is None else timeout
        until = time.monotonic() + limit
        while True:
            self._request = client.new_request()
            try:
                return client.request(self._options, self._room, Possession(), timeout, self._request)
            except (UnknownError, GoneError) as e:
                if not wait or isinstance(e, GoneError) and not client.reconnects:
                    raise
                if time.monotonic() >= until:
                    raise WaitTimeout(f"publication {self._options.name!r} was not there within {limit:g} s: {e.what}", "start the process that publishes it, or wait longer") from None
            client.wait(_conn.SHORTEST_PAUSE)

    def abandon(self) -> None:
        """Closes a follower that no caller has."""
        try:
            self.close()
        except Error:
            leave(self)

    def __repr__(self) -> str:
        return f"<cuvmm.Follower of {self._options.name!r}: {len(self)} of {self._kind.name} on device {self._device.ordinal}, generation {self.generation}>"

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        close_at_exit(self.close, error)

    def __len__(self) -> int:
        """Returns the number of elements that are shown."""
        return self._shown[-1].length

    @property
    def generation(self) -> int:
        """The generation that the last ``next`` has shown; 0 before the first. Beside a ``next`` in another thread, a later ``len`` may belong to a later one."""
        return self._shown[-1].generation

    @property
    def state(self) -> str:
        """"live"; "stale" while no publisher announces more; "suspended" while the memory is away; "ended" for ever."""
        self._check_process()
        with self._lock:
            if self._gone is not None:
                return "stale" if self._phase is Phase.AWAY else "ended"
            return STATES[self._said]

    @property
    def error(self) -> Optional[Error]:
        """None while the publisher may announce more; afterwards the reason why it does not."""
        self._check_process()
        with self._lock:
            return self._end_locked()

    @property
    def array(self) -> Array:
        """The elements that are shown now. The array keeps this length; its address never changes.

        While nothing is taken back it has at least as many elements as an earlier ``len``, even beside a ``next`` in another
        thread.
        """
        self._check_process()
        with self._lock:
            if self._closing:
                raise ClosedError("the follower is closed")
            at, shown = self._range.address, self._shown[-1]
            return Array(self._device, at, shown.length, self._kind, not self._options.write, self._users, at, self._order, self, export=self._export)

    @property
    def tag(self) -> str:
        """The group that the publisher's memory belongs to, in the publisher's words."""
        return self._description.tag

    @property
    def description(self) -> Optional[bytes]:
        """What the publisher says of the memory (:meth:`Server.publish`); with a manifest, its text. None if it says nothing."""
        return self._description.text if self._description.form else None

    @property
    def manifest(self) -> Optional[bytes]:
        """The text of the manifest that the publication has, or None. Digests in it are of the time when the publication was made."""
        return self._description.text if self._description.manifest is not None else None

    @property
    def tensors(self) -> Tensors:
        """The tensors of the manifest, by name, in the elements that are shown when a name is looked up. UnknownError if there is no manifest.

        ::

            weights = follower.tensors
            w = torch.from_dlpack(weights["layer.0.w"].allow_readonly())

        A tensor stays where it is for as long as the follower lives: one that was made once shows each generation after the
        ``next`` that shows it.
        """
        m = self._description.manifest
        if m is None:
            raise UnknownError(f"publication {self._options.name!r} has no manifest", "publish it with one: Server.publish(..., manifest=...)")
        return Tensors(self, m.by_name())

    @property
    def half(self) -> Tuple[int, int]:
        """The elements that are shown, from and up to, of a publication whose halves its publisher rewrites in turn (``publish.HalfOf`` in Go)."""
        self._check_process()
        with self._lock:
            generation, _, length = self._shown[-1]
        middle = length // 2
        return (middle, 2 * middle) if generation % 2 else (0, middle)

    def next(self, stream: Any = None, timeout: Optional[float] = None) -> int:
        """Waits for a new generation, shows it, and returns it.

        If streams are passed (one, or a list, of PyTorch, CuPy, or handles), their later work runs after the work that the
        publisher ordered the announcement behind, and the host does not wait for that work. Without a stream the host
        waits, and then any stream may use the elements. Several generations that arrived meanwhile are shown as one.
        After a CapacityError, or another error of a single generation, the next one may succeed, and what was shown stays,
        unless the publisher has rewritten it; :attr:`error` is None as long as more may be announced. When elements that
        were shown are not any more, because the publisher ended before they were complete, it raises UnfinishedError once
        before it shows others. ``timeout`` is in seconds; a call that raises WaitTimeout loses nothing.

        The streams, or the caller if none are passed, hold what is shown until :meth:`release`, or their next ``next``: a
        publisher that rewrites it waits for them. If there is nothing new, ``next`` releases the streams, and the caller, before
        it waits. What was shown must not be read after that, even if the wait ends with WaitTimeout.
        """
        self._check_process()
        timeout = seconds(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        streams = _streams.handles_of(self._device, stream)
        wait: Optional[Wait] = None
        try:
            while True:
                with self._lock:
                    news = self._news_locked(streams)
                    while news is None and wait is not None:
                        left = None if until is None else until - time.monotonic()
                        if left is not None and left <= 0:
                            raise _nothing_new()
                        self._changed.wait(left)
                        news = self._news_locked(streams)
                if wait is None and (news is None or self._late()):
                    wait = Wait()
                    self._begin_wait(wait, streams)
                    continue
                assert news is not None
                self._order_behind(news.link, news.shown.ordered, streams, until)
                if self._show(news, streams):
                    return news.shown.generation
                self._end_wait(wait)  # a hold may have begun, and another publisher may wait for its end
                wait = None
        finally:
            self._end_wait(wait)

    def _news_locked(self, streams: List[c_void_p]) -> Optional[_News]:
        """Returns what to show next, or None. Raises the error that ends the wait.

        A host that waits for the publisher's work stays with the generation that it began to wait for, even in a later
        call: otherwise short timeouts would show nothing while the publisher's work is always one announcement behind.
        """
        if self._closing:
            raise ClosedError("the follower is closed")
        p = self._pending
        if isinstance(p, Error):
            self._pending = None
            if not self._link.died and self._shown[-1].generation <= self._link.slot.load(_page.FLUX):
                self._shown = [_Shown(0, 0, 0)]  # it was rewritten, and this follower cannot show what it became
            raise p
        if p is not None and self._gone is not None and p.ordered > self._completed:
            p = self._pending = self._complete_locked()  # it was never shown, and will never be complete
        if p is not None and p.generation <= self._wanted_locked():
            p = None  # the publisher rewrites it, and announces another one
        end = self._end_locked()
        if (end is None or p is not None) and self._unfinished is not None and not self._told:
            self._told = True
            raise self._unfinished.again()
        if p is None and self._phase is Phase.OVER:
            assert end is not None
            raise end.again()
        news = None if p is None else _News(p, self._cuts, self._link)
        if streams and self._link.stream is not None:
            return news
        if self._awaited is None or not self._stands_locked(self._awaited) or (p is not None and self._link.reached(p.ordered)):
            self._awaited = news
        return self._awaited

    def _stands_locked(self, n: _News) -> bool:
        """Whether it may be shown: it was not taken back meanwhile, and no later generation is shown.

        A later one that is pending changes nothing: a publisher whose work is always one announcement behind would
        otherwise keep the host waiting for ever.
        """
        if self._gone is not None and n.shown.ordered > self._completed or n.shown.generation <= self._wanted_locked():
            return False
        return self._pending is n.shown or (self._cuts == n.cuts and n.shown.generation > self._shown[-1].generation)

    def _wanted_locked(self) -> int:
        """Returns the last generation that is not to be shown: the publisher wants to rewrite it, or had begun to when it ended."""
        return self._flux if self._link.died else self._holds.wanted(self._link.slot)

    def _late(self) -> bool:
        """Whether the publisher wants to rewrite what is shown, and has announced another half meanwhile."""
        return not self._link.died and self._wanted_locked() >= self._shown[-1].generation > 0

    def _show(self, n: _News, streams: List[c_void_p]) -> bool:
        """Lets the streams hold it, and shows it, if it stands."""
        if n.shown.length and not self._begin_hold(n.shown.generation, streams, anew=True):
            return False
        with self._lock:
            if not self._stands_locked(n):
                return False
            pending = None if self._pending is n.shown else self._pending
            complete = 0 if self._link.died else self._link.slot.load(_page.COMPLETE)
            shown = [*self._shown, n.shown]
            while len(shown) > 2 and shown[1].ordered <= complete:
                del shown[0]
            self._shown, self._pending, self._unfinished = shown, pending, None  # at once, for whatever interrupts it
        if not n.shown.length:
            self._end_holds(streams, True)  # there is nothing to read
        return True

    async def next_async(self, stream: Any = None, timeout: Optional[float] = None) -> int:
        """``next`` for asyncio, without a thread. Cancelling it loses nothing: the next call returns that generation."""
        self._check_process()
        timeout, streams = seconds(timeout), _streams.handles_of(self._device, stream)
        try:
            return await asyncio.wait_for(self._next(streams), timeout)
        except asyncio.TimeoutError:
            raise _nothing_new() from None

    async def _next(self, streams: List[c_void_p]) -> int:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        wait: Optional[Wait] = None

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        try:
            while True:
                changed.clear()
                with self._lock:
                    news = self._news_locked(streams)
                    self._wakers.add(wake)
                if wait is None and (news is None or self._late()):
                    wait = Wait()
                    self._begin_wait(wait, streams)
                    continue
                if news is None:
                    await changed.wait()
                    continue
                if streams and news.link.stream is not None:
                    self._order_behind(news.link, news.shown.ordered, streams, None)
                elif not self._complete(news):
                    await asyncio.sleep(_LONGEST_POLL)
                    continue
                if self._show(news, streams):
                    return news.shown.generation
                self._end_wait(wait)  # as in next
                wait = None
        finally:
            with self._lock:
                self._wakers.discard(wake)
            self._end_wait(wait)

    def _complete(self, n: _News) -> bool:
        """Whether its work is done, or the publisher gone."""
        self._count_wait(n.shown.ordered)
        return n.link.reached(n.shown.ordered)

    async def generations(self, stream: Any = None) -> AsyncIterator[int]:
        """Yields each new generation, until the publisher ends or withdraws. The streams, or the caller, hold the last one after a ``break``: :meth:`release`."""
        while True:
            try:
                yield await self.next_async(stream)
            except Error:
                if self.error is None:
                    raise
                return

    def order(self, stream: Any) -> None:
        """Makes later work on the streams run after what is shown, which they hold. For streams that were not passed to ``next``; does not wait.

        It raises RewritingError while the publisher rewrites what is shown, unless something held that before.
        """
        streams = _streams.handles_of(self._device, stream)
        self._order(streams)
        self._hold_shown(streams, False)

    def _order(self, streams: List[c_void_p]) -> None:
        if self._closing:
            raise ClosedError("the follower is closed")
        if self._away:
            raise SuspendedError("the publisher has suspended the memory", "call next, which waits until it is back")
        if streams:
            with self._lock:
                link, ordered = self._link, self._shown[-1].ordered
            self._order_behind(link, ordered, streams, None)

    def _export(self, streams: List[c_void_p]) -> None:
        """Orders the streams of a program that gets an array, which hold what is shown as long as the caller does."""
        self._order(streams)
        self._hold_shown(streams, True)

    def _hold_shown(self, streams: List[c_void_p], export: bool) -> None:
        generation, _, length = self._shown[-1]
        if streams and length and not self._begin_hold(generation, streams, anew=False, export=export):
            raise RewritingError(f"the publisher rewrites generation {generation}, and nothing held it", "call next, which waits for the next announcement")

    # What may still read what is shown.

    def release(self, *streams: Any) -> None:
        """Tells the publisher that the work which is on the streams now is the last that reads what they were ordered behind.

        :meth:`Publication.rewrite` waits for that. Later work on the streams must not read the elements before they are
        ordered again. Without streams it releases what a ``next`` without streams holds for its caller, and the streams to which
        arrays were exported (by DLPack or the CUDA array interface). It does not wait, except on a device whose streams cannot
        write 64-bit words. For a stream that holds nothing it has no effect. Release a stream before it is destroyed. While a
        stream captures a graph it raises NotSupported, without effect.
        """
        self._check_process()
        named = _streams.handles_of(self._device, streams)
        if self._closing:
            raise ClosedError("the follower is closed")
        self._end_holds(named, not streams)

    def intact(self, generation: int) -> bool:
        """Whether a generation that was shown has stayed as it was: the publisher has not begun to rewrite it, or taken anything of it back.

        Called after the work that read it is done (for a stream: after it was synchronized), True says that what was read
        is that generation and no mixture, even if the follower was late and excluded. False says that nothing is proven: the
        connection has ended, or the publisher may have begun to change elements. Discard what was computed from them.
        """
        self._check_process()
        full_barrier()  # what was read was read before
        with self._lock:
            link = self._link
            known = not self._closing and not link.died and self._spoiled < generation <= self._shown[-1].generation
            words = link.slot.seen()
        # Asked last: another process publishes the memory, with words of its own, after the end of this connection only.
        return known and max(words.flux, words.cut) < generation and not link.line.conn.hung_up()

    def _begin_hold(self, generation: int, streams: List[c_void_p], *, anew: bool, export: bool = False) -> bool:
        with self._holding:
            return self._holds.begin(self._link.slot, generation, [_streams.key_of(s) for s in streams], counts=not self._link.died, anew=anew, export=export)

    def _begin_wait(self, wait: Wait, streams: List[c_void_p]) -> None:
        """Ends the holds of a ``next`` before it waits, since the publisher may wait for that before it announces anything."""
        with self._holding:
            self._holds.wait(wait)  # first: what is announced next is held for it
            self._end_holds(streams, True)

    def _end_wait(self, wait: Optional[Wait]) -> None:
        if wait is not None:
            with self._holding:
                self._holds.end_wait(wait)
                self._end_holds([], False)

    def _end_holds(self, streams: List[c_void_p], caller: bool) -> None:
        """Ends the holds of streams, once the work that is on them now is done, and the caller's. What a failed or interrupted call did not end, a later one can."""
        named = {_streams.key_of(s) for s in streams}
        with self._holding:
            link, holds = self._link, self._holds
            with link.waiting:
                if link.releases is None:
                    return  # the follower is closed
                for s in holds.holding(named, caller):
                    if s not in named and _streams.captures(self._device, s):
                        continue  # its event would be the graph's; it is released later
                    link.releases.behind(c_void_p(s))
                    holds.end(s, s in named)
                if caller:
                    holds.end_caller()
                number = holds.untold()
                if number is not None:
                    link.releases.write(link.slot, _page.RELEASED, number)
                    holds.tell(number)

    # Ordering between the GPUs of two processes.

    def _order_behind(self, link: _Link, generation: int, streams: List[c_void_p], until: Optional[float]) -> None:
        if link.reached(generation):
            return
        self._count_wait(generation)
        if not streams or link.stream is None:
            self._await(link, generation, until)
            return
        with link.waiting:
            if self._closing:
                raise ClosedError("the follower is closed")
            if link.stream is None:
                return  # the publisher ended meanwhile
            if link.waited < generation:
                with self._device.current() as d:
                    d.call("cuStreamWaitValue64_v2", link.stream.handle, link.slot.at(_page.COMPLETE), generation, 0, what=f"generation {generation}")
                link.waited = generation
                if link.died:
                    link.release_waits()  # _die may have released the stream before this wait was issued
            with Event(self._device, link.stream.handle) as e:
                for s in streams:
                    e.hold(s)

    def _count_wait(self, generation: int) -> None:
        if self._options.max_wait is not None:
            with self._lock:
                if not self._since or self._since[-1][0] < generation:
                    self._since.append((generation, time.monotonic()))

    def _await(self, link: _Link, generation: int, until: Optional[float]) -> None:
        pause = _SHORTEST_POLL
        while not link.reached(generation):
            if self._closing:
                raise ClosedError("the follower is closed")
            if until is not None and time.monotonic() >= until:
                raise WaitTimeout(f"the work of generation {generation} is not done", "pass streams, which wait instead of the host")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)

    @property
    def _closing(self) -> bool:
        """Whether it is closed, or being closed."""
        return self._phase in (Phase.CLOSING, Phase.CLOSED)

    def _run(self, loop: Callable[[], None]) -> None:
        """A thread's last frame: whatever ends it before its time ends the follower."""
        try:
            loop()
        except BaseException as e:  # noqa: BLE001: neither next nor the publisher must wait for a thread that has ended
            link, why = self._link, Error(f"the follower failed: {e!r}", "report this")
            try:
                link.mailbox.end(why)
                self._client.leave(link.line, link.token, link.mailbox)
                self._die(link, why)
            finally:  # also if it is that which fails
                link.dead = True  # for which the other thread waits
                self._finish_with(why)

    def _finish_with(self, why: Optional[Error]) -> None:
        with self._lock:
            if why is not None and _lives(why) and not self._link.died:
                self._keep_beyond_locked(self._link.slot.seen(), why)
            self._gone = why
            if not self._closing:
                self._phase = Phase.OVER
            self._wake_locked()

    # The thread that watches for the publisher's end. The other thread may be busy mapping.

    def _watch(self) -> None:
        link = self._link
        while self._await_death(link):
            with self._lock:  # the other thread reconnects, or ends
                self._changed.wait_for(lambda: self._phase is Phase.OVER or self._closing or self._link is not link)
                if self._link is link:
                    return
                link = self._link

    def _await_death(self, link: _Link) -> bool:
        """Waits until the publisher has ended, and ends all waits for it. False if the follower was closed before."""
        mailbox, limit = link.mailbox, self._options.max_wait
        step = 0.05 if limit is None else min(0.05, limit / 4)
        while not self._closing:
            if mailbox.disconnected.is_set() or mailbox.ended.is_set() and not _lives(mailbox.why):
                self._die(link, mailbox.why or ClosedError("the client is closed"))
                return True
            if self._stalled(link):
                why = StalledError(f"the publisher's announced work is not done after {limit:g} s", "check what blocks the publisher, or raise max_wait")
                self._die(link, why)
                self._client.leave(link.line, link.token, mailbox)
                mailbox.end(why)
                return True
            (mailbox.disconnected if mailbox.ended.is_set() else mailbox.ended).wait(step)
        return False

    def _stalled(self, link: _Link) -> bool:
        if self._options.max_wait is None:
            return False
        with self._lock:
            while self._since and link.reached(self._since[0][0]):
                self._since.pop(0)
            return bool(self._since) and time.monotonic() - self._since[0][1] > self._options.max_wait

    def _die(self, link: _Link, why: Error) -> None:
        """Drops what is shown and incomplete, and releases the streams."""
        with self._lock:
            self._cut_off_locked(link, why)
            self._gone = why
            if self._phase is Phase.FOLLOWING:
                self._phase = Phase.AWAY
            self._wake_locked()
        link.release_waits()
        with self._lock:
            link.dead = True
            self._wake_locked()

    def _cut_off_locked(self, link: _Link, why: Error) -> None:
        """From now on only what the publisher completed counts, and is shown."""
        if link.died:
            return
        words = link.slot.seen()
        self._completed = words.complete
        self._keep_beyond_locked(words, why)
        while len(self._shown) > 1 and self._shown[-1].ordered > self._completed:
            self._shown.pop()
            self._drop_locked("elements that were shown were not complete", why)
        if self._pending is None and not self._away:
            self._pending = self._complete_locked()  # next may have skipped it for one that is not complete
        link.end_waits()

    def _complete_locked(self) -> Optional[_Shown]:
        """Returns the last generation that is complete and later than what is shown."""
        complete = [r for r in self._received if r.ordered <= self._completed and r.generation > self._shown[-1].generation]
        return complete[-1] if complete else None

    def _keep_beyond_locked(self, words: _page.Seen, why: Error) -> None:
        """Forgets the generations that the publisher began to rewrite."""
        self._flux = words.flux
        self._torn = max([self._torn, *(r.generation for r in self._received if r.generation <= words.flux)])
        if 0 < self._shown[-1].generation <= words.flux:
            self._drop_locked("elements that were shown were being rewritten", why)
        if 0 < self._shown[0].generation <= words.flux:  # the complete one, to which a follower returns if the others are not
            self._shown[0] = _Shown(0, 0, 0)
        self._shown = [s for s in self._shown if not 0 < s.generation <= words.flux]
        self._received = [r for r in self._received if r.generation > words.flux]
        if isinstance(self._pending, _Shown) and self._pending.generation <= words.flux:
            self._pending = None

    def _drop_locked(self, what: str, why: Error) -> None:
        """Notes that elements which were shown do not count."""
        self._told = False
        if isinstance(why, ExcludedError):
            self._unfinished = why
            return
        then = ""
        if isinstance(why, GoneError):
            then = "; next shows what another publisher announces" if self._client.reconnects else ", and connect again after it has restarted"
        self._unfinished = UnfinishedError(f"{what}: {why.what}", "discard what was computed from them" + then)

    def _end_locked(self) -> Optional[Error]:
        if self._closing:
            return self._unfinished or ClosedError("the follower is closed")
        if self._gone is None or self._phase is not Phase.OVER and self._client.reconnects:
            return None
        return self._unfinished or self._gone

    # The thread that maps and unmaps what arrives, and reconnects.

    def _work(self) -> None:
        why: Optional[Error] = None
        while True:
            link = self._link
            self._take_views(link)
            if not _lives(link.mailbox.why):
                with self._lock:  # or what is not complete would still be shown beside the error
                    self._changed.wait_for(lambda: link.dead or self._closing)
            if self._closing or not self._client.reconnects or not _may_return(link.mailbox.why):
                break
            why = self._return()
            if why is not None:
                break
        self._finish_with(why or self._gone or link.mailbox.why)  # after a withdrawal the publisher still finishes its work

    def _take_views(self, link: _Link) -> None:
        while True:
            arrival = link.mailbox.views.get()
            if arrival is None or self._closing:
                _conn.close_all(arrival[1] if arrival is not None else ())
                return
            try:
                self._view(link, *arrival)
            finally:
                _conn.close_all(arrival[1])

    def _return(self) -> Optional[Error]:
        """Requests the publication again, with what this follower has. Returns the error that makes this impossible."""
        has = Possession(self._publication, self._replica.generation, self._replica.length, tuple(c.identity for c in self._replica.chunks))
        pause = _conn.SHORTEST_PAUSE
        while self._client.wait(pause) and not self._closing:
            try:
                a = self._client.request(self._options, self._room, has, None)
            except (GoneError, ClosedError):
                pause = _conn.SHORTEST_PAUSE  # the client dials again, with pauses of its own
                continue
            except (UnknownError, TooLargeError, WaitTimeout):  # the publisher is not ready, or has no room at present
                pause = min(2 * pause, _conn.LONGEST_PAUSE)
                continue
            except Error as e:
                return e
            link = _Link(a, self._device)
            try:
                self._check_same(a)
                link.open(a.page.number)
                old = self._go_on(a, link)
            except BaseException as e:  # noqa: BLE001: the publisher must not count on a follower that has ended
                if self._link is link:
                    raise
                self._client.leave(a.line, a.token, a.mailbox)
                try:
                    link.close()
                except Error:
                    leave(link)
                if not isinstance(e, Error):
                    raise
                if not isinstance(e, (FilesError, OutOfMemory)):
                    return e
                pause = min(2 * pause, _conn.LONGEST_PAUSE)
                continue
            finally:
                a.page.close()
            try:
                old.close()
            except Error:
                leave(old)
            return None
        return ClosedError("the client is closed")

    def _go_on(self, a: Accepted, link: _Link) -> _Link:
        """Follows on another connection, and returns the last one's link."""
        with self._holding:
            before = self._link.releases
            assert before is not None and link.releases is not None
            if before.stream is not None:  # what was released while its work is not done is told again, behind that
                link.releases.behind(before.stream.handle)
            with self._lock:
                if a.publication != self._publication:
                    self._spoiled = max(self._spoiled, self._torn, *(r.generation for r in [*self._shown, *self._received]))
                held = self._holds.restart(self._link.slot, link.slot, self._shown[-1].generation)
                old, self._link, self._publication, self._description = self._link, link, a.publication, a.told
                self._flux = self._torn = 0
                self._cuts += 1
                self._replica.restart()
                self._said = STALE  # until its first view
                self._shown = [self._shown[-1]._replace(ordered=0)]
                self._received = [r._replace(ordered=0) for r in self._received if r.ordered <= self._completed]
                if isinstance(self._pending, _Shown):
                    later = [r for r in self._received if r.generation > self._shown[-1].generation]
                    self._pending = later[-1] if later else None
                if not held:  # the words of the two publishers could not tell this one to wait for what was being read
                    self._shown = [_Shown(0, 0, 0)]
                    self._drop_locked("elements that were shown are rewritten", GoneError("the publisher ended, and the next one began before this follower had connected to it"))
                self._gone, self._completed, self._since = None, _page.LAST_GENERATION, []
                if self._phase is Phase.AWAY:
                    self._phase = Phase.FOLLOWING
                self._wake_locked()
            with contextlib.suppress(Error):  # or the next release tells it
                self._end_holds([], False)
        return old

    def _check_same(self, a: Accepted) -> None:
        """Checks that a publication is of the kind that was followed."""
        was, now = self._about, a.about
        if any(getattr(was, f) != getattr(now, f) for f in ("kind", "element", "element_size", "location_type", "device")):
            raise MismatchError(f"publication {self._options.name!r} is {now.what()} now, and was {was.what()}", "follow it anew")
        a.told.check(self._options.name, self._description.manifest)

    def _view(self, link: _Link, v: View, files: List[int], lost: bool) -> None:
        try:
            self._replica.begin(v)
        except Error as e:
            link.line.conn.fail(e)
            return
        failed: Optional[BaseException] = None
        try:
            self._carry_out(v, files, lost)
        except BaseException as e:  # noqa: BLE001: on_shrink is the caller's function, and the publisher waits for a reply
            failed = e
        if failed is None and v.last and not v.over and v.length:
            with self._holding:
                self._holds.begin_early(link.slot, v.generation, counts=not link.died)
        if v.state == SUSPENDED:
            if failed is None:
                self._suspended()  # otherwise the publisher shows the same elements again
        elif failed is not None:
            self._arrived(failed if isinstance(failed, Error) else Error(f"a generation could not be mapped: {failed!r}"))
        elif v.over:
            self._arrived(CapacityError(f"{counted(v.length, 'element')}, in chunks that do not fit into the {counted(self._replica.room, 'byte')} of this range", "follow it anew with a larger reserve"))
        elif v.last:
            self._arrived(_Shown(v.generation, v.ordered, v.length), v.state)
        self._client.notify(link.line, "done", dict(self._replica.finish(failed), token=link.token))

    def _wake_locked(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

    def _arrived(self, what: Any, state: Optional[int] = None) -> None:
        with self._lock:
            if isinstance(what, _Shown) and self._link.died and what.generation <= self._flux:
                self._torn = max(self._torn, what.generation)  # and is shown to nobody
                return
            self._pending = what
            if isinstance(what, _Shown):
                self._away = False
                self._received.append(what)
                while len(self._received) > 1 and not self._link.died and self._link.reached(self._received[1].ordered):
                    self._received.pop(0)
                del self._received[1:-_MOST_RECEIVED]
            self._said = self._said if state is None else state
            self._wake_locked()

    def _suspended(self) -> None:
        with self._lock:
            self._away, self._pending = True, None  # what had arrived was taken back
            self._said = self._said if self._link.died else SUSPENDED
            self._wake_locked()

    def _carry_out(self, v: View, files: List[int], lost: bool) -> None:
        if self._replica.shrinks(v):
            self._give_back(v.length, v.keep, for_good=v.state != SUSPENDED)
            return
        if not v.add:
            return
        total = v.keep + len(v.add)
        if total > self._options.max_chunks:
            raise TooLargeError(f"{counted(total, 'chunk')}, where the limit is {self._options.max_chunks}", "publish memory in larger chunks, or raise max_chunks")
        if lost:
            raise FilesError(f"the file descriptors of {counted(len(v.add), 'chunk')} were dropped", "raise this process's limit of open files (ulimit -n)")
        if self._range.count != v.keep:
            raise Error("memory that was taken back could not be unmapped, and other memory cannot take its place", "follow it anew")
        handles: List[_memory.Handle] = []
        passing = Passing()
        try:
            for fd, c in zip(files, v.add):
                handles.append(self._importer.descriptor(fd, c.size, passing))
            self._range.attach(handles)
        finally:
            passing.abandon()

    def _give_back(self, length: int, keep: int, *, for_good: bool) -> None:
        """Shows at most ``length`` elements, and unmaps the chunks behind the first ``keep`` once the work on them is done.

        What is in use is not taken away, unless other memory will be at the same addresses and the program permits that: the
        publisher has waited for whoever holds what is there.
        """
        with self._lock:
            self._shown = [s._replace(length=min(s.length, length)) for s in self._shown]
            self._received = [r._replace(length=min(r.length, length)) for r in self._received]
            self._cuts += 1
            p = self._pending
            if isinstance(p, _Shown) and p.length > length:
                self._pending = p._replace(length=length)
            self._wake_locked()
        streams = self._options.on_shrink(length) if self._options.on_shrink is not None else None
        if (for_good or not self._options.keep_arrays) and keep < len(self._replica.chunks):
            kept = size_of(self._replica.chunks[:keep])
            self._users.wait(kept, self._options.shrink_wait)
            self._users.refuse("the publisher takes memory back", kept)
        self._finish(streams)
        self._range.detach(keep)

    def _finish(self, streams: Any) -> None:
        """Waits for the work on the streams, or for all work of the device if there are none."""
        handles = _streams.handles_of(self._device, streams)
        if not handles:
            self._device.synchronize()
            return
        for h in handles:
            with Event(self._device, h) as mark:
                while not mark.passed():
                    if self._closing:
                        raise ClosedError("the follower is closed")
                    time.sleep(_LONGEST_POLL)

    # The end.

    def close(self) -> None:
        """Leaves the publication, waits for all work of the device, and unmaps the memory.

        While arrays or tensors of it are in use it raises InUseError, which names the lines that made them, and changes
        nothing. Streams that wait for the publisher are released. Idempotent; after another error it can be retried.
        """
        if self._forked:
            return
        with self._closing_lock:
            if self._phase is Phase.CLOSED:
                return
            self._users.refuse("closing the follower")
            link = getattr(self, "_link", None)
            with self._lock:
                if link is not None and getattr(link, "slot", None) is not None:
                    self._cut_off_locked(link, ClosedError("the follower is closed"))  # work that its streams begin now may run before the publisher's
                self._phase = Phase.CLOSING
                self._wake_locked()
            if link is None and self._request is not None:
                self._client.give_up(self._request)
            if link is not None:
                self._stop()
                self._device.synchronize()
                self._undo.close()
                self._link.close()
            self._phase = Phase.CLOSED

    def _stop(self) -> None:
        """Leaves the publication, and ends the threads."""
        while True:
            link = self._link
            self._client.leave(link.line, link.token, link.mailbox)  # drops what arrived meanwhile, too
            alive = [t for t in self._threads if t.is_alive()]
            if not alive:
                return
            link.release_waits()
            link.mailbox.end(ClosedError("the follower is closed"))
            for t in alive:
                t.join(0.1)

    def stale_bytes(self) -> int:
        """Returns how many bytes of a publisher that is gone are mapped."""
        with self._lock:
            return self._range.mapped if self._phase in (Phase.AWAY, Phase.OVER) else 0


def _nothing_new() -> WaitTimeout:
    return WaitTimeout("nothing new was announced", "try again: nothing was lost")


def _may_return(why: Optional[Error]) -> bool:
    """Whether another publisher may follow after this error."""
    return isinstance(why, (GoneError, RefusedError, MovedError))


def _lives(why: Optional[Error]) -> bool:
    """Whether a publisher that ended the follower for this reason finishes what it has announced."""
    return isinstance(why, (WithdrawnError, EndedError))


def end_of(v: View) -> Error:
    if v.state == MOVED:
        return MovedError(f"the publication has moved to another process{': ' + quoted(v.reason) if v.reason else ''}", "connect again, or connect with reconnect=True")
    if v.status == _WITHDRAWN:
        return WithdrawnError("the publisher withdrew the publication", "close the follower when its work is done")
    if v.status == _LEFT:
        return ClosedError("the follower is closed")
    if v.status == _EXCLUDED:
        return ExcludedError(f"the publisher goes on without this follower, which read for too long what was to be rewritten: {quoted(v.reason)}",
                             "discard what was computed from it, and follow again; release what was read sooner")
    return EndedError(f"the publisher ended the follower: {quoted(v.reason)}")


_WITHDRAWN, _LEFT, _EXCLUDED = 3, 4, 7
