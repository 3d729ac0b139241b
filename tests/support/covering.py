"""Products of parameters, of which the quick suite runs a covering array: every pair of values meets in some row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Hashable], legal: Callable[[tuple[Any, ...]], bool] = lambda row: True) -> list[Any]:
    """Every legal row of a product, for ``pytest.mark.parametrize``; those that a pairwise covering spares are long.

    The covering is greedy: always the first row with the most pairs that no row before it has. (allpairspy leaves pairs
    out where rows are illegal.)

    Parameters
    ----------
    *axes : sequence of hashable
        Values of one parameter each.
    legal : callable, optional
        Which rows exist.
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
