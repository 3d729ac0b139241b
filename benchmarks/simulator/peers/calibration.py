"""Compare simulated with published times, and fit the clock's constants that no measurement of the hardware gives.

    python -m benchmarks.simulator.peers.calibration fit      prints constants for clock.GPUS
    python -m benchmarks.simulator.peers.calibration report   writes results/simulator_calibration.json

Both need the environment that `cubins.INSTALL` describes, with liger_kernel 0.6.0: the published rows are of that
version. The fit uses the rows that are not held out. It minimises the squared logarithms of simulated over published
times, plus a weak pull to the constants that it starts from.
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
from benchmarks.simulator.peers.published import PROTOCOLS, ROWS, Published

RESULT = Path(__file__).parents[2] / "results" / "simulator_calibration.json"
#: Seconds that a protocol adds to the kernels: CUDA events around a call also see the start of its launch.
OVERHEADS = {"profiler": 0.0, "do_bench": 6.5e-6}
#: The fitted constants: where each starts to be implausible, and how far (as a factor) it may move for free.
LIMITS: dict[str, tuple[float, float]] = {
    "copy H100": (2.6e12, 3.2e12),
    "copy H200": (3.7e12, 4.56e12),
    "dram_latency": (400.0, 1100.0),
    "block_latency": (50.0, 1500.0),
    "launch_latency": (700.0, 4000.0),
    "do_bench": (1e-6, 15e-6),
}
PULL = 0.05
#: Bytes of the probes.
PROBES = (8 << 20, 64 << 20)
STEP, ROUNDS = 1.15, 2


def constants() -> dict[str, float]:
    """The constants of `clock.GPUS` and `OVERHEADS` that the fit may change."""
    found = {f"copy {name}": clock.GPUS[name].copy for name in ("H100", "H200")}
    found |= {name: clock.GPUS["H100"].cycles[name] for name in ("dram_latency", "block_latency", "launch_latency")}
    return found | {"do_bench": OVERHEADS["do_bench"]}


def gpu_with(name: str, given: Mapping[str, float]) -> Gpu:
    """A GPU of `clock.GPUS` with other constants."""
    gpu = clock.GPUS[name]
    cycles = {key: value for key, value in given.items() if key in gpu.cycles}
    return dataclasses.replace(gpu, copy=given[f"copy {name}"], cycles=gpu.cycles | cycles)


def simulated(recorded: Recorded, row: Published, given: Mapping[str, float]) -> float:
    """The simulated time of a row, in seconds."""
    overhead = given["do_bench"] if row.protocol == "do_bench" else 0.0
    return calls.seconds(calls.timed(recorded, gpu_with(row.gpu, given))) + overhead


# ---- fit ------------------------------------------------------------------------------------------------------------


def _matters(constant: str, row: Published) -> bool:
    """Whether a constant can change the time of a row."""
    if constant.startswith("copy "):
        return constant.endswith(row.gpu)
    return constant != "do_bench" or row.protocol == "do_bench"


def fitted(
    rows: Sequence[tuple[Published, Recorded]],
    start: Mapping[str, float],
    time: Callable[[Recorded, Published, Mapping[str, float]], float] = simulated,
) -> dict[str, float]:
    """Fit the constants by a damped Gauss-Newton method on their logarithms."""
    names, now = list(start), dict(start)
    for round_ in range(ROUNDS):
        base = np.array([time(recorded, row, now) for row, recorded in rows])
        residuals = np.log(base / [row.seconds for row, _ in rows])
        slopes = np.zeros((len(rows), len(names)))
        for column, name in enumerate(names):
            moved = now | {name: now[name] * STEP}
            for line, (row, recorded) in enumerate(rows):
                if not _matters(name, row):
                    continue
                if name == "do_bench":
                    slopes[line, column] = now[name] / base[line]
                else:
                    slopes[line, column] = math.log(time(recorded, row, moved) / base[line]) / math.log(STEP)
        pulls = np.log([now[name] / start[name] for name in names])
        weight = PULL * len(rows) / len(names)
        step = np.linalg.solve(slopes.T @ slopes + weight * np.eye(len(names)), slopes.T @ residuals + weight * pulls)
        for name, move in zip(names, np.clip(step, -0.7, 0.7), strict=True):
            low, high = LIMITS[name]
            now[name] = float(min(max(now[name] * math.exp(-move), low), high))
        rms = math.sqrt(float(np.mean(residuals**2)))
        print(f"round {round_}: rms log ratio before {rms:.3f}, constants {now}", flush=True)
    return now


# ---- report ---------------------------------------------------------------------------------------------------------


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
        recorded = session.record(row.call)
        entries.append(entry(row, simulated(recorded, row, given), recorded.errors))
        one = entries[-1]
        print(*(f"{one[key]}" for key in ("gpu", "library", "op", "shape", "published_us", "simulated_us", "ratio")),
              one["calibration"], flush=True)  # fmt: skip
    return {
        "what": "simulated times beside published ones; nothing here was measured by this project",
        "versions": versions(),
        "protocols": PROTOCOLS,
        "constants": constants(),
        "summary": summary(entries),
        "rows": entries,
    }


def probe(name: str, kernel: str, nbytes: int) -> dict[str, Any]:
    """The simulated bandwidth of a probe: a copy, or a sum with eight blocks per multiprocessor."""
    gpu = clock.GPUS[name]
    if kernel == "copy":
        launch, moved = probes.copy(nbytes)[0], 2 * nbytes
    else:
        launch, moved = probes.total(nbytes, 8 * gpu.device.multiprocessors)[0], nbytes
    seconds = clock.timed(launch, gpu, clock.flushed(gpu)).seconds
    return {"gpu": name, "kernel": kernel, "nbytes": nbytes, "simulated_gb_per_s": round(moved / seconds / 1e9, 1)}


def _probes() -> list[dict[str, Any]]:
    return [
        probe(name, kernel, nbytes) for name in ("H100", "H200") for kernel in ("copy", "sum") for nbytes in PROBES
    ]


def _cost(row: Published) -> int:
    return math.prod(row.call.shape)


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("fit", "report"))
    command = parser.parse_args(arguments).command
    known = _probes() if command == "report" else []  # NVRTC must be loaded before PyTorch, or it crashes
    session = Session(clock.GPUS["H100"])
    if command == "fit":
        rows = [(row, session.record(row.call)) for row in sorted(ROWS, key=_cost) if not row.held_out]
        for name, value in fitted(rows, constants()).items():
            print(f"{name}: {value:.4g}")
    else:
        made = report(session, ROWS) | {"probes": known}
        RESULT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(made["summary"], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
