"""What the tests of interruptions and failures share: Ctrl-C at a given place of the package, and a library one of whose calls fails."""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from .support import ROOT

PACKAGE = str(ROOT / "python/cuvmm") + os.sep
#: What the driver gives, and the call that takes it back.
PAIRS = {"cuMemHostRegister_v2": "cuMemHostUnregister", "cuMemAddressReserve": "cuMemAddressFree", "cuStreamCreate": "cuStreamDestroy_v2", "cuMemMap": "cuMemUnmap",
         "cuMemCreate": "cuMemRelease", "cuMemImportFromShareableHandle": "cuMemRelease", "cuMemRetainAllocationHandle": "cuMemRelease",
         "cuEventCreate": "cuEventDestroy_v2", "cuMemAlloc_v2": "cuMemFree_v2"}
#: In these instructions, at their end, CPython looks whether Ctrl-C was pressed.
LOOKS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}
Place = Tuple[Any, int]


class Library:
    """The driver's library, which counts what it gives and takes, and fails one call on demand."""

    def __init__(self, real: Any) -> None:
        self._real, self._lock = real, threading.Lock()
        self.held: Dict[str, int] = dict.fromkeys(PAIRS.values(), 0)
        self.wrong: List[str] = []
        self.calls = 0
        self.fails = 0  # the number of the call that does

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)

        def call(*args: Any) -> int:
            with self._lock:
                self.calls += 1
                if self.calls == self.fails and name != "cuGetErrorName":
                    return 1
            code = int(real(*args))
            with self._lock:
                if name in PAIRS and code == 0:
                    self.held[PAIRS[name]] += 1
                elif name in self.held and code == 0:
                    self.held[name] -= 1
                elif name in self.held:
                    self.wrong.append(f"{name} returned {code}")
            return code

        return call


def handler(code: Any, at: int) -> Optional[int]:
    """Where an exception of the instruction at an offset is handled."""
    return next((target for start, end, target, _, _ in reversed(table(code)) if start <= at < end), None)


@functools.lru_cache(None)
def table(code: Any) -> Any:
    return [(e.start, e.end, e.target, e.depth, e.lasti) for e in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]


class Interrupter:
    """Finds the places of the package at which the main thread can be interrupted, and interrupts at one of them.

    A trace function can raise before an instruction, and CPython at the end of the one before. Where the two have different
    handlers, as behind the last call of a with block, nothing is raised.
    """

    def __init__(self, at: Optional[Place] = None) -> None:
        self.at, self.places, self._last = at, {}, {}  # type: Optional[Place], Dict[Place, None], Dict[Any, int]
        self.done = False

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: Any, event: str, _: Any) -> Any:
        if event == "opcode" and not self.done:
            before, self._last[frame] = self._last.get(frame, frame.f_lasti - 2), frame.f_lasti  # a call begins behind its RESUME, which is not traced
            code = frame.f_code
            if dis.opname[code.co_code[before]] in LOOKS and handler(code, before) == handler(code, frame.f_lasti):
                place = (code, frame.f_lasti)
                self.places[place] = None
                if place == self.at:
                    self.done = True
                    raise KeyboardInterrupt
        return self._step

    def run(self, call: Callable[[], Any]) -> None:
        sys.settrace(self._call)
        try:
            call()
        finally:
            sys.settrace(None)
            self._last.clear()
