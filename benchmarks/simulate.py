"""Simulate the machine code of a problem's kernels without a GPU: times, what binds, instructions per element.

Examples::

    python benchmarks/simulate.py group_norm_backward --shape 2,320,64x64,32
    python benchmarks/simulate.py layer_norm --shape 4096,768 --strategy warp --tile threads=128,lanes=32 --profile
    python benchmarks/simulate.py --workload quick
    python benchmarks/simulate.py --goals

A time is simulated, never measured. ``--workload`` and ``--goals`` store their results in
``benchmarks/results/simulated.json`` and write ``docs/speed/simulated.md``, whose first line says how far simulated
times are from published ones; ``--page`` only writes the page.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cunorm.tuning.problems.requested import problems_of

from benchmarks.simulator import simulated_page
from benchmarks.simulator.clock import GPUS, Timing
from benchmarks.simulator.goals import GOALS, key_of
from benchmarks.simulator.machine import Launch
from benchmarks.simulator.problems import Simulated, lines_of, simulate
from cunorm.cli.parser import add_lists, add_problem
from cunorm.core import settings
from cunorm.core.devices import WARP
from cunorm.core.errors import CompileError, KernelFault, UnsupportedTile
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.core.terminal import columns
from cunorm.jit import sources
from cunorm.ops.parse_problem import tile_of

#: Source lines that ``--profile`` prints for each kernel.
LINES = 25
#: Source lines that are stored for each kernel.
STORED = 5


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="simulate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_problem(made)
    add_lists(made)
    made.set_defaults(dtype="bfloat16")
    made.add_argument("--device", default="H200", help=f"the GPU to simulate: {' or '.join(GPUS)}; default H200")
    made.add_argument("--strategy", metavar="NAME", help="use this strategy, with --tile")
    made.add_argument(
        "--tile", metavar="FIELD=VALUE,...", help="use this tile of the strategy; default: the model's choice"
    )
    made.add_argument(
        "--text", choices=sources.TEXTS, default="specialised", help="the kernels' text; default: specialised"
    )
    made.add_argument("--profile", action="store_true", help="print instructions and waits by source line")
    made.add_argument("--goals", action="store_true", help="simulate the problems of benchmarks/simulator/goals.py")
    made.add_argument("--page", action="store_true", help="write the page from the stored results, simulate nothing")
    return made


# ---- one problem ----------------------------------------------------------------------------------------------------


def report(found: Simulated) -> str:
    """The text for one problem."""
    rows: list[tuple[str, ...]] = [("kernel", "us", "issue", "DRAM", "resident", "read MB", "written MB")]
    for launch, timing in zip(found.launches, found.timings, strict=True):
        rows.append(
            (
                launch.kernel.code.entry,
                f"{timing.seconds * 1e6:.1f}",
                f"{timing.issue:.2f}",
                f"{timing.dram:.2f}",
                str(timing.resident),
                f"{timing.dram_read / 1e6:.1f}",
                f"{timing.dram_written / 1e6:.1f}",
            )
        )
    share = found.floor / found.seconds
    classes = ", ".join(f"{name} {count:.1f}" for name, count in found.classes().items() if count >= 0.05)
    return "\n".join(
        [
            found.problem.describe(),
            f"{found.gpu.device.name}, simulated, not measured; {found.plan.tile}",
            f"{found.seconds * 1e6:.1f} us; a copy of the floor's bytes takes {found.floor * 1e6:.1f} us: {share:.0%}",
            f"instructions per element: {found.instructions:.1f}: {classes}",
            "",
            *columns(rows, 1),
            "",
            *(
                f"{launch.kernel.code.entry}: pipes {_shares(timing.pipes)}; warps wait: {_shares(timing.waits)}"
                for launch, timing in zip(found.launches, found.timings, strict=True)
            ),
        ]
    )


def _shares(found: Mapping[str, float]) -> str:
    """Shares of at least 1 %, the largest first."""
    order = sorted(found.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.lower()} {share:.0%}" for name, share in order if share >= 0.01)


def profile(found: Simulated) -> str:
    """Instructions per element and the share of waited cycles, by source line of each kernel."""
    lines: list[str] = []
    for launch, timing in zip(found.launches, found.timings, strict=True):
        executed, waited = lines_of(launch, timing), lines_of(launch, timing, "waited")
        total = sum(waited.values()) or 1
        rows: list[tuple[str, ...]] = [("instructions", "waits", "line", "source")]
        order = sorted(executed, key=lambda place: -executed[place] - waited.get(place, 0) * 0.25)
        for place in order[:LINES]:
            per_element = f"{executed[place] * WARP / found.elements:.2f}"
            share = f"{waited.get(place, 0) / total:.0%}"
            rows.append((per_element, share, f"{place[0]}:{place[1]}", text_of(*place)))
        lines += ["", f"{launch.kernel.code.entry}: instructions per element, waited cycles", *_listed(rows)]
    return "\n".join(lines)


def _listed(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with two right-aligned columns of numbers, then two of text."""
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    return [f"{a:>{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {text}" for a, b, c, text in rows]


