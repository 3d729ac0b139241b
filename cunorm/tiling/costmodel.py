"""Cost model: predicted time of (problem, strategy, tile, device), which selects the tile of untuned problems.

The time of a launch is a start-up time plus a norm of three times, which overlap in part:

- the bytes of the launch at the bandwidth of the DRAM;
- the instructions of the busiest multiprocessor at its issue rate;
- the waves of blocks, where a block takes latencies one after another.

What a kernel costs (instructions per pack, latencies per reduction, ...) is in ``costs.json``; see `costs`. The
instructions are counted by the simulator. The latencies are fitted to times measured on an H100, and to simulated ones
for kernels that were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cunorm.core.devices import PARTS, PORTABLE_CLUSTER, WARP, Device
from cunorm.core.problem import PACK_BYTES, Problem
from cunorm.core.strategy import Launch, Strategy, Tile, ceil_div, main_launch

from .costs import Cost, cost_of, kernel_of, kind_of
from .shortlist import Placed, Shortlist, shortlist_of

LAUNCH_SECONDS = 0.65e-6  # from the start of a launch until the first instruction of its blocks
ACHIEVABLE = 0.9  # share of the peak bandwidth that a copy achieves
BYTES_IN_FLIGHT = 64  # loads in flight per thread and tensor: four packs
CACHE_SPEED = 1.5  # bandwidth of the L2 cache over that of DRAM
REPEATED = 0.25  # share of `Launch.repeated` that misses the L1 cache: the L2 cache has it
LEAST_OVERLAP, MOST_OVERLAP = 2.0, 4.0  # see `overlap`
#: Share of the L2 cache that keeps what a call has accessed. Between `FULL` and `EMPTY` times as many accessed bytes,
#: the share of the bytes that are found there again falls from one to zero.
KEPT, FULL, EMPTY = 0.5, 0.75, 1.25
NONPORTABLE = 4.0  # time factor of clusters that not every GPU can launch: defaults avoid them, the tuner tries them
NEAR_TIE = 1.03  # predictions within this factor count as equal: counted facts decide between them, not estimates
BUSY_ENOUGH = 0.9  # if this share of the multiprocessors is busy, none counts as idle
LEAN_ENOUGH = 0.05  # bytes, L2 included, count as equal if their difference takes at most this share of the time
ROUNDS = 2  # steps of the search that starts from a shortlist


@dataclass(frozen=True)
class Choice:
    """A strategy, its tile, the predicted time in seconds, and the launches."""

    strategy: Strategy
    tile: Tile
    seconds: float
    launches: tuple[Launch, ...] = field(repr=False, compare=False)


def resident_blocks(launch: Launch, device: Device) -> int:
    """Blocks of this launch that are resident on one multiprocessor at a time; at least 1."""
    return max(1, device.fitting_blocks(launch.threads, launch.registers, launch.shared_bytes))


class Work(NamedTuple):
    """What a launch does on a device, whatever its kernel costs.

    Attributes
    ----------
    transfers : float
        Seconds that its bytes take at the bandwidth.
    waves : int
        Times that the resident blocks are replaced, the first time included.
    resident : int
        Blocks that are resident on one multiprocessor at a time.
    blocks : int
        Blocks that work.
    busiest : int
        Blocks of the busiest multiprocessor.
    warps : float
        Warps per block.
    packs : float
        Packs per lane, all warps of a block added up.
    rounds, items, phases : float
        See `Launch`, per block.
    flight : float
        Times that a thread fills its loads in flight.
    cluster : int
        Blocks per cluster.
    """

    transfers: float
    waves: int
    resident: int
    blocks: int
    busiest: int
    warps: float
    packs: float
    rounds: float
    items: float
    phases: float
    flight: float
    cluster: int = 1


def work_of(launch: Launch, device: Device) -> Work:
    """What a launch does on a device."""
    resident, multiprocessors = resident_blocks(launch, device), device.multiprocessors
    # If blocks draw tickets, no more blocks work than are resident at once, and they share the work evenly.
    launched = max(1, launch.grid)
    grid = min(launched, resident * multiprocessors) if launch.waits else launched
    moved, share = launch.traffic + launch.cached + int(REPEATED * launch.repeated), launched / grid
    at_once = resident * multiprocessors
    if launch.cluster > 1:  # a few clusters that do not fit beside the others take as long as a whole wave
        at_once = max(1, device.resident_clusters(launch.cluster, resident)) * launch.cluster
    return Work(
        max(launch.traffic - _found_again(launch, device), moved / CACHE_SPEED) / (ACHIEVABLE * device.bandwidth),
        ceil_div(grid, at_once),
        resident,
        grid,
        ceil_div(grid, multiprocessors),
        launch.threads / WARP,
        (launch.packs or moved / PACK_BYTES) / (grid * WARP),
        launch.rounds * share,
        launch.items * share,
        launch.phases * share,
        moved / (grid * launch.threads * launch.streams * BYTES_IN_FLIGHT),
        launch.cluster,
    )


def _found_again(launch: Launch, device: Device) -> float:
    """Bytes of `Launch.reread` that are in the L2 cache."""
    if not launch.reread:
        return 0.0
    accessed = launch.traffic / (KEPT * device.l2_bytes)
    return launch.reread * min(1.0, max(0.0, (EMPTY - accessed) / (EMPTY - FULL)))


def instructions_of(work: Work, cost: Cost) -> float:
    """Predicted instructions of warps per block."""
    return cost.of_pack * work.packs + work.warps * (cost.of_warp + cost.of_round * work.rounds)


def launch_seconds(problem: Problem, launch: Launch, device: Device) -> float:
    """Predicted time of one launch, seconds."""
    cost = cost_of(kernel_of(problem, launch), kind_of(problem, launch))
    seconds = seconds_of(work_of(launch, device), cost, device)
    return seconds * (NONPORTABLE if launch.cluster > PORTABLE_CLUSTER else 1.0)


def seconds_of(work: Work, cost: Cost, device: Device) -> float:
    """Predicted time of work whose kernel has that cost, seconds."""
    instructions = instructions_of(work, cost)
    issue = instructions * work.busiest / (PARTS * device.clock)
    chain = cost.start + cost.phase * work.phases + cost.flight * work.flight + cost.round * work.rounds
    chain += cost.warp * work.warps + cost.cluster * (work.cluster - 1)
    chain += cost.cycles * instructions / (work.warps * device.clock)
    times, power = (cost.stream * work.transfers, issue, work.waves * chain), overlap(work)
    return LAUNCH_SECONDS + math.pow(sum(math.pow(time, power) for time in times), 1 / power)


def overlap(work: Work) -> float:
    """Exponent of the norm that combines the three times of a launch: the larger, the more they overlap.

    A block with one item loads, computes and stores one after another. The more waves and items, the more of them are
    at work at a time; but not the waves of blocks that fill a multiprocessor alone. The numbers are fitted to simulated
    times.
    """
    steps = max(1.0, (work.waves if work.resident > 1 else 1) * work.items)
    return min(MOST_OVERLAP, LEAST_OVERLAP + max(0.0, math.log2(steps) - 1) / 3)


def _seconds(problem: Problem, launches: Iterable[Launch], device: Device) -> float:
    return sum(launch_seconds(problem, launch, device) for launch in launches)


def predict(problem: Problem, strategy: Strategy, tile: Tile, device: Device) -> float:
    """Predicted time of a whole call, seconds."""
    return _seconds(problem, strategy.launches(problem, tile), device)


def evaluated(problem: Problem, strategy: Strategy, tile: Tile, device: Device) -> Choice | None:
    """A tile with its predicted time; None if it is illegal or not worth trying."""
    cut = strategy.of(problem, tile)
    if cut.worth and cut.refuses(device) is None:
        return Choice(strategy, tile, _seconds(problem, cut.launches, device), cut.launches)
    return None


def least_seconds(problem: Problem, launches: Iterable[Launch], device: Device) -> float:
    """Lower bound of all tiles' predicted times: each tensor of the launches once at the bandwidth, in one launch."""
    named = {value for launch in launches for value in launch.arguments.values()}
    moved = sum(problem.nbytes_of(name) for name in problem.spec.tensors if name in named and problem.has(name))
    return LAUNCH_SECONDS + moved / (ACHIEVABLE * device.bandwidth)


