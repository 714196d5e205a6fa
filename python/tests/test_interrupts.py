"""Ctrl-C at every place of every call, and every call of the driver failing once: nothing is left, nothing is freed twice, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import sys
import tempfile
import threading
import time
import unittest
import warnings
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional
from unittest import mock

import cuvmm
import cuvmm.multiprocessing as mp
from cuvmm import _conn, _descriptor, _driver, _packet, _page, _wire
from cuvmm._descriptor import ARRAY, Descriptor, this_process
from cuvmm._driver import Stream
from cuvmm._undo import Undo
from cuvmm.broker import Object, ObjectListing
from cuvmm.errors import Error
from cuvmm.imported import Imported
from cuvmm.kept import Kept

from .interrupts import PACKAGE, Interrupter, Library, Place
from .support import DriverTest, await_that

#: A place of code that several calls share is walked in so many of them.
TIMES = 1


class World:
    """A publisher and its follower, and what a call makes beside them."""

    def __init__(self, folder: str) -> None:
        self.path, self.made = os.path.join(folder, "socket"), []  # type: str, List[Any]
        self.memory = cuvmm.empty(100, "uint8", reserve=16 << 20)
        self.server = cuvmm.Server(self.path)
        self.table = self.server.publish("x", self.memory, writable=True)
        self.table.announce()
        self.client = cuvmm.connect(self.path)
        self.other = self.client.follow("x")
        self.other.next(timeout=60)

    def keep(self, what: Any) -> None:
        self.made.append(what)

    def goes_on(self) -> None:
        """The follower that was there before sees what is announced, if not at once then soon."""
        for attempt in range(4):
            try:
                last = self.table.announce(len(self.memory))
                while self.other.generation < last:
                    self.other.next(timeout=60)
                break
            except Error:
                if attempt == 3:
                    raise
        self.table.settle(60)

    def close(self) -> None:
        for what in [self.other, self.client, self.server, *(m for m in reversed(self.made) if hasattr(m, "close")), self.memory]:
            for attempt in range(3):
                try:
                    what.close()
                    break
                except cuvmm.DriverError:
                    if attempt == 2:
                        raise


class Op(NamedTuple):
    """A call to walk: what precedes it, the call, whether it ends something, so that it is repeated after an interruption, and what still works otherwise."""

    before: Callable[[World], Any]
    call: Callable[[World], Any]
    ends: bool = False
    after: Callable[[World], Any] = World.goes_on


def nothing(_: World) -> None:
    pass


def longer(w: World) -> None:
    w.memory.resize(4 << 20)
    w.memory.resize(100)


def another(w: World) -> None:
    w.keep(cuvmm.empty(3 << 20, "uint8"))


def follower(w: World) -> None:
    w.keep(w.client.follow("x"))
    w.made[0].next(timeout=60)


def announced(w: World) -> None:
    w.keep(Stream(_driver.device(0)))
    w.table.announce()


def sender(w: World) -> cuvmm.Channel:
    """A channel from whose other end memory, and then a message, is sent."""
    conn, fd = _conn.pair()
    channel = cuvmm.inherit(fd)
    memory = cuvmm.empty(100, "uint8")
    for what in (memory, conn, channel):
        w.keep(what)
    dev, undo = memory.device, Undo()
    chunks, _ = memory.chunks(100)
    about = Descriptor(ARRAY, memory.kind.number, memory.kind.size, 100, _driver.DEVICE_LOCATION, dev.handle, dev.uuid, False, False, _driver.POSIX_FD, 0,
                       this_process(), [c.size for c in chunks])

    def send() -> None:
        try:
            with memory._lock:
                numbers = [memory.export(c.identity, undo) for c in chunks]
            conn.send(*_wire.encode("offer", {"transfer": 1, "descriptor": about.encode()}))
            conn.send(*_wire.encode("chunks", {"transfer": 1, "first": 0}), numbers)
            said, _ = _wire.read(conn.receive(60), "sender")
            if said == "mapped":
                conn.send(*_wire.encode("confirmed", {"transfer": 1}))
            with open(os.devnull, "rb") as f:
                conn.send(7, b"hello", [f.fileno()])
        except Error:
            pass  # the channel was interrupted
        finally:
            undo.close()

    threading.Thread(target=send, name="cuvmm sender").start()
    return channel


def received(w: World) -> None:
    """Keeps what sender does, and the memory."""
    w.keep(sender(w).receive(timeout=60))


def talk(w: World) -> None:
    m = w.made[2].message(60)
    os.close(m.files[0])


def channels(w: World) -> None:
    """Both ends of a connection."""
    conn, fd = _conn.pair()
    w.keep(cuvmm.inherit(fd))
    w.keep(cuvmm.Channel(conn))
    w.keep(open(os.devnull, "rb"))


LONG = bytes(3 * _packet.BODY)


def sends(w: World) -> None:
    w.made[0].send(7, LONG, [w.made[2].fileno()])


def arrives(w: World) -> None:
    """What the call sent arrived as a whole, or not at all; so does the next message, unless the connection has ended."""
    try:
        w.made[0].send(8, b"")
    except cuvmm.GoneError:
        pass
    try:
        m = w.made[1].message(60)
        if m.kind == 7:
            os.close(m.files[0])
            m = w.made[1].message(60)
        assert m == (8, b"", []), m
    except (cuvmm.GoneError, cuvmm.RefusedError):
        pass


def collected(w: World) -> None:
    """A task has the exception that ended it, and that has the task's frames, with what their with statements give back."""
    gc.collect()
    w.goes_on()
    assert not w.other._wakers, "a coroutine that has ended would be woken"


