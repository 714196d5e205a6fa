"""The golden vectors: every message, packet and descriptor, with its layout, its fields and its bytes."""

from __future__ import annotations

import resource
import socket
import unittest
from typing import Any, List, Tuple

from cuvmm import _conn, _descriptor, _manifest, _packet, _wire
from cuvmm._replica import View
from cuvmm.errors import Error, FormatError, MismatchError, TooLargeError

from .support import vectors


def plain(layout: Any) -> Any:
    return [[name, kind if isinstance(kind, str) else plain(kind)] for name, kind in layout]


def to_fields(layout: Any, fields: Any) -> Any:
    """The file's values as the codec has them: bytes are hexadecimal there."""
    out = {}
    for name, kind in layout:
        v = fields[name]
        if not isinstance(kind, str):
            v = [to_fields(kind, e) for e in v]
        elif kind in ("16 bytes", "32 bytes", "bytes", "blob"):
            v = bytes.fromhex(v)
        out[name] = v
    return out


class Vectors(unittest.TestCase):
    def test_every_message(self) -> None:
        seen = set()
        for m in vectors("protocol.json")["messages"] + vectors("protocol.json")["objects"]:
            with self.subTest(m["message"]):
                shape = _wire.SHAPES[m["kind"]]
                self.assertEqual((shape.name, shape.to), (m["message"], m["to"]))
                self.assertEqual(plain(shape.layout), m["layout"])
                fields = to_fields(shape.layout, m["fields"])
                body = bytes.fromhex(m["body"])
                self.assertEqual(_wire.encode(shape.name, fields), (m["kind"], body))
                name, back = _wire.decode(m["kind"], body, m["to"] if m["to"] != "either" else "sender")
                self.assertEqual((name, back), (shape.name, fields))
                seen.add(shape.kind)
                for n in range(len(body)):  # no shorter form, unless text fills the rest
                    if shape.layout and shape.layout[-1][1] not in ("rest", "bytes"):
                        with self.assertRaises(Error):
                            _wire.decode(m["kind"], body[:n], m["to"])
                        with self.assertRaises(Error):
                            _wire.decode(m["kind"], body + b"\0", m["to"])
        self.assertEqual(seen, set(_wire.SHAPES), "a message without a vector")

    def test_every_packet(self) -> None:
        for p in vectors("protocol.json")["packets"]:
            with self.subTest(p["packet"]):
                self.assertEqual(plain(_wire.PACKET), p["layout"])
                f = to_fields(_wire.PACKET, p["fields"])
                made = _packet.packet(f["version"], f["kind"], f["nonce"], f["sequence"], f["body"], f["files"], f["bytes in all"], f["files in all"])
                self.assertEqual(made.hex(), p["packed"])
        self.assertEqual(_packet.greeting(bytes.fromhex("04050600000000000000000000000000")).hex(), vectors("protocol.json")["packets"][0]["packed"])

    def test_manifests(self) -> None:
        for v in vectors("manifests.json"):
            with self.subTest(v["name"]):
                if v["identity"]:
                    m = _manifest.parse(v["text"].encode())
                    self.assertEqual(m.identity().hex(), v["identity"])
                    self.assertEqual(_manifest.parse(m.text()).identity(), m.identity())
                else:
                    with self.assertRaises(FormatError):
                        _manifest.parse(v["text"].encode())

    def test_manifests_are_compared(self) -> None:
        def of(nbytes: int = 4096, **changed: Any) -> _manifest.Manifest:
            return _manifest.Manifest(nbytes, [_manifest.Placed("embed", 15, (16, 32), 0)._replace(**changed)])

        of().match(of(digest="x", strides=(32, 1)))
        for other, says in ((of(8192), "bytes 8192 instead of 4096"), (of(name="x"), 'no tensor "embed"; a tensor "x" that is not expected'),
                            (of(number=16, offset=2), 'tensor "embed" has element float16 instead of bfloat16, offset 2 instead of 0'),
                            (of(shape=(32, 16)), "shape [32, 16] instead of [16, 32]"), (of(strides=(1, 16)), "strides [1, 16] instead of [32, 1]"),
                            (of(kind="buffer"), 'kind "buffer" instead of ""'), (of(alias=1), "alias group 1 instead of 0")):
            with self.assertRaises(MismatchError) as raised:
                other.match(of())
            self.assertIn(says, str(raised.exception))

    def test_the_descriptor(self) -> None:
        v = vectors("protocol.json")["descriptor"]
        d = _descriptor.decode(bytes.fromhex(v["packed"]))
        f = v["fields"]
        self.assertEqual((d.kind, d.element, d.element_size, d.length, d.location_type, d.location_id, d.generation, d.exporter.pid, d.chunks),
                         (f["kind"], f["element"], f["element size"], f["length"], f["location type"], f["location id"], f["generation"], f["exporter pid"],
                          [c["size"] for c in f["chunks"]]))
        self.assertEqual(d.encode().hex(), v["packed"])
        for n in range(len(d.encode())):
            with self.assertRaises(Error):
                _descriptor.decode(d.encode()[:n])


