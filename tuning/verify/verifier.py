"""Verifies a tile: hostile inputs, outputs filled with NaN, guard zones, the oracle, bitwise equal second run."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.arrays import DTYPES, pointer
from cunorm.core.devices import ALLOCATION, Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile, main_launch
from cunorm.executors.choose import executor
from cunorm.runtime.plans import Plan
from cunorm.traffic.sampling import smaller

from .inputs import HOSTILE, Inputs, inputs_of, slices_of
from .oracle import Expected, expected

GUARD_BYTES = 512  # guard zone before and after an array
GUARD, UNWRITTEN = 0xA5, 0xFF  # byte of the guard zones; byte of outputs and workspace, which is NaN in every format
OTHER_KERNELS = 1e-6  # factor of the rank of a cut problem that launches other kernels
#: Elements of x for a verification on the CPU executor: the maximum, and a size that suffices if it keeps as much work.
CPU_ELEMENTS, FEW_ELEMENTS = 2**22, 2**20
CUT_LENGTH, CUT_STEP = 2**14, 64  # minimum positions of a cut channel; the cut removes a multiple of CUT_STEP
#: Cut sizes are multiples of these where possible: packs and the columns of a block take even numbers of channels.
EVEN = (2, 4, 8, 32, 128)


class GuardedBuffer:
    """Memory for an array, between two guard zones that no kernel may write.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    nbytes : int
    """

    def __init__(self, xp: Any, nbytes: int) -> None:
        self.whole = xp.full(nbytes + 2 * GUARD_BYTES + ALLOCATION, GUARD, xp.uint8)
        start = -pointer(self.whole) % ALLOCATION + GUARD_BYTES
        self.bytes = self.whole[start : start + nbytes]
        self.before, self.behind = self.whole[:start], self.whole[start + nbytes :]

    @property
    def address(self) -> int:
        """Address of the array."""
        return pointer(self.bytes)

    def fill(self, values: Any) -> None:
        """Set all bytes to one value, or copy the bytes of an array."""
        self.bytes[...] = values

    def intact(self) -> bool:
        """Whether the guard zones are unchanged."""
        return bool((self.before == GUARD).all()) and bool((self.behind == GUARD).all())


def _host(buffer: GuardedBuffer) -> NDArray[np.uint8]:
    found: Any = buffer.bytes
    host: NDArray[np.uint8] = np.array(found) if isinstance(found, np.ndarray) else found.get()
    return host


def raw(values: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def array_bytes(problem: Problem, names: Iterable[str], given: Inputs) -> dict[str, int]:
    """Sizes in bytes of a call's arrays by name: the inputs and the problem's outputs."""
    found = {}
    for name in names:
        if name in given:
            found[name] = given[name].nbytes
        elif name in problem.outputs:
            found[name] = problem.elements_of(name) * DTYPES[problem.dtype_of(name)].itemsize
    return found


def filled_buffers(xp: Any, needed: Mapping[str, int], given: Inputs) -> dict[str, GuardedBuffer]:
    """Buffers of these sizes in bytes by name, with the inputs copied into theirs."""
    made = {name: GuardedBuffer(xp, nbytes) for name, nbytes in needed.items()}
    for name in given.keys() & made.keys():
        made[name].fill(xp.asarray(raw(given[name])))
    return made


class Verifier:
    """Verifies plans of one problem; inputs and oracle are computed once.

    Parameters
    ----------
    problem : Problem
    kind : {"cpu", "gpu"}
        The executor that runs the plans.
    """

    def __init__(self, problem: Problem, kind: str) -> None:
        self.problem, self.kind = problem, kind
        self.xp: Any = np if kind == "cpu" else executor("gpu").cupy

    @functools.cached_property
    def cases(self) -> list[tuple[Inputs, list[Expected]]]:
        """Inputs and expected results, for as many seeds as are needed until each kind of slice occurs."""
        seeds = range(0, len(HOSTILE), max(1, slices_of(self.problem)))  # a seed also selects the first slice's kind
        made = [inputs_of(self.problem, seed) for seed in seeds]
        return [(given, expected(self.problem, given)) for given in made]

    def fault(self, plan: Plan) -> str | None:
        """A sentence that says how a plan of the problem is wrong, or None."""
        for given, wanted in self.cases:
            if (sentence := self._fault(plan, given, wanted)) is not None:
                return sentence
        return None

    def results(self, plan: Plan, given: Inputs) -> dict[str, NDArray[Any]]:
        """Run a plan of the problem; return each result as a flat array in memory order."""
        call = _GuardedCall(self, plan, given)
        found = call.run()
        return {name: values.view(DTYPES[self.problem.dtype_of(name)]) for name, values in found.items()}

    def _fault(self, plan: Plan, given: Inputs, wanted: list[Expected]) -> str | None:
        call = _GuardedCall(self, plan, given)
        found = [call.run(), call.run()]  # the second run reuses the workspace without clearing it
        if (sentence := call.damage()) is not None:
            return sentence
        for one in wanted:
            sentence = one.fault(found[0][one.name].view(DTYPES[one.dtype]))
            if sentence is not None:
                return sentence
        for name in call.outputs:
            if not np.array_equal(found[0][name], found[1][name]):
                return f"{name}: a second run is not bitwise equal"
        return None


class _GuardedCall:
    """A plan's arrays between guard zones, with the inputs copied into them."""

    def __init__(self, of: Verifier, plan: Plan, given: Inputs) -> None:
        self.plan, self.given, self.xp, self.kind = plan, given, of.xp, of.kind
        self.outputs = [name for name in of.problem.outputs if name in plan.names]
        needed = array_bytes(of.problem, plan.names, given)
        if plan.workspace_nbytes:
            needed["workspace"] = plan.workspace_nbytes
        self.buffers = {name: GuardedBuffer(of.xp, nbytes) for name, nbytes in needed.items()}
        for name in self.buffers:
            self._fill(name)
        self.values = plan.values({name: buffer.address for name, buffer in self.buffers.items()})
        self.sizes = [self.buffers[name].bytes.size if name in self.buffers else 0 for name in plan.array_names]

    def _fill(self, name: str) -> None:
        self.buffers[name].fill(self.xp.asarray(raw(self.given[name])) if name in self.given else UNWRITTEN)

    def run(self) -> dict[str, NDArray[np.uint8]]:
        """Run the plan once; return the bytes of the results."""
        for name in self.outputs:
            self._fill(name)
        self.plan.run(self.values, self.sizes)
        executor(self.kind).synchronise(self.plan.place.ordinal)
        return {name: _host(self.buffers[name]) for name in self.outputs}

    def damage(self) -> str | None:
        """A sentence that names an array with a damaged guard zone, or a changed input; None if there is none."""
        for name, buffer in self.buffers.items():
            if not buffer.intact():
                return f"{name}: memory outside the array was written"
            given = name in self.given and name not in self.outputs
            if given and not np.array_equal(_host(buffer), raw(self.given[name])):
                return f"{name}: the input was changed"
        return None


