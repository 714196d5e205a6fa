"""The descriptor of memory, in its binary form, and the text forms of offers and receipts of leases."""

from __future__ import annotations

import base64
import binascii
import os
import re
import struct
from typing import Any, List, NamedTuple, Optional, Tuple

from . import _driver
from ._wire import DESCRIPTOR_HEADER, FABRIC_HANDLE, MAX_CHUNKS
from .errors import MismatchError, ProtocolError, TooLargeError

BUFFER, ARRAY = 2, 3
NO_ELEMENT, RECORD = 0, 14
_MAX_BYTES = 1 << 60
_HEADER = struct.Struct("<4sHBBIQBBHi16sQI16sI")
_MAGIC = b"cuvD"
_COMPRESSIBLE, _RDMA = 1, 2


class Element(NamedTuple):
    """A type of elements: its name, its size in bytes, its code in the array interface, and DLPack's."""

    name: str
    size: int
    typestr: str
    dlpack: int


#: By the protocol's number. DLPack's codes are int 0, uint 1, float 2, bfloat 4, complex 5, bool 6, float8_e4m3fn 10,
#: float8_e5m2 12; the array interface has none for bfloat and float8.
ELEMENTS = {
    1: Element("bool", 1, "|b1", 6),
    2: Element("int8", 1, "|i1", 0),
    3: Element("int16", 2, "<i2", 0),
    4: Element("int32", 4, "<i4", 0),
    5: Element("int64", 8, "<i8", 0),
    6: Element("uint8", 1, "|u1", 1),
    7: Element("uint16", 2, "<u2", 1),
    8: Element("uint32", 4, "<u4", 1),
    9: Element("uint64", 8, "<u8", 1),
    10: Element("float32", 4, "<f4", 2),
    11: Element("float64", 8, "<f8", 2),
    12: Element("complex64", 8, "<c8", 5),
    13: Element("complex128", 16, "<c16", 5),
    15: Element("bfloat16", 2, "", 4),
    16: Element("float16", 2, "<f2", 2),
    17: Element("float8_e4m3", 1, "", 10),
    18: Element("float8_e5m2", 1, "", 12),
}
NUMBERS = {e.name: n for n, e in ELEMENTS.items()}


def element_name(dtype: Any) -> str:
    """Returns the name that a dtype has here, if it is one of ELEMENTS: a name, or an object of NumPy's or PyTorch's."""
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return {"float8_e4m3fn": "float8_e4m3"}.get(name, name)


class Process(NamedTuple):
    """A process, by its pid and 128 random bits that it drew once."""

    pid: int
    instance: bytes


_self: Optional[Tuple[int, Process]] = None


def this_process() -> Process:
    global _self
    if _self is None or _self[0] != os.getpid():
        _self = os.getpid(), Process(os.getpid(), os.urandom(16))
    return _self[1]


class Descriptor(NamedTuple):
    """Describes memory. ``chunks`` are sizes in bytes; ``length`` counts the elements of an array, and bytes otherwise."""

    kind: int
    element: int
    element_size: int
    length: int
    location_type: int
    location_id: int
    device: bytes
    compressible: bool
    rdma: bool
    handle: int
    generation: int
    exporter: Process
    chunks: List[int]

    @property
    def unit(self) -> int:
        """The bytes of an element."""
        return self.element_size if self.kind == ARRAY else 1

    @property
    def size(self) -> int:
        return sum(self.chunks)

    def what(self) -> str:
        if self.kind != ARRAY:
            return "a buffer"
        name = ELEMENTS[self.element].name if self.element in ELEMENTS else "record"
        return f"an array of {name}, of {self.element_size} bytes each"

    def encode(self) -> bytes:
        flags = (_COMPRESSIBLE if self.compressible else 0) | (_RDMA if self.rdma else 0)
        return _HEADER.pack(_MAGIC, 1, self.kind, self.element, self.element_size, self.length, self.location_type, flags, self.handle,
                            self.location_id, self.device, self.generation, self.exporter.pid, self.exporter.instance,
                            len(self.chunks)) + struct.pack(f"<{len(self.chunks)}Q", *self.chunks)

    def check_sizes(self, granularity: int, most: int) -> None:
        """Checks the chunks against the limits of this process, before it reserves addresses."""
        if self.size > most:
            raise TooLargeError(f"{self.size} bytes, of which {most} are allowed", "share less, or raise max_bytes")
        for i, c in enumerate(self.chunks):
            if c % granularity:
                raise MismatchError(f"chunk {i} has {c} bytes, not a multiple of {granularity}", "the exporter declared it wrong")


def _bad(why: str) -> ProtocolError:
    return ProtocolError(f"a descriptor of memory: {why}", "use compatible versions of both libraries")