def text_of(file: str, line: int) -> str:
    """A line of a kernel's source."""
    path = sources.folder() / file
    texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return texts[line - 1].strip()[:80] if 0 < line <= len(texts) else ""


# ---- many problems --------------------------------------------------------------------------------------------------


def row_of(found: Simulated) -> dict[str, Any]:
    """A row of the result file."""
    assert found.plan.tile is not None
    return {
        "device": found.gpu.device.name,
        "dtype": found.problem.dtype,
        "strategy": found.plan.tile.strategy,
        "tile": found.plan.tile.as_dict(),
        "us": round(found.seconds * 1e6, 2),
        "floor_us": round(found.floor * 1e6, 2),
        "instructions": round(found.instructions, 2),
        "launches": [
            {
                "kernel": launch.kernel.code.entry,
                "us": round(timing.seconds * 1e6, 2),
                "issue": round(timing.issue, 3),
                "dram": round(timing.dram, 3),
                "pipes": {name: round(share, 3) for name, share in timing.pipes.items() if share >= 0.005},
                "waits": {name: round(share, 3) for name, share in timing.waits.items() if share >= 0.005},
                "resident": timing.resident,
                "lines": hot_lines(found, launch, timing),
            }
            for launch, timing in zip(found.launches, found.timings, strict=True)
        ],
    }


def hot_lines(found: Simulated, launch: Launch, timing: Timing) -> list[list[Any]]:
    """The `STORED` source lines with the most waited cycles: share of them, instructions per element, place, text."""
    executed, waited = lines_of(launch, timing), lines_of(launch, timing, "waited")
    total = sum(waited.values()) or 1
    order = sorted(waited, key=lambda place: -waited[place])[:STORED]
    return [
        [
            round(waited[place] / total, 3),
            round(executed.get(place, 0) * WARP / found.elements, 2),
            f"{place[0]}:{place[1]}",
            text_of(*place),
        ]
        for place in order
    ]


def _row(item: tuple[Problem, str]) -> tuple[str, dict[str, Any] | str]:
    problem, device = item
    try:
        return key_of(problem), row_of(simulate(problem, GPUS[device]))
    except ValueError as error:
        return key_of(problem), str(error)


def run_all(chosen: Sequence[Problem], device: str, workload: str) -> int:
    """Simulate problems on all cores and store each result as soon as it is known."""
    document = simulated_page.read()
    rows = document["workloads"].setdefault(workload, {})
    refused = 0
    with multiprocessing.get_context("spawn").Pool(settings.cpu_cores()) as pool:
        items = [(problem, device) for problem in chosen]
        for number, (key, row) in enumerate(pool.imap_unordered(_row, items), 1):
            if isinstance(row, str):
                refused += 1
                print(f"{number}/{len(items)} {key}: {row}", file=sys.stderr, flush=True)
                continue
            rows[key] = row
            print(f"{number}/{len(items)} {key}: {row['us']} us, simulated", file=sys.stderr, flush=True)
            document["workloads"][workload] = {key_of(one): rows[key_of(one)] for one in chosen if key_of(one) in rows}
            simulated_page.write(document)
    return refused


def _tile(asked: argparse.Namespace) -> Tile | None:
    if (asked.tile is None) != (asked.strategy is None):
        raise ValueError("--strategy and --tile: received one of them, expected both or none")
    return None if asked.tile is None else tile_of(asked.op, asked.strategy, asked.tile)


def _main(asked: argparse.Namespace) -> int:
    if asked.page:
        simulated_page.write(simulated_page.read())
        simulated_page.illustrate()
        return 0
    if asked.goals and (asked.op or asked.workload or asked.from_trace or asked.shape):
        raise ValueError("--goals: received an op, --shape, --workload or --from-trace too, expected it alone")
    if asked.device not in GPUS:
        raise ValueError(f"--device: {asked.device!r}, expected {' or '.join(GPUS)}")
    if asked.goals:
        return 1 if run_all([goal.problem for goal in GOALS], asked.device, simulated_page.GOALS) else 0
    if asked.workload is None and asked.from_trace is None:
        (problem,) = problems_of(asked)
        found = simulate(
            problem, GPUS[asked.device], _tile(asked), lambda text: print(text, file=sys.stderr), asked.text
        )
        print(report(found) + (profile(found) if asked.profile else ""))
        return 0
    if asked.tile or asked.strategy or asked.profile:
        raise ValueError("--strategy, --tile and --profile: only valid with --shape")
    if asked.from_trace is not None:
        asked.dtype = None
    return 1 if run_all(problems_of(asked), asked.device, asked.workload or Path(asked.from_trace).name) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0: done; 1: a problem was not simulated; 2: a wrong argument, or a missing tool."""
    try:
        return _main(parser().parse_args(arguments))
    except (ValueError, TypeError, UnsupportedTile, CompileError, KernelFault, OSError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