async def waits(w: World, generations: bool) -> None:
    """Waits for an announcement, then for the GPU's word that it is complete, which comes later."""
    async def first() -> int:
        async for generation in w.other.generations():
            return generation
        raise AssertionError("the publication has ended")

    waiting = asyncio.ensure_future(first() if generations else w.other.next_async(timeout=60))
    await asyncio.sleep(0.001)
    with w.table._lock:
        generation = w.table._spend()
        w.table._show(w.table._view._replace(generation=generation, ordered=generation))
    while w.other._pending is None:
        await asyncio.sleep(0.001)
    with w.table._lock:
        w.table._write(generation, [], w.table._slots())
    assert await waiting == generation


def kept(w: World) -> None:
    """Memory as a broker gives it, with a page by which a publisher before has announced it."""
    memory = Imported(_driver.device(0), True, True)
    sender(w).receive_into(memory, timeout=60)
    undo = Undo()
    page, file = _page.make_page(None, undo)
    page.store(_page.COMPLETE, 1)
    about = ObjectListing("k", 0, 100, 1, False, os.getpid(), os.getuid(), 0, (), True)
    w.keep(undo)  # closed behind the memory
    w.keep(Kept(Object(mock.Mock(), bytes(16), about, memory, b""), memory._kind, file))


def published(w: World) -> None:
    kept(w)
    w.keep(w.server.publish("k", w.made[4]).withdraw)


def goes_on_there(w: World) -> None:
    """Whether the publication was made or not, one goes on where the one before was, and nothing of its memory is open."""
    memory = w.made[4]
    published = next((p for p in w.server.publications() if p.memory is memory), None) or w.server.publish("k", memory)
    with w.client.follow("k") as late:
        assert late.next(timeout=60) == published.generation > 1 and len(late) == 100
        assert published.announce() == late.next(timeout=60)
    published.withdraw()
    w.goes_on()


def lease(w: World) -> None:
    """Memory whose description and files the call maps."""
    memory = cuvmm.empty(100, "uint8")
    undo = Undo()
    w.keep(undo)
    w.keep(memory)
    dev, (chunks, _) = memory.device, memory.chunks(100)
    about = Descriptor(ARRAY, memory.kind.number, memory.kind.size, 100, _driver.DEVICE_LOCATION, dev.handle, dev.uuid, False, False, _driver.POSIX_FD, 0,
                       this_process(), [c.size for c in chunks])
    w.keep(about)
    w.keep([memory.export(c.identity, undo) for c in chunks])


