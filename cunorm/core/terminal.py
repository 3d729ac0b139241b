"""What people see on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table, each column as wide as its widest cell.

    Parameters
    ----------
    rows : sequence of sequence of str
        All of one length.
    left : int
        So many columns are flush left, those after them flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if at < left else ">" for at in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
