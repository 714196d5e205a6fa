"""Python's stacks of allocations, for snapshots: the library calls back behind each allocation while a history is kept.

The callback runs with no lock of the library held, on the thread that allocates. Threads without Python frames, such as autograd's, have
empty stacks.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from types import CodeType, FrameType
from typing import Any, Deque, Dict, List, Optional, Tuple

from . import _torch_library as library

_DEPTH = 64  # frames that are kept of a stack, the innermost first
_Stack = Tuple[Tuple[CodeType, int], ...]
_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)


class Stacks:
    """The stacks of the latest allocations, by device and address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: Deque[Tuple[int, int, _Stack]] = deque()
        self._note = _TYPE(self._called)  # the library has its address, so it stays

    def record(self, events: int) -> None:
        """Keeps the stacks of so many of the latest allocations, and forgets earlier ones; 0 stops it."""
        with self._lock:
            self._latest = deque(maxlen=events)
        library.loaded().cuvmm_torch_allocated(self._note if events > 0 else None)

    def _called(self, device: int, block: int) -> None:
        frame: Optional[FrameType] = sys._getframe(1)
        stack: List[Tuple[CodeType, int]] = []
        while frame is not None and len(stack) < _DEPTH:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        with self._lock:
            self._latest.append((device, block, tuple(stack)))

    def annotate(self, snapshot: Dict[str, Any]) -> None:
        """Fills in the frames of the allocations and of the live blocks of a snapshot in PyTorch's form."""
        with self._lock:
            latest = list(self._latest)
        by_block: Dict[Tuple[int, int], List[_Stack]] = {}
        for device, address, stack in latest:
            by_block.setdefault((device, address), []).append(stack)
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                known = by_block.get((segment["device"], block["address"]))
                if known and block["state"] == "active_allocated":
                    block["frames"] = _frames(known[-1])
        for device, trace in enumerate(snapshot["device_traces"]):
            for event in reversed(trace):
                known = by_block.get((device, event["addr"])) if event["action"] == "alloc" else None
                if known:
                    event["frames"] = _frames(known.pop())


def _frames(stack: _Stack) -> List[Dict[str, Any]]:
    return [{"name": code.co_name, "filename": code.co_filename, "line": line} for code, line in stack]