def offered(w: World) -> None:
    lease(w)
    w.made[2] = _descriptor._text(_descriptor._OFFER, w.made[2].encode() + bytes(16))


def held(w: World) -> None:
    """What the follower shows is held by a stream, and by one to which it was exported."""
    for _ in range(2):
        w.keep(Stream(_driver.device(0)))
    w.table.announce()
    w.other.next(w.made[0].handle.value, timeout=60)
    w.other.array.allow_readonly().__dlpack__(stream=w.made[1].handle.value)


def released(w: World) -> None:
    """What a release, or a next, left can be released, and then the publisher does not wait."""
    streams = [s.handle.value for s in w.made if isinstance(s, Stream)]
    w.other.release(*streams)
    w.other.release()
    with w.table.rewrite(10):
        w.table.announce()
    w.goes_on()


def sent(w: World) -> None:
    """What multiprocessing takes of a descriptor is its own."""
    with mock.patch("multiprocessing.reduction.DupFd", lambda fd: None):
        mp._send(w.memory.array)


def withdrawn(w: World) -> None:
    """The followers are told."""
    try:
        while True:
            w.other.next(timeout=60)
    except cuvmm.WithdrawnError:
        pass


def torn(w: World) -> None:
    """Nothing of the memory is whole for the next publisher."""
    try:
        w.server.publish("k", w.made[4]).withdraw()
    except cuvmm.IncompleteError:
        return
    raise AssertionError("memory that was withdrawn is shown as whole")


class Parcel:
    """A descriptor on its way by multiprocessing."""

    def __init__(self, fd: int) -> None:
        self.detach = lambda: os.dup(fd)


def got(w: World) -> None:
    with mock.patch.object(mp, "_start_closing"):
        w.keep(mp._receive(w.made[2], Parcel(w.made[3][0])))


def dropped(w: World) -> None:
    """What a thread does with received memory of which no array is left."""
    del w.made[4:]
    gc.collect()
    while not mp._closing.empty():
        mp._closing.get().close()
    w.goes_on()


def waits_in_vain(w: World) -> None:
    with contextlib.suppress(cuvmm.WaitTimeout):
        w.other.next(w.made[0].handle.value, timeout=0)


def rewritable(w: World) -> None:
    """A reader that releases in the meantime."""
    w.table.announce()
    w.other.next(timeout=60)

    def release() -> None:
        time.sleep(0.02)
        with contextlib.suppress(cuvmm.DriverError):
            w.other.release()
        w.other.release()  # the failing call may have been the one above

    w.keep(threading.Thread(target=release))
    w.made[0].start()


def rewrites(w: World) -> None:
    with w.table.rewrite(60):
        w.table.announce()


def rewritten(w: World) -> None:
    """Whatever was left, an announcement ends it, and the next rewriting goes on."""
    w.made[0].join()
    w.goes_on()
    w.other.release()
    rewrites(w)
    w.goes_on()


