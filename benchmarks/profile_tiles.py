r"""Run the first tile of each problem of a file under Nsight Compute, and keep what its report says.

Example::

    python benchmarks/measure_tiles.py draw --workloads llm --out tiles.jsonl
    ncu --clock-control none --csv --page raw --kernel-name-base function \
      --kernel-name 'regex:norm|sums|moments|residual|counters' --section SpeedOfLight --section WarpStateStats \
      --section SchedulerStats --section Occupancy --section LaunchStats --section MemoryWorkloadAnalysis \
      python benchmarks/profile_tiles.py run tiles.jsonl > report.csv
    python benchmarks/profile_tiles.py keep tiles.jsonl report.csv --json benchmarks/results/profile-DEVICE-DATE.json

The tiles are those of ``measure_tiles.py draw``, or of its results. Each problem runs twice, because the first run
loads the kernels; ``keep`` takes the second one. ``benchmarks/speed_page.py`` shows the file.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cunorm.tuning.measure.clock import GraphClock

from benchmarks.measure_tiles import Measured, lines_of
from benchmarks.simulator.goals import key_of
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Target

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
    one = commands.add_parser("run", help="run the tiles; start it under ncu")
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
