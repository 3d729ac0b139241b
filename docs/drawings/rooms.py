"""Draw docs/pictures/rooms.svg: the folders of cunorm from the top down, and who imports whom, from the source itself.

Run ``python docs/drawings/rooms.py``.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from docs.drawings.themes import in_both, save
from tests.support.rooms import KERNEL_ROOMS, ROOMS, imported_rooms, included_rooms

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
#: What each room contains, in the words of CONTRIBUTING.md, shortened to one line.
CONTENTS = {
    "__main__": "python -m cunorm",
    "cli": "the command line",
    "torch": "PyTorch modules and functions",
    "ascend": "the Ascend operators",
    "distributed": "BatchNorm over processes",
    "gate": "compiles every kernel, no GPU",
    "ops": "the norms: checks, strategies",
    "traffic": "counts bytes and sectors",
    "runtime": "a call: arrays to launches",
    "executors": "compile and launch",
    "tiling": "which tile a problem gets",
    "jit": "texts, compilers, builds on disk",
    "core": "problem, strategy, devices",
    "reference": "the oracle in NumPy",
    "tuning": "the tuner and the benchmark",
    "an op": "one folder of kernels per op",
    "partition": "which thread owns what",
    "common": "loads, reductions, formulas",
}
ABOUT = """\
Each room is a folder. A dot: the room of the
row imports the room of the column. All dots are
right of the squares: imports run downwards."""
ABOUT_KERNELS = """\
CUDA C; jit reads it as text. A dot: a file
of the row includes one of the column."""
ROOM, ASIDE, KERNEL = "#3d8fd1", "#9a7fd1", "#76b900"
#: Where the columns of words and of dots begin. A row and a column of dots are 1 high and wide.
WORDS, DOTS = 5.6, 17.3


def facts() -> dict[str, Any]:
    """The rooms by floors, and the pairs of a room and another one that it imports or includes."""
    ops = KERNEL_ROOMS[0]
    kernels = {("an op" if one in ops else one, "an op" if other in ops else other) for one, other in included_rooms()}
    return {
        "rooms": [sorted(names) for names in ROOMS],
        "imports": sorted(map(list, imported_rooms())),
        "kernels": ["an op", *(name for names in KERNEL_ROOMS[1:] for name in sorted(names))],
        "includes": sorted([one, other] for one, other in kernels if one != other),
    }


def _floor(axis: Any, top: float, names: list[str], colour: str) -> None:
    """Draw the rooms of one floor below each other, joined if they are several."""
    from matplotlib.patches import FancyBboxPatch

    for place, name in enumerate(names):
        box = FancyBboxPatch((0.1, top + place + 0.1), 5, 0.8, boxstyle="round,pad=0,rounding_size=0.2")
        box.set(facecolor=colour, alpha=0.22, edgecolor="none")
        axis.add_patch(box)
        axis.text(0.4, top + place + 0.52, name, va="center", fontsize=9.5, fontweight="bold")
        axis.text(WORDS, top + place + 0.52, CONTENTS[name], va="center", fontsize=8.5)
    if len(names) > 1:
        axis.plot([-0.15, -0.15], [top + 0.2, top + len(names) - 0.2], color=colour, linewidth=2)


def _dots(axis: Any, rows: dict[str, float], columns: list[str], pairs: list[list[str]], colour: str) -> None:
    """Draw a table with one dot per pair of a room and one that it imports, right of the squares on the diagonal."""
    from matplotlib import rcParams
    from matplotlib.patches import Rectangle

    faint, top, right = rcParams["grid.color"], min(rows.values()), DOTS + len(columns)
    for place, name in enumerate(columns):
        middle = DOTS + place + 0.5
        axis.plot([middle, middle], [top, rows[name] + 0.5], color=faint, linewidth=0.8, zorder=1)
        axis.add_patch(Rectangle((middle - 0.3, rows[name] + 0.2), 0.6, 0.6, facecolor=faint, edgecolor="none"))
        axis.text(middle, top - 0.15, name, rotation=90, ha="center", va="bottom", fontsize=8.5)
    for name, row in rows.items():
        left = DOTS + (columns.index(name) + 0.5 if name in columns else 0)
        axis.plot([left, right], [row + 0.5, row + 0.5], color=faint, linewidth=0.8, zorder=1)
    places = [(DOTS + columns.index(other) + 0.5, rows[one] + 0.5) for one, other in pairs]
    axis.scatter(*zip(*places, strict=True), s=38, color=colour, zorder=3, linewidths=0)


def _words(axis: Any, at: float, title: str, lines: str) -> None:
    """Draw the name of a folder above its rooms, and words about it."""
    axis.text(0.1, at, title, fontsize=12, fontweight="bold", va="bottom")
    axis.text(0.1, at + 0.25, lines, fontsize=8.5, va="top", linespacing=1.35)


def draw(told: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(6.4, 6.5))
    axis = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    rows, at = {}, 0.0
    for names in told["rooms"]:
        _floor(axis, at, names, ROOM)
        rows |= {name: at + place for place, name in enumerate(names)}
        at += len(names)
    columns = list(rows)
    _floor(axis, at + 0.4, ["tuning"], ASIDE)
    rows["tuning"] = at + 0.4
    _dots(axis, rows, columns, told["imports"], ROOM)
    kernels = {name: at + 5.2 + place for place, name in enumerate(told["kernels"])}
    for name, place in kernels.items():
        _floor(axis, place, [name], KERNEL)
    _dots(axis, kernels, list(kernels), told["includes"], KERNEL)
    _words(axis, -3.3, "cunorm/", ABOUT)
    _words(axis, at + 3.2, "kernels_cu/", ABOUT_KERNELS)
    axis.set(xlim=(-0.4, DOTS + len(columns) + 0.2), ylim=(at + 8.4, -4.3))
    axis.axis("off")
    save(figure, path, json.dumps(told))
    plt.close(figure)


if __name__ == "__main__":
    in_both(functools.partial(draw, facts()), PICTURE)
