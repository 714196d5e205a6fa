"""Address ranges, with memory of this or another process mapped from their start."""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import byref, c_char, c_int, c_uint64, c_void_p
from typing import Any, List, NamedTuple, Union

from . import _driver
from ._descriptor import Descriptor
from ._driver import Device, Properties
from ._undo import File, Owned, Passing, Undo
from .errors import CapacityError, Error, FilesError, MismatchError, NotSupported

_INVALID_VALUE, _INVALID_HANDLE, _UNKNOWN = 1, 400, 999


class Handle:
    """A reference to physical memory, until ``close``. Mappings hold references of their own. ``undo`` is the owner's, which notes it."""

    def __init__(self, dev: Device, size: int, undo: Undo) -> None:
        self.device, self.size, self._cell = dev, size, c_uint64()
        self._owned = Owned(dev.driver, "cuMemRelease", self._cell)
        undo.own(self)

    def make(self, name: str, *args: Any) -> int:
        """Makes the call that acquires the reference, whose first argument receives it."""
        return self._owned.make(name, byref(self._cell), *args)

    @property
    def number(self) -> int:
        return int(self._cell.value)

    def export(self, undo: Undo) -> int:
        """Returns a new file descriptor of the memory, which the caller closes by its undo."""
        fd: _Export = undo.own(_Export())
        self.device.driver.call("cuMemExportToShareableHandle", byref(fd.cell), self.number, _driver.POSIX_FD, 0)
        os.set_inheritable(fd.number, False)
        return fd.number

    def close(self) -> None:
        self._owned.close()


class _Export(File):
    """A descriptor that the driver writes to a cell."""

    cell = c_int(-1)  # of one that was interrupted before it had a cell of its own

    def __init__(self) -> None:
        super().__init__()
        self.cell = c_int(-1)

    @property
    def number(self) -> int:
        return self.cell.value

    @property
    def live(self) -> bool:
        return self.cell.value >= 0 and not self._closed


class PinnedFile(File):
    """Pins a file descriptor of another process's memory, so that this process can export the memory again."""

    def pin(self, fd: int) -> None:
        try:
            self.open(os.dup, fd)
        except OSError as e:
            raise FilesError(f"the descriptor of a chunk could not be duplicated: {e.strerror}", "raise this process's limit of open files (ulimit -n)") from None

    def export(self, undo: Undo) -> int:
        """Returns a new file descriptor of the memory, which the caller closes by its undo."""
        copy: PinnedFile = undo.own(PinnedFile())
        copy.pin(self.number)
        return copy.number


Exportable = Union[Handle, PinnedFile]


def create(dev: Device, size: int, undo: Undo) -> Handle:
    """Creates memory that can be exported as file descriptors."""
    h = Handle(dev, size, undo)
    code = h.make("cuMemCreate", size, byref(dev.properties()), 0)
    if code != 0:
        raise dev.driver.error("cuMemCreate", code, f"{size} bytes on device {dev.ordinal}")
    return h


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

    def descriptor(self, fd: int, size: int, undo: Undo) -> Handle:
        return self._import(c_void_p(fd), _driver.POSIX_FD, size, "a file descriptor", undo)

    def fabric(self, handle: bytes, size: int, undo: Undo) -> Handle:
        raw = (c_char * len(handle)).from_buffer_copy(handle)
        return self._import(ctypes.cast(raw, c_void_p), _driver.FABRIC, size, "a fabric handle", undo)

    def _import(self, os_handle: c_void_p, kind: int, size: int, what: str, undo: Undo) -> Handle:
        d = self.device.driver
        handle = Handle(self.device, size, undo)
        code = handle.make("cuMemImportFromShareableHandle", os_handle, kind)
        if code in (_UNKNOWN, _INVALID_HANDLE, _INVALID_VALUE):
            raise MismatchError(f"{what} that is not GPU memory of this driver ({code})", "the exporter is at fault")
        if code != 0:
            raise d.error("cuMemImportFromShareableHandle", code, "memory of another process")
        p = Properties()
        d.call("cuMemGetAllocationPropertiesFromHandle", byref(p), handle.number)
        if (p.location.type, p.location.id) != self._location:
            raise MismatchError(f"memory at location {p.location.type}, {p.location.id}, where {self._location} was declared", "the exporter is at fault")
        return handle


class _Mapping(NamedTuple):
    size: int
    owned: Owned


