"""What a publication says of its memory: a tag, and a text or a manifest, which travels as a sealed file in memory."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from typing import Any, NamedTuple, Optional

from . import _manifest
from ._undo import File
from .errors import ArgumentError, FilesError, FormatError, MismatchError, TooLargeError, quoted

MAX_TEXT = 64 << 20
MAX_TAG = 128
NONE, TEXT, MANIFEST = range(3)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE if hasattr(fcntl, "F_SEAL_SEAL") else 15
_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)


class Description(NamedTuple):
    """What a publication says of its memory. ``manifest`` is set if the text is one."""

    tag: str = ""
    form: int = NONE
    text: bytes = b""
    manifest: Optional[_manifest.Manifest] = None

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text).digest() if self.form else bytes(32)

    def check(self, name: str, want: Optional[_manifest.Manifest]) -> None:
        """Raises a MismatchError unless the tensors are those that a follower expects, if it does."""
        if want is None:
            return
        if self.manifest is None:
            raise MismatchError(f"publication {quoted(name)} has no manifest", "follow memory of the same model")
        try:
            self.manifest.match(want)
        except MismatchError as e:
            raise MismatchError(f"publication {quoted(name)}: {e.what}", "follow memory of the same model, laid out in the same way") from None


def describe(tag: str, description: Any, manifest: Any) -> Description:
    """Returns what a publisher says."""
    if not isinstance(tag, str) or len(tag.encode()) > MAX_TAG or tag != tag.strip() or not tag.isprintable():
        raise ArgumentError(f"the tag {tag!r}", f"use at most {MAX_TAG} bytes of printable UTF-8, without spaces at its ends")
    if description is not None and manifest is not None:
        raise ArgumentError("a description and a manifest", "pass one of them")
    if manifest is not None:
        m = _manifest.of(manifest)
        said = Description(tag, MANIFEST, m.text(), m)
    elif description is not None:
        said = Description(tag, TEXT, bytes(description.encode() if isinstance(description, str) else description))
    else:
        return Description(tag)
    if len(said.text) > MAX_TEXT:
        raise ArgumentError(f"a description of {len(said.text)} bytes", f"use at most {MAX_TEXT}")
    return said


def received(tag: str, form: int, digest: bytes, file: Optional[File]) -> Description:
    """Returns what a server says, which may be anything: FormatError or TooLargeError if it is not what was declared."""
    if form == NONE or file is None:
        return Description(tag)
    text = read_text(file.number, "a description")
    said = Description(tag, form, text, _manifest.parse(text) if form == MANIFEST else None)
    if said.digest != digest:
        raise FormatError(f"a description whose digest is {said.digest.hex()}, where {digest.hex()} was declared", "the publisher is at fault")
    return said


def text_file(text: bytes, file: File) -> File:
    """Makes a file of a text, which nothing can change any more."""
    try:
        fd = file.open(os.memfd_create, "cuvmm text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(fd, "wb", closefd=False) as f:
            f.write(text)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        return file
    except OSError as e:
        hint = "raise this process's limit of open files (ulimit -n)" if e.errno in (errno.EMFILE, errno.ENFILE) else ""
        raise FilesError(f"a file for {len(text)} bytes of text could not be made: {e.strerror}", hint) from None


def read_text(fd: int, what: str) -> bytes:
    """Reads a file that ``text_file`` made in any process."""
    try:
        sealed = fcntl.fcntl(fd, _GET_SEALS) & _SEALS == _SEALS
    except OSError:
        sealed = False
    if not sealed:
        raise FormatError(f"{what} that is no sealed memory file", "the sender is at fault")
    size = os.fstat(fd).st_size
    if size > MAX_TEXT:
        raise TooLargeError(f"{what} of {size} bytes, where {MAX_TEXT} are the most", "divide the memory")
    parts = []
    at = 0
    while at < size:
        parts.append(os.pread(fd, size - at, at))
        at += len(parts[-1])
    return b"".join(parts)
