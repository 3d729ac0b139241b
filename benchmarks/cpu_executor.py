"""Measure the speed of the CPU executor (LayerNorm forward, float32, rows of 4096, one core) and its compile times.

Example: ``python benchmarks/cpu_executor.py --json benchmarks/results/cpu_executor.json``

The plain and the checked build run alternately, so that other load on the machine affects both. The checked build runs
with bounds and counters (``checked``), and again with the trace for reuse distances (``traced``: everything that
`plan.traffic()` counts). Three kernels run:

- the kernel of `cunorm.layer_norm` with a tile of 32 elements per thread; the targets apply to it;
- the same kernel with the default tile for an H200, if that is another;
- the small kernel of tests/kernels/layer_norm.cu. It bypasses load and store, so it runs only in the plain build.

There are two clocks. ``wall`` is elapsed time. ``cpu`` is the CPU time of the thread, or of the compiler's processes
for a compilation. If they differ, other work occupied the core, and the targets are compared with ``cpu``. Otherwise
they are compared with ``wall``. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from host_overhead import cpu_model

import cunorm
from cunorm.executors.cpu import executor
from cunorm.jit import cxx, sources

ROOT = Path(__file__).resolve().parent.parent
BUILDS = ("plain", "checked")
MODES = (*BUILDS, "traced")
LENGTH, DTYPE = 4096, "float32"
#: Each shuffle switches fibers. With fewer shuffles per element, more of the time is the kernel's own arithmetic.
FEW_SHUFFLES = {"strategy": "block", "threads": 128, "packs_per_thread": 8, "rows_per_team": 1, "teams_per_block": 1}
PLAIN_TARGET = 20.0  # million elements per second
CHECKED_TARGET = PLAIN_TARGET / 4  # of the mode with all checks and counts: traced
COMPILE_TARGET = 2.0  # seconds per kernel
QUIET = 1.1  # maximum wall over cpu if no other work occupied the core

#: Calls whose kernels are compiled: op, shape, options of `cunorm.plan`.
COMPILED: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("layer_norm", (512, LENGTH), {"normalized_shape": LENGTH}),
    ("layer_norm_backward", (512, LENGTH), {"normalized_shape": LENGTH}),
    ("group_norm", (8, 64, 32, 32), {"num_groups": 8}),
    ("group_norm_backward", (8, 64, 32, 32), {"num_groups": 8}),
    ("batch_norm_stats", (8, 64, 32, 32), {}),
    ("batch_norm_backward_reduce", (8, 64, 32, 32), {}),
    ("batch_norm_elemt", (8, 64, 32, 32), {}),
    ("batch_norm_backward_elemt", (8, 64, 32, 32), {}),
)


_run = executor.run


def use(mode: str) -> None:
    """Select the build of all later launches, and whether they are traced."""
    os.environ["CUNORM_CPU_BUILD"] = "plain" if mode == "plain" else "checked"
    executor.run = functools.partial(_run, record=[]) if mode == "traced" else _run


def machine() -> dict[str, Any]:
    """Return the facts about the machine and the software on which the results depend."""
    compiler = cxx.chosen()
    load = os.getloadavg() if hasattr(os, "getloadavg") else ()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in load],
        "system": f"{platform.system()} {platform.machine()}",
        "compiler": f"{compiler.name}: {compiler.version}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        "cunorm": cunorm.__version__,
    }


# ---- running --------------------------------------------------------------------------------------------------------


def through_plan(rows: int, tile: dict[str, Any] | None) -> tuple[Callable[[], None], np.ndarray, str]:
    """Return a function that runs the kernel of `cunorm.layer_norm`, its output array, and a name."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, LENGTH)).astype(DTYPE)
    gamma, beta = (random.standard_normal(LENGTH).astype(DTYPE) for _ in range(2))
    out = (np.empty_like(x), *(np.empty((rows, 1), DTYPE) for _ in range(2)))
    plan = cunorm.plan(
        "layer_norm",
        shape=x.shape,
        dtype=DTYPE,
        device="cpu",
        normalized_shape=LENGTH,
        gamma_dtype=DTYPE,
        beta_dtype=DTYPE,
        tile=tile,
    )
    assert plan.tile is not None

    def call() -> None:
        plan(x, gamma, beta, out=out)

    return call, out[0], f"layer_norm, {plan.tile.text}"


