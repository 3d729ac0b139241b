"""Values that break careless formulas in LayerNorm: offsets, constants, outliers, NaN and infinity; sizes past 2^31."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES
from cunorm.core.devices import KNOWN
from cunorm.core.problem import Problem
from cunorm.ops.layer_norm.strategies import FORWARD
from tests.conftest import Executor
from tests.ops.layer_norm.test_layer_norm import STRATEGIES, Case, run, tile_of
from tests.support.problems import sparse

BOTH = pytest.mark.parametrize("direction", ["forward", "backward"])
EACH = pytest.mark.parametrize("strategy", STRATEGIES)


@EACH
def test_gradient_sums_are_centred(strategy: str, executor: Executor) -> None:
    """x offset by 1e3 with unit spread: dgamma within 1e-6 of sum |dy * xhat| in every column."""
    case = Case(40, 130, "float32", offset=1e3)
    mean, rstd = case.statistics()
    dy, x, m, r, gamma = map(executor.put, (case.dy, case.x, mean, rstd, case.gamma))
    _, dgamma, _ = cunorm.layer_norm_backward(dy, x, 130, m, r, gamma, tile=tile_of(strategy, "backward"))
    exact = reference.layer_norm_backward(case.dy, case.x, 130, mean, rstd, case.gamma)[1]
    xhat = (case.x.astype(np.float64) - mean) * rstd.astype(np.float64)
    allowed = 1e-6 * np.abs(case.dy * xhat).sum(axis=0)
    assert np.all(np.abs(executor.get(dgamma) - exact) <= allowed)
    careless = (rstd * case.dy * case.x).sum(axis=0, dtype=np.float32)
    careless -= (rstd * mean * case.dy).sum(axis=0, dtype=np.float32)
    assert np.any(np.abs(careless - exact) > allowed), "the test would not notice an uncentred sum"


@BOTH
@EACH
@pytest.mark.parametrize("offset", [1e3, -1e3])
def test_offsets(offset: float, strategy: str, direction: str, executor: Executor) -> None:
    assert run(Case(9, 257, "float32", offset=offset), strategy, direction, executor)


@EACH
@pytest.mark.parametrize("constant", [0.1, 100.1, 1e4 + 0.1, 1e5 + 0.1])
def test_a_constant_row_has_no_variance(constant: float, strategy: str, executor: Executor) -> None:
    x = executor.put(np.full((3, 1021), constant, np.float32))
    y, mean, rstd = cunorm.layer_norm(x, 1021, eps=1e-5, tile=tile_of(strategy, "forward"))
    want = 1 / np.sqrt(np.float64(np.float32(1e-5)))
    assert np.all(executor.get(mean) == np.float32(constant))
    assert np.all(np.abs(executor.get(rstd) / want - 1) <= 2e-7)
    assert np.all(executor.get(y) == 0)


@BOTH
@EACH
@pytest.mark.parametrize("where", [0, 777])
def test_an_outlier(where: int, strategy: str, direction: str, executor: Executor) -> None:
    """One element is 1e6: the first, relative to which sums are computed, or another."""
    case = Case(2, 1000, "float32")
    case.x[0, where] = 1e6
    assert run(case, strategy, direction, executor)


@EACH
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 5, 129])
def test_nan_and_infinity_affect_only_their_row_and_column(
    where: int, value: float, strategy: str, executor: Executor
) -> None:
    """In x they affect their own row of y; in dy their own row of dx and their own column of dgamma and dbeta."""
    with np.errstate(all="ignore"):
        case = Case(11, 130, "float32")
        case.x[7, where] = value
        assert run(case, strategy, "forward", executor)
        case = Case(11, 130, "float32")
        case.dy[7, where] = value
        assert run(case, strategy, "backward", executor)
        case = Case(11, 130, "float32", "float32")
        assert case.gamma is not None
        case.gamma[where] = value
        assert run(case, strategy, "backward", executor)


@BOTH
@EACH
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_and_small_16_bit_values(dtype: str, strategy: str, direction: str, executor: Executor) -> None:
    """Conversions in both directions preserve subnormal float16 values and values near the largest float16."""
    for scale in (1e-6, 3e4):
        case = Case(9, 66, "float32", None)
        case.x = np.clip(case.x * scale, -6e4, 6e4).astype(DTYPES[dtype])
        case.dy = (case.dy * min(scale, 1.0)).astype(DTYPES[dtype])
        assert run(case, strategy, direction, executor)


@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if strategy != "grid"])
def test_more_than_2_to_the_31_elements(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the last row of a tensor of more than 2^31 elements. Only the first and last blocks of the launches run.

    The tensors are sparse memory, in which only the pages that are written exist. 32-bit offsets would point 2^32
    elements lower.
    """
    from cunorm.executors.cpu import executor as cpu

    length = 1000
    rows = 2**31 // length + 4096
    dy, x, dx = (sparse(rows * length, DTYPES["bfloat16"]).reshape(rows, length) for _ in range(3))
    case = Case(1, length, "bfloat16")
    dy[-1], x[-1] = case.dy[0], case.x[0]
    mean, rstd = (np.zeros(rows, np.float32) for _ in range(2))
    mean[-1:], rstd[-1:] = (a[0] for a in case.statistics())
    whole_launch = cpu.launch

    def ends(kernel: Any, grid: int, threads: int, shared_bytes: int, arguments: Any, **known: Any) -> None:
        """Run both ends of the grid: rows are assigned from the first block on, or from the last in a second sweep."""
        whole_launch(kernel, grid, threads, shared_bytes, arguments, blocks=(max(0, grid - 64), grid), **known)
        if grid > 64:
            whole_launch(kernel, grid, threads, shared_bytes, arguments, blocks=(0, 64), **known)

    monkeypatch.setattr(cpu, "launch", ends)
    tile = {**tile_of(strategy, "backward"), "rows_per_team": 1}
    cunorm.layer_norm_backward(
        dy, x, length, mean, rstd, case.gamma, out=(dx, None, None), tile=tile,
        output_mask=(True, False, False), workspace=sparse(2**31, np.uint8),
    )  # fmt: skip
    exact = reference.layer_norm_backward(case.dy, case.x, length, mean[-1:], rstd[-1:], case.gamma)[0]
    assert np.max(np.abs(dx[-1].astype(np.float64) - exact[0])) <= 2.0**-7 * np.max(np.abs(exact))
    assert np.any(dx[-1] != 0)


