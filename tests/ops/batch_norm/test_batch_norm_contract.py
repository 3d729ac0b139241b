"""The public contract of BatchNorm's functions on tensors alone. tests/ops/test_contract.py tests the shared part."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from tests.conftest import Executor
from tests.ops.batch_norm.contract import INPUT, REDUCE, strategy_of, tile_of
from tests.support.problems import SENTINEL, batch_arrays, laid_out

TENSORS = ("x", "dy")


@pytest.mark.parametrize("layout", [None, "channels last"])
def test_the_sums_may_be_rows_of_one_array(layout: str | None, executor: Executor) -> None:
    a, xp = batch_arrays(), executor.xp
    lie = executor.put if layout is None else lambda values: laid_out(xp, values, layout)
    tensors = {name: lie(getattr(a, name)) for name in TENSORS}
    tile = tile_of(REDUCE, strategy_of(tensors["x"]))
    for packed in (xp.zeros((2, 8), np.float32), xp.zeros((8, 2), np.float32).T, xp.zeros((2, 16), np.float32)[:, ::2]):
        for rest in ((None, None), tuple(xp.full(8, SENTINEL, np.float32) for _ in range(2))):
            packed.fill(SENTINEL)
            a.checked(REDUCE, executor, out=(packed[0], packed[1], *rest), tile=tile, **tensors)
            a.check(REDUCE, (*executor.get(packed), None, None))


def test_sums_of_any_dtype_are_rounded_once(executor: Executor) -> None:
    """A sum in a narrow dtype is bitwise equal to the wide sum, rounded. With this data, no double rounding occurs."""
    a, tile = batch_arrays(), tile_of(REDUCE)
    wide = tuple(map(executor.get, a.checked(REDUCE, executor, tile=tile)))
    dtypes = [DTYPES[name] for name in ("float16", "float64", "bfloat16", "float32")]
    out = tuple(executor.xp.full(8, SENTINEL, dtype) for dtype in dtypes)
    for given in (out, (out[0], None, *out[2:])):
        found = a.checked(REDUCE, executor, out=given, tile=tile)
        for came, plain, array in zip(found, wide, given, strict=True):
            assert came.dtype == (plain.dtype if array is None else array.dtype)
            if array is None or array.dtype != np.float64:
                assert executor.get(came).tobytes() == plain.astype(came.dtype).tobytes()


def test_batch_norm_backward_elemt_accepts_sums_of_any_dtype(executor: Executor) -> None:
    """There are no samples, so no kernel has to be built."""
    for x_type, sums in itertools.product(DTYPES, DTYPES):
        with np.errstate(all="ignore"):
            a = batch_arrays((0, 4, 3), x_type)
        totals = executor.xp.zeros(4, DTYPES[sums])
        assert a.call(INPUT, executor, sum_dy=totals, sum_dy_xmu=totals, count=2).dtype == a.x.dtype


def test_the_cache_of_calls_distinguishes_counts_and_strategies(executor: Executor) -> None:
    a = batch_arrays((2, 2, 2, 2))
    for _ in range(2):
        for count in (8, 2.5, np.int64(3), np.float32(8), 2**40, 1e-3):
            a.checked(INPUT, executor, count=count, tile=tile_of(INPUT))
        for strategy in ("block", "split"):
            a.checked(REDUCE, executor, tile=tile_of(REDUCE, strategy))


def test_the_functions_together_are_batch_norm(executor: Executor) -> None:
    """The four functions and gather_stats of one rank compute BatchNorm, forward and backward."""
    a = batch_arrays((4, 8, 3, 3))
    x, dy, gamma, beta = (executor.put(each) for each in (a.x, a.dy, a.gamma, a.beta))
    mean, invstd = cunorm.batch_norm_stats(x)
    mean, invstd = cunorm.batch_norm_gather_stats(mean[None], invstd[None], [a.count])
    y = cunorm.batch_norm_elemt(x, mean, invstd, gamma, beta)
    sum_dy, sum_dy_xmu, dgamma, dbeta = cunorm.batch_norm_backward_reduce(dy, x, mean, invstd, gamma)
    dx = cunorm.batch_norm_backward_elemt(dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, a.count)
    values, grads = (np.moveaxis(each.astype(float), 1, 0).reshape(8, -1) for each in (a.x, a.dy))
    xhat = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5)
    exact_y = xhat * a.gamma[:, None] + a.beta[:, None]
    scale = a.gamma[:, None] / np.sqrt(values.var(1, keepdims=True) + 1e-5)
    exact_dx = scale * (grads - grads.mean(1, keepdims=True) - xhat * (grads * xhat).mean(1, keepdims=True))
    for came, exact in ((y, exact_y), (dx, exact_dx)):
        flat = np.moveaxis(executor.get(came), 1, 0).reshape(8, math.prod((4, 3, 3)))
        np.testing.assert_allclose(flat, exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(executor.get(dgamma), (grads * xhat).sum(1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(executor.get(dbeta), grads.sum(1), rtol=0, atol=2e-5)
