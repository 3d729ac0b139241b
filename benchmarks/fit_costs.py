"""Fit the cost model: instructions counted by the simulator, times measured on a GPU; and how far predictions are.

Examples::

    python benchmarks/fit_costs.py sample --spread --problems 150   # simulate tiles of different predicted times
    python benchmarks/fit_costs.py fit                              # write cunorm/tiling/costs.json
    python benchmarks/fit_costs.py fit --kernel "layer_norm_grid NCHW"  # fit one kernel, keep the other entries
    python benchmarks/fit_costs.py sample                           # simulate the default of each workload's problems
    python benchmarks/fit_costs.py check                            # write benchmarks/results/cost_model.json

``sample`` adds to ``benchmarks/results/cost_samples.jsonl``: a line for each problem, tile and version of the kernels,
with the simulated time and the executed instructions of each launch. It can be stopped at any time; tiles that have a
sample are skipped. ``fit`` takes the instructions of a kernel from all samples. It takes the times from
``benchmarks/results/measured_tiles-*.jsonl`` (``measure_tiles.py``) where they are of the present kernels, and from the
samples for a kernel that no GPU has measured. ``check`` compares predictions with the measured times. After ``fit``,
run ``python benchmarks/make_shortlist.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cunorm.tuning.problems.workloads import problems
from scipy.optimize import least_squares, nnls
from tqdm import tqdm

from benchmarks import measured_sections
from benchmarks.measure_tiles import best_of_each, device_of, digest, measured_in, timings_of
from benchmarks.simulator.clock import GPUS
from benchmarks.simulator.goals import key_of
from benchmarks.simulator.problems import LARGEST, simulate
from cunorm.core import settings
from cunorm.core.devices import Device
from cunorm.core.files import write_whole
from cunorm.core.problem import Problem
from cunorm.core.strategy import Launch, Strategy, Tile
from cunorm.ops.registry import OPS
from cunorm.tiling import costmodel, costs, table

RESULTS = Path(__file__).parent / "results"
SAMPLES = RESULTS / "cost_samples.jsonl"
CHECKED = RESULTS / "cost_model.json"
GPU = GPUS["H200"]
DTYPE = "bfloat16"
#: Tiles of a problem that ``--five`` simulates, and within which the default should be near the best.
FIVE = 5
#: Of the problems that ``--spread`` draws: the share in float32, and the share of GroupNorm's with an activation.
WIDE, ACTIVATED, ADDED = 0.2, 0.1, 0.1
#: Of the tiles that ``--spread`` simulates: largest ratio of their predicted time to the least; how many.
OTHER_STRATEGIES, NEAR, OTHERS, DRAWN = 2.0, 1.5, 3, 4
#: Fewest samples from which a kernel's instructions for a kind of problem are fitted.
FEWEST = 3
#: Fewest samples of even and of uneven problems from which both get times of their own.
FEWEST_TIMES = 6
#: Times of an unknown kernel, microseconds, and cycles per instruction: fits are drawn towards them with `PULL`.
TYPICAL, PULL = (0.3, 0.55, 0.2, 0.1, 0.02, 0.02, 4.0), 0.15
#: `Cost.stream` is drawn towards 1, a copy's: strongly, if fewer than `FEWEST` measured launches move bytes for `LONG`
#: seconds.
PULL_STREAM, PULL_UNKNOWN, LONG = 0.3, 30.0, 30e-6
#: Relative error from which an error counts linearly: a few odd samples must not bend the fit.
ODD = 0.2


@dataclass(frozen=True)
class Sample:
    """A simulated call.

    Attributes
    ----------
    problem : Problem
    tile : Tile
    kernel : str
        Digest of its kernels.
    launches : list of (str, float, int)
        Entry, simulated microseconds and executed instructions of warps, for each launch. The latter two are null for a
        launch whose kernel has been replaced since, so that the fit ignores it.
    """

    problem: Problem
    tile: Tile
    kernel: str
    launches: list[tuple[str, float | None, int | None]]

    @property
    def strategy(self) -> Strategy:
        return OPS[self.problem.op].strategies[self.tile.strategy]

    @property
    def microseconds(self) -> float:
        return sum(us for _, us, _ in self.launches if us is not None)

    @property
    def line(self) -> str:
        tile = {"strategy": self.tile.strategy, **self.tile.as_dict()}
        key = table.key_of(self.problem)
        return json.dumps({"problem": key, "tile": tile, "kernel": self.kernel, "launches": self.launches})


def samples() -> dict[tuple[Problem, Tile, str], Sample]:
    """All stored samples."""
    found = {}
    for line in SAMPLES.read_text(encoding="utf-8").splitlines() if SAMPLES.exists() else ():
        raw = json.loads(line)
        problem, tile = table.problem_of(raw["problem"]), Tile.of(raw["tile"])
        launches = [(entry, us, count) for entry, us, count in raw["launches"]]
        found[problem, tile, raw["kernel"]] = Sample(problem, tile, raw["kernel"], launches)
    return found


# ---- sample ---------------------------------------------------------------------------------------------------------


def workload_problems(largest: int, number: int | None, seed: int, ops: Sequence[str] = ()) -> list[Problem]:
    """The workloads' problems with at most `largest` elements, in an order in which ops alternate; no ops: all."""
    found: dict[Problem, None] = dict.fromkeys(one for _, one in problems(DTYPE))
    every = [one for one in found if one.N * one.C * one.HxW <= largest and (not ops or one.op in ops)]
    random.Random(seed).shuffle(every)
    met: dict[str, int] = defaultdict(int)

    def turn(problem: Problem) -> float:
        met[problem.op] += 1
        return met[problem.op] / sum(one.op == problem.op for one in every)

    return sorted(every, key=turn)[:number]


