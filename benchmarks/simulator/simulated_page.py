"""The stored results of the simulator, and the page that shows them: docs/simulated-speed.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "simulated.json"
CALIBRATION = ROOT / "benchmarks" / "results" / "simulator_calibration.json"
PEERS = ROOT / "benchmarks" / "results" / "simulated_peers.json"
PAGE = ROOT / "docs" / "simulated-speed.md"
SCHEMA = "cunorm-simulated/1"
#: A share of the DRAM's or of the issue slots' time above which they are what binds a launch.
BINDS = 0.7

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


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def error_text(calibration: Mapping[str, Any] | None) -> str:
    """The first line: the times are simulated, and how far the clock is from published times."""
    if calibration is None:
        return "**Simulated, not measured.** The clock has not been compared with published times."
    ratios = {
        inside: [row["ratio"] for row in calibration["rows"] if row["calibrated"] is inside] for inside in (True, False)
    }
    texts = [
        f"{len(found)} published times {name}: median ratio {statistics.median(found):.2f}, "
        f"from {min(found):.2f} to {max(found):.2f}"
        for name, found in (("in the calibration", ratios[True]), ("outside it", ratios[False]))
        if found
    ]
    return f"**Simulated, not measured.** Simulated over published time: {'; '.join(texts)}."


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


def page(document: Mapping[str, Any]) -> str:
    """The text of the page."""
    lines = [HEAD.format(first=error_text(_json(CALIBRATION)), binds=BINDS)]
    for workload, rows in document["workloads"].items():
        first = next(iter(rows.values()), None)
        if first is not None:
            lines += [f"## {workload}\n", f"{first['device']}, {first['dtype']}.\n", *_rows(rows), ""]
    return "\n".join(lines)
