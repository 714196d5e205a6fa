"""The CUDA driver, called with ctypes: the real ``libcuda.so.1``, or the project's software driver in its place."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any, Dict, List, NamedTuple, Optional, Set

from ._undo import Owned, Passing, Results, Undo
from .errors import ArgumentError, DriverError, ForkedError, NotSupported, OutOfMemory

#: The results of driver calls that this package distinguishes.
OUT_OF_MEMORY, DEINITIALIZED, NO_DEVICE, NOT_READY, NOT_SUPPORTED = 2, 4, 100, 600, 801

POSIX_FD = 1
FABRIC = 8
READ, READ_WRITE = 1, 3
_PINNED = 1
DEVICE_LOCATION, HOST_LOCATION, NUMA_LOCATION = 1, 2, 3
_REGISTER_PORTABLE, _REGISTER_DEVICEMAP = 1, 2
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_RELAXED = 2
_STREAM_MEM_OPS_64 = 122
_FENCE = 256


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("win32", c_void_p), ("compression", c_ubyte),
                ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


_CALLS: Dict[str, List[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetUuid_v2": [c_char * 16, c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceTotalMem_v2": [POINTER(c_size_t), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamQuery": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamIsCapturing": [c_void_p, POINTER(c_int)],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuStreamWriteValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuStreamWaitValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventDestroy_v2": [c_void_p],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemsetD8Async": [c_uint64, c_ubyte, c_size_t, c_void_p],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostGetDevicePointer_v2": [POINTER(c_uint64), c_void_p, c_uint],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(Access), c_size_t],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(Properties), c_uint],
    "cuMemGetAllocationPropertiesFromHandle": [POINTER(Properties), c_uint64],
    "cuMemExportToShareableHandle": [c_void_p, c_uint64, c_uint, c_uint64],
    "cuMemImportFromShareableHandle": [POINTER(c_uint64), c_void_p, c_uint],
    "cuMemRetainAllocationHandle": [POINTER(c_uint64), c_void_p],
}

_HINTS = {
    OUT_OF_MEMORY: "free memory of this device first: followers whose publishers are gone keep theirs until they are closed, and cuvmm top lists the processes that hold memory",
    NO_DEVICE: "make a GPU visible to this process (CUDA_VISIBLE_DEVICES, the container's devices)",
    NOT_SUPPORTED: "the driver or the device cannot do it",
    DEINITIALIZED: "the process is ending",
}


class Driver:
    """The driver's calls. A process loads one, by :func:`driver`."""

    def __init__(self, path: str) -> None:
        try:
            self._lib = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
        except OSError as e:
            raise NotSupported(f"the CUDA driver could not be loaded: {e}",
                               "install NVIDIA's driver, give the container access to it, or set CUVMM_LIBCUDA to the software driver: go build -buildmode=c-shared -o libcuda.so.1 ./cmd/libcuda") from None
        self.path = path
        self._pid = os.getpid()
        for name, types in _CALLS.items():
            call = getattr(self._lib, name, None)
            if call is not None:
                call.argtypes, call.restype = types, c_int
        self._name = self._lib.cuGetErrorName
        self._name.argtypes, self._name.restype = [c_int, POINTER(c_char_p)], c_int
        self.call("cuInit", 0)

    def raw(self, name: str, *args: Any) -> int:
        """Makes a call and returns its result, which the last argument records if it is of Results."""
        self.check_process()
        call = getattr(self._lib, name, None)
        if call is None:
            raise NotSupported(f"this driver has no {name}", "install a driver for CUDA 12 or later")
        if args and isinstance(args[-1], Results):
            results: Results = args[-1]
            results.extend(map(call, *([a] for a in args[:-1])))  # one step for whatever interrupts Python
            return results[-1]
        return int(call(*args))

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("CUDA was initialised before this process forked", "start workers with the spawn method, or initialise after the fork")

    def call(self, name: str, *args: Any, what: str = "") -> None:
        """Makes a call, and raises an error if it fails."""
        code = self.raw(name, *args)
        if code != 0:
            raise self.error(name, code, what)

    def error(self, name: str, code: int, what: str = "") -> Exception:
        text = c_char_p()
        self._name(code, byref(text))
        shown = (text.value or b"an unknown result").decode()
        name = name.split("_v")[0]
        if code == OUT_OF_MEMORY:
            return OutOfMemory(f"{what + ': ' if what else ''}{name} returned {shown} ({code})", _HINTS[code])
        return DriverError(name, code, shown, what, _HINTS.get(code, ""))


_lock = threading.Lock()
_loaded: Optional[Driver] = None
_devices: Dict[int, "Device"] = {}


def _in_child() -> None:
    """A thread of the parent, which does not exist here, may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def driver() -> Driver:
    """The process's driver: ``CUVMM_LIBCUDA``, or libcuda.so.1."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = Driver(os.environ.get("CUVMM_LIBCUDA") or "libcuda.so.1")
        return _loaded