def mutated(body: bytes, n: int) -> bytes:
    """The n-th change of a body, in the way that handles/publish/mutations_test.go makes it."""
    x, out = n * 0x9E3779B97F4A7C15 + 1 & _U64, bytearray(body)

    def draw(below: int) -> int:
        nonlocal x
        x = (x ^ x << 13) & _U64
        x ^= x >> 7
        x = (x ^ x << 17) & _U64
        return x % below

    for _ in range(1 + draw(3)):
        how = draw(5)
        if how == 3:
            at = draw(len(out) + 1)
            out.insert(at, draw(256))
        elif out and how == 4:
            del out[draw(len(out))]
        elif out:
            value = draw(256)
            out[draw(len(out))] = (0, 255, value)[how]
    return bytes(out)


_U64 = (1 << 64) - 1


class Mutations(unittest.TestCase):
    def test_both_languages_take_the_same_bytes(self) -> None:
        """Of each example, changed in many ways, this package takes what Go's takes."""
        publishing = [v for v in vectors("protocol.json")["messages"] if v["kind"] <= 0xFF00]
        for v, m in zip(publishing, vectors("mutations.json")):
            self.assertEqual(v["message"], m["message"])
            for n, taken in enumerate(m["taken"]):
                body = mutated(bytes.fromhex(v["body"]), n)
                try:
                    name, fields = _wire.read(_packet.Message(v["kind"], body, list(range(v["files"]))), v["to"])
                    if name == "view":
                        View.of(fields)
                    elif name == "accepted":
                        _descriptor.decode(fields["descriptor"])
                    now = "1"
                except Error:
                    now = "0"
                self.assertEqual(now, taken, f"{m['message']}, change {n}: {body.hex()}")


class Packets(unittest.TestCase):
    """What an inbound side takes and refuses."""

    def setUp(self) -> None:
        self.nonce, self.peer = b"n" * 16, b"p" * 16
        self.inbound = _packet.Inbound(self.nonce)
        self.assertIsNone(self.inbound.take(_packet.greeting(self.peer), [], False))

    def packet(self, kind: int = 5, sequence: int = 1, body: bytes = b"ab", all_bytes: int = 2, files: int = 0, all_files: int = 0, version: int = 2, to: bytes = b"n" * 16) -> bytes:
        return _packet.packet(version, kind, to, sequence, body, files, all_bytes, all_files)

    def test_a_message_in_parts(self) -> None:
        self.assertIsNone(self.inbound.take(self.packet(body=b"ab", all_bytes=3, files=1, all_files=2), [70], False))
        m = self.inbound.take(self.packet(sequence=2, body=b"c", all_bytes=3, files=1, all_files=2), [71], False)
        self.assertEqual(m, _packet.Message(5, b"abc", [70, 71]))

    def test_what_is_refused(self) -> None:
        cases: List[Tuple[str, bytes, List[int]]] = [
            ("a short packet", b"cuvP", []),
            ("another magic", b"x" * 48, []),
            ("another version", self.packet(version=1), []),
            ("another nonce", self.packet(to=b"x" * 16), []),
            ("a gap", self.packet(sequence=2), []),
            ("kind 0", self.packet(kind=0), []),
            ("a kind beyond the last", self.packet(kind=0xFF0B), []),
            ("more bytes than declared", self.packet(body=b"abc", all_bytes=2), []),
            ("a file too many", self.packet(), [70]),
            ("a file too few", self.packet(files=1, all_files=1), []),
            ("a message too long", self.packet(all_bytes=_packet.MAX_BODY + 1), []),
            ("an empty part", self.packet(body=b"", all_bytes=2), []),
        ]
        for what, p, files in cases:
            with self.subTest(what):
                self.setUp()
                with self.assertRaises(Error):
                    self.inbound.take(p, files, False)

    def test_files_of_a_message(self) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        for soft, most in [(200, 64), (400, 100)]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            c = _conn.Conn(near, None)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            far.send(_packet.greeting(self.peer))
            nonce = far.recv(1 << 16)[48:64]
            with self.subTest(soft=soft):
                far.send(self.packet(to=nonce, all_bytes=2, files=0, all_files=most + 1))
                with self.assertRaises(TooLargeError):
                    c.receive(30)
            c.close()
            far.close()

    def test_a_greeting_must_come_first(self) -> None:
        with self.assertRaises(Error):
            _packet.Inbound(self.nonce).take(self.packet(sequence=0), [], False)

    def test_versions(self) -> None:
        for least, most, ok in [(2, 2, True), (1, 9, True), (3, 9, False), (1, 1, False), (0, 0, False)]:
            body = self.peer + bytes([least, 0, most, 0])
            p = _packet.packet(1, 0, bytes(16), 0, body, 0, len(body), 0)
            with self.subTest(least=least, most=most):
                inbound = _packet.Inbound(self.nonce)
                if ok:
                    self.assertIsNone(inbound.take(p, [], False))
                else:
                    with self.assertRaises(Error):
                        inbound.take(p, [], False)


if __name__ == "__main__":
    unittest.main()
