"""Analytic time of (problem, strategy, tile, device): the default tile of what nobody has tuned.

A normalisation kernel waits for memory. A launch takes a start-up time, then the longest of three: its bytes at what
the DRAM gives; the busiest multiprocessor's bytes at its largest share of that; and its waves of blocks, each of which
takes its latencies and its own bytes at what it keeps in flight. The numbers below that are not device facts are
estimates; the tuner measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile, ceil_div, main_launch

from .shortlist import Placed, Shortlist, shortlist_of

LAUNCH_SECONDS = 2.5e-6  # start of one kernel behind another on a stream
ACHIEVABLE = 0.9  # share of the peak bandwidth that a copy reaches
LATENCY_SECONDS = 0.8e-6  # one load from DRAM
BYTES_IN_FLIGHT = 64  # of a tensor, that a thread of these kernels asks for at a time: four packs
CACHE_SPEED = 1.5  # bytes a second from the L2 cache over those from DRAM
SOLO_SHARE = 1.25  # how far above its even share of the bandwidth a multiprocessor gets when others are idle
PHASED = 1.3  # time of a lone resident block that does not load while it stores, against one that does
NONPORTABLE = 4.0  # factor on clusters that not every GPU takes: for the tuner to try, not by default
PORTABLE_CLUSTER = 8
NEAR_TIE = 1.1  # predictions that differ by less are one to the model: what is counted decides, and not estimated
BUSY_ENOUGH = 0.9  # share of the multiprocessors from which none counts as idle
LEAN_ENOUGH = 0.05  # share of the time that bytes take at the bandwidth, from the L2 cache too: so much is no more
ABREAST = 1.02  # factor for each doubling of what keeps step: blocks that need places at one time, teams at a barrier
CLUSTER_SECONDS = 0.3e-6  # a barrier of a cluster, and what its blocks read of each other
REGISTER_STEP, WARP = 8, 32
PARTS = 4  # of a multiprocessor, each with a quarter of its registers; the model counts them as one pool
ROUNDS = 2  # of steps away from a shortlist


@dataclass(frozen=True)
class Choice:
    """A strategy, its tile, the predicted time in seconds, and what would be launched."""

    strategy: Strategy
    tile: Tile
    seconds: float
    launches: tuple[Launch, ...] = field(repr=False, compare=False)


def fitting_blocks(device: Device, threads: int, registers: int, shared_bytes: int = 0, parts: int = 1) -> int:
    """Blocks of a kernel that are resident on one multiprocessor at a time; 0 if none fits.

    Parameters
    ----------
    device : Device
    threads : int
        Of a block.
    registers : int
        Of a thread.
    shared_bytes : int
        Of a block, without what the driver keeps.
    parts : int
        Of a multiprocessor, each with its share of the registers: `PARTS` as NVIDIA's occupancy calculator has it. With
        1 the result may be larger, by few blocks, where a block has fewer warps than `PARTS`.
    """
    warps = ceil_div(threads, WARP)
    of_warp = ceil_div(max(registers, 1), REGISTER_STEP) * REGISTER_STEP * WARP
    return min(
        device.blocks_per_multiprocessor,
        device.threads_per_multiprocessor // (warps * WARP),
        parts * (device.registers_per_multiprocessor // parts // of_warp) // warps,
        device.shared_memory_per_multiprocessor // (shared_bytes + device.shared_memory_reserved),
    )


def resident_blocks(launch: Launch, device: Device) -> int:
    """Blocks of this launch that fit on one multiprocessor at a time; at least 1."""
    return max(1, fitting_blocks(device, launch.threads, launch.registers, launch.shared_bytes))


def launch_seconds(launch: Launch, device: Device) -> float:
    """Predicted time of one launch, seconds."""
    resident = resident_blocks(launch, device)
    bandwidth = ACHIEVABLE * device.bandwidth
    moved = launch.traffic + launch.cached
    # Blocks that take their work by ticket are as many as are resident at once, and share it out evenly.
    grid = min(launch.grid, resident * device.multiprocessors) if launch.waits else launch.grid
    of_block, phases = moved / grid, launch.phases * launch.grid / grid
    # A block takes a latency for each of its phases, and its bytes at the rate of what it keeps in flight.
    in_flight = launch.threads * launch.streams * BYTES_IN_FLIGHT
    block = phases * LATENCY_SECONDS + of_block * LATENCY_SECONDS / in_flight
    block += CLUSTER_SECONDS * (launch.cluster > 1)
    waves = max(1.0, grid / (resident * device.multiprocessors))
    # The busiest multiprocessor has its blocks' bytes to move, at no more than its largest share of the bandwidth.
    even = 1 / min(grid, device.multiprocessors)
    busiest = launch.traffic * (even if launch.waits else ceil_div(grid, device.multiprocessors) / grid)
    share = SOLO_SHARE * bandwidth / device.multiprocessors
    if launch.phases > 1 and resident == 1 and launch.grid > device.multiprocessors:
        busiest *= PHASED
    transfers = max(launch.traffic, moved / CACHE_SPEED) / bandwidth
    seconds = max(transfers, busiest / share, waves * block)
    seconds *= math.pow(ABREAST, math.log2(launch.abreast))
    return LAUNCH_SECONDS + seconds * (NONPORTABLE if launch.cluster > PORTABLE_CLUSTER else 1.0)


def _seconds(launches: Iterable[Launch], device: Device) -> float:
    return sum(launch_seconds(launch, device) for launch in launches)


def predict(problem: Problem, strategy: Strategy, tile: Tile, device: Device) -> float:
    """Predicted time of a whole call, seconds."""
    return _seconds(strategy.launches(problem, tile), device)


def evaluated(problem: Problem, strategy: Strategy, tile: Tile, device: Device) -> Choice | None:
    """A tile of the space with its predicted time, if it is legal and worth trying."""
    cut = strategy.of(problem, tile)
    if cut.worth and cut.refuses(device) is None:
        return Choice(strategy, tile, _seconds(cut.launches, device), cut.launches)
    return None


def least_seconds(problem: Problem, launches: Iterable[Launch], device: Device) -> float:
    """No tile of the problem is predicted to take less: its tensors at the bandwidth, each once, in one launch."""
    named = {value for launch in launches for value in launch.arguments.values()}
    return LAUNCH_SECONDS + len(named & problem.spec.tensors) * problem.nbytes / (ACHIEVABLE * device.bandwidth)


def legal(problem: Problem, strategies: Iterable[Strategy], device: Device) -> Iterator[Choice]:
    """Every legal tile of the strategies' search spaces that is worth trying, with its predicted time."""
    for strategy in strategies:
        for tile in strategy.tiles():
            if (found := evaluated(problem, strategy, tile, device)) is not None:
                yield found