class Range:
    """A reserved address range of one device, fixed for life, with consecutive chunks mapped from its start. ``undo`` is the owner's, which notes it."""

    def __init__(self, dev: Device, size: int, granularity: int, flags: int, undo: Undo, hint: int = 0) -> None:
        self.device, self.size, self._flags, self._cell = dev, size, flags, c_uint64()
        self._mappings: List[_Mapping] = []
        self._count = 0  # of the mappings that are the range's; those behind are to be unmapped
        self._addresses = Owned(dev.driver, "cuMemAddressFree", self._cell, size)
        undo.own(self)
        code = self._addresses.make("cuMemAddressReserve", byref(self._cell), size, granularity, hint, 0)
        if code == _driver.OUT_OF_MEMORY:
            raise CapacityError(f"{size} bytes of addresses, which this process does not have left", "reserve fewer; ulimit -v may limit them")
        if code != 0:
            raise dev.driver.error("cuMemAddressReserve", code, f"{size} bytes of addresses")

    @property
    def address(self) -> int:
        return int(self._cell.value)

    @property
    def count(self) -> int:
        """How many chunks are mapped."""
        return self._count

    @property
    def sizes(self) -> List[int]:
        """Those of the chunks that are mapped."""
        return [m.size for m in self._mappings[:self._count]]

    @property
    def mapped(self) -> int:
        return sum(self.sizes)

    def attach(self, handles: List[Handle]) -> None:
        """Maps chunks behind the mapped ones, and grants the device access. On an error nothing changes."""
        d = self.device.driver
        self.detach(self._count)
        at, need = self.address + self.mapped, sum(h.size for h in handles)
        if need > self.size - self.mapped:
            raise CapacityError(f"{need} bytes more in a range of {self.size}, of which {self.mapped} are in use", "reserve a larger range")
        try:
            for h in handles:
                m = _Mapping(h.size, Owned(d, "cuMemUnmap", at, h.size))
                self._mappings.append(m)
                code = m.owned.make("cuMemMap", at, h.size, 0, h.number, 0)
                if code in (_driver.NOT_SUPPORTED, _INVALID_VALUE):
                    raise MismatchError(f"memory of another size than the declared {h.size} bytes", "the exporter is at fault")
                if code != 0:
                    raise d.error("cuMemMap", code, f"{h.size} bytes")
                access = _driver.Access(_driver.Location(_driver.DEVICE_LOCATION, self.device.handle), self._flags)
                d.call("cuMemSetAccess", at, h.size, byref(access), 1, what=f"device {self.device.ordinal}")
                at += h.size
            self._count = len(self._mappings)
        except BaseException:
            with contextlib.suppress(Error):  # the next change of the range, or its close, unmaps them
                self.detach(self._count)
            raise

    def protect(self) -> None:
        """Leaves the device read access alone. No work may write any more."""
        self._flags = _driver.READ
        access = _driver.Access(_driver.Location(_driver.DEVICE_LOCATION, self.device.handle), self._flags)
        self.device.driver.call("cuMemSetAccess", self.address, self.mapped, byref(access), 1, what=f"device {self.device.ordinal}")

    def detach(self, keep: int) -> None:
        """Unmaps the chunks behind the first ``keep``. No work may use them any more."""
        self._count = min(self._count, keep)
        while len(self._mappings) > self._count:
            self._mappings[-1].owned.close()
            del self._mappings[-1]

    @property
    def owned(self) -> bool:
        """Whether this package mapped the memory, and may unmap it."""
        return True

    def close(self) -> None:
        """Unmaps everything and frees the addresses. The caller has waited for all work on them. Idempotent."""
        self.detach(0)
        self._addresses.close()


class Foreign(Range):
    """Memory that another allocator of this process mapped. It keeps the owner object alive."""

    def __init__(self, dev: Device, address: int, size: int, owner: Any, undo: Undo) -> None:
        self.device, self.size, self._cell, self._owner = dev, size, c_uint64(address), owner
        undo.own(self)

    @property
    def mapped(self) -> int:
        return self.size

    def detach(self, keep: int) -> None:
        pass

    @property
    def owned(self) -> bool:
        return False

    def close(self) -> None:
        self._owner = None


_ALLOCATE = "allocate it with cuvmm.empty, or in PyTorch under torch.cuda.use_mem_pool(cuvmm.torch.pool())"


def chunks_at(address: int, size: int, undo: Undo) -> "tuple[Device, List[Handle]]":
    """Returns handles of the allocations behind an address range, which must begin at the start of the first one.

    The driver returns the allocation at an address, but not its extent. Adjacent granules of one allocation have the same
    handle, which gives its size.
    """
    d, any_device = _driver.driver(), _driver.device(0)
    passing = Passing()
    try:
        first = Handle(any_device, 0, passing)
        code = first.make("cuMemRetainAllocationHandle", address)
        if code == _INVALID_VALUE:
            raise NotSupported(f"memory at {address:#x}, which the driver cannot export, since it comes from cudaMalloc or a pool of the driver", _ALLOCATE)
        if code != 0:
            raise d.error("cuMemRetainAllocationHandle", code, f"memory at {address:#x}")
        p = Properties()
        d.call("cuMemGetAllocationPropertiesFromHandle", byref(p), first.number)
        if p.location.type != _driver.DEVICE_LOCATION or not p.handles & _driver.POSIX_FD:
            raise NotSupported(f"memory at {address:#x}, which was created without shareable handles, or not on a device", _ALLOCATE)
        dev = next(other for other in _driver.devices() if other.handle == p.location.id)
        granularity = dev.granularity(p)
        if address % granularity or _number(dev, address - granularity) == first.number:
            raise NotSupported(f"memory at {address:#x}, which is not the start of an allocation: other processes map whole allocations",
                               "export the tensor that begins the allocation; " + _ALLOCATE)
        handles: List[Handle] = []
        number, at = first.number, address
        while at < address + size:
            start = at
            while _number(dev, at) == number:
                at += granularity
            if at == start:
                raise NotSupported(f"a gap at {at:#x}, within the memory to export", _ALLOCATE)
            h = Handle(dev, at - start, undo)
            code = h.make("cuMemRetainAllocationHandle", start)
            if code != 0:
                raise d.error("cuMemRetainAllocationHandle", code, f"memory at {start:#x}")
            handles.append(h)
            number = _number(dev, at) if at < address + size else 0
        return dev, handles
    finally:
        passing.abandon()


def _number(dev: Device, address: int) -> int:
    """Returns the handle of the allocation at an address, or 0 if there is none."""
    passing = Passing()
    try:
        h = Handle(dev, 0, passing)
        return h.number if h.make("cuMemRetainAllocationHandle", address) == 0 else 0
    finally:
        passing.abandon()
