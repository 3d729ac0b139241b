"""The traffic of a plan, counted on the CPU executor and compared with the byte floor of its problem."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from cunorm.core.arrays import pointer
from cunorm.core.devices import Device
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch
from cunorm.core.terminal import columns
from cunorm.executors.choose import executor
from cunorm.executors.cpu.checked import Count, Moves
from cunorm.executors.cpu.guarded_arrays import ROLES, TENSOR
from cunorm.runtime.plans import Plan
from cunorm.tiling import costmodel

from .reuse import SECTOR_BYTES, Reuse, by_ticket, replay
from .sampling import Sample, arrays_of, floor_bytes, moves_tensors, sample_of, smaller


@dataclass(frozen=True)
class LaunchTraffic:
    """The counted work of one launch.

    Attributes
    ----------
    entry : str
        Name of the kernel.
    blocks, threads, resident : int
        Blocks of the grid; threads per block; blocks that are resident at a time on the whole device.
    roles : dict of str to Moves
        The traffic by role: tensor, parameter, workspace.
    barriers : int
        ``__syncthreads`` of all blocks.
    shuffles : int
        Shuffles, votes and ``__syncwarp`` of all warps.
    shared_requests, shared_wavefronts, shared_ideal : int
        Requests of warps to shared memory; wavefronts that they need; the fewest possible wavefronts.
    """

    entry: str
    blocks: int
    threads: int
    resident: int
    roles: dict[str, Moves]
    barriers: int
    shuffles: int
    shared_requests: int
    shared_wavefronts: int
    shared_ideal: int

    @property
    def barriers_per_block(self) -> float:
        """Barriers per block, on average."""
        return self.barriers / self.blocks

    @property
    def shuffles_per_block(self) -> float:
        """Shuffles per block, summed over its warps, on average."""
        return self.shuffles / self.blocks


#: The counters of a launch besides its traffic.
COUNTED = ("barriers", "shuffles", "shared_requests", "shared_wavefronts", "shared_ideal")


@dataclass(frozen=True)
class Traffic:
    """The traffic of a plan: counted, not timed.

    Attributes
    ----------
    problem : Problem
    device : Device
        The device that determines how many blocks are resident at a time.
    choice : str
        The strategy and its tile.
    floor_bytes : int
        The byte floor: the fewest bytes of tensors that the problem has to move.
    launches : tuple of LaunchTraffic
    reuse : Reuse
        Second reads of tensors.
    sample : Sample or None
        The sample that was counted if the problem is too large.
    """

    problem: Problem
    device: Device
    choice: str
    floor_bytes: int
    launches: tuple[LaunchTraffic, ...]
    reuse: Reuse
    sample: Sample | None = field(default=None)

    def of(self, role: str) -> Moves:
        """The traffic of all launches on arrays of a role: tensors, parameters or the workspace."""
        return sum((launch.roles[role] for launch in self.launches), Moves())

    @property
    def total(self) -> Moves:
        """The traffic of all launches."""
        return sum(map(self.of, ROLES), Moves())

    def over_floor(self, nbytes: int) -> float:
        """Bytes over the byte floor; 0 if the floor is 0."""
        return nbytes / self.floor_bytes if self.floor_bytes else 0.0

    @property
    def tensor_ratio(self) -> float:
        """Bytes of tensors that warps request, each counted once per request, over the byte floor."""
        return self.over_floor(self.of(TENSOR).nbytes)

    @property
    def fetched_ratio(self) -> float:
        """Bytes of the tensors' sectors, each counted once per block and direction, over the byte floor."""
        return self.over_floor(self.of(TENSOR).fetched_nbytes)

    @property
    def bank_conflicts(self) -> float:
        """Wavefronts of shared memory over the fewest possible ones; 1 if no shared memory is accessed."""
        ideal = sum(launch.shared_ideal for launch in self.launches)
        return sum(launch.shared_wavefronts for launch in self.launches) / ideal if ideal else 1.0

    def as_dict(self) -> dict[str, Any]:
        """The traffic as a dict for JSON."""
        ratios = ("tensor_ratio", "fetched_ratio", "bank_conflicts")
        l2 = self.device.l2_bytes
        return {
            "schema": "cunorm-traffic/1",
            "executor": "cpu executor: counted, not timed",
            "problem": asdict(self.problem),
            "device": asdict(self.device),
            "choice": self.choice,
            "sample": None if self.sample is None else asdict(self.sample),
            "floor_bytes": self.floor_bytes,
            **{name: getattr(self, name) for name in ratios},
            "wide_efficiency": self.of(TENSOR).wide_efficiency,
            "efficiency": {role: self.of(role).efficiency for role in ROLES},
            "roles": {role: asdict(self.of(role)) for role in ROLES},
            "reuse": {
                "reads": self.reuse.reads,
                "again": self.reuse.again,
                "within_half_l2": self.reuse.within(l2 // 2),
                "within_l2": self.reuse.within(l2),
                "distance": {f"{share:g}": self.reuse.at(share) for share in (0, 0.25, 0.5, 0.75, 0.9, 1)},
            },
            "launches": [
                asdict(launch) | {name: getattr(launch, name) for name in ("barriers_per_block", "shuffles_per_block")}
                for launch in self.launches
            ],
        }

    def __str__(self) -> str:
        head = [self.problem.describe(), f"{self.choice}; cpu executor: counted, not timed"]
        head += [] if self.sample is None else [str(self.sample)]
        rows: list[tuple[str, ...]] = [
            ("kernel", "role", "loaded", "stored", "/floor", "fetched/floor", "efficiency", "16 bytes")
        ]
        for launch in self.launches:
            for role, moves in launch.roles.items():
                if moves.nbytes:
                    ratios = [f"{self.over_floor(nbytes):.3f}" for nbytes in (moves.nbytes, moves.fetched_nbytes)]
                    wide = f"{moves.wide_efficiency:.2f}" if moves.wide_sectors else "-"
                    sizes = (f"{moves.loaded:,}", f"{moves.stored:,}", *ratios, f"{moves.efficiency:.2f}", wide)
                    rows.append((launch.entry, role, *sizes))
        return "\n".join([*head, *columns(rows, 2)])


# ---- counting -------------------------------------------------------------------------------------------------------


def record(plan: Plan, order: str | None = None) -> list[Count]:
    """Run a plan in the checked build, on arrays made for its problem.

    Parameters
    ----------
    plan : Plan
    order : str, optional
        The order of threads, as in ``CUNORM_CPU_ORDER``.

    Returns
    -------
    list of Count
        One per launch, with a trace.
    """
    cpu, names = executor("cpu"), plan.array_names
    arrays = arrays_of(plan.problem, plan.workspace_nbytes, names, plan.launches)
    present = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    values = plan.values({name: pointer(array) for name, array in present.items()})
    sizes = [0 if array is None else array.nbytes for array in arrays]
    steps, constants = plan.steps(functools.partial(cpu.compile, build="checked"))
    counts: list[Count] = []
    cpu.run(steps, (*values, *constants), plan.names, sizes, counts, plan.place.device, order)
    return counts


def trace_by_tickets(count: Count, launch: Launch) -> Any:
    """The trace of a launch. If blocks draw tickets, the work of each ticket is a separate block in it.

    On a GPU, the blocks that draw the tickets differ from run to run. The order of the tickets does not: when a block
    finishes the work of a ticket, the next ticket is drawn.
    """
    if launch.tickets is None:
        return count.trace
    return by_ticket(count.trace, (count.starts["workspace"] + launch.tickets) // SECTOR_BYTES)


def _counted(plan: Plan) -> tuple[list[LaunchTraffic], Reuse]:
    """Count the launches of a plan, on arrays made for its problem."""
    device = plan.place.device
    # By default each warp runs as far as it can before the next one runs. In random order, the accesses between two
    # reads are those of warps that run concurrently.
    order = "random:0" if any(launch.roams for launch in plan.launches) else None
    counts = record(plan, order)
    resident = [costmodel.resident_blocks(launch, device) * device.multiprocessors for launch in plan.launches]
    known = counts[0].roles
    traces = [trace_by_tickets(count, launch) for count, launch in zip(counts, plan.launches, strict=True)]
    replayed = replay(traces, resident, [role == TENSOR for role in known.values()])
    launches = []
    for count, alive, fetched, asked in zip(counts, resident, replayed.fetched, replayed.asked, strict=True):
        roles = dict.fromkeys(ROLES, Moves())
        for index, (name, moves) in enumerate(count.moved.items()):
            load, store = 2 * index, 2 * index + 1
            seen = {"loaded": int(asked[load]), "stored": int(asked[store])}
            seen |= {"load_fetched": int(fetched[load]), "store_fetched": int(fetched[store])}
            roles[known[name]] += replace(moves, **seen)
        counters = {name: getattr(count, name) for name in COUNTED}
        launches.append(LaunchTraffic(count.kernel, count.blocks, count.threads, alive, roles, **counters))
    reads = sum(launch.roles[TENSOR].load_sectors for launch in launches)
    return launches, Reuse.of(reads, replayed.distances)


def _extended(sample: Sample, launch: Launch, few: LaunchTraffic, many: LaunchTraffic) -> LaunchTraffic:
    """Extrapolate the traffic of a launch from the launches of two smaller problems."""

    def line(a: Any, b: Any, names: Sequence[str]) -> dict[str, Any]:
        return {name: round(sample.extend(getattr(a, name), getattr(b, name))) for name in names}

    moved = [one.name for one in fields(Moves)]
    roles = {role: Moves(**line(few.roles[role], many.roles[role], moved)) for role in ROLES}
    return replace(many, blocks=launch.grid, roles=roles, **line(few, many, COUNTED))


def _sampled(plan: Plan, sample: Sample) -> tuple[list[LaunchTraffic], Reuse]:
    """Count the launches of a plan: those on tensors by a sample, the others whole."""
    assert plan.strategy is not None and plan.tile is not None
    found = []
    for size in (sample.few, sample.many):
        problem = smaller(plan.problem, sample.axis, size)
        launches = tuple(one for one in plan.strategy.launches(problem, plan.tile) if moves_tensors(problem, one))
        workspace = plan.strategy.of(problem, plan.tile).workspace
        found.append(_counted(replace(plan, problem=problem, launches=launches, workspace_nbytes=workspace)))
    (few, near), (many, far) = found
    pairs = zip(few, many, strict=True)
    on_tensors = [moves_tensors(plan.problem, launch) for launch in plan.launches]
    rest = tuple(launch for launch, moves in zip(plan.launches, on_tensors, strict=True) if not moves)
    others = iter(_counted(replace(plan, launches=rest))[0] if rest else ())
    whole = [
        _extended(sample, launch, *next(pairs)) if moves else next(others)
        for launch, moves in zip(plan.launches, on_tensors, strict=True)
    ]
    # If blocks wait for each other, they read the data of a team again before the data of the next team. Distances then
    # do not grow with the number of teams, once they are smaller than the data of the sample.
    turns = sample.axis != "HxW" and any(launch.waits for launch in plan.launches)
    settled = turns and near.at(0.95) <= floor_bytes(smaller(plan.problem, sample.axis, sample.few)) / 2
    return whole, near.extended(far, sample.extend, sample.settle if settled else None)


def measure(plan: Plan) -> Traffic:
    """Count the traffic of a plan, on the CPU executor with the limits of the plan's device, whatever its place.

    Parameters
    ----------
    plan : Plan

    Raises
    ------
    CompileError
        If there is no C++ compiler.
    KernelFault
        If the CPU executor finds a fault in a kernel.
    ValueError
        If the problem is too large and has no sample.
    """
    problem, device = plan.problem, plan.place.device
    if plan.strategy is None or plan.tile is None:
        return Traffic(problem, device, f"nothing to launch: {plan.reason}", 0, (), Reuse(0, 0, ()))
    sample = sample_of(problem, plan.strategy, plan.tile, device)
    launches, reuse = _counted(plan) if sample is None else _sampled(plan, sample)
    return Traffic(problem, device, plan.tile.text, floor_bytes(problem), tuple(launches), reuse, sample)
