"""Draw docs/pictures/strategy-NAME.svg, one picture per strategy: who owns which elements of a tensor.

Each rectangle comes from the trace of a plan on the CPU executor (``ownership.py``), none is drawn by hand. A picture's
description, in its metadata, says what was counted.

Run ``python docs/drawings/strategies.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

import cunorm
from cunorm import Tile
from cunorm.executors.cpu.checked import SECTOR_BYTES
from docs.drawings.ownership import NOBODY, Owners, owners_of
from docs.drawings.themes import in_both, save

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
ELEMENTS = SECTOR_BYTES // 4  # float32 elements of a sector
TIMES = {1: "once", 2: "twice"}


# ---- what is drawn --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """Calls on one tensor x, drawn as rows of neighbouring elements. Each read of x is drawn apart.

    Attributes
    ----------
    title : str
    calls : tuple of str
        Ops that get x, one after another.
    tile : Tile
    options : dict
        Further arguments of `cunorm.plan`.
    width : int
        Elements per row of the drawing.
    rows : tuple of str
        Labels of the rows; several neighbouring rows may share one.
    across : str
        What the columns are.
    legend : str
        What colours, shades and numbers mean.
    hue : str
        Whose colours differ: block, cluster or ticket.
    shade : str
        Whose shades differ within a colour: warp, rank (of a block in its cluster) or none.
    name : str
        What is written on rectangles, in ``str.format`` of the numbers of hue and shade.
    side : str
        What is written beside rows of one hue.
    reads : tuple of str
        A heading for each read of x; none for a single read.
    height : float
        Inches per row.
    """

    title: str
    calls: tuple[str, ...]
    tile: Tile
    options: dict[str, Any]
    width: int
    rows: tuple[str, ...]
    across: str
    legend: str
    hue: str = "block"
    shade: str = "none"
    name: str = "{hue}"
    side: str = ""
    reads: tuple[str, ...] = ("",)
    height: float = 0.2


#: GroupNorm's tensor in the pictures.
GROUPS: dict[str, Any] = {
    "options": {"shape": (2, 8, 512), "num_groups": 4},
    "width": 1024,
    "rows": tuple(f"sample {n}, group {g}" for n in range(2) for g in range(4)),
    "across": "1,024 elements: 2 channels of 512 positions",
}
SWEEPS = ("1. Sums", "2. Outputs")
WARPS: dict[str, Any] = {"legend": "colour: block; shade: warp", "shade": "warp"}
CLUSTERS: dict[str, Any] = {
    "legend": "colour: cluster; shade: block",
    "hue": "cluster",
    "shade": "rank",
    "name": "block {shade}",
    "side": "cluster {hue}",
}


def _groups(title: str, tile: Tile, op: str = "group_norm", **others: Any) -> Panel:
    return Panel(title, (op,), tile, **(GROUPS | others))


def _rows(title: str, op: str, tile: Tile, rows: int, length: int, **others: Any) -> Panel:
    options = {"shape": (rows, length), "normalized_shape": length}
    labels = tuple(f"row {row}" for row in range(rows))
    return Panel(title, (op,), tile, options, length, labels, f"{length:,} elements of a row", **others)


#: The panels of each picture.
PANELS: dict[str, tuple[Panel, ...]] = {
    "warp": (
        _groups(
            "GroupNorm: a warp owns a group",
            Tile("warp", threads=128, lanes=32, packs_per_thread=8, samples_per_team=1),
            **(WARPS | {"name": "warp {shade}", "side": "block {hue}"}),
        ),
        _rows(
            "LayerNorm: a warp owns every 8th row",
            "layer_norm",
            Tile("warp", threads=128, lanes=32, packs_per_thread=2, rows_per_team=2),
            16,
            256,
            height=0.17,
            **(WARPS | {"name": "warp {shade}", "side": "block {hue}"}),
        ),
    ),
    "block": (
        _groups(
            "GroupNorm: a block owns a group",
            Tile("block", threads=128, groups=1, stages=1, load="bulk", packs_per_thread=1),
            legend="colour: block",
            name="block {hue}",
        ),
        Panel(
            "BatchNorm, sums: a block owns some channels of some samples",
            ("batch_norm_stats",),
            Tile("block", threads=64, channels=2, samples_per_block=2),
            {"shape": (8, 8, 64)},
            512,
            tuple(f"sample {n}" for n in range(8)),
            "8 channels of 64 positions",
            legend="colour: block",
            name="block {hue}",
        ),
    ),
    "cluster": (
        _groups(
            "GroupNorm: the 4 blocks of a cluster own a group",
            Tile("cluster", threads=64, cluster=4, groups=1, stages=1, load="registers"),
            **CLUSTERS,
        ),
        _groups(
            "GroupNorm backward, samples=2: a cluster owns a group of both samples",
            Tile("cluster", threads=128, cluster=4, groups=1, stages=1, load="bulk", samples=2),
            "group_norm_backward",
            **CLUSTERS,
        ),
    ),
    "grid": (
        _groups(
            "GroupNorm: any block draws the next ticket",
            Tile("grid", threads=128, groups=1, chunk=64, prefetch_tiles=1, keep="l2"),
            legend="number and shade: ticket",
            hue="ticket",
            reads=SWEEPS,
        ),
        _rows(
            "LayerNorm: a ticket is a slab of columns of all rows",
            "layer_norm",
            Tile("grid", threads=256, lanes=32, packs_per_thread=1, slabs=8, smem_kib=64),
            8,
            1024,
            legend="shade: ticket",
            hue="ticket",
            name="ticket {hue}",
        ),
    ),
    "split": (
        _groups(
            "GroupNorm: no one owns a group",
            Tile("split", threads=128, chunk=64),
            reads=SWEEPS,
            **(WARPS | {"legend": "number and colour: block; shade: warp"}),
        ),
        _rows(
            "LayerNorm backward: a warp has a strip of columns of every 4th row",
            "layer_norm_backward",
            Tile("split", threads=128, packs_per_thread=1, rows_per_team=2),
            8,
            1024,
            reads=SWEEPS,
            **(WARPS | {"legend": "number and colour: block; shade: warp"}),
        ),
    ),
    "column": (
        Panel(
            "BatchNorm, channels last: a block owns columns of some rows",
            ("batch_norm_stats", "batch_norm_elemt"),
            Tile("column", threads=128, columns=8, chunk=16),
            {"shape": (2, 64, 64), "data_format": "NHWC"},
            64,
            ("sample 0:\n64 positions", "sample 1:\n64 positions"),
            "64 channels",
            reads=("batch_norm_stats", "batch_norm_elemt"),
            height=0.02,
            **(WARPS | {"name": "block {hue}"}),
        ),
    ),
}


# ---- what is counted ------------------------------------------------------------------------------------------------


@cache
def owners(strategy: str, panel: int) -> tuple[Owners, ...]:
    """The owners of all tensors in the launches of a panel."""
    found: list[Owners] = []
    shown = PANELS[strategy][panel]
    for op in shown.calls:
        plan = cunorm.plan(op, dtype="float32", device="cpu", tile=shown.tile, **shown.options)
        found += owners_of(plan)
    return tuple(found)


def reads_of_x(found: Sequence[Owners]) -> list[tuple[Owners, NDArray[Any], NDArray[Any]]]:
    """Each read of x: its launch, and the block and the warp by sector."""
    return [
        (one, block, warp)
        for one in found
        if one.tensor == "x" and not one.stored
        for block, warp in zip(one.block, one.warp, strict=True)
    ]


def times(found: Sequence[Owners], tensor: str, stored: bool) -> str:
    """How often each element of a tensor is accessed by all launches: "once", "twice", or a range."""
    each = sum(one.times for one in found if (one.tensor, one.stored) == (tensor, stored))
    least, most = int(np.min(each)), int(np.max(each))
    return TIMES.get(least, f"{least} times") if least == most else f"{least} to {most} times"


def moves(found: Sequence[Owners]) -> str:
    """How often each tensor is read and written: "x read once, y written once"."""
    named = dict.fromkeys((one.tensor, one.stored) for one in found)
    words = {False: "read", True: "written"}
    return ", ".join(f"{tensor} {words[stored]} {times(found, tensor, stored)}" for tensor, stored in named)


def launched(one: Owners) -> str:
    """The kernel with its blocks and threads."""
    launch = one.launch
    return f"{launch.entry}: {launch.grid:,} blocks × {launch.threads} threads"


def _runs(values: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of equal values."""
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    yield from pairwise(cuts)