@pytest.mark.parametrize(("rows", "length"), [(2**31 // 1000 + 1, 1000), (1, 2**31), (1700, 2**21 // 4 * 5)])
def test_grid_refuses_tensors_larger_than_half_the_cache_and_the_resident_rows(rows: int, length: int) -> None:
    """`grid` never runs on 2^31 elements, so its offsets within a row are 32-bit."""
    problem = Problem(
        op="layer_norm",
        dtype="bfloat16",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=rows,
        C=length,
        HxW=1,
        group=1,
        outputs=("y", "mean", "rstd"),
    )
    for device in KNOWN.values():
        assert all(FORWARD["grid"].refuses(problem, tile, device) for tile in FORWARD["grid"].tiles())


def test_a_row_of_more_than_2_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """`split` accepts rows of any length. Check both ends of a row of 2^31 + 2^12 elements, which exceeds an int."""
    from cunorm.executors.cpu import executor as cpu

    length = 2**31 + 2**12
    x, y = (sparse(length, DTYPES["bfloat16"]) for _ in range(2))
    x[:300], x[-300:] = 5, 3
    mean, rstd = np.ones(1, np.float32), np.full(1, 2, np.float32)
    whole_launch = cpu.launch

    def only_the_second_sweep(
        kernel: Any, grid: int, threads: int, shared_bytes: int, arguments: Any, **known: Any
    ) -> None:
        if grid > 10**6:  # the launch of the moments, and the second sweep, which runs backwards
            seen.append(grid)
            if len(seen) == 2:
                whole_launch(kernel, grid, threads, shared_bytes, arguments, blocks=(0, 4), **known)
                whole_launch(kernel, grid, threads, shared_bytes, arguments, blocks=(grid - 4, grid), **known)

    seen: list[int] = []
    monkeypatch.setattr(cpu, "launch", only_the_second_sweep)
    tile = {"strategy": "split", "threads": 128, "packs_per_thread": 1, "rows_per_team": 4, "chunk": 64}
    cunorm.layer_norm(x, length, out=(y, mean, rstd), tile=tile, workspace=sparse(2**30, np.uint8))
    assert len(seen) == 2
    assert np.all(y[:300] == 8)
    assert np.all(y[-300:] == 4)
    assert np.all(y[-600:-300] == -2)
