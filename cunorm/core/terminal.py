"""What people see on a terminal: columns, and a bar while something takes long."""

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


def with_bar(
    items: Iterable[Item], total: int, unit: str, label: Callable[[Item], str], *, shown: bool = True
) -> Iterator[Item]:
    """The items as they come, with a bar on standard error where that is a terminal and tqdm is there.

    Parameters
    ----------
    items : iterable
    total : int
        How many there are.
    unit : str
    label : callable
        An item -> what stands before the bar.
    shown : bool
        False: no bar.
    """
    if not shown or importlib.util.find_spec("tqdm") is None:
        yield from items
        return
    tqdm = importlib.import_module("tqdm").tqdm
    with tqdm(items, total=total, unit=unit, disable=None, file=sys.stderr) as bar:  # None: on a terminal alone
        for item in bar:
            bar.set_description(label(item))
            yield item
