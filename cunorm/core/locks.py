"""Locks around work that is done once, such as a compile."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["Lock"]


class Lock:
    """A re-entrant lock that a forked child finds free, even if a thread that it does not have held it.

    Re-entrant, because a signal handler may want what its own thread is making. What it guards must bear to be done
    twice.

    Attributes
    ----------
    held : context manager
        ``with lock.held:`` waits for the lock, and releases it at the end.
    """

    def __init__(self) -> None:
        self.held: AbstractContextManager[Any] = threading.RLock()
        _locks.add(self)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_locks):
        lock.held = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
