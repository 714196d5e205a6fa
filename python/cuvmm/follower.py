"""Followers: publications of other processes, as this one sees them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable, List, NamedTuple, Optional, Set, Tuple

from . import _conn, _driver, _memory, _page, _streams
from ._descriptor import ARRAY, ELEMENTS, RECORD, Descriptor
from ._driver import Device, Event, Stream
from ._process import OfProcess
from ._replica import LIVE, MOVED, STALE, STATES, Chunk, Replica, View, size_of
from .array import Array, ElementType, Users, close_at_exit
from .errors import (AccessError, CapacityError, ClosedError, EndedError, Error, FilesError, GoneError, MismatchError, MovedError, NotSupported, ProtocolError,
                     RefusedError, StalledError, TooLargeError, UnfinishedError, UnknownError, WaitTimeout, WithdrawnError)

if TYPE_CHECKING:
    from .client import Client, Mailbox

_SHORTEST_POLL, _LONGEST_POLL = 20e-6, 1e-3


class Options(NamedTuple):
    """How a publication is followed: see Client.follow."""

    name: str
    write: bool
    max_chunks: int
    max_wait: Optional[float]
    on_shrink: Optional[Callable[[int], Any]]
    shrink_wait: float
    keep_descriptors: bool


class Possession(NamedTuple):
    """What a follower has of a publication that it asks for: nothing, unless it comes back."""

    publication: bytes = bytes(16)
    generation: int = 0
    length: int = 0
    identities: Tuple[int, ...] = ()


class Accepted(NamedTuple):
    """What a server grants a follower. The page's descriptor is the receiver's, to close."""

    mailbox: "Mailbox"
    token: bytes
    publication: bytes
    reserved: int
    slot: int
    about: Descriptor
    page: int


class Heritage(NamedTuple):
    """What a publication goes on with when its publisher has ended."""

    name: str
    publication: bytes
    generation: int
    length: int
    chunks: Tuple[Chunk, ...]
    about: Descriptor
    kind: ElementType
    device: Device
    range: _memory.Range
    users: Users
    kept: List[_memory.PinnedFile]


class _Shown(NamedTuple):
    generation: int
    ordered: int
    length: int


class _Link:
    """A follower's side of one connection: its word, and the stream that waits for it."""

    def __init__(self, client: "Client", a: Accepted, dev: Device) -> None:
        self.mailbox, self.token, self.slot = a.mailbox, a.token, a.slot
        self.waiting = threading.Lock()  # for the stream's wait and its mark
        self.waited = 0
        self.dead = threading.Event()  # nothing waits for the word any more
        words = dev.stream_words()
        try:
            self.page = _page.open_page(a.page, dev if words else None)
        except ProtocolError as e:
            raise client.broken(e) from None
        try:
            if a.slot >= self.page.words:
                raise client.broken(ProtocolError(f"word {a.slot} of a page with {self.page.words}"))
            self.stream = Stream(dev) if words else None
        except BaseException:
            self.page.close()
            raise

    def reached(self, generation: int) -> bool:
        return self.page.load(self.slot) >= generation

    def swap(self) -> int:
        """Ends all waits, and returns the last generation that is complete."""
        complete = self.page.load(self.slot)
        self.page.store(self.slot, _page.RELEASE)
        return complete

    def release_waits(self) -> None:
        """Possession the word read that everything is done until the stream has seen it: the publisher's last write may come after the first of these."""
        failed = 0.0
        while failed < 1.0:
            self.page.store(self.slot, _page.RELEASE)
            try:
                if self.stream is None or self.stream.done():
                    return
            except Error:
                failed += _LONGEST_POLL  # on a lost device nothing waits
            time.sleep(_LONGEST_POLL)

    def close(self) -> None:
        """Gives everything back. Nothing waits for the word any more."""
        with self.waiting:
            if self.stream is not None:
                self.stream.close()
                self.stream = None
            self.page.close()


