"""Ctrl-C at every place of cuvmm.torch's functions, and every call of the library failing once, with a stand-in for PyTorch.

PyTorch's own side is not walked: requests and frees, which it makes from C++, and the shim that ``own_error`` compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import unittest
import warnings
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional
from unittest import mock

import cuvmm
from cuvmm import _torch_library, _torch_memory

from .interrupts import Interrupter, Place
from .test_torch_memory import MIB, stand_in


class Failing:
    """The pool's library, which fails one call on demand."""

    def __init__(self, real: Any) -> None:
        self._real, self.calls, self.fails = real, 0, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if name not in _torch_library._CALLS:
            return function  # it returns no status

        def call(*args: Any) -> int:
            self.calls += 1
            return 1 if self.calls == self.fails else int(function(*args))

        return call


class World:
    """A process in which PyTorch was imported, and a library with a pool."""

    def __init__(self, front: Any, torch: Any) -> None:
        self.front, self.torch = front, torch

    def use(self) -> None:
        """PyTorch uses the pool. Since the last reset it allocated one block and freed it, and one more before."""
        self.front.use_pool()
        for _ in range(2):
            self.front.reset_accumulated_memory_stats()
            a = self.torch._C.current
            a.free(a.alloc(MIB, 0, None), MIB, 0, None)

    def freed(self) -> int:
        return int(self.front.memory_stats()["allocation.all.freed"])

    def goes_on(self) -> None:
        """PyTorch initialises CUDA with the allocator that it has, if it has one."""
        self.torch.cuda.initialized = self.torch._C.current is not None

    def patched(self) -> bool:
        return self.torch._C.current is not None and all(getattr(self.torch.cuda.memory, f.__name__) is f for f in _torch_memory.PATCHED)

    def records(self) -> bool:
        a = self.torch._C.current
        a.free(a.alloc(MIB, 0, None), MIB, 0, None)
        return len(self.front._snapshot()["device_traces"][0]) > 0


class Op(NamedTuple):
    """A call to walk, and what holds after it, or after the call that repeats it."""

    call: Callable[[World], Any]
    holds: Callable[[World], bool] = lambda _: True
    before: Callable[[World], None] = World.use


def nothing(_: World) -> None:
    pass


OPS: Dict[str, Op] = {
    "use_pool": Op(lambda w: w.front.use_pool(patch=True), World.patched, nothing),
    "pool": Op(lambda w: w.front.pool(), before=nothing),
    "memory_stats": Op(lambda w: w.front.memory_stats()),
    "reset_peak_memory_stats": Op(lambda w: w.front.reset_peak_memory_stats(), lambda w: bool(w.front.max_memory_allocated() == w.front.memory_allocated())),
    "reset_accumulated_memory_stats": Op(lambda w: w.front.reset_accumulated_memory_stats(), lambda w: w.freed() == 0),
    "empty_cache": Op(lambda w: w.front.empty_cache(), lambda w: bool(w.front.memory_reserved() == 0)),
    "set_per_process_memory_fraction": Op(lambda w: w.front.set_per_process_memory_fraction(0.5), lambda w: bool(w.front.get_per_process_memory_fraction() == 0.5)),
    "_record_memory_history": Op(lambda w: w.front._record_memory_history(), World.records),
    "_snapshot": Op(lambda w: w.front._snapshot()),
    "memory_snapshot": Op(lambda w: w.front.memory_snapshot()),
    "snapshot": Op(lambda w: w.front.snapshot()),
}


class Walks(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        if not os.environ.get("CUVMM_LIBCUVMM") or os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("CUVMM_LIBCUVMM names the library: scripts/test-python.sh builds it, and runs this in a process of its own")

    def setUp(self) -> None:
        warnings.simplefilter("ignore", ResourceWarning)  # of files that an interrupted call lost: the collector closes them
        self.addCleanup(warnings.resetwarnings)

    @contextlib.contextmanager
    def world(self) -> Iterator[World]:
        """A process that has not used the pool yet, but for the library, which is there once."""
        torch = stand_in()
        with mock.patch.dict(sys.modules, {"torch": torch}):
            front: Any = importlib.import_module("cuvmm.torch")
            with mock.patch.object(front, "_made", []), mock.patch.object(front, "_installed", []), mock.patch.dict(_torch_memory._since, clear=True), \
                    mock.patch.object(_torch_library, "_library", None), mock.patch.object(atexit, "register"):
                yield World(front, torch)
                front._record_memory_history(None)
                front.set_per_process_memory_fraction(1.0)

    def ends_well(self, what: str, w: World, op: Op) -> None:
        """A call that did not return did what it does, or nothing; the next one does it."""
        if op.before is World.use:
            self.assertIn(w.freed(), (0, 1), what)
        w.goes_on()
        op.call(w)
        self.assertTrue(op.holds(w), what)

    def walk(self, name: str, op: Op, at: Optional[Place]) -> Interrupter:
        with self.world() as w:
            op.before(w)
            i = Interrupter(at)
            try:
                i.run(lambda: op.call(w))
            except KeyboardInterrupt:
                pass
            self.ends_well(name if at is None else f"{name}, interrupted at {at[0].co_name}+{at[1]}", w, op)
        return i

    @unittest.skipIf(sys.version_info < (3, 11), "before Python 3.11 an interruption comes at other places, which no trace function finds")
    def test_ctrl_c_at_every_place(self) -> None:
        count = 0
        for name, op in OPS.items():
            for place in self.walk(name, op, None).places:
                count += self.walk(name, op, place).done
        self.assertGreater(count, 200)

    def test_every_call_of_the_library_fails_once(self) -> None:
        count = 0
        for name, op in OPS.items():
            number, went = 0, True
            while went:
                number += 1
                with self.world() as w:
                    op.before(w)
                    w.front._library.load(os.environ["CUVMM_LIBCUVMM"])
                    library = Failing(_torch_library._library)
                    with mock.patch.object(_torch_library, "_library", library):
                        library.fails = number
                        with contextlib.suppress(cuvmm.ArgumentError):
                            op.call(w)
                        went = library.calls >= number
                        library.fails = 0
                        self.ends_well(f"{name}, whose call {number} fails", w, op)
                count += went
        self.assertGreater(count, 5)


if __name__ == "__main__":
    unittest.main()
