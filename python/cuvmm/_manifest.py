"""Manifests: which tensors memory has, and where. Their text is that of handles.Manifest in Go."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

from ._descriptor import ELEMENTS, NUMBERS
from .errors import ArgumentError, FormatError, MismatchError, quoted

MAX_TENSORS = 1 << 20
MAX_NAME, MAX_DIMS, MAX_KIND = 4096, 64, 64
_MAX_NUMBER = (1 << 63) - 1
_MAX_BYTES = 1 << 60
_MAX_VALUES = 16 * MAX_TENSORS
_MOST_DIFFERENCES = 8
_LEAST, _MOST = {"name", "element", "shape", "offset"}, {"name", "element", "shape", "offset", "strides", "kind", "alias", "digest"}
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"')


class Placed(NamedTuple):
    """A tensor in memory, from byte ``offset`` on. Without strides its elements are in row-major order, without gaps."""

    name: str
    number: int
    shape: Tuple[int, ...]
    offset: int
    digest: str = ""
    strides: Tuple[int, ...] = ()
    kind: str = ""
    alias: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes from the first element to the end of the last."""
        return extent(self.shape, self.strides) * ELEMENTS[self.number].size

    def one_form(self) -> Tuple[int, ...]:
        """The strides in their one form: explicit, and 0 where nothing depends on them."""
        if self.nbytes == 0:
            return (0,) * len(self.shape)
        return tuple(s if n > 1 else 0 for n, s in zip(self.shape, self.strides or contiguous(self.shape)))

    def fields(self) -> Dict[str, Any]:
        f: Dict[str, Any] = {"name": self.name, "element": ELEMENTS[self.number].name, "shape": list(self.shape)}
        if self.strides:
            f["strides"] = list(self.strides)
        f["offset"] = self.offset
        f.update((key, v) for key, v in (("kind", self.kind), ("alias", self.alias), ("digest", self.digest)) if v)
        return f

    def differences(self, want: "Placed") -> List[str]:
        """Names the fields in which two tensors of one name differ."""
        pairs: List[Tuple[str, Any, Any]] = [("element", ELEMENTS[self.number].name, ELEMENTS[want.number].name), ("shape", list(self.shape), list(want.shape))]
        if self.shape == want.shape:
            pairs.append(("strides", list(self.one_form()), list(want.one_form())))
        pairs += [("offset", self.offset, want.offset), ("kind", quoted(self.kind), quoted(want.kind)), ("alias group", self.alias, want.alias)]
        return [f"{field} {a} instead of {b}" for field, a, b in pairs if a != b]


