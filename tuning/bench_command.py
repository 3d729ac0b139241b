"""``cunorm bench``: from its arguments to problems, contenders and a clock, and what it writes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cunorm.devices import Device
from cunorm.errors import TraceError
from cunorm.launch import Place, executor
from cunorm.ops import OPS, gpu_present
from cunorm.problem import Problem

from .bench import DeviceLostError, Outcome, bench_problem
from .bench_clock import BenchClock, GpuClock, RehearsalClock
from .bench_report import MEASURED, REHEARSED, document, text
from .files import write_whole
from .peers import PEERS
from .stand import software
from .wanted import problems_of

__all__ = ["run"]

OK, WRONG, USAGE, NO_GPU, INTERRUPTED = 0, 1, 2, 3, 130
WORKLOAD, DTYPE = "quick", "bfloat16"  # of those who name none
#: What the driver says of the GPU's state beside its name; a result without them cannot be compared with another.
STATE = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
)


def _wanted(asked: argparse.Namespace) -> list[Problem]:
    if asked.shape is None and asked.workload is None and asked.from_trace is None:
        asked.workload = WORKLOAD
    if asked.from_trace is None:
        asked.dtype = asked.dtype or DTYPE
    found = problems_of(asked)
    if asked.ops is not None:
        names = [name.strip() for name in asked.ops.split(",")]
        for name in names:
            if name not in OPS:
                raise ValueError(f"--op: {name!r}, expected some of {', '.join(OPS)}")
        found = [problem for problem in found if problem.op in names]
        if not found:
            raise ValueError(f"--op: no problem of {asked.ops} among those asked for")
    if any(problem.op == "batch_norm_gather_stats" for problem in found):
        raise ValueError("OP: batch_norm_gather_stats moves a few kilobytes; the bench has nothing to say about it")
    return found


def _peers(names: str | None) -> list[str]:
    if names is None:
        return list(PEERS)
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in PEERS:
            raise ValueError(f"--peers: {name!r}, expected some of {', '.join(PEERS)}, or '' for none")
    return list(dict.fromkeys(found))


def _file(option: str, name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option}: {path}, expected a file in a folder that is there")
    return path


def _state() -> dict[str, str]:
    """Driver, clocks, power limit and temperature; nothing where nvidia-smi is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    ordinal = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = [program, f"--id={ordinal}", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        line = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
        return dict(zip(STATE, (value.strip() for value in line.split(",")), strict=False))
    return {}


def _facts(device: Device, kind: str, peers: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    versions = {PEERS[name].distribution: PEERS[name].version for name in peers if PEERS[name].missing is None}
    return {**asdict(device), **(_state() if kind == "gpu" else {})}, {**software(kind), **versions}


def _bar(problems: Sequence[Problem], quiet: bool) -> Iterator[Problem]:
    """The problems, with a bar on a terminal's standard error if tqdm is there."""
    if quiet or importlib.util.find_spec("tqdm") is None:
        yield from problems
        return
    from tqdm import tqdm

    with tqdm(problems, unit="problem", disable=None, file=sys.stderr) as bar:
        for problem in bar:
            bar.set_description(problem.op)
            yield problem


def run(asked: argparse.Namespace, clock: BenchClock | None = None) -> int:
    """The command, from its parsed arguments; returns the exit code.

    Parameters
    ----------
    asked : argparse.Namespace
    clock : BenchClock, optional
        None: that of the GPU, or none in a rehearsal.
    """
    kind = "cpu" if asked.rehearse else "gpu"
    try:
        problems, peers = _wanted(asked), _peers(asked.peers)
        if asked.rounds < 1:
            raise ValueError(f"--rounds: {asked.rounds}, expected at least 1")
        if asked.rehearse and asked.plot is not None:
            raise ValueError("--plot: a rehearsal has no times to draw; leave out --rehearse on a machine with a GPU")
        to_json, to_plot = _file("--json", asked.json), _file("--plot", asked.plot)
        if to_plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot: needs matplotlib; type: pip install 'cunorm[tune]'")
    except (OSError, TraceError, TypeError, ValueError) as error:
        print(f"cunorm bench: {error}", file=sys.stderr)
        return USAGE
    if kind == "gpu" and not gpu_present():
        print(
            "cunorm bench: CuPy sees no GPU here, and times of the CPU executor say nothing about a kernel; see "
            "`cunorm doctor`, or --rehearse to see who runs and who is right, without times",
            file=sys.stderr,
        )
        return NO_GPU
    here = executor(kind)
    place = Place(kind, here.current() if kind == "gpu" else 0, here.limits())
    clock = clock or (GpuClock() if kind == "gpu" else RehearsalClock())
    source = MEASURED if clock.measures and kind == "gpu" else REHEARSED
    device, versions = _facts(place.device, kind, peers)
    results: list[Outcome] = []
    interrupted, lost = False, None
    bandwidth = clock.bandwidth() if source == MEASURED else 0.0
    try:
        for problem in _bar(problems, asked.quiet):
            results.append(bench_problem(problem, place, clock, peers, rounds=asked.rounds, seed=asked.seed))
    except KeyboardInterrupt:
        interrupted = True
    except DeviceLostError as error:
        lost = str(error)
    found = document(
        results,
        source=source,
        device=device,
        software=versions,
        bandwidth=bandwidth,
        rounds=asked.rounds,
        workload=asked.workload,
    )
    found |= {"interrupted": interrupted, "lost": lost}
    print("\n".join(text(found)))
    if to_json is not None:
        write_whole(to_json, json.dumps(found, indent=1) + "\n")
    if to_plot is not None and results:
        from .bench_figure import figure

        figure(found, to_plot)
    if lost is not None:
        print(f"cunorm bench: {lost}; {len(problems) - len(results)} problems were not run", file=sys.stderr)
        return WRONG
    if interrupted:
        return INTERRUPTED
    own = [one for result in results for one in result.contenders if one.name.startswith("cunorm")]
    return WRONG if any(one.state in ("failed", "wrong") for one in own) else OK
