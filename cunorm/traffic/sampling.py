"""What of a problem is counted: the fewest bytes it has to move, arrays for it, and smaller problems in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.arrays import DTYPES
from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile, main_launch
from cunorm.tiling import costmodel

from .reuse import SECTOR_BYTES

#: Elements of all tensors up to which a problem is counted whole, and up to which at all: some 10 s, and a minute.
WHOLE, LARGEST = 2**25, 2**28
WAVES = 2  # of blocks, that a sample has at least
TEAMS = 4  # that the smaller problem of a sample has at least, where blocks take turns: between the first and the last
ALIGNMENT = 512  # of CUDA's allocators
PERIOD = 65521  # random values before they come again: a prime, so that neighbouring slices differ


def tensors_moved(problem: Problem) -> int:
    """Tensors of x's size that the op has to read or write at least once.

    These are the compulsory misses of Hill and Smith, "Evaluating associativity in CPU caches", IEEE Trans. Computers
    38, 1989: what no cache avoids. All that the problem has are moved, but x where only dbeta is wanted.
    """
    if not problem.outputs:
        return 0
    return sum(problem.has(name) and (name != "x" or problem.reads_x) for name in problem.spec.tensors)


def floor_bytes(problem: Problem) -> int:
    """The fewest bytes of tensors that the problem has to move; parameters and statistics are not among them."""
    return tensors_moved(problem) * problem.nbytes


# ---- arrays ---------------------------------------------------------------------------------------------------------


def moves_tensors(problem: Problem, launch: Launch) -> bool:
    """Whether a launch reads or writes a tensor, or prepares one that does; others move little, and count whole."""
    return launch.prepares or any(value in problem.spec.tensors for value in launch.arguments.values())


def _placed(nbytes: int) -> NDArray[np.uint8]:
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


def arrays_of(
    problem: Problem, workspace_nbytes: int, names: Sequence[str], launches: Sequence[Launch]
) -> list[NDArray[np.uint8] | None]:
    """Arrays for launches by the names of a plan, as bytes where CUDA would align them; None for absent ones.

    Values lie between 1 and 2: finite, positive where they have to be, and rounded to nothing special.
    """
    named = {value for launch in launches for value in launch.arguments.values()}
    random = np.random.default_rng(0)
    found: list[NDArray[np.uint8] | None] = []
    for name in names:
        if name not in named or not (name == "workspace" or problem.has(name)):
            found.append(None)
            continue
        if name == "workspace":
            made = _placed(workspace_nbytes)
            made.fill(0xFF)
        else:
            count, dtype = problem.elements_of(name), problem.dtype_of(name)
            # Not all DTYPES: counts are whole numbers.
            values = (1 + random.random(min(count, PERIOD))).astype(DTYPES.get(dtype, dtype))
            made = _placed(count * values.itemsize)
            made.view(values.dtype)[:] = np.resize(values, count)
        found.append(made)
    return found


# ---- samples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What was counted in place of a problem: two smaller ones, whose counts are continued as straight lines.

    Attributes
    ----------
    axis : str
        N (the rows of LayerNorm), group with its channels, or HxW.
    total : int
        What the problem has of it.
    few, many : int
        What the two have.
    """

    axis: str
    total: int
    few: int
    many: int

    def __str__(self) -> str:
        return f"counted with {self.axis} = {self.few} and {self.many}, continued as a line to {self.total}"

    def extend(self, few: Any, many: Any) -> Any:
        """A count of the whole problem from those of the two."""
        return many + (many - few) * (self.total - self.many) / (self.many - self.few)

    def settle(self, few: Any, many: Any) -> Any:
        """A value of the whole problem that does not grow with it, but for the first and the last slices' share."""
        return many + (many - few) * (1 / self.many - 1 / self.total) / (1 / self.few - 1 / self.many)


def smaller(problem: Problem, axis: str, size: int) -> Problem:
    """The problem with fewer samples, or positions, or groups and their channels."""
    if axis == "N":
        return replace(problem, N=size)
    if axis == "HxW":
        return replace(problem, HxW=size)
    return replace(problem, C=size * problem.group_channels, group=size)


