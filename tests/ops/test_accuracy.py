"""Accuracy of each strategy's statistics, compared with NumPy's pairwise float32; and the page that reports it."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cunorm.tuning.verify.inputs import KINDS, Inputs, Kind, inputs_of, slices_of
from cunorm.tuning.verify.oracle import expected
from cunorm.tuning.verify.verifier import Verifier

from cunorm.core.devices import known
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile, ceil_div
from cunorm.ops.common.oracles import WHOLE
from cunorm.ops.registry import OPS
from cunorm.runtime.plans import Target, plan_for
from cunorm.tiling import costmodel
from tests.support.covering import every
from tests.support.paths import ROOT

FORWARDS = [("group_norm", "NCHW"), ("group_norm", "NHWC"), ("layer_norm", "NCHW"), ("batch_norm_stats", "NCHW"),
            ("batch_norm_stats", "NHWC")]  # fmt: skip
STRATEGIES = [(op, layout, name) for op, layout in FORWARDS for name in OPS[op].strategies]
LONG_OF_FLOAT16 = [pytest.param(*one, "float16", marks=pytest.mark.long) for one in STRATEGIES]
STATISTICS = ("mean", "rstd", "invstd")
#: Number of slices of each kind, for strategies (FEW) and for NumPy's largest error (MANY).
FEW, MANY = 2, 48
#: A width of elements whose sums of squares exceed float32.
LARGE = 1e20


@pytest.fixture(scope="module")
def accuracy() -> Iterator[ModuleType]:
    """The module benchmarks/accuracy.py, which imports modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("accuracy")