OPS: Dict[str, Op] = {
    "empty": Op(nothing, lambda w: w.keep(cuvmm.empty(10, "uint8"))),
    "resize": Op(nothing, lambda w: w.memory.resize(4 << 20)),
    "trim": Op(longer, lambda w: w.memory.trim()),
    "write": Op(nothing, lambda w: w.memory.array.write(b"\1" * 100)),
    "memory.close": Op(another, lambda w: w.made[0].close(), True),
    "Server": Op(nothing, lambda w: w.keep(cuvmm.Server(w.path + "2"))),
    "publish": Op(another, lambda w: w.server.publish("y", w.made[0])),
    "announce": Op(nothing, lambda w: w.table.announce()),
    "announce behind a stream": Op(lambda w: w.keep(Stream(_driver.device(0))), lambda w: w.table.announce(stream=w.made[0].handle.value)),
    "shrink": Op(nothing, lambda w: w.table.shrink(10)),
    "rewrite": Op(rewritable, rewrites, after=rewritten),
    "release": Op(held, lambda w: w.other.release(w.made[0].handle.value), after=released),
    "release of exports": Op(held, lambda w: w.other.release(), after=released),
    "next that waits": Op(held, waits_in_vain, after=released),
    "intact": Op(nothing, lambda w: w.other.intact(1)),
    "settle": Op(lambda w: w.table.announce(), lambda w: w.table.settle(60)),
    "withdraw": Op(nothing, lambda w: w.table.withdraw(), True, after=withdrawn),
    "Server.close": Op(nothing, lambda w: w.server.close(), True),
    "connect": Op(nothing, lambda w: w.keep(cuvmm.connect(w.path))),
    "list": Op(nothing, lambda w: w.client.list()),
    "follow": Op(nothing, lambda w: w.keep(w.client.follow("x"))),
    "next": Op(lambda w: w.table.announce(), lambda w: w.other.next(timeout=60)),
    "next with a stream": Op(announced, lambda w: w.other.next(w.made[0].handle.value, timeout=60)),
    "tobytes": Op(nothing, lambda w: w.other.array.tobytes()),
    "__dlpack__": Op(nothing, lambda w: w.other.array.__dlpack__(copy=True)),
    "Follower.close": Op(follower, lambda w: w.made[0].close(), True),
    "export": Op(another, lambda w: w.keep(cuvmm.export(w.made[0].array))),
    "order": Op(lambda w: w.keep(Stream(_driver.device(0))), lambda w: w.other.order(w.made[0].handle.value), after=released),
    "Channel.receive": Op(lambda w: sender(w) and None, lambda w: w.keep(w.made[2].receive(timeout=60))),
    "Channel.message": Op(received, talk),
    "Imported.close": Op(received, lambda w: w.made[3].close(), True),
    "send by multiprocessing": Op(nothing, sent),
    "receive by multiprocessing": Op(lease, got, after=dropped),
    "open_lease": Op(offered, lambda w: w.keep(cuvmm.open_lease(w.made[2], files=w.made[3])[0])),
    "Channel.send": Op(channels, sends, after=arrives),
    "next_async": Op(nothing, lambda w: asyncio.run(waits(w, False)), after=collected),
    "generations": Op(nothing, lambda w: asyncio.run(waits(w, True)), after=collected),
    "publish what a broker keeps": Op(kept, lambda w: w.server.publish("k", w.made[4]), after=goes_on_there),
    "withdraw what a broker keeps": Op(published, lambda w: w.made[5](), True, after=torn),
    "Kept.close": Op(kept, lambda w: w.made[4].close(), True),
    "Client.close": Op(nothing, lambda w: w.client.close(), True),
}


