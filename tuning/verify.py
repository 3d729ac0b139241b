"""Whether a tile is right: hostile inputs, outputs full of NaN, guard zones, the oracle, the same bits twice."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.arrays import DTYPES, pointer
from cunorm.devices import Device
from cunorm.launch import Plan, executor
from cunorm.problem import Problem
from cunorm.strategy import Strategy, Tile
from cunorm.traffic_problem import array_facts, smaller

from .inputs import Inputs, inputs_of, numbers_of
from .oracle import Expected, expected

__all__ = ["UNWRITTEN", "Guarded", "Verifier", "array_bytes", "cut_down", "raw"]

GUARD_BYTES, ALIGNMENT = 512, 512  # on either side of an array; what CUDA's allocators align to
GUARD, UNWRITTEN = 0xA5, 0xFF  # in the zones; in outputs and the workspace, where it is NaN in every format
SEEDS = (0, 1)
#: Elements of x up to which the CPU executor verifies a problem as it is: a second or so.
CPU_ELEMENTS = 2**22
CUT_LENGTH, CUT_STEP = 2**14, 64  # positions that a cut channel keeps at least, and in steps of which it is cut


class Guarded:
    """Memory for an array, between zones that nobody may write.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    nbytes : int
    """

    def __init__(self, xp: Any, nbytes: int) -> None:
        self.whole = xp.full(nbytes + 2 * GUARD_BYTES + ALIGNMENT, GUARD, xp.uint8)
        start = -pointer(self.whole) % ALIGNMENT + GUARD_BYTES
        self.bytes = self.whole[start : start + nbytes]
        self.before, self.behind = self.whole[:start], self.whole[start + nbytes :]

    @property
    def address(self) -> int:
        """Where the array itself begins."""
        return pointer(self.bytes)

    def fill(self, values: Any) -> None:
        """Set all bytes, or copy an array's."""
        self.bytes[...] = values

    def intact(self) -> bool:
        """Whether the zones are as they were."""
        return bool((self.before == GUARD).all()) and bool((self.behind == GUARD).all())


def _host(buffer: Guarded) -> NDArray[np.uint8]:
    found: Any = buffer.bytes
    host: NDArray[np.uint8] = np.array(found) if isinstance(found, np.ndarray) else found.get()
    return host


def raw(values: NDArray[Any]) -> NDArray[np.uint8]:
    """An array's bytes."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def array_bytes(problem: Problem, names: Iterable[str], given: Inputs) -> dict[str, int]:
    """Bytes of the arrays of a call by the names of its plan: inputs, and the outputs that are wanted."""
    found = {}
    for name in names:
        if name in given:
            found[name] = given[name].nbytes
        elif name in problem.outputs:
            count, dtype = array_facts(problem, name)
            found[name] = count * DTYPES[dtype].itemsize
    return found


class Verifier:
    """Verifies plans of one problem; inputs and oracle are made once.

    Parameters
    ----------
    problem : Problem
    kind : {"cpu", "gpu"}
        The executor.
    """

    def __init__(self, problem: Problem, kind: str) -> None:
        self.problem, self.kind = problem, kind
        self.xp: Any = np if kind == "cpu" else executor("gpu").cupy

    @functools.cached_property
    def cases(self) -> list[tuple[Inputs, list[Expected]]]:
        """Inputs, and what has to come of them."""
        made = [inputs_of(self.problem, seed) for seed in SEEDS]
        return [(given, expected(self.problem, given)) for given in made]

    def fault(self, plan: Plan) -> str | None:
        """What is wrong with what a plan of the problem does; None if it is right."""
        for given, wanted in self.cases:
            if (sentence := self._fault(plan, given, wanted)) is not None:
                return sentence
        return None

    def _fault(self, plan: Plan, given: Inputs, wanted: list[Expected]) -> str | None:
        xp, problem = self.xp, self.problem
        numbers: Mapping[str, float] = numbers_of(problem)
        outputs = [name for name in problem.outputs if name in plan.names]
        needed = array_bytes(problem, plan.names, given)
        if plan.workspace_nbytes:
            needed["workspace"] = plan.workspace_nbytes
        buffers = {name: Guarded(xp, nbytes) for name, nbytes in needed.items()}
        for name, buffer in buffers.items():
            buffer.fill(xp.asarray(raw(given[name])) if name in given else UNWRITTEN)
        arrays = [name for name in plan.names if name not in numbers]
        values: list[int | float] = [buffers[name].address if name in buffers else 0 for name in arrays]
        values += [numbers[name] for name in plan.names if name in numbers]
        sizes = [buffers[name].bytes.size if name in buffers else 0 for name in arrays]
        found: list[dict[str, NDArray[np.uint8]]] = []
        for _ in range(2):  # the second time with the workspace as the first has left it
            for name in outputs:
                buffers[name].fill(xp.asarray(raw(given[name])) if name in given else UNWRITTEN)
            plan.run(values, sizes)
            executor(self.kind).synchronise(plan.place.ordinal)
            found.append({name: _host(buffers[name]) for name in outputs})
        for name, buffer in buffers.items():
            if not buffer.intact():
                return f"{name}: wrote outside of it"
            if name in given and name not in outputs and not np.array_equal(_host(buffer), raw(given[name])):
                return f"{name}: changed, and is an input"
        for one in wanted:
            sentence = one.fault(found[0][one.name].view(DTYPES[one.dtype]))
            if sentence is not None:
                return sentence
        for name in outputs:
            if not np.array_equal(found[0][name], found[1][name]):
                return f"{name}: other bits in a second run"
        return None


def _cuts(problem: Problem) -> Iterator[Problem]:
    """The problem itself, then with fewer samples, then fewer groups, then fewer positions."""
    yield problem
    N = max(1, min(problem.N, CPU_ELEMENTS // (problem.C * problem.HxW)))
    fewer = smaller(problem, "N", N)
    yield fewer
    if problem.op.startswith("layer_norm"):
        return
    # Channels side by side are shared out among the threads of a block: with fewer, each does something else.
    if problem.layout == "NCHW":
        fewer = smaller(fewer, "group", max(1, min(problem.group, CPU_ELEMENTS // (N * problem.group_length))))
        yield fewer
    length = max(CUT_LENGTH, CPU_ELEMENTS // (N * fewer.C)) // CUT_STEP * CUT_STEP
    yield replace(fewer, HxW=min(problem.HxW, length + problem.HxW % CUT_STEP))


def cut_down(problem: Problem, strategy: Strategy, tile: Tile, device: Device) -> Problem:
    """The problem that the CPU executor verifies a tile on: itself, or a smaller one for which the tile is legal."""
    legal = [one for one in _cuts(problem) if strategy.refuses(one, tile, device) is None and one == one.canonical()]
    return next((one for one in legal if one.N * one.C * one.HxW <= CPU_ELEMENTS), legal[-1])