def varied(problem: Problem, draw: random.Random) -> Problem:
    """The problem, sometimes in float32, with an activation, or with the tensors that its op may add."""
    chance = draw.random()
    if chance < WIDE:
        alike: Problem = next(one for _, one in problems("float32") if key_of(one) == key_of(problem))
        return alike
    if chance < WIDE + ACTIVATED and problem.spec.activations:
        return replace(problem, activation="silu", beta_dtype=problem.beta_dtype or problem.gamma_dtype)
    if chance < WIDE + ADDED and problem.spec.extras:
        return problem.with_extras()
    return problem


def spread(problem: Problem, draw: random.Random) -> list[Tile]:
    """The default, the best tile of some other strategies, and some tiles that are predicted to be nearly as fast."""
    ranked = costmodel.ranked(problem, OPS[problem.op].strategies.values(), GPU.device)
    least = min(one.seconds for one in ranked)
    others = best_of_each(ranked, OTHER_STRATEGIES)
    near = [one for one in ranked if one.seconds < NEAR * least]
    found = [ranked[0], *draw.sample(others, min(OTHERS, len(others))), *draw.sample(near, min(DRAWN, len(near)))]
    return [*dict.fromkeys(one.tile for one in found)]


def tiles_of(problem: Problem, how: str, draw: random.Random) -> list[Tile]:
    """The tiles to simulate."""
    strategies = OPS[problem.op].strategies.values()
    if how == "spread":
        return spread(problem, draw)
    if how == "five":
        return [one.tile for one in costmodel.ranked(problem, strategies, GPU.device)[:FIVE]]
    return [costmodel.choose(problem, strategies, GPU.device).tile]


def _sampled(job: tuple[Problem, str, int, frozenset[tuple[Problem, Tile, str]]]) -> list[str]:
    problem, how, seed, known = job
    draw = random.Random(f"{seed} {key_of(problem)}")
    problem = varied(problem, draw).canonical() if how == "spread" else problem
    lines = []
    for tile in tiles_of(problem, how, draw):
        kernel = digest(problem, tile)
        if (problem, tile, kernel) in known:
            continue
        found = simulate(problem, GPU, tile)
        launches: list[tuple[str, float | None, int | None]] = [
            (launch.kernel.code.entry, round(timing.seconds * 1e6, 3), int(timing.counters["warps"].sum()))
            for launch, timing in zip(found.launches, found.timings, strict=True)
        ]
        lines.append(Sample(problem, tile, kernel, launches).line)
    return lines


