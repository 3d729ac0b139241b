"""Compare simulated with published times, and fit the clock's constants that no measurement of the hardware gives.

    python -m benchmarks.simulator.peers.calibration fit      prints constants for clock.GPUS
    python -m benchmarks.simulator.peers.calibration report   writes results/simulator_calibration.json

`report` leaves out the rows with more than `LARGE` elements, which take minutes each; ``--large`` simulates them too.

Both need the environment that `cubins.INSTALL` describes, with liger_kernel 0.6.0: the published rows are of that
version. The bandwidths of the DRAM are published ones and are not fitted. The fit uses the rows that are not held out.
It minimises the squared logarithms of simulated over published times, plus a weak pull to the constants that it starts
from.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator import clock, probes
from benchmarks.simulator.clock import Gpu
from benchmarks.simulator.peers import calls
from benchmarks.simulator.peers.calls import Recorded, Session
from benchmarks.simulator.peers.published import BANDWIDTHS, PROTOCOLS, ROWS, Published

RESULT = Path(__file__).parents[2] / "results" / "simulator_calibration.json"
#: Seconds that a protocol adds to the kernels: CUDA events around a call also see the start of its launch.
OVERHEADS = {"profiler": 0.0, "do_bench": 7.45e-6}
#: The fitted constants: where each starts to be implausible, and how far (as a factor) it may move for free.
LIMITS: dict[str, tuple[float, float]] = {
    "dram_latency": (400.0, 1100.0),
    "block_latency": (50.0, 1500.0),
    "launch_latency": (700.0, 4000.0),
    "do_bench": (1e-6, 15e-6),
}
PULL = 0.05
LARGE = 26 << 20
#: Bytes of the probes.
PROBES = (8 << 20, 32 << 20)
STEP = 1.15


def constants() -> dict[str, float]:
    """The constants of `clock.GPUS` and `OVERHEADS` that the fit may change."""
    found = {name: clock.GPUS["H100"].cycles[name] for name in ("dram_latency", "block_latency", "launch_latency")}
    return found | {"do_bench": OVERHEADS["do_bench"]}


def gpu_with(name: str, given: Mapping[str, float]) -> Gpu:
    """A GPU of `clock.GPUS` with other constants."""
    gpu = clock.GPUS[name]
    cycles = {key: value for key, value in given.items() if key in gpu.cycles}
    return dataclasses.replace(gpu, cycles=gpu.cycles | cycles)


def simulated(recorded: Recorded, row: Published, given: Mapping[str, float]) -> float:
    """The simulated seconds of a row."""
    overhead = given["do_bench"] if row.protocol == "do_bench" else 0.0
    return calls.seconds(calls.timed(recorded, gpu_with(row.gpu, given))) + overhead


# ---- fit ------------------------------------------------------------------------------------------------------------


def fitted(
    rows: Sequence[tuple[Published, Any]],
    start: Mapping[str, float],
    time: Callable[[Any, Published, Mapping[str, float]], float] = simulated,
    rounds: int = 2,
) -> dict[str, float]:
    """Fit the constants by a damped Gauss-Newton method on their logarithms.

    Parameters
    ----------
    rows : sequence of (Published, object)
        The rows, and what `time` needs of each.
    start : mapping
        The constants to start from, which the fit is weakly pulled to.
    time : callable
        As `simulated`.
    rounds : int
    """
    names, now = list(start), dict(start)
    for number in range(rounds):
        bases = [time(recorded, row, now) for row, recorded in rows]
        residuals = np.log([seconds / row.seconds for seconds, (row, _) in zip(bases, rows, strict=True)])
        slopes = np.zeros((len(rows), len(names)))
        for column, name in enumerate(names):
            given = now | {name: now[name] * STEP}
            for line, (row, recorded) in enumerate(rows):
                if name == "do_bench":  # it is a part of the time
                    slopes[line, column] = now[name] / bases[line] if row.protocol == name else 0.0
                else:
                    slopes[line, column] = math.log(time(recorded, row, given) / bases[line]) / math.log(STEP)
        pulls = np.log([now[name] / start[name] for name in names])
        step = np.linalg.solve(slopes.T @ slopes + PULL * np.eye(len(names)), slopes.T @ residuals + PULL * pulls)
        for name, move in zip(names, np.clip(step, -0.7, 0.7), strict=True):
            low, high = LIMITS[name]
            now[name] = float(min(max(now[name] * math.exp(-move), low), high))
        ratios = " ".join(f"{ratio:.2f}" for ratio in np.exp(residuals))
        print(f"round {number}: ratios before {ratios}; constants {now}", flush=True)
    return now


# ---- report ---------------------------------------------------------------------------------------------------------


def halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with half the rows, or half the H: the axis along which a published call is larger."""
    axis = 2 if len(shape) == 4 else 0
    return tuple(size // 2 if k == axis else size for k, size in enumerate(shape))


def entry(row: Published, seconds: float, errors: Mapping[str, float]) -> dict[str, Any]:
    """A row of the result file."""
    call = row.call
    return {
        "gpu": row.gpu, "library": call.library, "op": call.op, "shape": list(call.shape), "dtype": call.dtype,
        "published_us": round(row.seconds * 1e6, 2), "simulated_us": round(seconds * 1e6, 2),
        "ratio": round(seconds / row.seconds, 3), "calibration": "out" if row.held_out else "in",
        "protocol": row.protocol, "remark": row.remark, "source": row.source,
        "largest_error": float(f"{max(errors.values()):.1e}"),
    }  # fmt: skip


def summary(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and extreme ratios of the rows in the calibration and of those held out."""
    found = {}
    for side in ("in", "out"):
        ratios = [one["ratio"] for one in entries if one["calibration"] == side]
        apart = [abs(math.log(ratio)) for ratio in ratios]
        found[side] = {
            "rows": len(ratios),
            "median_ratio": round(statistics.median(ratios), 3),
            "lowest_ratio": min(ratios),
            "highest_ratio": max(ratios),
            "median_error": round(math.exp(statistics.median(apart)) - 1, 3),
            "worst_factor": round(math.exp(max(apart)), 2),
        }
    return found


def versions() -> dict[str, str]:
    """The versions of the libraries whose kernels are simulated."""
    names = ("torch", "triton", "liger_kernel")
    return {name: importlib.metadata.version(name) for name in names}


def report(session: Session, rows: Sequence[Published]) -> dict[str, Any]:
    """Simulate rows and compare them with what is published."""
    given = constants()
    entries = []
    for row in rows:
        gpu = gpu_with(row.gpu, given)
        recorded = session.record(row.call, gpu)
        seconds = calls.seconds(recorded.times)
        if row.elements:
            half = dataclasses.replace(row.call, shape=halved(row.call.shape))
            slope = (seconds - calls.seconds(session.record(half, gpu).times)) / math.prod(half.shape)
            seconds += slope * (row.elements - math.prod(row.call.shape))
        overhead = given["do_bench"] if row.protocol == "do_bench" else 0.0
        entries.append(entry(row, seconds + overhead, recorded.errors))
        one = entries[-1]
        print(*(f"{one[key]}" for key in ("gpu", "library", "op", "shape", "published_us", "simulated_us", "ratio")),
              one["calibration"], flush=True)  # fmt: skip
    return {
        "what": "simulated times beside published ones; nothing here was measured by this project",
        "versions": versions(),
        "protocols": PROTOCOLS,
        "constants": constants(),
        "bandwidths": {name: clock.GPUS[name].copy for name in BANDWIDTHS},
        "summary": summary(entries),
        "rows": entries,
    }


def probe(name: str, kernel: str, nbytes: int) -> dict[str, Any]:
    """The simulated bandwidth of a probe: a copy, or a sum with eight blocks per multiprocessor."""
    gpu = clock.GPUS[name]
    if kernel == "copy":
        launch, *arrays = probes.copy(nbytes)
    else:
        launch, *arrays = probes.total(nbytes, 8 * gpu.device.multiprocessors)
    moved = sum(one.nbytes for one in arrays)
    seconds = clock.timed(launch, gpu, clock.flushed(gpu)).seconds
    return {"gpu": name, "kernel": kernel, "nbytes": nbytes, "simulated_gb_per_s": round(moved / seconds / 1e9, 1)}


def _probes() -> list[dict[str, Any]]:
    return [probe(name, kernel, nbytes) for name in ("H100", "H200") for kernel in ("copy", "sum") for nbytes in PROBES]


def cost(row: Published) -> int:
    """Elements of a row's tensors, by which its simulation takes time; a sum takes less."""
    return math.prod(row.call.shape) // (4 if row.call.op == "sum" else 1)


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("fit", "report"))
    parser.add_argument("--large", action="store_true", help="also simulate the rows that take minutes each")
    given = parser.parse_args(arguments)
    known = _probes() if given.command == "report" else []  # NVRTC must be loaded before PyTorch, or it crashes
    session = Session(clock.GPUS["H100"])
    if given.command == "fit":
        chosen = [(row, session.record(row.call)) for row in sorted(ROWS, key=cost) if not row.held_out]
        for name, value in fitted(chosen, constants()).items():
            print(f"{name}: {value:.4g}")
    else:
        rows = [row for row in ROWS if given.large or cost(row) <= LARGE]
        made = report(session, rows) | {"left_out": len(ROWS) - len(rows), "probes": known}
        RESULT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(made["summary"], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
