"""Arrays and tensors on a GPU for the queues, pipes and process arguments of ``multiprocessing``::

    import cuvmm.multiprocessing                      # cuvmm.Array
    cuvmm.multiprocessing.use_tensors()               # tensors of PyTorch, under torch.multiprocessing, too
    queue = multiprocessing.get_context("spawn").Queue()
    queue.put(tensor)

What is sent is a copy in memory of its own: a pool's chunk has other tensors' bytes, and moves. The sender waits for all work of the
device, copies, waits for that, and lets go of the memory. Its descriptor travels as those of ``multiprocessing`` do, and the memory
goes back to the driver when the last process that received it has none of its tensors left. A queue sends from a thread of its
own: what is put must not be changed until it was received. If the sender's process ends before, the receiver gets its ConnectionError.
"""

from __future__ import annotations

import importlib
import operator
import queue
import threading
import weakref
from multiprocessing import reduction
from typing import Any, Callable, Optional, Tuple

from . import _driver, _memory
from ._descriptor import ARRAY, NUMBERS, Descriptor, this_process
from ._undo import File, Passing
from .array import Array, ElementType, Users, _close_later, _Work
from .errors import NotSupported
from .imported import Imported, _no_order

__all__ = ["use_tensors"]

_Reduced = Tuple[Callable[..., Any], Tuple[Any, ...]]


def _send(a: Array) -> Tuple[Descriptor, Any]:
    """A copy of an array, and its descriptor on the way to another process."""
    dev, kind = a._device, a._kind
    granularity = dev.granularity(dev.properties())
    size = max(1, -(-a.nbytes // granularity)) * granularity
    dev.synchronize()
    with _Work(a, [], None) as work:  # at whose end the memory is this process's no more
        handle = _memory.create(dev, size, work._undo)
        to = _memory.Range(dev, size, granularity, _driver.READ_WRITE, work._undo)
        to.attach([handle])
        if a.nbytes:
            work.submit("cuMemcpyDtoDAsync_v2", to.address, a.ptr, a.nbytes)
        fd = reduction.DupFd(handle.export(work._undo))
    return Descriptor(ARRAY, kind.number, kind.size, len(a), _driver.DEVICE_LOCATION, dev.handle, dev.uuid, False, False, _driver.POSIX_FD, 0,
                      this_process(), [size]), fd


class _Received:
    """What the arrays over received memory have in common. The memory is closed when it is gone, by a thread: the collector may find
    that in any call, which may hold the locks that closing takes."""


_closing: "queue.SimpleQueue[Imported]" = queue.SimpleQueue()  # whose put a collector may call at any place
_starting = threading.Lock()
_closer: Optional[threading.Thread] = None


def _close() -> None:
    while True:
        _close_later(_closing.get().close)


def _start_closing() -> None:
    global _closer
    with _starting:
        if _closer is None or not _closer.is_alive():
            _closer = threading.Thread(target=_close, name="cuvmm received", daemon=True)
            _closer.start()


def _receive(d: Descriptor, sent: Any) -> Array:
    dev = next((known for known in _driver.devices() if known.uuid == d.device), None)
    if dev is None:
        raise NotSupported(f"memory on the device of UUID {d.device.hex()}, which this process does not see", "make that device visible (CUDA_VISIBLE_DEVICES)")
    got, owner, passing = Imported(dev, True), _Received(), Passing()
    _start_closing()
    weakref.finalize(owner, _closing.put, got).atexit = False  # the memory ends with the process
    try:
        fd = passing.own(File()).open(operator.methodcaller("detach"), sent)
        importer = _memory.Importer(dev, d)
        got.map(d, importer, [importer.descriptor(fd, d.chunks[0], passing)])
    finally:
        passing.abandon()
    at = got._range.address
    return Array(dev, at, len(got), got._kind, False, got._users, at, _no_order, owner)


def _reduce_array(a: Array) -> _Reduced:
    return _receive, _send(a)


reduction.ForkingPickler.register(Array, _reduce_array)


def use_tensors() -> None:
    """Makes ``torch.multiprocessing`` send tensors on a GPU as copies, from memory of any allocator. Others go as before. Call it in
    every process that sends."""
    torch: Any = importlib.import_module("torch")
    own = importlib.import_module("torch.multiprocessing.reductions").reduce_tensor

    def reduce(t: Any) -> Any:
        if not t.is_cuda or type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided or (t.requires_grad and not t.is_leaf):
            return own(t)  # which says why not, where it cannot
        dev = _driver.device(t.get_device())
        dev.synchronize()  # what t is made of may be under way on any stream
        with torch.cuda.device(t.device), torch.no_grad():
            flat = t.detach().resolve_conj().resolve_neg().contiguous()
        at = int(flat.data_ptr())
        a = Array(dev, at, flat.numel() * flat.element_size(), ElementType("uint8", 1, NUMBERS["uint8"]), False, Users(), at, _no_order, flat)
        return _receive_tensor, (*_send(a), t.dtype, tuple(t.shape), t.requires_grad, type(t) is torch.nn.Parameter)

    for kind in (torch.Tensor, torch.nn.Parameter):
        reduction.ForkingPickler.register(kind, reduce)


def _receive_tensor(d: Descriptor, sent: Any, dtype: Any, shape: Tuple[int, ...], requires_grad: bool, parameter: bool) -> Any:
    torch: Any = importlib.import_module("torch")
    t = torch.from_dlpack(_receive(d, sent)).view(dtype).view(shape)
    return torch.nn.Parameter(t, requires_grad) if parameter else t.requires_grad_(requires_grad)
