"""Run the first tile of each problem of a file once, for a profiler.

Example::

    python benchmarks/measure_tiles.py draw --workloads llm --out tiles.jsonl
    ncu --clock-control none --set basic python benchmarks/profile_tiles.py tiles.jsonl

The tiles are those of ``measure_tiles.py draw``, or of its results. Each problem runs twice: the first run loads the
kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cunorm.tuning.measure.clock import GraphClock

from benchmarks.measure_tiles import Measured, lines_of
from cunorm.core.strategy import Tile
from cunorm.executors.choose import executor
from cunorm.runtime.plans import Target


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiles", type=Path, metavar="FILE")
    asked = parser.parse_args(argv)
    gpu = executor("gpu")
    place = Target("gpu", gpu.current(), gpu.limits(gpu.current()))
    for problem, raw in lines_of(asked.tiles):
        tile = Tile.of(raw["tiles"][0]["tile"] if "tile" in raw["tiles"][0] else raw["tiles"][0])
        measured = Measured(problem, place, GraphClock())
        run = measured.runner(tile)
        print(f"{problem.describe()}: {tile!r}", flush=True)
        for _ in range(2):
            run(0)
        gpu.synchronise(place.ordinal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