def decode(raw: bytes) -> Descriptor:
    """Reads the one binary form of a descriptor."""
    if not DESCRIPTOR_HEADER <= len(raw) <= DESCRIPTOR_HEADER + 8 * MAX_CHUNKS:
        raise _bad(f"{len(raw)} bytes")
    (magic, version, kind, element, element_size, length, location_type, flags, handle, location_id, device, generation, pid, instance,
     count) = _HEADER.unpack_from(raw)
    if magic != _MAGIC or version != 1:
        raise _bad(f"it begins with {magic!r}, version {version}")
    if len(raw) != DESCRIPTOR_HEADER + 8 * count:
        raise _bad(f"{len(raw) - DESCRIPTOR_HEADER} bytes for the sizes of {count} chunks")
    if flags & ~(_COMPRESSIBLE | _RDMA):
        raise _bad(f"flags {flags:#x}")
    chunks = list(struct.unpack_from(f"<{count}Q", raw, DESCRIPTOR_HEADER))
    d = Descriptor(kind, element, element_size, length, location_type, location_id, device, bool(flags & _COMPRESSIBLE), bool(flags & _RDMA), handle,
                   generation, Process(pid, instance), chunks)
    _check(d)
    return d


def _check(d: Descriptor) -> None:
    if 0 in d.chunks:
        raise _bad("a chunk without bytes")
    if d.size > _MAX_BYTES:
        raise TooLargeError(f"{len(d.chunks)} chunks of {d.size} bytes")
    if not BUFFER <= d.kind <= ARRAY:
        raise _bad(f"kind {d.kind}")
    if d.kind == ARRAY:
        known = ELEMENTS.get(d.element)
        if d.element_size == 0 or (known is None and d.element != RECORD) or (known is not None and known.size != d.element_size):
            raise _bad(f"elements of type {d.element} and {d.element_size} bytes")
    elif d.element != NO_ELEMENT or d.element_size:
        raise _bad(f"elements of type {d.element} in {d.what()}")
    if d.length * d.unit > d.size:
        raise _bad(f"{d.length} elements of {d.unit} bytes in {d.size}")
    if d.location_type not in (_driver.DEVICE_LOCATION, _driver.NUMA_LOCATION) or d.location_id < 0:
        raise _bad(f"location type {d.location_type}, number {d.location_id}")
    if (d.location_type == _driver.DEVICE_LOCATION) != (d.device != bytes(16)):
        raise _bad("a device that does not fit its location")
    if d.handle not in (_driver.POSIX_FD, _driver.FABRIC, _driver.POSIX_FD | _driver.FABRIC):
        raise _bad(f"handle type {d.handle}")


_OFFER, _RECEIPT = "cuvmmoffer1:", "cuvmmreceipt1:"


def _text(prefix: str, raw: bytes) -> str:
    return prefix + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _bytes(prefix: str, text: str, most: int) -> bytes:
    code = text[len(prefix):]
    if not text.startswith(prefix):
        raise ProtocolError(f"a text that begins with {text[:len(prefix)]!r} instead of {prefix!r}", "pass the text as the exporter made it")
    if len(code) > most * 4 // 3 + 4:
        raise TooLargeError(f"a text of {len(text)} characters")
    if not re.fullmatch("[A-Za-z0-9_-]*", code):
        raise ProtocolError("a text with other characters than base64 has", "remove white space from it")
    try:
        raw = base64.urlsafe_b64decode(code + "=" * (-len(code) % 4))
    except binascii.Error as e:
        raise ProtocolError(f"a text that is not base64: {e}", "pass all of it") from None
    if _text(prefix, raw) != text:
        raise ProtocolError("a text with trailing bits", "pass the text as the exporter made it")
    return raw


class Offer(NamedTuple):
    """An offer of leased memory. Its text has the fabric handles; file descriptors travel separately."""

    descriptor: Descriptor
    lease: bytes
    handles: List[bytes]

    def receipt(self) -> str:
        """Returns the receipt of this process, as text, which the exporter gets once the import is done."""
        me = this_process()
        return _text(_RECEIPT, self.lease + struct.pack("<I", me.pid) + me.instance)


def offer(text: str) -> Offer:
    """Reads the one text form of an offer."""
    raw = _bytes(_OFFER, text, DESCRIPTOR_HEADER + 16 + (8 + FABRIC_HANDLE) * MAX_CHUNKS)
    if len(raw) < DESCRIPTOR_HEADER + 16:
        raise _bad(f"an offer of {len(raw)} bytes")
    (count,) = struct.unpack_from("<I", raw, DESCRIPTOR_HEADER - 4)
    end = DESCRIPTOR_HEADER + 8 * count
    if count > MAX_CHUNKS or end + 16 > len(raw):
        raise _bad(f"an offer of {len(raw)} bytes for {count} chunks")
    d = decode(raw[:end])
    rest = raw[end + 16:]
    want = count if d.handle == _driver.FABRIC else 0
    if d.handle == _driver.POSIX_FD | _driver.FABRIC or len(rest) != want * FABRIC_HANDLE:
        raise _bad(f"an offer by {d.handle} with {len(rest)} bytes of fabric handles")
    handles = [rest[i:i + FABRIC_HANDLE] for i in range(0, len(rest), FABRIC_HANDLE)]
    return Offer(d, raw[end:end + 16], handles)