def sample(asked: argparse.Namespace) -> None:
    """Simulate tiles on all cores and append each problem's samples as soon as they are known."""
    known = frozenset(samples())
    how = "spread" if asked.spread else "five" if asked.five else "default"
    jobs = [
        (one, how, asked.seed, known) for one in workload_problems(asked.largest, asked.problems, asked.seed, asked.op)
    ]
    with multiprocessing.get_context("spawn").Pool(settings.cpu_cores()) as pool, SAMPLES.open("a") as out:
        for lines in tqdm(pool.imap_unordered(_sampled, jobs), total=len(jobs), unit="problem"):
            out.writelines(f"{line}\n" for line in lines)
            out.flush()


# ---- fit ------------------------------------------------------------------------------------------------------------


@dataclass
class Point:
    """One launch of a sample, for the fit of its kernel."""

    kind: costs.Kind
    work: costmodel.Work
    instructions: int | None
    microseconds: float
    device: Device = GPU.device

    @property
    def measured(self) -> bool:
        """Whether a GPU took the time. Then nobody counted the instructions."""
        return self.instructions is None


def points(found: Sequence[Sample]) -> dict[str, list[Point]]:
    """The launches of samples, by kernel and layout."""
    points: dict[str, list[Point]] = defaultdict(list)
    for one in found:
        for launch, (entry, us, count) in zip(_launches(one), one.launches, strict=True):
            assert launch.entry == entry, f"{one.problem.describe()}: {launch.entry}, the sample has {entry}"
            if us is None or count is None:
                continue
            work = costmodel.work_of(launch, GPU.device)
            key = costs.kernel_of(one.problem, launch)
            points[key].append(Point(costs.kind_of(one.problem, launch), work, count, us))
    return points


def measured_points() -> dict[str, list[Point]]:
    """The launches of the calls that a GPU has measured, by kernel and layout.

    A graph of calls gives the time of all launches of a call. It is divided among them as the present model predicts.
    """
    points: dict[str, list[Point]] = defaultdict(list)
    for problem, raw in measured():
        device = device_of(raw)
        for tile, timing in timings_of(raw).items():
            launches = OPS[problem.op].strategies[tile.strategy].launches(problem, tile)
            predicted = [costmodel.launch_seconds(problem, one, device) for one in launches]
            for launch, seconds in zip(launches, predicted, strict=True):
                us = timing.seconds * 1e6 * seconds / sum(predicted)
                point = Point(costs.kind_of(problem, launch), costmodel.work_of(launch, device), None, us, device)
                points[costs.kernel_of(problem, launch)].append(point)
    return points


def measured() -> list[tuple[Problem, dict[str, Any]]]:
    """The measured problems whose kernels are the present ones."""
    return measured_in(sorted(RESULTS.glob("measured_tiles-*.jsonl")))


def _launches(one: Sample) -> tuple[Launch, ...]:
    return one.strategy.launches(one.problem, one.tile)


def fitted_instructions(found: Sequence[Point]) -> list[float]:
    """Instructions per pack, warp and round with the least relative errors. None is negative."""
    works = [one.work for one in found]
    counted = [(one.instructions or 0) / one.work.blocks for one in found]
    terms = np.array([[work.packs, work.warps, work.warps * work.rounds] for work in works])
    solved, _ = nnls(terms / np.array(counted)[:, None], np.ones(len(found)))
    return [float(f"{value:.4g}") for value in solved]


def fitted_times(found: Sequence[Point], instructions: dict[str, list[float]]) -> list[float]:
    """Latencies in microseconds, cycles per instruction and `Cost.stream` with the least relative errors of times."""
    counted = [costs.instructions_for(instructions, one.kind) for one in found]

    long = sum(one.measured and one.work.transfers > LONG for one in found)
    typical = np.array([*TYPICAL, 1.0])
    pull = np.array([PULL] * len(TYPICAL) + [PULL_STREAM if long >= FEWEST else PULL_UNKNOWN])

    def errors(exponents: Any) -> Any:
        times = typical * np.exp(exponents)
        made = [costs.Cost.of(counts, times) for counts in counted]
        predicted = [
            costmodel.seconds_of(one.work, cost, one.device) * 1e6 for one, cost in zip(found, made, strict=True)
        ]
        wrong = [math.log(us / one.microseconds) for us, one in zip(predicted, found, strict=True)]
        return np.array([*wrong, *(pull * exponents)])

    least = np.array([-np.inf] * len(TYPICAL) + [0.0])  # no kernel moves bytes faster than a copy
    solved = least_squares(errors, np.full(len(typical), 1e-3), bounds=(least, np.inf), loss="soft_l1", f_scale=ODD)
    return [float(f"{value:.4g}") for value in typical * np.exp(solved.x)]


