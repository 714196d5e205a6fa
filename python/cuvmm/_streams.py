"""Streams of PyTorch, CuPy and others, as the driver's handles."""

from __future__ import annotations

from ctypes import byref, c_int, c_void_p
from typing import Any, Iterable, List, Union

from ._driver import Device
from .errors import ArgumentError, NotSupported

LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2


def handle_of(stream: Any) -> int:
    """Returns the driver's handle of a stream: an int, or an object of PyTorch, CuPy, or cuda.core."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    for name in ("cuda_stream", "ptr", "handle"):  # torch.cuda.Stream, cupy.cuda.Stream, others
        value = getattr(stream, name, None)
        if value is not None:
            return int(value)
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    raise ArgumentError(f"{stream!r} is not a stream", "pass a stream of PyTorch or CuPy, or the driver's handle as an int")


def key_of(stream: c_void_p) -> int:
    """Returns a number that is the same for all names of a stream: 0 and 1 both name the legacy default stream."""
    return LEGACY_DEFAULT if not stream.value else stream.value


def captures(dev: Device, stream: int) -> bool:
    """Whether a stream captures a graph, or the driver cannot tell because another one does."""
    status = c_int()
    with dev.current() as d:
        return d.raw("cuStreamIsCapturing", c_void_p(stream), byref(status)) != 0 or status.value != 0


def handles_of(dev: Device, streams: Union[None, Any, Iterable[Any]]) -> List[c_void_p]:
    """Returns the handles of one stream or several. A stream that captures a graph is refused."""
    if streams is None:
        return []
    many = streams if isinstance(streams, (list, tuple, set, frozenset)) else [streams]
    out = [c_void_p(handle_of(s)) for s in many]
    if not out:
        return []
    with dev.current() as d:
        for h in out:
            status = c_int()
            d.call("cuStreamIsCapturing", h, byref(status))
            if status.value:
                raise NotSupported("the stream is capturing a graph", "name the stream before or after the capture")
    return out