def turns(problem: Any, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """For each kind, its name and the values of its slices."""
    flat = values.reshape(slices_of(problem), -1)
    for turn, kind in enumerate(KINDS):
        yield kind, flat[turn :: len(KINDS)]


def goal() -> float:
    """Largest allowed ratio of a statistic's error to NumPy's. The module is beside accuracy.py, see the fixture."""
    return float(sys.modules["accuracy_page"].GOAL)


@functools.cache
def of_numpy(op: str, dtype: str, length: int) -> dict[tuple[str, str], float]:
    """NumPy's largest error of each statistic per kind of slice, at least the error of rounding the statistic once."""
    accuracy = sys.modules["accuracy"]
    every = 2 * len(KINDS)  # in GroupNorm, a sample has two groups
    slices = min(MANY * len(KINDS), WHOLE // length) // every * every  # the oracle checks all of them
    problem = accuracy.problem_of(op, "NCHW", dtype, length, slices)
    found: dict[tuple[str, str], float] = {}
    for turn in range(1, 1 + ceil_div(MANY * len(KINDS), slices)):
        given = inputs_of(problem, turn * len(KINDS), kinds=tuple(KINDS))  # new values, the same order of kinds
        came = accuracy.numpy_results(problem, given)
        for one in expected(problem, given):
            if one.name in STATISTICS:
                error = np.abs(came[one.name].reshape(one.exact.shape).astype(np.float64) - one.exact)
                least = accuracy.UNIT[one.dtype] * np.abs(one.exact)
                for kind, own in turns(problem, np.maximum(error, least)):
                    found[one.name, kind] = max(float(own.max()), found.get((one.name, kind), 0.0))
    return found


def runs(problem: Problem, strategy: str, given: Inputs) -> Iterator[tuple[Tile, Inputs]]:
    """Results of a strategy's default tile and of its tile with the longest chains. None if all tiles are illegal."""
    named, device = OPS[problem.op].strategies[strategy], known("H200")
    if not any(costmodel.legal(problem, [named], device)):
        return
    for tile in sys.modules["accuracy"].tiles_of(problem, named):
        plan = plan_for(problem, OPS[problem.op].strategies, OPS[problem.op].names, Target("cpu", 0, device), tile)
        yield tile, Verifier(problem, "cpu").results(plan, given)


def check(op: str, layout: str, strategy: str, dtype: str, length: int) -> int:
    """Check both tiles of a strategy on every kind of slice, and return the number of tiles."""
    accuracy = sys.modules["accuracy"]
    problem = accuracy.problem_of(op, layout, dtype, length, FEW * len(KINDS))
    given = inputs_of(problem, 0, kinds=tuple(KINDS))
    wanted = [one for one in expected(problem, given) if one.name in STATISTICS]
    tiles = 0
    for tile, came in runs(problem, strategy, given):
        tiles += 1
        for one in wanted:
            error = np.abs(came[one.name].reshape(one.exact.shape).astype(np.float64) - one.exact)
            for kind, own in turns(problem, error):
                allowed = goal() * of_numpy(op, dtype, length)[one.name, kind]
                assert own.max() <= allowed, f"{tile}, {one.name}, {kind}: {own.max():.2e}, allowed {allowed:.2e}"
    return tiles


@pytest.mark.parametrize(
    ("op", "layout", "strategy", "dtype"),
    [*every(4, [(*one, dtype) for dtype in ("float32", "bfloat16") for one in STRATEGIES]), *LONG_OF_FLOAT16],
)
def test_statistics_are_within_the_goal_of_pairwise_sums(
    op: str, layout: str, strategy: str, dtype: str, accuracy: ModuleType
) -> None:
    """Outliers: first, second, last, middle, two, many. Slices: far from zero, wide, constant. Limit: `goal()`."""
    assert sum(check(op, layout, strategy, dtype, length) for length in (120, 8000)) > 0 or (
        (layout, strategy) in {("NCHW", "column"), ("NHWC", "block"), ("NHWC", "split"), ("NHWC", "warp")}
        or (op, layout, strategy) == ("batch_norm_stats", "NHWC", "cluster")
    )


@pytest.mark.parametrize(("op", "layout", "strategy", "length"), [
    ("batch_norm_stats", "NHWC", "column", 80000), ("batch_norm_stats", "NCHW", "block", 16000),
    pytest.param("batch_norm_stats", "NCHW", "cluster", 80000, marks=pytest.mark.long),
    ("group_norm", "NHWC", "split", 80000),
    pytest.param("group_norm", "NHWC", "block", 80000, marks=pytest.mark.long),
])  # fmt: skip
def test_long_chains_of_16_bit_values_do_not_drift(
    op: str, layout: str, strategy: str, length: int, accuracy: ModuleType
) -> None:
    """Relative to a centre with many digits, sums of values with few digits would always round in one direction."""
    assert check(op, layout, strategy, "bfloat16", length) > 0


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize(("op", "layout", "strategy"), every(3, [
    ("layer_norm", "NCHW", "cluster"), ("layer_norm", "NCHW", "grid"), ("group_norm", "NCHW", "cluster"),
    ("group_norm", "NHWC", "cluster"),
]))  # fmt: skip
def test_an_outlier_as_first_shift_does_not_spoil_the_second_pass(
    op: str, layout: str, strategy: str, dtype: str, accuracy: ModuleType
) -> None:
    """Regression: with an outlier as the shift of the first pass, the second centre was rounded to multiples of 256."""
    problem = accuracy.problem_of(op, layout, dtype, 400000, 4)
    given = inputs_of(problem, 0, kinds=("all equal but the first",))
    rstd = next(one for one in expected(problem, given) if one.name == "rstd")
    tiles = 0
    for tile, came in runs(problem, strategy, given):
        tiles += 1
        error = np.abs(came["rstd"].reshape(rstd.exact.shape) - rstd.exact) / rstd.exact
        assert error.max() <= goal() * accuracy.UNIT[rstd.dtype], f"{tile}: {error.max():.2e}"
    assert tiles > 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("op", "layout", "strategy"), STRATEGIES)
def test_statistics_of_long_slices_are_within_the_goal(
    op: str, layout: str, strategy: str, dtype: str, accuracy: ModuleType
) -> None:
    check(op, layout, strategy, dtype, 400000)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize(("op", "layout", "strategy"), STRATEGIES)
def test_a_variance_that_overflows_is_nan(
    op: str, layout: str, strategy: str, dtype: str, accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the affected slices have NaN in rstd and y. Their mean is correct. (With rstd 0, y would look like beta.)"""
    monkeypatch.setitem(KINDS, "beyond", Kind(width=LARGE))
    problem = accuracy.problem_of(op, layout, dtype, 8000, 4)
    given = inputs_of(problem, 0, kinds=("plain", "beyond"))
    for tile, came in runs(problem, strategy, given):
        for one in expected(problem, given):
            slices = slices_of(problem), -1
            values, exact = one.looked_at(came[one.name]).astype(np.float64).reshape(slices), one.exact.reshape(slices)
            assert np.allclose(values[0::2], exact[0::2], rtol=1e-2, atol=1e-2), f"{tile}, {one.name}"
            if one.name == "mean":
                assert np.allclose(values[1::2], exact[1::2], rtol=1e-2, atol=LARGE / 1e4), f"{tile}, {one.name}"
            else:
                assert np.isnan(values[1::2]).all(), f"{tile}, {one.name}"


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_up_to_date(accuracy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["--check"]) == 0, capsys.readouterr().out
    assert accuracy.PICTURE.exists()


def test_the_results_meet_the_goal_and_are_complete(accuracy: ModuleType) -> None:
    rows = json.loads(accuracy.RESULTS.read_text(encoding="utf-8"))["rows"]
    found = list(sys.modules["accuracy_page"].beside_numpy(rows))
    assert [(row, name, ratio) for row, name, ratio in found if ratio > goal()] == []
    met = {tuple(row[key] for key in ("op", "layout", "dtype", "kind", "length")) for row in rows}
    assert met == {(one.op, one.layout, one.dtype, one.kind, one.length) for one in accuracy.works()}
    contenders = {(row["op"], row["contender"]) for row in rows}
    assert contenders >= {(op, name) for op in accuracy.ACTIVE for name in (*OPS[op].strategies, "numpy")}


def test_errors_are_measured_in_units_in_the_last_place(accuracy: ModuleType) -> None:
    """One element is off by three units in the last place. An infinite result has a very large error."""
    problem = accuracy.problem_of("layer_norm", "NCHW", "float32", 120, 4)
    given = inputs_of(problem, 0)
    wanted = [one for one in expected(problem, given) if one.name == "y"]
    exact = wanted[0].exact.astype(np.float32)
    assert accuracy.errors(wanted, {"y": exact.reshape(-1)})["y"]["ulp"] <= 0.5
    off = exact.copy()
    off[2, 7] += 3 * np.spacing(np.abs(off[2, 7]))
    found = accuracy.errors(wanted, {"y": off.reshape(-1)})["y"]
    assert 2.5 <= found["ulp"] <= 3.5 and found["bound"] > 0
    off[2, 7] = np.inf
    assert accuracy.errors(wanted, {"y": off.reshape(-1)})["y"]["ulp"] > 1e90


def test_a_row_that_misses_the_goal_is_bold(accuracy: ModuleType) -> None:
    document = json.loads(accuracy.RESULTS.read_text(encoding="utf-8"))
    row = next(row for row in document["rows"] if (row["op"], row["contender"]) == ("layer_norm", "warp"))
    row["results"]["mean"]["error"] *= 1e6
    row["results"]["mean"]["error"] += 1.0
    page = accuracy.page(document)
    assert "Mean or rstd is more than 4 times as far off as NumPy's in 1 of" in page
    assert next(line for line in page.splitlines() if "**" in line and line.startswith("| ")).startswith("| warp |")


@pytest.mark.parametrize("op", ["group_norm", "layer_norm", "batch_norm_stats", "batch_norm_backward_reduce",
                                "group_norm_backward", "layer_norm_backward", "batch_norm_backward_elemt"])  # fmt: skip
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_the_formulas_of_numpy_are_right(op: str, layout: str, accuracy: ModuleType) -> None:
    """The NumPy code that is compared with the strategies computes the same op."""
    problem = accuracy.problem_of(op, layout, "float32", 120, 6)
    given = inputs_of(problem, 0, hostile=False)
    came = accuracy.numpy_results(problem, given)
    assert came.keys() == set(problem.outputs)
    for one in expected(problem, given):
        assert one.fault(came[one.name]) is None