def fitted(found: Sequence[Point], measured: Sequence[Point] = ()) -> dict[str, Any]:
    """The entry of ``costs.json`` for one kernel and layout.

    The simulator counts instructions. Times are fitted to measured ones, if there are enough, else to simulated ones.
    """
    kinds: dict[str, list[Point]] = defaultdict(list)
    for one in found:
        kinds[one.kind.text].append(one)
    enough = {text: of_kind for text, of_kind in kinds.items() if len(of_kind) >= FEWEST} or kinds
    instructions = {text: fitted_instructions(enough[text]) for text in sorted(enough)}
    timed = measured if len(measured) >= FEWEST_TIMES else found
    sides = {side: [one for one in timed if one.kind.uneven == uneven] for uneven, side in enumerate(costs.EVENNESS)}
    if any(len(side) < FEWEST_TIMES for side in sides.values()):
        sides = {max(sides, key=lambda side: len(sides[side])): [*timed]}
    times = {side: fitted_times(alike, instructions) for side, alike in sides.items()}
    return {"instructions": instructions, "times": times, "samples": len(found), "measured": len(measured)}


def measured_over_simulated(found: dict[str, list[Point]], document: dict[str, Any]) -> float:
    """The median, over the kernels that a GPU has measured, of the ratio of fitted to simulated times."""
    ratios = []
    for key, entry in document.items():
        if entry["measured"] < FEWEST_TIMES:
            continue
        times = next(iter(entry["times"].values()))
        of_kernel = []
        for one in found.get(key, ()):
            cost = costs.Cost.of(costs.instructions_for(entry["instructions"], one.kind), times)
            of_kernel.append(costmodel.seconds_of(one.work, cost, one.device) * 1e6 / one.microseconds)
        if of_kernel:
            ratios.append(float(np.median(of_kernel)))
    return float(np.median(ratios)) if ratios else 1.0


def fit(asked: argparse.Namespace) -> None:
    """Write ``costs.json``: the entries of the kernels in `asked`, or of all kernels.

    Simulated times are too short in most cases. Those of kernels that no GPU has measured are multiplied by the usual
    ratio, so that they compare with the measured times of other kernels.
    """
    found = points([*samples().values()])
    if unknown := [key for key in asked.kernel if key not in found]:
        raise SystemExit(f"--kernel: {unknown[0]!r} has no sample, expected one of {', '.join(sorted(found))}")
    before = json.loads(costs.PATH.read_text(encoding="utf-8")) if asked.kernel else {}
    of_any = before.pop(costs.ANY, None)
    document = before | _fitted_anew(found, asked.kernel or sorted(found), before)
    document = dict(sorted(document.items()))
    document = {costs.ANY: of_any or _of_any(document), **document}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(one)}" for key, one in document.items())
    write_whole(costs.PATH, f"{{\n{lines}\n}}\n")


