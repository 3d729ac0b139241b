"""Run the first tile of each problem of a file under Nsight Compute, and keep what its report says.

Example::

    python benchmarks/profile_tiles.py draw benchmarks/results/measured_tiles-DEVICE-DATE.jsonl --out tiles.jsonl
    python benchmarks/profile_tiles.py ncu tiles.jsonl --csv report.csv
    python benchmarks/profile_tiles.py keep tiles.jsonl report.csv --json benchmarks/results/profile-DEVICE-DATE.json

``draw`` takes the large problems whose fastest measured tile is furthest from the copy's bandwidth, one of each op,
layout and strategy. The file may also be one of ``measure_tiles.py draw``, or its results. Each problem runs twice,
because the first run loads the kernels; ``keep`` takes the second one. ``benchmarks/speed_page.py`` shows the file.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cunorm.tuning.measure.clock import GraphClock

from benchmarks.measure_tiles import Measured, line_of, lines_of, measured_in, raw_of, timings_of
from benchmarks.measured_sections import LARGE
from benchmarks.simulator.goals import key_of
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Target

#: Options of ncu: the clocks stay as they are, and all kernels of cunorm are profiled.
NCU = (
    *("--clock-control", "none", "--csv", "--page", "raw", "--kernel-name-base", "function"),
    *("--kernel-name", "regex:norm|sums|moments|residual|counters"),
)
SECTIONS = (
    "SpeedOfLight",
    "WarpStateStats",
    "SchedulerStats",
    "Occupancy",
    "LaunchStats",
    "MemoryWorkloadAnalysis",
)
PAST = "smsp__average_warps_issue_stalled_"  # a metric's name: PAST, the reason, BEHIND
BEHIND = "_per_issue_active.ratio"
#: Reasons that are no wait.
BUSY = ("selected", "not_selected")
WAITS = 3


def first_tiles(path: Path) -> Iterator[tuple[Problem, Tile]]:
    """The problems of a file, each with its first tile."""
    for problem, raw in lines_of(path):
        first = raw["tiles"][0]
        yield problem, Tile.of(first.get("tile", first))


def furthest(path: Path, most: int) -> Iterator[tuple[Problem, Tile]]:
    """The large problems whose fastest tile has the smallest shares of the copy's bandwidth, each with that tile."""
    found = []
    for problem, raw in measured_in([path]):
        timings = timings_of(raw)
        if raw["floor"] > LARGE and timings:
            tile = min(timings, key=lambda one: timings[one].seconds)
            found.append((raw["floor"] / timings[tile].seconds / raw["copy"], problem, tile))
    kinds: set[tuple[str, str, str]] = set()
    for _, problem, tile in sorted(found, key=lambda one: one[0]):
        kind = problem.op, problem.layout, tile.strategy
        if kind not in kinds and len(kinds) < most:
            kinds.add(kind)
            yield problem, tile


def draw(asked: argparse.Namespace) -> None:
    """Write the problems to profile."""
    lines = [line_of(problem, tiles=[raw_of(tile)]) for problem, tile in furthest(asked.measured, asked.problems)]
    asked.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def ncu(asked: argparse.Namespace) -> None:
    """Run the problems under Nsight Compute, which writes its report to standard output."""
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not in PATH: install Nsight Compute, or add its folder to PATH")
    sections = [word for name in SECTIONS for word in ("--section", name)]
    run = [sys.executable, __file__, "run", str(asked.tiles)]
    with asked.csv.open("w", encoding="utf-8") as report:
        done = subprocess.run(["ncu", *NCU, *sections, *run], stdout=report)
    if done.returncode != 0:
        raise SystemExit(f"ncu ended with exit code {done.returncode}: read {asked.csv}, which has its messages")


def run(asked: argparse.Namespace) -> None:
    """Run each problem's first tile twice."""
    gpu = executor("gpu")
    place = Target("gpu", gpu.current(), gpu.limits(gpu.current()))
    for problem, tile in first_tiles(asked.tiles):
        launches = Measured(problem, place, GraphClock()).runner(tile)
        print(f"{problem.describe()}: {tile!r}", flush=True)
        for _ in range(2):
            launches(0)
        gpu.synchronise(place.ordinal)


def kernel_of(metrics: Mapping[str, str]) -> dict[str, Any]:
    """The facts of a kernel's row of the report."""

    def number(name: str) -> float:
        return float(metrics[name].replace(",", ""))

    waits = {
        name[len(PAST) : -len(BEHIND)]: number(name)
        for name in metrics
        if name.startswith(PAST) and name[len(PAST) : -len(BEHIND)] not in BUSY
    }
    longest = sorted(waits, key=lambda reason: -waits[reason])[:WAITS]
    return {
        "kernel": metrics["Kernel Name"],
        "us": number("gpu__time_duration.sum") / 1e3,
        "gigabytes_per_s": round(number("dram__bytes.sum.per_second") / 1e9, 1),
        "issue": round(number("smsp__issue_active.avg.pct_of_peak_sustained_active") / 100, 3),
        "warps": round(number("sm__warps_active.avg.pct_of_peak_sustained_active") / 100, 3),
        "waits": {reason: waits[reason] for reason in longest},
    }


def keep(asked: argparse.Namespace) -> None:
    """Write the facts of the second run of each problem."""
    text = asked.report.read_text(encoding="utf-8").splitlines()
    _, *rows = csv.DictReader(line for line in text if line.startswith('"'))  # the first row has the units
    device, kernels, at = rows[0]["device__attribute_display_name"], [], 0
    for problem, tile in first_tiles(asked.tiles):
        count = len(OPS[problem.op].strategies[tile.strategy].launches(problem, tile))
        second = [kernel_of(row) for row in rows[at + count : at + 2 * count]]
        kernels += [{"problem": key_of(problem), **one} for one in second]
        at += 2 * count
    if at != len(rows):
        raise SystemExit(f"{asked.report}: {len(rows)} kernels, expected {at}, the launches of {asked.tiles} twice")
    document = {"device": device, "date": datetime.date.today().isoformat(), "kernels": kernels}
    asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("draw", help="choose the large problems that are furthest from the copy")
    one.add_argument("measured", type=Path, metavar="FILE", help="results of measure_tiles.py run")
    one.add_argument("--problems", type=int, default=6, metavar="N", help="most problems; default: %(default)s")
    one.add_argument("--out", type=Path, required=True, metavar="FILE")
    one.set_defaults(run=draw)
    one = commands.add_parser("ncu", help="run the tiles under ncu, and write its report")
    one.add_argument("tiles", type=Path, metavar="FILE")
    one.add_argument("--csv", type=Path, required=True, metavar="REPORT")
    one.set_defaults(run=ncu)
    one = commands.add_parser("run", help="run the tiles; `ncu` starts it")
    one.add_argument("tiles", type=Path, metavar="FILE")
    one.set_defaults(run=run)
    one = commands.add_parser("keep", help="keep what the report says")
    one.add_argument("tiles", type=Path, metavar="FILE")
    one.add_argument("report", type=Path, metavar="REPORT")
    one.add_argument("--json", type=Path, required=True, metavar="FILE")
    one.set_defaults(run=keep)
    asked = parser.parse_args(argv)
    asked.run(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
