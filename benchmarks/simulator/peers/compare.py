"""Simulate this library's calls beside those of ATen and Liger, on the same clock.

    python -m benchmarks.simulator.peers.compare    writes benchmarks/results/simulated_peers.json

It needs the environment that `cubins.INSTALL` describes. Each side runs its own machine code, with the launches that
its own host code chooses: this library's default tile for the GPU, ATen's and Liger's heuristics. A call's time is the
sum of its kernels' times; the time that the host needs between them is not in it. Before each call, the L2 cache holds
unrelated data; the kernels of one call share it.

The calls compute the same: forwards return y, mean and rstd; backwards return the gradients of x, gamma and beta. Two
differences remain: Liger's and ATen's GroupNorm keep mean and rstd in the dtype of x, this library in float32; Liger's
GroupNorm adds the gradients of the parameters with atomics, in an order that varies.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulator import clock, cubin
from benchmarks.simulator.clock import Gpu
from benchmarks.simulator.machine import Launch
from benchmarks.simulator.peers import calls
from benchmarks.simulator.peers.calibration import versions
from benchmarks.simulator.peers.calls import Call, Session
from benchmarks.simulator.problems import simulate
from cunorm.ops.registry import OPS, problem_of
from cunorm.traffic import sampling

RESULT = Path(__file__).parents[2] / "results" / "simulated_peers.json"
GPU = "H200"
DTYPE = "bfloat16"
GROUPS = 32
_LAYER = ((4096, 768), (2048, 4096), (16384, 128), (1024, 12288))
_GROUP = ((2, 320, 64, 64), (8, 1280, 8, 8), (32, 256, 14, 14), (1, 128, 128, 128))
_BATCH = ((32, 64, 28, 28), (32, 256, 14, 14), (32, 2048, 7, 7))
_BATCH_OPS = ("batch_norm_stats", "batch_norm_backward_reduce", "batch_norm_backward_elemt")


def problems() -> list[Call]:
    """The problems, as calls of ATen."""
    found = [Call("ATen", op, shape, DTYPE) for op in ("layer_norm", "layer_norm_backward") for shape in _LAYER]
    found += [
        Call("ATen", op, shape, DTYPE, GROUPS) for op in ("group_norm", "group_norm_backward") for shape in _GROUP
    ]
    return found + [
        Call("ATen", op, shape, DTYPE, 0, last) for op in _BATCH_OPS for shape in _BATCH for last in (False, True)
    ]


def peers_of(op: str) -> tuple[str, ...]:
    """The libraries that have an op."""
    return ("ATen",) if op in _BATCH_OPS else ("ATen", "Liger")


def own(call: Call, gpu: Gpu) -> tuple[dict[str, Any], float, int]:
    """The tile of this library for a problem, the simulated seconds of its call, and its byte floor."""
    options: dict[str, Any] = {}
    shape: tuple[int, ...] = call.shape
    if "normalized_shape" in OPS[call.op].takes:
        options["normalized_shape"] = shape[1]
    else:
        N, C, H, W = shape
        shape = (N, H * W, C) if call.channels_last else (N, C, H * W)
        options["data_format"] = "NHWC" if call.channels_last else "NCHW"
    if call.groups:
        options["num_groups"] = call.groups
    found = simulate(problem_of(call.op, shape=shape, dtype=call.dtype, **options), gpu)
    choice = {"tile": str(found.plan.tile), "launches": len(found.launches)}
    return choice, found.seconds, sampling.floor_bytes(found.problem)


def entry(call: Call, choice: Mapping[str, Any], seconds: float, floor: float) -> dict[str, Any]:
    """A row of the result file, without the peers."""
    return {
        "op": call.op, "shape": list(call.shape), "groups": call.groups or None,
        "layout": "NHWC" if call.channels_last else "NCHW", "dtype": call.dtype, **choice,
        "floor_us": round(floor * 1e6, 2), "cunorm_us": round(seconds * 1e6, 2),
    }  # fmt: skip


def peers(session: Session, call: Call, seconds: float, gpu: Gpu) -> dict[str, Any]:
    """The peers' part of a row, beside the time of this library's call."""
    found: dict[str, Any] = {}
    for library in peers_of(call.op):
        recorded = session.record(dataclasses.replace(call, library=library), gpu)
        total = calls.seconds(recorded.times)
        found[f"{library}_us"] = round(total * 1e6, 2)
        found[f"{library}_over_cunorm"] = round(total / seconds, 2)
        found[f"{library}_launches"] = sum(isinstance(step, Launch) for step in recorded.steps)
        found[f"{library}_largest_error"] = float(f"{max(recorded.errors.values()):.1e}")
    return found


def compared(problems: Sequence[Call], gpu: Gpu) -> list[dict[str, Any]]:
    """The rows of problems. This library comes first: NVRTC must be loaded before PyTorch, or it crashes."""
    rows = []
    for call in problems:
        choice, seconds, floor = own(call, gpu)
        rows.append((call, seconds, entry(call, choice, seconds, floor / gpu.copy)))
        print(_line(rows[-1][2]), flush=True)
    session = Session(gpu)
    for call, seconds, row in rows:
        row |= peers(session, call, seconds, gpu)
        print(_line(row), flush=True)
    return [row for _, _, row in rows]


def _line(found: Mapping[str, Any]) -> str:
    times = "  ".join(f"{key} {value}" for key, value in found.items() if key.endswith("_us") or "_over_" in key)
    return f"{found['op']} {found['shape']} {found['layout']}: {times}"


def main() -> None:
    """Simulate all problems and write the result file."""
    gpu = clock.GPUS[GPU]
    made = {
        "what": "simulated times of whole calls, on one clock; nothing here was measured",
        "gpu": gpu.device.name,
        "versions": versions() | {"nvrtc": cubin.compiler().version},
        "rows": compared(problems(), gpu),
    }
    RESULT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
