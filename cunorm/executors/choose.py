"""Which executor a kind of array has, and what is asked of either: a device to work on, whether a graph is captured."""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .cpu import executor as cpu_executor


@functools.cache
def executor(kind: str) -> Any:
    """The module that compiles and launches for a kind of array, ``"cpu"`` or ``"gpu"``."""
    if kind == "cpu":  # which is imported with cunorm: a fork, or a signal's handler, would find half a module
        return cpu_executor
    return importlib.import_module("cunorm.executors.gpu")


def on(kind: str, ordinal: int) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, for what is allocated, copied and filled there; nothing to do on the CPU."""
    if kind == "cpu":
        return nullcontext()
    device: AbstractContextManager[Any] = executor("gpu").on(ordinal)
    return device


def capturing(kind: str, ordinal: int) -> bool:
    """Whether the current stream there is being captured into a graph, where nothing may be allocated."""
    return kind == "gpu" and bool(executor("gpu").allocation_forbidden(ordinal))