def _fitted_anew(
    found: dict[str, list[Point]], keys: Sequence[str], before: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The entries of kernels, by kernel and layout; `before` contains those of the others, if they stay."""
    timed = measured_points()
    timed_here = [key for key in keys if len(timed[key]) >= FEWEST_TIMES]
    document = {key: fitted(found[key], timed[key]) for key in tqdm(timed_here, unit="measured kernel")}
    slower = measured_over_simulated(found, before | document)
    for key in tqdm([key for key in keys if key not in document], unit="simulated kernel"):
        document[key] = fitted([replace(one, microseconds=slower * one.microseconds) for one in found[key]], timed[key])
    return document


def _of_any(document: dict[str, Any]) -> dict[str, Any]:
    """The entry of a kernel that has none: the medians of the others."""
    instructions, times = (_middle(one) for one in zip(*_mains(document), strict=True))
    return {"instructions": {"2": instructions}, "times": {costs.EVENNESS[0]: times}, "samples": 0, "measured": 0}


def _middle(lists: Sequence[list[float]]) -> list[float]:
    """The medians of lists of equal length, place by place."""
    return [float(f"{value:.4g}") for value in np.median(lists, axis=0)]


def _mains(document: dict[str, Any]) -> Iterator[tuple[list[float], list[float]]]:
    """Instructions and times of each kernel."""
    for one in document.values():
        yield next(iter(one["instructions"].values())), next(iter(one["times"].values()))


# ---- check ----------------------------------------------------------------------------------------------------------


def checked() -> dict[str, Any]:
    """How far predicted times are from measured ones, and the model's choices from the fastest tiles, by device.

    A problem's choice is the tile that the model prefers among the measured ones. The default may be another tile.
    """
    by_device: dict[str, list[tuple[Problem, dict[str, Any]]]] = defaultdict(list)
    for problem, raw in measured():
        by_device[raw["device"]["name"]].append((problem, raw))
    return {name: _checked_on(found) for name, found in sorted(by_device.items())}


def _checked_on(timed: Sequence[tuple[Problem, dict[str, Any]]]) -> dict[str, Any]:
    """The same on one device."""
    agreement, choice, strategies = {}, {}, defaultdict(list)
    for problem, raw in timed:
        device, timings, known = device_of(raw), timings_of(raw), OPS[problem.op].strategies
        made = [costmodel.evaluated(problem, known[tile.strategy], tile, device) for tile in timings]
        found = [one for one in made if one is not None]
        if not found:
            continue
        for one in found:
            name = f"{problem.op} {problem.layout}, {one.strategy.name}"
            strategies[name].append(one.seconds / timings[one.tile].seconds)
        chosen = costmodel.default_of(found, device)
        times = [round(1e6 * seconds, 2) for seconds in (chosen.seconds, timings[chosen.tile].seconds)]
        agreement[key_of(problem)] = times
        fastest = min(timings.values(), key=lambda timing: timing.seconds)
        choice[key_of(problem)] = [times[1], round(1e6 * fastest.seconds, 2)]
    ratios = {
        name: [len(found), *(round(float(one), 2) for one in np.quantile(found, (0.25, 0.5, 0.75)))]
        for name, found in sorted(strategies.items())
    }
    dtypes = sorted({problem.dtype for problem, _ in timed})
    return {"dtypes": dtypes, "predicted_over_measured": ratios, "chosen": agreement, "chosen_and_fastest": choice}


def check(_: argparse.Namespace) -> None:
    """Write the result file and print what it says. ``benchmarks/speed_page.py`` shows it."""
    document = checked()
    write_whole(CHECKED, json.dumps(document, indent=1) + "\n")
    print("\n".join(measured_sections.model_page(document)))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("sample", help="simulate tiles and store their times and instructions")
    how = one.add_mutually_exclusive_group()
    how.add_argument("--spread", action="store_true", help="simulate tiles of different predicted times, for the fit")
    how.add_argument("--five", action="store_true", help="simulate the five tiles that the model ranks first")
    one.add_argument("--op", action="append", default=[], metavar="OP", help="an op to sample; default: all")
    one.add_argument("--problems", type=int, metavar="N", help="problems to take; default: all of the workloads")
    one.add_argument("--largest", type=int, default=LARGEST, metavar="N", help="most elements of a problem")
    one.add_argument("--seed", type=int, default=0, metavar="N", help="which problems and tiles are drawn")
    one.set_defaults(run=sample)
    two = commands.add_parser("fit", help="write cunorm/tiling/costs.json")
    two.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help='fit this kernel and layout, as "group_norm_grid NHWC"; the others keep their entries; default: all',
    )
    two.set_defaults(run=fit)
    commands.add_parser("check", help="compare predictions with measured times").set_defaults(run=check)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    asked = parser().parse_args(argv)
    asked.run(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
