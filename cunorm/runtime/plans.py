"""The one path from a Problem to running kernels: plans, their launches, what an executor gets."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cunorm.core.arrays import Array
from cunorm.core.devices import Device
from cunorm.core.locks import Lock
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile
from cunorm.executors.choose import executor
from cunorm.jit import sources
from cunorm.tiling import costmodel, lookup

#: A launch as executors take it: kernel, blocks, threads, bytes of shared memory, what picks its arguments, blocks of a
#: cluster, and how many are resident at once where blocks wait for each other (0: they do not).
Step = tuple[Any, int, int, int, Callable[[Any], Any], int, int]
#: Plans kept; an application meets few problems, a fuzzer many.
KEPT_PLANS = 4096


@dataclass(frozen=True)
class Target:
    """Where a call runs: the kind of executor, its GPU's ordinal, and the device whose limits and tiles hold."""

    kind: str
    ordinal: int
    device: Device


@dataclass(eq=False)  # a plan is itself: a key of calls
class Plan:
    """A prepared call. Get one from `cunorm.plan`; call it with the arrays of the op.

    Attributes
    ----------
    problem : Problem
    place : Target
    strategy : Strategy or None
        None where there is nothing to launch (no elements, or no outputs wanted).
    tile : Tile or None
    reason : str
        Which link of the tile chain chose it, and why.
    launches : tuple of Launch
    workspace_nbytes : int
        Bytes of workspace that a call needs; 0 for none.
    """

    problem: Problem
    place: Target
    strategy: Strategy | None
    tile: Tile | None
    reason: str
    launches: tuple[Launch, ...]
    workspace_nbytes: int
    names: tuple[str, ...] = field(repr=False)
    caller: Callable[..., Any] | None = field(default=None, repr=False)
    counter: Callable[[Plan], Any] | None = field(default=None, repr=False)
    _ready: list[Step] | None = field(default=None, init=False, repr=False)
    _constants: tuple[int | float, ...] = field(default=(), init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def compile(self) -> Plan:
        """Compile the kernels now rather than at the first call; returns the plan itself.

        Once, whatever the number of threads; a signal handler that calls the plan meanwhile compiles for itself.

        Raises
        ------
        CompileError
        """
        if self._ready is None:
            with self._lock.held:
                if self._ready is None:
                    self._prepare()
        return self

    def _prepare(self) -> None:
        made = functools.partial(executor(self.place.kind).compile, ordinal=self.place.ordinal)
        ready, constants = self.steps(made)
        if self.place.kind == "gpu":
            for kernel, *_, cluster, _ in ready:
                executor("gpu").allow_cluster(kernel, cluster)
        self._constants = constants  # first: whoever sees _ready uses both
        self._ready = ready

    def steps(self, compile: Callable[[str, str], Any]) -> tuple[list[Step], tuple[int | float, ...]]:
        """The launches as an executor takes them, and the numbers that they take behind a call's.

        Parameters
        ----------
        compile : callable
            Text and entry of a kernel -> what the executor launches.
        """
        constants: list[int | float] = []
        ready: list[Step] = []
        for launch in self.launches:
            assert self.strategy is not None and self.tile is not None
            text = sources.kernel_text(launch, self.problem, self.strategy, self.tile)
            kernel = compile(text, launch.entry)
            places = []
            for parameter in sources.parameters(launch.kernel, launch.entry, launch.arguments):
                argument = launch.arguments[parameter]
                if isinstance(argument, str):
                    places.append(self.names.index(argument))
                else:
                    places.append(len(self.names) + len(constants))
                    constants.append(argument)
            pick = operator.itemgetter(*places)
            resident = 0
            if launch.waits:
                device = self.place.device
                resident = min(launch.grid, costmodel.resident_blocks(launch, device) * device.multiprocessors)
            ready.append((kernel, launch.grid, launch.threads, launch.shared_bytes, pick, launch.cluster, resident))
        return ready, tuple(constants)

    def run(self, values: Sequence[int | float], sizes: Sequence[int] = ()) -> None:
        """Launch the kernels.

        Parameters
        ----------
        values : sequence of int or float
            Addresses (0: absent array) and numbers in the order of ``names``.
        sizes : sequence of int
            Bytes of the arrays at these addresses; the CPU executor checks bounds by them.
        """
        if self._ready is None:
            self.compile()
        assert self._ready is not None
        everything = (*values, *self._constants)
        if self.place.kind == "cpu":
            executor("cpu").run(self._ready, everything, self.names, sizes, device=self.place.device)
            return
        launch = executor(self.place.kind).launch
        for kernel, grid, threads, shared_bytes, pick, _, _ in self._ready:
            launch(kernel, grid, threads, shared_bytes, pick(everything))

    def __call__(self, *arrays: Array, out: Any = None, workspace: Array | None = None, **options: Any) -> Any:
        """Run the op on these arrays, as its public function does; they must be of the plan's problem."""
        assert self.caller is not None, "a plan from cunorm.plan"
        return self.caller(self, *arrays, out=out, workspace=workspace, **options)

    def traffic(self) -> Any:
        """What it moves: bytes, sectors, reuse, bank conflicts, beside the fewest bytes that its problem has to move.

        Counted on the CPU executor, with arrays of its own, whatever the plan's place; never timed. Takes seconds.

        Returns
        -------
        cunorm.traffic.traffic.Traffic

        Raises
        ------
        CompileError, KernelFault
        ValueError
            If the problem is too large to be counted.
        """
        assert self.counter is not None, "a plan from cunorm.plan"
        return self.counter(self)

    def explain(self) -> str:
        """What will run, and why, for people."""
        where = "cpu executor: exact, not fast; posing as " if self.place.kind == "cpu" else ""
        lines = [self.problem.describe(), f"device     {where}{self.place.device.name}"]
        if self.strategy is None or self.tile is None:
            return "\n".join([*lines, f"strategy   none: {self.reason}"])
        fields = ", ".join(f"{name}={value}" for name, value in self.tile.fields)
        lines += [
            f"strategy   {self.strategy.name} ({fields})",
            f"chosen by  {self.reason}",
            f"workspace  {self.workspace_nbytes} bytes",
        ]
        lines += [
            f"launch     {launch.entry}: {launch.grid} blocks of {launch.threads} threads, "
            f"{launch.shared_bytes} bytes of shared memory"
            for launch in self.launches
        ]
        return "\n".join(lines)


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_for(
    problem: Problem,
    strategies: Mapping[str, Strategy],
    names: tuple[str, ...],
    place: Target,
    tile: Tile | None = None,
) -> Plan:
    """The plan of a problem at a place, made once.

    Parameters
    ----------
    problem : Problem
    strategies : mapping of str to Strategy
        The op's.
    names : tuple of str
        What a launch may name: the op's arrays and numbers, in the order in which `Plan.run` takes them.
    place : Target
    tile : Tile, optional
        Explicit choice.

    Raises
    ------
    ValueError, UnsupportedTile
        As `cunorm.tiling.lookup.resolve`.
    """
    problem = problem.canonical()
    # What tables say takes part in the choice of a tile; a plan that exists keeps its own.
    key = (problem, place, tile, None if tile is not None else lookup.stamp(place.device))
    plan = _plans.get(key)
    if plan is None:
        if problem.N * problem.C * problem.HxW == 0 or not problem.outputs:
            why = "no output is wanted" if not problem.outputs else "there are no elements; results are filled"
            if tile is not None:  # a wrong tile is wrong whatever the sizes
                N, C, HxW = max(1, problem.N), problem.C or problem.group, max(1, problem.HxW)
                lookup.resolve(replace(problem, N=N, C=C, HxW=HxW), strategies, place.device, tile)
            plan = Plan(problem, place, None, None, why, (), 0, names)
        else:
            strategy, chosen, reason = lookup.resolve(problem, strategies, place.device, tile)
            cut = strategy.of(problem, chosen)
            plan = Plan(problem, place, strategy, chosen, reason, cut.launches, cut.workspace, names)
        if len(_plans) >= KEPT_PLANS:
            _plans.clear()
        plan = _plans.setdefault(key, plan)
    return plan
