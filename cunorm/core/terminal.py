"""Output for a terminal: tables in columns, and a progress bar."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table, each column as wide as its widest cell.

    Parameters
    ----------
    rows : sequence of sequence of str
        Rows of equal length.
    left : int
        Number of left-aligned columns; the columns after them are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if at < left else ">" for at in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def with_bar(
    items: Iterable[Item], total: int, unit: str, label: Callable[[Item], str], *, shown: bool = True
) -> Iterator[Item]:
    """Yield the items; show a progress bar on standard error if that is a terminal and tqdm is installed.

    Parameters
    ----------
    items : iterable
    total : int
        Number of items.
    unit : str
        Name of an item after the bar.
    label : callable
        Item -> text before the bar.
    shown : bool
        False: show no bar.
    """
    if not shown or importlib.util.find_spec("tqdm") is None:
        yield from items
        return
    tqdm = importlib.import_module("tqdm").tqdm
    with tqdm(items, total=total, unit=unit, disable=None, file=sys.stderr) as bar:  # None: only on a terminal
        for item in bar:
            bar.set_description(label(item))
            yield item
