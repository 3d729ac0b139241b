"""The light and the dark theme of drawings: NAME.svg, and NAME-dark.svg for pages in a dark theme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

#: Text as outlines, so that a picture looks the same on every machine. The salt makes files reproducible.
COMMON = {"svg.hashsalt": "cunorm", "svg.fonttype": "path", "font.family": "DejaVu Sans"}


def _theme(ink: str, paper: str) -> dict[str, str]:
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    return dict.fromkeys(inked, ink) | dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper)


#: The end of a file's name -> matplotlib's settings. Draw lines and text in ``rcParams["text.color"]``, never in black.
THEMES = {"": _theme("#1f2328", "white"), "-dark": _theme("#d0d7de", "none")}


def twin(path: Path) -> Path:
    """The dark twin of a picture."""
    return path.with_name(f"{path.stem}-dark{path.suffix}")


def in_both(draw: Callable[[Path], None], path: Path) -> None:
    """Draw a picture and its dark twin.

    Parameters
    ----------
    draw : callable
        Draws with matplotlib and saves to the path that it gets, with ``metadata={"Date": None}``.
    path : pathlib.Path
        The picture in the light theme.
    """
    import matplotlib as mpl

    for end, theme in THEMES.items():
        with mpl.rc_context(COMMON | theme):
            draw(path.with_name(f"{path.stem}{end}{path.suffix}"))
