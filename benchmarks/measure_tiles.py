"""Measure the cost model's best tiles on a GPU: whether its order and its times hold.

Examples::

    python benchmarks/measure_tiles.py draw --device H100 --out tiles.jsonl    # which tiles; needs no GPU
    python benchmarks/measure_tiles.py build tiles.jsonl --device H100         # their kernels; needs no GPU
    python benchmarks/measure_tiles.py run tiles.jsonl --out measured.jsonl    # their times; needs a GPU
    python benchmarks/measure_tiles.py draw --stale TABLE --out tiles.jsonl    # where kernels have changed since

``draw`` ranks all tiles of the workloads' problems. It keeps the default, the next best tiles, and the best tile of
each other strategy that is predicted to be nearly as fast; with ``--drawn`` also some tiles at random, which are
predicted to take up to twice as long. With ``--stale`` the problems are those of a table whose kernels have changed
since, and the table's tile is kept too. ``build`` compiles the tiles' kernels on all cores, because ``run`` compiles
one after the other; both keep them in the cache folder. Without ``--device``, ``draw`` and ``build`` take the GPU of
this machine, or the H100 if there is none. ``run`` measures all tiles of a problem in rounds, in random order, with the
clock of the tuner, and appends a line per problem: the times in microseconds (median and quartiles), the predicted
times, and how far the results of a tile are from those of the first one. It runs specialised kernels alone.
Interrupted, it leaves whole lines. ``table`` writes the fastest tiles to a tiling table: of each problem whose present
default is among the measured tiles. With ``--op`` the other entries of that op are removed, so that calls get the
default again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import numpy as np
from cunorm.tuning.measure.clock import GraphClock
from cunorm.tuning.measure.race import GAIN, Timing, winner
from cunorm.tuning.measure.result import measured_entry
from cunorm.tuning.measure.session import software
from cunorm.tuning.problems.workloads import problems
from cunorm.tuning.search.space import Space
from cunorm.tuning.verify.verifier import GuardedBuffer
from tqdm import tqdm

from cunorm.core import settings
from cunorm.core.arrays import DTYPES
from cunorm.core.devices import KNOWN, Device
from cunorm.core.errors import CompileError
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.jit import cubins, sources
from cunorm.ops.registry import OPS, gpu_present, is_legal, is_stale
from cunorm.runtime import plans
from cunorm.runtime.plans import Plan, Target
from cunorm.tiling import costmodel, table
from cunorm.tiling.costmodel import Choice
from cunorm.traffic.sampling import floor_bytes

Key = TypeVar("Key")
Given = TypeVar("Given")
Found = TypeVar("Found")
BEST, OTHERS = 5, 3  # tiles of a problem: the model's best, and the best of other strategies
NEARLY = 1.6  # of other strategies: largest ratio of the predicted time to the least
POSSIBLE = 2.0  # of the tiles that --drawn draws: likewise
ROUNDS = 9
#: Largest difference of a tile's result from the default's, divided by the result's largest value: a few roundings of
#: the dtype. Rows of sums are added in another order, in float32.
AGREE = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 1e-5, "float64": 1e-12}
WITHOUT_GPU = "H100"  # the device for which `draw` and `build` work on a machine without a GPU
CHUNK = 4  # kernels or problems that a process takes at once
MANY = 50  # problems from which on `draw` and `table` start processes
LATE = "not begun in time"
RANDOM_ELEMENTS = 2**20  # random values that are repeated to fill an array


def line_of(problem: Problem, **facts: Any) -> str:
    """A line of a file: the problem and facts about it."""
    return json.dumps({"problem": table.key_of(problem), **facts})


def lines_of(path: Path) -> Iterator[tuple[Problem, dict[str, Any]]]:
    """The problems and facts in a file. Facts of a whole run are in a line of their own before its problems."""
    run: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        if "problem" in raw:
            yield table.problem_of(raw["problem"]), {**run, **raw}
        else:
            run = raw


def measured_in(paths: Iterable[Path]) -> list[tuple[Problem, dict[str, Any]]]:
    """The measured tiles of each problem on each device in some files, with the facts of the last run.

    Of two times of a tile the later one counts. Times of kernels that have changed since are left out.
    """
    found: dict[tuple[Problem, str], dict[str, Any]] = {}
    for problem, raw in (line for path in paths for line in lines_of(path)):
        key = problem, raw["device"]["name"]
        before = found.get(key, {"tiles": []})["tiles"]
        every = [(Tile.of(one["tile"]), one) for one in (*before, *raw["tiles"])]
        tiles = {tile: one for tile, one in every if one.get("kernel") == digest(problem, tile)}
        found[key] = {**raw, "tiles": [*tiles.values()]}
    return [(problem, raw) for (problem, _), raw in found.items() if raw["tiles"]]


def digest(problem: Problem, tile: Tile) -> str:
    """Digest of the kernels of a tile: a time of another one is out of date."""
    return sources.kernel_digest(problem, OPS[problem.op].strategies[tile.strategy], tile)


def raw_of(tile: Tile) -> dict[str, Any]:
    """A tile as JSON."""
    return {"strategy": tile.strategy, **tile.as_dict()}


def _keep_all() -> None:
    """Let the cache folder keep the kernels of all tiles, which are more than those of an application."""
    cubins.MOST_FILES = sys.maxsize


def on_all_cores(one: Callable[[Given], Found], given: Sequence[Given], unit: str, least: int = 1) -> list[Found]:
    """The results of a function, in order, with a progress bar. Fewer than `least` are computed in this process."""
    shown = functools.partial(tqdm, total=len(given), unit=unit, mininterval=2)
    if len(given) < least:
        return [*shown(map(one, given))]
    with multiprocessing.get_context("spawn").Pool(settings.cores(), _keep_all) as pool:
        return [*shown(pool.imap(one, given, CHUNK))]


# ---- draw -----------------------------------------------------------------------------------------------------------


def best_of_each(ranked: Sequence[Choice], most: float) -> list[Choice]:
    """The best tile of each strategy and of each of its words, if its predicted time is below `most` times the least.

    A word of a tile is a way to load or to keep x.
    """
    least = min(one.seconds for one in ranked)
    best: dict[tuple[str, ...], Choice] = {}
    for one in reversed(ranked):
        key = (one.strategy.name, *(value for _, value in one.tile.fields if isinstance(value, str)))
        best[key] = one
    return [one for one in best.values() if one.seconds < most * least]


def tiles_of(problem: Problem, device: Device, drawn: int, draw: random.Random) -> list[Tile]:
    """The tiles to measure: the default first, last the `drawn` ones."""
    ranked = costmodel.ranked(problem, OPS[problem.op].strategies.values(), device)
    least = min(one.seconds for one in ranked)
    others = sorted(best_of_each(ranked, NEARLY), key=lambda one: one.seconds)
    kept = dict.fromkeys(one.tile for one in ranked[:BEST])
    more = [one.tile for one in others if one.tile not in kept]
    found = [*kept, *more[:OTHERS]]
    possible = [one.tile for one in ranked if one.seconds < POSSIBLE * least and one.tile not in found]
    return [*found, *draw.sample(possible, min(drawn, len(possible)))]


def problems_to_draw(asked: argparse.Namespace) -> dict[Problem, table.Entry | None]:
    """The problems, each with its entry in --stale's table. Of workloads, those of the first one come first."""
    if asked.stale is not None:
        return {problem: one for problem, one in table.read(asked.stale).entries.items() if is_stale(one)}
    wanted = asked.workloads.split(",")
    found = {one.canonical(): name for name, one in problems(asked.dtype) if name in wanted}
    return dict.fromkeys(sorted(found, key=lambda one: wanted.index(found[one])))


