"""The arrays of a launch on the CPU executor: what each is, and copies of them between guard zones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cunorm.core.opspec import is_tensor

#: enum Role in runtime.h.
TENSOR, PARAMETER, WORKSPACE = ROLES = ("tensor", "parameter", "workspace")
GUARD_BYTES = 4096  # on both sides of an array: no access of a kernel reaches over it by a slip
PHASE = 512  # a copy lies at the same address modulo this: what CUDA's allocator aligns to


def role_of(name: str) -> str:
    """Whether an array of that name is a tensor, holds parameters, or is the workspace."""
    return WORKSPACE if name == "workspace" else TENSOR if is_tensor(name) else PARAMETER


@dataclass(frozen=True)
class Region:
    """An array of a launch.

    Attributes
    ----------
    name : str
    address : int
    nbytes : int
    role : str
        One of `ROLES`.
    """

    name: str
    address: int
    nbytes: int
    role: str

    @property
    def words(self) -> tuple[int, int, int]:
        """Struct Region in runtime.h."""
        return self.address, self.address + self.nbytes, ROLES.index(self.role)


def regions_of(names: Sequence[str], values: Sequence[int | float], sizes: Sequence[int]) -> list[Region]:
    """The arrays among the values of a plan, in its order; one that lies exactly on another counts once, as that.

    Parameters
    ----------
    names : sequence of str
    values : sequence of int or float
        Addresses, then numbers.
    sizes : sequence of int
        Bytes behind each address; 0: no array.
    """
    found: dict[tuple[int, int], Region] = {}
    for name, address, size in zip(names, values, sizes, strict=False):  # the numbers behind have no size
        if size:
            found.setdefault((int(address), size), Region(name, int(address), size, role_of(name)))
    return list(found.values())


class GuardedCopies:
    """Copies of arrays, each between guard zones, for kernels to run on instead.

    Parameters
    ----------
    memory : sequence of Region
        The arrays, which nobody may change meanwhile.
    """

    def __init__(self, memory: Sequence[Region]) -> None:
        self._given = list(memory)
        self._buffers = [np.empty(region.nbytes + 2 * GUARD_BYTES + 2 * PHASE, np.uint8) for region in memory]
        self.memory = []
        for region, buffer in zip(self._given, self._buffers, strict=True):
            start = buffer.ctypes.data + GUARD_BYTES
            start += (region.address - start) % PHASE
            ctypes.memmove(start, region.address, region.nbytes)
            self.memory.append(Region(region.name, start, region.nbytes, region.role))
        self._moved = {
            (given.address, given.nbytes): copy.address for given, copy in zip(self._given, self.memory, strict=True)
        }

    def moved(self, address: int, nbytes: int) -> int:
        """The address of the copy of the array that lies there; 0, of no array, stays."""
        return self._moved[address, nbytes] if nbytes else address

    def contents(self) -> list[bytes]:
        """What the copies hold."""
        return [ctypes.string_at(region.address, region.nbytes) for region in self.memory]

    def fill(self, contents: Sequence[bytes]) -> None:
        """Have the copies hold that."""
        for region, data in zip(self.memory, contents, strict=True):
            ctypes.memmove(region.address, data, region.nbytes)

    def give_back(self) -> None:
        """Copy what has changed to the arrays themselves."""
        for given, copy in zip(self._given, self.memory, strict=True):
            if ctypes.string_at(given.address, given.nbytes) != ctypes.string_at(copy.address, copy.nbytes):
                ctypes.memmove(given.address, copy.address, given.nbytes)
