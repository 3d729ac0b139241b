"""Test the covering arrays that select the rows of the quick suite."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.covering import every, pairwise


def legal(row: tuple[Any, ...]) -> bool:
    return row[0] != "a" or row[2] != 1


@pytest.mark.parametrize(("axes", "allowed", "most"), [
    (("abcd", "xyz", (0, 1)), lambda row: True, 14),
    (("abcd", "xyz", (0, 1)), legal, 14),
    (("ab", "xy"), lambda row: True, 4),
    (("ab",) * 7, lambda row: True, 10),
], ids=["mixed", "illegal", "two", "seven"])  # fmt: skip
def test_every_pair_of_values_occurs_in_the_quick_suite(axes: Any, allowed: Any, most: int) -> None:
    rows = pairwise(*axes, legal=allowed)
    product = [row for row in itertools.product(*axes) if allowed(row)]
    assert [tuple(row.values) for row in rows] == product  # no row is lost
    quick = [row.values for row in rows if not row.marks]
    assert len(quick) <= most
    for one, other in itertools.combinations(range(len(axes)), 2):
        wanted = {(row[one], row[other]) for row in product}
        assert {(row[one], row[other]) for row in quick} == wanted


def test_every_step_th_value_runs_in_the_quick_suite() -> None:
    rows = every(3, [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")])
    assert [row.values for row in rows] == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]  # no row is lost
    assert [row.values for row in rows if not row.marks] == [(1, "a"), (4, "d")]
    assert [row.values for row in every(1, "ab")] == [("a",), ("b",)]
    assert {mark.name for row in rows for mark in row.marks} == {"long"}
