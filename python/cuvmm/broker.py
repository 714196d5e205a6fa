"""Memory that outlives the processes that write it: objects of a broker (``cuvmm serve``), as tensors by name."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Type, TypeVar

from . import _driver, _wire
from ._conn import TIMEOUT, checked, close_all
from ._description import read_text, text_file
from ._digests import digests_of
from ._layout import placed
from ._manifest import Manifest, Placed, parse
from ._process import OfProcess
from ._undo import File
from .array import close_at_exit, close_when_unused
from .errors import (AccessError, ArgumentError, ClosedError, DigestError, Error, ExistsError, GoneError, InUseError, LostError, NotSupported, OutOfMemory, ProtocolError, RefusedError,
                     TooLargeError, UnknownError, WaitTimeout, WritingError, counted, quoted, seconds, whole)
from .imported import Channel, Imported, Message, dial
from .kept import Kept
from .shared import kind_of
from .weights import Tensors, Weights, within

T = TypeVar("T")

#: The kinds of a denied request, by their numbers.
_STATUSES: Sequence[Type[Error]] = (RefusedError, UnknownError, WritingError, ExistsError, TooLargeError, LostError, AccessError, NotSupported, OutOfMemory, ArgumentError)
_FIRST_PAUSE, _LAST_PAUSE, _TICK = 0.01, 1.0, 1000
_STOPPED = "see whether it is stopped, or allow it more time"
_GRACE = 1.0  # which a broker has to reply while this side closes
_REPLY = 2.0  # which it has at least: it asks holders for memory for a second
_MOST_BYTES = 1 << 60  # more than any device has


class ObjectListing(NamedTuple):
    """An object of a broker. ``version`` is 0 while it is written, and higher for each commit; ``pid`` and ``uid`` are its writer's.

    ``processes`` are the pids and uids of at most 16 processes that hold it, as the broker sees them. A ``publication`` has no version.
    """

    name: str
    version: int
    nbytes: int
    holders: int
    ephemeral: bool
    pid: int
    uid: int
    since: float
    processes: Sequence[Tuple[int, int]]
    publication: bool = False


def _listing(e: Mapping[str, Any]) -> ObjectListing:
    return ObjectListing(e["name"], e["version"], e["bytes"], e["holders"], e["ephemeral"], e["pid"], e["uid"], e["since"] / 1e9,
                         tuple((p["pid"], p["uid"]) for p in e["processes"]), e["publication"])


def default_socket() -> str:
    """The path at which ``cuvmm serve`` listens unless it is told otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(runtime, "cuvmm", "broker") if runtime else os.path.join(os.environ.get("TMPDIR") or "/tmp", f"cuvmm-{os.getuid()}", "broker")


class Object(Tensors):
    """An object that this process has mapped: its tensors by name, read-only. Close it after they are deleted.

    ``memory`` is the memory, an :class:`Imported`, and ``about`` describes the object as of when it was mapped.
    """

    def __init__(self, broker: "Broker", key: bytes, about: ObjectListing, memory: Imported, manifest: bytes) -> None:
        self._broker, self.key, self._lost = broker, key, ""
        #: Whether the broker asks for the memory: there is no room for what another process wants to write, and the object, which is
        #: ephemeral or has a newer version, ends with its last holder. A holder that can do without it closes it.
        self.wanted = False
        self.about, self.memory = about, memory
        self._placed = {p.name: p for p in within(len(memory), parse(manifest)).tensors} if manifest else {}

    def __repr__(self) -> str:
        return f"<cuvmm.Object {quoted(self.about.name)}, version {self.about.version}, of {counted(len(self), 'tensor')}>"

    def verify(self) -> None:
        """Compares the memory with the digests that the manifest has of each tensor: DigestError if a process has written to it since.

        It reads all of it, with threads. NotSupported if a tensor has no digest: the writer makes them if it is told to.
        """
        name, tensors = quoted(self.about.name), sorted(self._placed.values(), key=lambda p: p.offset)
        bare = next((p.name for p in tensors if not p.digest), None)
        if bare is not None or not tensors:
            raise NotSupported(f"object {name}, " + ("whose manifest has no tensors" if bare is None else f"whose tensor {quoted(bare)} has no digest"), "write it with digests=True")
        for p, found in zip(tensors, _digests(self.memory, tensors)):
            if found != p.digest:
                raise DigestError(f"object {name}, tensor {quoted(p.name)}: {found}, where the manifest has {p.digest}", "write the object anew, and find what wrote to it since")

    def check(self) -> None:
        """LostError once a broker that this process came back to does not have the object. The memory stays as it is."""
        if self._lost:
            raise LostError(self._lost, "close it when it is no longer needed, and attach it anew")

    def close(self) -> None:
        """Waits for all work of the device, unmaps the memory and tells the broker. InUseError while tensors of it are in use. Idempotent."""
        self.memory.close()
        self.let_go()

    def let_go(self) -> None:
        """Tells the broker that the memory is not mapped any more."""
        self._broker._let_go(self)

    def __enter__(self) -> "Object":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        close_at_exit(self.close, error)


