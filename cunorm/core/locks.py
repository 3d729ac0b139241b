"""Work that is done once, such as a compile, and what a fork or a signal handler may find of it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


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


class lazy(Generic[Value]):  # noqa: N801 (it is used as a decorator)
    """`functools.cached_property` without its lock, which a fork leaves held, and which Python 3.12 has given up too.

    Two threads may both work the value out; the later one's stays.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Value:
        value = self._function(instance)
        instance.__dict__[self._name] = value  # found before this is, from now on
        return value
