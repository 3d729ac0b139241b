"""``cunorm bench``: derives problems, contenders and a clock from the arguments, and writes the results."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cunorm.core.errors import TraceError
from cunorm.core.errors import sentence as sentence_of
from cunorm.core.files import PLOT_SUFFIXES, file_to_write, write_whole
from cunorm.core.problem import Problem
from cunorm.core.terminal import with_bar
from cunorm.executors.choose import executor
from cunorm.ops.registry import OPS, gpu_present
from cunorm.runtime import specialised
from cunorm.runtime.plans import Target
from cunorm.tiling import problem_trace

from ..measure.session import software
from ..problems.requested import problems_of
from .ahead import prepared_in_turn
from .bench import ROUNDS, bench_problem
from .clock import BenchClock, GpuClock, RehearsalClock
from .peers import PEERS
from .result import MEASURED, REHEARSED, DeviceLostError, Outcome, document, is_document, text

OK, WRONG, USAGE, NO_GPU, INTERRUPTED = 0, 1, 2, 3, 130
WORKLOAD, DTYPE = "quick", "bfloat16"  # defaults
#: Fields of nvidia-smi that record the state of the GPU. Results cannot be compared without them.
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
    if asked.workload is not None:
        asked.dtype = asked.dtype or DTYPE
    found = problems_of(asked)
    if asked.ops is not None:
        names = [name.strip() for name in asked.ops.split(",")]
        for name in names:
            if name not in OPS:
                raise ValueError(f"--op: {name!r}, expected some of {', '.join(OPS)}")
        found = [problem for problem in found if problem.op in names]
        if not found:
            raise ValueError(f"--op: no problem of {asked.ops} is selected")
    if small := {problem.op for problem in found if "x" not in problem.spec.inputs}:
        raise ValueError(f"OP: {small.pop()} moves a few kilobytes, too few to measure its speed")
    return found


def _peers(names: str | None) -> list[str]:
    if names is None:
        return list(PEERS)
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in PEERS:
            raise ValueError(f"--peers: {name!r}, expected some of {', '.join(PEERS)}, or '' for none")
    return list(dict.fromkeys(found))


def _state() -> dict[str, str]:
    """The current driver, clocks, power limit and temperature of the GPU; empty if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    at = executor("gpu").cupy.cuda.Device().pci_bus_id  # nvidia-smi and CUDA number GPUs in different orders
    command = [program, f"--id={at}", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        line = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
        return dict(zip(STATE, (value.strip() for value in line.split(",")), strict=False))
    return {}


def _versions(kind: str, peers: Sequence[str]) -> dict[str, Any]:
    there = [PEERS[name] for name in peers if PEERS[name].missing is None]
    found = {peer.distribution: peer.version for peer in there}
    for name in ("triton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**software(kind), **found, "python": platform.python_version()}


class _Record:
    """The results of a run so far, and the file in which they are stored."""

    def __init__(self, path: Path | None, clock: BenchClock, **facts: Any) -> None:
        self.path, self.clock, self.facts = path, clock, facts
        self.results: list[Outcome] = []
        self.copies: dict[str, dict[str, float]] = {}
        self.state: dict[str, str] = {}
        self.interrupted, self.lost = False, ""
        self.unwritten: OSError | None = None

    @property
    def measured(self) -> bool:
        """Whether the record contains times of a GPU."""
        return bool(self.facts["source"] == MEASURED)

    def copy(self, when: str) -> None:
        """Measure the copies, then read the state of the GPU while its clocks are still raised by them."""
        if self.measured:
            self.copies[when], self.state = self.clock.copies(), _state()

    def document(self) -> dict[str, Any]:
        """The record as a JSON document."""
        facts = self.facts | {"device": {**self.facts["device"], **self.state}}
        ended = {"interrupted": self.interrupted, "lost": self.lost or None}
        return {**document(self.results, copies=self.copies, **facts), **ended}

    def keep(self) -> None:
        """Write the whole file if there are results. If that fails, the run goes on; it is reported at the end."""
        self.unwritten = None
        if self.path is not None and self.results:
            try:
                write_whole(self.path, json.dumps(self.document(), indent=1, allow_nan=False) + "\n")
            except OSError as error:
                self.unwritten = error

    def add(self, problem: Problem, peers: Sequence[str], bench: Callable[[Problem], Outcome]) -> None:
        """Add a problem's outcome. An error, for example a lack of memory, does not stop the following problems."""
        try:
            self.results.append(bench(problem))
        except DeviceLostError:
            raise
        except Exception as error:
            sentence = sentence_of(error)
            if not self.clock.sound():
                raise DeviceLostError(f"the GPU is unusable: {sentence}") from error
            self.results.append(Outcome.failed(problem, peers, sentence))
        self.keep()

    def run(self, problems: Iterator[Problem], peers: Sequence[str], bench: Callable[[Problem], Outcome]) -> None:
        """Run all problems, between two measurements of the copies. Ctrl-C or a loss of the GPU ends the run."""
        try:
            self.copy("before")
            for problem in problems:
                self.add(problem, peers, bench)
            self.copy("after")
        except KeyboardInterrupt:
            self.interrupted = True
        except DeviceLostError as error:
            self.lost = str(error)
            self.results += [] if error.outcome is None else [error.outcome]
        self.keep()


def _rounds(asked: argparse.Namespace) -> int:
    found: int = asked.rounds if asked.rounds is not None else 1 if asked.rehearse else ROUNDS
    for option, number, least in (("--rounds", found, 1), ("--seed", asked.seed, 0)):
        if number < least:
            raise ValueError(f"{option}: {number}, expected at least {least}")
    return found


def run(asked: argparse.Namespace, clock: BenchClock | None = None) -> int:
    """Run the command with its parsed arguments; return the exit code.

    Parameters
    ----------
    asked : argparse.Namespace
    clock : BenchClock, optional
        None: `GpuClock`, or `RehearsalClock` in a rehearsal.
    """
    kind = "cpu" if asked.rehearse else "gpu"
    try:
        problems, peers, rounds = _wanted(asked), _peers(asked.peers), _rounds(asked)
        if asked.rehearse and asked.plot is not None:
            raise ValueError("--plot: a rehearsal has no times to draw; leave out --rehearse on a machine with a GPU")
        to_json = file_to_write("--json", asked.json, ours=is_document)
        to_plot = file_to_write("--plot", asked.plot, PLOT_SUFFIXES)
        if to_plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot: matplotlib is missing; type: pip install 'cunorm[tune]'")
    except (OSError, TraceError, TypeError, ValueError) as error:
        print(f"cunorm bench: {error}", file=sys.stderr)
        return USAGE
    if kind == "gpu" and not gpu_present():
        print(
            "cunorm bench: CuPy sees no GPU here, and times of the CPU executor say nothing about a kernel; see "
            "`cunorm doctor`, or use --rehearse to check which contenders run and are right, without times",
            file=sys.stderr,
        )
        return NO_GPU
    here = executor(kind)
    place = Target(kind, here.current() if kind == "gpu" else 0, here.limits())
    clock = clock or (GpuClock() if kind == "gpu" else RehearsalClock())
    record = _Record(
        to_json,
        clock,
        source=MEASURED if clock.measures and kind == "gpu" else REHEARSED,
        device=asdict(place.device),
        software=_versions(kind, peers),
        rounds=rounds,
        workload=asked.workload,
        problems=len(problems),
    )

    specialised.MOST_KERNELS = sys.maxsize  # a workload has more kernels than an application
    turns = prepared_in_turn(problems, asked.seed)

    def bench(problem: Problem) -> Outcome:
        return bench_problem(problem, place, clock, peers, rounds=rounds, seed=asked.seed, given=next(turns)())

    shown = with_bar(problems, len(problems), "problem", lambda problem: problem.op, shown=not asked.quiet)
    with contextlib.closing(turns), problem_trace.paused():  # the bench's problems are not the application's
        record.run(shown, peers, bench)
    found = record.document()
    print("\n".join(text(found)))
    if record.unwritten is not None:
        raise record.unwritten
    if to_plot is not None and record.results:
        from .figure import figure

        figure(found, to_plot)
    if record.lost:
        left = len(problems) - len(record.results)
        print(f"cunorm bench: {record.lost}; {left} problems were not run", file=sys.stderr)
        return WRONG
    if record.interrupted:
        return INTERRUPTED
    own = [one for result in record.results for one in result.contenders if one.name.startswith("cunorm")]
    return WRONG if any(one.state in ("failed", "wrong") for one in own) else OK
