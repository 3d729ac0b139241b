"""The arrays of a launch on the CPU executor: their roles, and copies of them between guard zones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cunorm.core.devices import ALLOCATION
from cunorm.core.opspec import is_tensor

#: enum Role in runtime.h.
TENSOR, PARAMETER, WORKSPACE = ROLES = ("tensor", "parameter", "workspace")
GUARD_BYTES = 4096  # on both sides of an array, so that an indexing error does not reach another array


def role_of(name: str) -> str:
    """Return the role of an array by its name: tensor, parameter or workspace."""
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
        """The words of struct Region in runtime.h: begin, end, role."""
        return self.address, self.address + self.nbytes, ROLES.index(self.role)


def regions_of(names: Sequence[str], values: Sequence[int | float], sizes: Sequence[int]) -> list[Region]:
    """Return the arrays among the values of a plan, in the plan's order.

    Two arrays with the same address and size count as one, under the first one's name.

    Parameters
    ----------
    names : sequence of str
    values : sequence of int or float
        Addresses, then numbers.
    sizes : sequence of int
        Bytes of the array at each address; 0: no array.
    """
    found: dict[tuple[int, int], Region] = {}
    for name, address, size in zip(names, values, sizes, strict=False):  # the numbers after the addresses have no size
        if size:
            found.setdefault((int(address), size), Region(name, int(address), size, role_of(name)))
    return list(found.values())


class GuardedCopies:
    """Copies of arrays, each between guard zones, on which kernels run in place of the originals.

    Parameters
    ----------
    memory : sequence of Region
        The original arrays. They must not change before `give_back`.
    """

    def __init__(self, memory: Sequence[Region]) -> None:
        self._given = list(memory)
        self._buffers = [np.empty(region.nbytes + 2 * GUARD_BYTES + 2 * ALLOCATION, np.uint8) for region in memory]
        self.memory = []
        for region, buffer in zip(self._given, self._buffers, strict=True):
            start = buffer.ctypes.data + GUARD_BYTES
            start += (region.address - start) % ALLOCATION  # the copy's address is congruent to the original's
            ctypes.memmove(start, region.address, region.nbytes)
            self.memory.append(Region(region.name, start, region.nbytes, region.role))
        self._moved = {
            (given.address, given.nbytes): copy.address for given, copy in zip(self._given, self.memory, strict=True)
        }

    def moved(self, address: int, nbytes: int) -> int:
        """Return the address of the copy of the array at `address`; if `nbytes` is 0 (no array), return `address`."""
        return self._moved[address, nbytes] if nbytes else address

    def contents(self) -> list[bytes]:
        """Return the contents of the copies."""
        return [ctypes.string_at(region.address, region.nbytes) for region in self.memory]

    def fill(self, contents: Sequence[bytes]) -> None:
        """Overwrite the copies with `contents`."""
        for region, data in zip(self.memory, contents, strict=True):
            ctypes.memmove(region.address, data, region.nbytes)

    def give_back(self) -> None:
        """Copy the arrays that have changed back to the originals."""
        for given, copy in zip(self._given, self.memory, strict=True):
            if ctypes.string_at(given.address, given.nbytes) != ctypes.string_at(copy.address, copy.nbytes):
                ctypes.memmove(given.address, copy.address, given.nbytes)
