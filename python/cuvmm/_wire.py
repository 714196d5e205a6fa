"""The messages of the protocol: their layouts, and their codec.

The layouts are those of docs/protocol.md, and the tests compare them, and the bytes, with the golden vectors. All
integers are little-endian, and each message has exactly one form.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Tuple, Union

from .errors import ProtocolError

if TYPE_CHECKING:
    from ._packet import Message

Layout = Tuple[Tuple[str, Union[str, "Layout"]], ...]
Fields = Dict[str, Any]


class Shape(NamedTuple):
    """The shape of a message: its name, its kind on the wire, its receiver, and its fields in order."""

    name: str
    kind: int
    to: str
    layout: Layout


_REASON = 512
_NAME = 255
_LIMITS = {"name": _NAME, "reason": _REASON, "warning": _REASON, "tag": 128}
MAX_CHUNKS = 1 << 16
MAX_BATCH = 64
MAX_PUBLICATIONS = 2048
MAX_OBJECTS = 512
_MAX_PROCESSES = 16
_COUNTS = {("objects", "entries"): MAX_OBJECTS, ("objects", "processes"): _MAX_PROCESSES, ("object", "processes"): _MAX_PROCESSES,
           ("listing", "entries"): MAX_PUBLICATIONS, ("view", "chunks"): MAX_BATCH, ("follow", "chunks"): MAX_CHUNKS}
DESCRIPTOR_HEADER = 76
FABRIC_HANDLE = 64


def _shapes(*rows: Tuple[str, int, str, Layout]) -> Dict[int, Shape]:
    return {kind: Shape(name, kind, to, layout) for name, kind, to, layout in rows}


_OBJECT: Layout = (("name", "text"), ("version", "u64"), ("device", "16 bytes"), ("bytes", "u64"), ("holders", "u32"),
                   ("processes", (("pid", "u32"), ("uid", "u32"), ("gid", "u32"))), ("ephemeral", "bool"), ("publication", "bool"), ("pid", "u32"), ("uid", "u32"), ("since", "u64"))

SHAPES: Dict[int, Shape] = _shapes(
    ("join", 0xB101, "broker", (("client", "16 bytes"),)),
    ("create", 0xB102, "broker",
     (("number", "u32"), ("key", "16 bytes"), ("name", "text"), ("device", "16 bytes"), ("bytes", "u64"), ("ephemeral", "bool"), ("alone", "bool"))),
    ("commit", 0xB103, "broker", (("number", "u32"), ("key", "16 bytes"))),
    ("attach", 0xB104, "broker", (("number", "u32"), ("name", "text"), ("version", "u64"))),
    ("hold", 0xB105, "broker", (("number", "u32"), ("key", "16 bytes"))),
    ("release", 0xB106, "broker", (("number", "u32"), ("key", "16 bytes"))),
    ("remove", 0xB107, "broker", (("number", "u32"), ("name", "text"), ("version", "u64"))),
    ("list objects", 0xB108, "broker", (("number", "u32"),)),
    ("await", 0xB109, "broker", (("number", "u32"), ("name", "text"))),
    ("cancel", 0xB10A, "broker", (("number", "u32"),)),
    ("ask", 0xB10B, "broker", (("number", "u32"),)),
    ("keep", 0xB10C, "broker", (("number", "u32"), ("key", "16 bytes"), ("name", "text"), ("device", "16 bytes"), ("bytes", "u64"))),
    ("object done", 0xB181, "holder", (("number", "u32"), ("version", "u64"))),
    ("object denied", 0xB182, "holder", (("number", "u32"), ("cause", "u8"), ("reason", "text"))),
    ("object", 0xB183, "holder", (("number", "u32"), ("key", "16 bytes"), *_OBJECT)),
    ("objects", 0xB184, "holder", (("number", "u32"), ("last", "bool"), ("entries", _OBJECT))),
    ("wanted", 0xB185, "holder", (("number", "u32"), ("key", "16 bytes"))),
    ("status", 0xB186, "holder",
     (("number", "u32"), ("ready", "bool"), ("since", "u64"), ("clients", "u64"), ("objects", "u64"), ("publications", "u64"), ("writing", "u64"), ("bytes", "u64"),
      ("limit", "u64"), ("commits", "u64"), ("attaches", "u64"), ("refusals", "u64"), ("warning", "text"))),
    ("list", 0xF101, "server", (("number", "u32"),)),
    ("follow", 0xF102, "server", 
     (("number", "u32"), ("access", "u8"), ("room", "u64"), ("publication", "16 bytes"), ("generation", "u64"), ("length", "u64"),
      ("chunks", (("identity", "u64"),)), ("name", "text"))),
    ("done", 0xF103, "server",
     (("token", "16 bytes"), ("serial", "u64"), ("status", "u8"), ("chunks", "u32"), ("reason", "text"))),
    ("leave", 0xF104, "server", (("token", "16 bytes"),)),
    ("listing", 0xF181, "client",
     (("number", "u32"),
      ("entries", (("name", "text"), ("kind", "u8"), ("access", "u8"), ("element", "u8"), ("element size", "u32"),
                   ("length", "u64"), ("bytes", "u64"), ("generation", "u64"), ("publication", "16 bytes"), ("tag", "text"), ("description", "32 bytes"))))),
    ("accepted", 0xF182, "client",
     (("number", "u32"), ("token", "16 bytes"), ("publication", "16 bytes"), ("reserved", "u64"), ("slot", "u32"), ("descriptor", "blob"), ("tag", "text"), ("form", "u8"),
      ("description", "32 bytes"), ("heir", "bool"), ("kept", "bool"))),
    ("denied", 0xF183, "client", (("number", "u32"), ("status", "u8"), ("reason", "text"))),
    ("view", 0xF184, "client",
     (("token", "16 bytes"), ("serial", "u64"), ("generation", "u64"), ("state", "u8"), ("ordered", "u64"), ("length", "u64"),
      ("keep", "u32"), ("last", "bool"), ("over", "bool"), ("status", "u8"), ("reason", "text"),
      ("chunks", (("identity", "u64"), ("size", "u64"))))),
    ("offer", 0xFF01, "receiver", (("transfer", "u32"), ("descriptor", "bytes"))),
    ("chunks", 0xFF02, "receiver", (("transfer", "u32"), ("first", "u32"))),
    ("withdrawn", 0xFF03, "receiver", (("transfer", "u32"), ("reason", "rest"))),
    ("confirmed", 0xFF04, "receiver", (("transfer", "u32"),)),
    ("taken", 0xFF05, "sender", (("transfer", "u32"), ("chunks", "u32"))),
    ("mapped", 0xFF06, "sender", (("transfer", "u32"),)),
    ("declined", 0xFF07, "sender", (("transfer", "u32"), ("reason", "rest"))),
    ("fabric", 0xFF08, "receiver", (("transfer", "u32"), ("first", "u32"), ("handles", "bytes"))),
    ("soon", 0xFF09, "either", ()),
)
KINDS: Dict[str, int] = {s.name: s.kind for s in SHAPES.values()}

PACKET: Layout = (
    ("magic", "bytes"), ("version", "u16"), ("kind", "u16"), ("nonce", "16 bytes"), ("sequence", "u64"),
    ("bytes", "u32"), ("files", "u32"), ("bytes in all", "u32"), ("files in all", "u32"), ("body", "bytes"))

_INTEGERS = {"u8": struct.Struct("<B"), "u16": struct.Struct("<H"), "u32": struct.Struct("<I"), "u64": struct.Struct("<Q")}


def clip(text: str, most: int) -> bytes:
    """Encodes at most ``most`` bytes of UTF-8, cut between characters."""
    raw = text.encode("utf-8", "replace")
    return raw if len(raw) <= most else raw[:most].decode("utf-8", "ignore").encode()


def _put(out: bytearray, name: str, kind: Union[str, Layout], value: Any) -> None:
    if not isinstance(kind, str):
        out += _INTEGERS["u32"].pack(len(value))
        for entry in value:
            for field, of in kind:
                _put(out, field, of, entry[field])
    elif kind in _INTEGERS:
        out += _INTEGERS[kind].pack(value)
    elif kind == "bool":
        out.append(1 if value else 0)
    elif kind == "text":
        raw = clip(value, _LIMITS[name])
        out += _INTEGERS["u16"].pack(len(raw)) + raw
    elif kind == "blob":
        out += _INTEGERS["u32"].pack(len(value)) + value
    elif kind == "rest":
        out += clip(value, _REASON)
    else:
        out += value


def encode(name: str, fields: Mapping[str, Any]) -> Tuple[int, bytes]:
    """Returns the kind and the body of a message."""
    shape = SHAPES[KINDS[name]]
    out = bytearray()
    for field, of in shape.layout:
        _put(out, field, of, fields[field])
    return shape.kind, bytes(out)


class _Reader:
    """Reads values from untrusted bytes."""

    def __init__(self, body: bytes, message: str) -> None:
        self._body = memoryview(body)
        self._at = 0
        self._message = message

    def fail(self, why: str) -> ProtocolError:
        return ProtocolError(f"message {self._message}: {why}", "use compatible versions of both libraries")

    def left(self) -> int:
        return len(self._body) - self._at

    def take(self, n: int) -> bytes:
        if n > self.left():
            raise self.fail(f"{self.left()} bytes where {n} more are needed")
        self._at += n
        return bytes(self._body[self._at - n:self._at])

    def integer(self, kind: str) -> int:
        of = _INTEGERS[kind]
        return int(of.unpack(self.take(of.size))[0])

    def utf8(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a text that is not UTF-8") from None

    def value(self, name: str, kind: Union[str, Layout]) -> Any:
        if not isinstance(kind, str):
            n = self.integer("u32")
            most = _COUNTS[self._message, name]
            if n > most:
                raise self.fail(f"{n} entries, and {most} is the most")
            if n * _least(kind) > self.left():
                raise self.fail(f"{n} entries in {self.left()} bytes")
            return [{field: self.value(field, of) for field, of in kind} for _ in range(n)]
        if kind in _INTEGERS:
            return self.integer(kind)
        if kind == "bool":
            v = self.integer("u8")
            if v > 1:
                raise self.fail(f"{v} where 0 or 1 belongs")
            return v == 1
        if kind in ("16 bytes", "32 bytes"):
            return self.take(int(kind[:2]))
        if kind == "text":
            n = self.integer("u16")
            if n > _LIMITS[name]:
                raise self.fail(f"a text of {n} bytes, and {_LIMITS[name]} is the most")
            return self.utf8(self.take(n))
        if kind == "blob":
            n = self.integer("u32")
            if n > DESCRIPTOR_HEADER:
                raise self.fail(f"{n} bytes, and {DESCRIPTOR_HEADER} is the most")
            return self.take(n)
        if kind == "rest":
            if self.left() > _REASON:
                raise self.fail(f"a reason of {self.left()} bytes, and {_REASON} is the most")
            return self.utf8(self.take(self.left()))
        return self.take(self.left())


def _least(layout: Layout) -> int:
    n = 0
    for _, kind in layout:
        n += _INTEGERS[kind].size if isinstance(kind, str) and kind in _INTEGERS else 2
    return n


#: Ranges of values that are narrower than their types.
_MAX_SIZE = (1 << 63) - 1
_RANGES = {"access": (1, 2), "form": (0, 2), "status": (0, 7), "state": (1, 5), "room": (0, _MAX_SIZE), "length": (0, _MAX_SIZE), "bytes": (0, _MAX_SIZE), "reserved": (0, _MAX_SIZE), "size": (0, _MAX_SIZE)}


def decode(kind: int, body: bytes, to: str) -> Tuple[str, Fields]:
    """Returns the name and the fields of a message to this side."""
    shape = SHAPES.get(kind)
    if shape is None or shape.to not in (to, "either"):
        raise ProtocolError(f"a message of kind {kind:#x}, which is not sent in this direction")
    r = _Reader(body, shape.name)
    fields: Fields = {name: r.value(name, of) for name, of in shape.layout}
    if r.left():
        raise r.fail(f"{r.left()} bytes too many")
    lists = [v for v in fields.values() if isinstance(v, list)]
    for entry in [fields, *(e for l in lists for e in l)]:
        for name, (least, most) in _RANGES.items():
            if name in entry and not least <= entry[name] <= most:
                raise r.fail(f"{name} {entry[name]}, where {least} to {most} are allowed")
    if shape.name == "follow" and not fields["name"]:
        raise r.fail("an empty name")
    if shape.name == "accepted" and not fields["form"] and any(fields["description"]):
        raise r.fail("a digest without a description")
    if shape.name == "fabric":
        n, rest = divmod(len(fields["handles"]), FABRIC_HANDLE)
        if rest or not 1 <= n <= MAX_BATCH:
            raise r.fail(f"{len(fields['handles'])} bytes of fabric handles, of {FABRIC_HANDLE} each")
    return shape.name, fields


def read(m: "Message", to: str) -> Tuple[str, Fields]:
    """Decodes a message to this side, and checks the number of its file descriptors."""
    name, fields = decode(m.kind, m.body, to)
    least = len(fields["chunks"]) if name == "view" else 1 + (fields["form"] > 0) if name == "accepted" else 1 if name == "chunks" else 0
    most = MAX_BATCH if name == "chunks" else least
    if not least <= len(m.files) <= most and not (m.lost and most):
        raise ProtocolError(f"message {name}: {len(m.files)} file descriptors, where {least} to {most} belong to it", "use compatible versions of both libraries")
    return name, fields