def _cut(problem: Problem, axis: str, most: int) -> Iterator[Problem]:
    """Yield the problem with one axis cut to about `most` elements, and cut further to multiples of `EVEN`."""
    size = getattr(problem, axis)
    wanted = max(1, size * most // (problem.N * problem.C * problem.HxW))
    if axis == "HxW":
        wanted = max(CUT_LENGTH, wanted) // CUT_STEP * CUT_STEP + size % CUT_STEP  # as ragged as before
    for step in (1, *EVEN):
        if 0 < wanted // step * step < size:
            yield smaller(problem, axis, wanted // step * step)


def _cuts(problem: Problem, most: int) -> Iterator[Problem]:
    """Yield problems of at most `most` elements with one or more axes cut, in every order of the axes."""
    # Only whole groups of channels are removed. If all channels are one group (a row of LayerNorm), none are removed.
    grouped = problem.spec.one_channel_per_group or "group" in problem.spec.sizes.values()
    axes = ("N", "group", "HxW") if grouped else ("N",)
    for order in itertools.permutations(axes):
        kept = [problem]
        for axis in order:
            kept = [made for one in kept for made in _cut(one, axis, most)]
            yield from (one for one in kept if one.N * one.C * one.HxW <= most)


def _same_work(problem: Problem, cut: Problem, strategy: Strategy, tile: Tile) -> float:
    """The share of a thread's work that a cut problem keeps: the product of its launches' shares; at most 1.

    The length of a thread's chain of additions, and the number of parts that a fold merges, grow with that work. For a
    cut problem that launches other kernels, for example no fold, only the main launch counts, times `OTHER_KERNELS`.
    Such a problem ranks after all problems that launch the same kernels.
    """
    whole, parts = (strategy.launches(one, tile) for one in (problem, cut))

    def shape(launches: Sequence[Launch]) -> list[tuple[object, ...]]:
        named = ([one for one in launch.arguments.values() if isinstance(one, str)] for launch in launches)
        return [(one.entry, one.threads, one.cluster, *names) for one, names in zip(launches, named, strict=True)]

    def share(of: Launch, left: Launch) -> float:
        work, rest = ((one.traffic + one.cached) / (one.grid * one.threads) for one in (of, left))
        return min(1.0, rest / work) if work else 1.0

    if shape(whole) != shape(parts):
        return OTHER_KERNELS * share(main_launch(whole), main_launch(parts))
    return math.prod(share(*pair) for pair in zip(whole, parts, strict=True))


def cut_down(problem: Problem, strategy: Strategy, tile: Tile, device: Device) -> Problem:
    """The problem on which the CPU executor verifies a tile: itself, or a smaller one for which the tile is legal.

    Of the problems with fewer samples, groups or positions, the one that keeps the largest share of a thread's work is
    chosen. Of problems with equal shares, the smallest is chosen; sizes below ``FEW_ELEMENTS // 2`` count as equal.
    """
    if problem.N * problem.C * problem.HxW <= FEW_ELEMENTS:
        return problem
    waits = any(launch.waits for launch in strategy.launches(problem, tile))
    best, most = problem, (-1.0, 0.0)
    for size in (CPU_ELEMENTS,) if waits else (CPU_ELEMENTS, FEW_ELEMENTS):  # blocks that wait need other blocks
        whole = (problem,) if problem.N * problem.C * problem.HxW <= size else ()
        for one in (*whole, *_cuts(problem, size)):
            if one == one.canonical() and strategy.refuses(one, tile, device) is None:
                elements = one.N * one.C * one.HxW
                left = float(f"{_same_work(problem, one, strategy, tile):.2g}")  # rounded: nearly equal shares tie
                rank = left, -float(max(elements, FEW_ELEMENTS // 2))
                if rank > most:
                    best, most = one, rank
    return best
