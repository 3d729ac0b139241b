"""Measure the time of the first plan of a new shape, with the shortlist of tiles and with a ranking of all tiles.

``python benchmarks/first_plan.py [--json FILE] [--rounds N]`` times three functions for each shape of the named
workloads: a ranking of all legal tiles, as `cunorm.plan` did before the shortlist; the cost model's choice from the
shortlist; and the whole of `cunorm.plan`. It repeats this for N rounds, and takes the median over the rounds for each
shape and function. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from cunorm.tuning.problems.workloads import problems

import cunorm
from cunorm.core.devices import known
from cunorm.core.files import write_whole
from cunorm.core.problem import Problem
from cunorm.ops.parse_problem import plan_options, shape_text
from cunorm.ops.registry import OPS
from cunorm.runtime import plans
from cunorm.tiling import choose_tile, costmodel

DEVICE, DTYPE = "H200", "bfloat16"
RESULTS = Path(__file__).resolve().parent / "results" / "first_plan.json"
#: Maximum time of `cunorm.plan`, in milliseconds: the median over the shapes, and the slowest shape.
TARGET, WORST = 2.0, 5.0


def ranking(problem: Problem) -> Any:
    """Return the default among all legal tiles."""
    device = known(DEVICE)
    return costmodel.default_of(costmodel.legal(problem, OPS[problem.op].strategies.values(), device), device)


def choice(problem: Problem) -> Any:
    """Return the default that the cost model chooses from the shortlist."""
    return costmodel.choose(problem, OPS[problem.op].strategies.values(), known(DEVICE))


def plan(problem: Problem) -> Any:
    """Return the plan with empty caches, like the first call of a program."""
    plans._plans.clear()
    choose_tile._chosen.clear()
    return cunorm.plan(problem.op, **options_of(problem), device=DEVICE)


@functools.cache
def options_of(problem: Problem) -> dict[str, Any]:
    """Return the options of `cunorm.plan` for a problem."""
    shape = shape_text(problem)
    layout = problem.layout if "data_format" in OPS[problem.op].takes else None
    return plan_options(problem.op, shape, problem.dtype, layout)


WAYS: dict[str, Callable[[Problem], Any]] = {"ranking": ranking, "choice": choice, "plan": plan}


def measured(rounds: int) -> dict[str, Any]:
    """Return the milliseconds of each function over the shapes (median, 95th percentile, worst), and the settings."""
    suite = list(dict.fromkeys(problem for _, problem in problems(DTYPE)))
    taken: dict[str, list[list[float]]] = {name: [[] for _ in suite] for name in WAYS}
    for _ in range(rounds + 1):  # the first round fills the caches of the process and is not counted
        for index, problem in enumerate(suite):
            for name, way in WAYS.items():
                options_of(problem)
                began = time.perf_counter()
                way(problem)
                taken[name][index].append(1e3 * (time.perf_counter() - began))
    of = {name: sorted(median(times[1:]) for times in found) for name, found in taken.items()}
    facts = {
        name: {
            "median": round(median(times), 3),
            "p95": round(times[int(0.95 * len(times))], 3),
            "worst": round(times[-1], 3),
        }
        for name, times in of.items()
    }
    return {"milliseconds": facts, "shapes": len(suite), "rounds": rounds, "machine": platform.machine(),
            "python": platform.python_version(), "device": DEVICE, "dtype": DTYPE}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit code: 1 if a target is missed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    asked = parser.parse_args(argv)
    found = measured(asked.rounds)
    for name, facts in found["milliseconds"].items():
        print(f"{name:8s} median {facts['median']:7.3f} ms, 95 % {facts['p95']:7.3f}, worst {facts['worst']:7.3f}")
    if asked.json:
        write_whole(asked.json, json.dumps(found, indent=1) + "\n")
    plan_ = found["milliseconds"]["plan"]
    met = plan_["median"] <= TARGET and plan_["worst"] <= WORST
    print(f"targets: median {TARGET:g} ms, worst {WORST:g} ms: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