class Writer(Tensors):
    """An object that this process writes: its tensors by name. At the end of a with statement it is committed, or given up after an exception, also one of the commit.

    Tensors of it that outlive the statement are read-only from then on, and keep the memory mapped. Tensors that a framework made of them
    do not know that, and a write through those destroys the CUDA context of the process.
    """

    def __init__(self, o: Object, m: Manifest, digests: bool) -> None:
        super().__init__(o.memory, within(len(o.memory), m).by_name())
        self._object, self._manifest, self._digests, self._committed = o, m, digests, False

    def commit(self, timeout: Optional[float] = None) -> Object:
        """Waits for all work of the device, makes the memory read-only and has the broker serve the object, which is the caller's to close.

        After an error other than LostError it can be called again. ``timeout`` limits the wait for a broker, in seconds.
        """
        until = _until(timeout)
        if self._committed:
            raise InUseError("an object that is committed", "write another")
        self.memory.protect()
        o, m, file = self._object, self._manifest, File()
        if self._digests:
            m = Manifest(m.nbytes, [p._replace(digest=d) for p, d in zip(m.tensors, _digests(self.memory, m.tensors))])
        try:
            version = o._broker._commit(o, text_file(m.text(), file).number, until)
        finally:
            file.close()
        o.about = o.about._replace(version=version)
        o._placed, self._committed = m.by_name(), True
        return o

    def close(self) -> None:
        """Gives the object up, unless it was committed. InUseError while tensors of it are in use."""
        if not self._committed:
            self._object.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        if error is None and not self._committed:
            try:
                self.commit()
            except BaseException as e:
                close_at_exit(self.close, e)
                raise
            close_when_unused(self._object.close)  # what a loop over the tensors has left is read-only by now
        elif error is not None:
            close_at_exit(self.close, error)


def _digests(memory: Imported, tensors: Sequence[Placed]) -> List[str]:
    array = memory.array  # while which is in use the memory is not closed
    try:
        return digests_of(memory.device, array.ptr, tensors)
    finally:
        del array  # or the traceback of an error would have it


