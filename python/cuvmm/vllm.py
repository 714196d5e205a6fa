"""vLLM's sleep mode on this package's memory::

    vllm serve MODEL --enable-sleep-mode --sleep-mode-backend cuvmm --worker-cls cuvmm.vllm.Worker

vLLM finds the backend by an entry point of this package, which calls :func:`register`. :class:`Worker` is vLLM's own, with weights
and caches in regions (:func:`cuvmm.torch.region`), whose tags are vLLM's: a backend that did not own the allocations could not
suspend them. Communicators, compiled code and graphs stay as they are, because no address changes.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, ContextManager, List, Optional, Tuple

from . import _torch_library
from . import torch as memory
from .errors import ArgumentError, Error

NAME = "cuvmm"
_REGISTRY = "vllm.device_allocator.sleep_mode_backend"


def _of_vllm(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def register() -> None:
    """Registers the backend with a vLLM that has the registry. Every process of vLLM calls it, some of them again."""
    factory = _of_vllm(_REGISTRY, "SleepModeBackendFactory")
    if factory is None or _registered(factory):
        return
    factory.register_backend(NAME, __name__, "Backend")


def _registered(factory: Any) -> bool:
    try:
        factory.get_backend_class(NAME)
        return True
    except ValueError:
        return False


class Backend(_of_vllm(_REGISTRY, "SleepModeBackend") or object):  # type: ignore[misc]
    """vLLM's interface: level 1 keeps the weights in host memory and drops the rest, level 2 drops everything."""

    def __init__(self) -> None:
        super().__init__()
        self._resuming = False

    def suspend(self, level: int = 1) -> None:
        if level not in (1, 2):
            raise ArgumentError(f"sleep level {level}", "use 1, which keeps the weights, or 2, which keeps nothing")
        awake = [tag for tag in memory.awake() if tag]  # what has none is not vLLM's
        if not awake and not any(memory.sleeping()):
            raise Error("no memory of vLLM is in a region of cuvmm", "start vLLM with --worker-cls cuvmm.vllm.Worker")
        if awake:
            memory.suspend(awake, keep=[tag for tag in awake if level == 1 and tag == "weights"])

    def resume(self, tags: Optional[List[str]] = None) -> None:
        self._resuming = True
        try:
            memory.resume(tags)
        finally:
            self._resuming = False

    def discard(self, tags: Tuple[str, ...]) -> None:
        memory.discard(tags)

    def state(self) -> str:
        """RUNNING when everything is awake."""
        if self._resuming:
            return "RESUMING"
        return "SUSPENDED" if memory.sleeping() else "RUNNING"

    @classmethod
    def is_supported(cls) -> bool:
        try:
            _torch_library.load(_torch_library.find(None))
            return True
        except Error:
            return False

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    @classmethod
    def preserves_nccl(cls) -> bool:
        """What vLLM first called :meth:`preserves_communicators`."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return True

    @classmethod
    def preserves_graphs_with_nccl(cls) -> bool:
        """What vLLM first called :meth:`preserves_graphs_with_communicators`."""
        return True

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return False


def _worker() -> Any:
    base: Any = importlib.import_module("vllm.v1.worker.gpu_worker").Worker

    class Worker(base):  # type: ignore[misc]
        """vLLM's worker, whose allocations for sleep mode come from regions."""

        def _maybe_get_memory_pool_context(self, tag: str) -> ContextManager[Any]:
            model = self.vllm_config.model_config
            if getattr(model, "sleep_mode_backend", None) != NAME:
                own: ContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
                return own
            return memory.region(tag) if model.enable_sleep_mode else contextlib.nullcontext()

    Worker.__module__, Worker.__qualname__ = __name__, "Worker"
    return Worker


def __getattr__(name: str) -> Any:
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _worker()  # which takes vLLM, and its worker: not before somebody names it
    return globals()[name]
