"""Which of a test's parameters the quick suite runs: a covering array of a product, or each n-th of a list."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Hashable], legal: Callable[[tuple[Any, ...]], bool] = lambda row: True) -> list[Any]:
    """Every legal row of a product, for ``pytest.mark.parametrize``. Rows outside a pairwise covering are marked long.

    The covering is greedy: it takes the first of the rows that contain the most missing pairs. (allpairspy omits pairs
    if some rows are illegal.)

    Parameters
    ----------
    *axes : sequence of hashable
        Values of one parameter each.
    legal : callable, optional
        (row) -> whether the row exists.
    """
    rows = [row for row in itertools.product(*axes) if legal(row)]
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    quick = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        quick.add(best)
        missing -= pairs[best]
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.long) for row in rows]


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """The values, for ``pytest.mark.parametrize``: each step-th, beginning with the first; the others are marked long.

    It is for values that reach the same code with other constants, where each needs a build. A tuple is the values of
    several parameters.
    """
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.long if place % step else ())
        for place, one in enumerate(values)
    ]
