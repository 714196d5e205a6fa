"""Memory that another process has sent or leased."""

from __future__ import annotations

import contextlib
import threading
import time
from ctypes import c_void_p
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _conn, _descriptor, _driver, _memory, _packet, _wire
from ._descriptor import ARRAY, ELEMENTS, RECORD, Descriptor
from ._process import OfProcess, State
from ._undo import Passing, Undo
from .array import Array, ElementType, Users, close_at_exit
from .errors import ClosedError, Error, FilesError, MismatchError, ProtocolError, RefusedError, TooLargeError, WaitTimeout, quoted, seconds


_MAY_LOSE = (_wire.KINDS["chunks"],)
#: Limits of the program's messages that arrive while a call waits for memory.
_WAITING_MESSAGES, _WAITING_BYTES, _WAITING_FILES = 64, 4 << 20, 256


class Imported(OfProcess):
    """Memory of another process, mapped as one range. It lasts until it is closed, even if its exporter ends.

    All methods are safe for use by any thread. The caller closes it, after it has deleted all arrays and tensors of it.
    """

    def __init__(self, dev: _driver.Device, write: bool, pins: bool = False) -> None:
        self.device, self._write, self._length = dev, write, 0
        self._pins = pins  # the descriptors of the chunks, by which this process can export them again
        self._pinned: List[_memory.PinnedFile] = []
        self._kind: ElementType
        self._range: _memory.Range
        self._users, self._lock, self._undo = Users(), threading.Lock(), Undo()
        self._state = State.OPEN

    def map(self, d: Descriptor, importer: _memory.Importer, handles: List[_memory.Handle]) -> None:
        """Maps the memory of the handles. If that fails, ``abandon`` undoes it."""
        number = d.element if d.kind == ARRAY else 6
        self._kind = ElementType(ELEMENTS[number].name if number != RECORD else "record", d.unit, number)
        self._length = d.length
        self._range = _memory.Range(self.device, max(d.size, importer.granularity), importer.granularity, _driver.READ_WRITE if self._write else _driver.READ, self._undo)
        self._range.attach(handles)

    def pin(self, fd: int) -> None:
        """Keeps the descriptor of the next chunk, if it is to."""
        if self._pins:
            self._pinned.append(self._undo.own(_memory.PinnedFile()))
            self._pinned[-1].pin(fd)

    def hand_over(self) -> "Tuple[_memory.Range, Undo, List[_memory.PinnedFile], List[int]]":
        """Returns the range, with what closes it, and the descriptors and sizes of its chunks, to their next owner."""
        return self._range, self._undo, self._pinned, self._range.sizes

    def abandon(self) -> None:
        """Unmaps memory that no caller has."""
        self._state = State.CLOSED
        self._undo.abandon()

    def __repr__(self) -> str:
        return f"<cuvmm.Imported of {self._length} {self._kind.name} on device {self.device.ordinal}>"

    def __enter__(self) -> "Imported":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        close_at_exit(self.close, error)

    def __len__(self) -> int:
        return self._length

    @property
    def array(self) -> Array:
        """The elements. They are complete: a sender waits for its work before it sends."""
        self._check_process()
        with self._lock:
            if self._state is not State.OPEN:
                raise ClosedError("the memory is closed")
            at = self._range.address
            return Array(self.device, at, self._length, self._kind, not self._write, self._users, at, _no_order, self)

    def protect(self) -> None:
        """Waits for all work of the device, and makes the memory read-only, also for arrays that are in use."""
        self._check_process()
        with self._lock:
            if self._state is not State.OPEN:
                raise ClosedError("the memory is closed")
            self._users.protected = True  # nothing of this package writes from here on
            self.device.synchronize()
            self._range.protect()
            self._write = False

    def close(self) -> None:
        """Waits for all work of the device and unmaps the memory. InUseError while arrays or tensors of it are in use. Idempotent."""
        if self._forked:
            return
        with self._lock:
            if self._state is not State.CLOSED:
                self._users.refuse("closing the memory")
                self._state = State.CLOSING
                self.device.synchronize()
                self._undo.close()
                self._state = State.CLOSED