def busy(launches: Sequence[Launch], device: Device) -> int:
    """Multiprocessors that the launch which moves most has a block for."""
    return min(main_launch(launches).grid, device.multiprocessors)


def _by_time(found: Iterable[Choice]) -> list[Choice]:
    # Rounded, so that equals by arithmetic are equals in order.
    return sorted(found, key=lambda choice: float(f"{choice.seconds:.9g}"))


def default_of(found: Iterable[Choice], device: Device) -> Choice:
    """The tile to take of some, which come in the order of strategies and spaces.

    The predicted fastest; of those within `NEAR_TIE` of it, the fastest that leaves no multiprocessors idle, or as few
    as any, and of these moves no more bytes than any.
    """
    ordered = _by_time(found)
    near = [choice for choice in ordered if choice.seconds <= NEAR_TIE * ordered[0].seconds]
    enough = int(BUSY_ENOUGH * device.multiprocessors)
    at_work = [min(busy(choice.launches, device), enough) for choice in near]
    near = [choice for choice, count in zip(near, at_work, strict=True) if count == max(at_work)]
    moved = [sum(launch.traffic + launch.cached for launch in choice.launches) for choice in near]
    spare = LEAN_ENOUGH * near[0].seconds * ACHIEVABLE * device.bandwidth
    return next(choice for choice, count in zip(near, moved, strict=True) if count <= min(moved) + spare)


def ranked(problem: Problem, strategies: Iterable[Strategy], device: Device) -> list[Choice]:
    """Every legal tile, the default first, then by predicted time; equals in the order of strategies and spaces.

    Raises
    ------
    RuntimeError
        If no strategy takes the problem: a fault of cunorm, since every op has one for each layout that takes all.
    """
    known = list(strategies)
    default = choose(problem, known, device)
    others = (
        one for one in legal(problem, known, device) if (one.strategy, one.tile) != (default.strategy, default.tile)
    )
    return [default, *_by_time(others)]


def choose(problem: Problem, strategies: Iterable[Strategy], device: Device) -> Choice:
    """The default of a problem that nobody has tuned: `default_of` the strategies' shortlists, and of what is near.

    So it looks at some dozens of the thousands of tiles that `ranked` does.

    Raises
    ------
    RuntimeError
        As `ranked`.
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
    """`default_of` lists of tiles, and of those that differ by a step of one field; None if none of the lists is legal.

    The steps are those from the default and from the fastest, `ROUNDS` times.
    """
    found: dict[tuple[int, tuple[int, ...]], Choice] = {}  # by the order of strategies and spaces
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
