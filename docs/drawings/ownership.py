"""Who owns which elements: the block and warp that load or store each sector of a tensor, from the trace of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.strategy import Launch
from cunorm.executors.cpu.checked import SECTOR_BYTES
from cunorm.executors.cpu.guarded_arrays import TENSOR
from cunorm.runtime.plans import Plan
from cunorm.traffic.traffic import record, trace_by_tickets

NOBODY = -1


@dataclass(frozen=True)
class Owners:
    """The blocks and warps that access a tensor in one launch.

    Row k of `block` and `warp` has the owners of the k-th access to each sector, in the order of the trace. A sector
    with fewer accesses has `NOBODY` in it.

    Attributes
    ----------
    launch : Launch
    tensor : str
    stored : bool
        Whether the accesses are stores; else they are loads.
    block : numpy.ndarray of int
        (accesses, sectors). If blocks draw tickets, the ticket instead: any block may draw it.
    warp : numpy.ndarray of int
        (accesses, sectors). Number of the warp in its block. An asynchronous copy belongs to the warp that starts it.
    glances : int
        Further accesses, to single elements: a kernel may take the first element of a slice as the centre of its sums.
    """

    launch: Launch
    tensor: str
    stored: bool
    block: NDArray[Any]
    warp: NDArray[Any]
    glances: int

    @property
    def times(self) -> NDArray[Any]:
        """How often each sector is accessed."""
        return (self.block != NOBODY).sum(axis=0)


def owners_of(plan: Plan) -> list[Owners]:
    """The owners of each tensor that a plan accesses, launch by launch.

    Parameters
    ----------
    plan : Plan
        Each of its tensors is a whole number of sectors.

    Raises
    ------
    ValueError
        If warps access a sector in parts: the trace does not say who accesses which part.
    """
    found = []
    for count, launch in zip(record(plan, "ascending"), plan.launches, strict=True):
        trace = trace_by_tickets(count, launch)
        for name in [name for name, role in count.roles.items() if role == TENSOR]:
            # By address: lanes of one request may access two tensors, and the trace has the region of the first lane.
            at = trace["sector"].astype(np.int64) - count.starts[name] // SECTOR_BYTES
            inside = (at >= 0) & (at < plan.problem.nbytes_of(name) // SECTOR_BYTES)
            for stored in (False, True):
                chosen = inside & (trace["region"] % 2 == stored)
                if chosen.any():
                    size = plan.problem.nbytes_of(name) // SECTOR_BYTES
                    found.append(_owners(launch, name, stored, trace[chosen], at[chosen], size))
    return found


def _owners(launch: Launch, name: str, stored: bool, trace: NDArray[Any], at: NDArray[Any], sectors: int) -> Owners:
    whole = trace["bytes"] == SECTOR_BYTES
    if {*at[~whole].tolist()} - {*at[whole].tolist()}:
        raise ValueError(f"{launch.entry}: warps access a sector of {name} in parts, expected whole sectors")
    order = np.argsort(at[whole], kind="stable")
    place, own = at[whole][order], trace[whole][order]
    turn = np.arange(len(place)) - np.searchsorted(place, place)  # 0 for the first access to the sector
    block, warp = np.full((2, turn.max() + 1, sectors), NOBODY)
    block[turn, place], warp[turn, place] = own["block"], own["warp"]
    return Owners(launch, name, stored, block, warp, int((~whole).sum()))