class Broker(OfProcess):
    """A connection to a broker, which goes on with the next one when one ends. All methods are safe for use by any thread. Close it last.

    A call waits for a broker that does not serve the socket, or does not reply, for ``timeout`` seconds: WaitTimeout. One that serves
    it has two seconds to reply at least. Without a ``timeout`` a call waits until one replies, or another thread closes the connection.
    """

    def __init__(self, path: str, timeout: float, uid: Optional[int], first: Channel) -> None:
        self._path, self._timeout, self._uid = path, timeout, uid
        self._id = os.urandom(16)
        self._lock = threading.RLock()  # of all that follows; reentrant, since the collector may close objects in any call
        self._channel: Optional[Channel] = None
        self._number = 0
        self._held: Dict[bytes, List[Object]] = {}
        self._loose: Dict[bytes, None] = {}  # keys that this client may hold without knowing
        self._awaiting: Set[Channel] = set()  # of calls that wait for another process
        self._late: Dict[Channel, threading.Thread] = {}  # on which a reply is late, and who reads it
        self._asking = False  # by a thread that has the lock: what the collector closes meanwhile is released later
        self._closed = False
        self._away = ""  # why the broker refused this client last, as one does that has as many as it takes
        self._join(first)
        self._watch = threading.Thread(target=self._come_back, name="cuvmm broker", daemon=True)
        self._watch.start()

    def __repr__(self) -> str:
        return f"<cuvmm.Broker at {self._path!r}>"

    def __enter__(self) -> "Broker":
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        close_at_exit(self.close, error)

    def close(self) -> None:
        """Disconnects. InUseError while objects or writers are open. Idempotent.

        Calls that wait in other threads raise ClosedError, and what is on its way to them is given back. Only a broker that does not
        reply may hold it for this process until that ends.
        """
        if self._forked:
            return
        self._refuse_held()
        self._closed = True
        for waiting in list(self._awaiting):
            waiting.close()
        until = _until(_GRACE)
        for late, reader in list(self._late.items()):
            if reader.ident is not None:
                reader.join(_left(until))
            late.close()
        turn: List[bool] = []  # which is noted in the step in which it is taken
        try:
            turn.extend(map(self._lock.acquire, [True], [_GRACE]))
            ch = self._channel
            if ch is not None and not turn[0]:  # a broker that does not reply
                ch.close()
        finally:
            if turn and turn[0]:
                self._lock.release()
        with self._lock:
            self._refuse_held()  # a call got one meanwhile
            with contextlib.suppress(Error):  # the connection has ended
                if self._channel is not None:
                    self._release(self._channel, _until(_GRACE))
                elif self._loose:  # what a call has left, which was interrupted a moment ago
                    with dial(self._path, min(self._timeout, _GRACE), uid=self._uid, shared=True) as ch:
                        self._join(ch)
            self._drop()

    def _refuse_held(self) -> None:
        held = [o for of in list(self._held.values()) for o in of]
        if held:
            raise InUseError(f"{counted(len(held), 'open object')}, such as {quoted(held[0].about.name)}", "close them first")

    def attach(self, name: str, device: int = 0, *, version: int = 0, wait: bool = False, timeout: Optional[float] = None) -> Object:
        """Maps an object on a device, read-only: the newest version, or ``version``.

        UnknownError if there is none; WritingError while it is written, unless ``wait``. ``timeout`` limits that wait and the one for a
        broker, in seconds: WaitTimeout.
        """
        return self._attach(name, device, whole(version, "as a version"), wait, _until(timeout))

    def _attach(self, name: str, device: int, version: int, wait: bool, until: Optional[float]) -> Object:
        while True:
            try:
                return self._take("attach", device, {"name": _named(name), "version": version}, until=until)
            except WritingError as e:
                if not wait:
                    raise
                self._await(name, until, e)

    def writer(self, name: str, like: Mapping[str, Any], device: int = 0, *, ephemeral: bool = False, alone: bool = False, digests: bool = False,
               timeout: Optional[float] = None) -> Writer:
        """Makes an object for this process to write. Nobody sees it before it is committed, and nobody ever does if this process ends before.

        ``like`` says which tensors it has: anything with a ``dtype`` and a ``shape``, such as a ``state_dict``, or tuples of both. An
        ``ephemeral`` object goes with its last holder. With ``alone``, ExistsError or WritingError if the name is there or being written. With
        ``digests`` the manifest gets a digest (CRC-32C) of each tensor at the commit, which reads all of them, for :meth:`Object.verify`.
        ``timeout`` limits the wait for a broker, in seconds.
        """
        return self._writer(name, like, device, ephemeral, alone, digests, _until(timeout))

    def _writer(self, name: str, like: Mapping[str, Any], device: int, ephemeral: bool, alone: bool, digests: bool, until: Optional[float]) -> Writer:
        m = placed(like)
        dev = _driver.device(device)
        o = self._take("create", device, {"name": _named(name), "key": os.urandom(16), "device": dev.uuid, "bytes": m.nbytes,
                                          "ephemeral": bool(ephemeral), "alone": bool(alone)}, write=True, until=until)
        try:
            return Writer(o, m, digests)
        except BaseException as e:
            close_at_exit(o.close, e)
            raise

    def ensure(self, name: str, like: Mapping[str, Any], fill: Callable[[Writer], None], device: int = 0, *, ephemeral: bool = False, digests: bool = False,
               timeout: Optional[float] = None) -> Object:
        """Attaches an object, or has this process write it: of all that ask at the same time one fills it, and the others wait for it.

        They take its place if it fails or ends. ``fill`` writes the tensors of the writer; they are committed when it returns.
        ExistsError if the name is that of a publication. ``timeout`` limits the wait for others and for a broker, in seconds,
        until ``fill`` is called.
        """
        until = _until(timeout)
        while True:
            try:
                return self._attach(name, device, 0, True, until)
            except UnknownError:
                pass
            try:
                w = self._writer(name, like, device, ephemeral, True, digests, until)
            except WritingError:
                continue
            except ExistsError:
                if any(x.publication for x in self._listed(until) if x.name == name):
                    raise  # which is never attached
                continue
            try:
                fill(w)
                return w.commit()
            except BaseException as e:
                close_at_exit(w.close, e)
                raise

    def keep(self, name: str, length: int, dtype: Any = "float32", device: int = 0, *, wait: bool = False, timeout: Optional[float] = None) -> Kept:
        """Makes memory on a device, which this process publishes while it rewrites it, or takes that over whose publisher has ended::

            with broker.keep("weights", 1_000_000, wait=True) as memory, cuvmm.Server(path) as server:
                publication = server.publish("weights", memory)   # IncompleteError: the publisher before was killed while it rewrote
                if not publication.generation:                    # nothing was ever announced: write all
                    ...

        The last complete generation is there, and shown again as the next one; followers that reconnect keep what they have mapped. Write
        nothing before it is published: only that says whether there is something. The broker keeps the memory until it is removed.

        With ``wait`` this waits for the end of the process that publishes it; without it that is a WritingError. ``timeout`` limits that
        wait, in seconds, and the one for a broker: WaitTimeout. New memory has undefined contents. Memory of another size, or
        on another device, is an ArgumentError; a name of objects an ExistsError or a WritingError.
        """
        kind, length, dev = kind_of(dtype), whole(length, "elements"), _driver.device(device)
        if not 0 < length * kind.size <= _MOST_BYTES:
            raise ArgumentError(f"a publication of {counted(length, 'element')} of {counted(kind.size, 'byte')}", "name the size of its memory")
        until = _until(timeout)
        while True:
            page = File()
            try:
                o = self._take("keep", device, {"name": _named(name), "key": os.urandom(16), "device": dev.uuid, "bytes": length * kind.size}, write=True, page=page, until=until)
                try:
                    return Kept(o, kind, page)
                except BaseException as e:
                    close_at_exit(o.close, e)
                    raise
            except WritingError as e:
                if any(o.about.publication and o.about.name == name for of in list(self._held.values()) for o in of):
                    e = WritingError(e.what, "close the Kept that this connection has of that name first")
                if not wait:
                    raise e from None
                self._await(name, until, e)

    def keep_weights(self, name: str, like: Any, device: int = 0, *, wait: bool = False, timeout: Optional[float] = None) -> Weights:
        """:meth:`keep` for the tensors of a model, which ``like`` names as for :class:`Weights`. Nothing is copied.

        The broker keeps bytes, not names: another layout of the same size is the program's to notice.
        """
        m = placed(like)
        return Weights(self.keep(name, m.nbytes, "uint8", device, wait=wait, timeout=timeout), m.tensors, {}, True)

    def list(self, timeout: Optional[float] = None) -> List[ObjectListing]:
        """The objects that this process may read, also those that are being written.

        ``timeout`` limits the wait for a broker, in seconds.
        """
        return self._listed(_until(timeout))

    def remove(self, name: str, version: int = 0, *, timeout: Optional[float] = None) -> None:
        """Ends the objects of a name, or one version: nobody attaches them any more. Their memory is free when no process has it mapped.

        ``timeout`` limits the wait for a broker, in seconds.
        """
        until, fields = _until(timeout), {"name": _named(name), "version": whole(version, "as a version")}
        asked = False

        def remove(ch: Channel) -> None:
            nonlocal asked
            again, asked = asked, True
            try:
                self._ask(ch, "remove", fields, by=_replied(until))
            except _Denied as e:
                if not again or not isinstance(e.error, UnknownError):
                    raise
                # A broker has done it whose reply was lost.

        self._request(remove, until)

    def _listed(self, until: Optional[float]) -> "List[ObjectListing]":
        def entries(ch: Channel) -> "List[ObjectListing]":
            by = _replied(until)
            said, fields, _ = self._ask(ch, "list objects", {}, by=by)
            found = [_listing(e) for e in fields["entries"]]
            while not fields["last"]:
                said, fields, _ = self._reply(ch, by)
                found += [_listing(e) for e in fields["entries"]]
            return found

        return self._request(entries, until)

    def _commit(self, o: Object, manifest: int, until: Optional[float]) -> int:
        said, fields, _ = self._request(lambda ch: self._ask(ch, "commit", {"key": o.key}, [manifest], _replied(until)), until)
        return int(fields["version"])

    def _take(self, request: str, device: int, fields: Dict[str, Any], *, write: bool = False, page: Optional[File] = None,
              until: Optional[float] = None) -> Object:
        """Has the broker give an object, and maps it. What this process is to publish comes with a page, and stays exportable."""
        dev, given = _driver.device(device), []  # type: Any, List[Object]

        def give(ch: Channel) -> Object:
            before = ch._conn.sent
            try:
                said, got, files = self._ask(ch, request, fields, by=_replied(until))
            except BaseException as e:
                if _unanswered(e) and ch._conn.sent != before:
                    self._leave(ch)
                raise
            try:
                if said != "object":
                    raise ProtocolError(f"{said}, where an object was to come")
                self._loose[got["key"]] = None
                memory = Imported(dev, write, page is not None)
                try:
                    ch.receive_into(memory, timeout=self._timeout)
                    self._check_open()
                    if page is not None:
                        if not files or len(memory) != fields["bytes"]:
                            raise ProtocolError(f"{counted(len(memory), 'byte')} and {counted(len(files), 'page')} of a publication of {fields['bytes']}")
                        page.open(files.pop, -1)
                    o = Object(self, got["key"], _listing(got), memory, read_text(files[0], "a manifest") if files else b"")
                except BaseException:
                    memory.abandon()
                    raise
            finally:
                close_all(files)
            given.append(o)
            self._held[o.key] = [*self._held.get(o.key, ()), o]  # in one step: a key without objects would never be released
            del self._loose[o.key]
            return o

        try:
            return self._request(give, until)
        except BaseException as e:
            if given:  # Ctrl-C on the way out
                close_at_exit(given[0].close, e)
            elif "key" in fields and _unanswered(e):
                self._loose[fields["key"]] = None  # a broker may have made it
            raise

    def _leave(self, ch: Channel) -> None:
        """Gives up a connection on which a reply is late: this client holds what that will bring, and learns then what it has to release."""
        self._channel = None
        self._late[ch] = threading.Thread(target=self._read_late, args=(ch, self._number), name="cuvmm broker, late", daemon=True)
        self._late[ch].start()

    def _read_late(self, ch: Channel, number: int) -> None:
        with contextlib.suppress(Error), ch:
            fields: Dict[str, Any] = {}
            while fields.get("number") != number:
                m = ch.message()
                close_all(m.files)
                said, fields = _wire.decode(m.kind, m.body, "holder")
                if said == "object":
                    self._loose[fields["key"]] = None
        self._late.pop(ch, None)

    def _let_go(self, o: Object) -> None:
        if self._forked:
            return
        with self._lock:
            of = self._held.get(o.key, [])
            if o not in of:
                return
            if len(of) > 1:
                of.remove(o)
                return
            self._loose[o.key] = None  # first: a close that Ctrl-C ends here goes on when it is called again
            del self._held[o.key]
            self._release_now()

    def _release_now(self) -> None:
        """Releases what is loose, unless the collector runs this within a request, or there is no broker: then it is released later."""
        if self._loose and self._channel is not None and not self._asking:
            try:
                self._ask_alone(self._channel, lambda ch: self._release(ch, _until(self._timeout)))
            except Error:
                self._drop()  # the next broker is told
            except BaseException:
                self._drop()  # Ctrl-C: a reply may be on its way
                raise

    def _release(self, ch: Channel, by: Optional[float] = None) -> None:
        for key in list(self._loose):
            if key not in self._held:
                with contextlib.suppress(_Denied):  # it does not count it
                    self._ask(ch, "release", {"key": key}, by=by)
            del self._loose[key]

    def _request(self, do: "Callable[[Channel], T]", until: Optional[float]) -> "T":
        """Does something on the connection, and again on the next one if it ended, which comes before a deadline."""
        self._check_process()
        while True:
            turn: List[bool] = []  # which is noted in the step in which it is taken
            try:
                turn.extend(map(self._lock.acquire, [True], [_left(_replied(until))]))
                if not turn[0]:
                    raise WaitTimeout(f"another call waits for the broker at {self._path!r}", _STOPPED)
                self._check_open()
                ch = self._channel
                if ch is not None:
                    try:
                        self._ask_alone(ch, lambda ch: self._release(ch, _replied(until)))
                        got = self._ask_alone(ch, do)
                        self._away = ""
                        return got
                    except _Denied as e:
                        raise e.error from None
                    except WaitTimeout as e:
                        self._drop()  # a reply may be on its way
                        raise WaitTimeout(f"the broker at {self._path!r} does not reply: {e.what}", _STOPPED) from None
                    except ProtocolError:
                        self._drop()
                        raise
                    except Error as e:
                        if not ch.ended:
                            raise  # of this side: the broker's reply was read whole
                        self._refused(e)
                        self._drop()  # memory may be on its way
                    except BaseException:
                        self._drop()  # Ctrl-C: a reply may be on its way
                        raise
            finally:
                if turn and turn[0]:
                    self._lock.release()
            if _left(until) <= 0:
                raise WaitTimeout(f"no broker serves {self._path!r}{self._away}", "see whether its keeper starts another, or allow it more time")
            time.sleep(_FIRST_PAUSE)

    def _refused(self, why: Error) -> None:
        """Notes why the broker ended a connection."""
        if isinstance(why, RefusedError):
            self._away = f" for this process: {why.what}"

    def _ask_alone(self, ch: Channel, do: "Callable[[Channel], T]") -> "T":
        self._asking = True
        try:
            return do(ch)
        finally:
            self._asking = False

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the connection to the broker is closed")

    def _ask(self, ch: Channel, message: str, fields: Dict[str, Any], files: Sequence[int] = (), by: Optional[float] = None) -> "Tuple[str, Dict[str, Any], List[int]]":
        self._number += 1
        try:
            kind, body = _wire.encode(message, {"number": self._number, **fields})
        except struct.error:
            raise ArgumentError(f"a number in {message!r} that does not fit into 64 bits without a sign", "use a version from 0, and tensors that a device has room for") from None
        ch.send(kind, body, files)
        return self._reply(ch, by)

    def _reply(self, ch: Channel, by: Optional[float] = None) -> "Tuple[str, Dict[str, Any], List[int]]":
        while True:
            m = ch.message(None if by is None else _left(by))
            try:
                if self._is_request(m):
                    continue
                said, fields = _wire.decode(m.kind, m.body, "holder")
                if fields["number"] != self._number or len(m.files) > (said == "object"):
                    raise ProtocolError(f"{said} to request {fields['number']} with {counted(len(m.files), 'file')}, where {self._number} is the request")
                break
            except Error:
                close_all(m.files)
                raise
            except BaseException:
                ch.put_back(m)  # Ctrl-C: what it brings is given back
                raise
        if said == "object denied":
            kind = _STATUSES[fields["cause"]] if fields["cause"] < len(_STATUSES) else RefusedError
            raise _Denied(kind(f"the broker refused: {quoted(fields['reason'])}"))
        return said, fields, m.files

    def _is_request(self, m: Message) -> bool:
        """Takes a message of the broker that replies to nothing. The lock is held."""
        if m.kind != _wire.KINDS["wanted"]:
            return False
        _, fields = _wire.decode(m.kind, m.body, "holder")
        if m.files:
            raise ProtocolError(f"{counted(len(m.files), 'file')} with a request for memory")
        for o in self._held.get(fields["key"], []):
            o.wanted = True
        return True

    def _attend(self, ch: Channel) -> None:
        """Takes what a broker asks while no request is outstanding, and releases what could not be released before."""
        with self._lock:
            if self._channel is not ch:
                return
            self._release_now()
            if ch._messages or _readable(ch, 0):
                m = self._ask_alone(ch, lambda ch: ch.message(_FIRST_PAUSE))  # there may be a part of a transfer that has failed, and no more
                try:
                    if not self._is_request(m):
                        raise ProtocolError("a reply to nothing")
                except ProtocolError:
                    close_all(m.files)
                    self._drop()
                    raise

    def _await(self, name: str, until: Optional[float], why: WritingError) -> None:
        """Waits until a name can be attached or nobody writes it, on a connection of its own, or until that ends."""
        late = WaitTimeout(f"waited for {quoted(name)}: {why.what}", why.hint or "allow it more time, or end the process that has it")
        left = _left(until)
        if left <= 0:
            raise late
        try:
            with dial(self._path, min(self._timeout, left), uid=self._uid, shared=True) as ch:
                self._awaiting.add(ch)
                try:
                    self._check_open()
                    ch.send(*_wire.encode("join", {"client": os.urandom(16)}))
                    ch.send(*_wire.encode("await", {"number": 1, "name": name}))
                    close_all(ch.message(None if until is None else _left(until)).files)
                finally:
                    self._awaiting.discard(ch)
        except ClosedError:
            self._check_open()
            raise
        except WaitTimeout:
            if _left(until) <= 0:
                raise late from None
        except GoneError:
            time.sleep(_FIRST_PAUSE)

    def _join(self, ch: Channel) -> None:
        """Tells a broker who this is, and what it holds."""
        try:
            ch.send(*_wire.encode("join", {"client": self._id}))
        except GoneError:
            close_all(ch.message(self._timeout).files)  # raises its reason, if it takes no more clients
            raise
        by = _until(self._timeout)
        self._release(ch, by)
        for key, of in list(self._held.items()):  # of which the collector may close some
            try:
                self._ask(ch, "hold", {"key": key}, by=by)
            except _Denied as e:
                if not isinstance(e.error, LostError):
                    raise e.error from None
                for o in of:
                    o._lost = str(e.error)
        self._channel = ch

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _come_back(self) -> None:
        """Connects again whenever a connection has ended."""
        pause = _FIRST_PAUSE
        while not self._closed:
            ch = self._channel
            if ch is not None and not _hung_up(ch):
                pause = _FIRST_PAUSE
                with contextlib.suppress(Error):  # the connection has ended
                    self._attend(ch)
                continue
            with self._lock:
                if self._channel is ch:
                    self._drop()
            try:
                found = dial(self._path, self._timeout, uid=self._uid, shared=True)
            except Error:
                pass  # nobody serves the socket yet
            else:
                with self._lock:
                    try:
                        self._check_open()
                        self._join(found)
                        continue
                    except Error as e:
                        self._refused(e)
                        found.close()
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)


