"""Connections between processes: Unix sockets of packets, with file descriptors."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import resource
import select
import socket
import stat
import struct
import threading
import time
import weakref
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from . import _packet
from ._process import OfProcess, State
from ._undo import File, Undo
from ._wire import MAX_BATCH, clip
from .errors import ArgumentError, ClosedError, Error, FilesError, GoneError, PeerError, ProtocolError, RefusedError, TooLargeError, WaitTimeout, seconds

_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0x40000000)
_CREDENTIALS = struct.Struct("iII")
_ANCILLARY = socket.CMSG_SPACE(_packet.FILES * array.array("i").itemsize)
_REFUSAL_WAIT = 0.1
_GREETING_POLL = 0.01
_NAME = 80
_LONGEST_WAIT = 2_000_000.0  # seconds, of which a poll takes some more, in milliseconds: longer is for ever
TIMEOUT = 10.0
#: Seconds between attempts to connect, or to follow again. Each pause is twice the one before.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class Peer(NamedTuple):
    """The process at the other end at the time of the connection. The pid may have been reused since."""

    pid: int
    uid: int
    gid: int


_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()  # of connections and listeners


def _in_child() -> None:
    """Closes the child's descriptors: while it has them, nothing tells the other processes when its parent has ended."""
    for s in list(_sockets):
        s.close()


os.register_at_fork(after_in_child=_in_child)


def close_all(files: Iterable[int]) -> None:
    for f in files:
        with contextlib.suppress(OSError):
            os.close(f)


def checked(timeout: float) -> float:
    """Returns the seconds that each exchange of a connection may take."""
    if not timeout > 0:
        raise ArgumentError(f"a timeout of {timeout} s", "pass a positive number of seconds; inf waits for ever")
    return seconds(timeout)


def _deadline(timeout: Optional[float]) -> Optional[float]:
    return None if timeout is None else time.monotonic() + timeout


def _sooner(a: Optional[float], b: Optional[float]) -> Optional[float]:
    return b if a is None else a if b is None else min(a, b)


