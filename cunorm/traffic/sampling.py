"""The byte floor of a problem, arrays for counting its traffic, and samples, which are smaller problems to count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.core.arrays import DTYPES
from cunorm.core.devices import ALLOCATION, Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile, main_launch
from cunorm.tiling import costmodel

from .reuse import SECTOR_BYTES

#: Maximum elements of all tensors for counting a problem whole (some 10 s), and for counting it at all (a minute).
WHOLE, LARGEST = 2**25, 2**28
WAVES = 2  # of blocks: minimum in a sample
TEAMS = 4  # minimum in a sample if blocks wait for each other: some lie between the first and the last
PERIOD = 65521  # number of random values, then repeated: a prime, so that neighbouring slices differ


def tensors_moved(problem: Problem) -> list[str]:
    """The tensors that the op has to read or write at least once.

    They are the compulsory misses of Hill and Smith, "Evaluating associativity in CPU caches", IEEE Trans. Computers
    38, 1989: no cache avoids them. All tensors of the problem count, except x if it is not read (`Problem.reads_x`).
    """
    if not problem.outputs:
        return []
    return [name for name in problem.spec.tensors if problem.has(name) and (name != "x" or problem.reads_x)]


def floor_bytes(problem: Problem) -> int:
    """The byte floor: the fewest bytes of tensors that the problem has to move, without parameters and statistics."""
    return sum(map(problem.nbytes_of, tensors_moved(problem)))


# ---- arrays ---------------------------------------------------------------------------------------------------------


def moves_tensors(problem: Problem, launch: Launch) -> bool:
    """Whether a launch accesses a tensor or prepares one that does. Others move little and are counted whole."""
    return launch.prepares or any(value in problem.spec.tensors for value in launch.arguments.values())


def _placed(nbytes: int) -> NDArray[np.uint8]:
    whole = np.empty(nbytes + ALLOCATION, np.uint8)
    start = -whole.ctypes.data % ALLOCATION
    return whole[start : start + nbytes]


def arrays_of(
    problem: Problem, workspace_nbytes: int, names: Sequence[str], launches: Sequence[Launch]
) -> list[NDArray[np.uint8] | None]:
    """Arrays for launches, in the order of a plan's names, as bytes with CUDA's alignment; None for absent arrays.

    The values are between 1 and 2, so they are finite and positive, and do not round to a special value.
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
            # Counts have integer dtypes, which are not in DTYPES.
            values = (1 + random.random(min(count, PERIOD))).astype(DTYPES.get(dtype, dtype))
            made = _placed(count * values.itemsize)
            made.view(values.dtype)[:] = np.resize(values, count)
        found.append(made)
    return found


# ---- samples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Two smaller problems that are counted instead of a problem; their counts are extrapolated linearly.

    Attributes
    ----------
    axis : str
        The size that is smaller: N (the rows of LayerNorm), group (with its channels), or HxW.
    total : int
        That size in the problem.
    few, many : int
        That size in the two smaller problems.
    """

    axis: str
    total: int
    few: int
    many: int

    def __str__(self) -> str:
        return f"counted with {self.axis} = {self.few} and {self.many}, extrapolated linearly to {self.total}"

    def extend(self, few: Any, many: Any) -> Any:
        """Extrapolate a count linearly to the whole problem."""
        return many + (many - few) * (self.total - self.many) / (self.many - self.few)

    def settle(self, few: Any, many: Any) -> Any:
        """Extrapolate a value that converges as the problem grows.

        Only the first and the last slices differ, and their share decreases as 1 / size.
        """
        return many + (many - few) * (1 / self.many - 1 / self.total) / (1 / self.few - 1 / self.many)


def smaller(problem: Problem, axis: str, size: int) -> Problem:
    """The problem with another number of samples, of positions, or of groups and their channels."""
    if axis == "N":
        return replace(problem, N=size)
    if axis == "HxW":
        return replace(problem, HxW=size)
    return replace(problem, C=size * problem.group_channels, group=size)


def _continues(strategy: Strategy, tile: Tile, problem: Problem, device: Device, sample: Sample) -> bool:
    """Whether the two smaller problems are legal, and their launches on tensors extrapolate to the problem's."""

    def launches(of: Problem) -> list[Launch]:
        return [launch for launch in strategy.launches(of, tile) if moves_tensors(of, launch)]

    def shape(launches: list[Launch]) -> list[tuple[object, ...]]:
        # The arguments are compared too: with one row of partial results there is no workspace.
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
    # In channels-last data, the threads of a block share neighbouring channels: with fewer channels, each thread does
    # different work. So HxW is reduced: its chunks are all alike. For statistics per channel, N has that role.
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
    """The sample to count instead of the problem; None: count the problem itself.

    It is the smallest sample that has `WAVES` waves of blocks on the device and consists of whole sectors, so that its
    slices start at all the offsets in a sector at which the problem's slices start. If there is none, it is the sample
    with the most blocks among those of at most `WHOLE` elements, or, for a problem of more than `LARGEST` elements, of
    at most `LARGEST`.

    If blocks wait for each other, reuse distances are those of the problem only with several teams. Such a problem is
    counted whole up to `LARGEST` elements, and its samples have up to `LARGEST` elements.

    Raises
    ------
    ValueError
        If the problem is too large to be counted and has no sample.
    """
    turns = any(launch.waits for launch in strategy.launches(problem, tile))
    elements = len(tensors_moved(problem)) * problem.N * problem.C * problem.HxW
    if elements <= (LARGEST if turns else WHOLE):
        return None
    kept = None if turns else _best_sample(problem, strategy, tile, device, WHOLE)
    if kept is None and elements > LARGEST:
        kept = _best_sample(problem, strategy, tile, device, LARGEST, TEAMS if turns else 0)
        if kept is None:
            raise ValueError(
                f"traffic: {problem.describe()} has {elements} elements in its tensors; the CPU executor counts up to "
                f"{LARGEST}, and this problem cannot be cut into smaller samples; count a smaller problem"
            )
    return kept


def _best_sample(
    problem: Problem, strategy: Strategy, tile: Tile, device: Device, largest: int, teams: int = 0
) -> Sample | None:
    """See `sample_of`; a sample of at most ``largest`` elements and at least ``teams`` teams."""
    tensors, kept, most = len(tensors_moved(problem)), None, 0
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