def device_named(name: str | None) -> Device:
    """A known device; None: the GPU of this machine, or `WITHOUT_GPU` if there is none."""
    if name is None and gpu_present():
        here: Device = executor("gpu").limits(executor("gpu").current())
        return here
    return KNOWN[name or WITHOUT_GPU]


def drawn_line(given: tuple[Problem, table.Entry | None], device: Device, drawn: int, seed: int) -> str:
    """The line of a problem and its tiles. `given` is the problem and its entry in --stale's table."""
    problem, entry = given
    tiles = tiles_of(problem, device, drawn, random.Random(f"{seed} {problem}"))
    if entry is not None and entry.tile not in tiles and is_legal(entry, device):
        tiles.append(entry.tile)
    return line_of(problem, tiles=[raw_of(tile) for tile in tiles]) + "\n"


def draw(asked: argparse.Namespace) -> None:
    """Write the problems and their tiles."""
    device, found = device_named(asked.device), problems_to_draw(asked)
    ordered = [*found]
    if asked.problems is not None and asked.problems < len(ordered):
        random.Random(asked.seed).shuffle(ordered)
        ordered = ordered[: asked.problems]
    one = functools.partial(drawn_line, device=device, drawn=asked.drawn, seed=asked.seed)
    with asked.out.open("w", encoding="utf-8") as out:
        out.writelines(on_all_cores(one, [(problem, found[problem]) for problem in ordered], "problem", MANY))


