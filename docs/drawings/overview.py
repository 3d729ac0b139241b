"""Draw docs/pictures/overview.svg, the README's picture: elements that share statistics, and bytes that calls move.

The upper half is a drawing of the norms. The lower half shows the counts of
``benchmarks/results/byte_floor.json``.

Run ``python docs/drawings/overview.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COUNTS, PICTURE = ROOT / "benchmarks" / "results" / "byte_floor.json", ROOT / "docs" / "pictures" / "overview.svg"
SAMPLES, CHANNELS, GROUP = 4, 6, 3  # rows, columns, and columns per group of the drawing
SHARED, OTHER = "#76b900", "#e4e7eb"
LAST_BIN = 2.1

#: Norm -> caption, and whether the element of sample n and channel c is one of those that share one mean and one rstd.
NORMS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "GroupNorm": ("one group of a sample", lambda n, c: n == 0 and c < GROUP),
    "InstanceNorm": ("one channel of one sample", lambda n, c: (n, c) == (0, 0)),
    "LayerNorm": ("one row; RMSNorm: no mean", lambda n, c: n == 0),
    "BatchNorm": ("one channel, all samples", lambda n, c: c == 0),
}


def bytes_over_floor(rows: dict[str, Any]) -> dict[str, list[float]]:
    """Return, by op, the bytes that the default tile of each problem moves over the byte floor."""
    found: dict[str, list[float]] = {}
    for problem, row in rows.items():
        op = problem.split(": ")[1].split()[0]
        found.setdefault(op, []).append(row["tensors"] + row["rest"])
    return found


def _draw_norm(axis: Any, name: str, shares: Callable[[int, int], bool], caption: str) -> None:
    """Draw one cell per sample and channel; the cells that share statistics are coloured."""
    for n in range(SAMPLES):
        for c in range(CHANNELS):
            colour = SHARED if shares(n, c) else OTHER
            axis.add_patch(_rectangle((c + 0.04, SAMPLES - 1 - n + 0.04), 0.92, 0.92, colour))
    axis.set(xlim=(0, CHANNELS), ylim=(0, SAMPLES))
    axis.set_title(f"{name}:\n{caption}", fontsize=9)
    axis.set_xlabel("elements of a row" if name == "LayerNorm" else "C: channels", fontsize=8)
    axis.set_ylabel("rows" if name == "LayerNorm" else "N: samples", fontsize=8)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def _rectangle(corner: tuple[float, float], width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour, edgecolor="none")


def _draw_bytes(axis: Any, document: dict[str, Any]) -> None:
    """Draw one row of points per op, with one point per problem."""
    found = bytes_over_floor(document["rows"])
    for place, ratios in enumerate(found.values()):
        inside = [min(ratio, LAST_BIN) for ratio in ratios]
        spread = [place + 0.3 * ((7 * i) % 11 / 10 - 0.5) for i in range(len(inside))]
        axis.scatter(inside, spread, s=10, color=SHARED, alpha=0.45, linewidths=0)
        axis.plot([sorted(ratios)[len(ratios) // 2]] * 2, [place - 0.3, place + 0.3], color="black", linewidth=1.5)
    problems = sum(map(len, found.values()))
    axis.axvline(1, color="tab:red", linewidth=1)
    axis.set_title(
        "Bytes that a call moves over the fewest possible (red line), counted on the CPU executor:\n"
        f"{problems} problems in {document['dtype']}, default tiles of an {document['device']}; medians in black",
        fontsize=9,
    )
    axis.set_yticks(range(len(found)), found, fontsize=8)
    axis.set_xlim(0.97, LAST_BIN + 0.03)
    ticks = (1, 1.25, 1.5, 1.75, 2, LAST_BIN)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks[:-1]] + ["more"], fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "cunorm"  # makes the file reproducible
    figure = plt.figure(figsize=(10, 6.0), layout="constrained")
    grid = figure.add_gridspec(2, len(NORMS), height_ratios=(1, 1.25))
    for place, (name, (caption, shares)) in enumerate(NORMS.items()):
        _draw_norm(figure.add_subplot(grid[0, place]), name, shares, caption)
    _draw_bytes(figure.add_subplot(grid[1, :]), document)
    figure.suptitle("Green: elements that share one mean and one rstd", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(COUNTS.read_text()), PICTURE)
