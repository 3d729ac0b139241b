"""Run the battery of hostile problems: results are correct and bitwise equal in every order of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cunorm.core.arrays import DTYPES
from cunorm.ops.registry import OPS
from tests.battery import cases as battery
from tests.battery.case import ORDERS, forget, kernel_files
from tests.mutation import run as mutation
from tests.support.covering import every


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")


STRATEGIES = [(name, strategy) for name, op in OPS.items() for strategy in op.strategies]


@pytest.mark.parametrize(("op", "strategy"), STRATEGIES, ids=[f"{op}-{strategy}" for op, strategy in STRATEGIES])
def test_results_are_correct_and_bitwise_equal_in_every_order(
    op: str, strategy: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Two orders of threads, and the cases that need few builds; with --long all of ORDERS, and all cases."""
    long = pytestconfig.getoption("--long")
    orders = ORDERS if long else ORDERS[::2]
    found = battery.cases(op, strategy) if long else battery.with_few_builds(op, strategy)
    assert found, f"cases.py has no case for strategy {strategy} of {op}"
    for case in found:
        seen = set()
        for order in orders:
            monkeypatch.setenv("CUNORM_CPU_ORDER", order)
            try:
                results = case.run()
            except AssertionError as error:
                raise AssertionError(f"{case}, {order}: {error}") from None
            seen.add(tuple(b"" if a is None else a.tobytes() for a in results))
        assert len(seen) == 1, f"{case}: {len(seen)} different results in {len(orders)} orders of threads"


FORWARDS = [(op, strategy) for op, strategy in STRATEGIES if "y_t" in OPS[op].types]


@pytest.mark.parametrize(("op", "strategy"), every(2, FORWARDS), ids=[f"{op}-{strategy}" for op, strategy in FORWARDS])
def test_y_in_float32_rounds_to_y_bit_for_bit(op: str, strategy: str, pytestconfig: pytest.Config) -> None:
    """The other results are the same too: only the type in which y is stored differs.

    The quick suite runs the cases with the builds of the first.
    """
    found = [case for case in battery.cases(op, strategy) if case.y_dtype is not None]
    assert found, f"cases.py has no case with y in float32 for strategy {strategy} of {op}"
    if not pytestconfig.getoption("--long"):
        found = [case for case in found if case.builds <= found[0].builds]
    finer = 0
    for case in found:
        (y, *rest), (rounded, *others) = case.run(), replace(case, y_dtype=None).run()
        assert y is not None and rounded is not None and y.dtype == np.float32 and rounded.dtype == DTYPES[case.dtype]
        assert y.astype(rounded.dtype).tobytes() == rounded.tobytes(), case
        assert [one is None or one.tobytes() for one in rest] == [one is None or one.tobytes() for one in others], case
        finer += np.count_nonzero(y != rounded.astype(np.float32))
    assert finer, "no element of y has more digits than x's dtype"


def test_every_kernel_file_is_reached() -> None:
    """A case reaches it, or a test kernel, if no kernel of the library uses it yet."""
    forget()
    files = set(kernel_files())
    assert files == {file for file in files if mutation.checks_of(file)}
    assert {name for name in files if name.endswith(".cu")} <= frozenset().union(*mutation.files_of_cases())


@pytest.mark.parametrize(("op", "strategy"), STRATEGIES, ids=[f"{op}-{strategy}" for op, strategy in STRATEGIES])
def test_the_cases_with_few_builds_reach_every_kernel_and_layout(op: str, strategy: str) -> None:
    every, few = battery.cases(op, strategy), battery.with_few_builds(op, strategy)
    assert {*map(id, few)} <= {*map(id, every)}
    reached, all_of = ({(kernel, one.last) for one in found for kernel in one.kernels} for found in (few, every))
    assert reached == all_of
    if len(every) > 20:
        assert len(few) > len(every) / 8  # the chosen builds are those that many cases share


def test_labels_of_cases_are_unique() -> None:
    names = [f"{case} {dict(case.tile)}" for case in battery.CASES]
    assert len(names) == len(set(names))


def test_a_case_with_a_grid_launches_exactly_that_many_blocks() -> None:
    limited = [case for case in battery.CASES if case.grid is not None]
    assert {(case.op, case.strategy) for case in limited} == set(STRATEGIES)
    for case in limited:
        assert max(one.grid for one in case.plan().launches) == case.grid, case