def directly(rows: int) -> tuple[Callable[[], None], np.ndarray, str]:
    """See `through_plan`; for the small kernel of the executor's tests."""
    x = np.random.default_rng(0).standard_normal((rows, LENGTH)).astype(DTYPE)
    y = np.empty_like(x)
    text = (ROOT / "tests" / "kernels" / "layer_norm.cu").read_text(encoding="utf-8")
    kernel = executor.compile(text, "layer_norm", build="plain")

    def call() -> None:
        executor.launch(kernel, rows, 256, 1024, (x.ctypes.data, y.ctypes.data, LENGTH, 1e-5))

    return call, y, "tests/kernels/layer_norm.cu"


def quartiles(values: list[float], name: str) -> dict[str, float]:
    """Return the quartiles of measurements, with `name` in the keys."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {f"{name}_q25": round(low, 3), f"{name}_median": round(middle, 3), f"{name}_q75": round(high, 3)}


def speeds(rows: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Million elements per second of each kernel in each mode."""
    made = (
        (*through_plan(rows, FEW_SHUFFLES), MODES),
        (*through_plan(rows, None), MODES),
        (*directly(rows), MODES[:1]),
    )
    subjects = {name: (call, result, modes) for call, result, name, modes in made}
    for name, (call, result, modes) in subjects.items():
        found = set()
        for mode in modes:
            use(mode)
            call()  # warm
            found.add(result.tobytes())
        if len(found) > 1:
            raise RuntimeError(f"{name}: the modes give results that are not bitwise equal")
    rates: dict[tuple[str, str], dict[str, list[float]]] = {
        (name, mode): {"wall": [], "cpu": []} for name, (_, _, modes) in subjects.items() for mode in modes
    }
    for _ in range(rounds):
        for (name, mode), rate in rates.items():
            use(mode)
            wall, own = time.perf_counter(), time.thread_time()
            subjects[name][0]()
            wall, own = time.perf_counter() - wall, time.thread_time() - own
            rate["wall"].append(rows * LENGTH / wall / 1e6)
            rate["cpu"].append(rows * LENGTH / own / 1e6)
    use("plain")
    return {
        name: {
            mode: quartiles(rates[name, mode]["wall"], "wall") | quartiles(rates[name, mode]["cpu"], "cpu")
            for mode in modes
        }
        for name, (_, _, modes) in subjects.items()
    }


# ---- compiling ------------------------------------------------------------------------------------------------------


def texts(most: int) -> dict[str, str]:
    """Sources of at most `most` kernels to compile, by entry."""
    found: dict[str, str] = {}
    for op, shape, options in COMPILED:
        plan = cunorm.plan(op, shape=shape, dtype=DTYPE, device="cpu", **options)
        assert plan.strategy is not None and plan.tile is not None
        for launch in plan.launches:
            found.setdefault(launch.entry, sources.kernel_text(launch, plan.problem, plan.strategy, plan.tile))
    return dict(list(found.items())[:most])


def children() -> float:
    """CPU seconds of the child processes of this process."""
    times = os.times()
    return times.children_user + times.children_system


def compiling(text: str, entry: str, build: str) -> dict[str, float]:
    """Seconds to compile a kernel."""
    wall, own = time.perf_counter(), children()
    executor.compile(text, entry, build=build)
    return {"wall": round(time.perf_counter() - wall, 3), "cpu": round(children() - own, 3)}


