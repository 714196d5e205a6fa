"""Clients of servers of publications."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _conn, _description, _driver, _manifest, _wire
from ._descriptor import ARRAY, BUFFER, ELEMENTS, decode
from ._process import OfProcess
from ._replica import View
from ._undo import File, Gate, Undo
from .errors import (AccessError, ArgumentError, ClosedError, Error, FilesError, FormatError, GoneError, ProtocolError, RefusedError, TooLargeError, UnknownError,
                     WaitTimeout, counted, quoted, seconds, whole)
from .follower import Accepted, Follower, Options, Possession, end_of

_MAY_LOSE = (_wire.KINDS["accepted"], _wire.KINDS["view"])
_UNKNOWN, _LIMIT, _FORBIDDEN = 1, 2, 5


class Listing(NamedTuple):
    """A publication, as its publisher lists it.

    ``length`` counts elements (bytes of a buffer), in ``nbytes`` of memory; ``generation`` is 0 before the first
    announcement; ``writable`` is whether this process may write it. ``tag`` is the group that the memory belongs to, and
    ``description`` the SHA-256 of the description, which is all zeros if there is none.
    """

    name: str
    dtype: str
    itemsize: int
    length: int
    nbytes: int
    generation: int
    writable: bool
    tag: str
    description: bytes


class Mailbox:
    """The mailbox of a follower on one connection: at most one view, and the end."""

    def __init__(self) -> None:
        self.views: "queue.SimpleQueue[Optional[Tuple[View, List[int], bool]]]" = queue.SimpleQueue()  # None: no more views
        self.why: Optional[Error] = None
        self.ended = Gate()  # nothing more arrives; why is the reason
        self.disconnected = Gate()  # the connection has ended

    def end(self, why: Error) -> None:
        if not self.ended.is_set():
            self.why = why
            self.ended.set()
        self.views.put(None)


class _Reply(NamedTuple):
    name: str
    fields: Dict[str, Any]
    page: Optional[File]
    mailbox: Optional[Mailbox]
    text: Optional[File] = None  # the description's


class Request:
    """A request, and its reply or the error in its place. The client's lock guards it."""

    def __init__(self) -> None:
        self.line: Optional[_Line] = None  # on which it was made
        self.reply: "Union[None, _Reply, Error]" = None
        self.given_up = False
        self.replied = Gate()

    def settle(self, a: "Union[_Reply, Error]") -> None:
        if self.reply is None:
            self.reply = a
            self.replied.set()


class _Line:
    """One connection of a client: the requests on it, the followers by token, and how it ended. The client's lock guards it."""

    def __init__(self, conn: _conn.Conn) -> None:
        self.conn = conn
        self.asked: Dict[int, Request] = {}
        self.followers: Dict[bytes, Optional[Mailbox]] = {}  # None: it has left
        self.mailboxes: List[Mailbox] = []
        self.why: Optional[Error] = None