def legal(problem: Problem, strategies: Iterable[Strategy], device: Device) -> Iterator[Choice]:
    """All legal tiles of the strategies' search spaces that are worth trying, with their predicted times."""
    for strategy in strategies:
        for tile in strategy.tiles():
            if (found := evaluated(problem, strategy, tile, device)) is not None:
                yield found


def busy(launches: Sequence[Launch], device: Device) -> int:
    """Multiprocessors to which the launch with the most traffic can give a block, at most the share `BUSY_ENOUGH`."""
    return min(main_launch(launches).grid, int(BUSY_ENOUGH * device.multiprocessors))


def _by_time(found: Iterable[Choice]) -> list[Choice]:
    # Times are rounded so that rounding errors do not change the order of equal tiles.
    return sorted(found, key=lambda choice: float(f"{choice.seconds:.9g}"))


def moved(choice: Choice) -> int:
    """Bytes that the launches of a tile move, those from the L2 cache included, but not repeated parameters."""
    return sum(launch.traffic + launch.cached for launch in choice.launches)


def contenders(found: Iterable[Choice], device: Device) -> list[Choice]:
    """The tiles that count as equally fast, by predicted time.

    Their times are within `NEAR_TIE` of the fastest, and of those tiles they leave the fewest multiprocessors idle.
    """
    ordered = _by_time(found)
    near = [choice for choice in ordered if choice.seconds <= NEAR_TIE * ordered[0].seconds]
    at_work = [busy(choice.launches, device) for choice in near]
    return [choice for choice, count in zip(near, at_work, strict=True) if count == max(at_work)]


