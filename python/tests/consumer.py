"""A consumer of DLPack capsules, as PyTorch and CuPy are, for tests."""

from __future__ import annotations

import ctypes
from typing import Any, Tuple

from cuvmm import _dlpack

_api = ctypes.PyDLL(None)
_get = _api.PyCapsule_GetPointer
_get.argtypes, _get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_name = _api.PyCapsule_GetName
_name.argtypes, _name.restype = [ctypes.py_object], ctypes.c_char_p
_rename = _api.PyCapsule_SetName
_rename.argtypes, _rename.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


class Tensor:
    """What a consumer has: it takes the capsule over, and calls the deleter once, in ``free``."""

    def __init__(self, capsule: Any) -> None:
        self.name = _name(capsule)
        kind = _dlpack._ManagedVersioned if self.name == b"dltensor_versioned" else _dlpack._Managed
        self.address = _get(capsule, self.name)
        _rename(capsule, USED[self.name])
        self.managed: Any = kind.from_address(self.address)

    @property
    def pointer(self) -> int:
        return int(self.managed.tensor.data or 0)

    @property
    def shape(self) -> Tuple[int, ...]:
        t = self.managed.tensor
        return tuple(t.shape[i] for i in range(t.ndim))

    @property
    def strides(self) -> Tuple[int, ...]:
        t = self.managed.tensor
        return tuple(t.strides[i] for i in range(t.ndim))

    def free(self) -> None:
        if self.managed.deleter:
            _dlpack._Deleter(self.managed.deleter)(self.address)
