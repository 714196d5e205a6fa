"""CRC-32C, which Python's library has not: by libcuvmm where that is, else in Python."""

from __future__ import annotations

import functools
from ctypes import byref, c_char, c_uint32
from typing import Callable, Dict, Iterable, List, NamedTuple

from . import _torch_library as library
from .errors import NotSupported

_POLYNOMIAL = 0x82F63B78  # the lowest bit has the highest power, as in the bytes

# The polynomial divides x^6777 + x^484 + x^100 + 1, also with all exponents times a power of two. So the first bits of a large integer,
# whose powers are the highest, go into lower ones by three shifts.
_TOP, _LOWER = 6777, (484, 100, 0)
_LEAST = 8  # times _TOP: bits that are not folded any further. A multiple of 8, so that bits go by whole bytes.
_CHUNK = 64 << 10  # bytes that are folded at once: little enough for the processor's caches


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_row(b) for b in range(256)]


def in_python(data: memoryview) -> int:
    crc = 0xFFFFFFFF
    if len(data) > _TOP:
        bits, n, crc = crc, 0, 0
        for at in range(0, len(data), _CHUNK):
            chunk = data[at:at + _CHUNK]
            bits ^= int.from_bytes(chunk, "little") << n
            n += 8 * len(chunk)
            while n > _TOP * _LEAST:
                scale = _LEAST
                while 2 * scale * _TOP < n:
                    scale *= 2
                gone = min(n - _TOP * scale, (_TOP - _LOWER[0]) * scale)
                first, bits, n = bits & ((1 << gone) - 1), bits >> gone, n - gone
                for power in _LOWER:
                    bits ^= first << (_TOP - power) * scale - gone
        data = memoryview(bits.to_bytes(n // 8, "little"))
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@functools.lru_cache(maxsize=None)
def fastest() -> Callable[[memoryview], int]:
    """Returns the function for this process, which finds libcuvmm once."""
    try:
        library.load(library.find(None))
    except NotSupported:
        return in_python
    return _in_libcuvmm


def _in_libcuvmm(data: memoryview) -> int:
    crc = c_uint32()
    library.call("cuvmm_crc32c", (c_char * len(data)).from_buffer(data), len(data), byref(crc))
    return crc.value


def combined(a: int, b: int, n: int) -> int:
    """Returns the sum of two runs of bytes from their sums, and the length of the second: n bytes behind it multiply it by x^(8n)."""
    return _times(_power(n), a) ^ b


class Run(NamedTuple):
    """The sum of some bytes of something: what that is, where in it they begin, and how many they are."""

    of: int
    start: int
    nbytes: int
    digest: int


def joined(runs: Iterable[Run]) -> Dict[int, int]:
    """Returns the sum of each thing whose bytes were summed in runs."""
    all: Dict[int, int] = {}
    for r in sorted(runs):
        all[r.of] = combined(all.get(r.of, 0), r.digest, r.nbytes)
    return all


@functools.lru_cache(maxsize=64)
def _power(n: int) -> int:
    """x^(8n)."""
    power, k = 1 << 31, 3
    while n:
        if n & 1:
            power = _times(_POWERS[k % 32], power)
        n, k = n >> 1, k + 1
    return power


def _times(a: int, b: int) -> int:
    """Multiplies polynomials modulo that of the sum."""
    product = 0
    while a:
        if a >> 31:
            product ^= b
        a, b = a << 1 & 0xFFFFFFFF, b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


_POWERS: List[int] = [1 << 30]  # x^(2^k), whose powers repeat after 32
while len(_POWERS) < 32:
    _POWERS.append(_times(_POWERS[-1], _POWERS[-1]))
