"""Measure the host time of a warm call of each public function, without compiling, launching and allocating.

Example: ``python benchmarks/host_overhead.py --profile --json benchmarks/results/host_overhead.json``

Each call passes ``out=``. It also passes ``workspace=``, or a stub replaces the allocation. Stubs also replace the
compiler and the launches. The CuPy arrays have invented addresses that nothing reads, so no GPU is needed.

There are two clocks. ``wall`` is elapsed time, which includes other work on the same core. ``cpu`` is the CPU time of
this thread. They agree if nothing else runs on the core.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import functools
import importlib
import io
import json
import math
import platform
import pstats
import statistics
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import cunorm
from cunorm.core import arrays as array_tools
from cunorm.core import devices, settings
from cunorm.executors import choose
from cunorm.ops.group_norm.op import GROUP_NORM_BACKWARD
from cunorm.ops.registry import OPS
from cunorm.runtime import checked_call as calls

SHAPE, GROUPS, DTYPE = (2, 320, 16, 16), 32, "float32"
WORKSPACE = 1 << 20
BATCH_SECONDS = 2e-3
TARGET_US = 10.0

STATEMENTS = {
    "group_norm": "cunorm.group_norm(x, groups, gamma, beta, out=forward_out, workspace=workspace)",
    "group_norm_backward": (
        "cunorm.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=groups, out=backward_out, workspace=workspace)"
    ),
    "group_norm_backward, out= alone": (
        "cunorm.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=groups, out=backward_out)"
    ),
    "layer_norm": "cunorm.layer_norm(rows, C, gamma, beta, out=row_out, workspace=workspace)",
    "layer_norm_backward": (
        "cunorm.layer_norm_backward(drows, rows, C, row_mean, row_rstd, gamma, out=row_backward_out, "
        "workspace=workspace)"
    ),
    "batch_norm_stats": "cunorm.batch_norm_stats(x, out=stats_out, workspace=workspace)",
    "batch_norm_elemt": "cunorm.batch_norm_elemt(x, saved_mean, invstd, gamma, beta, out=y)",
    "batch_norm_backward_reduce": (
        "cunorm.batch_norm_backward_reduce(dy, x, saved_mean, invstd, gamma, out=sums_out, workspace=workspace)"
    ),
    "batch_norm_backward_elemt": (
        "cunorm.batch_norm_backward_elemt(dy, x, saved_mean, invstd, gamma, sum_dy, sum_dy_xmu, 512, out=dx)"
    ),
    "plan of group_norm": "forward_plan(x, gamma, beta, out=forward_out, workspace=workspace)",
    "plan of group_norm_backward": "backward_plan(dy, x, mean, rstd, gamma, out=backward_out, workspace=workspace)",
    "aclnnGroupNormBackwardGetWorkspaceSize": "aclnn_first()",
    "aclnnGroupNormBackward": "cunorm.ascend.aclnnGroupNormBackward(workspace, workspace.size, executor, None)",
}


def import_cupy() -> Any:
    """Return CuPy without its warnings about a missing GPU, or None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("cupy")
        except ImportError:
            return None


def make_numpy(shape: tuple[int, ...], dtype: str) -> Any:
    """Return a NumPy array of zeros."""
    return np.zeros(shape, dtype)