def _files(ancillary: Any) -> List[int]:
    """Returns the descriptors that came with a packet."""
    files: List[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(content[:len(content) - len(content) % numbers.itemsize])
            files += numbers
    return files


def _await(fd: int, event: int, until: Optional[float]) -> bool:
    """Waits until the descriptor is ready; False at the deadline."""
    p = select.poll()
    p.register(fd, event)
    return _poll(p, until)


def _poll(p: "select.poll", until: Optional[float]) -> bool:
    left = None if until is None else max(0.0, until - time.monotonic())
    return bool(p.poll(None if left is None or left > _LONGEST_WAIT else int(left * 1000) + 1))


class Conn(OfProcess):
    """A connection. One thread at a time sends, and one receives; other threads wait for their turn.

    A violation of the protocol by either side closes the connection, and every later call raises the same error.
    """

    def __init__(self, s: socket.socket, peer: Optional[Peer], timeout: float = TIMEOUT, may_lose: Tuple[int, ...] = (),
                 max_files: Optional[int] = None) -> None:
        s.setblocking(False)
        self._socket = s
        _sockets.add(s)
        self.peer = peer
        self.timeout = timeout
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._state = threading.Lock()
        self._failed: Optional[Error] = None
        self._closed = False
        self._out = _packet.Outbound()
        self._sent: List[int] = []  # a number for each packet behind the sequence of out
        self._arrivals = select.poll()  # of the thread that receives
        self._arrivals.register(s.fileno(), select.POLLIN)
        nonce = os.urandom(16)
        self._in = _packet.Inbound(nonce, may_lose, _most_files() if max_files is None else max_files)
        #: The packets of a message that was not delivered yet, as the system gave them. An owner that may be interrupted
        #: empties it when it has the message.
        self.undelivered: List[Any] = []
        self._taken, self._began = 0, 0  # how many of them are reassembled, and the first one's number
        self._discarded: List[Optional[int]] = []  # of their descriptors, those that are closed
        with contextlib.suppress(OSError):  # the first receive reports why the peer closed it
            s.send(_packet.greeting(nonce))

    def _check(self) -> None:
        self._check_process()
        self._check_open()

    def _check_open(self) -> None:
        if self._failed is not None:
            raise self._failed.again()
        if self._closed:
            raise ClosedError("the connection is closed")

    def fail(self, why: Error) -> Error:
        """Closes the connection and sends the peer the reason. Returns the error of the connection, which is the first one."""
        self._check_process()
        with self._state:
            if self._failed is not None:
                return self._failed.again()
            if self._closed:
                return why
            self._failed = why.again()
        if not isinstance(why, (GoneError, RefusedError)) and self._sending.acquire(timeout=_REFUSAL_WAIT):
            try:
                self._refuse(why)
            finally:
                self._sending.release()
        self.shutdown()
        return why

    def _refuse(self, why: Error) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(_packet.refusal(self._out.peer, self.sent, clip(str(why), 512)))

    def shutdown(self) -> None:
        """Ends every call that waits on the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def greet(self) -> None:
        """Waits until the peer has greeted."""
        self._check_process()
        until = _deadline(self.timeout)
        while not self._in.greeted:
            turn: List[bool] = []  # which is noted in the step in which it is taken
            try:
                turn.extend(map(self._receiving.acquire, [True], [_GREETING_POLL]))
                if turn[0]:  # otherwise a thread that receives may get it, and go on
                    while not self._in.greeted:
                        self._packet(until, True)
                    self.undelivered = []
            except Error:
                raise
            except BaseException:
                if turn and turn[0]:
                    self.interrupted()
                raise
            finally:
                if turn and turn[0]:
                    self._receiving.release()

    @property
    def sent(self) -> int:
        """How many packets were sent."""
        return self._out.sequence + len(self._sent)

    def send(self, kind: int, body: bytes, files: Optional[List[int]] = None) -> None:
        """Sends a message. The descriptors stay the caller's."""
        self._check()
        if len(body) > _packet.MAX_BODY or len(files or ()) > _packet.MAX_FILES:
            raise TooLargeError(f"a message of {len(body)} bytes and {len(files or ())} file descriptors, where the limits are {_packet.MAX_BODY} and {_packet.MAX_FILES}", "send several messages")
        if not self._in.greeted:
            self.greet()
        with self._sending:
            self._check_open()
            self._out.version, self._out.peer = self._in.version, self._in.peer
            until = _deadline(self.timeout)
            self._out.sequence, self._sent = self.sent, []
            packets = self._out.packets(kind, body, files or [])
            try:
                for packet, some in packets:
                    self._send(packet, some, until)
            except BaseException as e:
                if 0 < len(self._sent) < len(packets) and (isinstance(e, ArgumentError) or not isinstance(e, Error)):  # the rest will never come
                    why = GoneError("a message was interrupted halfway", "connect again")
                    self._fail_unlocked(why, lambda: self._refuse(why))
                raise

    def _send(self, packet: bytes, files: List[int], until: Optional[float]) -> None:
        """Sends a packet, which the list of what was sent records in the same step."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        pause = 0.001
        while True:
            try:
                if rights:
                    self._sent.extend(map(self._socket.sendmsg, [[packet]], [rights], [socket.MSG_NOSIGNAL]))
                else:
                    self._sent.extend(map(self._socket.send, [packet], [socket.MSG_NOSIGNAL]))
                return
            except (BlockingIOError, InterruptedError):
                ready = _await(self._socket.fileno(), select.POLLOUT, until)
            except OSError as e:
                if e.errno == errno.ETOOMANYREFS:  # the kernel limits the descriptors in flight of a user
                    ready = until is None or time.monotonic() < until
                    time.sleep(pause)
                    pause = min(2 * pause, 0.05)
                else:
                    self._check()
                    if e.errno == errno.EBADF:
                        raise ArgumentError("a message with a file that is not open", "keep the files open until the call has returned") from None
                    raise GoneError(f"the connection ended: {e.strerror}", "receive returns the other process's reason, if it gave one") from None
            if not ready:
                raise self._fail_unlocked(WaitTimeout(f"the other process read nothing for {self.timeout:g} s", "check what blocks it"))

    def _fail_unlocked(self, why: Error, last: Optional[Callable[[], None]] = None) -> Error:
        with self._state:
            self._failed = self._failed or why.again()
        if last is not None:
            last()
        self.shutdown()
        return why

    def receive(self, timeout: Optional[float] = None) -> _packet.Message:
        """Waits for the next message. The caller owns its descriptors. A timeout loses nothing.

        A caller that may be interrupted calls ``interrupted`` then, by which an interruption loses nothing either.
        """
        self._check_process()
        until = _deadline(timeout)
        turn: List[bool] = []  # which is noted in the step in which it is taken
        try:
            turn.extend(map(self._receiving.acquire, [True], [-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)]))
            if not turn[0]:
                raise WaitTimeout("another thread is receiving", "try again")
            if self._taken and not self._in.pending():
                self.undelivered = []
            while True:
                self._check_open()
                owed = not self._in.greeted or self._in.pending()
                m = self._packet(_sooner(until, _deadline(self.timeout) if owed else None), owed and timeout is None)
                if m is not None:
                    return m
                if not self._in.pending():  # it was the greeting
                    self.undelivered = []
        finally:
            if turn and turn[0]:
                self._receiving.release()

    def interrupted(self) -> None:
        """Has the next call receive the message, or the part of one, that an interrupted one did not deliver."""
        if self._discarded:
            self.discard()  # which was interrupted
        elif self.undelivered:
            self._in.rewind(self._began)
            self._taken = 0

    def discard(self) -> None:
        """Closes the descriptors of a message that was not delivered. After an interruption it goes on where it stopped."""
        files = [f for _, ancillary, _, _ in self.undelivered for f in _files(ancillary)]
        while len(self._discarded) < len(files):
            try:
                self._discarded.extend(map(os.close, files[len(self._discarded):len(self._discarded) + 1]))
            except OSError:
                self._discarded.append(None)
        self.undelivered, self._discarded = [], []

    def _packet(self, until: Optional[float], owed: bool) -> Optional[_packet.Message]:
        if not self.undelivered:
            self._taken, self._began = 0, self._in.sequence
        if self._taken == len(self.undelivered):
            self._arrive(until, owed)
        data, ancillary, flags, _ = self.undelivered[self._taken]
        files = _files(ancillary) if ancillary else []
        if not data and not files:
            self._check()
            raise self.fail(GoneError("the other process closed the connection", "connect again after it has restarted"))
        try:
            m = self._in.take(data, files, bool(flags & socket.MSG_CTRUNC))
            self._taken += 1
        except Error as e:
            self.discard()
            self._in.discard()
            raise self.fail(e) from None
        if m is not None and m.lost:
            self.discard()
            return m._replace(files=[])
        return m

    def _arrive(self, until: Optional[float], owed: bool) -> None:
        """Waits for a packet."""
        while True:
            if not _poll(self._arrivals, until):
                if owed:
                    raise self.fail(WaitTimeout(f"the other process did not finish a greeting or a message within {self.timeout:g} s", "check what blocks it"))
                raise WaitTimeout("no message arrived", "try again: nothing was lost")
            try:
                self.undelivered.extend(map(self._socket.recvmsg, [_packet.HEADER + _packet.BODY + 1], [_ANCILLARY], [_CLOEXEC]))
                return
            except (BlockingIOError, InterruptedError, ConnectionResetError):
                continue  # a peer that closed with unread packets resets the connection once: what it sent is still here
            except OSError as e:
                self._check()
                raise self.fail(GoneError(f"the connection ended: {e.strerror}")) from None

    def close(self) -> None:
        """Ends the connection and every call that waits on it. Idempotent. In a child of fork it closes only the child's descriptors."""
        if self._forked:
            self._socket.close()
            return
        with self._state:
            self._closed = True
        self.shutdown()
        with self._receiving, self._sending:
            if self._in.pending() or self._taken < len(self.undelivered):
                self._in.discard()
                self.discard()
            self._socket.close()

    def hung_up(self) -> bool:
        """Whether the other end is closed, also while what it sent before is unread, or this one."""
        p = select.poll()
        try:
            p.register(self._socket.fileno(), select.POLLRDHUP)
        except ValueError:  # closed
            return True
        return bool(p.poll(0))


def _most_files() -> int:
    """Returns how many descriptors a message may have by default: a quarter of this process's limit, but at least a batch of chunks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(MAX_BATCH, min(limit // 4, _packet.MAX_FILES)) if limit != resource.RLIM_INFINITY else _packet.MAX_FILES


def _peer(s: socket.socket) -> Peer:
    return Peer(*_CREDENTIALS.unpack(s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def _folder(path: str, create: bool = False) -> File:
    """Opens a folder of mode 0700."""
    if create:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as e:
            raise PeerError(f"folder {path!r} cannot be made: {e.strerror}", "name one in an existing folder that this user can write to") from None
    folder = File()
    how = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            folder.open(os.open, path, os.O_RDONLY | how)
        except PermissionError:  # one that this process may enter and not read has no lock for it
            folder.open(os.open, path, os.O_PATH | how)
    except FileNotFoundError:
        raise GoneError(f"folder {path!r} does not exist", "start the process that serves there, or correct the path") from None
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PeerError(f"{path!r} is a symbolic link or not a folder", "name the folder itself") from None
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise FilesError(f"folder {path!r}: {e.strerror}", "raise this process's limit of open files (ulimit -n)") from None
        raise PeerError(f"folder {path!r}: {e.strerror}", "use a folder of this process's user") from None
    return folder


def _owner(folder: File, path: str, own: bool, shared: bool = False) -> int:
    """Checks that a folder is private, or, if it is shared, that only its owner can write it, and returns its owner."""
    s = os.fstat(folder.number)
    if shared:
        if s.st_mode & 0o022:
            raise PeerError(f"folder {path!r} has mode {stat.S_IMODE(s.st_mode):#o}", "others could put a socket there: use one that only its owner can write")
    elif stat.S_IMODE(s.st_mode) != 0o700:
        raise PeerError(f"folder {path!r} has mode {stat.S_IMODE(s.st_mode):#o}", "others could put a socket there: use one of mode 0700")
    if own and s.st_uid != os.geteuid():
        raise PeerError(f"folder {path!r} belongs to user {s.st_uid}", "use a folder of this process's user")
    return s.st_uid


def absolute(path: str) -> str:
    """Returns the path of a socket, which stays the same when this process changes its folder."""
    text = os.fspath(path)
    name = os.path.basename(text)
    if not name or name in (".", "..") or "\0" in text or len(os.fsencode(name)) > _NAME:
        raise ArgumentError(f"socket {path!r}", f"its name has 1 to {_NAME} bytes")
    return os.path.abspath(text)


def _settled(folder: int, until: float) -> bool:
    """Waits until no process is replacing a socket in the folder; False at the deadline."""
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(folder, fcntl.LOCK_UN)
            return True
        except OSError as e:
            if e.errno == errno.EBADF or time.monotonic() >= until:  # no lock, or no time
                return False
            time.sleep(0.001)


def dial(path: str, timeout: float = TIMEOUT, allow_uid: Optional[int] = None, may_lose: Tuple[int, ...] = (),
         max_files: Optional[int] = None, shared: bool = False) -> Conn:
    """Connects to a socket, checks that the server belongs to the expected user (this process's by default), and greets it.

    A ``shared`` socket is one that other users may reach, and root may serve it, too.
    """
    path = absolute(path)
    timeout = checked(timeout)
    until = time.monotonic() + timeout
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    folder = File()
    try:
        folder = _folder(os.path.dirname(path))
        owner = _owner(folder, os.path.dirname(path), False, shared)
        s.setblocking(False)
        _connect(s, folder.number, os.path.basename(path), path, until)
        peer = _peer(s)
        want = os.geteuid() if allow_uid is None else allow_uid
        trusted = (want, 0) if shared and allow_uid is None else (want,)
        if peer.uid not in trusted or peer.uid != owner:
            raise PeerError(f"{path!r} is served by user {peer.uid}, and its folder belongs to user {owner}", f"only user {want} is accepted: pass the server's as uid")
    except BaseException:
        s.close()
        raise
    finally:
        folder.close()
    c = Conn(s, peer, timeout, may_lose, max_files)
    try:
        try:
            c.greet()
        except WaitTimeout:
            raise WaitTimeout(f"process {peer.pid} of user {peer.uid}, which serves {path!r}, did not greet within {timeout:g} s",
                              "see whether that process, or one that it started, is stopped") from None
    except BaseException:
        c.close()
        raise
    return c


def _connect(s: socket.socket, folder: int, name: str, path: str, until: float) -> None:
    settled, pause = False, 0.001
    while True:
        try:
            s.connect(f"/proc/self/fd/{folder}/{name}")
            return
        except (BlockingIOError, InterruptedError):  # the listener's queue is full
            if time.monotonic() >= until:
                raise WaitTimeout(f"socket {path!r} has a full queue", "check whether the process that serves it still accepts connections") from None
        except (FileNotFoundError, ConnectionRefusedError):
            if not settled and _settled(folder, until):
                settled = True
                continue
            raise GoneError(f"no process serves {path!r}", "start the process that serves it") from None
        except OSError as e:
            raise PeerError(f"socket {path!r}: {e.strerror}", "name a socket that this user may connect to") from None
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def inherit(fd: int, timeout: float = TIMEOUT, may_lose: Tuple[int, ...] = ()) -> Conn:
    """Makes a connection of the end of a socketpair that this process inherited. It owns the descriptor from then on."""
    timeout = checked(timeout)
    try:
        s = socket.socket(fileno=fd)
    except OSError as e:
        raise ArgumentError(f"descriptor {fd}: {e.strerror}", "pass the file that the parent made for it") from None
    if s.family != socket.AF_UNIX or s.type != socket.SOCK_SEQPACKET:
        s.detach()
        raise ArgumentError(f"descriptor {fd} is not the end of a socketpair of packets", "pass the file that the parent made for it")
    os.set_inheritable(fd, False)
    c = Conn(s, None, timeout, may_lose)
    try:
        c.greet()
    except BaseException:
        c.close()
        raise
    return c


def pair(timeout: float = TIMEOUT) -> Tuple[Conn, int]:
    """Makes a connection to a child that is yet to be started, and the descriptor for its ``pass_fds``, which the caller closes."""
    timeout = checked(timeout)
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    return Conn(own, None, timeout), other.detach()


class Listener(OfProcess):
    """A socket in a private folder. ``accept`` waits for the next process of the same user."""

    def __init__(self, path: str, timeout: float = TIMEOUT, undo: Optional[Undo] = None) -> None:
        """``undo`` is the owner's."""
        self.path = absolute(path)
        self._name, self.timeout = os.path.basename(self.path), checked(timeout)
        self._state = State.OPEN
        self._undo = Undo()
        self._accepting, self._locking = threading.Lock(), threading.Lock()
        self._socket: Optional[socket.socket] = None
        self._entry: Optional[Tuple[int, int]] = None
        self._stop: Optional[socket.socket] = None
        self._wake: Optional[socket.socket] = None
        if undo is not None:
            undo.own(self)
        try:
            self._stop, self._wake = socket.socketpair()
            self._folder: File = self._undo.own(_folder(os.path.dirname(self.path), True))
            _owner(self._folder, os.path.dirname(self.path), True)
            with self._locked():
                self._replace_stale()
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
                _sockets.add(self._socket)
                self._socket.bind(f"/proc/self/fd/{self._folder.number}/{self._name}")
                self._entry = self._look()
                self._socket.listen(128)
                self._socket.setblocking(False)
        except BaseException as e:
            self._give_back()
            if isinstance(e, OSError) and not isinstance(e, Error):
                raise FilesError(f"socket {self.path!r}: {e.strerror}", "raise this process's limit of open files (ulimit -n)") from None
            raise

    def _give_back(self) -> None:
        """Removes the socket if it is this listener's, and closes everything."""
        if self._socket is not None and self._folder.live:
            with contextlib.suppress(Error, OSError), self._locked():
                mine = self._entry or self._bound()
                if mine is not None and self._look() == mine:
                    os.unlink(self._name, dir_fd=self._folder.number)
        for s in (self._socket, self._stop, self._wake):
            if s is not None:
                s.close()
        self._undo.close()
        self._state = State.CLOSED

    def _bound(self) -> Optional[Tuple[int, int]]:
        """Returns what is at the name, if it was interrupted right behind the bind of its socket."""
        return self._look() if self._socket is not None and self._socket.getsockname() else None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock of the socket's folder. The threads of a process share its descriptor, so they take turns."""
        until = time.monotonic() + self.timeout
        with self._locking:
            while True:
                try:
                    fcntl.flock(self._folder.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= until:
                        raise WaitTimeout(f"another process holds the lock of the folder of {self.path!r}", "end the process that holds it") from None
                    time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self._folder.number, fcntl.LOCK_UN)

    def _look(self) -> Optional[Tuple[int, int]]:
        try:
            s = os.stat(self._name, dir_fd=self._folder.number, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISSOCK(s.st_mode) or s.st_uid != os.geteuid():
            raise PeerError(f"{self.path!r} is not a socket of this user", "use another name, or remove it")
        return s.st_dev, s.st_ino

    def _replace_stale(self) -> None:
        if self._look() is None:
            return
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        probe.settimeout(min(self.timeout, _LONGEST_WAIT))
        try:
            probe.connect(f"/proc/self/fd/{self._folder.number}/{self._name}")
        except ConnectionRefusedError:
            os.unlink(self._name, dir_fd=self._folder.number)
            return
        except OSError:
            pass
        finally:
            probe.close()
        raise PeerError(f"a process serves {self.path!r}", "use another name, or end that process")

    def accept(self) -> Conn:
        """Waits for the next process. Closing ends the wait with ClosedError; a FilesError may be temporary."""
        self._check_process()
        with self._accepting:
            return self._accept()

    def _accept(self) -> Conn:
        if self._state is not State.OPEN:
            raise ClosedError("the listener is closed")
        assert self._socket is not None and self._stop is not None
        p = select.poll()
        p.register(self._socket.fileno(), select.POLLIN)
        p.register(self._stop.fileno(), select.POLLIN)
        while True:
            p.poll()
            if self._state is not State.OPEN:
                raise ClosedError("the listener is closed")
            try:
                s, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except OSError as e:
                if self._state is not State.OPEN:
                    continue
                raise FilesError(f"socket {self.path!r}: {e.strerror}", "raise this process's limit of open files (ulimit -n)") from None
            peer = _peer(s)
            if peer.uid == os.geteuid():
                return Conn(s, peer, self.timeout)
            with contextlib.suppress(OSError):
                s.setblocking(False)
                s.send(_packet.refusal(_packet.NO_NONCE, 0, f"user {peer.uid} is not allowed".encode()))
            s.close()

    def close(self) -> None:
        """Ends the listener and removes its socket. Connections stay open. Idempotent."""
        if self._forked:  # the parent serves the socket
            for s in (self._socket, self._stop, self._wake):
                if s is not None:
                    s.close()
            self._undo.close()
            return
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSING
        if self._wake is not None and self._wake.fileno() >= 0:
            self._wake.send(b"x")
        with self._accepting:
            self._give_back()


__all__ = ["Conn", "Listener", "Peer", "ProtocolError", "close_all", "dial", "inherit", "pair"]
