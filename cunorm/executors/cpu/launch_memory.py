"""Working memory of the CPU executor's threads: fiber stacks, shared memory of the blocks, and the worker's state."""

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
    """Memory of one operating-system thread of a launch. The system allocates each page at its first access.

    Parameters
    ----------
    threads : int
        CUDA threads, summed over all blocks that are alive at a time.
    shared_bytes : int
        Shared memory of these blocks, in bytes.
    worker_bytes : int
        Size of struct Worker in runtime.h, together with the arrays that follow it.

    Attributes
    ----------
    addresses : Addresses
        Addresses of the parts, for the runtime.

    Raises
    ------
    OSError
        If the system cannot allocate the memory.
    """

    def __init__(self, threads: int, shared_bytes: int, worker_bytes: int) -> None:
        self.capacity = (threads, shared_bytes, worker_bytes)
        size = (threads + 2) * STACK_BYTES + shared_bytes + worker_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one huge page would commit 32 stacks at once
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._text = ctypes.create_string_buffer(FAULT_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        stacks = -(-address // STACK_BYTES) * STACK_BYTES
        arenas = stacks + threads * STACK_BYTES
        worker = arenas + shared_bytes + STACK_BYTES  # after a gap that catches a kernel's overruns
        self.addresses = Addresses(worker, stacks, arenas, ctypes.addressof(self._text))

    def holds(self, threads: int, shared_bytes: int, worker_bytes: int) -> bool:
        """Whether the scratch is large enough."""
        return threads <= self.capacity[0] and shared_bytes <= self.capacity[1] and worker_bytes <= self.capacity[2]

    def fault(self) -> str:
        """Return the fault message that the runtime wrote since `take`; empty if there was no fault."""
        return self._text.value.decode(errors="replace")


#: Scratches that no launch uses. They are kept because the first access to a page is slow.
_free: collections.deque[Scratch] = collections.deque(maxlen=max(4, settings.cores()))
#: Scratches that launches use, by identity. The references are weak, because an interrupt between two lines may drop a
#: scratch before it is given back. They have no callback, because Python swallows an interrupt that arrives in one.
_lent: dict[int, weakref.ref[Scratch]] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lent.clear)  # the child has no other threads, so no launches


def lent() -> int:
    """Number of scratches in use, which is the number of operating-system threads that run kernels in this process."""
    return sum(each() is not None for each in list(_lent.values()))


def take(threads: int, shared_bytes: int, worker_bytes: int) -> Scratch:
    """Take a scratch for exclusive use until it is given back or garbage-collected.

    Raises
    ------
    MemoryError
        If the system cannot allocate the memory.
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
    """Return a scratch to the free list."""
    _lent.pop(id(scratch), None)
    _free.append(scratch)
