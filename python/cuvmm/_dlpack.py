"""DLPack capsules of version 1.1, and of the form before versions, made with ctypes.

A consumer calls a tensor's deleter when it is done with the memory, from any thread, possibly after the interpreter was
finalized. The deleters are Python functions, so an atexit function removes those of all remaining tensors; their memory
ends with the process.

A capsule has no destructor. A consumer that fails, as NumPy does at memory of a GPU, destroys it with an exception pending,
with which Python code can neither run nor return. Instead this module keeps each capsule until a consumer has taken it, or
nothing else refers to it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Sequence, Tuple

CPU, CUDA = 1, 2
_READ_ONLY, _IS_COPIED = 1, 2
_VERSION = (1, 1)


class _Device(Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class _DataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(Structure):
    _fields_ = [("data", c_void_p), ("device", _Device), ("ndim", c_int32), ("dtype", _DataType), ("shape", POINTER(c_int64)),
                ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


class _Version(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32)]


_Deleter = CFUNCTYPE(None, c_void_p)


class _Managed(Structure):
    _fields_ = [("tensor", _Tensor), ("manager", c_void_p), ("deleter", c_void_p)]


class _ManagedVersioned(Structure):
    _fields_ = [("version", _Version), ("manager", c_void_p), ("deleter", c_void_p), ("flags", c_uint64), ("tensor", _Tensor)]


_lock = threading.RLock()  # reentrant: the collector may destroy a capsule in any call
#: Everything that must outlive a consumer, by the address of its managed tensor.
_out: Dict[int, Tuple[Any, ...]] = {}
#: The capsules that no consumer had taken when they were looked at last, by the same address.
_capsules: Dict[int, Any] = {}


def _delete(address: int) -> None:
    _clear()  # a consumer that failed may have an exception pending
    with _lock:
        keep = _out.pop(address, None), _capsules.pop(address, None)
    del keep  # outside of the lock, since it may be the last reference to the array


_deleter = _Deleter(_delete)
_names = {False: b"dltensor", True: b"dltensor_versioned"}
_api = ctypes.PyDLL(None)
_new = _api.PyCapsule_New
_new.argtypes, _new.restype = [c_void_p, c_char_p, c_void_p], ctypes.py_object
_is_valid = _api.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, c_char_p], ctypes.c_int
_clear = _api.PyErr_Clear
_clear.argtypes, _clear.restype = [], None

# Never freed: consumers may use them while the modules are torn down.
_api.Py_IncRef(ctypes.py_object(_deleter))
_api.Py_IncRef(ctypes.py_object(_out))


def _references(address: int, capsules: Dict[int, Any]) -> int:
    c = capsules.get(address)
    return sys.getrefcount(c)


_ALONE = _references(0, {0: object()})  # which is not the same in all versions of Python


def release_untaken() -> None:
    """Releases the tensors of capsules that no consumer took and nothing refers to any more."""
    with _lock:
        gone: List[Any] = []
        for address in list(_capsules):  # the collector may call deleters, which remove others, in any step
            if not any(_is_valid(_capsules.get(address), name) for name in _names.values()):
                _capsules.pop(address, None)  # its consumer calls the deleter
            elif _references(address, _capsules) == _ALONE:
                gone.append(_out.pop(address, None))  # first: a capsule without a tensor is released by the next call
                gone.append(_capsules.pop(address, None))
    del gone  # outside of the lock, as above


@atexit.register
def _at_exit() -> None:
    """Lets consumers keep what they have: the memory of their tensors is never freed, and no deleter is called any more."""
    with _lock:
        for keep in list(_out.values()):
            keep[0].deleter = None


def _in_child() -> None:
    """A thread of the parent, which does not exist here, may have held the lock."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def capsule(owner: Any, pointer: int, shape: Sequence[int], strides: Sequence[int], code: int, bits: int, device: Tuple[int, int], *, versioned: bool,
            readonly: bool, copied: bool) -> Any:
    """Makes a capsule of elements, ``strides`` elements apart in each dimension. It keeps ``owner`` alive until the consumer is done."""
    dims, steps = (c_int64 * len(shape))(*shape), (c_int64 * len(shape))(*strides)
    managed = _ManagedVersioned() if versioned else _Managed()
    t = managed.tensor
    t.data, t.device, t.ndim = pointer, _Device(*device), len(shape)
    t.dtype, t.byte_offset = _DataType(code, bits, 1), 0
    t.shape, t.strides = ctypes.cast(dims, POINTER(c_int64)), ctypes.cast(steps, POINTER(c_int64))
    managed.deleter = ctypes.cast(_deleter, c_void_p)
    if isinstance(managed, _ManagedVersioned):
        managed.version = _Version(*_VERSION)
        managed.flags = (_READ_ONLY if readonly else 0) | (_IS_COPIED if copied else 0)
    address = ctypes.addressof(managed)
    made = _new(address, _names[versioned], None)
    release_untaken()
    with _lock:
        _out[address], _capsules[address] = (managed, dims, steps, owner), made
    return made
