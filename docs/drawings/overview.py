"""Draw docs/pictures/overview.svg, the README's picture: elements that share statistics, and bytes that calls move.

The upper half is a drawing of the norms. The lower half shows the counts of
``benchmarks/results/byte_floor.json``.

Run ``python docs/drawings/overview.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median_high
from typing import Any

from docs.drawings.themes import in_both, save

ROOT = Path(__file__).resolve().parents[2]
COUNTS, PICTURE = ROOT / "benchmarks" / "results" / "byte_floor.json", ROOT / "docs" / "pictures" / "overview.svg"
SAMPLES, CHANNELS, GROUP = 4, 6, 3  # rows, columns, and columns per group of the drawing
SHARED = "#76b900"
LAST_BIN = 2.1

#: Norm -> caption, and whether the element of sample n and channel c is one of those that share one mean and one rstd.
NORMS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "GroupNorm": ("one group\nof a sample", lambda n, c: n == 0 and c < GROUP),
    "InstanceNorm": ("one channel\nof one sample", lambda n, c: (n, c) == (0, 0)),
    "LayerNorm": ("one row\n(RMSNorm: no mean)", lambda n, c: n == 0),
    "BatchNorm": ("one channel\nof all samples", lambda n, c: c == 0),
}


def bytes_over_floor(rows: dict[str, Any]) -> dict[str, list[float]]:
    """Return, by op, the bytes that the default tile of each problem moves over the byte floor.

    Parameters that blocks load again are left out: the caches have them.
    """
    found: dict[str, list[float]] = {}
    for problem, row in rows.items():
        op = problem.split(": ")[1].split()[0]
        found.setdefault(op, []).append(row["tensors"] + row["rest"])
    return found


def facts(document: dict[str, Any]) -> str:
    """What the picture shows, as text: for each op the number of problems, and the median of their bytes."""
    found = bytes_over_floor(document["rows"])
    told = [f"{op} {median_high(ratios):.3f} ({len(ratios)})" for op, ratios in found.items()]
    return f"Bytes over the fewest possible, {document['dtype']}, {document['device']}: {', '.join(told)}"


def _draw_norm(axis: Any, name: str, shares: Callable[[int, int], bool], caption: str) -> None:
    """Draw one cell per sample and channel; the cells that share statistics are coloured."""
    from matplotlib import rcParams
    from matplotlib.patches import Rectangle

    for n in range(SAMPLES):
        for c in range(CHANNELS):
            colour = SHARED if shares(n, c) else rcParams["grid.color"]
            corner = (c + 0.04, SAMPLES - 1 - n + 0.04)
            axis.add_patch(Rectangle(corner, 0.92, 0.92, facecolor=colour, edgecolor="none"))
    axis.set(xlim=(0, CHANNELS), ylim=(0, SAMPLES), xticks=[], yticks=[])
    axis.set_title(name, fontsize=10, fontweight="bold")
    rows, columns = ("rows", "elements of a row") if name == "LayerNorm" else ("samples", "channels")
    axis.set_xlabel(f"{columns}\n\n{caption}", fontsize=8.5)
    axis.set_ylabel(rows, fontsize=8.5)
    axis.spines[:].set_visible(False)


def _draw_bytes(axis: Any, document: dict[str, Any]) -> None:
    """Draw one row of points per op, with one point per problem."""
    from matplotlib import rcParams

    found = bytes_over_floor(document["rows"])
    for place, ratios in enumerate(found.values()):
        inside = [min(ratio, LAST_BIN) for ratio in ratios]
        spread = [place + 0.3 * ((7 * i) % 11 / 10 - 0.5) for i in range(len(inside))]
        axis.scatter(inside, spread, s=11, color=SHARED, alpha=0.5, linewidths=0)
        axis.plot([median_high(ratios)] * 2, [place - 0.33, place + 0.33], color=rcParams["text.color"], linewidth=2)
    axis.axvline(1, color="tab:red", linewidth=1.2)
    problems = sum(map(len, found.values()))
    axis.set_title("Bytes that a call moves, over the fewest possible", loc="left", fontsize=10, fontweight="bold")
    axis.set_yticks(range(len(found)), found, fontsize=9)
    axis.set_xlim(0.97, LAST_BIN + 0.03)
    ticks = (1, 1.25, 1.5, 1.75, 2, LAST_BIN)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks[:-1]] + ["more"], fontsize=9)
    axis.set_xlabel(
        f"red: the fewest possible. One point per problem, {problems} in all; bar: median.\n"
        "Without parameters that are loaded again from the caches.\n"
        f"Counted on the CPU executor, in {document['dtype']}, with the tiles of an {document['device']}",
        fontsize=8.5,
    )
    axis.invert_yaxis()
    axis.grid(axis="x")


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(6.4, 6.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.7), hspace=0.04)
    upper.suptitle(
        "Each norm subtracts a mean and divides by a deviation.\nGreen elements share one mean and one deviation",
        fontsize=10,
    )
    for axis, (name, (caption, shares)) in zip(upper.subplots(1, len(NORMS)), NORMS.items(), strict=True):
        _draw_norm(axis, name, shares, caption)
    _draw_bytes(lower.subplots(), document)
    save(figure, path, facts(document))
    plt.close(figure)


if __name__ == "__main__":
    in_both(functools.partial(draw, json.loads(COUNTS.read_text())), PICTURE)
