"""The compile gate: compile every kernel, for every dtype and layout, with tiles that refuses() accepts.

A kernel must not spill with a tile that refuses() accepts: a spill is a fault of the formula in refuses(). The gate
needs NVRTC and no GPU.

ptxas takes hours for every combination, so the gate has three sizes. A pair is one architecture with one NVRTC.

- `all`: every tile, for every pair.
- `spread`: five tiles per strategy, dtype and layout, from the most demanding to the least, and the most demanding tile
  of each kernel, for every pair.
- `choice`: the most demanding tile for two pairs, one other tile for one pair, and each further kernel of the strategy
  for one pair. float16 and bfloat16 have the same formula, so each of them is compiled for one pair instead of two. The
  pairs rotate from case to case, so that the dtypes of a strategy together cover every pair.

The selection of each size is deterministic. Some problems take more registers: those with an activation or with wide
parameters. `choice` compiles the most demanding tiles for such a problem, and the other tile for a problem without
them. `spread` and `all` compile every tile for both.

A kernel has a generic and a specialised text. `choice` takes them in turn, `spread` and `all` compile both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cunorm.core import settings
from cunorm.core.devices import KNOWN, Device
from cunorm.core.errors import CompileError
from cunorm.core.problem import ITEMSIZE, PACK_BYTES, Problem, accumulator, laid_out
from cunorm.core.strategy import Strategy, Tile, Tiling, ceil_div, main_launch
from cunorm.core.terminal import with_bar
from cunorm.jit.nvrtc import ARCHITECTURES, Nvrtc, Usage, usages
from cunorm.jit.sources import TEXTS, Text, kernel_text
from cunorm.ops.registry import OPS


def problem_for(op: str, strategy: str, dtype: str, layout: str, tile: Tile) -> Problem:
    """Return a problem that is legal for the tile, if the strategy supports the layout.

    It has the narrowest parameters: with float32 x, kernels take parts of their packs. `demanding` has the widest.
    """
    spec, sums = OPS[op], accumulator(dtype)
    # Gradients without an activation do not read beta. Counts are int64 if the op allows int64.
    gamma, beta = ("gamma" in spec.inputs, "beta" in spec.inputs and not spec.is_backward)
    narrow = "bfloat16" if dtype == "float32" and spec.holds_parameters else dtype
    others = tuple((name, "int64" if "int64" in spec.types[name] else sums) for name in spec.required_types)
    return Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=narrow if gamma else None,
        beta_dtype=narrow if beta else None,
        stats_dtype=sums,
        **laid_out(layout, *spec.strategies[strategy].example(tile, PACK_BYTES // ITEMSIZE[dtype])),
        outputs=spec.results_with(()),
        others=others,
    )


def demanding(problem: Problem) -> Problem:
    """Return the problem with wide parameters, an activation and all optional tensors: each takes more registers."""
    spec, sums = problem.spec, accumulator(problem.dtype)
    if not spec.holds_parameters:
        return problem
    activation = next(iter(spec.activations), None)
    beta = sums if problem.beta_dtype or activation else None
    return replace(problem, activation=activation, gamma_dtype=sums, beta_dtype=beta).with_extras()


def with_wide_y(problem: Problem) -> Problem:
    """Return the problem with y in float32, if x has 16 bits and the op is a forward."""
    if "y_t" not in problem.spec.optional_types or problem.itemsize > 2:
        return problem
    return replace(problem, others=(*problem.others, ("y_t", accumulator(problem.dtype))))


#: Maximum of registers per block: all registers of a multiprocessor, from compute capability 5.0 on (CUDA C++
#: programming guide, table "technical specifications per compute capability"). Threads get registers in units of eight.
LAUNCHABLE_REGISTERS = 65536
#: Loads that a kernel may cut. The compiler joins the loads of gamma of neighbouring channels, and those of beta, and
#: cuts the joined words. These two loads precede those of the tensors, whose packs must stay whole.
JOINED_LOADS = 2
#: The sizes of the gate, and the sentence about each in the report.
TILES = {
    "choice": "A selection of tiles; '.': the pair is not in it. For more tiles: --tiles spread or --tiles all.",
    "spread": "Five tiles or more per strategy, dtype and layout, from the most demanding to the least.",
    "all": "Every tile that refuses() accepts.",
}
#: Pairs for which `choice` compiles the most demanding tile. Dtypes of the same width share the pairs.
QUICK_PAIRS = 2


@dataclass(frozen=True)
class GateCase:
    """One combination of op, strategy, dtype and layout. The gate selects tiles per case."""

    op: str
    strategy: str
    dtype: str
    layout: str

    def __str__(self) -> str:
        return f"{self.op}-{self.strategy}-{self.dtype}-{self.layout}"

    @property
    def solver(self) -> Strategy:
        """The strategy object."""
        return OPS[self.op].strategies[self.strategy]


@dataclass(frozen=True)
class Build:
    """A kernel text to compile.

    Attributes
    ----------
    case : GateCase
    tile : Tile
    kernel, threads : str, int
        Stem of the file in ``kernels_cu``; threads per block.
    kind : str
        One of `cunorm.jit.sources.TEXTS`.
    text : str
    architecture : str
    nvrtc : Nvrtc
    """

    case: GateCase
    tile: Tile
    kernel: str
    threads: int
    kind: Text
    text: str
    architecture: str
    nvrtc: Nvrtc


@dataclass(frozen=True)
class BuildResult:
    """The result of a build: the resources that its kernels use, or the compiler's error."""

    build: Build
    usages: tuple[Usage, ...]
    error: str | None = None

    def faults(self) -> list[str]:
        """Return one message for each fault; an empty list if there is none."""
        build = self.build
        where = f"{build.case} {build.tile}, {build.kind} text, on {build.architecture}, NVRTC {build.nvrtc.version}"
        found = [] if self.error is None else [f"{build.kernel}: does not compile: {where}\n{self.error}"]
        for usage in self.usages:
            wrong = []
            if usage.spill_bytes:
                wrong.append(f"spills {usage.spill_bytes} bytes")
            if usage.stack_bytes:
                wrong.append(f"has a stack of {usage.stack_bytes} bytes")
            if usage.taken_apart > JOINED_LOADS:
                wrong.append(f"cuts {usage.taken_apart} of {usage.loads_16} 16-byte loads into 16-bit elements at once")
            if (needed := ceil_div(usage.registers, 8) * 8 * build.threads) > LAUNCHABLE_REGISTERS:
                wrong.append(f"cannot be launched: {build.threads} threads need {needed} registers")
            if wrong:
                found.append(f"{usage.entry}: {', '.join(wrong)}: {where}, {usage.registers} registers")
        return found