# ---- build ----------------------------------------------------------------------------------------------------------


def kernels_of(path: Path, device: Device) -> dict[str, str]:
    """The texts of the kernels that ``run`` launches for a file, each with its entry."""
    found: dict[str, str] = {}
    for problem, raw in lines_of(path):
        op = OPS[problem.op]
        for one in raw["tiles"]:
            plan = plans.plan_for(problem, op.strategies, op.names, Target("gpu", 0, device), Tile.of(one))
            found.update(plan.texts("specialised"))
    return found


def _built(kernel: tuple[str, str], architecture: str, end: float) -> str:
    """Compile a kernel to the cache folder. Returns "", `LATE`, or the text of the compiler's error."""
    if time.time() > end:
        return LATE
    try:
        executor("gpu").build_for(*kernel, architecture)
    except CompileError as error:
        return str(error)
    return ""


def build(asked: argparse.Namespace) -> None:
    """Compile the kernels of the tiles of a file."""
    device, end = device_named(asked.device), math.inf if asked.seconds is None else time.time() + asked.seconds
    kernels = kernels_of(asked.tiles, device)
    one = functools.partial(_built, architecture=device.architecture, end=end)
    found = on_all_cores(one, [*kernels.items()], "kernel")
    print(f"{found.count('')} of {len(kernels)} kernels compiled for {device.architecture}")
    if errors := [text for text in found if text not in ("", LATE)]:
        raise SystemExit(errors[0])


# ---- run ------------------------------------------------------------------------------------------------------------


@functools.cache
def _random_bytes(dtype: str) -> Any:
    """Bytes of random values, on the GPU."""
    values = np.random.default_rng(0).standard_normal(RANDOM_ELEMENTS, np.float32)
    return executor("gpu").cupy.asarray(values.astype(DTYPES[dtype]).view(np.uint8))


def filled(problem: Problem, name: str) -> GuardedBuffer:
    """Memory for an array, full of random values."""
    dtype = problem.dtype_of(name)
    made = GuardedBuffer(executor("gpu").cupy, problem.elements_of(name) * DTYPES[dtype].itemsize)
    source = _random_bytes(dtype)
    for start in range(0, made.bytes.size, source.size):
        part = made.bytes[start : start + source.size]
        part[...] = source[: part.size]
    return made


@dataclass
class Runner:
    """A tile's launches on each set of arrays. `edit` changes the kernels' text."""

    plan: Plan
    values: list[list[int | float]]
    workspace: GuardedBuffer
    edit: Callable[[str], str] = str

    def __post_init__(self) -> None:
        gpu = executor("gpu")
        self.steps, constants = self.plan.steps(
            lambda text, entry: gpu.load(gpu.build(self.edit(text), entry), entry), "specialised"
        )
        self.values = [[*values, *constants] for values in self.values]

    def __call__(self, index: int) -> None:
        executor("gpu").run(self.steps, self.values[index], self.plan.place.ordinal)


def _wide(flat: Any, dtype: str) -> Any:
    """The values of an array of bytes on the GPU, in float32 or float64."""
    xp = executor("gpu").cupy
    if dtype == "bfloat16":
        return (flat.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32)
    return flat.view(DTYPES[dtype]).astype(xp.float64 if dtype == "float64" else xp.float32)


