"""Memory in which the CPU executor's threads work: stacks of the fibers, shared memory of blocks, a worker's state."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import weakref

from cunorm.core import settings

from .kernel import Addresses

STACK_BYTES = 65536  # stack_bytes in runtime.h
FAULT_BYTES = 2048


class Scratch:
    """Memory of one operating-system thread of a launch; its pages are taken from the system when first touched.

    Parameters
    ----------
    threads : int
        Of all blocks that live at a time.
    shared_bytes : int
        Of these blocks.
    worker_bytes : int
        Of struct Worker in runtime.h, with what lies behind it.

    Attributes
    ----------
    addresses : Addresses

    Raises
    ------
    OSError
        If the system has no such memory.
    """

    def __init__(self, threads: int, shared_bytes: int, worker_bytes: int) -> None:
        self.capacity = (threads, shared_bytes, worker_bytes)
        size = (threads + 2) * STACK_BYTES + shared_bytes + worker_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would cover 32 stacks and commit them all
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._text = ctypes.create_string_buffer(FAULT_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        stacks = -(-address // STACK_BYTES) * STACK_BYTES
        arenas = stacks + threads * STACK_BYTES
        worker = arenas + shared_bytes + STACK_BYTES  # apart, so that no kernel reaches it by a slip
        self.addresses = Addresses(worker, stacks, arenas, ctypes.addressof(self._text))

    def holds(self, threads: int, shared_bytes: int, worker_bytes: int) -> bool:
        """Whether it is large enough."""
        return threads <= self.capacity[0] and shared_bytes <= self.capacity[1] and worker_bytes <= self.capacity[2]

    def fault(self) -> str:
        """What the runtime wrote about a fault; empty if there was none since `take`."""
        return self._text.value.decode(errors="replace")


#: What no launch uses. Kept, because the first touch of a page is slow.
_free: collections.deque[Scratch] = collections.deque(maxlen=max(4, settings.cores()))
#: What launches use, by identity. Weak, because an interrupt between two lines may drop a scratch before it is back;
#: without a callback, in which Python would swallow the next interrupt.
_lent: dict[int, weakref.ref[Scratch]] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lent.clear)  # it has no other threads


def lent() -> int:
    """How many scratches launches use now: as many operating-system threads run kernels in this process."""
    return sum(each() is not None for each in list(_lent.values()))


def take(threads: int, shared_bytes: int, worker_bytes: int) -> Scratch:
    """Memory that nobody else has until it is given back, or forgotten.

    Raises
    ------
    MemoryError
        If the system has none.
    """
    wanted = (threads, shared_bytes, worker_bytes)
    try:
        found = _free.pop()
    except IndexError:
        found = None
    if found is None or not found.holds(*wanted):
        most = wanted if found is None else tuple(map(max, found.capacity, wanted))
        try:
            found = Scratch(*most)
        except OSError as error:
            raise MemoryError(f"{threads} threads on the CPU executor: no memory for their stacks: {error}") from None
    found._text[0] = b"\0"
    _lent[id(found)] = weakref.ref(found)
    return found


def give_back(scratch: Scratch) -> None:
    """Let another launch have it."""
    _lent.pop(id(scratch), None)
    _free.append(scratch)
