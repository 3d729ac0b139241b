"""The cases of the battery on the machine code of their kernels, compared with the oracle and with the CPU executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from cunorm.tuning.verify.oracle import Expected

from benchmarks.simulator.calls import simulated
from tests.battery.case import Case, forget, kernel_files
from tests.battery.cases import CASES
from tests.support.covering import every

pytestmark = pytest.mark.usefixtures("tools")

#: Steps of the result's dtype that the machine code may be away from the executor, relative to the largest result. The
#: exponential, the reciprocal and the square root of the two differ in their last bits.
STEPS = 4
#: Cases with a result much smaller than the terms whose sum it is: the gradient of groups of one or two elements, and
#: sums over all samples. Only the oracle's bound knows how large the terms are.
CANCELLING = (
    "group_norm_backward-block: more groups than threads",
    "group_norm_backward-grid: one-element groups",
    "group_norm_backward-block: a chunk of one ragged pack",
    "group_norm_backward-split: more batches than a chain",
)
#: Strategies whose first case runs in the quick suite: distributed shared memory, tickets, bulk copies, shuffles.
QUICK = (
    "group_norm_backward-cluster",
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


@contextlib.contextmanager
def bounds() -> Iterator[list[float]]:
    """The largest distance from the oracle that is allowed for each result that is compared, in their order."""
    found: list[float] = []
    fault = Expected.fault

    def noted(self: Expected, came: np.ndarray) -> str | None:
        found.append(float(np.max(self.bound, where=np.isfinite(self.bound), initial=0)))
        return fault(self, came)

    with mock.patch.object(Expected, "fault", noted):
        yield found


def assert_close(case: Case, got: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Compare with the executor, by the steps of the dtype; if large terms cancel, by the oracle's bound."""
    eps = float(ml_dtypes.finfo(expected.dtype).eps)
    a, b = got.astype(np.float64), expected.astype(np.float64)
    assert np.array_equal(np.isnan(a), np.isnan(b)), case
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), case
    apart, largest = np.abs(a[finite] - b[finite]).max(initial=0), np.abs(b[finite]).max(initial=0)
    cancels = largest == 0 or str(case) in CANCELLING
    assert apart <= (bound if cancels else STEPS * eps * largest), case


def check(case: Case) -> None:
    """Run a case on the simulator, with both texts, and on the executor; `Case.run` compares all with the oracle."""
    forget()
    with simulated():
        found = case.run()
    forget()
    with simulated(text="specialised"):
        specialised = case.run()
    assert [one if one is None else one.tobytes() for one in specialised] == [
        one if one is None else one.tobytes() for one in found
    ], f"{case}: the specialised text gives other bits"
    forget()
    with bounds() as known:
        exact = case.run()
    assert [one is None for one in found] == [one is None for one in exact]
    there = [pair for pair in zip(found, exact, strict=True) if pair[0] is not None and pair[1] is not None]
    for (got, expected), bound in zip(there, known or [0.0] * len(there), strict=True):
        assert_close(case, got, expected, bound)


@pytest.mark.parametrize("name", every(3, QUICK))
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
