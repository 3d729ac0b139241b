"""The compile gate: every kernel, dtype and layout, with tiles that refuses() accepts, through ptxas.

What refuses() accepts must not spill: a spill is a fault of the formula in refuses(). NVRTC alone does it, no GPU.

The full product is hours of ptxas, so it comes in three sizes, none of which changes by itself. `all`: every tile for
every (architecture, NVRTC) pair. `spread`: five tiles of each strategy, dtype and layout, from the most demanding to
the least, for every pair. `choice`: the most demanding for two pairs (16-bit dtypes, for which the formula says the
same, for one each), one other for one, and for one what other kernels the strategy has; the pairs move on from case to
case, so that the dtypes of a strategy together meet every pair. The most demanding are compiled for problems that take
more registers (an activation, wide parameters), the others without; `spread` and `all` both ways.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

from cunorm.core import settings
from cunorm.core.devices import KNOWN, Device
from cunorm.core.errors import CompileError
from cunorm.core.problem import ITEMSIZE, Problem, accumulator, laid_out
from cunorm.core.strategy import Strategy, Tile, ceil_div, main_launch
from cunorm.core.terminal import with_bar
from cunorm.jit.nvrtc import ARCHITECTURES, Nvrtc, Usage, usages
from cunorm.jit.sources import kernel_text
from cunorm.ops.registry import OPS


def problem_for(op: str, strategy: str, dtype: str, layout: str, tile: Tile) -> Problem:
    """A problem that the tile takes, if the strategy takes that layout at all."""
    spec, sums = OPS[op], accumulator(dtype)
    # Gradients without an activation do not read beta. Counts are whole numbers where they may be.
    gamma, beta = ("gamma" in spec.inputs, "beta" in spec.inputs and not spec.is_backward)
    others = tuple((name, "int64" if "int64" in allowed else sums) for name, allowed in spec.types.items())
    return Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=dtype if gamma else None,
        beta_dtype=dtype if beta else None,
        stats_dtype=sums,
        **laid_out(layout, *spec.strategies[strategy].example(tile, 16 // ITEMSIZE[dtype])),
        outputs=tuple(spec.results),
        others=others,
    )


def demanding(problem: Problem) -> Problem:
    """The problem with what takes more registers: wide parameters, and an activation where its op has any."""
    spec, sums = problem.spec, accumulator(problem.dtype)
    if not spec.holds_parameters:
        return problem
    activation = next(iter(spec.activations), None)
    beta = sums if problem.beta_dtype or activation else None
    return replace(problem, activation=activation, gamma_dtype=sums, beta_dtype=beta)


#: Registers of a block: those of a multiprocessor, from compute capability 5.0 on (CUDA C++ programming guide, table
#: "technical specifications per compute capability"). A thread gets them by eights.
LAUNCHABLE_REGISTERS = 65536
#: How many tiles the gate takes, see above, and what people are told of that.
TILES = {
    "choice": "A choice of tiles (--tiles spread or all: more of them); '.' is not in it.",
    "spread": "Five tiles and more of each strategy, dtype and layout, from the most demanding to the least.",
    "all": "Every tile that refuses() accepts.",
}
#: Pairs of architecture and NVRTC that the most demanding tiles of a width meet in the choice, shared by its dtypes.
QUICK_PAIRS = 2


@dataclass(frozen=True)
class GateCase:
    """What the gate takes tiles for."""

    op: str
    strategy: str
    dtype: str
    layout: str

    def __str__(self) -> str:
        return f"{self.op}-{self.strategy}-{self.dtype}-{self.layout}"

    @property
    def solver(self) -> Strategy:
        """The strategy itself."""
        return OPS[self.op].strategies[self.strategy]


@dataclass(frozen=True)
class Build:
    """A kernel text to compile.

    Attributes
    ----------
    case : GateCase
    tile : Tile
    kernel, threads : str, int
        Stem of the file in ``kernels_cu``, and threads of a block that it is launched with.
    text : str
    architecture : str
    nvrtc : Nvrtc
    """

    case: GateCase
    tile: Tile
    kernel: str
    threads: int
    text: str
    architecture: str
    nvrtc: Nvrtc


@dataclass(frozen=True)
class BuildResult:
    """What a build came to: what its kernels use, or why it did not compile."""

    build: Build
    usages: tuple[Usage, ...]
    error: str | None = None

    def faults(self) -> list[str]:
        """Every promise that it breaks, in words; none if it is fine."""
        build = self.build
        where = f"{build.case} {build.tile} on {build.architecture}, NVRTC {build.nvrtc.version}"
        found = [] if self.error is None else [f"{build.kernel}: does not compile: {where}\n{self.error}"]
        for usage in self.usages:
            wrong = []
            if usage.spill_bytes:
                wrong.append(f"spills {usage.spill_bytes} bytes")
            if usage.stack_bytes:
                wrong.append(f"has a stack of {usage.stack_bytes} bytes")
            if usage.taken_apart:
                wrong.append(f"takes {usage.taken_apart} of {usage.loads_16} wide loads apart where they are loaded")
            if (needed := ceil_div(usage.registers, 8) * 8 * build.threads) > LAUNCHABLE_REGISTERS:
                wrong.append(f"cannot be launched: {build.threads} threads need {needed} registers")
            if wrong:
                found.append(f"{usage.entry}: {', '.join(wrong)}: {where}, {usage.registers} registers")
        return found


# ---- what there is to compile ---------------------------------------------------------------------------------------


def device_of(architecture: str) -> Device:
    """The known device of an architecture; those that share one have the same limits."""
    return next(device for device in KNOWN.values() if device.architecture == architecture)


@functools.cache
def _accepted(case: GateCase, device: Device) -> tuple[tuple[Problem, Tile], ...]:
    found: dict[tuple[tuple[str, int], ...], tuple[Problem, Tile]] = {}
    for tile in case.solver.tiles():
        compiled = tuple(item for item in tile.fields if item[0] in case.solver.constants)
        if compiled not in found:
            problem = problem_for(case.op, case.strategy, case.dtype, case.layout, tile)
            if case.solver.refuses(problem, tile, device) is None:
                found[compiled] = problem, tile
    return tuple(found.values())


def accepted(case: GateCase, architecture: str) -> tuple[tuple[Problem, Tile], ...]:
    """Every tile of the space that refuses() accepts, once for all that differ in fields that no kernel knows."""
    return _accepted(case, device_of(architecture))


@functools.cache
def cases() -> tuple[GateCase, ...]:
    """Every op, strategy, dtype and layout that has a tile at all."""
    found = []
    for op in OPS.values():
        for strategy in op.strategies:
            found += [GateCase(op.name, strategy, dtype, layout) for dtype in ITEMSIZE for layout in op.layouts]
    return tuple(case for case in found if accepted(case, "sm_90"))


def demand(case: GateCase, problem: Problem, tile: Tile) -> tuple[float, int]:
    """How close a tile comes to the registers that its threads have, by the formula; then how much the kernel unrolls.

    The second counts where the formula says the same of all tiles, as for kernels bound to a number of registers.
    """
    registers = max(launch.registers for launch in case.solver.launches(problem, tile))
    have = 255 if case.strategy == "warp" else LAUNCHABLE_REGISTERS / tile.threads
    space = case.solver.space
    # Of words the first that the space has counts most.
    numbers = (
        len(space[name]) - space[name].index(value) if isinstance(value, str) else value
        for name, value in tile.fields
        if name in case.solver.constants
    )
    return registers / have, math.prod(numbers)


def _kernel(case: GateCase, problem: Problem, tile: Tile) -> str:
    """The kernel that does the tile's main work: a strategy may have several to choose from."""
    return main_launch(case.solver.launches(problem, tile)).kernel