class Follower(OfProcess):
    """A publication of another process: an array that grows and shrinks as its publisher announces, at an address fixed for life.

    What is new is mapped as it arrives, and shown by :meth:`next`; before the first one the array is empty. When the
    publisher ends, or withdraws, a follower keeps what it has mapped, and ``next`` and :attr:`error` say so; no stream
    hangs then. With a client that reconnects, ``next`` waits for the publisher's return instead: the next announcement
    replaces what is shown, and no reader sees a mixture. All methods are safe for use by any thread. Close it; arrays
    and tensors of it come first.
    """

    def __init__(self, client: "Client", dev: Device, room: int, o: Options, timeout: Optional[float]) -> None:
        self._client, self._device, self._options = client, dev, o
        self._changed = threading.Condition()
        self._wakers: Set[Callable[[], None]] = set()  # of coroutines that wait for a change
        self._pending: Optional[Any] = None  # a _Shown, or the Error why it could not be
        self._shown: List[_Shown] = [_Shown(0, 0, 0)]
        self._state = LIVE  # as the publisher said last
        self._gone: Optional[Error] = None
        self._completed = _page.LAST_GENERATION
        self._settled = self._died = self._unfinished = self._closing = False
        self._since: List[Tuple[int, float]] = []  # waits for generations, where they have a limit
        self._users = Users()
        self._closed = threading.Lock()
        self._kept: List[_memory.PinnedFile] = []  # with keep_descriptors: of each chunk that is mapped
        self._adopted = False
        a = client.request(o, room, Possession(), timeout)
        try:
            self._publication, self._room, about = a.publication, a.reserved, a.about
            self._about = about
            self._kind = ElementType("uint8", 1, 6) if about.kind != ARRAY else ElementType(
                ELEMENTS[about.element].name if about.element != RECORD else "record", about.element_size, about.element)
            self._importer = _memory.Importer(dev, about)
            granularity = self._importer.granularity
            if not 0 < a.reserved <= 1 << 60 or a.reserved % granularity:
                raise client.broken(ProtocolError(f"a publication with room for {a.reserved} bytes, in memory with a granularity of {granularity}"))
            self._replica = Replica(about.unit, granularity, a.reserved, 1 << 16)
            self._link = _Link(client, a, dev)
            try:
                self._range: Optional[_memory.Range] = _memory.Range(dev, a.reserved, granularity, _driver.READ_WRITE if o.write else _driver.READ)
            except BaseException:
                self._link.close()
                raise
        except BaseException:
            client.leave(a.token, a.mailbox)
            raise
        finally:
            _conn.close_all([a.page])
        self._threads = [threading.Thread(target=run, name=f"cuvmm {what} {o.name}", daemon=True) for what, run in (("follow", self._work), ("watch", self._watch))]
        for t in self._threads:
            t.start()

    def __repr__(self) -> str:
        return f"<cuvmm.Follower of {self._options.name!r}: {len(self)} of {self._kind.name} on device {self._device.ordinal}, generation {self.generation}>"

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        close_at_exit(self.close, error)

    def __len__(self) -> int:
        """The elements that are shown."""
        return self._shown[-1].length

    @property
    def generation(self) -> int:
        """The publisher's count of changes at the last ``next``; 0 before."""
        return self._shown[-1].generation

    @property
    def state(self) -> str:
        """"live"; "stale" while no publisher announces more; "suspended" while the memory is away; "ended" for ever."""
        with self._changed:
            if self._gone is not None:
                return "ended" if self._settled else "stale"
            return STATES[self._state]

    @property
    def error(self) -> Optional[Error]:
        """None while the publisher may announce more, and then why not."""
        with self._changed:
            return self._end_locked()

    @property
    def array(self) -> Array:
        """The elements that are shown now. It keeps that length; the address of the first element never changes."""
        self._check_process()
        with self._changed:
            if self._closing or self._range is None:
                raise ClosedError("the follower is closed")
            at, shown = self._range.address, self._shown[-1]
            return Array(self._device, at, shown.length, self._kind, not self._options.write, self._users, at, self._order, self)

    def next(self, stream: Any = None, timeout: Optional[float] = None) -> int:
        """Waits until something new was announced, shows it, and returns its generation.

        With a stream, or a list of them (PyTorch's, CuPy's, or handles), their later work comes behind the work that
        the publisher announced it behind, and this call does not wait for that; without one it does, and then any
        stream may use the elements. What came meanwhile is taken over in one step: the last generation counts.
        A CapacityError or the like says that a generation could not be mapped, and the next may be;
        :attr:`error` says whether anything further comes.
        """
        self._check_process()
        until = None if timeout is None else time.monotonic() + timeout
        streams = _streams.handles_of(self._device, stream)
        while True:
            with self._changed:
                while True:
                    p = self._news_locked()
                    if p is not None:
                        break
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise _nothing_new()
                    self._changed.wait(left)
            self._order_behind(p.ordered, streams, until)
            if self._show(p):
                return p.generation

    def _news_locked(self) -> Optional[_Shown]:
        """What to show next, or None; raises what ended the wait."""
        if self._closing:
            raise ClosedError("the follower is closed")
        p = self._pending
        if isinstance(p, Error):
            self._pending = None
            raise p
        if p is not None and self._gone is not None and p.ordered > self._completed:
            p = self._pending = None  # it will never be complete, and was never shown
        if p is None and self._settled:
            end = self._end_locked()
            assert end is not None
            raise end.again()
        shown: Optional[_Shown] = p
        return shown

    def _show(self, p: _Shown) -> bool:
        """Shows what was pending, unless that changed meanwhile."""
        with self._changed:
            if self._pending is not p or (self._gone is not None and p.ordered > self._completed):
                return False
            self._pending = None
            complete = self._link.page.load(self._link.slot) if not self._died else 0
            while len(self._shown) > 1 and self._shown[1].ordered <= complete:
                self._shown.pop(0)
            self._shown.append(p)
            return True

    async def next_async(self, stream: Any = None, timeout: Optional[float] = None) -> int:
        """``next`` for asyncio, without a thread. Cancelling it loses nothing: the next call returns that generation."""
        self._check_process()
        streams = _streams.handles_of(self._device, stream)
        try:
            return await asyncio.wait_for(self._next(streams), timeout)
        except asyncio.TimeoutError:
            raise _nothing_new() from None

    async def _next(self, streams: List[c_void_p]) -> int:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        try:
            while True:
                changed.clear()
                with self._changed:
                    p = self._news_locked()
                    self._wakers.add(wake)
                if p is None:
                    await changed.wait()
                elif streams:
                    self._order_behind(p.ordered, streams, None)
                    if self._show(p):
                        return p.generation
                elif self._complete(p.ordered):
                    if self._show(p):
                        return p.generation
                else:
                    await asyncio.sleep(_LONGEST_POLL)
        finally:
            with self._changed:
                self._wakers.discard(wake)

    def _complete(self, generation: int) -> bool:
        """Whether the work of a generation is done, and nothing has to be waited for."""
        self._count_wait(generation)
        return self._died or self._link.reached(generation)

    async def generations(self, stream: Any = None) -> AsyncIterator[int]:
        """Every generation that is announced, as ``async for``, until the publisher ends or withdraws."""
        while True:
            try:
                yield await self.next_async(stream)
            except Error:
                if self.error is None:
                    raise
                return

    def order(self, stream: Any) -> None:
        """Possession later work on the streams come behind what is shown, for streams that no ``next`` named. It does not wait."""
        self._order(_streams.handles_of(self._device, stream))

    def _order(self, streams: List[c_void_p]) -> None:
        if self._adopted:
            return  # what was shown is complete, and this process is the publisher now
        if self._closing:
            raise ClosedError("the follower is closed")
        if streams:
            self._order_behind(self._shown[-1].ordered, streams, None)

    # Order between two processes' GPUs.

    def _order_behind(self, generation: int, streams: List[c_void_p], until: Optional[float]) -> None:
        link = self._link
        if self._died or link.reached(generation):
            return
        self._count_wait(generation)
        if not streams or link.stream is None:
            self._await(link, generation, until)
            return
        with link.waiting:
            if self._closing:
                raise ClosedError("the follower is closed")
            if link.stream is None:
                return  # it died meanwhile
            if link.waited < generation:
                with self._device.current() as d:
                    d.call("cuStreamWaitValue64_v2", link.stream.handle, link.page.at(link.slot), generation, 0, what=f"generation {generation}")
                link.waited = generation
                if self._died:
                    link.release_waits()  # the end was perhaps dealt with before this wait was there
            with Event(self._device, link.stream.handle) as e:
                for s in streams:
                    e.hold(s)

    def _count_wait(self, generation: int) -> None:
        if self._options.max_wait is not None:
            with self._changed:
                if not self._since or self._since[-1][0] < generation:
                    self._since.append((generation, time.monotonic()))

    def _await(self, link: _Link, generation: int, until: Optional[float]) -> None:
        pause = _SHORTEST_POLL
        while not self._died and not link.reached(generation):
            if self._closing:
                raise ClosedError("the follower is closed")
            if until is not None and time.monotonic() >= until:
                raise WaitTimeout(f"the work of generation {generation} is not done", "name streams, which wait instead")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)

    # The thread that watches for the publisher's end, which must not wait for the one that maps.

    def _watch(self) -> None:
        link = self._link
        step = 0.05 if self._options.max_wait is None else min(0.05, self._options.max_wait / 4)
        while not self._closing:
            if link.mailbox.ended.is_set() and not isinstance(link.mailbox.why, WithdrawnError) or link.mailbox.disconnected.is_set():
                self._die(link, link.mailbox.why or ClosedError("the client is closed"))
            elif self._stalled(link):
                why = StalledError(f"the publisher's announced work is not done after {self._options.max_wait:g} s", "see what it waits for, or raise max_wait")
                self._die(link, why)
                self._client.leave(link.token, link.mailbox)
                link.mailbox.end(why)
            else:
                (link.mailbox.disconnected if link.mailbox.ended.is_set() else link.mailbox.ended).wait(step)
                continue
            with self._changed:  # the other thread follows again, or settles
                self._changed.wait_for(lambda: self._settled or self._closing or self._link is not link)
                if self._settled or self._closing:
                    return
                link = self._link

    def _stalled(self, link: _Link) -> bool:
        if self._options.max_wait is None:
            return False
        with self._changed:
            while self._since and link.reached(self._since[0][0]):
                self._since.pop(0)
            return bool(self._since) and time.monotonic() - self._since[0][1] > self._options.max_wait

    def _die(self, link: _Link, why: Error) -> None:
        """Shows nothing any more that is not complete, and releases the streams."""
        with self._changed:
            self._completed = link.swap()
            self._gone, self._died = why, True
            while len(self._shown) > 1 and self._shown[-1].ordered > self._completed:
                self._shown.pop()
                self._unfinished = True
            self._wake_locked()
        link.release_waits()
        link.dead.set()

    def _end_locked(self) -> Optional[Error]:
        if self._closing:
            return ClosedError("the follower is closed")
        if self._gone is not None and not self._settled and self._client.reconnects:
            return None
        if self._gone is not None and self._unfinished:
            return UnfinishedError(f"elements that were shown do not count, since the publisher ended before they were written: {self._gone}",
                                   "discard what was computed from them")
        return self._gone

    # The thread that maps and unmaps what arrives, and follows again.

    def _work(self) -> None:
        why: Optional[Error] = None
        while True:
            link = self._link
            self._take_views(link)
            if self._closing or not self._client.reconnects or not _may_return(link.mailbox.why):
                break
            link.dead.wait()
            why = self._return()
            if why is not None:
                break
        with self._changed:
            self._gone = why or self._gone or link.mailbox.why  # withdrawn: the publisher lives, and finishes what it announced
            self._settled = True
            self._wake_locked()

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
        """Follows again what this follower follows, with what it has; returns why that cannot be."""
        pause = 0.05
        with self._changed:
            self._replica.length = min(self._replica.length, self._shown[-1].length)
            has = Possession(self._publication, self._replica.generation, self._replica.length, tuple(c.identity for c in self._replica.chunks))
        while self._client.wait(pause) and not self._closing:
            pause = min(2 * pause, 2.0)
            try:
                a = self._client.request(self._options, self._room, has, None)
            except (GoneError, ClosedError, UnknownError, WaitTimeout):
                continue
            except Error as e:
                return e
            try:
                if a.reserved < min(self._room, size_of(self._replica.chunks)) or (a.about.kind, a.about.element, a.about.element_size, a.about.device) != (
                        self._about.kind, self._about.element, self._about.element_size, self._about.device):
                    return MismatchError(f"publication {self._options.name!r} is {a.about.what()} now, and was {self._about.what()}", "follow it anew")
                link = _Link(self._client, a, self._device)
            except Error as e:
                self._client.leave(a.token, a.mailbox)
                return e
            finally:
                _conn.close_all([a.page])
            with self._changed:
                old, self._link, self._publication = self._link, link, a.publication
                self._replica.restart()
                self._state = STALE  # until its first view
                self._shown = [self._shown[-1]._replace(ordered=0)]
                p = self._pending
                if isinstance(p, _Shown):
                    self._pending = None if p.ordered > self._completed else p._replace(ordered=0)
                self._gone, self._died, self._unfinished, self._completed, self._since = None, False, False, _page.LAST_GENERATION, []
                self._wake_locked()
            old.close()
            return None
        return ClosedError("the client is closed")

    def _view(self, link: _Link, v: View, files: List[int], lost: bool) -> None:
        try:
            self._replica.begin(v)
        except Error as e:
            self._client.broken(e)
            return
        failed: Optional[Exception] = None
        try:
            self._carry_out(v, files, lost)
        except Exception as e:  # noqa: BLE001: on_shrink is the caller's, and the publisher must hear of any failure
            failed = e
        if failed is not None:
            self._arrived(failed if isinstance(failed, Error) else Error(f"a view could not be taken: {failed!r}"))
        elif v.over:
            self._arrived(CapacityError(f"{v.length} elements, in chunks that do not fit into the {self._replica.room} bytes of this range", "follow it anew with a larger reserve"))
        elif v.last:
            self._arrived(_Shown(v.generation, v.ordered, v.length), v.state)
        self._client.notify("done", dict(self._replica.finish(failed), token=link.token))

    def _wake_locked(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

    def _arrived(self, what: Any, state: Optional[int] = None) -> None:
        with self._changed:
            self._pending = what
            self._state = self._state if state is None else state
            self._wake_locked()

    def _carry_out(self, v: View, files: List[int], lost: bool) -> None:
        assert self._range is not None
        if self._replica.shrinks(v):
            self._give_back(v.length, v.keep)
            return
        if not v.add:
            return
        if v.keep + len(v.add) > self._options.max_chunks:
            raise TooLargeError(f"{v.keep + len(v.add)} chunks, and {self._options.max_chunks} is the most", "publish memory in larger chunks, or raise max_chunks")
        if lost:
            raise FilesError(f"the file descriptors of {len(v.add)} chunks were dropped", "raise this process's limit of open files (ulimit -n)")
        handles: List[_memory.Handle] = []
        kept: List[_memory.PinnedFile] = []
        try:
            for fd, c in zip(files, v.add):
                handles.append(self._importer.descriptor(fd, c.size))
                if self._options.keep_descriptors:
                    kept.append(_memory.PinnedFile(fd))
            self._range.attach(handles)
        except BaseException:
            for k in kept:
                k.release()
            raise
        finally:
            for h in handles:
                h.release()
        self._kept += kept

    def _give_back(self, length: int, keep: int) -> None:
        """Shows no more than a length, and unmaps the chunks behind the first ``keep`` when their work is done."""
        with self._changed:
            self._shown = [s._replace(length=min(s.length, length)) for s in self._shown]
            p = self._pending
            if isinstance(p, _Shown) and p.length > length:
                self._pending = p._replace(length=length)
            self._wake_locked()
        streams = self._options.on_shrink(length) if self._options.on_shrink is not None else None
        if keep < len(self._replica.chunks):
            kept = size_of(self._replica.chunks[:keep])
            self._users.wait(kept, self._options.shrink_wait)
            self._users.refuse("the publisher takes memory back", kept)
        self._finish(streams)
        assert self._range is not None
        self._range.detach(keep)
        for k in self._kept[keep:]:
            k.release()
        del self._kept[keep:]

    def _finish(self, streams: Any) -> None:
        """Waits for the work on the streams, or, without any, for all of the device's."""
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
        """Leaves the publication, waits for all work of the device, and gives everything back.

        While arrays or tensors of it are in use it raises InUseError, which says where they were made, and the
        follower goes on. Streams that wait for the publisher go on. Idempotent; after another error call it again.
        """
        if self._forked:
            return
        with self._closed:
            if self._range is None:
                return
            self._users.refuse("closing the follower")
            with self._changed:
                self._closing = True
                self._wake_locked()
            while any(t.is_alive() for t in self._threads):
                link = self._link
                self._client.leave(link.token, link.mailbox)
                link.release_waits()
                link.mailbox.end(ClosedError("the follower is closed"))
                for t in self._threads:
                    t.join(0.1)
            self._client.leave(self._link.token, self._link.mailbox)  # what came meanwhile
            self._device.synchronize()
            self._range.close()
            self._range = None
            for k in self._kept:
                k.release()
            self._kept = []
            self._link.close()

    # For Server.adopt.

    def of(self, client: "Client") -> bool:
        return self._client is client

    def heritage(self, timeout: float) -> "Heritage":
        """What this follower has of a publication whose publisher has ended, and whose client is closed. It stays the follower's until ``hand_over``."""
        what = f"publication {self._options.name!r}"
        if not self._options.keep_descriptors:
            raise NotSupported(f"{what}, whose descriptors were not kept", "follow it with keep_descriptors=True")
        if not self._options.write:
            raise AccessError(f"{what}, which is mapped for reading", "follow it with write=True")
        if self._about.location_type != _driver.DEVICE_LOCATION or self._about.device != self._device.uuid:
            raise NotSupported(f"{what}, which is not memory of device {self._device.ordinal}", "follow it on the device that it lies on")
        until = time.monotonic() + timeout
        for t in self._threads:
            t.join(max(0.0, until - time.monotonic()))
            if t.is_alive():
                raise WaitTimeout(f"{what} is still being mapped or unmapped after {timeout:g} s", "try again")
        with self._changed:
            if self._range is None:
                raise ClosedError("the follower is closed")
            came = self._shown + ([self._pending] if isinstance(self._pending, _Shown) else [])
            length = max([(s.generation, s.length) for s in came if s.ordered <= self._completed], default=(0, 0))[1]
            return Heritage(self._options.name, self._publication, self._replica.generation, length, tuple(self._replica.chunks), self._about, self._kind, self._device,
                            self._range, self._users, self._kept)

    def hand_over(self) -> None:
        """Closes this follower, whose memory has another owner now. Arrays of it go on."""
        with self._closed:
            with self._changed:
                self._adopted = self._closing = True
                self._range, self._kept = None, []
                self._wake_locked()
            self._link.close()


def _nothing_new() -> WaitTimeout:
    return WaitTimeout("nothing new was announced", "try again: nothing was lost")


def _may_return(why: Optional[Error]) -> bool:
    """Whether what ended a connection may pass: the publisher went, or was replaced."""
    return isinstance(why, (GoneError, RefusedError, MovedError)) and not isinstance(why, UnfinishedError)


def end_of(v: View) -> Error:
    if v.state == MOVED:
        return MovedError(f"another process publishes it from now on{': ' + repr(v.reason) if v.reason else ''}", "connect again, or with reconnect=True at first")
    if v.status == _WITHDRAWN:
        return WithdrawnError("the publisher withdrew the publication", "close the follower when its work is done")
    if v.status == _LEFT:
        return ClosedError("the follower is closed")
    return EndedError(f"the publisher ended the follower: {v.reason!r}")


_WITHDRAWN, _LEFT = 3, 4