def contiguous(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    """The strides of row-major order without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def extent(shape: Tuple[int, ...], strides: Tuple[int, ...] = ()) -> int:
    """The elements from the first to the last."""
    return math.prod(shape) if not strides or 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))


class Manifest:
    """The tensors of memory of ``nbytes`` bytes, in the order of their offsets."""

    def __init__(self, nbytes: int, tensors: Iterable[Placed]) -> None:
        self.nbytes, self.tensors = nbytes, sorted(tensors, key=lambda p: (p.offset, p.nbytes))

    def by_name(self) -> Dict[str, Placed]:
        return {p.name: p for p in self.tensors}

    def text(self) -> bytes:
        return json.dumps({"bytes": self.nbytes, "tensors": [p.fields() for p in self.tensors]}, ensure_ascii=False, separators=(",", ":")).encode()

    def _in_order(self) -> List[Placed]:
        """By offset and name: tensors at one offset have no order of their own."""
        return sorted(self.tensors, key=lambda p: (p.offset, p.name.encode()))

    def identity(self) -> bytes:
        """A SHA-256 over all but the digests, as handles.Manifest.Identity in Go."""
        h = hashlib.sha256(b"cuvmm manifest 2\n" + struct.pack("<Q", self.nbytes))
        for p in self._in_order():
            for text in (p.name.encode(), p.kind.encode()):
                h.update(struct.pack("<I", len(text)) + text)
            h.update(bytes([p.number, len(p.shape)]))
            for n, s in zip(p.shape, p.one_form()):
                h.update(struct.pack("<QQ", n, s))
            h.update(struct.pack("<QQ", p.offset, p.alias))
        return h.digest()

    def match(self, expected: "Manifest") -> None:
        """Raises a MismatchError that names the fields which differ, unless the identities are equal."""
        if self.identity() == expected.identity():
            return
        all = [] if self.nbytes == expected.nbytes else [f"bytes {self.nbytes} instead of {expected.nbytes}"]
        rest = self.by_name()
        for want in expected._in_order():
            got = rest.pop(want.name, None)
            if got is None:
                all.append(f"no tensor {quoted(want.name)}")
            elif got.differences(want):
                all.append(f"tensor {quoted(want.name)} has {', '.join(got.differences(want))}")
        all += [f"a tensor {quoted(name)} that is not expected" for name in rest]
        more = f"; and {len(all) - _MOST_DIFFERENCES} more" if len(all) > _MOST_DIFFERENCES else ""
        raise MismatchError("; ".join(all[:_MOST_DIFFERENCES]) + more, "use memory of the same model, laid out in the same way")


def of(given: Any) -> Manifest:
    """Returns the manifest that a caller passes: its text, or what has a ``manifest()``."""
    if hasattr(given, "manifest"):
        given = given.manifest()
    try:
        return parse(given)
    except (FormatError, TypeError) as e:
        raise ArgumentError(e.what if isinstance(e, FormatError) else str(e), "pass what manifest() returned") from None


def parse(text: Any) -> Manifest:
    """Checks the text of a manifest, which may come from anywhere."""
    raw = bytes(text)
    bare = _STRINGS.sub(b"", raw)
    if bare.count(b"{") > MAX_TENSORS + 1 or bare.count(b",") + bare.count(b"[") > _MAX_VALUES:  # before they are made
        raise _bad(f"more than {MAX_TENSORS} tensors, or {_MAX_VALUES} values")
    try:
        about = json.loads(raw.decode())
    except (ValueError, RecursionError) as e:
        raise _bad(f"text that is none: {e}") from None
    if not isinstance(about, dict) or about.keys() != {"bytes", "tensors"}:
        raise _bad("other fields")
    nbytes, tensors = about["bytes"], about["tensors"] or []
    if type(nbytes) is not int or not 0 <= nbytes <= _MAX_BYTES:
        raise _bad(f"{nbytes!r:.40} bytes")
    if not isinstance(tensors, list):
        raise _bad("tensors that are no list")
    placed = [_tensor(t) for t in tensors]
    _check_places(nbytes, placed)
    return Manifest(nbytes, placed)


def _bad(what: str) -> FormatError:
    return FormatError(f"a manifest with {what}", "the publisher is at fault")


def _is_number(n: Any) -> bool:
    return type(n) is int and 0 <= n <= _MAX_NUMBER


def _is_text(text: Any, most: int) -> bool:
    try:
        return isinstance(text, str) and len(text.encode()) <= most
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _tensor(t: Any) -> Placed:
    if not isinstance(t, dict) or not _LEAST <= t.keys() <= _MOST:
        raise _bad("a tensor of other fields")
    name, element, shape, strides = t["name"], t["element"], t["shape"] or [], t.get("strides") or []
    if not _is_text(name, MAX_NAME) or not name:
        raise _bad(f"a tensor whose name has not 1 to {MAX_NAME} bytes of UTF-8")
    lists = isinstance(shape, list) and isinstance(strides, list) and len(shape) <= MAX_DIMS and len(strides) in (0, len(shape))
    number = NUMBERS.get(element) if isinstance(element, str) else None
    kind, alias, digest = t.get("kind", ""), t.get("alias", 0), t.get("digest", "")
    if number is None or not lists or not all(map(_is_number, [*shape, *strides, t["offset"], alias])) or not _is_text(kind, MAX_KIND) or not isinstance(digest, str):
        raise _bad(f"tensor {quoted(name)} of another form")
    return Placed(name, number, tuple(shape), t["offset"], digest, tuple(strides), kind, alias)


def _check_places(nbytes: int, all: List[Placed]) -> None:
    """Checks that the tensors lie in the memory, in order, and overlap only within one alias group."""
    names = set()
    start = end = group = 0  # of the tensor before; the end of all before; the group of those that reach there
    for p in all:
        if p.name in names:
            raise _bad(f"tensor {quoted(p.name)} twice")
        names.add(p.name)
        if p.offset < start or p.offset + p.nbytes > nbytes:
            raise _bad(f"tensor {quoted(p.name)} of {p.nbytes} bytes at {p.offset}, behind a tensor at {start}, in memory of {nbytes}")
        if p.offset < end and (p.alias == 0 or p.alias != group):
            raise _bad(f"tensor {quoted(p.name)} at {p.offset}, behind a tensor that ends at {end} and is not of its alias group")
        start, end, group = p.offset, max(end, p.offset + p.nbytes), p.alias
