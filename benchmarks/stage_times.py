"""Time GroupNorm's backward in slabs with some stages left out, on a GPU: what each stage adds to the whole.

Example: ``python benchmarks/stage_times.py --json benchmarks/results/stage_times-DEVICE-DATE.json``

A slab is copied to shared memory, its sums are computed, and its dx is computed and stored. The text of the kernel is
compiled without the sums, without dx, and without both. The results of these kernels are wrong; only their times count.
The times contain the kernel that adds up the parameter gradients, and are medians of rounds in random order.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from cunorm.tuning.measure.clock import GraphClock
from cunorm.tuning.measure.session import software
from tqdm import tqdm

from benchmarks.measure_tiles import ROUNDS, Measured, in_rounds, raw_of
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import problem_of
from cunorm.runtime.plans import Target
from cunorm.traffic.sampling import floor_bytes

OP = "group_norm_backward"
#: For each stage: its call in backward_slab.cuh, and what takes its place. The compiler drops a call under a condition
#: that the sizes, which are constants, make false.
CALLS = {
    "sums": ("slab.add_sums<Tile::partial_sums>(", "if (HxW < 0) slab.add_sums<Tile::partial_sums>("),
    "dx": ("slab.write(", "if (HxW < 0) slab.write("),
}
LEFT_OUT: tuple[tuple[str, ...], ...] = ((), ("sums",), ("dx",), ("sums", "dx"))
BLOCK = {"strategy": "block", "groups": 1, "packs_per_thread": 1, "threads": 512}
CLUSTER = {"strategy": "cluster", "samples": 1, "stages": 1}
TILES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("8,320,64x64,32", "NCHW", {**BLOCK, "load": "bulk", "stages": 2}),
    ("8,640,64x64,32", "NCHW", {**CLUSTER, "cluster": 8, "groups": 1, "load": "bulk", "threads": 128}),
    ("8,1920,32x32,32", "NCHW", {**CLUSTER, "cluster": 4, "groups": 1, "load": "bulk", "threads": 256}),
    ("8,320,64x64,32", "NHWC", {**CLUSTER, "cluster": 8, "groups": 8, "load": "cp_async", "threads": 256}),
    ("8,640,64x64,32", "NHWC", {**CLUSTER, "cluster": 8, "groups": 4, "load": "cp_async", "threads": 256}),
    ("8,1920,32x32,32", "NHWC", {**CLUSTER, "cluster": 8, "groups": 2, "load": "cp_async", "threads": 128}),
)


def problems_and_tiles() -> list[tuple[Problem, Tile]]:
    """The problems, in bfloat16, each with its tile."""
    return [
        (problem_of(OP, **plan_options(OP, shape, "bfloat16", layout)), Tile.of(raw)) for shape, layout, raw in TILES
    ]


def without(stages: Sequence[str]) -> Callable[[str], str]:
    """An edit of a text that leaves stages out. Texts of other kernels stay as they are."""

    def edit(text: str) -> str:
        for stage in stages:
            call, instead = CALLS[stage]
            text = text.replace(call, instead)
        return text

    return edit


def times(problem: Problem, tile: Tile, place: Target, clock: GraphClock) -> dict[str, float]:
    """Microseconds of a tile, by the stages that are left out."""
    measured = Measured(problem, place, clock)
    samplers = {}
    for stages in LEFT_OUT:
        run = measured.runner(tile, without(stages))
        measured.results(run)
        samplers["+".join(stages)] = clock.sampler(tile, run, len(measured.sets))
    return {name: round(median(found), 2) for name, found in in_rounds(samplers, ROUNDS).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="write the times here")
    asked = parser.parse_args(argv)
    gpu = executor("gpu")
    place, clock = Target("gpu", gpu.current(), gpu.limits(gpu.current())), GraphClock()
    document = {
        "device": place.device.name,
        "date": datetime.date.today().isoformat(),
        "software": software("gpu"),
        "copy": clock.bandwidth(),
        "kernels": [
            {
                "problem": problem.describe().partition(" (")[0],
                "tile": raw_of(tile),
                "floor": floor_bytes(problem),
                "us": times(problem, tile, place, clock),
            }
            for problem, tile in tqdm(problems_and_tiles(), unit="problem")
        ],
    }
    asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