def description(strategy: str) -> str:
    """What was counted, for the metadata of a picture. The checksum covers the owners of all elements in order."""
    lines = []
    for number, panel in enumerate(PANELS[strategy]):
        found = owners(strategy, number)
        lines.append(f"{panel.title}; {moves(found)}; counted on the CPU executor.")
        for one, block, warp in reads_of_x(found):
            owned = np.stack([block, warp]).astype("<i8")
            lines.append(f"{launched(one)}, {len(np.unique(owned, axis=1).T)} warps own, checksum {crc32(owned):08x}.")
    return "\n".join(lines)


# ---- drawing --------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, BESIDE = 7.5, 1.2, 0.1, 0.7  # inches: the picture, its margins, and the names beside rows
TITLES, HEADINGS, BELOW, BETWEEN, GAP = 0.44, 0.36, 0.24, 0.16, 0.2  # inches; BETWEEN reads, GAP between panels
SMALL, USUAL = 8, 9  # points
#: Okabe and Ito's colours for all kinds of colour vision, without black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
#: The paper, and the shares of the strongest and the weakest colour on it. Ink is light on the dark paper, so strong
#: colours would hide it.
LIGHT, DARK = ("#ffffff", 0.75, 0.3), ("#14181e", 0.5, 0.2)


def _paper() -> tuple[str, float, float]:
    """The paper of the present theme."""
    import matplotlib as mpl

    return DARK if sum(mpl.colors.to_rgb(mpl.rcParams["text.color"])) > 1.5 else LIGHT