def in_rounds(samplers: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """Microseconds of each contender, one of each per round, in random order."""
    samples: dict[Key, list[float]] = {key: [] for key in samplers}
    order = random.Random(0)
    for _ in range(rounds):
        for key in order.sample([*samplers], len(samplers)):
            samples[key].append(samplers[key]() * 1e6)
    return samples


class Measured:
    """Measures the tiles of one problem."""

    def __init__(self, problem: Problem, place: Target, clock: GraphClock) -> None:
        self.problem, self.place, self.clock = problem, place, clock
        op = OPS[problem.op]
        arrays = [name for name in op.arrays if name in problem.outputs or self._given(name)]
        nbytes = sum(problem.elements_of(name) * DTYPES[problem.dtype_of(name)].itemsize for name in arrays)
        count = clock.sets(nbytes, place.device)
        self.sets = [{name: filled(problem, name) for name in arrays} for _ in range(count)]

    def _given(self, name: str) -> bool:
        spec = self.problem.spec
        return self.problem.has(name) and (name in spec.inputs or name in spec.updated)

    def runner(self, tile: Tile, edit: Callable[[str], str] = str) -> Runner:
        """The launches of a tile."""
        op, problem = OPS[self.problem.op], self.problem
        plan = plans.plan_for(problem, op.strategies, op.names, self.place, tile)
        workspace = GuardedBuffer(executor("gpu").cupy, plan.workspace_nbytes)
        scratch = {"workspace": workspace.address}
        addresses = [{name: one.address for name, one in arrays.items()} | scratch for arrays in self.sets]
        return Runner(plan, [plan.values(at) for at in addresses], workspace, edit)

    def results(self, run: Runner) -> dict[str, Any]:
        """The results of a tile on the first set."""
        for name in self.problem.outputs:
            self.sets[0][name].fill(0xFF)  # NaN in every format
        run(0)
        found = {
            name: _wide(self.sets[0][name].bytes, self.problem.dtype_of(name)).copy() for name in self.problem.outputs
        }
        executor("gpu").synchronise(self.place.ordinal)  # the clock uses another stream
        return found

    def tiles(self, tiles: Sequence[Tile], rounds: int) -> list[dict[str, Any]]:
        """Times, predicted times and deviations of tiles. A tile that fails has a sentence instead."""
        found: list[dict[str, Any]] = [{"tile": raw_of(tile)} for tile in tiles]
        samplers: dict[int, Callable[[], float]] = {}
        first: dict[str, Any] = {}
        for index, tile in enumerate(tiles):
            strategy = OPS[self.problem.op].strategies[tile.strategy]
            try:
                run = self.runner(tile)
                came = self.results(run)
                samplers[index] = self.clock.sampler(tile, run, len(self.sets))
            except Exception as error:  # a tile that cannot run must not stop the others
                found[index]["failed"] = f"{type(error).__name__}: {error}"[:300]
                continue
            first = first or came
            found[index]["off"] = self._off(first, came)
            seconds = costmodel.predict(self.problem, strategy, tile, self.place.device)
            found[index]["predicted_us"] = round(seconds * 1e6, 3)
            found[index]["kernel"] = digest(self.problem, tile)
        for index, times in in_rounds(samplers, rounds).items():
            low, _, high = quantiles(times, n=4, method="inclusive")
            found[index] |= {"us": round(median(times), 3), "q25": round(low, 3), "q75": round(high, 3)}
        return found

    @staticmethod
    def _off(first: dict[str, Any], came: dict[str, Any]) -> float:
        """Largest difference of a result from the first tile's, divided by the result's largest value."""
        worst = 0.0
        for name, values in came.items():
            largest = float(abs(first[name]).max())
            worst = max(worst, float(abs(values - first[name]).max()) / (largest or 1.0))
        return float(f"{worst:.2g}")


def run(asked: argparse.Namespace) -> None:
    """Measure, and append a line per problem. Problems that the file contains are skipped."""
    _keep_all()
    gpu = executor("gpu")
    place, clock = Target("gpu", gpu.current(), gpu.limits(gpu.current())), GraphClock()
    known = {problem for problem, _ in lines_of(asked.out)} if asked.out.exists() else set()
    facts = {
        "device": asdict(place.device),
        "software": software("gpu"),
        "copy": clock.bandwidth(),
        "rounds": asked.rounds,
    }
    end = None if asked.seconds is None else time.monotonic() + asked.seconds
    with asked.out.open("a", encoding="utf-8") as out:
        out.write(json.dumps(facts) + "\n")
        for problem, raw in tqdm([*lines_of(asked.tiles)], unit="problem", mininterval=2):
            if problem in known or (end is not None and time.monotonic() > end):
                continue
            try:
                measured = Measured(problem, place, clock).tiles([Tile.of(one) for one in raw["tiles"]], asked.rounds)
            except gpu.cupy.cuda.memory.OutOfMemoryError as error:
                print(f"{problem.describe()}: {error}", file=sys.stderr)
                continue
            out.write(line_of(problem, floor=floor_bytes(problem), tiles=measured) + "\n")
            out.flush()


# ---- table ----------------------------------------------------------------------------------------------------------


def device_of(raw: dict[str, Any]) -> Device:
    """The device that a run has recorded."""
    facts: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in raw["device"].items()}
    return Device(**facts)


