"""Select the executor for a kind of array; set the current GPU; detect graph capture."""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .cpu import executor as cpu_executor


@functools.cache
def executor(kind: str) -> Any:
    """Return the module that compiles and launches kernels for a kind of array, ``"cpu"`` or ``"gpu"``."""
    # The CPU executor is imported together with cunorm: after a late import, a fork or a signal handler could find a
    # half-initialised module.
    if kind == "cpu":
        return cpu_executor
    return importlib.import_module("cunorm.executors.gpu")


def on(kind: str, ordinal: int) -> AbstractContextManager[Any]:
    """Make a GPU the current one, for allocations, copies and fills; a no-op on the CPU."""
    if kind == "cpu":
        return nullcontext()
    device: AbstractContextManager[Any] = executor("gpu").on(ordinal)
    return device


def capturing(kind: str, ordinal: int) -> bool:
    """Whether the device's current stream is being captured into a graph; nothing may be allocated then."""
    return kind == "gpu" and bool(executor("gpu").allocation_forbidden(ordinal))