def _until(timeout: Optional[float]) -> Optional[float]:
    timeout = seconds(timeout)
    return None if timeout is None else time.monotonic() + timeout


def _replied(until: Optional[float]) -> Optional[float]:
    """Returns by when a broker is to reply to a call with a deadline."""
    return None if until is None else max(until, time.monotonic() + _REPLY)


def _left(until: Optional[float]) -> float:
    """Returns the seconds until a deadline."""
    return threading.TIMEOUT_MAX if until is None else min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)


def _unanswered(e: BaseException) -> bool:
    """Reports whether a request failed without a reply: its time was over, or it was interrupted."""
    return isinstance(e, WaitTimeout) or not isinstance(e, (Error, _Denied))


class _Denied(Exception):
    def __init__(self, error: Error) -> None:
        super().__init__(str(error))
        self.error = error


def _hung_up(ch: Channel) -> bool:
    """Waits a moment for the end of a connection, or for a message on it."""
    return bool(_events(ch, _TICK) & ~select.POLLIN)


def _readable(ch: Channel, wait: int) -> bool:
    return _events(ch, wait) == select.POLLIN


def _events(ch: Channel, wait: int) -> int:
    p = select.poll()
    try:
        p.register(ch._conn._socket.fileno(), select.POLLRDHUP | select.POLLIN)
    except (ValueError, OSError):
        return select.POLLRDHUP
    return sum(events for _, events in p.poll(wait))


