"""What the first plan of a new shape costs, over the shapes of the named workloads: with the shortlist, and by ranking.

``python benchmarks/first_plan.py [--json FILE] [--rounds N]`` takes each shape in turn, as a program would meet it: a
ranking of all legal tiles, which `cunorm.plan` did before it had a shortlist, the cost model's choice from the
shortlist, and the whole of `cunorm.plan`; rounds of these, and of each the median over the rounds. Nothing is compiled.
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
#: Milliseconds that the plan of a shape may take: in the median, and at worst.
TARGET, WORST = 2.0, 5.0


def ranking(problem: Problem) -> Any:
    """The default of all legal tiles."""
    device = known(DEVICE)
    return costmodel.default_of(costmodel.legal(problem, OPS[problem.op].strategies.values(), device), device)


def choice(problem: Problem) -> Any:
    """The default of the shortlist."""
    return costmodel.choose(problem, OPS[problem.op].strategies.values(), known(DEVICE))


def plan(problem: Problem) -> Any:
    """The plan as a program asks for it, for the first time."""
    plans._plans.clear()
    choose_tile._chosen.clear()
    return cunorm.plan(problem.op, **options_of(problem), device=DEVICE)


@functools.cache
def options_of(problem: Problem) -> dict[str, Any]:
    """What `cunorm.plan` takes for it."""
    shape = shape_text(problem)
    layout = problem.layout if "data_format" in OPS[problem.op].takes else None
    return plan_options(problem.op, shape, problem.dtype, layout)


WAYS: dict[str, Callable[[Problem], Any]] = {"ranking": ranking, "choice": choice, "plan": plan}


def measured(rounds: int) -> dict[str, Any]:
    """Milliseconds of each way over the suite: the median, the 95th percentile and the worst, and how they compare."""
    suite = list(dict.fromkeys(problem for _, problem in problems(DTYPE)))
    taken: dict[str, list[list[float]]] = {name: [[] for _ in suite] for name in WAYS}
    for _ in range(rounds + 1):  # the first makes what is made once a process
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
    """The command; returns the exit code: 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
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
