"""The light and the dark theme of drawings: NAME.svg, and NAME-dark.svg for pages in a dark theme.

A drawing takes its colours of lines and text from matplotlib's settings: ``rcParams["text.color"]`` is the ink,
``rcParams["grid.color"]`` is for what should stay in the background. It never names black or white.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Text as outlines, so that a picture looks the same on every machine. The salt makes files reproducible.
COMMON = {
    "svg.hashsalt": "cunorm",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
INKED = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
FAINT = ("grid.color", "axes.edgecolor", "xtick.color", "ytick.color")
PAPER = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")


def _theme(ink: str, faint: str, paper: str) -> dict[str, str]:
    return dict.fromkeys(INKED, ink) | dict.fromkeys(FAINT, faint) | dict.fromkeys(PAPER, paper)


#: The end of a file's name -> matplotlib's settings.
THEMES = {"": _theme("#1f2328", "#d5dae0", "white"), "-dark": _theme("#d0d7de", "#40474f", "none")}


def twin(path: Path) -> Path:
    """The dark twin of a picture."""
    return path.with_name(f"{path.stem}-dark{path.suffix}")


def in_both(draw: Callable[[Path], None], path: Path) -> None:
    """Draw a picture and its dark twin.

    Parameters
    ----------
    draw : callable
        Draws with matplotlib and saves with `save` to the path that it gets.
    path : pathlib.Path
        The picture in the light theme.
    """
    import matplotlib as mpl

    mpl.use("svg")
    for end, theme in THEMES.items():
        settings: Any = COMMON | theme  # matplotlib types the keys, as literals
        with mpl.rc_context(settings):
            draw(path.with_name(f"{path.stem}{end}{path.suffix}"))


def save(figure: Any, path: Path, facts: str) -> None:
    """Write a figure as SVG.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    path : pathlib.Path
    facts : str
        What the picture shows, as text. It is kept in the file, so that a check can compare it with its source.
    """
    figure.savefig(path, metadata={"Date": None, "Description": facts})


def facts_of(path: Path) -> str | None:
    """The text that `save` kept in a picture; None without one."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
    return None if found is None else html.unescape(found[1])