def device(ordinal: int) -> "Device":
    """A device, as this process counts them."""
    d = driver()
    with _lock:
        known = _devices.get(ordinal)
        if known is None:
            known = _devices[ordinal] = Device(d, ordinal)
        return known


class MemoryInfo(NamedTuple):
    """Bytes of a device's memory: what is free, for all processes together, and what there is."""

    free: int
    total: int


def memory_info(ordinal: int = 0) -> MemoryInfo:
    """The memory of a device, as the driver counts it at this moment."""
    free, total = c_size_t(), c_size_t()
    with device(ordinal).current() as d:
        d.call("cuMemGetInfo_v2", byref(free), byref(total))
    return MemoryInfo(int(free.value), int(total.value))


def devices() -> List["Device"]:
    n = c_int()
    driver().call("cuDeviceGetCount", byref(n))
    return [device(i) for i in range(n.value)]


class Device:
    """A device and its primary context, which PyTorch and CuPy use too. The context is retained until the process ends."""

    def __init__(self, d: Driver, ordinal: int) -> None:
        self.driver = d
        n = c_int()
        d.call("cuDeviceGetCount", byref(n))
        if not 0 <= ordinal < n.value:
            raise ArgumentError(f"device {ordinal}, where this process sees {n.value}", "check CUDA_VISIBLE_DEVICES")
        self.ordinal = ordinal
        handle = c_int()
        d.call("cuDeviceGet", byref(handle), ordinal)
        self.handle = handle.value
        uuid = (c_char * 16)()
        d.call("cuDeviceGetUuid_v2", uuid, self.handle)
        self.uuid = uuid.raw
        total = c_size_t()
        d.call("cuDeviceTotalMem_v2", byref(total), self.handle)
        self.memory = int(total.value)
        context = c_void_p()
        d.call("cuDevicePrimaryCtxRetain", byref(context), self.handle, what=f"device {ordinal}")
        self.context = context
        self._fencing, self._fence = threading.Lock(), self._new_fence()
        with self.current():
            self._allocate_fence()

    def _new_fence(self) -> "tuple[Owned, c_uint64]":
        cell = c_uint64()
        return Owned(self.driver, "cuMemFree_v2", cell), cell

    def _allocate_fence(self) -> int:
        if self._fence[0].live:
            return 0
        self._fence = self._new_fence()
        fence, cell = self._fence
        return fence.make("cuMemAlloc_v2", byref(cell), _FENCE)

    def attribute(self, number: int) -> int:
        v = c_int()
        return v.value if self.driver.raw("cuDeviceGetAttribute", byref(v), number, self.handle) == 0 else 0

    def stream_words(self) -> bool:
        """Whether streams of the device can write 64-bit words, and wait for them."""
        return self.attribute(_STREAM_MEM_OPS_64) > 0

    def current(self) -> "Current":
        """Within the block, this device's context is current and the thread's capture mode is relaxed."""
        return Current(self)

    def properties(self, handles: int = POSIX_FD, compression: int = 0, rdma: int = 0) -> Properties:
        return Properties(type=_PINNED, handles=handles, location=Location(DEVICE_LOCATION, self.handle), compression=compression, rdma=rdma)

    def granularity(self, p: Properties) -> int:
        n = c_size_t()
        self.driver.call("cuMemGetAllocationGranularity", byref(n), byref(p), 0)
        return int(n.value)

    def can_access(self, other: "Device") -> bool:
        if other.ordinal == self.ordinal:
            return True
        can = c_int()
        self.driver.call("cuDeviceCanAccessPeer", byref(can), self.handle, other.handle)
        return can.value != 0

    def synchronize(self) -> None:
        """Waits for all work of the context, on every stream.

        cuCtxSynchronize would end captures of any stream, in every capture mode. Freeing an allocation waits as well, and
        leaves captures alone.
        """
        self.driver.check_process()
        with self._fencing, self.current() as d:
            code = self._allocate_fence()
            if code != 0:
                raise d.error("cuMemAlloc_v2", code, "memory to wait for all work with")
            self._fence[0].close()
            self._allocate_fence()  # for the next call, when the device may be full