def _mixed(colour: str, strength: float) -> tuple[float, ...]:
    """A colour on the paper; a strength of 1 is the strongest."""
    import matplotlib as mpl

    paper, strongest, weakest = _paper()
    share = weakest + (strongest - weakest) * strength
    pairs = zip(mpl.colors.to_rgb(colour), mpl.colors.to_rgb(paper), strict=True)
    return tuple(share * own + (1 - share) * under for own, under in pairs)


def boxes(ids: NDArray[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles of equal owners: first row, first column, rows, columns. Equal runs of neighbouring rows are one."""
    growing: dict[tuple[int, int, int], int] = {}  # columns and owner -> first row
    for row in range(len(ids) + 1):
        runs = {(*run, int(ids[row, run[0]])) for run in _runs(ids[row])} if row < len(ids) else set()
        for first, last, owner in sorted({*growing} - runs):
            begin = growing.pop((first, last, owner))
            yield begin, first, row - begin, last - first
        growing |= dict.fromkeys(runs - {*growing}, row)


@dataclass(frozen=True)
class Shown:
    """A read of x as it is drawn: the numbers of hue and shade, (rows, sectors of a row)."""

    panel: Panel
    hue: NDArray[Any]
    shade: NDArray[Any]
    hues: int

    @classmethod
    def of(cls, panel: Panel, read: tuple[Owners, NDArray[Any], NDArray[Any]]) -> Shown:
        """Take the numbers from the owners of a read."""
        one, block, warp = read
        assert (block != NOBODY).all(), f"{panel.title}: expected a read of every element"
        cluster = one.launch.cluster
        numbers = {"block": block, "ticket": block, "cluster": block // cluster, "rank": block % cluster, "warp": warp}
        numbers["none"] = np.zeros_like(block)
        hue, shade = (numbers[kind].reshape(-1, panel.width // ELEMENTS) for kind in (panel.hue, panel.shade))
        return cls(panel, hue, shade, int(hue.max()) + 1)

    @property
    def parts(self) -> NDArray[Any]:
        """A number for each pair of hue and shade."""
        return self.hue * (int(self.shade.max()) + 1) + self.shade

    def colour(self, row: int, column: int) -> tuple[float, ...]:
        """The colour of a sector. Later tickets are stronger, and so are warps and blocks with lower numbers."""
        hue, shade, last = int(self.hue[row, column]), int(self.shade[row, column]), int(self.shade.max())
        if self.panel.hue == "ticket":
            return _mixed(COLOURS[0], hue / max(1, self.hues - 1))
        return _mixed(COLOURS[hue % len(COLOURS)], 1 - shade / last if last else 0.6)

    def name(self, text: str, row: int, column: int) -> str:
        """A text with the numbers of a sector's owner."""
        return text.format(hue=self.hue[row, column], shade=self.shade[row, column])


def _add(axis: Any, corners: Sequence[tuple[int, int, int, int]], **look: Any) -> None:
    """Draw rectangles of one look as one path, which keeps the file small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    square = Outline.unit_rectangle().vertices
    outlines = [Outline(square * (wide, high) + (column, row), closed=True) for row, column, high, wide in corners]
    axis.add_patch(PathPatch(Outline.make_compound_path(*outlines), clip_on=False, **look))


def _draw_read(axis: Any, shown: Shown) -> None:
    """Draw who reads x: a rectangle per owner, with its name."""
    panel, (rows, columns) = shown.panel, shown.hue.shape
    named = shown.parts if "shade" in panel.name else shown.hue
    axis.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    painted: dict[tuple[float, ...], list[tuple[int, int, int, int]]] = {}
    for box in boxes(shown.parts):
        painted.setdefault(shown.colour(*box[:2]), []).append(box)
    for colour, same in painted.items():
        _add(axis, same, facecolor=colour, linewidth=0)
    edged = list(boxes(named))
    _add(axis, edged, fill=False, edgecolor=_paper()[0], linewidth=1.2)
    for row, column, high, wide in edged:
        middle = (column + wide / 2, row + high / 2)
        axis.text(*middle, shown.name(panel.name, row, column), fontsize=SMALL, ha="center", va="center_baseline")
    if panel.side:
        for row, _, high, _ in boxes(shown.hue[:, :1]):
            text = shown.name(panel.side, row, 0)
            axis.text(columns * 1.01, row + high / 2, text, fontsize=SMALL, va="center_baseline")
    axis.set_xlabel(panel.across, fontsize=SMALL, labelpad=3)


def _label_rows(axis: Any, labels: Sequence[str]) -> None:
    each = axis.get_ylim()[0] / len(labels)
    axis.set_yticks([each * (place + 0.5) for place in range(len(labels))], labels, fontsize=SMALL)
    axis.tick_params(length=0)


class Page:
    """A figure with panels one below the other. Lengths are inches from the upper left corner."""

    def __init__(self, height: float) -> None:
        from matplotlib import pyplot as plt

        self.height, self.figure = height, plt.figure(figsize=(WIDTH, height))

    def write(self, left: float, top: float, text: str, size: float = SMALL, **look: Any) -> None:
        """Write a line of text with its baseline at ``top``."""
        self.figure.text(left / WIDTH, 1 - top / self.height, text, fontsize=size, **look)

    def axis(self, left: float, top: float, width: float, height: float) -> Any:
        """An axis for a drawing."""
        low = 1 - (top + height) / self.height
        return self.figure.add_axes((left / WIDTH, low, width / WIDTH, height / self.height))

    def draw_panel(self, panel: Panel, found: Sequence[Owners], top: float) -> None:
        """Draw a panel below ``top``."""
        reads = reads_of_x(found)
        assert len(reads) == len(panel.reads), f"{panel.title}: x is read {len(reads)} times"
        several = len(reads) > 1
        self.write(0.1, top + 0.14, panel.title, USUAL, weight="bold")
        self.write(WIDTH - RIGHT, top + 0.14, panel.legend, ha="right")
        self.write(0.1, top + 0.32, moves(found) if several else f"{launched(reads[0][0])}; {moves(found)}")
        room = WIDTH - LEFT - (BESIDE if panel.side else RIGHT)
        wide = (room - BETWEEN * (len(reads) - 1)) / len(reads)
        for place, (heading, read) in enumerate(zip(panel.reads, reads, strict=True)):
            left, shown = LEFT + place * (wide + BETWEEN), Shown.of(panel, read)
            if several:
                launch = read[0].launch
                self.write(left, top + 0.56, f"{heading}: {launch.grid} blocks × {launch.threads} threads")
                self.write(left, top + 0.72, launch.entry)
            axis = self.axis(left, top + TITLES + HEADINGS * several, wide, panel.height * len(shown.hue))
            _draw_read(axis, shown)
            if place == 0:
                _label_rows(axis, panel.rows)


def _height(panel: Panel, found: Sequence[Owners]) -> float:
    """Inches of a panel from top to bottom."""
    reads = reads_of_x(found)
    rows = len(reads[0][1]) * ELEMENTS // panel.width
    return TITLES + HEADINGS * (len(reads) > 1) + rows * panel.height + BELOW


def draw(strategy: str, path: Path) -> None:
    """Write the picture of a strategy, in the theme of matplotlib's settings."""
    from matplotlib import pyplot as plt

    panels = [(panel, owners(strategy, number)) for number, panel in enumerate(PANELS[strategy])]
    heights = [_height(*panel) for panel in panels]
    page, top = Page(sum(heights) + GAP * (len(panels) - 1)), 0.0
    for (panel, found), height in zip(panels, heights, strict=True):
        page.draw_panel(panel, found, top)
        top += height + GAP
    save(page.figure, path, description(strategy))
    plt.close(page.figure)
    # Indentation is a tenth of the file.
    path.write_text("".join(f"{line.strip()}\n" for line in path.read_text(encoding="utf-8").splitlines()), "utf-8")


def main() -> None:
    """Draw all pictures, in both themes."""
    for strategy in PANELS:
        in_both(partial(draw, strategy), PICTURES / f"strategy-{strategy}.svg")


if __name__ == "__main__":
    main()