class Walks(DriverTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.device = _driver.device(0)
        cls.library = Library(cls.device.driver._lib)

    device: Any
    library: Library

    def setUp(self) -> None:
        super().setUp()
        warnings.simplefilter("ignore", ResourceWarning)  # of sockets that an interrupted call lost: the collector closes them
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        self.addCleanup(warnings.resetwarnings)
        log = logging.getLogger("asyncio")  # which reports the tasks that are interrupted
        self.addCleanup(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL + 1)
        d = self.device.driver
        real, d._lib = d._lib, self.library
        self.addCleanup(setattr, d, "_lib", real)
        with self.world("warm") as w:  # what is made once
            w.goes_on()

    def state(self) -> Any:
        context, mode = ctypes.c_void_p(), ctypes.c_int(0)
        self.device.driver.call("cuCtxGetCurrent", ctypes.byref(context))
        self.device.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        before = mode.value
        self.device.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        return context.value, before

    @contextlib.contextmanager
    def world(self, what: str) -> Iterator[World]:
        """A world for one walk, and the checks behind it."""
        self.device.synchronize()  # what that keeps is there
        held, state, files = dict(self.library.held), self.state(), len(os.listdir("/proc/self/fd"))
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            w = World(folder)
            yield w
            self.assertEqual(self.state(), state, f"{what}: the thread's context and capture mode")
            w.close()
            gc.collect()
            self.device.synchronize()
            await_that(lambda: not [t for t in threading.enumerate() if t.name.startswith("cuvmm")], f"{what}: threads end")
            self.assertEqual(os.listdir(folder), [], f"{what}: sockets are left")
        wrong, self.library.wrong = self.library.wrong, []
        self.assertEqual(wrong, [], f"{what}: freed twice")
        self.assertEqual(self.library.held, held, f"{what}: the driver's")
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), files, f"{what}: file descriptors")

    @contextlib.contextmanager
    def nothing_ignored(self, what: str) -> Iterator[None]:
        """Requires that no destructor fails but by Ctrl-C, which may come in one."""
        ignored: List[str] = []
        with mock.patch.object(sys, "unraisablehook", lambda u: ignored.append(f"{u.exc_value!r} in {u.object!r}")):
            yield
        self.assertEqual([i for i in ignored if not i.startswith("KeyboardInterrupt")], [], f"{what}: ignored exceptions")

    def walk(self, name: str, op: Op, at: Optional[Place]) -> Interrupter:
        what = f"{name}, interrupted at {at[0].co_name}+{at[1]}" if at is not None else name
        with self.nothing_ignored(what), self.world(what) as w:
            op.before(w)
            i = Interrupter(at)
            try:
                i.run(lambda: op.call(w))
            except KeyboardInterrupt:
                pass
            if op.ends:
                op.call(w)
            if not op.ends or op.after is not World.goes_on:
                op.after(w)
        return i

    @unittest.skipIf(sys.version_info < (3, 11), "before Python 3.11 an interruption comes at other places, which no trace function finds")
    def test_ctrl_c_at_every_place(self) -> None:
        walked: Dict[Place, int] = {}
        count = 0
        for name, op in OPS.items():
            for place in self.walk(name, op, None).places:
                if walked.get(place, 0) < TIMES:
                    walked[place] = walked.get(place, 0) + 1
                    count += self.walk(name, op, place).done
        self.assertGreater(count, 300)

    @unittest.skipIf(sys.version_info < (3, 11), "before Python 3.11 an interruption comes at other places, which no trace function finds")
    def test_an_interruption_loses_no_message(self) -> None:
        (conn, fd), body = _conn.pair(), bytes(100_000)  # of several packets
        with contextlib.closing(conn), cuvmm.inherit(fd) as channel, open(os.devnull, "rb") as f:
            def take(m: cuvmm.Message) -> None:
                self.assertEqual((m.kind, m.body, len(m.files)), (7, body, 1))
                os.close(m.files[0])

            conn.send(7, body, [f.fileno()])
            found = Interrupter()
            found.run(lambda: take(channel.message(60)))
            places, files = [p for p in found.places if p[0].co_filename.startswith(PACKAGE)], len(os.listdir("/proc/self/fd"))
            self.assertGreater(len(places), 50)
            for place in places:
                conn.send(7, body, [f.fileno()])
                with self.assertRaises(KeyboardInterrupt):
                    Interrupter(place).run(lambda: channel.message(60))
                take(channel.message(60))
                self.assertEqual(len(os.listdir("/proc/self/fd")), files, f"{place[0].co_name}+{place[1]}")

    def test_every_call_of_the_driver_fails_once(self) -> None:
        for name, op in OPS.items():
            number, went = 0, True
            while went:
                number += 1
                with self.world(f"{name}, whose call {number} fails") as w:
                    op.before(w)
                    self.library.calls, self.library.fails = 0, number
                    try:
                        op.call(w)
                    except Error:
                        pass
                    went = self.library.calls >= number
                    self.library.fails = 0
                    if op.ends:
                        op.call(w)
                    else:
                        op.after(w)


if __name__ == "__main__":
    unittest.main()