def spread(case: GateCase, architecture: str) -> tuple[tuple[Problem, Tile], ...]:
    """Tiles from the most demanding to the least: both ends, those at a quarter, the middle and three quarters, and the
    most demanding of each kernel.
    """
    ranked = sorted(accepted(case, architecture), key=lambda pair: demand(case, *pair), reverse=True)
    if not ranked:
        return ()
    first = {_kernel(case, *ranked[index]): index for index in reversed(range(len(ranked)))}
    taken = {round((len(ranked) - 1) * part / 4) for part in range(5)} | {*first.values()}
    return tuple(ranked[index] for index in sorted(taken))


def pairs(nvrtcs: Sequence[Nvrtc]) -> list[tuple[str, Nvrtc]]:
    """Every architecture with every NVRTC, of which there are at most two; neighbours in the ring differ in both."""
    count = len(ARCHITECTURES) * len(nvrtcs)
    return [(ARCHITECTURES[index % len(ARCHITECTURES)], nvrtcs[index % len(nvrtcs)]) for index in range(count)]


def _most(case: GateCase) -> int:
    return QUICK_PAIRS // list(ITEMSIZE.values()).count(ITEMSIZE[case.dtype])


def _demanding(case: GateCase, architecture: str, problem: Problem, tile: Tile) -> Problem:
    """The problem that asks most of a tile, of those that the tile takes."""
    made = demanding(problem)
    asked = (made, replace(made, activation=None), problem)
    return next(one for one in asked if case.solver.refuses(one, tile, device_of(architecture)) is None)