def _named(name: str) -> str:
    if not name or len(name.encode()) > 255:
        raise ArgumentError(f"the name {quoted(name)}", "use 1 to 255 bytes of UTF-8")
    return name


def connect_broker(path: str = "", timeout: float = TIMEOUT, *, uid: Optional[int] = None, wait: bool = False) -> Broker:
    """Connects to the broker at a socket, by default that of ``cuvmm serve``. With ``wait`` it waits for one to serve it, for ``timeout`` seconds at most.

    The broker must be of this process's user or of root, or else of ``uid``. ``timeout`` also limits each step of the way of a message or of
    memory, but not how long calls wait for a broker: their own ``timeout`` does.
    """
    path, timeout = os.path.abspath(path or default_socket()), checked(timeout)
    until = time.monotonic() + timeout
    while True:
        try:
            first = dial(path, timeout, uid=uid, shared=True)
            try:
                return Broker(path, timeout, uid, first)
            except BaseException:
                first.close()
                raise
        except (GoneError, OSError, Error) as e:
            if not wait or not isinstance(e, (GoneError, FileNotFoundError, UnknownError)):
                raise
            if time.monotonic() > until:
                raise WaitTimeout(f"no broker serves {path!r}", "start cuvmm serve, or allow it more time") from None
        time.sleep(_FIRST_PAUSE)


_default_lock = threading.Lock()
_default: Optional[Broker] = None


def _in_child() -> None:
    """A thread that does not exist here may have held the lock."""
    global _default_lock
    _default_lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _broker() -> Broker:
    global _default
    with _default_lock:
        if _default is None or _default._forked:
            _default = connect_broker()
        return _default


def attach(name: str, device: int = 0, *, version: int = 0, wait: bool = False, timeout: Optional[float] = None) -> Object:
    """:meth:`Broker.attach` by the default broker's socket, to which the process stays connected."""
    return _broker().attach(name, device, version=version, wait=wait, timeout=timeout)


def writer(name: str, like: Mapping[str, Any], device: int = 0, *, ephemeral: bool = False, alone: bool = False, digests: bool = False,
           timeout: Optional[float] = None) -> Writer:
    """:meth:`Broker.writer` by the default broker's socket, to which the process stays connected."""
    return _broker().writer(name, like, device, ephemeral=ephemeral, alone=alone, digests=digests, timeout=timeout)
