"""Servers of publications, for followers in Go and in Python."""

from __future__ import annotations

import os
import threading
import time
from ctypes import c_void_p
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from . import _conn, _driver, _page, _streams, _wire
from ._memory import Exportable
from ._descriptor import ARRAY, Descriptor, this_process
from ._driver import Event, Stream
from ._progress import Progress, Shown, common
from ._process import OfProcess
from ._replica import ENDED, MOVED, Chunk, View, size_of
from .client import Client
from .errors import (ArgumentError, ClosedError, Error, FilesError, GoneError, InUseError, NotSupported, PeerError, ProtocolError, RefusedError, SupersededError, TooLargeError,
                     WaitTimeout, whole)
from .follower import Follower, Heritage
from .shared import Shared

_DONE, _UNKNOWN, _LIMIT, _WITHDRAWN, _LEFT, _FORBIDDEN, _FAILED = range(7)
_MAX_FOLLOWERS = 256
_MOST_AHEAD = 1 << 20
_SETTLE_POLL = 0.05
_FLUSH = 1.0


class FollowerStats(NamedTuple):
    """A follower: its process, the generation that it has, the bytes that it still maps although they are no longer shown, and why it refused the last generation."""

    pid: int
    generation: int
    pinned: int
    reason: str


class _Replicator:
    """The publisher's side of one follower. The publication's lock guards it."""

    def __init__(self, session: "_Session", token: bytes, page: _page.Page, slot: int, progress: Progress) -> None:
        self.session, self.token, self.page, self.slot, self.progress = session, token, page, slot, progress
        self.ending: Optional[Tuple[int, int, str]] = None  # state, status and reason of the last view