def timings_of(raw: dict[str, Any]) -> dict[Tile, Timing]:
    """The times of the tiles whose results agree with the default's."""
    dtype = table.problem_of(raw["problem"]).dtype
    return {
        Tile.of(one["tile"]): Timing(one["us"] / 1e6, one["q25"] / 1e6, one["q75"] / 1e6, raw["rounds"])
        for one in raw["tiles"]
        if "us" in one and one["off"] <= AGREE[dtype]
    }


def entry_of(measured: tuple[Problem, dict[str, Any]]) -> table.Entry | None:
    """The table entry of a problem; None if its default failed, or another tile of it is the default now."""
    problem, raw = measured
    space, timings = Space.of(problem, OPS[problem.op].strategies, device_of(raw)), timings_of(raw)
    if space.default not in timings:
        return None
    best = winner(timings, lambda tile: (tile != space.default, *space.simplicity(tile)))
    beaten = timings[best].seconds * GAIN <= timings[space.default].seconds
    chosen = best if beaten else space.default
    entry: table.Entry = measured_entry(
        space,
        chosen,
        timings,
        measures=True,
        bandwidth=raw["copy"],
        trials=len(timings),
        default=not beaten,
        text="specialised",
    )
    return entry


def entries_of(measured: Sequence[tuple[Problem, dict[str, Any]]]) -> list[table.Entry]:
    """The table entries of problems."""
    return [one for one in on_all_cores(entry_of, measured, "problem", MANY) if one is not None]


def write_table(asked: argparse.Namespace) -> None:
    """Write the table of the fastest measured tiles.

    With ``--op``, entries of these ops whose problems are not measured with the present default are removed.
    """
    measured = measured_in(asked.measured)
    devices = {raw["device"]["name"] for _, raw in measured}
    if len(devices) != 1:
        raise SystemExit(f"FILE: times of {' and '.join(sorted(devices)) or 'no device'}, expected those of one device")
    wanted = [(problem, raw) for problem, raw in measured if not asked.op or problem.op in asked.op]
    found = entries_of(wanted)
    table.update(asked.table, device_of(measured[0][1]), measured[0][1]["software"], found, anew=asked.op)
    print(f"{asked.table}: {len(found)} entries of {len(wanted)} problems")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("draw", help="choose the tiles to measure; needs no GPU")
    one.add_argument(
        "--device", choices=KNOWN, help="the GPU whose limits and predictions count; default: the one here"
    )
    one.add_argument("--workloads", default="quick,llm,sd15-unet,resnet50-bn,vae", metavar="NAMES")
    one.add_argument("--stale", type=Path, metavar="TABLE", help="instead of workloads: a table's stale entries")
    one.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    one.add_argument("--problems", type=int, metavar="N", help="problems to draw; default: all")
    one.add_argument("--drawn", type=int, default=0, metavar="N", help="further tiles of a problem, at random")
    one.add_argument("--seed", type=int, default=0, metavar="N")
    one.add_argument("--out", type=Path, required=True, metavar="FILE")
    one.set_defaults(run=draw)
    one = commands.add_parser("build", help="compile the kernels of the tiles of a file; needs no GPU")
    one.add_argument("tiles", type=Path, metavar="FILE")
    one.add_argument("--device", choices=KNOWN, help="the GPU to compile for; default: the one here")
    one.add_argument("--seconds", type=float, metavar="S", help="begin no kernel after this time")
    one.set_defaults(run=build)
    one = commands.add_parser("run", help="measure the tiles of a file")
    one.add_argument("tiles", type=Path, metavar="FILE")
    one.add_argument("--out", type=Path, required=True, metavar="FILE")
    one.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="samples of each tile, at least 2")
    one.add_argument("--seconds", type=float, metavar="S", help="begin no problem after this time")
    one.set_defaults(run=run)
    one = commands.add_parser("table", help="write the tiling table of the fastest tiles")
    one.add_argument("measured", type=Path, nargs="+", metavar="FILE")
    one.add_argument("--table", type=Path, required=True, metavar="FILE")
    one.add_argument(
        "--op", action="append", default=[], choices=OPS, help="only this op, whose old entries go; repeatable"
    )
    one.set_defaults(run=write_table)
    asked = parser.parse_args(argv)
    asked.run(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