# ---- the selection of builds ----------------------------------------------------------------------------------------


def device_of(architecture: str) -> Device:
    """Return a known device of an architecture. All known devices of one architecture have the same limits."""
    return next(device for device in KNOWN.values() if device.architecture == architecture)


def _tiling_of(case: GateCase, tile: Tile) -> Tiling:
    """The tiling of a tile for its problem."""
    return case.solver.of(problem_for(case.op, case.strategy, case.dtype, case.layout, tile), tile)


class _Legal(NamedTuple):
    """A tile that refuses() accepts, with its problem, the kernel of its main launch, and its `demand`."""

    problem: Problem
    tile: Tile
    kernel: str
    demand: tuple[float, int]


@functools.cache
def _legal(case: GateCase) -> dict[str, tuple[_Legal, ...]]:
    """The tiles of `accepted` per architecture. A tile's tiling computes most of its facts once for all of them."""
    devices = {architecture: device_of(architecture) for architecture in ARCHITECTURES}
    found: dict[str, dict[tuple[tuple[str, Any], ...], _Legal]] = {name: {} for name in devices}
    for tile in case.solver.tiles():
        tiling = _tiling_of(case, tile)
        able = [name for name, device in devices.items() if tiling.refuses(device) is None]
        if able:
            main = main_launch(tiling.launches)
            compiled = (*_compiled_fields(case, tile), *main.constants.items())
            legal = _Legal(tiling.problem, tile, main.kernel, demand(case, tiling))
            for name in able:
                found[name].setdefault(compiled, legal)
    return {name: tuple(taken.values()) for name, taken in found.items()}


def accepted(case: GateCase, architecture: str) -> tuple[tuple[Problem, Tile], ...]:
    """Tiles that refuses() accepts, each with a problem; of tiles that compile to the same constants only the first."""
    return tuple((legal.problem, legal.tile) for legal in _legal(case)[architecture])