def compilations(most: int) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, dict[str, float]]]]:
    """Compile times in seconds, with an empty cache.

    Returns
    -------
    dict
        By build: an empty kernel and the runtime, which is compiled with a build's first kernel.
    dict
        By build: each kernel.
    """
    found: dict[str, dict[str, dict[str, float]]] = {build: {} for build in BUILDS}
    kept = os.environ.get("CUNORM_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="cunorm-benchmark-") as folder:
        os.environ["CUNORM_CACHE_DIR"] = folder
        first = {build: compiling('extern "C" __global__ void empty() {}', "empty", build) for build in BUILDS}
        for entry, text in texts(most).items():
            for build in BUILDS:
                found[build][entry] = compiling(text, entry, build)
    if kept is None:
        del os.environ["CUNORM_CACHE_DIR"]
    else:
        os.environ["CUNORM_CACHE_DIR"] = kept
    return first, found


# ---- the verdict ----------------------------------------------------------------------------------------------------


def verdict(
    speed: dict[str, dict[str, float]], compiled: dict[str, dict[str, dict[str, float]]]
) -> tuple[dict[str, str], list[str]]:
    """Return the clock with which each target is compared, and a message for each missed target."""
    clocks, missed = {}, []
    for mode, target in (("plain", PLAIN_TARGET), ("traced", CHECKED_TARGET)):
        clock = clocks[mode] = "cpu" if speed[mode]["cpu_median"] > QUIET * speed[mode]["wall_median"] else "wall"
        rate = speed[mode][f"{clock}_median"]
        if rate < target:
            missed.append(f"{mode}: {rate:.1f} million elements per second ({clock}), expected at least {target:g}")
    every = [(entry, build, times) for build in BUILDS for entry, times in compiled[build].items()]
    waited, had = (sum(times[clock] for _, _, times in every) for clock in ("wall", "cpu"))
    clock = clocks["compile"] = "cpu" if waited > QUIET * had else "wall"
    for entry, build, times in every:
        if times[clock] >= COMPILE_TARGET:
            missed.append(f"{entry}, {build}: compiled in {times[clock]:.2f} s ({clock}), expected under 2 s")
    return clocks, missed


def report(
    speed: dict[str, dict[str, dict[str, float]]],
    first: dict[str, dict[str, float]],
    compiled: dict[str, dict[str, dict[str, float]]],
) -> None:
    """Print the tables."""
    print("\nmillion elements per second                        wall median (quartiles)    cpu median (quartiles)")
    for name, modes in speed.items():
        for mode, rate in modes.items():
            columns = [
                "{:8.2f} ({:6.2f} to {:6.2f})".format(*(rate[f"{clock}_{part}"] for part in ("median", "q25", "q75")))
                for clock in ("wall", "cpu")
            ]
            print(f"{name[:40]:40s} {mode:8s}", *columns)
    print(
        f"\nseconds to compile one of {len(compiled['plain'])} kernels       wall median (worst)    cpu median (worst)"
    )
    for build, kernels in compiled.items():
        columns = []
        for clock in ("wall", "cpu"):
            times = [one[clock] for one in kernels.values()]
            columns.append(f"{statistics.median(times):13.2f} ({max(times):5.2f})")
        print(f"{build:40s}", *columns)
    print("\nseconds to compile an empty kernel and the runtime, once for each build")
    print(
        "\n".join(f"{build:40s} {times['wall']:13.2f} wall {times['cpu']:15.2f} cpu" for build, times in first.items())
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 1 if a target is missed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="calls of each kernel in each mode (default 21)")
    parser.add_argument("--rows", type=int, default=512, help="rows per call (default 512)")
    parser.add_argument("--kernels", type=int, default=100, help="compile at most N kernels (default: all)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE too")
    options = parser.parse_args(argv)
    options.rounds, options.kernels = max(3, options.rounds), max(1, options.kernels)
    os.environ["CUNORM_CPU_CORES"] = "1"
    os.environ.pop("CUNORM_CPU_ORDER", None)
    facts = machine()
    print("\n".join(f"{name:8s} {value}" for name, value in facts.items()))
    print(f"call     {DTYPE}, {options.rows} rows of {LENGTH}, one core, {options.rounds} rounds")
    speed = speeds(options.rows, options.rounds)
    first, compiled = compilations(options.kernels)
    report(speed, first, compiled)
    judged = next(iter(speed))
    clocks, missed = verdict(speed[judged], compiled)
    print(f"\ntargets, for {judged}; clocks:", ", ".join(f"{clock} ({what})" for what, clock in clocks.items()))
    print("\n".join(f"missed: {sentence}" for sentence in missed) or "all met")
    if options.json is not None:
        call = {"dtype": DTYPE, "rows": options.rows, "length": LENGTH, "cores": 1, "rounds": options.rounds}
        results = {"elements": speed, "first": first, "compile": compiled, "judged_by": clocks, "missed": missed}
        document = {"schema": "cunorm-cpu-executor/1", "machine": facts, "call": call, "results": results}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