class Current:
    """Makes a device's context current, in a with statement. Whatever interrupts it, the thread gets back what it had."""

    _set = _relaxed = Results()  # of one that was interrupted while it was made

    def __init__(self, dev: Device) -> None:
        self._device, self._thread = dev, threading.get_ident()
        self._before, self._mode = c_void_p(), c_int(_RELAXED)
        self._set, self._unset, self._relaxed, self._unrelaxed = Results(), Results(), Results(), Results()

    def __enter__(self) -> Driver:
        d = self._device.driver
        try:
            d.call("cuCtxGetCurrent", byref(self._before))
            d.call("cuCtxSetCurrent", self._device.context, self._set)
            d.call("cuThreadExchangeStreamCaptureMode", byref(self._mode), self._relaxed)
            return d
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        interrupted: Optional[BaseException] = None
        for did, undone, name, argument in ((self._relaxed, self._unrelaxed, "cuThreadExchangeStreamCaptureMode", byref(self._mode)),
                                            (self._set, self._unset, "cuCtxSetCurrent", self._before)):
            for attempt in range(2):  # the second if the first failed, or was interrupted before the call
                if did[-1:] != [0] or undone[-1:] == [0]:
                    break
                try:
                    self._device.driver.raw(name, argument, undone)
                except ForkedError:
                    break
                except BaseException as e:
                    interrupted = e
        if interrupted is not None:
            try:
                raise interrupted
            finally:
                del interrupted

    def __del__(self) -> None:
        if self._set and threading.get_ident() == self._thread:  # nothing is left to do, unless Ctrl-C came right at the end of the block
            self.__exit__()


class HostPin:
    """Host memory that the device's streams can use, at ``base`` of its addresses, once ``make`` has pinned it.

    The memory stays until it is unpinned, even if its owner is lost: its address must not get another owner before.
    """

    _all: "Set[HostPin]" = set()

    def __init__(self, dev: Device, memory: Any) -> None:
        self._device, self._base, self._memory = dev, c_uint64(), memory
        self._address, self._size = c_void_p(ctypes.addressof(memory)), ctypes.sizeof(memory)
        self._pin = Owned(dev.driver, "cuMemHostUnregister", self._address)

    def make(self) -> None:
        self._all.add(self)
        with self._device.current() as d:
            code = self._pin.make("cuMemHostRegister_v2", self._address, self._size, _REGISTER_PORTABLE | _REGISTER_DEVICEMAP)
            if code != 0:
                raise d.error("cuMemHostRegister_v2", code, "a page of fence words")
            d.call("cuMemHostGetDevicePointer_v2", byref(self._base), self._address, 0)

    @property
    def base(self) -> int:
        return int(self._base.value)

    def close(self) -> None:
        if self._pin.live:
            with self._device.current():
                self._pin.close()
        self._all.discard(self)


class Stream:
    """An internal stream, unordered with any other. ``undo`` is its owner's."""

    def __init__(self, dev: Device, undo: Optional[Undo] = None) -> None:
        self.device, self.handle = dev, c_void_p()
        self._owned = Owned(dev.driver, "cuStreamDestroy_v2", self.handle)
        if undo is not None:
            undo.own(self)
        try:
            with dev.current() as d:
                code = self._owned.make("cuStreamCreate", byref(self.handle), _NON_BLOCKING)
                if code != 0:
                    raise d.error("cuStreamCreate", code)
        except BaseException:
            mine = Passing()
            mine.own(self)
            mine.abandon()
            raise

    @property
    def live(self) -> bool:
        return self._owned.live

    def done(self) -> bool:
        with self.device.current() as d:
            code = d.raw("cuStreamQuery", self.handle)
        if code not in (0, NOT_READY):
            raise self.device.driver.error("cuStreamQuery", code)
        return code == 0

    def synchronize(self) -> None:
        with self.device.current() as d:
            d.call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Gives the stream back; work that is on it goes on. Idempotent."""
        if self._owned.live:
            with self.device.current():
                self._owned.close()


class Event:
    """A point on a stream. Use it in a with statement."""

    _owned: Optional[Owned] = None

    def __init__(self, dev: Device, stream: Any) -> None:
        self.device, self._stream, self._handle = dev, stream, c_void_p()
        self._owned = Owned(dev.driver, "cuEventDestroy_v2", self._handle)

    def __enter__(self) -> "Event":
        try:
            with self.device.current() as d:
                assert self._owned is not None
                code = self._owned.make("cuEventCreate", byref(self._handle), _DISABLE_TIMING)
                if code != 0:
                    raise d.error("cuEventCreate", code)
                d.call("cuEventRecord", self._handle, self._stream)
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """The driver keeps what is pending of an event that is destroyed. What cannot be destroyed is tried again later."""
        undo = Passing()
        undo.own(self)
        undo.abandon()

    def close(self) -> None:
        if self._owned is not None and self._owned.live:
            with self.device.current():
                self._owned.close()

    def __del__(self) -> None:
        if self._owned is not None and self._owned.live:
            self.__exit__()  # Ctrl-C came right at the end of the block

    def hold(self, stream: Any) -> None:
        """Makes later work on the stream wait for this point."""
        with self.device.current() as d:
            d.call("cuStreamWaitEvent", stream, self._handle, 0)

    def passed(self) -> bool:
        with self.device.current() as d:
            code = d.raw("cuEventQuery", self._handle)
        if code not in (0, NOT_READY):
            raise self.device.driver.error("cuEventQuery", code)
        return code == 0
