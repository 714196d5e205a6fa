"""Address ranges, with memory of this or another process mapped from their start."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char, c_int, c_uint64, c_void_p
from typing import Any, List, Union

from . import _driver
from ._descriptor import Descriptor
from ._driver import Device, Properties
from .errors import CapacityError, FilesError, MismatchError, NotSupported

_INVALID_VALUE, _INVALID_HANDLE, _UNKNOWN = 1, 400, 999


class Handle:
    """A reference to physical memory, until ``release``. Mappings hold references of their own."""

    def __init__(self, dev: Device, number: int, size: int) -> None:
        self.device, self.number, self.size = dev, number, size

    def export(self) -> int:
        """Returns a new file descriptor of the memory, for the caller to close."""
        fd = c_int(-1)
        self.device.driver.call("cuMemExportToShareableHandle", byref(fd), self.number, _driver.POSIX_FD, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def release(self) -> None:
        if self.number:
            self.device.driver.call("cuMemRelease", self.number)
            self.number = 0


class PinnedFile:
    """Pins a file descriptor of another process's memory, so that this process can export the memory again."""

    def __init__(self, fd: int) -> None:
        try:
            self._fd = os.dup(fd)
        except OSError as e:
            raise FilesError(f"the descriptor of a chunk could not be duplicated: {e.strerror}", "raise this process's limit of open files (ulimit -n)") from None

    def export(self) -> int:
        """Returns a new file descriptor of the memory, for the caller to close."""
        return os.dup(self._fd)

    def release(self) -> None:
        os.close(self._fd)


Exportable = Union[Handle, PinnedFile]


def create(dev: Device, size: int) -> Handle:
    """Creates memory that can be exported as file descriptors."""
    h = c_uint64()
    dev.driver.call("cuMemCreate", byref(h), size, byref(dev.properties()), 0, what=f"{size} bytes on device {dev.ordinal}")
    return Handle(dev, int(h.value), size)


def home_of(dev: Device, d: Descriptor) -> Device:
    """Returns the device that the described memory lies on, which the importing device must be able to access."""
    for other in _driver.devices():
        if other.uuid == d.device:
            if not dev.can_access(other):
                raise NotSupported(f"memory on device {other.ordinal} for device {dev.ordinal}, which cannot reach it",
                                   "map it on the device that it lies on, and copy")
            return other
    raise NotSupported(f"memory on the device of UUID {d.device.hex()}, which this process does not see",
                       "make that device visible (CUDA_VISIBLE_DEVICES, the container's devices)")


class Importer:
    """Imports the chunks of a descriptor, and checks that they are what it declares."""

    def __init__(self, dev: Device, d: Descriptor) -> None:
        self.device = dev
        if d.location_type == _driver.DEVICE_LOCATION:
            home = home_of(dev, d)
            self._location = (_driver.DEVICE_LOCATION, home.handle)
            self.most = home.memory
            p = home.properties(d.handle, 1 if d.compressible else 0)
        else:
            self._location = (d.location_type, d.location_id)
            self.most = 1 << 40
            p = Properties(type=1, handles=d.handle, location=_driver.Location(d.location_type, d.location_id))
        self.granularity = dev.granularity(p)

    def descriptor(self, fd: int, size: int) -> Handle:
        return self._import(c_void_p(fd), _driver.POSIX_FD, size, "a file descriptor")

    def fabric(self, handle: bytes, size: int) -> Handle:
        raw = (c_char * len(handle)).from_buffer_copy(handle)
        return self._import(ctypes.cast(raw, c_void_p), _driver.FABRIC, size, "a fabric handle")

    def _import(self, os_handle: c_void_p, kind: int, size: int, what: str) -> Handle:
        d = self.device.driver
        h = c_uint64()
        code = d.raw("cuMemImportFromShareableHandle", byref(h), os_handle, kind)
        if code in (_UNKNOWN, _INVALID_HANDLE, _INVALID_VALUE):
            raise MismatchError(f"{what} that is not GPU memory of this driver ({code})", "the exporter is at fault")
        if code != 0:
            raise d.error("cuMemImportFromShareableHandle", code, "memory of another process")
        handle = Handle(self.device, int(h.value), size)
        p = Properties()
        try:
            d.call("cuMemGetAllocationPropertiesFromHandle", byref(p), handle.number)
            if (p.location.type, p.location.id) != self._location:
                raise MismatchError(f"memory at location {p.location.type}, {p.location.id}, where {self._location} was declared", "the exporter is at fault")
        except BaseException:
            handle.release()
            raise
        return handle