def _has_tiles(case: GateCase) -> bool:
    """Whether `accepted` has tiles on sm_90. It stops at the first: every test process asks this when it starts."""
    device = device_of("sm_90")
    return any(_tiling_of(case, tile).refuses(device) is None for tile in case.solver.tiles())


@functools.cache
def cases() -> tuple[GateCase, ...]:
    """Every combination of op, strategy, dtype and layout that has a legal tile.

    Strategies with the kernels of another op are left out: they would be compiled twice.
    """
    found = []
    for op in OPS.values():
        for strategy in (name for name, one in op.strategies.items() if one.kernels_of is None):
            found += [GateCase(op.name, strategy, dtype, layout) for dtype in ITEMSIZE for layout in op.layouts]
    return tuple(filter(_has_tiles, found))


def _compiled_fields(case: GateCase, tile: Tile) -> list[tuple[str, Any]]:
    """The tile's fields that are compile-time constants of the kernel."""
    return [item for item in tile.fields if item[0] in case.solver.constants]


def demand(case: GateCase, tiling: Tiling) -> tuple[float, int]:
    """Return the formula's registers over the available ones, and the product of the kernel's compile-time fields.

    The product ranks tiles with equal ratios, for instance of kernels with a fixed number of registers: the kernel
    unrolls more with a larger product.
    """
    registers = max(launch.registers for launch in tiling.launches)
    have = 255 if case.strategy == "warp" else LAUNCHABLE_REGISTERS / tiling.tile.threads
    space = case.solver.space
    # Words count by their position in the space: the first word counts most.
    numbers = (
        len(space[name]) - space[name].index(value) if isinstance(value, str) else value
        for name, value in _compiled_fields(case, tiling.tile)
    )
    return registers / have, math.prod(numbers)


def _kernel(case: GateCase, problem: Problem, tile: Tile) -> str:
    """The kernel of the main launch. A strategy may have several main kernels; the tile selects one."""
    return main_launch(case.solver.launches(problem, tile)).kernel


@functools.cache
def spread(case: GateCase, architecture: str) -> tuple[tuple[Problem, Tile], ...]:
    """Return tiles at five ranks of demand (0, 1/4, 1/2, 3/4 and 1), and the most demanding tile of each kernel."""
    ranked = sorted(_legal(case)[architecture], key=lambda legal: legal.demand, reverse=True)
    if not ranked:
        return ()
    first = {ranked[index].kernel: index for index in reversed(range(len(ranked)))}
    taken = {round((len(ranked) - 1) * part / 4) for part in range(5)} | {*first.values()}
    return tuple((ranked[index].problem, ranked[index].tile) for index in sorted(taken))


def pairs(nvrtcs: Sequence[Nvrtc]) -> list[tuple[str, Nvrtc]]:
    """Return every pair of at most two NVRTCs as a ring. Neighbours differ in architecture and, with two, in NVRTC."""
    count = len(ARCHITECTURES) * len(nvrtcs)
    return [(ARCHITECTURES[index % len(ARCHITECTURES)], nvrtcs[index % len(nvrtcs)]) for index in range(count)]


def _most(case: GateCase) -> int:
    return QUICK_PAIRS // list(ITEMSIZE.values()).count(ITEMSIZE[case.dtype])


def _demanding(case: GateCase, architecture: str, problem: Problem, tile: Tile, wide_y: bool = False) -> Problem:
    """Return the problem that takes the most registers, of the problems that are legal for the tile."""
    made = demanding(problem)
    bare = replace(made, extras=(), outputs=problem.outputs)
    asked = [made, replace(made, activation=None), bare, replace(bare, activation=None), problem]
    if wide_y:
        asked = [*map(with_wide_y, asked), *asked]
    return next(one for one in asked if case.solver.refuses(one, tile, device_of(architecture)) is None)


def _demanding_both(case: GateCase, architecture: str, problem: Problem, tile: Tile) -> tuple[Problem, ...]:
    """Return `_demanding` with y in x's dtype and, if that is another problem, in float32."""
    found = (_demanding(case, architecture, problem, tile, wide_y) for wide_y in (False, True))
    return tuple(dict.fromkeys(found))


def problems_of(case: GateCase, architecture: str, problem: Problem, tile: Tile) -> tuple[Problem, ...]:
    """Return the problems for which a tile of the spread is compiled: its own, and those of the most registers."""
    return tuple(dict.fromkeys((problem, *_demanding_both(case, architecture, problem, tile))))