class Publication(OfProcess):
    """Shared memory under a name. Followers see what ``announce`` has shown. All methods are safe for use by any thread."""

    def __init__(self, server: "Server", name: str, memory: Shared, writable: bool, before: Optional[Heritage] = None) -> None:
        self.name, self._server, self._memory, self.writable = name, server, memory, writable
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._exports: Dict[int, Exportable] = {}  # by the chunk's identity
        if before is None:
            self._view, self._identity = Shown(0, 0, 0, ()), os.urandom(16)
            self._kind, self._element, self._element_size = ARRAY, memory.kind.number, memory.kind.size
        else:
            generation = before.generation + 1
            self._view, self._identity = Shown(generation, generation, before.length, self._chunks(before.length)), before.publication
            self._kind, self._element, self._element_size = before.about.kind, before.about.element, before.about.element_size
        self._followers: List[_Replicator] = []
        self._withdrawn = False
        self._finishing = threading.Lock()  # guards the stream
        self._words = memory.device.stream_words()
        self._stream: Optional[Stream] = Stream(memory.device) if self._words else None

    @property
    def generation(self) -> int:
        return self._view.generation

    @property
    def memory(self) -> Shared:
        """The memory that is published."""
        return self._memory

    def about(self) -> Descriptor:
        dev = self._memory.device
        return Descriptor(self._kind, self._element, self._element_size, 0, _driver.DEVICE_LOCATION, dev.handle, dev.uuid, False, False, _driver.POSIX_FD, 0,
                          this_process(), [])

    def announce(self, length: Optional[int] = None, stream: Any = None) -> int:
        """Shows the first ``length`` elements (by default all) and returns the generation.

        If streams are passed (one, or a list), followers order their work behind the work that is on them now. Otherwise
        the elements must be complete. It cannot show fewer elements: see :meth:`shrink`.
        """
        self._check_process()
        streams = _streams.handles_of(self._memory.device, stream)
        with self._changed:
            self._check()
            length = len(self._memory) if length is None else whole(length, "elements to announce")
            if not self._view.length <= length <= len(self._memory):
                raise ArgumentError(f"{length} elements to announce, after {self._view.length}, of {len(self._memory)}", "resize the memory first; shrink shows fewer")
            generation = self._view.generation + 1
            self._write(generation, streams, self._followers)
            self._show(Shown(generation, generation, length, self._chunks(length)))
            return generation

    def _check(self) -> None:
        if self._withdrawn:
            raise ClosedError(f"publication {self.name!r} was withdrawn")

    def _chunks(self, length: int) -> Any:
        chunks, handles = self._memory.chunks(length)
        for c, h in zip(chunks, handles):
            self._exports[c.identity] = h
        return chunks

    def _show(self, v: Shown) -> None:
        self._view = v
        shown = {c.identity for c in v.chunks}
        self._exports = {n: h for n, h in self._exports.items() if n in shown}
        self._changed.notify_all()
        for s in {f.session for f in self._followers}:
            s.wake()

    def _write(self, generation: int, streams: List[c_void_p], to: List[_Replicator]) -> None:
        """Writes the generation to the fence words once the work that is on the streams now is done."""
        if self._stream is None:
            for h in streams:
                with Event(self._memory.device, h) as e:
                    while not e.passed():
                        time.sleep(0.0001)
            for f in to:
                f.page.store(f.slot, generation)
            return
        for h in streams:
            with Event(self._memory.device, h) as e:
                e.hold(self._stream.handle)
        with self._memory.device.current() as d:
            for f in to:
                d.call("cuStreamWriteValue64_v2", self._stream.handle, f.page.at(f.slot), generation, 0)

    def shrink(self, length: int, timeout: Optional[float] = None) -> None:
        """Shows fewer elements, and waits until every follower has unmapped what is no longer shown.

        Afterwards the memory may be overwritten, or freed with ``Shared.trim``. WaitTimeout names the followers that still
        map it, and InUseError one that refused; the elements are no longer shown in either case.
        """
        length = whole(length, "elements")
        with self._changed:
            self._check()
            if not 0 <= length <= self._view.length:
                raise ArgumentError(f"shrinking from {self._view.length} to {length} elements", "pass a length from 0 to what was announced; announce shows more")
            for f in self._followers:
                f.progress.lower(length)
            self._show(Shown(self._view.generation + 1, self._view.ordered, length, self._chunks(length)))
        self.settle(timeout)

    def settle(self, timeout: Optional[float] = None) -> None:
        """Waits until every follower has the last generation, and maps nothing that is no longer shown."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                behind = [f for f in self._followers if f.progress.reached != self._view.generation or f.progress.pinned(self._view)]
                if not behind:
                    return
                refused = [f for f in behind if f.progress.reached == self._view.generation]
                if len(refused) == len(behind):
                    raise InUseError(f"process {refused[0].session.pid} still maps memory that was taken back: {refused[0].progress.reason!r}", "the reason is the follower's")
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeout(f"followers in processes {sorted({f.session.pid for f in behind})} are not at generation {self._view.generation}", "check what blocks them")
                self._changed.wait(_SETTLE_POLL if left is None else min(left, _SETTLE_POLL))

    def followers(self) -> List[FollowerStats]:
        with self._lock:
            return [FollowerStats(f.session.pid, f.progress.reached, f.progress.pinned(self._view), f.progress.reason) for f in self._followers]

    def withdraw(self) -> None:
        """Ends the publication. Followers keep what they have mapped. It waits for the work that was announced. Idempotent."""
        self.end(ENDED, _WITHDRAWN, "")

    def end(self, state: int, status: int, reason: str) -> None:
        """Ends the publication with a last view for all followers."""
        if self._forked:
            return
        with self._changed:
            if self._withdrawn:
                return
            self._withdrawn = True
            for f in self._followers:
                f.ending = (state, status, reason)
            sessions = {f.session for f in self._followers}
        self._server.forget(self)
        for s in sessions:
            s.wake()
        with self._finishing:
            if self._stream is not None:
                self._stream.synchronize()
                self._stream.close()
                self._stream = None
        self._memory.holder = None

    # For sessions.

    def finish(self) -> None:
        """Waits until the fence words of all announcements so far are written."""
        with self._finishing:
            if self._stream is not None:
                self._stream.synchronize()

    def join(self, session: "_Session", m: Dict[str, Any]) -> Tuple[_Replicator, Dict[str, Any]]:
        """Adds a follower. Its fence word gets the shown generation once that is complete."""
        room, ahead = m["room"], m["generation"] - self._view.generation
        if ahead > _MOST_AHEAD:
            raise TooLargeError(f"a follower that is {ahead} generations ahead, where the limit is {_MOST_AHEAD}")
        with self._changed:
            if self._withdrawn:
                raise ClosedError(f"publication {self.name!r} was withdrawn")
            reserved = min(room, self._memory.reserved) if room else self._memory.reserved
            page, slot = session.word(self._memory.device if self._words else None)
            if ahead >= 0 and self._view.generation:  # the publisher that it had was ahead
                self._show(self._view._replace(generation=m["generation"] + 1))
            has = [Chunk(c["identity"], 0) for c in m["chunks"]]
            same = common(has, self._view.chunks)
            progress = Progress(self._memory.kind.size, reserved, [*self._view.chunks[:same], *has[same:]], m["length"], m["generation"])
            f = _Replicator(session, os.urandom(16), page, slot, progress)
            self._write(self._view.generation, [], [f])
            self._followers.append(f)
            return f, {"token": f.token, "publication": self._identity, "reserved": reserved, "slot": slot, "descriptor": self.about().encode()}

    def step(self, f: _Replicator) -> Optional[Tuple[View, List[Any]]]:
        """Returns the next view for a follower, and the handles of the chunks that it adds; None if there is none now."""
        with self._lock:
            if f.ending is not None:
                state, status, reason = f.ending
                self.drop(f)
                return View(0, self._view.generation, 0, 0, 0, state=state, status=status, reason=reason), []
            v = f.progress.next(self._view, _wire.MAX_BATCH)
            return None if v is None else (v, [self._exports[c.identity] for c in v.add])

    def acknowledge(self, f: _Replicator, fields: Dict[str, Any]) -> None:
        with self._changed:
            if f in self._followers:
                f.progress.acknowledge(fields)
                self._changed.notify_all()

    def drop(self, f: _Replicator) -> None:
        with self._changed:
            if f in self._followers:
                self._followers.remove(f)  # its word still gets what is announced; a follower that leaves ends its own waits
                self._changed.notify_all()

    def entry(self) -> Dict[str, Any]:
        with self._lock:
            return {"name": self.name, "kind": self._kind, "access": 2 if self.writable else 1, "element": self._element, "element size": self._element_size,
                    "length": self._view.length, "bytes": size_of(self._view.chunks), "generation": self._view.generation, "publication": self._identity}


class _Session:
    """The session of one client: one thread reads its requests, another one sends its followers views."""

    def __init__(self, server: "Server", conn: _conn.Conn) -> None:
        self.server, self._conn = server, conn
        self.pid = conn.peer.pid if conn.peer is not None else 0
        self._lock = threading.Lock()
        self._followers: Dict[bytes, Tuple[Publication, _Replicator]] = {}
        self._pages: List[Tuple[_page.Page, int, int]] = []  # each with its descriptor and next unused word
        self._page_of: Optional[_driver.Device] = None
        self._joined: Set[Publication] = set()
        self._awake = threading.Event()
        self._over = self._finishing = False
        self._threads = [threading.Thread(target=run, name="cuvmm session", daemon=True) for run in (self._read, self._tell)]

    def start(self) -> None:
        for t in reversed(self._threads):  # the reading thread joins the other one
            t.start()

    def wake(self) -> None:
        self._awake.set()

    def flush(self) -> None:
        """Makes the sending thread end after the views that are due now."""
        self._finishing = True
        self.wake()

    def close(self, until: float) -> None:
        """Ends the connection, once the last views are sent or at a deadline."""
        self._threads[1].join(max(0.0, until - time.monotonic()))
        self._conn.close()
        for t in self._threads:
            if t is not threading.current_thread():
                t.join()

    def word(self, dev: Optional[_driver.Device]) -> Tuple[_page.Page, int]:
        """Returns a fence word that no follower has used, which is 0."""
        with self._lock:
            if not self._pages or self._page_of is not dev or self._pages[-1][2] == self._pages[-1][0].words:
                page, fd = _page.make_page(dev)
                self._pages.append((page, fd, 0))
                self._page_of = dev
            page, fd, slot = self._pages[-1]
            self._pages[-1] = (page, fd, slot + 1)
            return page, slot

    def _page_file(self, page: _page.Page) -> int:
        with self._lock:
            return next(fd for p, fd, _ in self._pages if p is page)

    def _read(self) -> None:
        try:
            while True:
                m = self._conn.receive()
                _conn.close_all(m.files)
                try:
                    self._handle(*_wire.read(m, "server"))
                except (GoneError, ClosedError, RefusedError):
                    raise
                except Error as e:
                    raise self._conn.fail(e) from None
        except Error:
            pass
        except Exception as e:  # noqa: BLE001: a fault of this package must not leave the client waiting
            self._conn.fail(Error(f"the server failed: {e!r}", "report this"))
        self._over = True
        self.wake()
        with self._lock:
            left, self._followers = list(self._followers.values()), {}
        for p, f in left:
            p.drop(f)
        self._threads[1].join()
        for p in self._joined:
            p.finish()  # its stream may still write to the pages
        for page, fd, _ in self._pages:
            page.close()
            _conn.close_all([fd])
        self._conn.close()
        self.server.ended(self)

    def _handle(self, name: str, m: Dict[str, Any]) -> None:
        if name == "list":
            self._send("listing", {"number": m["number"], "entries": [p.entry() for p in self.server.publications()]})
        elif name == "follow":
            self._follow(m)
        elif name in ("done", "leave"):
            with self._lock:
                found = self._followers.get(m["token"])
            if found is None:
                self._send("view", View(0, 0, 0, 0, 0, state=ENDED, status=_UNKNOWN, reason="no follower of that token").fields(m["token"]))
            elif name == "done":
                found[0].acknowledge(found[1], m)
                self.wake()
            else:
                found[1].ending = (ENDED, _LEFT, "")
                self.wake()

    def _follow(self, m: Dict[str, Any]) -> None:
        p = self.server.find(m["name"])
        if p is None:
            self._deny(m, _UNKNOWN, f"no publication of the name {m['name']!r}")
        elif m["access"] == 2 and not p.writable:
            self._deny(m, _FORBIDDEN, f"publication {p.name!r} may only be read")
        elif len(self._followers) >= _MAX_FOLLOWERS:
            self._deny(m, _LIMIT, f"{_MAX_FOLLOWERS} followers of one client")
        else:
            try:
                self._joined.add(p)
                f, accepted = p.join(self, m)
            except ClosedError as e:
                self._deny(m, _UNKNOWN, str(e))
                return
            except (Error, OSError) as e:
                self._deny(m, _LIMIT if isinstance(e, TooLargeError) else _FAILED, str(e))
                return
            self._send("accepted", dict(accepted, number=m["number"]), [self._page_file(f.page)])
            with self._lock:  # the follower receives no view before this message
                self._followers[f.token] = (p, f)
            self.wake()

    def _deny(self, m: Dict[str, Any], status: int, reason: str) -> None:
        self._send("denied", {"number": m["number"], "status": status, "reason": reason})

    def _send(self, name: str, fields: Dict[str, Any], files: Optional[List[int]] = None) -> None:
        self._conn.send(*_wire.encode(name, fields), files or [])

    def _tell(self) -> None:
        while not self._over:
            self._awake.wait()
            self._awake.clear()
            finishing = self._finishing  # before the views are sent, or one could be missed
            with self._lock:
                all_of_them = list(self._followers.items())
            for token, (p, f) in all_of_them:
                try:
                    self._step(token, p, f)
                except (GoneError, ClosedError, RefusedError):
                    return
                except Error as e:
                    self._conn.fail(e)
                    return
                except Exception as e:  # noqa: BLE001: as in _read
                    self._conn.fail(Error(f"the server failed: {e!r}", "report this"))
                    return
            if finishing:
                return

    def _step(self, token: bytes, p: Publication, f: _Replicator) -> None:
        step = p.step(f)
        if step is None:
            return
        v, handles = step
        files: List[int] = []
        try:
            for h in handles:
                files.append(h.export())
            self._send("view", v.fields(token), files)
        finally:
            _conn.close_all(files)
        if v.final:
            with self._lock:
                self._followers.pop(token, None)


class Server(OfProcess):
    """Publishes shared memory on a socket, to processes of the same user. All methods are safe for use by any thread.

    The socket lies in a folder of mode 0700, which is created if it does not exist. The caller closes the server, which
    ends its publications; it still owns their memory.
    """

    def __init__(self, path: str, timeout: float = _conn.TIMEOUT) -> None:
        self._listener = _conn.Listener(path, timeout)
        self._before: Optional[Client] = None  # a client of the server that this one has replaced
        self._lock = threading.Lock()
        self._publications: Dict[str, Publication] = {}
        self._sessions: List[_Session] = []
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="cuvmm server", daemon=True)
        self._accepting.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> str:
        return self._listener.path

    def publish(self, name: str, memory: Shared, *, writable: bool = False) -> Publication:
        """Publishes memory under a name. Followers see nothing before the first ``announce``. ``writable`` permits them to write."""
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= 255:
            raise ArgumentError(f"publication {name!r}", "a name has 1 to 255 bytes")
        if not isinstance(memory, Shared):
            raise ArgumentError(f"{type(memory).__name__} cannot be published", "make the memory with cuvmm.empty, and a tensor of it with torch.from_dlpack(shared.array); cuvmm.export takes tensors whose allocator can share them")
        self._check_process()
        with self._lock:
            self._check_name(name)
            if memory.holder is not None:
                raise InUseError(f"the memory is {memory.holder}", "withdraw that publication first: memory is published once")
            return self._add(Publication(self, name, memory, writable))

    def _check_name(self, name: str) -> None:
        if self._closed:
            raise ClosedError("the server is closed")
        if name in self._publications:
            raise InUseError(f"a publication of the name {name!r}", "withdraw it first, or use another name")

    def _add(self, p: Publication) -> Publication:
        self._publications[p.name] = p
        p.memory.holder = f"published as {p.name!r}"
        return p

    def adopt(self, follower: Follower, *, writable: bool = False) -> Publication:
        """Continues a publication with the memory of a follower, under the same name: see :func:`take_over`.

        The elements of the last complete generation become the next generation. The publication's ``memory`` has the
        follower's address, grows with memory of this process, and belongs to the caller. The follower is closed; its
        arrays and tensors stay valid. It must belong to the client that ``take_over`` got, and be made with ``write=True``
        and ``keep_descriptors=True``.
        """
        self._check_process()
        if self._before is None or not follower.of(self._before):
            raise ArgumentError(f"{follower} does not belong to the server that this one has replaced", "pass a follower of the client that take_over got")
        h = follower.heritage(self._listener.timeout)
        with self._lock:
            self._check_name(h.name)
            p = Publication(self, h.name, Shared(h.kind, h.range, h.users, h.length, h.chunks, h.kept), writable, h)
            follower.hand_over()
            return self._add(p)

    def publications(self) -> List[Publication]:
        with self._lock:
            return list(self._publications.values())

    def find(self, name: str) -> Optional[Publication]:
        with self._lock:
            return self._publications.get(name)

    def forget(self, p: Publication) -> None:
        with self._lock:
            self._publications.pop(p.name, None)

    def ended(self, s: _Session) -> None:
        with self._lock:
            if s in self._sessions:
                self._sessions.remove(s)

    def _accept(self) -> None:
        while not self._closed:
            try:
                s = _Session(self, self._listener.accept())
            except FilesError:
                time.sleep(0.1)
                continue
            except Error:
                return
            with self._lock:
                self._sessions.append(s)
            s.start()

    def close(self) -> None:
        """Ends all publications and connections, and removes the socket. Idempotent.

        Followers that reconnect wait for the next server at the socket; for the others it is a MovedError. To end followers
        for good, withdraw the publications first.
        """
        self._closed = True
        if self._forked:
            self._listener.close()
            return
        for p in self.publications():
            p.finish()  # a publisher that has moved completes nothing more
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


def take_over(client: Client, timeout: Optional[float] = None) -> Server:
    """Replaces a server whose process has ended. Its followers made with ``keep_descriptors`` can become publications.

    It waits until the process has ended, not only its connection, since GPU work can outlive the connection. Then it
    serves the socket and closes the client, whose followers keep what they have; pass each of them that continues to
    :meth:`Server.adopt`. Followers in other processes that reconnect keep their memory. It raises SupersededError if
    another process serves the socket already; the client then stays open. ``timeout`` limits the wait, in seconds.
    """
    if not client.path:
        raise NotSupported("a client whose socket is not known", "make it with connect")
    client.await_end(timeout)
    try:
        server = Server(client.path)
    except PeerError as e:
        raise SupersededError(f"another process serves {client.path!r} already: {e}", "follow that one") from None
    server._before = client
    client.close()
    return server