def make_cupy(cupy: Any) -> Callable[[tuple[int, ...], str], Any]:
    """Return a function that makes CuPy arrays at disjoint, invented addresses, which are never accessed."""
    address = 0x100000

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        nonlocal address
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = cupy.cuda.UnownedMemory(address, size, None, 0)
        address += -(-size // 512) * 512 + 512
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    return make


@contextlib.contextmanager
def stubbed(kind: str, make: Callable[[tuple[int, ...], str], Any]) -> Iterator[None]:
    """Replace compiling, launching and allocating by stubs; for CuPy arrays, also simulate a machine with one H200."""
    stubs: dict[str, Any] = {"compile": lambda *_, **__: object(), "launch": lambda *_, **__: None}
    stubs["run"] = lambda *_, **__: None
    if kind == "gpu":
        device = devices.known("H200")
        stubs |= {"limits": lambda *_: device, "present": lambda: True, "current": lambda: 0}
        stubs |= {"allocation_forbidden": lambda *_: False, "on_stream": lambda *_: contextlib.nullcontext()}
    # For calls without workspace=, this array replaces the allocation.
    kept = make((WORKSPACE,), "uint8")

    def no_allocation(_: object) -> Any:
        return kept

    with (
        mock.patch.multiple(choose.executor(kind).__name__, **stubs),
        mock.patch("cunorm.runtime.checked_call.Call._new_workspace", no_allocation),
    ):
        yield


def arguments(make: Callable[[tuple[int, ...], str], Any], kind: str) -> dict[str, Any]:
    """Return the variables of the statements."""
    N, C = SHAPE[:2]
    full = {name: make(SHAPE, DTYPE) for name in ("x", "dy", "y", "dx")}
    statistic = {name: make((N, GROUPS), DTYPE) for name in ("mean", "rstd", "new_mean", "new_rstd")}
    parameter = {name: make((C,), DTYPE) for name in ("gamma", "beta", "dgamma", "dbeta")}
    rows = {name: make((N * 256, C), DTYPE) for name in ("rows", "drows", "y_rows", "dx_rows")}
    row = {name: make((N * 256, 1), DTYPE) for name in ("row_mean", "row_rstd", "new_row_mean", "new_row_rstd")}
    sums = {name: make((C,), DTYPE) for name in ("sum_dy", "sum_dy_xmu", "saved_mean", "invstd")}
    common: dict[str, Any] = {"shape": SHAPE, "dtype": DTYPE, "num_groups": GROUPS, "gamma_dtype": DTYPE}
    common["device"] = "cpu" if kind == "cpu" else 0
    aclnn_first = functools.partial(
        cunorm.ascend.aclnnGroupNormBackwardGetWorkspaceSize,
        *(full["dy"], full["x"], statistic["mean"], statistic["rstd"], parameter["gamma"]),
        *(N, C, math.prod(SHAPE[2:]), GROUPS, (True, True, True)),
        *(full["dx"], parameter["dgamma"], parameter["dbeta"]),
    )
    return {
        **full,
        **statistic,
        **parameter,
        **rows,
        **row,
        **sums,
        "C": C,
        "row_out": (rows["y_rows"], row["new_row_mean"], row["new_row_rstd"]),
        "row_backward_out": (rows["dx_rows"], parameter["dgamma"], parameter["dbeta"]),
        "stats_out": (sums["sum_dy"], sums["sum_dy_xmu"]),
        "sums_out": (sums["sum_dy"], sums["sum_dy_xmu"], parameter["dgamma"], parameter["dbeta"]),
        "cunorm": cunorm,
        "groups": GROUPS,
        "workspace": make((WORKSPACE,), "uint8"),
        "forward_out": (full["y"], statistic["new_mean"], statistic["new_rstd"]),
        "backward_out": (full["dx"], parameter["dgamma"], parameter["dbeta"]),
        "forward_plan": cunorm.plan("group_norm", beta_dtype=DTYPE, **common),
        "backward_plan": cunorm.plan("group_norm_backward", **common),
        "aclnn_first": aclnn_first,
        "executor": aclnn_first()[2],
    }


def quartiles(statement: str | Callable[[], Any], names: dict[str, Any], rounds: int) -> dict[str, float]:
    """Microseconds per execution: quartiles of elapsed time, and of the CPU time of the thread."""
    clocks = {"wall": time.perf_counter, "cpu": time.thread_time}
    timers = {name: timeit.Timer(statement, globals=names, timer=clock) for name, clock in clocks.items()}
    number = max(10, int(BATCH_SECONDS / max(timers["cpu"].timeit(20) / 20, 1e-8)))
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer.timeit(number) / number * 1e6)
    result: dict[str, float] = {}
    for name, values in found.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result |= {f"{name}_q25_us": low, f"{name}_median_us": middle, f"{name}_q75_us": high}
    return {name: round(value, 3) for name, value in result.items()}