class Range:
    """A reserved address range of one device, fixed for life, with consecutive chunks mapped from its start."""

    def __init__(self, dev: Device, size: int, granularity: int, flags: int, hint: int = 0) -> None:
        self.device, self.size, self._flags = dev, size, flags
        at = c_uint64()
        code = dev.driver.raw("cuMemAddressReserve", byref(at), size, granularity, hint, 0)
        if code == _driver.OUT_OF_MEMORY:
            raise CapacityError(f"{size} bytes of addresses, which this process does not have left", "reserve fewer; ulimit -v may limit them")
        if code != 0:
            raise dev.driver.error("cuMemAddressReserve", code, f"{size} bytes of addresses")
        self.address = int(at.value)
        self.chunks: List[int] = []  # sizes
        self.mapped = 0

    def attach(self, handles: List[Handle]) -> None:
        """Maps chunks behind the mapped ones, and grants the device access. On an error nothing changes."""
        d = self.device.driver
        at, done = self.address + self.mapped, []
        need = sum(h.size for h in handles)
        if need > self.size - self.mapped:
            raise CapacityError(f"{need} bytes more in a range of {self.size}, of which {self.mapped} are in use", "reserve a larger range")
        try:
            for h in handles:
                code = d.raw("cuMemMap", at, h.size, 0, h.number, 0)
                if code in (_driver.NOT_SUPPORTED, _INVALID_VALUE):
                    raise MismatchError(f"memory of another size than the declared {h.size} bytes", "the exporter is at fault")
                if code != 0:
                    raise d.error("cuMemMap", code, f"{h.size} bytes")
                done.append((at, h.size))
                access = _driver.Access(_driver.Location(_driver.DEVICE_LOCATION, self.device.handle), self._flags)
                d.call("cuMemSetAccess", at, h.size, byref(access), 1, what=f"device {self.device.ordinal}")
                at += h.size
        except BaseException:
            for start, size in done:
                d.raw("cuMemUnmap", start, size)
            raise
        self.chunks += [h.size for h in handles]
        self.mapped += need

    def detach(self, keep: int) -> None:
        """Unmaps the chunks behind the first ``keep``. No work may use them any more."""
        while len(self.chunks) > keep:
            size = self.chunks[-1]
            self.device.driver.call("cuMemUnmap", self.address + self.mapped - size, size)
            self.chunks.pop()
            self.mapped -= size

    @property
    def owned(self) -> bool:
        """Whether this package mapped the memory, and may unmap it."""
        return True

    def close(self) -> None:
        """Unmaps everything and frees the addresses. The caller has waited for all work on them. Idempotent."""
        self.detach(0)
        if self.address:
            self.device.driver.call("cuMemAddressFree", self.address, self.size)
            self.address = 0


class Foreign(Range):
    """Memory that another allocator of this process mapped. It keeps the owner object alive."""

    def __init__(self, dev: Device, address: int, chunks: List[int], owner: Any) -> None:
        self.device, self.address, self.chunks, self._owner = dev, address, chunks, owner
        self.size = self.mapped = sum(chunks)

    @property
    def owned(self) -> bool:
        return False

    def close(self) -> None:
        self.address, self._owner = 0, None


_ALLOCATE = "allocate it with cuvmm.empty, or in PyTorch under torch.cuda.use_mem_pool(cuvmm.torch.pool())"


def chunks_at(address: int, size: int) -> "tuple[Device, List[Handle]]":
    """Returns handles of the allocations behind an address range, which must begin at the start of the first one.

    The driver returns the allocation at an address, but not its extent. Adjacent granules of one allocation have the same
    handle, which gives its size.
    """
    d = _driver.driver()
    code, first = _retain(address)
    if code == _INVALID_VALUE:
        raise NotSupported(f"memory at {address:#x}, which the driver cannot export, since it comes from cudaMalloc or a pool of the driver", _ALLOCATE)
    if code != 0:
        raise d.error("cuMemRetainAllocationHandle", code, f"memory at {address:#x}")
    handles: List[Handle] = []
    try:
        p = Properties()
        d.call("cuMemGetAllocationPropertiesFromHandle", byref(p), first)
        if p.location.type != _driver.DEVICE_LOCATION or not p.handles & _driver.POSIX_FD:
            raise NotSupported(f"memory at {address:#x}, which was created without shareable handles, or not on a device", _ALLOCATE)
        dev = next(other for other in _driver.devices() if other.handle == p.location.id)
        granularity = dev.granularity(p)
        if address % granularity or _number(address - granularity) == first:
            raise NotSupported(f"memory at {address:#x}, which is not the start of an allocation: other processes map whole allocations",
                               "export the tensor that begins the allocation; " + _ALLOCATE)
        number, at = first, address
        while at < address + size:
            start = at
            while _number(at) == number:
                at += granularity
            if at == start:
                raise NotSupported(f"a gap at {at:#x}, within the memory to export", _ALLOCATE)
            h = c_uint64()
            d.call("cuMemRetainAllocationHandle", byref(h), start)
            handles.append(Handle(dev, int(h.value), at - start))
            number = _number(at) if at < address + size else 0
        return dev, handles
    except BaseException:
        for handle in handles:
            handle.release()
        raise
    finally:
        d.call("cuMemRelease", first)


def _retain(address: int) -> "tuple[int, int]":
    h = c_uint64()
    return _driver.driver().raw("cuMemRetainAllocationHandle", byref(h), address), int(h.value)


def _number(address: int) -> int:
    """Returns the handle of the allocation at an address, or 0 if there is none."""
    code, number = _retain(address)
    if code != 0:
        return 0
    _driver.driver().call("cuMemRelease", number)
    return number
