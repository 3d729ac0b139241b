"""Guards for work that is done once, such as a compilation, safe in forked children and signal handlers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Lock:
    """A re-entrant lock that is free in a forked child, even if another thread of the parent held it.

    It is re-entrant because a signal handler may need the value that its own thread is making. The guarded work can
    therefore be done twice, which must be harmless.

    Attributes
    ----------
    held : context manager
        ``with lock.held:`` waits for the lock and releases it at the end.
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


class lazy(Generic[Value]):  # noqa: N801 (it is used as a decorator)
    """`functools.cached_property` without its lock, which a fork can leave held. Python 3.12 removed that lock too.

    Two threads may both compute the value; the later value is kept.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Value:
        value = self._function(instance)
        instance.__dict__[self._name] = value  # later look-ups find it there and do not call this method
        return value
