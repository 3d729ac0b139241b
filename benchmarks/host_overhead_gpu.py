"""Measure the host time of a call on a GPU: of a plan, of the public function, and of the bare kernel launches.

Example: ``python benchmarks/host_overhead_gpu.py --json benchmarks/results/host_overhead_gpu-h200-2026-01-31.json``

A sample does not wait for the GPU: the clock stops after the last launch of a batch, and the launch queue holds a whole
batch. The contenders run alternately. `plan` and `call` pass ``out=`` and ``workspace=``; `call, out= alone` allocates
the workspace from CuPy's pool. With --rehearse, each contender runs once on the CPU executor, without timing.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
from cunorm.tuning.bench.arrays import Sets, public_call
from cunorm.tuning.measure.session import software
from cunorm.tuning.verify.inputs import inputs_of

import cunorm
from cunorm.core.arrays import pointer
from cunorm.executors.choose import executor
from cunorm.ops.parse_problem import plan_options
from cunorm.ops.registry import OPS, gpu_present

SHAPES = {
    "group_norm": "2,320,16x16,32",
    "instance_norm": "2,320,16x16",
    "layer_norm": "512,320",
    "rms_norm": "512,320",
    "batch_norm": "2,320,16x16",
}
DTYPE = "float32"
BATCH = 100  # calls per sample; a call has at most 4 launches, and the queue holds 1000
TARGET_US = 10.0


def contenders(op: str, kind: str) -> dict[str, Callable[[], Any]]:
    """Return the functions to time for an op, by name."""
    options = plan_options(op, SHAPES[OPS[op].family], DTYPE)
    plan = cunorm.plan(op, device=executor(kind).current() if kind == "gpu" else "cpu", **options).compile()
    problem, xp = plan.problem, np if kind == "cpu" else executor("gpu").cupy
    sets = Sets(problem, inputs_of(problem, 0, hostile=False), kind, 1)
    arrays, numbers = sets.arrays(0), problem.numbers
    workspace = xp.empty(plan.workspace_nbytes, xp.uint8) if plan.workspace_nbytes else None
    out = tuple(arrays.get(name) for name in OPS[op].results_with(problem.extras))
    taken = inspect.signature(getattr(cunorm, op)).parameters  # counts are passed as a number
    given = [arrays.get(name) for name in OPS[op].inputs if name in taken]
    given += [numbers[name] for name, number in OPS[op].numbers.items() if number.default is None]
    addresses = {name: pointer(array) for name, array in sets.bytes_of(0).items()}
    addresses["workspace"] = pointer(workspace) if workspace is not None else 0
    values = [addresses.get(name, numbers.get(name, 0)) for name in plan.names]
    found: dict[str, Callable[[], Any]] = {
        "plan": lambda: plan(*given, out=out if len(out) > 1 else out[0], workspace=workspace),
        "call": public_call(problem, arrays, None, workspace),
        "call, out= alone": public_call(problem, arrays, None),
    }
    if kind == "gpu":
        steps, constants = plan.steps(lambda text, entry: executor("gpu").compile(text, entry, plan.place.ordinal))
        everything = (*values, *constants)
        bare = [
            (one.raw, (grid,), (threads,), pick(everything), shared) for one, grid, threads, shared, pick, *_ in steps
        ]

        def launches() -> None:
            for kernel, grid, threads, arguments, shared in bare:
                kernel(grid, threads, arguments, shared_mem=shared)

        plan.run(values, [0] * len(values))  # raises the shared-memory limit of the kernels
        return {"launches": launches, **found}
    return {"launches": lambda: plan.run(values, [0] * len(values)), **found}


def sample(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Microseconds per call, from one sample."""
    wait()
    begin = time.perf_counter()
    for _ in range(BATCH):
        call()
    seconds = time.perf_counter() - begin
    wait()
    return seconds / BATCH * 1e6


def measure(op: str, rounds: int) -> dict[str, Any]:
    """Quartiles of each contender of an op, and of the differences within a round, in microseconds."""
    turns, wait = contenders(op, "gpu"), executor("gpu").cupy.cuda.Device().synchronize
    for call in turns.values():
        sample(call, wait)  # warm
    rows = [{name: sample(call, wait) for name, call in turns.items()} for _ in range(rounds)]
    columns = {name: [row[name] for row in rows] for name in turns}
    columns["plan - launches"] = [row["plan"] - row["launches"] for row in rows]
    columns["call - plan"] = [row["call"] - row["plan"] for row in rows]
    columns["allocating the workspace"] = [row["call, out= alone"] - row["call"] for row in rows]
    found = {}
    for name, values in columns.items():
        low, middle, high = quantiles(values, n=4)
        found[name] = {"q25_us": round(low, 3), "median_us": round(middle, 3), "q75_us": round(high, 3)}
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 0, 1 if a plan takes longer than the target, 3 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=51, help="samples per contender, each of 100 calls (default 51)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE too")
    parser.add_argument("--rehearse", action="store_true", help="run each once on the CPU executor, without timing")
    options = parser.parse_args(argv)
    ops = [name for name, op in OPS.items() if "world" not in op.sizes]
    if options.rehearse:
        for op in ops:
            for name, call in contenders(op, "cpu").items():
                call()
                print(f"{op}: {name}: ran, not timed")
        return 0
    if not gpu_present():
        print(
            "host_overhead_gpu: CuPy finds no GPU; --rehearse runs everything on the CPU executor, without timing",
            file=sys.stderr,
        )
        return 3
    device, facts = executor("gpu").limits(executor("gpu").current()), software("gpu")
    results = {}
    print(f"{device.name}; {facts}\n{'':30s}median (quartiles), us")
    for op in ops:
        results[op] = measure(op, max(2, options.rounds))
        for name, times in results[op].items():
            print(f"{op}: {name:26s} {times['median_us']:8.2f} ({times['q25_us']:.2f} to {times['q75_us']:.2f})")
    over = {op: one["plan - launches"]["median_us"] for op, one in results.items()}
    missed = [op for op, microseconds in over.items() if microseconds > TARGET_US]
    print(f"plan minus launches: {max(over.values()):.2f} us at most (target: under {TARGET_US:g} us)")
    if options.json is not None:
        document = {
            "schema": "cunorm-host-cost/1",
            "date": datetime.date.today().isoformat(),
            "device": device.name,
            "software": facts,
            "shapes": SHAPES,
            "dtype": DTYPE,
            "results": results,
            "missed": missed,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
