"""Draw docs/pictures/proofs.svg: what compilers make of a kernel, what runs it, and what each of these can show.

Run ``python docs/drawings/proofs.py``.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from docs.drawings.themes import in_both, save

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "proofs.svg"
#: A form of the kernel, what runs it, and what that shows. From the text down to the chip.
LANES = (
    ("C++\n(g++, clang++)", "CPU executor", "races, bounds, deadlocks;\nbytes and sectors"),
    ("PTX\n(NVRTC)", "PTX as C++,\non the CPU executor", "the inline PTX,\nand what NVRTC makes"),
    ("machine code\n(ptxas)", "simulator", "the instructions, and how many;\nregisters and spills"),
    ("machine code\non a chip", "GPU", "time; caches;\nthe weak memory model"),
)
TEXT = "one text\nin CUDA C\n\nkernels_cu/\n\n\nmutation\nremoves a\nbarrier:\na check\nmust fail"
HEADS = ("becomes", "runs on", "shows, beside results\nthat agree with the oracle")
COLUMNS = (2.4, 5.2, 8.3)  # left edges of the boxes of a lane
WIDTH, HEIGHT, STEP = 2.3, 0.8, 1.05
FILLS = ("#9ecae1", "#a1d99b", "#fdd0a2")
INK_ON_FILL = "#1f2328"


def _box(axes: Any, corner: tuple[float, float], size: tuple[float, float], fill: str, text: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(FancyBboxPatch(corner, *size, "round,pad=0.05", facecolor=fill, edgecolor="none"))
    middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
    axes.text(*middle, text, ha="center", va="center", fontsize=9, color=INK_ON_FILL)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    from matplotlib import rcParams

    style = {"arrowstyle": "->", "color": rcParams["text.color"], "linewidth": 1.2}
    axes.annotate("", end, start, arrowprops=style)


def facts() -> str:
    """What the picture shows, as text."""
    return "; ".join(" -> ".join(" ".join(text.split()) for text in texts) for texts in LANES)


def draw(path: Path) -> None:
    """Write the picture in the present theme."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.add_subplot()
    tall = STEP * (len(LANES) - 1) + HEIGHT
    _box(axes, (0, 0), (1.5, tall), FILLS[0], TEXT)
    for lane, texts in enumerate(LANES):
        low = tall - HEIGHT - lane * STEP
        middle = low + HEIGHT / 2
        _arrow(axes, (1.6, middle), (COLUMNS[0] - 0.08, middle))
        for column, (left, fill, text) in enumerate(zip(COLUMNS, FILLS, texts, strict=True)):
            _box(axes, (left, low), (WIDTH + 0.3 * (column == 2), HEIGHT), fill, text)
        for left, right in pairwise(COLUMNS):
            _arrow(axes, (left + WIDTH + 0.08, middle), (right - 0.08, middle))
    for left, head in zip(COLUMNS, HEADS, strict=True):
        axes.text(left + WIDTH / 2, tall + 0.2, head, ha="center", va="bottom", fontsize=9.5)
    axes.set(xlim=(-0.1, COLUMNS[-1] + WIDTH + 0.4), ylim=(-0.15, tall + 0.75))
    axes.set_axis_off()
    save(figure, path, facts())


if __name__ == "__main__":
    in_both(draw, PICTURE)
