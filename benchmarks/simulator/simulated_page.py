"""The stored results of the simulator, and the page that shows them: docs/speed/simulated.md."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulator import goals
from cunorm.ops.registry import OPS
from docs.drawings.themes import in_both, save

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "simulated.json"
CALIBRATION = ROOT / "benchmarks" / "results" / "simulator_calibration.json"
PEERS = ROOT / "benchmarks" / "results" / "simulated_peers.json"
PAGE, PICTURE = ROOT / "docs" / "speed" / "simulated.md", ROOT / "docs" / "pictures" / "simulated-peers.svg"
SCHEMA = "cunorm-simulated/1"
#: The name under which the results of benchmarks/simulator/goals.py are stored.
GOALS = "goals"
#: A share of the DRAM's or of the issue slots' time above which they are what binds a launch.
BINDS = 0.7
#: Colour and marker of each library in the picture.
LIBRARIES = {"cunorm": ("#2a9d4b", "o"), "ATen": ("#a05fb4", "s"), "Liger": ("#e08214", "^")}

PUBLISHED = """| kernel | shape | published us | simulated us | ratio | calibration | note |
|---|---|---:|---:|---:|---|---:|"""

HEAD = """# Simulated speed

{first}

`python benchmarks/simulate.py --workload NAME` compiles the kernels with NVRTC for sm_90, disassembles them, and
executes the machine code on a simulated clock: issue slots, stall counts and scoreboards, pipes, shared memory, caches,
DRAM, and the placement of blocks. Tests run the machine code of every kernel and compare its results with the oracle.
This page is written from the stored results. Nothing on it was timed on a GPU.

- **us**: simulated time of all launches of the call.
- **floor**: the time in which a copy would move the bytes that the problem has to move, as a share of that time.
- **issue**, **DRAM**: share of the issue slots that are used, and of the time in which the DRAM transfers. Both are of
  the launch that takes longest.
- **bound by**: DRAM or issue if its share is at least {binds}. Otherwise what warps wait for most: *fixed* latencies of
  their own instructions, *memory*, *short* latencies (shared memory, shuffles, special functions), a *barrier*, a
  *pipe*, or their *turn*.