def pieces(names: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return the steps of a warm group_norm_backward, each as a function.

    Their times do not add up to that of the call: the steps overlap, and the code between them is missing.
    """
    store: dict[Any, Any] = GROUP_NORM_BACKWARD.calls
    key, call = next(reversed(store.items()))
    inputs = (*(names[name] for name in ("dy", "x", "mean", "rstd", "gamma")), None)  # no beta
    out, workspace = names["backward_out"], names["workspace"]
    everything = (*inputs, *out, workspace)
    addresses = array_tools.addresses(call.kind, everything)
    return {
        "signature of all arrays": lambda: calls.signature(call.kind, everything),
        "posed device": settings.cpu_device,
        "look-up": lambda: store.get(key),
        "addresses": lambda: array_tools.addresses(call.kind, everything),
        "overlap sweep": lambda: call._apart(addresses),
        "arguments and stubbed launches": lambda: call.plan.run(addresses),
        "checked call (all but key and look-up)": lambda: call(inputs, out, workspace),
    }


def profile(names: dict[str, Any], count: int = 20000) -> str:
    """Return cProfile's table of the functions in which a warm group_norm_backward spends its time."""
    code = compile(STATEMENTS["group_norm_backward"], "statement", "eval")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        eval(code, names)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(12)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return "\n".join(lines)


def cpu_model() -> str:
    """Return the model name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine(cupy: Any) -> dict[str, str]:
    """Return the facts about the machine and the software on which the results depend."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        "cupy": "not installed" if cupy is None else cupy.__version__,
        "cunorm": cunorm.__version__,
    }


def measure(kind: str, make: Callable[[tuple[int, ...], str], Any], options: argparse.Namespace) -> dict[str, Any]:
    """Time all statements for one kind of array, and print the results."""
    result: dict[str, Any] = {"calls": {}}
    label = "cupy.ndarray" if kind == "gpu" else "numpy.ndarray"
    with stubbed(kind, make):
        names = arguments(make, kind)
        print(f"\n{label:38s}   wall median (quartiles)     cpu median (quartiles)   us")
        tasks: dict[str, tuple[str, str | Callable[[], Any]]] = {}
        for title, statement in STATEMENTS.items():
            came = eval(statement, names)  # warm
            if isinstance(came, cunorm.ascend.AclnnStatus) and came:
                raise SystemExit(f"{title}: {cunorm.ascend.aclGetRecentErrMsg()}")
            tasks[title] = ("calls", statement)
        if options.profile:
            GROUP_NORM_BACKWARD.calls.clear()
            eval(STATEMENTS["group_norm_backward"], names)  # stores the call whose steps are timed
            tasks |= {title: ("pieces", step) for title, step in pieces(names).items()}
            result["pieces"] = {}
            tasks["an empty function (in each piece)"] = ("pieces", lambda: None)
        for title, (group, task) in tasks.items():
            times = quartiles(task, names, options.rounds)
            result[group][title] = times
            columns = []
            for clock in ("wall", "cpu"):
                low, middle, high = (times[f"{clock}_{part}_us"] for part in ("q25", "median", "q75"))
                columns.append(f"{middle:9.2f} ({low:6.2f} to {high:6.2f})")
            print(f"{'  ' if group == 'pieces' else ''}{title:{36 if group == 'pieces' else 38}s}", *columns)
        if options.profile:
            print(profile(names))
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is always 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101, help="batches of about 2 ms per clock (default 101)")
    parser.add_argument(
        "--profile", action="store_true", help="also time the steps of a call and print cProfile's table"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE too")
    options = parser.parse_args(argv)
    options.rounds = max(2, options.rounds)
    cupy = import_cupy()
    facts = machine(cupy)
    print("\n".join(f"{name:8s} {value}" for name, value in facts.items()))
    print(f"call     {DTYPE} {SHAPE}, {GROUPS} groups, gamma; out= passed; allocation and launches replaced by stubs")
    results = {"numpy": measure("cpu", make_numpy, options)}
    if cupy is not None:
        results["cupy"] = measure("gpu", make_cupy(cupy), options)
        public = [times for name, times in results["cupy"]["calls"].items() if name in OPS]
        slowest = max(times["wall_median_us"] for times in public)
        print(
            f"\nslowest public call with CuPy arrays: {slowest:.2f} us (target: under {TARGET_US:g} us on a quiet core)"
        )
    if options.json is not None:
        call = {"shape": SHAPE, "dtype": DTYPE, "num_groups": GROUPS, "rounds": options.rounds}
        document = {"schema": "cunorm-host-overhead/1", "machine": facts, "call": call, "results": results}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
