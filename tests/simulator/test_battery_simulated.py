"""The cases of the battery on the machine code of their kernels, compared with the oracle and with the CPU executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from benchmarks.simulator.calls import simulated
from tests.battery.case import Case, forget, kernel_files
from tests.battery.cases import CASES

pytestmark = pytest.mark.usefixtures("tools")

#: Steps of the result's dtype that the machine code may be away from the executor, relative to the largest result. The
#: compiler fuses a * b + c, the executor does not; a sum of many terms then differs in its last bits.
STEPS = 4
#: Strategies whose first case runs in the quick suite: distributed shared memory, tickets, bulk copies, shuffles.
QUICK = (
    "group_norm_backward-cluster",
    "group_norm_backward-grid",
    "layer_norm_backward-block",
    "layer_norm-warp",
    "batch_norm_backward_reduce-column",
)


def first_of(name: str) -> Case:
    return next(case for case in CASES if f"{case.op}-{case.strategy}" == name)


#: Cases in bfloat16 for kernels that the battery runs in other dtypes only.
EXTRA = tuple(
    replace(case, dtype="bfloat16")
    for case in CASES
    if str(case)
    in (
        "batch_norm_gather_stats-column: one rank, one channel",
        "group_norm-warp: whole packs, two blocks for three",
        "group_norm_backward-warp: whole packs, two blocks for three",
    )
)


def run(case: Case, on_simulator: bool) -> Sequence[np.ndarray | None]:
    """Run a case; `Case.run` compares the results with the oracle."""
    forget()
    if not on_simulator:
        return case.run()
    with simulated():
        return case.run()


def assert_close(case: Case, got: np.ndarray, expected: np.ndarray) -> None:
    eps = float(ml_dtypes.finfo(expected.dtype).eps)
    a, b = got.astype(np.float64), expected.astype(np.float64)
    assert np.array_equal(np.isnan(a), np.isnan(b)), case
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), case
    largest = np.abs(b[finite]).max(initial=0)
    if largest > 0:  # where all terms cancel, what fused operations leave is only bounded by the oracle's tolerance
        assert np.abs(a[finite] - b[finite]).max() <= STEPS * eps * largest, case


def check(case: Case) -> None:
    for got, expected in zip(run(case, True), run(case, False), strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert_close(case, got, expected)


@pytest.mark.parametrize("name", QUICK)
def test_a_case_is_right(name: str) -> None:
    check(first_of(name))


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *EXTRA], ids=str)
def test_every_case_is_right(case: Case) -> None:
    check(case)


def test_the_cases_reach_every_kernel_in_two_dtypes() -> None:
    """So that the long test executes the machine code of each kernel in bfloat16 and float32."""
    for dtype in ("bfloat16", "float32"):
        reached = frozenset[str]().union(*(case.files for case in (*CASES, *EXTRA) if case.dtype == dtype))
        assert [file for file in kernel_files() if file.endswith(".cu") and file not in reached] == [], dtype