- **instructions**: executed by all threads, per element.
"""


def read() -> dict[str, Any]:
    """The stored results."""
    if not RESULTS.exists():
        return {"schema": SCHEMA, "what": "simulated, not measured", "workloads": {}}
    document: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return document


def write(document: Mapping[str, Any]) -> None:
    """Store results and write the page."""
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(document), encoding="utf-8")


def illustrate() -> None:
    """Draw the picture of the page from the stored comparison with peers."""
    peers = _json(PEERS)
    if peers is not None:
        in_both(functools.partial(draw, peers), PICTURE)


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def error_text(calibration: Mapping[str, Any] | None) -> str:
    """The first line: the times are simulated, and how far the clock is from published times."""
    if calibration is None:
        return "**Simulated, not measured.** The clock has not been compared with published times."
    texts = []
    for side, what in (("in", "that calibrated the clock"), ("out", "that did not")):
        found = calibration["summary"][side]
        texts.append(
            f"{found['rows']} published times {what}: median ratio {found['median_ratio']:.2f}, "
            f"from {found['lowest_ratio']:.2f} to {found['highest_ratio']:.2f}"
        )
    return f"**Simulated, not measured.** Simulated over published time, for {'; for '.join(texts)}."


def _shape(row: Mapping[str, Any]) -> str:
    return "\u00a0x\u00a0".join(map(str, row["shape"]))  # non-breaking spaces


def calibration_section(calibration: Mapping[str, Any]) -> list[str]:
    """Simulated times beside published ones."""
    tables, remarks = _published(calibration["rows"])
    lines = [
        "## Beside published times\n",
        "Kernels of PyTorch (ATen) and Liger whose times others have published. Their own machine code runs on the "
        "clock, with the launches that their own host code chooses. The times *in* the calibration fitted these "
        "constants: "
        + ", ".join(f"{name} {value:.4g}" for name, value in calibration["constants"].items())
        + ". The others were held out. `python -m benchmarks.simulator.peers.calibration report` writes the rows.\n",
        *(f"- {name}: {text}" for name, text in calibration["protocols"].items()),
        "",
        *tables,
    ]
    if remarks:
        lines += ["Notes:\n", *(f"{number}. {remark}" for number, remark in enumerate(remarks, 1)), ""]
    return lines


def _published(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """A table per source, GPU, dtype and protocol of the published times, and the remarks, which the tables number."""
    tables: dict[tuple[str, ...], list[str]] = {}
    remarks: list[str] = [*dict.fromkeys(row["remark"] for row in rows if row["remark"])]
    for row in rows:
        number = str(1 + remarks.index(row["remark"])) if row["remark"] else ""
        cells = [f"{row['library']} {row['op']}", _shape(row), f"{row['published_us']:.1f}"]
        cells += [f"{row['simulated_us']:.1f}", f"{row['ratio']:.2f}", row["calibration"], number]
        kind = tuple(row[name] for name in ("source", "gpu", "dtype", "protocol"))
        tables.setdefault(kind, []).append(f"| {' | '.join(cells)} |")
    lines = []
    for (source, gpu, dtype, protocol), found in tables.items():
        lines += [f"{gpu}, {dtype}, {protocol}, [published here]({source}):\n", PUBLISHED, *found, ""]
    return lines, remarks


def peers_section(peers: Mapping[str, Any]) -> list[str]:
    """The calls of other libraries beside this library's, all simulated."""
    names = sorted(
        {key.removesuffix("_us") for row in peers["rows"] for key in row if key.endswith("_us")} - {"floor", "cunorm"}
    )
    versions = ", ".join(f"{name} {version}" for name, version in peers["versions"].items())
    said = []
    for name in names:
        ratios = [row[f"{name}_over_cunorm"] for row in peers["rows"] if f"{name}_us" in row]
        said.append(f"cunorm's point is left of {name}'s in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} rows")
    verdict = f"the times of calls over a copy's, one row per problem; {'; '.join(said)}"
    lines = [
        "## Beside other libraries\n",
        f"{peers['gpu']}, {versions}. Each library's own machine code and launches, on the same clock. A time is the "
        "sum of the kernels of a call; what the host needs between them is not in it. A ratio above 1 means that "
        "cunorm's call is shorter. `python -m benchmarks.simulator.peers.compare` writes the rows.\n",
        f"![Simulated, not measured: {verdict}](../pictures/simulated-peers.svg)\n",
        f"| problem | floor us | cunorm us | {' | '.join(f'{name} us | {name} / cunorm' for name in names)} |",
        f"|---|---:|---:|{'---:|---:|' * len(names)}",
    ]
    for row in peers["rows"]:
        cells = [problem_of(row), f"{row['floor_us']:.1f}", f"{row['cunorm_us']:.1f}"]
        for name in names:
            there = f"{name}_us" in row
            cells += [f"{row[f'{name}_us']:.1f}", f"{row[f'{name}_over_cunorm']:.2f}"] if there else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def problem_of(row: Mapping[str, Any]) -> str:
    """The name of a row of the comparison."""
    layout = "" if "normalized_shape" in OPS[row["op"]].takes else f" {row['layout']}"
    groups = f", {row['groups']} groups" if row["groups"] else ""
    return f"{row['op']}{layout} {_shape(row)}{groups}"