class Client(OfProcess):
    """A connection to a server of publications. All methods are safe for use by any thread. The caller closes it and each follower.

    One made with ``reconnect`` dials again, with growing pauses, whenever the connection ends, until it is closed; its
    followers then continue where they were.
    """

    def __init__(self, conn: _conn.Conn, redial: Optional[Callable[[], _conn.Conn]] = None, path: str = "", undo: Optional[Undo] = None) -> None:
        self.path = path
        self._redial = redial
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._line = _Line(conn)
        self._why: Optional[Error] = None  # why the last attempt to connect again failed
        self._closing = Gate()
        self._followers: "weakref.WeakSet[Follower]" = weakref.WeakSet()
        self._reader = threading.Thread(target=self._run, name="cuvmm client", daemon=True)
        if undo is not None:
            undo.own(self)
        try:
            self._reader.start()
        except BaseException:
            self._closing.set()
            conn.close()
            raise

    @property
    def reconnects(self) -> bool:
        """Whether the client reconnects if the connection ends."""
        return self._redial is not None and not self._closing.is_set()

    def __repr__(self) -> str:
        return f"<cuvmm.Client of {self.path!r}>"

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def peer(self) -> Optional[_conn.Peer]:
        """The server's process, when it began to listen; None for an inherited connection."""
        return self._line.conn.peer

    def close(self) -> None:
        """Ends the connection. Followers keep what they have mapped until they are closed, as if the publisher had ended. Idempotent."""
        if self._forked:
            self._line.conn.close()
            return
        with self._lock:
            self._closing.set()
            conn = self._line.conn
        conn.close()
        if threading.current_thread() is not self._reader and self._reader.ident is not None:
            self._reader.join()

    def list(self, timeout: Optional[float] = None) -> List[Listing]:
        """Lists the publications, by name."""
        request, timeout = Request(), seconds(timeout)
        try:
            line = self._ask(request, "list", {})
            a = self._reply_to(line, request, "list", timeout)
        except BaseException:
            self.give_up(request)
            raise
        if a.name != "listing":
            self.give_up(request)
            raise line.conn.fail(ProtocolError(f"{a.name} as a reply to list"))
        out = []
        for e in a.fields["entries"]:
            buffer = e["kind"] == BUFFER
            dtype = "uint8" if buffer else ELEMENTS[e["element"]].name if e["element"] in ELEMENTS else "record"
            out.append(Listing(e["name"], dtype, 1 if buffer else e["element size"], e["length"], e["bytes"], e["generation"], e["access"] == 2, e["tag"], e["description"]))
        return sorted(out)

    def follow(self, name: str, device: int = 0, *, write: bool = False, reserve: int = 0, max_chunks: int = _wire.MAX_CHUNKS,
               max_wait: Optional[float] = None, on_shrink: Optional[Callable[[int], Any]] = None, shrink_wait: float = _conn.TIMEOUT,
               keep_arrays: bool = False, timeout: Optional[float] = None, wait: bool = False,
               expect: Any = None) -> Follower:
        """Follows a publication on a device, at a fixed address: see :class:`Follower`.

        ``write`` maps the memory for writing, if the publisher permits that. ``reserve`` is the address space in bytes
        (0: as much as the publisher has). ``max_wait`` limits the seconds that work waits for a publisher that is alive
        and does not finish. ``on_shrink(length)`` is called before the memory behind the first ``length`` elements is
        unmapped, and may return the streams to wait for; otherwise all work of the device is awaited. Arrays that reach
        into that memory get ``shrink_wait`` seconds to disappear before the publisher is refused. ``on_shrink(0)`` is called,
        too, when the publisher suspends the memory, and refuses that by an exception. With ``keep_arrays`` arrays
        and tensors may be kept while the publisher has the memory suspended: the program uses none of them between ``release`` and
        the end of the next ``next``. ``timeout`` limits the wait for the server.
        With ``wait`` it waits, within that time (by default the client's), for a publication of the name.

        ``expect`` is the manifest that the publication must have, but for digests: its text, or :class:`Weights`. It is compared before
        anything is mapped, and a MismatchError names the fields that differ.
        """
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= 255:
            raise ArgumentError(f"publication {name!r}", "a name has 1 to 255 bytes")
        dev = _driver.device(device)
        reserve, max_chunks = whole(reserve, "bytes to reserve"), whole(max_chunks, "chunks")
        timeout, shrink_wait = seconds(timeout), seconds(shrink_wait)
        if reserve < 0 or max_chunks < 1 or (max_wait is not None and not max_wait > 0):
            raise ArgumentError(f"a range of {reserve} bytes, {max_chunks} chunks and a wait of {max_wait}", "pass 0 bytes or more, at least one chunk, and a positive wait or none")
        if reserve:
            granularity = dev.granularity(dev.properties())
            reserve = -(-reserve // granularity) * granularity
        f = Follower(self, dev, reserve, Options(name, write, max_chunks, max_wait, on_shrink, shrink_wait, keep_arrays, None if expect is None else _manifest.of(expect)))
        try:
            f.open(timeout, wait)
            with self._lock:
                self._followers.add(f)
            return f
        except BaseException:
            f.abandon()
            raise

    def close_stale(self) -> int:
        """Closes each follower of the client whose publisher is gone or has withdrawn, and returns how many bytes they had mapped.

        The next publisher may need that memory. A follower that would come back (its ``state`` is "stale") is closed, too.
        It closes what this client follows: each process that followed the publisher calls it for itself.
        It waits for all work of their devices. While arrays or tensors of one are in use it closes the others and raises
        InUseError; it can be called again.
        """
        self._check_process()
        with self._lock:
            followers = list(self._followers)
        closed, why = 0, None
        for f in followers:
            n = f.stale_bytes()
            try:
                if n:
                    f.close()
                    closed += n
            except Error as e:
                why = why or e
        if why is not None:
            raise why
        return closed

    # For Follower.

    def request(self, o: Options, room: int, has: Possession, timeout: Optional[float], request: Optional[Request] = None) -> Accepted:
        """Requests a publication, for a follower that may already have part of it. The caller owns the descriptor of the page.

        A caller that may be interrupted passes a request, with which it can give up what it was granted.
        """
        request = request or Request()
        try:
            line = self._ask(request, "follow", {"access": 2 if o.write else 1, "room": room, "publication": has.publication, "generation": has.generation,
                                                 "length": has.length, "chunks": [{"identity": i} for i in has.identities], "name": o.name})
            a = self._reply_to(line, request, "follow", timeout)
            if a.name != "accepted":
                raise line.conn.fail(ProtocolError(f"{a.name} as a reply to follow"))
            assert a.mailbox is not None
            if a.page is None or (a.fields["form"] and a.text is None):
                raise FilesError("the page of fence words, or the description, was dropped", "raise this process's limit of open files (ulimit -n)")
            try:
                d = decode(a.fields["descriptor"])
                if d.kind not in (BUFFER, ARRAY) or d.chunks or d.length:
                    raise ProtocolError("a publication of something other than an empty buffer or array")
                if room and a.fields["reserved"] > room:
                    raise ProtocolError(f"a range of {counted(a.fields['reserved'], 'byte')}, where {room} were requested")
                told = _description.received(a.fields["tag"], a.fields["form"], a.fields["description"], a.text)
            except (FormatError, TooLargeError) as e:
                raise line.conn.fail(ProtocolError(str(e))) from None
            except Error as e:
                raise line.conn.fail(e) from None
            finally:
                if a.text is not None:
                    a.text.close()
            return Accepted(line, a.mailbox, a.fields["token"], a.fields["publication"], a.fields["reserved"], a.fields["slot"], d, a.page, told)
        except BaseException:
            self.give_up(request)
            raise

    @staticmethod
    def new_request() -> Request:
        return Request()

    @property
    def timeout(self) -> float:
        return self._line.conn.timeout

    def wait(self, seconds: float) -> bool:
        """Sleeps; False if the client was closed."""
        return not self._closing.wait(seconds)

    def notify(self, line: _Line, name: str, fields: Dict[str, Any]) -> None:
        """Sends a message without a reply, unless the connection has ended."""
        try:
            line.conn.send(*_wire.encode(name, fields))
        except (GoneError, ClosedError, RefusedError):
            pass
        except Error as e:
            line.conn.fail(e)  # it may still be open, and the publisher waits

    def leave(self, line: _Line, token: bytes, mailbox: Mailbox) -> None:
        """Leaves a publication, and drops what is in flight to the follower. Idempotent."""
        with self._lock:
            there = line.followers.get(token) is not None
            if there:
                line.followers[token] = None
        if there:
            self.notify(line, "leave", {"token": token})
        while True:
            try:
                left = mailbox.views.get_nowait()
            except queue.Empty:
                return
            if left is not None:
                _conn.close_all(left[1])

    # Requests.

    def _ask(self, request: Request, name: str, fields: Dict[str, Any]) -> _Line:
        """Sends a request on the current connection, which it returns. The caller gives up a request that fails."""
        self._check_process()
        number = next(self._numbers)
        message = _wire.encode(name, dict(fields, number=number))
        with self._lock:
            line = self._line
            if self._closing.is_set() or line.why is not None:
                raise self._gone(self._why or line.why)
            request.line, line.asked[number] = line, request
        try:
            line.conn.send(*message)
            return line
        except Error as e:
            raise self._gone(e) from None

    def _reply_to(self, line: _Line, request: Request, name: str, timeout: Optional[float]) -> _Reply:
        limit = line.conn.timeout if timeout is None else timeout
        request.replied.wait(max(0.0, limit))
        with self._lock:
            a = request.reply
            if a is None:
                request.given_up = True
        if a is None:
            raise WaitTimeout(f"the server has not replied to {name} for {limit:g} s", "check what blocks it, or pass a longer timeout")
        if isinstance(a, Error):
            raise self._gone(a)
        if a.name == "denied":
            raise _denied(a.fields)
        return a

    def give_up(self, request: Request) -> None:
        """Drops a request whose caller is gone. If it was accepted, or is later, the follower leaves. Idempotent."""
        with self._lock:
            request.given_up = True
            a = request.reply
        if isinstance(a, _Reply) and a.mailbox is not None:
            for file in (a.page, a.text):
                if file is not None:
                    file.close()
            assert request.line is not None
            self.leave(request.line, a.fields["token"], a.mailbox)

    def _gone(self, why: Optional[Error]) -> Error:
        """Returns the error of a request whose connection has ended, was refused, or is not there yet."""
        if why is None or self._closing.is_set():
            return ClosedError("the client is closed")
        if self.reconnects and not isinstance(why, ProtocolError):
            return GoneError(f"the client is not connected: {why.what}", "try again later: it connects again by itself")
        return why.again()

    # The thread that reads.

    def _run(self) -> None:
        line = self._line
        try:
            self._serve()
        except BaseException as e:  # noqa: BLE001: no caller must wait for a thread that has ended
            with self._lock:
                self._closing.set()
                line = self._line
            self._ended(line, line.conn.fail(Error(f"the client failed: {e!r}", "report this")))

    def _serve(self) -> None:
        pause = _conn.SHORTEST_PAUSE
        while True:
            began = time.monotonic()
            self._read(self._line)
            if time.monotonic() - began > _conn.LONGEST_PAUSE:
                pause = _conn.SHORTEST_PAUSE  # otherwise a server that refuses the client would do so again at once
            conn = None
            while conn is None:
                if not self.reconnects or not self.wait(pause):
                    return
                pause = min(2 * pause, _conn.LONGEST_PAUSE)
                conn = self._dial_again()
            with self._lock:
                old, closing = self._line, self._closing.is_set()
                if not closing:
                    self._line, self._why = _Line(conn), None
            (conn if closing else old.conn).close()
            if closing:
                return

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

    def _read(self, line: _Line) -> None:
        """Reads until the connection ends, then wakes all that wait."""
        try:
            while True:
                m = line.conn.receive()
                try:
                    self._sort(line, m)
                except BaseException:
                    _conn.close_all(m.files)
                    raise
        except Error as e:
            self._ended(line, line.conn.fail(e))
        except BaseException as e:  # noqa: BLE001: a fault of this package must not leave callers waiting
            self._ended(line, line.conn.fail(Error(f"the client failed: {e!r}", "report this")))

    def _ended(self, line: _Line, why: Error) -> None:
        """Notes the end of a connection, and ends all that wait for it."""
        with self._lock:
            line.why = why
            for request in line.asked.values():
                request.settle(why)
            mailboxes, line.mailboxes = line.mailboxes, []
            line.asked, line.followers = {}, {}
        for i in mailboxes:
            i.disconnected.set()
            i.end(ClosedError("the client is closed") if self._closing.is_set() else why)

    def _sort(self, line: _Line, m: Any) -> None:
        name, fields = _wire.read(m, "client")
        if name in ("listing", "denied"):
            self._reply(line, fields["number"], _Reply(name, fields, None, None))
        elif name == "accepted":
            self._accepted(line, m, fields)
        elif name == "view":
            self._view(line, m, fields["token"], View.of(fields))
        elif name != "soon":
            raise ProtocolError(f"{name}, which no server of publications sends")

    def _reply(self, line: _Line, number: int, a: _Reply) -> bool:
        """Passes a reply to the thread that waits for it. False if that thread has given up."""
        with self._lock:
            if number not in line.asked:
                raise ProtocolError(f"a reply to request {number}, which was not made")
            request = line.asked.pop(number)
            if request.given_up:
                return False
            request.settle(a)
            return True

    def _accepted(self, line: _Line, m: Any, fields: Dict[str, Any]) -> None:
        mailbox, token = Mailbox(), fields["token"]
        with self._lock:
            if token in line.followers:
                raise ProtocolError("two followers of one token")
            line.followers[token] = mailbox
            line.mailboxes.append(mailbox)
        page, text = None, None
        if len(m.files) == 1 + (fields["form"] > 0):  # otherwise some were lost
            page, text = File(), File() if fields["form"] else None
            if text is not None:
                text.open(m.files.pop)
            page.open(m.files.pop)
        taken = False
        try:
            taken = self._reply(line, fields["number"], _Reply("accepted", fields, page, mailbox, text))
        finally:
            for file in (page, text):
                if file is not None and not taken:
                    file.close()
        if not taken:
            with self._lock:
                line.followers[token] = None
            # This thread reads, so it must not block on a send.
            threading.Thread(target=self.notify, args=(line, "leave", {"token": token}), name="cuvmm leave", daemon=True).start()

    def _view(self, line: _Line, m: Any, token: bytes, v: View) -> None:
        with self._lock:
            if token not in line.followers:
                if v.final:
                    return  # the reply to a done that crossed a leave
                raise ProtocolError("a view for an unknown token")
            mailbox = line.followers[token]
            if v.final:  # may come while another view is in progress, and the end of the connection right behind it
                del line.followers[token]
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
    return kind(f"the server refused: {quoted(fields['reason'])}", hint)


def connect(path: str, timeout: float = _conn.TIMEOUT, *, uid: Optional[int] = None, reconnect: bool = False, wait: bool = False) -> Client:
    """Connects to the socket of a server of publications, which must be of this process's user, or of ``uid``.

    With ``reconnect`` the client and its followers outlive the publisher: their state is "stale" until another one serves
    the socket. The first connection is always made before this function returns. ``timeout``, in seconds, limits every
    exchange with the server. With ``wait`` it also waits that long for a process to serve the socket.
    """
    path, timeout = _conn.absolute(path), _conn.checked(timeout)

    def dial() -> _conn.Conn:
        return _conn.dial(path, timeout, uid, _MAY_LOSE, _wire.MAX_BATCH)

    def first() -> _conn.Conn:
        until = time.monotonic() + timeout
        while True:
            try:
                return dial()
            except GoneError as e:
                if not wait:
                    raise
                if time.monotonic() >= until:
                    raise WaitTimeout(f"{path!r} was not served within {timeout:g} s: {e.what}", e.hint) from None
            time.sleep(_conn.SHORTEST_PAUSE)

    undo = Undo()
    try:
        return Client(first(), dial if reconnect else None, path, undo)
    except BaseException:
        undo.abandon()
        raise
