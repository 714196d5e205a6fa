"""Objects of a broker, beside cuvmm serve."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple
from unittest import mock

import cuvmm
from cuvmm import _wire, broker
from cuvmm._conn import Conn
from cuvmm._pieces import PIECE
from cuvmm.imported import Channel, Imported, Message

from .interrupts import Interrupter
from .serving import ServedTest
from .support import await_that, environment

LIKE = {"layer.0.w": ("float32", (2, 3)), "layer.0.b": ("bfloat16", (3,)), "scalar": ("uint8", ())}


def put(t: cuvmm.Tensor, value: bytes) -> None:
    """Fills a tensor with bytes, as a framework would."""
    raw = ctypes.create_string_buffer(value, len(value))
    with t._device.current() as d:
        d.call("cuMemcpyHtoDAsync_v2", t.ptr, ctypes.addressof(raw), len(value), None)
    t._device.synchronize()


def _stopped(task: Path) -> bool:
    return (task / "stat").read_bytes().rpartition(b") ")[2][:1] == b"T"


class Given:
    """A tensor of uint8 as a framework has it, at an address."""

    dtype = "uint8"

    def __init__(self, address: int, shape: Tuple[int, ...]) -> None:
        self._address, self.shape = address, shape

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> Tuple[int, ...]:
        return (1,)


class BrokerTest(ServedTest):
    def test_tensors_outlive_their_writer_and_the_broker(self) -> None:
        b = self.connect()
        with self.assertRaises(cuvmm.UnknownError):
            b.attach("model")
        with b.writer("model", LIKE) as w:
            self.assertEqual(list(w), list(LIKE))
            with self.assertRaises(cuvmm.WritingError):
                b.attach("model")
            put(w["layer.0.w"], bytes(range(24)))
        other = self.connect()
        for kill in (False, True):
            with other.attach("model") as o:
                t = o["layer.0.w"]
                self.assertEqual((t.shape, t.dtype, t.readonly), ((2, 3), "float32", True))
                self.assertEqual(o["layer.0.b"].dtype, "bfloat16")
                self.assertEqual((o.about.name, o.about.pid, o.about.version > 0), ("model", os.getpid(), True))
                back = o.memory.array[0:24].tolist()
                self.assertEqual(back, list(range(24)))
                del t, back
            if not kill:
                pid = self.broker_pid()
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
        self.assertEqual([x.name for x in other.list()], ["model"])
        other.remove("model")
        with self.assertRaises(cuvmm.UnknownError):
            other.remove("model")
        self.assertEqual(other.list(), [])

    def test_what_is_not_committed_is_never_seen(self) -> None:
        b = self.connect()
        with self.assertRaises(ZeroDivisionError):
            with b.writer("model", LIKE):
                raise ZeroDivisionError
        with self.assertRaises(cuvmm.UnknownError):
            b.attach("model", wait=True)
        w = b.writer("model", LIKE)
        with self.assertRaises(cuvmm.WritingError):
            b.writer("model", LIKE, alone=True)
        with self.assertRaises(cuvmm.InUseError):
            b.close()
        with self.assertRaises(cuvmm.WaitTimeout):
            b.attach("model", wait=True, timeout=0.05)
        o = w.commit()
        with self.assertRaises(cuvmm.InUseError):
            w.commit()
        with self.assertRaises(cuvmm.ExistsError):
            b.writer("model", LIKE, alone=True)
        w.close()
        self.assertEqual(len(o), 3)
        o.close()
        o.close()
        for like in ({"w": ("quaternion", (1,))}, {"": ("uint8", (1,))}, {"w": ("uint8", (-1,))}):
            with self.assertRaises(cuvmm.ArgumentError):
                b.writer("model", like)

    def test_objects_are_themselves(self) -> None:
        """Several of one client are told apart, open or closed, whatever they hold."""
        b = self.connect()
        with b.writer("model", LIKE):
            pass
        first, second = b.attach("model"), b.attach("model")
        self.assertNotEqual(first, second)
        self.assertEqual(len({first, second}), 2)
        for o in (second, first):
            o.close()
            o.close()
        self.assertEqual(b._held, {})

    def test_a_tensor_that_outlives_the_writing(self) -> None:
        """A loop over the tensors leaves its last one behind, which hinders nobody."""
        b = self.connect()
        with b.writer("model", LIKE) as w:
            for _, t in w.items():
                put(t, bytes(t.nbytes))
        with self.assertRaises(cuvmm.InUseError):
            b.close()
        self.assertTrue(t.readonly and "read-only" in repr(t))
        with self.assertRaisesRegex(BufferError, "read-only"):
            t.write(bytes(t.nbytes))
        with self.assertRaisesRegex(BufferError, "read-only"):
            t.__dlpack__()
        self.assertEqual(t.__cuda_array_interface__["data"][1], True)
        self.assertEqual(t.tobytes(), bytes(t.nbytes))
        del t
        await_that(lambda: not b._held, "the memory is given up")

    def test_one_fills_and_others_attach(self) -> None:
        a, b = self.connect(), self.connect()
        filled: List[cuvmm.Writer] = []

        def broken(w: cuvmm.Writer) -> None:
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            a.ensure("model", LIKE, broken)
        with a.ensure("model", LIKE, filled.append) as first, b.ensure("model", LIKE, filled.append) as second:
            self.assertEqual(first.about.version, second.about.version)
        self.assertEqual(len(filled), 1)

    def test_ensure_of_a_publication(self) -> None:
        b = self.connect()
        b.keep("table", 1).close()
        with self.assertRaisesRegex(cuvmm.ExistsError, "table"):
            b.ensure("table", LIKE, lambda w: None)

    def calls(self, b: cuvmm.Broker, **more: Any) -> "Dict[str, Callable[[], Any]]":
        """Calls that wait: "written" is being written, and "kept" is published."""
        return {
            "keep": lambda: b.keep("kept", 1, wait=True, **more),
            "attach": lambda: b.attach("written", wait=True, **more),
            "ensure": lambda: b.ensure("written", LIKE, lambda w: None, **more),
        }

    def test_timeouts_without_a_broker(self) -> None:
        b = self.connect()
        self.end()
        self.time_out(b, "no broker serves .*/broker")

    def time_out(self, b: cuvmm.Broker, why: str) -> None:
        """Expects all calls of a connection to end within their time."""
        calls = self.calls(b, timeout=0.1)
        calls["keep at once"] = lambda: b.keep("kept", 1, timeout=0.1)
        calls["attach at once"] = lambda: b.attach("written", timeout=0.1)
        calls["list"] = lambda: b.list(timeout=0.1)
        calls["remove"] = lambda: b.remove("written", timeout=0.1)
        calls["writer"] = lambda: b.writer("written", LIKE, timeout=0.1)
        for name, call in calls.items():
            with self.subTest(name):
                began = time.monotonic()
                with self.assertRaisesRegex(cuvmm.WaitTimeout, why):
                    call()
                self.assertLess(time.monotonic() - began, 5)

    def test_wrong_arguments_cost_no_connection(self) -> None:
        b = self.connect()
        with b.writer("model", LIKE):
            pass
        ch = b._channel
        wrong: List[Callable[[], Any]] = [
            lambda: b.attach("model", 7), lambda: b.attach("model", version=-1), lambda: b.remove("model", 1 << 64),
            lambda: b.writer("more", {"t": ("uint8", (1 << 70,))}), lambda: b.list(timeout=float("nan")),
        ]
        for call in wrong:
            with self.assertRaises(cuvmm.ArgumentError):
                call()
            self.assertEqual([x.holders for x in b.list(timeout=0)], [0])
        self.assertIs(b._channel, ch)

    def test_interruptions_at_random_leave_nothing(self) -> None:
        """Ctrl-C at any moment of a call or a close: what the program did not get is not held."""
        b, other, r = self.connect(), self.connect(), random.Random(3)
        with b.writer("model", LIKE):
            pass
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        calls: List[Callable[[], Any]] = [  # each result is noted in the step in which the call returns
            lambda: map(b.attach, ["model"]), lambda: map(functools.partial(b.keep, wait=True, timeout=60), ["kept"], [1]), lambda: map(functools.partial(b.writer, ephemeral=True), ["more"], [LIKE])]
        interrupted = 0
        try:
            for i in range(600):
                got: List[Any] = []
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0.0001 + r.random() * 0.003)
                        got.extend(calls[i % 3]())
                        got[0].close()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                for o in got:
                    o.close()
        finally:
            signal.signal(signal.SIGALRM, before)
        self.assertGreater(interrupted, 10)
        b.keep("kept", 1, wait=True, timeout=60).close()
        await_that(lambda: [(x.name, x.holders) for x in other.list()] == [("kept", 0), ("model", 0)], "nobody holds anything")

    def test_timeouts_beside_a_broker_that_stands_still(self) -> None:
        b = self.connect()
        with b.writer("model", LIKE):
            pass
        o, w = b.attach("model"), b.writer("other", LIKE)
        with self.broker_stands_still():
            with self.assertRaisesRegex(cuvmm.WaitTimeout, "does not reply"):
                w.commit(timeout=0.1)
            self.time_out(b, "broker")  # which does not reply to a call, or to a connection
        with w.commit() as done, self.connect().attach("other") as again:
            self.assertEqual(again.about.version, done.about.version)
        o.check()
        o.close()
        self.assertEqual([(x.name, x.holders) for x in b.list()], [("model", 0), ("other", 0)])

    def test_timeouts_of_any_length(self) -> None:
        b = self.connect()
        for timeout in (30 * 86400.0, 1e9, float("inf")):
            self.assertEqual(b.list(timeout), [])
            b.keep("kept", 1, wait=True, timeout=timeout).close()
            b.remove("kept", timeout=timeout)

    def test_what_comes_too_late_is_released(self) -> None:
        """A broker that stands still has a request, and gives what nobody waits for any more."""
        mine = self.connect()
        with mine.writer("model", LIKE):
            pass
        calls: List[Callable[[cuvmm.Broker], Any]] = [
            lambda b: b.attach("model", timeout=0.1), lambda b: b.writer("written", LIKE, alone=True, timeout=0.1), lambda b: b.keep("kept", 1, timeout=0.1)]
        connections, ended = [self.connect() for _ in calls], []  # type: List[cuvmm.Broker], List[BaseException]
        with self.broker_stands_still():
            for t in [self.waiting(functools.partial(call, b), ended) for call, b in zip(calls, connections)]:
                t.join(60)
            self.assertEqual([type(e) for e in ended], [cuvmm.WaitTimeout] * len(calls))

        def free(call: Callable[[], Any]) -> bool:
            with contextlib.suppress(cuvmm.WritingError):  # it may be made, and released, after this asks
                call().close()
                return True
            return False

        await_that(lambda: free(lambda: mine.writer("written", LIKE, alone=True)), "nobody writes it")
        await_that(lambda: free(lambda: mine.keep("kept", 1)), "nobody publishes it")
        await_that(lambda: [(x.name, x.holders) for x in mine.list()] == [("kept", 0), ("model", 0)], "nobody holds anything")

    def test_a_close_right_behind_an_interrupted_call(self) -> None:
        b, other = self.connect(), self.connect()
        with other.writer("model", LIKE):
            pass
        with mock.patch.object(cuvmm.Broker, "_reply", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            b.attach("model")
        b.close()
        self.assertEqual([x.holders for x in other.list()], [0])

    def test_no_reply_is_awaited_to_what_was_not_sent(self) -> None:
        b = self.connect()
        with mock.patch.object(Conn, "send", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            b.attach("model")
        self.assertEqual(b._late, {})
        self.assertEqual(b.list(timeout=60), [])

    def test_what_cannot_be_mapped_is_released(self) -> None:
        b, other = self.connect(), self.connect()
        with b.writer("model", LIKE):
            pass
        with mock.patch.object(Imported, "map", side_effect=cuvmm.OutOfMemory("no room")), self.assertRaises(cuvmm.OutOfMemory):
            b.attach("model")
        await_that(lambda: [x.holders for x in other.list()] == [0], "nobody holds it")

    def test_the_collector_closes_an_object_in_a_call(self) -> None:
        b, other, receive = self.connect(), self.connect(), Conn.receive
        with b.writer("model", LIKE):
            pass

        class Engine:
            """Belongs to a cycle, as what has callbacks does."""

            def __init__(self, model: cuvmm.Object) -> None:
                self.model, self.itself = model, self

            def __del__(self) -> None:
                self.model.close()

        Engine(b.attach("model"))

        def collecting(conn: Conn, *args: Any) -> Any:
            gc.collect()
            return receive(conn, *args)

        with mock.patch.object(Conn, "receive", collecting):
            self.assertEqual([x.name for x in b.list()], ["model"])
        self.assertEqual(b._held, {})
        await_that(lambda: [x.holders for x in other.list()] == [0], "nobody holds it")

    @unittest.skipIf(sys.version_info < (3, 11), "before Python 3.11 an interruption comes at other places, which no trace function finds")
    def test_other_threads_go_on_after_ctrl_c(self) -> None:
        b = self.connect()
        found = Interrupter()
        found.run(b.list)
        places = [p for p in found.places if p[0].co_filename == broker.__file__]
        self.assertGreater(len(places), 10)
        for place in places:
            with self.assertRaises(KeyboardInterrupt):
                Interrupter(place).run(b.list)
            failed: List[BaseException] = []
            self.waiting(functools.partial(b.list, timeout=10), failed, 0).join(20)
            self.assertEqual(failed, [], f"{place[0].co_name}+{place[1]}")

    def test_a_commit_that_fails_gives_up(self) -> None:
        b = self.connect()
        with mock.patch.object(cuvmm.Broker, "_commit", side_effect=cuvmm.LostError("it was removed")), self.assertRaises(cuvmm.LostError):
            with b.writer("model", LIKE):
                pass
        self.assertEqual(b._held, {})
        self.connect().writer("model", LIKE, alone=True).close()

    def test_messages_beside_calls(self) -> None:
        """What arrived within a transfer is read, and what belongs to one that has failed keeps nobody waiting."""
        b, looked = self.connect(), []  # type: cuvmm.Broker, List[Channel]
        with b.writer("model", LIKE):
            pass
        with b.attach("model") as o:
            assert b._channel is not None
            with b._lock:
                b._channel._messages = (Message(*_wire.encode("wanted", {"number": 0, "key": o.key}), []),)
            await_that(lambda: o.wanted, "the message is read")

        def readable(ch: Channel, _: int) -> bool:
            looked.append(ch)
            return True

        with mock.patch.object(broker, "_readable", readable):
            await_that(lambda: bool(looked), "the connection is looked at")
            self.assertEqual([x.name for x in b.list(timeout=10)], ["model"])

    def test_closing_beside_a_broker_that_stands_still(self) -> None:
        b = self.connect()
        self.assertEqual(b.list(), [])
        with self.broker_stands_still():
            ended: List[BaseException] = []
            t = self.waiting(b.list, ended)
            await_that(lambda: b._asking, "the call waits")
            with self.assertRaisesRegex(cuvmm.WaitTimeout, "another call waits for the broker"):
                b.list(timeout=0.1)
            b.close()
            t.join(5)
            self.assertEqual([type(e) for e in ended], [cuvmm.ClosedError])

    @contextlib.contextmanager
    def broker_stands_still(self) -> Iterator[None]:
        pid = self.broker_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # which its threads notice one after the other
        try:
            await_that(lambda: all(map(_stopped, Path(f"/proc/{pid}/task").iterdir())), "the broker stands still")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def waiting(self, call: Callable[[], Any], ended: List[BaseException], moment: float = 0.1) -> threading.Thread:
        """Makes a call that waits in a thread, which notes its error."""
        def wait() -> None:
            try:
                call()
            except BaseException as e:
                ended.append(e)

        t = threading.Thread(target=wait, daemon=True)
        t.start()
        time.sleep(moment)
        return t

    def test_closing_ends_calls_that_wait(self) -> None:
        mine = self.connect()
        with mine.writer("written", LIKE), mine.keep("kept", 1):
            for name in self.calls(mine):
                with self.subTest(name):
                    ended: List[BaseException] = []
                    b = self.connect()
                    t = self.waiting(self.calls(b)[name], ended)
                    self.assertEqual(ended, [])
                    b.close()
                    t.join(5)
                    self.assertEqual([type(e) for e in ended], [cuvmm.ClosedError])
                    with self.assertRaises(cuvmm.ClosedError):
                        b.list()

    def test_closing_without_a_broker(self) -> None:
        b = self.connect()
        self.end()
        calls = self.calls(b)
        calls["list"] = lambda: b.list()
        for name, call in calls.items():
            ended: List[BaseException] = []
            t = self.waiting(call, ended)
            self.assertEqual(ended, [], name)
            if name == "list":
                b.close()
                t.join(5)
                self.assertEqual([type(e) for e in ended], [cuvmm.ClosedError])

    def test_a_wait_that_times_out_says_for_what(self) -> None:
        mine, b = self.connect(), self.connect()
        with mine.writer("written", LIKE), mine.keep("kept", 1):
            for name, call in self.calls(b, timeout=0.05).items():
                with self.subTest(name), self.assertRaisesRegex(cuvmm.WaitTimeout, '"kept"' if name == "keep" else '"written"'):
                    call()

    def test_what_is_on_its_way_is_given_back(self) -> None:
        b, other = self.connect(), self.connect()
        with b.writer("model", LIKE):
            pass
        receive = Channel.receive_into

        def closing(ch: Channel, *args: Any, **kw: Any) -> None:
            receive(ch, *args, **kw)
            b._closed = True  # as by another thread's close

        with mock.patch.object(Channel, "receive_into", closing), self.assertRaises(cuvmm.ClosedError):
            b.attach("model")
        b.close()
        await_that(lambda: [x.holders for x in other.list()] == [0], "nobody holds it")

    def test_an_ephemeral_object_waits_for_its_holder(self) -> None:
        b = self.connect()
        w = b.writer("cache", LIKE, ephemeral=True)
        o = w.commit()
        for _ in range(2):
            pid = self.broker_pid()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await_that(lambda: self.broker_pid() not in (None, pid), "another broker")
            time.sleep(0.5)  # beyond the time to return
            self.assertEqual([x.holders for x in b.list()], [1])
            o.check()
        o.close()
        self.assertEqual(b.list(), [])

    def test_memory_is_asked_for(self) -> None:
        b = self.connect()
        with b.writer("cache", LIKE, ephemeral=True).commit() as mine, self.connect().attach("cache") as o:
            self.assertFalse(o.wanted)
            with self.assertRaises(cuvmm.TooLargeError):
                self.connect().writer("big", {"t": ("uint8", (63 << 20,))})
            await_that(lambda: o.wanted and mine.wanted, "the holders are asked")
            self.assertEqual([x.name for x in b.list()], ["cache"])

    def objects(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs cuvmm objects, the verbs of Go."""
        return subprocess.run([os.environ["CUVMM_TEST_COMMAND"], "objects", "-socket", self.socket, *arguments], env=environment(), capture_output=True, text=True, timeout=60)

    def test_digests(self) -> None:
        """Each language finds what was written after a commit in the other, in tensors that share bytes and in those over several pieces."""
        b, long = self.connect(), 5 * (PIECE // 2) + 3
        like = {"long": Given(1 << 20, (long,)), "its end": Given((1 << 20) + long - 10, (10,)), "none": ("uint8", (0,)), "w": ("float32", (3,))}
        with b.writer("model", like, digests=True) as w:
            put(w["long"], bytes(n * n >> 8 & 255 for n in range(256)) * (long // 256) + bytes(long % 256))
            put(w["w"], bytes(range(12)))
        for check in (self.connect().attach("model"), b.attach("model")):
            with check:
                check.verify()
        self.assertEqual(self.objects("verify", "model").returncode, 0)
        images = self.path("images")
        os.mkdir(images)
        self.assertEqual(self.objects("save", images, "model").returncode, 0)
        b.remove("model")
        self.assertEqual(self.objects("load", images).returncode, 0)
        with b.attach("model") as o:
            o.verify()
            self.assertEqual(o["w"].tobytes(), bytes(range(12)))
            writable = b._take("attach", 0, {"name": "model", "version": 0}, write=True)
            put(writable["its end"], b"0123456789")  # what a reader is trusted not to do
            for _ in range(2):
                with self.assertRaisesRegex(cuvmm.DigestError, '"model", tensor "long": crc32c:[0-9a-f]{8}, where the manifest has crc32c:[0-9a-f]{8} .write the object anew'):
                    o.verify()
            said = self.objects("verify", "model")
            self.assertNotEqual(said.returncode, 0)
            self.assertIn("long", said.stderr)
            writable.close()

    def test_objects_without_digests(self) -> None:
        b = self.connect()
        with b.writer("model", LIKE):
            pass
        with b.attach("model") as o, self.assertRaisesRegex(cuvmm.NotSupported, "tensor .* has no digest .write it with digests=True"):
            o.verify()
        with b.writer("empty", {}, digests=True):
            pass
        with b.attach("empty") as o, self.assertRaisesRegex(cuvmm.NotSupported, "no tensors"):
            o.verify()
        with b.ensure("made", LIKE, lambda w: None, digests=True) as o:
            o.verify()
