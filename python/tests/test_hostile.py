"""The hostile messages that every implementation refuses, and processes that break the protocol on a live connection."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import unittest
from typing import Any, Callable, Dict, List, Tuple
from unittest import mock

import cuvmm
from cuvmm import _conn, _description, _descriptor, _driver, _memory, _packet, _page, _wire
from cuvmm._replica import View
from cuvmm.errors import Error, ProtocolError, RefusedError
from cuvmm._undo import File, Undo

from .support import DriverTest, vectors


def messages(to: str) -> List[Tuple[str, int, bytes, int]]:
    """The messages of the table to one side that a connection carries: name, kind, body, number of file descriptors."""
    return [(m["name"], m["kind"], bytes.fromhex(m["body"]), m["files"]) for m in vectors("hostile.json")["messages"] if m["to"] == to and 0 < m["kind"] <= 0xFF0A]


def take(kind: int, body: bytes, files: int, to: str) -> None:
    """Reads a message as this package does."""
    name, fields = _wire.read(_packet.Message(kind, body, list(range(files))), to)
    if name in ("accepted", "offer"):
        _descriptor.decode(fields["descriptor"])
    if name == "view":
        View.of(fields)


class Table(unittest.TestCase):
    def test_every_message_is_refused(self) -> None:
        for m in vectors("hostile.json")["messages"]:
            with self.subTest(m["name"]), self.assertRaises(Error):
                take(m["kind"], bytes.fromhex(m["body"]), m["files"], m["to"])

    def test_every_vector_is_taken(self) -> None:
        for m in vectors("protocol.json")["messages"]:
            with self.subTest(m["message"]):
                take(m["kind"], bytes.fromhex(m["body"]), m["files"], m["to"] if m["to"] != "either" else "sender")


def send_raw(c: _conn.Conn, kind: int, body: bytes, files: int) -> None:
    """Sends a message with descriptors that are nothing."""
    with open(os.devnull, "rb") as f:
        c.send(kind, body, [f.fileno()] * files)


class _Hostile:
    """A server that greets, and then runs a function of the test."""

    def __init__(self, path: str, then: Callable[[_conn.Conn, "_Hostile"], None]) -> None:
        self._listener = _conn.Listener(path)
        self._then = then
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        c = self._listener.accept()
        with contextlib.suppress(Error):
            self._then(c, self)
        with contextlib.suppress(Error):
            while True:
                _conn.close_all(c.receive(10).files)
        c.close()

    def close(self) -> None:
        self._thread.join(60)
        self._listener.close()

    @staticmethod
    def accept(c: _conn.Conn, *more: int, **other: Any) -> Dict[str, Any]:
        """Reads a follow, and accepts it with a page."""
        m = c.receive(10)
        name, fields = _wire.decode(m.kind, m.body, "server")
        assert name == "follow", name
        about = _descriptor.Descriptor(_descriptor.ARRAY, 6, 1, 0, 1, 0, _driver.device(0).uuid, False, False, 1, 0, _descriptor.this_process(), [])
        undo = Undo()
        _, file = _page.make_page(None, undo)
        reply = {"number": fields["number"], "token": b"t" * 16, "publication": b"p" * 16, "reserved": 4 << 20, "slot": 0, "descriptor": about.encode(),
                 "tag": "", "form": 0, "description": bytes(32), "heir": False, "kept": False}
        reply.update(other)
        c.send(*_wire.encode("accepted", reply), [file.number, *more])
        undo.close()
        return reply


VIEW: Dict[str, Any] = {"token": b"t" * 16, "serial": 1, "generation": 1, "state": 1, "ordered": 0, "length": 0, "keep": 0, "last": True, "over": False, "status": 0,
                        "reason": "", "chunks": []}


class Servers(DriverTest):
    def setUp(self) -> None:
        super().setUp()
        patient = mock.patch.object(_conn, "_REFUSAL_WAIT", 60)  # or a refusal is left out while the thread that sent a request has not run again
        patient.start()
        self.addCleanup(patient.stop)
        cuvmm.empty(1).close()  # what the driver opens once

    def refused(self, then: Callable[[_conn.Conn, _Hostile], None]) -> None:
        """The client's connection ends with an error, and so does its follower; nothing hangs, and nothing is left open."""
        before = len(os.listdir("/proc/self/fd"))
        path = self.path(str(id(then)))
        hostile = _Hostile(path, then)
        try:
            with cuvmm.connect(path) as client:
                with self.assertRaises(Error):
                    with client.follow("x", timeout=30) as f:
                        f.next(timeout=30)
        finally:
            hostile.close()
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)

    def test_views_that_no_publisher_sends(self) -> None:
        wrong: Dict[str, Dict[str, Any]] = {
            "another serial": {"serial": 2},
            "generation 0": {"generation": 0},
            "a chunk that is not kept": {"keep": 1},
            "elements without memory": {"length": 1},
            "an unknown token": {"token": b"u" * 16},
            "ended with a serial": {"state": 5, "status": 3},
            "suspended with elements": {"state": 3, "length": 1},
        }
        for what, other in wrong.items():
            with self.subTest(what):
                def then(c: _conn.Conn, h: _Hostile, other: Dict[str, Any] = other) -> None:
                    h.accept(c)
                    c.send(*_wire.encode("view", {**VIEW, **other}))

                self.refused(then)

    def test_a_client_that_warns(self) -> None:
        with cuvmm.Server(self.path()):
            c = _conn.dial(self.path())
            c.send(*_wire.encode("soon", {}))
            c.send(*_wire.encode("list", {"number": 5}))
            self.assertEqual(_wire.read(c.receive(30), "client"), ("listing", {"number": 5, "entries": []}))
            c.close()

    def test_messages_that_no_server_sends(self) -> None:
        for name, kind, body, files in messages("client"):
            with self.subTest(name):
                heard: List[str] = []

                def then(c: _conn.Conn, h: _Hostile, kind: int = kind, body: bytes = body, files: int = files, heard: List[str] = heard) -> None:
                    c.receive(10)  # follow
                    send_raw(c, kind, body, files)
                    try:
                        c.receive(30)
                    except RefusedError as e:
                        heard.append(str(e))

                self.refused(then)
                self.assertEqual(len(heard), 1, "the server is told why")

    def test_transfers_that_no_sender_makes(self) -> None:
        for name, kind, body, files in messages("receiver"):
            with self.subTest(name):
                path = self.path(name.replace(" ", ""))
                heard: List[Any] = []

                def then(c: _conn.Conn, h: _Hostile, kind: int = kind, body: bytes = body, files: int = files, heard: List[Any] = heard) -> None:
                    send_raw(c, kind, body, files)
                    try:
                        heard.append(_wire.read(c.receive(30), "sender")[0])
                    except RefusedError as e:
                        heard.append(str(e))

                before = len(os.listdir("/proc/self/fd"))
                hostile = _Hostile(path, then)
                with cuvmm.dial(path) as channel:
                    with self.assertRaises(Error):
                        channel.receive(timeout=30)
                hostile.close()
                self.assertEqual(len(heard), 1, "the sender is told why")
                self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)

    def test_chunks_that_do_not_come_as_offered(self) -> None:
        size, dev, undo = 2 << 20, _driver.device(0), Undo()
        self.addCleanup(undo.close)
        files = [_memory.create(dev, size, undo).export(undo) for _ in range(2)]
        for n, case in enumerate(vectors("hostile.json")["transfers"]):
            with self.subTest(case["name"]):
                heard: List[str] = []

                def then(c: _conn.Conn, _: _Hostile, case: Any = case, heard: List[str] = heard) -> None:
                    offered = _descriptor.Descriptor(_descriptor.BUFFER, 0, 0, 1, 1, 0, dev.uuid, False, False, 1, 0, _descriptor.this_process(), [size] * case["chunks"])
                    c.send(*_wire.encode("offer", {"transfer": 1, "descriptor": offered.encode()}))
                    for part in case["parts"]:  # each is due when the one before was acknowledged
                        said = part["message"]
                        c.send(*_wire.encode(said, {"transfer": 1, "first": part["first"], "handles": bytes(64 * part["count"])}), files[:part["count"]] if said == "chunks" else [])
                        try:
                            heard.append(_wire.read(c.receive(30), "sender")[0])
                        except RefusedError:
                            heard.append("refused")
                            return
                    c.send(*_wire.encode("withdrawn", {"transfer": 2, "reason": "the connection goes on"}))

                path = self.path(str(n))
                before = len(os.listdir("/proc/self/fd"))
                hostile = _Hostile(path, then)
                with cuvmm.dial(path, timeout=30) as channel:
                    ends = case["ends"] == "connection"
                    with self.assertRaises(ProtocolError if ends else cuvmm.MismatchError):
                        channel.receive(timeout=30)
                    with self.assertRaisesRegex(*((ProtocolError, "due") if ends else (RefusedError, "goes on"))):
                        channel.receive(timeout=30)
                hostile.close()
                acknowledged = ["mapped" if case["chunks"] == 1 else "taken"] * (len(case["parts"]) - 1)
                self.assertEqual(heard, [*acknowledged, "refused" if ends else "declined"])
                self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)

    def test_a_second_offer_before_the_end_of_the_first(self) -> None:
        (offer,) = (bytes.fromhex(m["body"]) for m in vectors("protocol.json")["messages"] if m["message"] == "offer")

        def then(c: _conn.Conn, _: _Hostile) -> None:
            c.send(0xFF01, offer)
            c.send(0xFF01, b"\2" + offer[1:])

        hostile = _Hostile(self.path(), then)
        with cuvmm.dial(self.path()) as channel:
            with self.assertRaises(ProtocolError):
                channel.message(timeout=30)
        hostile.close()

    def test_withdrawals_before_an_offer(self) -> None:
        (withdrawn,) = (bytes.fromhex(m["body"]) for m in vectors("protocol.json")["messages"] if m["message"] == "withdrawn")
        (offer,) = (bytes.fromhex(m["body"]) for m in vectors("protocol.json")["messages"] if m["message"] == "offer")

        def then(c: _conn.Conn, _: _Hostile) -> None:
            c.send(0xFF03, withdrawn)
            c.send(7, b"sent")
            for n in range(2, 1000, 2):  # a flood: the last one is kept
                c.send(0xFF01, n.to_bytes(4, "little") + offer[4:])
                c.send(0xFF03, n.to_bytes(4, "little") + b"withdrawn")
                c.send(0xFF03, (n + 1).to_bytes(4, "little") + f"reason {n + 1}".encode())
            c.send(0xFF01, (1002).to_bytes(4, "little") + offer[4:])
            c.send(7, b"flooded")

        hostile = _Hostile(self.path(), then)
        with cuvmm.dial(self.path()) as channel:
            with self.assertRaisesRegex(RefusedError, "changed my mind"):
                channel.receive(timeout=30)
            self.assertEqual(channel.message(timeout=30).body, b"sent")
            with self.assertRaises(ProtocolError):  # 1001 has not come
                channel.message(timeout=30)
            with self.assertRaisesRegex(RefusedError, "reason 999"):
                channel.receive(timeout=30)
        hostile.close()

    def test_withdrawals_that_no_sender_makes(self) -> None:
        (offer,) = (bytes.fromhex(m["body"]) for m in vectors("protocol.json")["messages"] if m["message"] == "offer")
        second = (0xFF03, (2).to_bytes(4, "little") + b"no")
        wrong: Dict[str, List[Tuple[int, bytes]]] = {"a gap": [second], "behind an offer": [(0xFF01, offer), second]}
        for what, sent in wrong.items():
            with self.subTest(what):
                def then(c: _conn.Conn, _: _Hostile, sent: List[Tuple[int, bytes]] = sent) -> None:
                    for kind, body in sent:
                        c.send(kind, body)

                path = self.path(str(len(sent)))
                hostile = _Hostile(path, then)
                with cuvmm.dial(path) as channel:
                    with self.assertRaises(ProtocolError):
                        channel.message(timeout=30)
                hostile.close()

    def test_a_program_that_talks_while_memory_is_awaited(self) -> None:
        def then(c: _conn.Conn, _: _Hostile) -> None:
            with open(os.devnull, "rb") as f:
                for _i in range(100):
                    c.send(7, b"x", [f.fileno()])

        before = len(os.listdir("/proc/self/fd"))
        hostile = _Hostile(self.path(), then)
        with cuvmm.dial(self.path()) as channel:
            with self.assertRaises(cuvmm.TooLargeError):
                channel.receive(timeout=30)
            for _ in range(10):
                _conn.close_all(channel.message(timeout=30).files)
        hostile.close()
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)

    def test_files_that_are_no_memory(self) -> None:
        def then(c: _conn.Conn, h: _Hostile) -> None:
            h.accept(c)
            with open(os.devnull, "rb") as f:
                c.send(*_wire.encode("view", {**VIEW, "length": 1, "chunks": [{"identity": 1, "size": 2 << 20}]}), [f.fileno()])
            c.receive(10)  # done, with a reason: an error of the follower alone
            c.send(*_wire.encode("view", {**VIEW, "serial": 1}))  # and now a violation

        self.refused(then)

    def test_accepted_that_no_server_sends(self) -> None:
        for what, other in {"a slot beyond the page": {"slot": 64}, "a slot far beyond it": {"slot": 1 << 31}, "a range of no granule": {"reserved": 4097}, "no range": {"reserved": 0},
                            "another request": {"number": 99}}.items():
            with self.subTest(what):
                def then(c: _conn.Conn, h: _Hostile, other: Dict[str, Any] = other) -> None:
                    h.accept(c, **other)

                self.refused(then)

    def test_descriptions_that_are_none(self) -> None:
        def unsealed(_: bytes) -> int:
            return os.memfd_create("not sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

        def sealed(text: bytes) -> int:
            file = _description.text_file(text, File())
            return os.dup(file.number)

        endless = bytes(_description.MAX_TEXT + 1)
        for what, make, form, text, digest in (("another digest", sealed, 1, b"x", bytes(32)), ("a file that may change", unsealed, 1, b"", hashlib.sha256(b"").digest()),
                                               ("a manifest that is none", sealed, 2, b"{}", hashlib.sha256(b"{}").digest()), ("an endless text", sealed, 1, endless, bytes(32))):
            with self.subTest(what):
                def then(c: _conn.Conn, h: _Hostile, make: Any = make, form: int = form, text: bytes = text, digest: bytes = digest) -> None:
                    fd = make(text)
                    h.accept(c, fd, form=form, description=digest)
                    os.close(fd)

                self.refused(then)

    def test_a_page_that_is_none(self) -> None:
        def then(c: _conn.Conn, h: _Hostile) -> None:
            m = c.receive(10)
            fields = _wire.decode(m.kind, m.body, "server")[1]
            about = _descriptor.Descriptor(_descriptor.ARRAY, 6, 1, 0, 1, 0, _driver.device(0).uuid, False, False, 1, 0, _descriptor.this_process(), [])
            fd = os.memfd_create("not sealed")
            os.ftruncate(fd, 4096)
            c.send(*_wire.encode("accepted", {"number": fields["number"], "token": b"t" * 16, "publication": b"p" * 16, "reserved": 4 << 20, "slot": 0,
                                              "descriptor": about.encode(), "tag": "", "form": 0, "description": bytes(32), "heir": False, "kept": False}), [fd])
            os.close(fd)

        self.refused(then)

    def test_another_program_on_the_socket(self) -> None:
        for what in (b"", b"GET / HTTP/1.1\r\n\r\n", _packet.packet(1, 5, bytes(16), 0, b"", 0, 0, 0)):
            with self.subTest(what):
                s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.addCleanup(s.close)
                path = self.path(str(len(what)))
                s.bind(path)
                s.listen()
                reply: List[socket.socket] = []

                def run(what: bytes = what, s: socket.socket = s, reply: List[socket.socket] = reply) -> None:
                    reply.append(s.accept()[0])
                    if what:
                        reply[0].send(what)

                t = threading.Thread(target=run)
                t.start()
                with self.assertRaises(Error):
                    cuvmm.connect(path, timeout=60 if what else 0.1)
                t.join()
                reply[0].close()

    def test_clients_that_break_the_protocol(self) -> None:
        with cuvmm.empty(100, "uint8") as memory, cuvmm.Server(self.path()) as server:
            server.publish("x", memory).announce()
            for name, kind, body, files in messages("server"):
                with self.subTest(name):
                    c = _conn.dial(self.path())
                    send_raw(c, kind, body, files)
                    with self.assertRaises(RefusedError):
                        c.receive(30)
                    c.close()
            with cuvmm.connect(self.path()) as client, client.follow("x") as follower:  # and the others are served
                follower.next(timeout=60)


if __name__ == "__main__":
    unittest.main()