def default_of(found: Iterable[Choice], device: Device) -> Choice:
    """The tile to use among some that are in the order of strategies and search spaces.

    Of the `contenders`, keep those that move the fewest bytes, within `LEAN_ENOUGH`; return the fastest.
    """
    near = contenders(found, device)
    spare = LEAN_ENOUGH * near[0].seconds * ACHIEVABLE * device.bandwidth
    least = min(map(moved, near))
    return next(choice for choice in near if moved(choice) <= least + spare)


def ranked(problem: Problem, strategies: Iterable[Strategy], device: Device) -> list[Choice]:
    """All legal tiles: the default first, the others by predicted time, equal times in the order of the spaces.

    Raises
    ------
    RuntimeError
        If no strategy accepts the problem. That is a bug in cunorm: for each layout of an op, one strategy accepts all
        problems.
    """
    known = list(strategies)
    default = choose(problem, known, device)
    others = (
        one for one in legal(problem, known, device) if (one.strategy, one.tile) != (default.strategy, default.tile)
    )
    return [default, *_by_time(others)]


def choose(problem: Problem, strategies: Iterable[Strategy], device: Device) -> Choice:
    """The tile of an untuned problem: `default_of` the tiles in the strategies' shortlists and their neighbours.

    It evaluates some dozens of tiles, where `ranked` evaluates thousands.

    Raises
    ------
    RuntimeError
        See `ranked`.
    """
    known = list(strategies)
    found = listed(problem, [shortlist_of(strategy) for strategy in known], device)
    if found is None:  # no tile of the lists is legal
        every = list(legal(problem, known, device))
        if not every:
            raise RuntimeError(f"no strategy takes {problem.describe()} on {device.name}; please report this")
        found = default_of(every, device)
    return found


def listed(problem: Problem, lists: Sequence[Shortlist], device: Device) -> Choice | None:
    """`default_of` the tiles of shortlists and some of their neighbours; None if no tile of the lists is legal.

    A neighbour differs by one step in one field. In each of `ROUNDS` rounds, the neighbours of the current default and
    of the fastest tile are added.
    """
    found: dict[tuple[int, tuple[int, ...]], Choice] = {}  # by strategy and place in its space
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def look(number: int, placed: Iterable[Placed]) -> None:
        for place, tile in placed:
            if (number, place) not in seen:
                seen.add((number, place))
                if (one := evaluated(problem, lists[number].strategy, tile, device)) is not None:
                    found[number, place] = one

    for number, one in enumerate(lists):
        look(number, one.tiles)
    if not found:
        return None
    default = default_of(found.values(), device)
    for _ in range(ROUNDS):
        fastest = min(found.values(), key=lambda choice: choice.seconds)
        before = len(found)
        for number, place in [key for key, choice in found.items() if choice is default or choice is fastest]:
            look(number, lists[number].near(place))
        if len(found) == before:
            break
        default = default_of((choice for _, choice in sorted(found.items())), device)
    return default