def _choice(
    case: GateCase, ring: Sequence[tuple[str, Nvrtc]], tiles: str
) -> Iterator[tuple[str, Nvrtc, Problem, Tile]]:
    """What the gate takes for a case: architecture, NVRTC, problem and tile."""
    ring = [pair for pair in ring if accepted(case, pair[0])]
    if tiles != "choice":
        several = {"spread": spread, "all": accepted}[tiles]
        for pair in ring:
            for problem, tile in several(case, pair[0]):
                posed = dict.fromkeys((problem, _demanding(case, pair[0], problem, tile)))
                yield from ((*pair, each, tile) for each in posed)
        return
    # Cases are counted within an op's strategy: its dtypes together meet every pair.
    before = [each for each in cases() if (each.op, each.strategy) == (case.op, case.strategy)]
    del before[before.index(case) :]
    # The one other tile comes last, with float16 first: its most demanding tile and bfloat16's meet different NVRTCs.
    at = 0 if case.dtype == "float16" else _most(case)
    met = set()
    for step in range(_most(case) + 1):
        architecture, nvrtc = ring[(sum(_most(each) + 1 for each in before) + step) % len(ring)]
        ranked = spread(case, architecture)
        # It is the least demanding for the first case, then those between in turn.
        other = ranked[-1 - len(before) % max(1, len(ranked) - 1)]
        problem, tile = other if step == at else ranked[0]
        made = problem if step == at else _demanding(case, architecture, problem, tile)
        met.add(_kernel(case, problem, tile))
        yield architecture, nvrtc, made, tile
    architecture, nvrtc = ring[len(before) % len(ring)]
    others = {_kernel(case, *pair): pair for pair in reversed(spread(case, architecture))}  # the first of each
    for problem, tile in (pair for kernel, pair in others.items() if kernel not in met):
        yield architecture, nvrtc, _demanding(case, architecture, problem, tile), tile


def builds(nvrtcs: Sequence[Nvrtc], *, tiles: str = "choice", only: GateCase | None = None) -> list[Build]:
    """What the gate compiles.

    Parameters
    ----------
    nvrtcs : sequence of Nvrtc
        One or two.
    tiles : str
        One of `TILES`.
    only : GateCase, optional
        None: all.
    """
    ring, found = pairs(nvrtcs), []
    for case in (each for each in cases() if only in (None, each)):
        for architecture, nvrtc, problem, tile in _choice(case, ring, tiles):
            for launch in {launch.kernel: launch for launch in case.solver.launches(problem, tile)}.values():
                text = kernel_text(launch, problem, case.solver, tile)
                found.append(Build(case, tile, launch.kernel, launch.threads, text, architecture, nvrtc))
    return found


# ---- compiling it ---------------------------------------------------------------------------------------------------


def _use(build: Build) -> tuple[tuple[Usage, ...], str | None]:
    try:
        return tuple(usages(build.text, build.architecture, build.nvrtc)), None
    except CompileError as error:
        return (), str(error)


def run(planned: Iterable[Build], *, threads: int | None = None, progress: bool = False) -> list[BuildResult]:
    """Compile, in parallel and each text once per architecture and NVRTC; the results come in the order of the builds.

    Threads are enough: ctypes lets go of the interpreter while NVRTC works, and programs do not share anything.

    Parameters
    ----------
    planned : iterable of Build
    threads : int, optional
        None: one for each core.
    progress : bool
        Whether to show a bar.
    """
    listed = list(planned)
    distinct = {(build.text, build.architecture, build.nvrtc): build for build in listed}
    pool = ThreadPoolExecutor(threads or settings.cores())
    try:
        jobs = {key: pool.submit(_use, build) for key, build in distinct.items()}
        for job in with_bar(as_completed(jobs.values()), len(jobs), "kernel", lambda _: "ptxas", shown=progress):
            job.result()
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C ends after the texts at work
    return [BuildResult(build, *jobs[build.text, build.architecture, build.nvrtc].result()) for build in listed]