def _no_order(_: List[c_void_p]) -> None:
    """Orders nothing: what was sent is complete."""


class Message(NamedTuple):
    """A message of the programs. The receiver closes the descriptors in ``files``."""

    kind: int
    body: bytes
    files: List[int]


class Channel(OfProcess):
    """A connection to another process, for memory that it sends, and for messages of the programs.

    All methods are safe for use by any thread; one at a time receives.
    """

    def __init__(self, conn: _conn.Conn) -> None:
        self._conn = conn
        self._lock = threading.Lock()
        self._messages: Tuple[Message, ...] = ()
        self._offer: Optional[Dict[str, object]] = None  # until its transfer has ended
        self._refused: Optional[str] = None  # why the last transfer was withdrawn that no call received
        self._last = 0  # transfer
        self._current: Optional[int] = None

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def peer(self) -> Optional[_conn.Peer]:
        return self._conn.peer

    @property
    def ended(self) -> bool:
        """Whether the connection has ended, for whatever reason."""
        return self._conn.hung_up()

    def close(self) -> None:
        """Ends the connection. Memory that was received stays mapped; messages that no call has taken are dropped. Idempotent."""
        self._conn.close()
        if self._forked:
            return
        with self._lock:
            dropped, self._messages = self._messages, ()
            for m in dropped:
                _conn.close_all(m.files)

    def send(self, kind: int, body: bytes, files: Sequence[int] = ()) -> None:
        """Sends a message of the program, of a kind from 1 to 0xff00. The caller keeps the descriptors."""
        if not 1 <= kind <= 0xFF00:
            raise TooLargeError(f"a message of kind {kind}", "use 1 to 0xff00")
        self._conn.send(kind, body, list(files))

    def message(self, timeout: Optional[float] = None) -> Message:
        """Waits for the next message of the peer's program. ``timeout`` is in seconds; with 0 it takes one that is there."""
        got: List[Message] = []

        def take(until: Optional[float]) -> None:
            self._await_one(lambda: bool(self._messages), until)
            got[:], self._messages = self._messages[:1], self._messages[1:]

        try:
            self._in_turn(take, timeout)
            return got[0]
        except Error:
            raise
        except BaseException:
            if got:
                self.put_back(got[0])
            raise

    def _in_turn(self, do: "Callable[[Optional[float]], None]", timeout: Optional[float]) -> None:
        """Receives, when no other call does. The next call reads again what an interrupted one was reading."""
        self._check_process()
        timeout = seconds(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        turn: List[bool] = []  # which is noted in the step in which it is taken
        try:
            turn.extend(map(self._lock.acquire, [True], [-1 if timeout is None else max(0.0, timeout)]))
            if not turn[0]:
                raise WaitTimeout("another thread is receiving", "try again")
            do(until)
        except Error:
            raise
        except BaseException:
            if turn and turn[0]:
                self._conn.interrupted()
            raise
        finally:
            if turn and turn[0]:
                self._lock.release()

    def _await_one(self, there: Callable[[], bool], until: Optional[float]) -> None:
        """Reads until something is there. What has arrived is read also when the time is over."""
        first = True
        while not there():
            self._step(until, first)
            first = False

    def put_back(self, m: Message) -> None:
        """Has the next call of ``message`` return a message that this one has returned."""
        self._messages = (m, *self._messages)

    def receive(self, device: int = 0, *, write: bool = False, max_bytes: int = 0, timeout: Optional[float] = None) -> Imported:
        """Waits for memory that the peer sends, and maps it.

        It checks what the peer declares, first by itself and then against the memory. An error is sent to the peer, too.
        ``max_bytes`` limits the size (0: the device's memory); ``timeout``, in seconds, the wait for an offer. After Ctrl-C
        the peer's transfer has failed. If the peer fails,
        even before it offers memory, RefusedError has its reason; of several failures while no call received, the last.
        """
        got = Imported(_driver.device(device), write)
        try:
            self.receive_into(got, max_bytes, timeout)
            return got
        except BaseException:
            got.abandon()
            raise

    def receive_into(self, got: Imported, max_bytes: int = 0, timeout: Optional[float] = None) -> None:
        """``receive`` for memory that the caller has, and abandons after an error."""
        def take(until: Optional[float]) -> None:
            self._await_one(lambda: self._offer is not None or self._refused is not None, until)
            if self._refused is not None:  # it is older than an offer
                reason, self._refused = self._refused, None
                raise RefusedError(quoted(reason), "the reason is the peer's own words")
            assert self._offer is not None
            self._receive(got, self._offer, got.device, max_bytes)

        self._in_turn(take, timeout)

    def _receive(self, got: Imported, offer: Dict[str, object], dev: _driver.Device, max_bytes: int) -> None:
        number = offer["transfer"]
        assert isinstance(number, int)
        self._current = number
        try:
            self._import(got, offer, dev, max_bytes)
            self._send("mapped", transfer=number)
            self._await(number, "confirmed")
        except _Withdrawn as e:
            raise RefusedError(f"the peer withdrew its offer: {quoted(e.reason)}", "the reason is the peer's own words") from None
        except BaseException as e:
            try:
                got.abandon()
            finally:
                with contextlib.suppress(Error):  # the connection has ended
                    self._send("declined", transfer=number, reason=str(e))
            raise
        finally:
            self._current = self._offer = None

    def _import(self, got: Imported, offer: Dict[str, object], dev: _driver.Device, max_bytes: int) -> None:
        raw, number = offer["descriptor"], offer["transfer"]
        assert isinstance(raw, bytes) and isinstance(number, int)
        d = _descriptor.decode(raw)
        if not d.handle & _driver.POSIX_FD:
            raise MismatchError("memory by fabric handle alone", "share it by descriptor, or as a lease")
        importer = _memory.Importer(dev, d)
        d.check_sizes(importer.granularity, max_bytes or importer.most)
        handles: List[_memory.Handle] = []
        passing = Passing()
        try:
            while len(handles) < len(d.chunks):
                if handles:
                    self._send("taken", transfer=number, chunks=len(handles))
                said, m, fields = self._await(number, "chunks", "fabric")
                try:
                    if m.lost:
                        raise FilesError("file descriptors of chunks were dropped", "raise this process's limit of open files (ulimit -n)")
                    if said == "fabric" or fields["first"] != len(handles) or len(m.files) > len(d.chunks) - len(handles):
                        raise MismatchError(f"{said} from {fields['first']} on with {len(m.files)} files, where {len(handles)} of {len(d.chunks)} chunks have arrived as files",
                                            "the sender is at fault")
                    for fd in m.files:
                        handles.append(importer.descriptor(fd, d.chunks[len(handles)], passing))
                        got.pin(fd)
                finally:
                    self._conn.discard()
            got.map(d, importer, handles)
        finally:
            passing.abandon()

    def _send(self, name: str, **fields: object) -> None:
        self._conn.send(*_wire.encode(name, fields))

    def _await(self, number: int, *due: str) -> "tuple[str, _packet.Message, Dict[str, object]]":
        """Waits for the next message of the transfer. Any but those that are due, and a withdrawal, ends the connection."""
        until = time.monotonic() + self._conn.timeout
        while True:
            got = self._step(until)
            if got is None:
                continue
            said, _, fields = got
            if said == "withdrawn":
                raise _Withdrawn(str(fields["reason"]))
            if said in due:
                return got
            self._conn.discard()
            raise self._conn.fail(ProtocolError(f"{said} of transfer {number}, where {' or '.join(due)} is due"))

    def _step(self, until: Optional[float], late: bool = False) -> "Optional[tuple[str, _packet.Message, Dict[str, object]]]":
        """Reads a message and files it, also one that is there when the time is over if it may be ``late``. Returns it if it belongs to the current transfer."""
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            if not late:
                raise WaitTimeout("nothing arrived", "try again: nothing was lost")
            left = 0.0
        waiting = self._messages
        if waiting and (len(waiting) >= _WAITING_MESSAGES or sum(len(m.body) for m in waiting) >= _WAITING_BYTES
                        or sum(len(m.files) for m in waiting) >= _WAITING_FILES):
            raise TooLargeError(f"{len(waiting)} messages of the peer's program arrived before what this call waits for", "take them with message first")
        m = self._conn.receive(left)
        if m.kind <= 0xFF00:
            filed = Message(m.kind, m.body, m.files)
            self._messages += (filed,)
            self._conn.undelivered = []
            return None
        try:
            said, fields = _wire.read(m, "receiver")
            number = fields.get("transfer", 0)  # soon has none
            assert isinstance(number, int)
            if said == "offer":
                if number != self._last + 1 or self._offer is not None:
                    raise ProtocolError(f"an offer of transfer {number}, and {self._last + 1} is the next once the one before has ended")
                self._offer, self._last = fields, self._last + 1
                self._conn.undelivered = []
                return None
            if said == "withdrawn" and number == self._last + 1 and self._offer is None:
                self._refused, self._last = str(fields["reason"]), self._last + 1  # it failed before its offer
            elif number > self._last:
                raise ProtocolError(f"{said} of transfer {number}, which was not offered")
        except Error as e:
            self._conn.discard()
            raise self._conn.fail(e) from None
        if said == "soon":
            self._conn.discard()
            return None
        if number == self._current:
            return said, m, fields
        self._conn.discard()  # of a transfer that has ended
        if said == "withdrawn" and self._offer is not None and self._offer["transfer"] == number:
            self._offer, self._refused = None, str(fields["reason"])
        return None


class _Withdrawn(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def dial(path: str, timeout: float = _conn.TIMEOUT, *, uid: Optional[int] = None, shared: bool = False) -> Channel:
    """Connects to a process of this user, or of ``uid``, that listens for connections. ``timeout``, in seconds, limits every exchange.

    Other users may reach a ``shared`` socket, such as that of a broker for several, and root may serve it, too.
    """
    return Channel(_conn.dial(path, timeout, uid, _MAY_LOSE, shared=shared))


def inherit(fd: int, timeout: float = _conn.TIMEOUT) -> Channel:
    """Makes a channel of the end of a socketpair that this process inherited. It owns the descriptor from then on."""
    return Channel(_conn.inherit(fd, timeout, _MAY_LOSE))


def open_lease(text: str, device: int = 0, *, files: Sequence[int] = (), write: bool = False, max_bytes: int = 0) -> "tuple[Imported, str]":
    """Maps leased memory. Returns it, and the receipt for its exporter as text.

    The lease must not end before. The text of an offer contains its fabric handles; an offer of file descriptors needs
    ``files``, which the caller keeps.
    """
    dev = _driver.device(device)
    o = _descriptor.offer(text)
    d = o.descriptor
    importer = _memory.Importer(dev, d)
    d.check_sizes(importer.granularity, max_bytes or importer.most)
    if d.handle == _driver.POSIX_FD and len(files) != len(d.chunks):
        raise MismatchError(f"{len(files)} files for {len(d.chunks)} chunks", "pass the files of the lease, in order")
    handles: List[_memory.Handle] = []
    got, passing = Imported(dev, write), Passing()
    take: Callable[[int], _memory.Handle] = (lambda i: importer.fabric(o.handles[i], d.chunks[i], passing)) if d.handle == _driver.FABRIC else (
        lambda i: importer.descriptor(files[i], d.chunks[i], passing))
    try:
        for i in range(len(d.chunks)):
            handles.append(take(i))
        got.map(d, importer, handles)
        receipt = o.receipt()
        passing.abandon()
        return got, receipt
    except BaseException:
        try:
            got.abandon()
        finally:
            passing.abandon()
        raise
