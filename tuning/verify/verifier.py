"""Whether a tile is right: hostile inputs, outputs full of NaN, guard zones, the oracle, the same bits twice."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.arrays import DTYPES, pointer
from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile, main_launch
from cunorm.executors.choose import executor
from cunorm.runtime.plans import Plan
from cunorm.traffic.sampling import smaller

from .inputs import HOSTILE, Inputs, inputs_of, slices_of
from .oracle import Expected, expected

GUARD_BYTES, ALIGNMENT = 512, 512  # on either side of an array; what CUDA's allocators align to
GUARD, UNWRITTEN = 0xA5, 0xFF  # in the zones; in outputs and the workspace, where it is NaN in every format
OTHER_KERNELS = 1e-6  # what a cut problem counts for that launches other kernels
#: Elements of x that the CPU executor verifies a winner on: at most, and where more would prove nothing else.
CPU_ELEMENTS, FEW_ELEMENTS = 2**22, 2**20
CUT_LENGTH, CUT_STEP = 2**14, 64  # positions that a cut channel keeps at least, and in steps of which it is cut
EVEN = (
    2,
    4,
    8,
    32,
    128,
)  # of these as many as fit: packs of a row, and the columns of a block, are even numbers of channels


class GuardedBuffer:
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


def _host(buffer: GuardedBuffer) -> NDArray[np.uint8]:
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
            found[name] = problem.elements_of(name) * DTYPES[problem.dtype_of(name)].itemsize
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
        """Inputs, and what has to come of them: as many seeds as it takes for each kind of slice to have its turn."""
        seeds = range(0, len(HOSTILE), max(1, slices_of(self.problem)))  # a seed is also the kind of the first slice
        made = [inputs_of(self.problem, seed) for seed in seeds]
        return [(given, expected(self.problem, given)) for given in made]

    def fault(self, plan: Plan) -> str | None:
        """What is wrong with what a plan of the problem does; None if it is right."""
        for given, wanted in self.cases:
            if (sentence := self._fault(plan, given, wanted)) is not None:
                return sentence
        return None

    def results(self, plan: Plan, given: Inputs) -> dict[str, NDArray[Any]]:
        """What a plan of the problem makes of inputs, each result flat as it lies in memory."""
        call = _GuardedCall(self, plan, given)
        found = call.run()
        return {name: values.view(DTYPES[self.problem.dtype_of(name)]) for name, values in found.items()}

    def _fault(self, plan: Plan, given: Inputs, wanted: list[Expected]) -> str | None:
        call = _GuardedCall(self, plan, given)
        found = [call.run(), call.run()]  # the second time with the workspace as the first has left it
        if (sentence := call.damage()) is not None:
            return sentence
        for one in wanted:
            sentence = one.fault(found[0][one.name].view(DTYPES[one.dtype]))
            if sentence is not None:
                return sentence
        for name in call.outputs:
            if not np.array_equal(found[0][name], found[1][name]):
                return f"{name}: other bits in a second run"
        return None


class _GuardedCall:
    """A plan's arrays between guard zones, the inputs in theirs."""

    def __init__(self, of: Verifier, plan: Plan, given: Inputs) -> None:
        self.plan, self.given, self.xp, self.kind = plan, given, of.xp, of.kind
        numbers: Mapping[str, float] = of.problem.numbers
        self.outputs = [name for name in of.problem.outputs if name in plan.names]
        needed = array_bytes(of.problem, plan.names, given)
        if plan.workspace_nbytes:
            needed["workspace"] = plan.workspace_nbytes
        self.buffers = {name: GuardedBuffer(of.xp, nbytes) for name, nbytes in needed.items()}
        for name in self.buffers:
            self._fill(name)
        arrays = [name for name in plan.names if name not in numbers]
        self.values: list[int | float] = [self.buffers[name].address if name in self.buffers else 0 for name in arrays]
        self.values += [numbers[name] for name in plan.names if name in numbers]
        self.sizes = [self.buffers[name].bytes.size if name in self.buffers else 0 for name in arrays]

    def _fill(self, name: str) -> None:
        self.buffers[name].fill(self.xp.asarray(raw(self.given[name])) if name in self.given else UNWRITTEN)

    def run(self) -> dict[str, NDArray[np.uint8]]:
        """Run the plan once; the results' bytes."""
        for name in self.outputs:
            self._fill(name)
        self.plan.run(self.values, self.sizes)
        executor(self.kind).synchronise(self.plan.place.ordinal)
        return {name: _host(self.buffers[name]) for name in self.outputs}

    def damage(self) -> str | None:
        """Which array was written outside of it, or is an input and was changed; None if there is none."""
        for name, buffer in self.buffers.items():
            if not buffer.intact():
                return f"{name}: wrote outside of it"
            given = name in self.given and name not in self.outputs
            if given and not np.array_equal(_host(buffer), raw(self.given[name])):
                return f"{name}: changed, and is an input"
        return None


def _cut(problem: Problem, axis: str, most: int) -> Iterator[Problem]:
    """The problem with so much less of an axis that it has `most` elements, and with still less, in even numbers."""
    size = getattr(problem, axis)
    wanted = max(1, size * most // (problem.N * problem.C * problem.HxW))
    if axis == "HxW":
        wanted = max(CUT_LENGTH, wanted) // CUT_STEP * CUT_STEP + size % CUT_STEP  # as ragged as it is
    for step in (1, *EVEN):
        if 0 < wanted // step * step < size:
            yield smaller(problem, axis, wanted // step * step)


def _cuts(problem: Problem, most: int) -> Iterator[Problem]:
    """Problems of at most `most` elements with less of one axis, or of several, one after another in any order."""
    # Whole groups are left out. Where all channels are one, as in a row of LayerNorm, they stay.
    sizes, whole_rows = problem.spec.sizes.values(), not problem.spec.channelwise
    axes = ("N",) if whole_rows and "group" not in sizes else ("N", "group", "HxW")
    for order in itertools.permutations(axes):
        kept = [problem]
        for axis in order:
            kept = [made for one in kept for made in _cut(one, axis, most)]
            yield from (one for one in kept if one.N * one.C * one.HxW <= most)


def _same_work(problem: Problem, cut: Problem, strategy: Strategy, tile: Tile) -> float:
    """How much of what a thread does a cut problem leaves: the product of its launches' shares of work, 1 if it is all.

    The chain of additions of a thread, and how many parts a fold puts together, go with that work. A cut that launches
    other kernels, for instance no fold, counts with its main launch, behind all that launch the same.
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
    """The problem that the CPU executor verifies a tile on: itself, or a smaller one for which the tile is legal.

    Of the problems with fewer samples, groups or positions it is the one that leaves most of a thread's work; of equals
    the smallest, down to `FEW_ELEMENTS`.
    """
    if problem.N * problem.C * problem.HxW <= FEW_ELEMENTS:
        return problem
    waits = any(launch.waits for launch in strategy.launches(problem, tile))
    best, most = problem, (-1.0, 0.0)
    for size in (CPU_ELEMENTS,) if waits else (CPU_ELEMENTS, FEW_ELEMENTS):  # who waits needs somebody to wait for
        whole = (problem,) if problem.N * problem.C * problem.HxW <= size else ()
        for one in (*whole, *_cuts(problem, size)):
            if one == one.canonical() and strategy.refuses(one, tile, device) is None:
                elements = one.N * one.C * one.HxW
                left = float(f"{_same_work(problem, one, strategy, tile):.2g}")  # rounded, so that equals are equals
                rank = left, -float(max(elements, FEW_ELEMENTS // 2))
                if rank > most:
                    best, most = one, rank
    return best
