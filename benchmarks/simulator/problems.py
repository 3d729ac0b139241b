"""Simulate the call that solves a problem: all its launches, their times, and what their instructions did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulator import calls, clock, machine
from benchmarks.simulator.clock import Gpu, Timing
from benchmarks.simulator.decode import operation_class
from benchmarks.simulator.machine import Launch, Placed
from cunorm.core.devices import ALLOCATION, WARP
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.cpu.guarded_arrays import role_of
from cunorm.jit.sources import Text
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Plan, Target, plan_for
from cunorm.tiling import costmodel
from cunorm.traffic import sampling

#: Elements of a tensor above which a problem is not simulated: its arrays would not fit, and it would take hours.
LARGEST = 2**27
#: Blocks of a launch in which `instructions_per_element` counts.
SAMPLE = 8
#: Address of the first array, so that a launch has the same addresses, and the same time, in each process.
FIRST_ADDRESS = 0x7F00_0000_0000


@dataclass(frozen=True)
class Simulated:
    """A problem on the simulated clock of a GPU.

    Attributes
    ----------
    problem : Problem
    gpu : Gpu
    plan : Plan
    launches : tuple of Launch
    timings : tuple of Timing
        One per launch.
    """

    problem: Problem
    gpu: Gpu
    plan: Plan
    launches: tuple[Launch, ...]
    timings: tuple[Timing, ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        """Time of all launches."""
        return sum(timing.seconds for timing in self.timings)

    @property
    def floor(self) -> float:
        """Seconds in which a copy would move the bytes that the problem has to move."""
        return sampling.floor_bytes(self.problem) / self.gpu.copy

    @property
    def elements(self) -> int:
        """Elements of x."""
        return self.problem.N * self.problem.C * self.problem.HxW

    def classes(self) -> dict[str, float]:
        """Executed instructions per element, by the classes of `decode.operation_class`, the most frequent first."""
        found: dict[str, float] = {}
        for launch, timing in zip(self.launches, self.timings, strict=True):
            for name, count in by_class(launch, timing).items():
                found[name] = found.get(name, 0) + count * WARP / self.elements
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def instructions(self) -> float:
        """Executed instructions of warps, times the lanes of a warp, per element."""
        return sum(self.classes().values())


def by_class(launch: Launch, timing: Timing) -> dict[str, int]:
    """Executed instructions of warps by class."""
    found: dict[str, int] = {}
    for line, count in zip(launch.kernel.code.lines, timing.counters["warps"], strict=True):
        if count:
            name = operation_class(line.opcode)
            found[name] = found.get(name, 0) + int(count)
    return found


def lines_of(launch: Launch, timing: Timing, what: str = "warps") -> dict[tuple[str, int], int]:
    """A counter summed by the innermost source line of the instructions."""
    found: dict[tuple[str, int], int] = {}
    for number, count in enumerate(timing.counters[what]):
        if count:
            place = (launch.kernel.places(number) or (("?", 0),))[0]
            found[place] = found.get(place, 0) + int(count)
    return found


def plan_of(problem: Problem, gpu: Gpu, tile: Tile | None = None) -> Plan:
    """The plan of a problem; without a tile, with the one that the cost model chooses for the GPU.

    Raises
    ------
    UnsupportedTile
        If the tile is not legal for the problem.
    """
    op = OPS[problem.op]
    if tile is None:
        tile = costmodel.choose(problem, op.strategies.values(), gpu.device).tile
    return plan_for(problem, op.strategies, op.names, Target("cpu", 0, gpu.device), tile)


def launches_of(plan: Plan, text: Text) -> tuple[list[Launch], list[Any]]:
    """The launches of a plan on arrays of their own, and the arrays, which must live as long as the launches run."""
    arrays = sampling.arrays_of(plan.problem, plan.workspace_nbytes, plan.array_names, plan.launches)
    memory, at = {}, FIRST_ADDRESS
    for name, array in zip(plan.array_names, arrays, strict=True):
        if array is not None:
            memory[name] = Placed(name, at, array.nbytes, role_of(name), array.ctypes.data)
            at += -(-array.nbytes // ALLOCATION) * ALLOCATION
    values = plan.values({name: one.address for name, one in memory.items()})
    return calls.launches(plan, values, list(memory.values()), text), arrays


def refuses(problem: Problem) -> str | None:
    """The error message for a problem that is too large to be simulated, or None."""
    elements = problem.N * problem.C * problem.HxW
    if elements <= LARGEST:
        return None
    return f"{problem.sizes_text}: {elements} elements, expected at most {LARGEST} to be simulated"


def simulate(
    problem: Problem,
    gpu: Gpu,
    tile: Tile | None = None,
    progress: Callable[[str], None] = lambda text: None,
    text: Text = "specialised",
) -> Simulated:
    """Time the launches of a problem. The L2 cache first holds unrelated data; the launches share it.

    Parameters
    ----------
    problem : Problem
    gpu : Gpu
        One of `clock.GPUS`.
    tile : Tile, optional
        None: the cost model's choice.
    progress : callable
        Receives a text before each launch.
    text : str
        Which of the kernels' texts.

    Raises
    ------
    ValueError
        If the problem is too large.
    KernelFault, UnsupportedTile
        See `machine.run` and `plan_of`.
    """
    if (sentence := refuses(problem)) is not None:
        raise ValueError(sentence)
    plan = plan_of(problem, gpu, tile)
    launches, kept = launches_of(plan, text)
    timings, cache = [], clock.flushed(gpu)
    for launch in launches:
        progress(f"{launch.kernel.code.entry}: {launch.blocks} blocks of {launch.block_threads} threads")
        timings.append(clock.timed(launch, gpu, cache))
    del kept
    return Simulated(problem, gpu, plan, tuple(launches), tuple(timings))


def instructions_per_element(problem: Problem, gpu: Gpu, tile: Tile | None = None, text: Text = "specialised") -> float:
    """Executed instructions per element, without a clock: the number that a change of a kernel's text changes.

    The first `SAMPLE` blocks of a launch stand for all. If blocks wait for each other, all of them run.
    """
    plan = plan_of(problem, gpu, tile)
    launches, kept = launches_of(plan, text)
    total = 0.0
    for launch, planned in zip(launches, plan.launches, strict=True):
        blocks = launch.blocks if planned.waits else min(launch.blocks, -(-SAMPLE // launch.cluster) * launch.cluster)
        total += float(machine.run(launch, 0, blocks)["warps"].sum()) * launch.blocks / blocks
    del kept
    return total * WARP / (problem.N * problem.C * problem.HxW)