def _continues(strategy: Strategy, tile: Tile, problem: Problem, device: Device, sample: Sample) -> bool:
    """Whether the two smaller problems are legal, and their launches on tensors lie on a line with the problem's."""

    def launches(of: Problem) -> list[Launch]:
        return [launch for launch in strategy.launches(of, tile) if moves_tensors(of, launch)]

    def shape(launches: list[Launch]) -> list[tuple[object, ...]]:
        # Also the arrays that they take: with one row of partial results there is no workspace.
        arrays = ([one for one in launch.arguments.values() if isinstance(one, str)] for launch in launches)
        return [(one.entry, one.threads, one.layout, *names) for one, names in zip(launches, arrays, strict=True)]

    pair = [smaller(problem, sample.axis, size) for size in (sample.few, sample.many)]
    if any(one != one.canonical() or strategy.refuses(one, tile, device) is not None for one in pair):
        return False
    whole = launches(problem)
    few, many = map(launches, pair)
    if not shape(few) == shape(many) == shape(whole):
        return False
    expected = [sample.extend(a.grid, b.grid) for a, b in zip(few, many, strict=True)]
    return all(abs(launch.grid - grid) <= 1 + launch.grid / 500 for launch, grid in zip(whole, expected, strict=True))


def _samples(problem: Problem, tile: Tile) -> Iterator[Sample]:
    # Channels side by side are shared out among the threads of a block: with fewer, each does something else. But their
    # rows are cut into chunks that are all alike; a channel's statistics have the samples for that.
    axes = {"N": 1}
    if problem.layout == "NCHW" and problem.HxW > 1:
        axes["group"] = 1
    elif "chunk" in tile.as_dict() and not problem.spec.channelwise:
        axes["HxW"] = tile.chunk
    for axis, few in axes.items():
        total = getattr(problem, axis)
        while 2 * few < total:
            yield Sample(axis, total, few, 2 * few)
            few *= 2


def sample_of(problem: Problem, strategy: Strategy, tile: Tile, device: Device) -> Sample | None:
    """What to count in place of the problem; None: the problem itself.

    The smallest sample that has two waves of blocks on the device and whose slices start anywhere in a sector that the
    problem's do; if there is none, the one of most blocks that is no larger than `WHOLE`, or, for a problem larger than
    `LARGEST`, than that. Blocks that take turns need several teams to be as far apart as in the problem: those are
    counted whole, and in samples, up to `LARGEST`.

    Raises
    ------
    ValueError
        If the problem is too large to be counted, and cannot be cut.
    """
    turns = any(launch.waits for launch in strategy.launches(problem, tile))
    elements = tensors_moved(problem) * problem.N * problem.C * problem.HxW
    if elements <= (LARGEST if turns else WHOLE):
        return None
    kept = None if turns else _best_sample(problem, strategy, tile, device, WHOLE)
    if kept is None and elements > LARGEST:
        kept = _best_sample(problem, strategy, tile, device, LARGEST, TEAMS if turns else 0)
        if kept is None:
            raise ValueError(
                f"traffic: {problem.describe()} has {elements} elements in its tensors; the CPU executor counts up to "
                f"{LARGEST}, and this problem cannot be cut into samples that move a part of its bytes"
            )
    return kept


def _best_sample(
    problem: Problem, strategy: Strategy, tile: Tile, device: Device, largest: int, teams: int = 0
) -> Sample | None:
    """As `sample_of`, of at most so many elements, and at least so many teams."""
    tensors, kept, most = tensors_moved(problem), None, 0
    for sample in _samples(problem, tile):
        few, many = (smaller(problem, sample.axis, size) for size in (sample.few, sample.many))
        if teams and few.N * few.group < teams * tile.as_dict().get("groups", 1):
            continue
        elements = tensors * many.N * many.C * many.HxW
        whole_sectors = elements * problem.itemsize // 2 % SECTOR_BYTES == 0
        if elements > largest or not whole_sectors or not _continues(strategy, tile, problem, device, sample):
            continue
        main = main_launch(strategy.launches(many, tile))
        if main.grid > most:
            kept, most = sample, main.grid
        if main.grid >= WAVES * costmodel.resident_blocks(main, device) * device.multiprocessors:
            return sample
    return kept
