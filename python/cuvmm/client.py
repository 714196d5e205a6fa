"""Clients of servers of publications."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _conn, _driver, _wire
from ._descriptor import ARRAY, BUFFER, ELEMENTS, decode
from ._process import OfProcess
from ._replica import View
from .errors import (AccessError, ArgumentError, ClosedError, Error, FilesError, GoneError, NotSupported, ProtocolError, RefusedError, TooLargeError, UnknownError,
                     WaitTimeout, whole)
from .follower import Accepted, Follower, Options, Possession, end_of

_MAY_LOSE = (_wire.KINDS["accepted"], _wire.KINDS["view"])
_UNKNOWN, _LIMIT, _FORBIDDEN = 1, 2, 5


class Listing(NamedTuple):
    """A publication, as its publisher lists it.

    ``length`` counts elements (bytes of a buffer), in ``nbytes`` of memory; ``generation`` is 0 before the first
    announcement; ``writable`` is whether this process may write it.
    """

    name: str
    dtype: str
    itemsize: int
    length: int
    nbytes: int
    generation: int
    writable: bool


class Mailbox:
    """The mailbox of a follower on one connection: at most one view, and the end."""

    def __init__(self) -> None:
        self.views: "queue.Queue[Optional[Tuple[View, List[int], bool]]]" = queue.Queue()  # None: no more views
        self.why: Optional[Error] = None
        self.ended = threading.Event()  # nothing more arrives; why is the reason
        self.disconnected = threading.Event()  # the connection has ended

    def end(self, why: Error) -> None:
        if not self.ended.is_set():
            self.why = why
            self.ended.set()
        self.views.put(None)


class _Reply(NamedTuple):
    name: str
    fields: Dict[str, Any]
    page: Optional[int]
    mailbox: Optional[Mailbox]


class Client(OfProcess):
    """A connection to a server of publications. All methods are safe for use by any thread. The caller closes it and each follower.

    One made with ``reconnect`` dials again, with growing pauses, whenever the connection ends, until it is closed; its
    followers then continue where they were.
    """

    def __init__(self, conn: _conn.Conn, redial: Optional[Callable[[], _conn.Conn]] = None, path: str = "") -> None:
        self._conn = conn
        self.path = path
        self._redial = redial
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: Dict[int, Optional["queue.Queue[Union[_Reply, Error]]"]] = {}
        self._followers: Dict[bytes, Optional[Mailbox]] = {}
        self._mailboxes: List[Mailbox] = []  # of the current connection
        self._closing = threading.Event()
        self._why: Optional[Error] = None  # the reason why nothing is read
        self._reader = threading.Thread(target=self._run, name="cuvmm client", daemon=True)
        self._reader.start()

    @property
    def reconnects(self) -> bool:
        """Whether the client reconnects if the connection ends."""
        return self._redial is not None and not self._closing.is_set()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def peer(self) -> Optional[_conn.Peer]:
        """The server's process, when it began to listen; None for an inherited connection."""
        return self._conn.peer

    def close(self) -> None:
        """Ends the connection. Followers keep what they have mapped until they are closed, as if the publisher had ended. Idempotent."""
        if self._forked:
            self._conn.close()
            return
        with self._lock:
            self._closing.set()
        self._conn.close()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def await_end(self, timeout: Optional[float] = None) -> None:
        """Waits until the process of the server has ended, not only its connection. After a reconnect it is the current server's."""
        self._check_process()
        with self._lock:
            if self._closing.is_set():
                raise ClosedError("the client is closed")
            process = self._conn.process()
        if process is None:
            raise NotSupported("the end of the server's process cannot be watched", "run both in one pid namespace, on Linux 5.3 or later")
        try:
            if not _conn.await_end(process, timeout):
                raise WaitTimeout("the server's process has not ended", "end it, or wait longer")
        finally:
            _conn.close_all([process])

    def list(self, timeout: Optional[float] = None) -> List[Listing]:
        """Lists the publications, by name."""
        a = self._ask("list", {}, timeout)
        if a.name != "listing":
            raise self._surprise(a)
        out = []
        for e in a.fields["entries"]:
            buffer = e["kind"] == BUFFER
            dtype = "uint8" if buffer else ELEMENTS[e["element"]].name if e["element"] in ELEMENTS else "record"
            out.append(Listing(e["name"], dtype, 1 if buffer else e["element size"], e["length"], e["bytes"], e["generation"], e["access"] == 2))
        return sorted(out)

    def follow(self, name: str, device: int = 0, *, write: bool = False, reserve: int = 0, max_chunks: int = _wire.MAX_CHUNKS,
               max_wait: Optional[float] = None, on_shrink: Optional[Callable[[int], Any]] = None, shrink_wait: float = _conn.TIMEOUT,
               keep_descriptors: bool = False, timeout: Optional[float] = None) -> Follower:
        """Follows a publication on a device, at a fixed address: see :class:`Follower`.

        ``write`` maps the memory for writing, if the publisher permits that. ``reserve`` is the address space in bytes
        (0: as much as the publisher has). ``max_wait`` limits the seconds that work waits for a publisher that is alive
        and does not finish. ``on_shrink(length)`` is called before the memory behind the first ``length`` elements is
        unmapped, and may return the streams to wait for; otherwise all work of the device is awaited. Arrays that reach
        into that memory get ``shrink_wait`` seconds to disappear before the publisher is refused. ``keep_descriptors``
        keeps a file open for each chunk, which :func:`take_over` needs. ``timeout`` limits the wait for the server.
        """
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= 255:
            raise ArgumentError(f"publication {name!r}", "a name has 1 to 255 bytes")
        dev = _driver.device(device)
        reserve, max_chunks = whole(reserve, "bytes to reserve"), whole(max_chunks, "chunks")
        if reserve < 0 or max_chunks < 1 or (max_wait is not None and not max_wait > 0):
            raise ArgumentError(f"a range of {reserve} bytes, {max_chunks} chunks and a wait of {max_wait}", "pass 0 bytes or more, at least one chunk, and a positive wait or none")
        if reserve:
            granularity = dev.granularity(dev.properties())
            reserve = -(-reserve // granularity) * granularity
        return Follower(self, dev, reserve, Options(name, write, max_chunks, max_wait, on_shrink, shrink_wait, keep_descriptors), timeout)

    # For Follower.

    def request(self, o: Options, room: int, has: Possession, timeout: Optional[float]) -> Accepted:
        """Requests a publication, for a follower that may already have part of it. The caller owns the descriptor of the page."""
        a = self._ask("follow", {"access": 2 if o.write else 1, "room": room, "publication": has.publication, "generation": has.generation, "length": has.length,
                                 "chunks": [{"identity": i} for i in has.identities], "name": o.name}, timeout)
        if a.name != "accepted":
            raise self._surprise(a)
        assert a.mailbox is not None
        try:
            if a.page is None:
                raise FilesError("the page of fence words was dropped", "raise this process's limit of open files (ulimit -n)")
            try:
                d = decode(a.fields["descriptor"])
                if d.kind not in (BUFFER, ARRAY) or d.chunks or d.length:
                    raise ProtocolError("a publication of something other than an empty buffer or array")
                if room and a.fields["reserved"] > room:
                    raise ProtocolError(f"a range of {a.fields['reserved']} bytes, where {room} were requested")
            except Error as e:
                raise self._conn.fail(e) from None
            return Accepted(a.mailbox, a.fields["token"], a.fields["publication"], a.fields["reserved"], a.fields["slot"], d, a.page)
        except BaseException:
            _conn.close_all([] if a.page is None else [a.page])
            self.leave(a.fields["token"], a.mailbox)
            raise

    def wait(self, seconds: float) -> bool:
        """Sleeps; False if the client was closed."""
        return not self._closing.wait(seconds)

    def broken(self, why: Error) -> Error:
        """Closes the connection for a violation of the protocol."""
        return self._conn.fail(why)

    def notify(self, name: str, fields: Dict[str, Any]) -> None:
        """Sends a message without a reply, unless the connection has ended."""
        try:
            self._conn.send(*_wire.encode(name, fields))
        except (GoneError, ClosedError, RefusedError):
            pass
        except Error as e:
            self._conn.fail(e)  # it may still be open, and the publisher waits

    def leave(self, token: bytes, mailbox: Mailbox) -> None:
        """Leaves a publication, and drops what is in flight to the follower. Idempotent."""
        with self._lock:
            there = self._followers.get(token) is not None
            if there:
                self._followers[token] = None
        if there:
            self.notify("leave", {"token": token})
        while True:
            try:
                left = mailbox.views.get_nowait()
            except queue.Empty:
                return
            if left is not None:
                _conn.close_all(left[1])

    # Requests.

    def _ask(self, name: str, fields: Dict[str, Any], timeout: Optional[float]) -> _Reply:
        self._check_process()
        mine: "queue.Queue[Union[_Reply, Error]]" = queue.Queue()
        number = next(self._numbers)
        message = _wire.encode(name, dict(fields, number=number))
        with self._lock:
            if self._closing.is_set() or self._why is not None:
                raise self._gone(self._why)
            self._asked[number] = mine
        try:
            self._conn.send(*message)
        except Error as e:
            with self._lock:
                self._asked.pop(number, None)
            raise self._gone(e) from None
        limit = self._conn.timeout if timeout is None else timeout
        try:
            a = mine.get(timeout=limit)
        except queue.Empty:
            with self._lock:
                if number in self._asked:
                    self._asked[number] = None
                    raise WaitTimeout(f"the server has not replied to {name} for {limit:g} s", "check what blocks it, or pass a longer timeout") from None
            a = mine.get()  # it arrived at the last moment
        if isinstance(a, Error):
            raise self._gone(a)
        if a.name == "denied":
            raise _denied(a.fields)
        return a

    def _gone(self, why: Optional[Error]) -> Error:
        """Returns the error of a request whose connection has ended, was refused, or is not there yet."""
        if why is None or self._closing.is_set():
            return ClosedError("the client is closed")
        if self.reconnects and not isinstance(why, ProtocolError):
            return GoneError(f"the client is not connected: {why}", "try again later: it connects again by itself")
        return why.again()

    def _surprise(self, a: _Reply) -> Error:
        self._give_up(a)
        return self._conn.fail(ProtocolError(f"a reply ({a.name}) to another request"))

    def _give_up(self, a: _Reply) -> None:
        if a.mailbox is not None:
            _conn.close_all([] if a.page is None else [a.page])
            self.leave(a.fields["token"], a.mailbox)

    # The thread that reads.

    def _run(self) -> None:
        pause = _conn.SHORTEST_PAUSE
        while True:
            began = time.monotonic()
            self._read()
            if time.monotonic() - began > _conn.LONGEST_PAUSE:
                pause = _conn.SHORTEST_PAUSE  # otherwise a server that refuses the client would do so again at once
            conn = None
            while conn is None:
                if not self.reconnects or not self.wait(pause):
                    return
                pause = min(2 * pause, _conn.LONGEST_PAUSE)
                conn = self._dial_again()
            with self._lock:
                if self._closing.is_set():
                    conn.close()
                    return
                self._conn.close()
                self._conn, self._why = conn, None

    def _dial_again(self) -> Optional[_conn.Conn]:
        """Returns a new connection. Without one, requests raise why there is none."""
        assert self._redial is not None
        try:
            return self._redial()
        except (GoneError, WaitTimeout):
            pass  # no process serves yet; the end of the last connection tells more
        except (Error, OSError) as e:
            self._why = GoneError(str(e))
        return None

    def _read(self) -> None:
        """Reads until the connection ends, then wakes all that wait."""
        why: Error
        try:
            while True:
                m = self._conn.receive()
                try:
                    self._sort(m)
                except Error as e:
                    _conn.close_all(m.files)
                    raise self._conn.fail(e) from None
        except Error as e:
            why = e
        except Exception as e:  # noqa: BLE001: a fault of this package must not leave callers waiting
            why = self._conn.fail(Error(f"the client failed: {e!r}", "report this"))
        with self._lock:
            self._why = why
            asked, mailboxes = list(self._asked.values()), self._mailboxes
            self._asked.clear()
            self._followers.clear()
            self._mailboxes = []
        for a in asked:
            if a is not None:
                a.put(why)
        for i in mailboxes:
            i.disconnected.set()
            i.end(ClosedError("the client is closed") if self._closing.is_set() else why)

    def _sort(self, m: Any) -> None:
        name, fields = _wire.read(m, "client")
        if name in ("listing", "denied"):
            self._reply(fields["number"], _Reply(name, fields, None, None))
        elif name == "accepted":
            self._accepted(m, fields)
        elif name == "view":
            self._view(m, fields["token"], View.of(fields))
        elif name != "soon":
            raise ProtocolError(f"{name}, which no server of publications sends")

    def _reply(self, number: int, a: _Reply) -> bool:
        """Passes a reply to the thread that waits for it. False if that thread has given up."""
        with self._lock:
            if number not in self._asked:
                raise ProtocolError(f"a reply to request {number}, which was not made")
            waiting = self._asked.pop(number)
            if waiting is None:
                return False
            waiting.put(a)
            return True

    def _accepted(self, m: Any, fields: Dict[str, Any]) -> None:
        mailbox, token = Mailbox(), fields["token"]
        with self._lock:
            if token in self._followers:
                raise ProtocolError("two followers of one token")
            self._followers[token] = mailbox
            self._mailboxes.append(mailbox)
        if not self._reply(fields["number"], _Reply("accepted", fields, m.files[0] if m.files else None, mailbox)):
            _conn.close_all(m.files)
            with self._lock:
                self._followers[token] = None
            # This thread reads, so it must not block on a send.
            threading.Thread(target=self.notify, args=("leave", {"token": token}), name="cuvmm leave", daemon=True).start()

    def _view(self, m: Any, token: bytes, v: View) -> None:
        with self._lock:
            if token not in self._followers:
                if v.final:
                    return  # the reply to a done that crossed a leave
                raise ProtocolError("a view for an unknown token")
            mailbox = self._followers[token]
            if v.final:  # may come while another view is in progress, and the end of the connection right behind it
                del self._followers[token]
                if mailbox is not None:
                    mailbox.end(end_of(v))
                return
            if mailbox is not None:
                if not mailbox.views.empty():
                    raise ProtocolError("a view before the one before was acknowledged")
                mailbox.views.put((v, m.files, m.lost))
                return
        _conn.close_all(m.files)  # the follower has left, and the server did not know yet


def _denied(fields: Dict[str, Any]) -> Error:
    kind = {_UNKNOWN: UnknownError, _LIMIT: TooLargeError, _FORBIDDEN: AccessError}.get(fields["status"], RefusedError)
    hint = "follow without write, or let the publisher permit it" if kind is AccessError else "list returns what is published; the reason is the publisher's"
    return kind(f"the server refused: {fields['reason']!r}", hint)


def connect(path: str, timeout: float = _conn.TIMEOUT, *, uid: Optional[int] = None, reconnect: bool = False) -> Client:
    """Connects to the socket of a server of publications, which must be of this process's user, or of ``uid``.

    With ``reconnect`` the client and its followers outlive the publisher: their state is "stale" until another one serves
    the socket. The first connection is always made before this function returns. ``timeout``, in seconds, limits every
    exchange with the server.
    """
    def dial() -> _conn.Conn:
        return _conn.dial(path, timeout, uid, _MAY_LOSE, _wire.MAX_BATCH)

    return Client(dial(), dial if reconnect else None, path)