def _choice(
    case: GateCase, ring: Sequence[tuple[str, Nvrtc]], tiles: str
) -> Iterator[tuple[str, Nvrtc, Problem, Tile, Text]]:
    """The selected architectures, NVRTCs, problems, tiles and texts of a case."""
    ring = [pair for pair in ring if accepted(case, pair[0])]
    if tiles != "choice":
        chosen: dict[str, Callable[[GateCase, str], tuple[tuple[Problem, Tile], ...]]]
        chosen = {"spread": spread, "all": accepted}
        for pair in ring:
            for problem, tile in chosen[tiles](case, pair[0]):
                posed = problems_of(case, pair[0], problem, tile)
                yield from ((*pair, each, tile, text) for each in posed for text in TEXTS)
        return
    # Cases are counted per op and strategy, so that the dtypes of a strategy together cover every pair.
    before = [each for each in cases() if (each.op, each.strategy) == (case.op, case.strategy)]
    del before[before.index(case) :]
    # The one other tile is the last step, but the first step for float16: then the most demanding tiles of float16 and
    # bfloat16 are compiled with different NVRTCs.
    at = 0 if case.dtype == "float16" else _most(case)
    met = set()
    for step in range(_most(case) + 1):
        architecture, nvrtc = ring[(sum(_most(each) + 1 for each in before) + step) % len(ring)]
        ranked = spread(case, architecture)
        # The first case gets the least demanding tile. The following cases get the tiles before it in turn.
        other = ranked[-1 - len(before) % max(1, len(ranked) - 1)]
        problem, tile = other if step == at else ranked[0]
        hard = (problem,) if step == at else _demanding_both(case, architecture, problem, tile)
        met.add(_kernel(case, problem, tile))
        yield from ((architecture, nvrtc, made, tile, TEXTS[step % len(TEXTS)]) for made in hard)
    architecture, nvrtc = ring[len(before) % len(ring)]
    others = {_kernel(case, *pair): pair for pair in reversed(spread(case, architecture))}  # the first of each
    for problem, tile in (pair for kernel, pair in others.items() if kernel not in met):
        hard = _demanding_both(case, architecture, problem, tile)
        yield from ((architecture, nvrtc, made, tile, TEXTS[0]) for made in hard)


def builds_of(case: GateCase, problem: Problem, tile: Tile, kind: Text, architecture: str, nvrtc: Nvrtc) -> list[Build]:
    """Return the builds of one text of all kernels that a tile launches for a problem."""
    launches = {launch.kernel: launch for launch in case.solver.launches(problem, tile)}.values()
    texts = [(launch, kernel_text(launch, problem, case.solver, tile, kind)) for launch in launches]
    return [Build(case, tile, one.kernel, one.threads, kind, text, architecture, nvrtc) for one, text in texts]


def builds(nvrtcs: Sequence[Nvrtc], *, tiles: str = "choice", only: GateCase | None = None) -> list[Build]:
    """Return the builds of the gate.

    Parameters
    ----------
    nvrtcs : sequence of Nvrtc
        One or two.
    tiles : str
        A key of `TILES`.
    only : GateCase, optional
        The case to compile; None for all cases.
    """
    ring, found = pairs(nvrtcs), []
    for case in (each for each in cases() if only in (None, each)):
        for architecture, nvrtc, problem, tile, kind in _choice(case, ring, tiles):
            found += builds_of(case, problem, tile, kind, architecture, nvrtc)
    return found


# ---- compilation ----------------------------------------------------------------------------------------------------


def _use(build: Build) -> tuple[tuple[Usage, ...], str | None]:
    try:
        return tuple(usages(build.text, build.architecture, build.nvrtc)), None
    except CompileError as error:
        return (), str(error)


def run(planned: Iterable[Build], *, threads: int | None = None, progress: bool = False) -> list[BuildResult]:
    """Compile each text once per architecture and NVRTC, in parallel. The results are in the order of the builds.

    Threads suffice: ctypes releases the interpreter lock during calls of NVRTC, and programs share no state.

    Parameters
    ----------
    planned : iterable of Build
    threads : int, optional
        None for one thread per core.
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
        pool.shutdown(cancel_futures=True)  # after Ctrl-C only the texts that are being compiled are finished
    return [BuildResult(build, *jobs[build.text, build.architecture, build.nvrtc].result()) for build in listed]