def draw(peers: Mapping[str, Any], path: Path) -> None:
    """Draw the calls of the comparison: simulated time over the time in which a copy moves the problem's bytes."""
    import matplotlib.pyplot as plt
    from matplotlib import rcParams

    rows = peers["rows"]
    figure, axes = plt.subplots(figsize=(6.4, 1.4 + 0.32 * len(rows)), layout="constrained")
    for offset, (name, (colour, marker)) in enumerate(LIBRARIES.items()):  # slightly apart, so that none hides another
        found = [
            (row[f"{name}_us"] / row["floor_us"], place + 0.22 * (offset - 1))
            for place, row in enumerate(rows)
            if f"{name}_us" in row
        ]
        if found:
            over, at = zip(*found, strict=True)
            axes.scatter(over, at, c=colour, marker=marker, s=28, label=name, zorder=3)
    axes.set_yticks(range(len(rows)), [_two_lines(problem_of(row)) for row in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.axvline(1, color=rcParams["text.color"], linewidth=1)
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.set_xlabel("simulated time over a copy's (1: the floor; less is better)")
    axes.tick_params(labeltop=True)
    axes.grid(axis="x")
    title = f"{peers['gpu']}: simulated, not measured"
    figure.legend(loc="outside upper left", ncols=len(LIBRARIES), title=title, alignment="left")
    save(figure, path, f"{len(rows)} calls on the simulated clock, {peers['gpu']}")
    plt.close(figure)


def _two_lines(name: str) -> str:
    """The name of a problem as a label: the op, and below it the sizes."""
    return "\n".join(name.split(" ", 1))


def bound_by(launch: Mapping[str, Any]) -> str:
    """What binds a launch."""
    if launch["dram"] >= BINDS or launch["issue"] >= BINDS:
        return "DRAM" if launch["dram"] >= launch["issue"] else "issue"
    return str(max(launch["waits"].items(), key=lambda item: item[1])[0]).lower()


def _rows(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    titles = ("problem", "strategy", "us", "floor", "issue", "DRAM", "bound by", "instructions")
    lines = [f"| {' | '.join(titles)} |", "|---|---|---:|---:|---:|---:|---|---:|"]
    for key, row in rows.items():
        longest = max(row["launches"], key=lambda launch: launch["us"])
        cells = [key, row["strategy"], f"{row['us']:.1f}", f"{row['floor_us'] / row['us']:.0%}"]
        cells += [f"{longest['issue']:.2f}", f"{longest['dram']:.2f}", bound_by(longest), f"{row['instructions']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def goals_section(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The goals, what was reached, and for each goal that is not met the source lines at which warps wait."""
    found = [(goal, key, rows[key]) for goal in goals.GOALS if (key := goals.key_of(goal.problem)) in rows]
    titles = ("problem", "strategy", "before us", "us", "floor", "goal", "met", "issue", "DRAM", "bound by")
    lines = [
        "## Goals\n",
        "NVIDIA H200, bfloat16, all outputs, the default tile. *Before*: when the goal was set. "
        "`python benchmarks/simulate.py --goals` writes the rows.\n",
        f"| {' | '.join(titles)} |",
        "|---|---|---:|---:|---:|---:|---|---:|---:|---|",
    ]
    missed = ["What keeps the time above the goal, and the source lines at which warps wait:\n"]
    for goal, key, row in found:
        longest = max(row["launches"], key=lambda launch: launch["us"])
        cells = [key, row["strategy"], f"{goal.before:.1f}", f"{row['us']:.1f}", f"{row['floor_us'] / row['us']:.0%}"]
        cells += [goal.text, "yes" if goal.met(row) else "no"]
        cells += [f"{longest['issue']:.2f}", f"{longest['dram']:.2f}", bound_by(longest)]
        lines.append(f"| {' | '.join(cells)} |")
        if not goal.met(row):
            where = "; ".join(f"{share:.0%} `{place}`" for share, _, place, _ in longest["lines"])
            missed.append(f"- {key}: {goal.why} {longest['kernel']}, {longest['us']:.1f} us: {where}.")
    return [*lines, "", *missed, ""]


def page(document: Mapping[str, Any]) -> str:
    """The text of the page."""
    calibration, peers = _json(CALIBRATION), _json(PEERS)
    lines = [HEAD.format(first=error_text(calibration), binds=BINDS)]
    if calibration is not None:
        lines += calibration_section(calibration)
    if peers is not None:
        lines += peers_section(peers)
    if GOALS in document["workloads"]:
        lines += goals_section(document["workloads"][GOALS])
    for workload, rows in document["workloads"].items():
        if workload == GOALS:
            continue
        first = next(iter(rows.values()), None)
        if first is not None:
            lines += [f"## {workload}\n", f"{first['device']}, {first['dtype']}.\n", *_rows(rows), ""]
    return "\n".join(lines)
