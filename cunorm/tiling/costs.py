"""What each kernel costs: the numbers of the cost model that ``python benchmarks/fit_costs.py`` fits.

The file ``costs.json`` has an entry for each kernel, layout and variant. Its instructions are counted by the
simulator for each kind of problem. Its times are fitted to times measured on an H100; for a kernel that was not
measured enough (see ``"measured"``), to simulated times of an H200.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch

PATH = Path(__file__).with_name("costs.json")
#: The key of the entry for kernels that have none of their own.
ANY = "any"
#: Keys of the times, by `Problem.uneven`.
EVENNESS = ("even", "uneven")


class Kind(NamedTuple):
    """The facts of a problem on which the instructions of a kernel depend.

    Attributes
    ----------
    itemsize : int
        Bytes per element.
    activated : bool
        Whether an activation is fused.
    uneven : bool
        See `Launch.uneven`.
    added : bool
        Whether a residual or dh is added.
    """

    itemsize: int
    activated: bool
    uneven: bool
    added: bool = False

    @property
    def text(self) -> str:
        """The kind's key in ``costs.json``: ``2``, ``4 activated uneven``."""
        return f"{self.itemsize}{' activated' * self.activated}{' added' * self.added}{' uneven' * self.uneven}"


class Cost(NamedTuple):
    """What a kernel costs.

    Attributes
    ----------
    of_pack, of_warp, of_round : float
        Instructions of a warp: for a pack per lane, once, and for a reduction.
    start, phase, flight, round, warp, cluster : float
        Seconds that a block takes: once, for an exposed latency of memory, for a thread's loads in flight, for a
        reduction, for each of its warps, because the others wait for it at barriers, and for each other block of its
        cluster, with which it starts.
    cycles : float
        Cycles from one instruction of a warp to its next, if nothing else delays them.
    stream : float
        Time that the bytes take, relative to a copy.
    """

    of_pack: float
    of_warp: float
    of_round: float
    start: float
    phase: float
    flight: float
    round: float
    warp: float
    cluster: float
    cycles: float
    stream: float

    @classmethod
    def of(cls, counts: Sequence[float], times: Sequence[float]) -> Cost:
        """A cost of instructions and of times as ``costs.json`` has them: in microseconds, then `cycles`, `stream`."""
        *latencies, cycles, stream = times
        return cls._make((*counts, *(1e-6 * microseconds for microseconds in latencies), cycles, stream))


def kernel_of(problem: Problem, launch: Launch) -> str:
    """The key in ``costs.json`` of a launch's kernel: its entry, its layout, and its variant."""
    return " ".join(filter(None, (launch.entry, launch.layout or problem.layout, launch.variant)))


def kind_of(problem: Problem, launch: Launch) -> Kind:
    """The kind of problem that a launch solves."""
    uneven = problem.uneven if launch.uneven is None else launch.uneven
    return Kind(problem.itemsize, problem.activation is not None, uneven, bool(problem.extras))


@functools.cache
def _document() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def alike(kind: Kind) -> list[Kind]:
    """The kind, and those that stand for it if it was never counted, the most similar first."""
    sizes = sorted((2, 4), key=lambda size: abs(size - kind.itemsize))
    same = (True, False)
    facts = [
        (kind.activated == activated, kind.uneven == uneven, kind.added == added)
        for added in same
        for activated in same
        for uneven in same
    ]
    return [Kind(size, *fact) for size in sizes for fact in facts]


@functools.cache
def cost_of(kernel: str, kind: Kind) -> Cost:
    """What a kernel costs for problems of a kind; see `kernel_of`."""
    document = _document()
    found = document.get(kernel, document[ANY])
    times = found["times"]
    side = EVENNESS[kind.uneven] if len(times) > 1 else next(iter(times))
    return Cost.of(instructions_for(found["instructions"], kind), times[side])


def instructions_for(counted: Mapping[str, Sequence[float]], kind: Kind) -> tuple[float, float, float]:
    """Instructions per pack, warp and round: of the most similar kind that was counted, by elements per pack."""
    like = next(one for one in alike(kind) if one.text in counted)
    of_pack, of_warp, of_round = counted[like.text]
    return of_pack * like.itemsize / kind.itemsize, of_warp, of_round
