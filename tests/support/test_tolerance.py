"""The bounds of tolerance.py accept a careful float32 computation of data around 1000, and reject a careless one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cunorm import reference
from tests.support.tolerance import (
    assert_within,
    batch_elemt,
    batch_input,
    batch_reduce,
    batch_stats,
    layer_backward,
    layer_forward,
)


def check(results: Any, exact: Any, bounds: Any) -> None:
    for i, (came, want, bound) in enumerate(zip(results, exact, bounds, strict=True)):
        assert came.dtype == np.float32
        assert_within(str(i), came, want, bound, "float32")


def far(came: Any, exact: Any, bound: Any) -> None:
    with pytest.raises(AssertionError, match="are too far"):
        check((came,), (exact,), (bound,))


def make_narrow(shape: tuple[int, ...], width: int) -> tuple[Any, ...]:
    """Random dy, x, gamma and beta in float32."""
    rng = np.random.default_rng(6)
    sizes = (shape, shape, (width,), (width,))
    return tuple((rng.normal(size=s) + 1000 * (i == 1)).astype(np.float32) for i, s in enumerate(sizes))


def moments(x: Any, axis: Any) -> tuple[Any, Any]:
    """Mean and rstd in float32 by the corrected two-pass algorithm."""
    mean = x.mean(axis, keepdims=True)
    mean = mean + (x - mean).mean(axis, keepdims=True)
    return mean, 1 / np.sqrt(((x - mean) ** 2).mean(axis, keepdims=True) + np.float32(1e-5))


def test_layer_norm_bounds() -> None:
    dy, x, gamma, beta = make_narrow((60, 7, 11), 77)
    gamma, beta = gamma.reshape(7, 11), beta.reshape(7, 11)
    exact = reference.layer_norm(x, (7, 11), gamma, beta)
    mean, rstd = moments(x, (1, 2))
    bounds = layer_forward(x, (7, 11), gamma, beta, *exact[1:], "float32")
    check(((x - mean) * rstd * gamma + beta, mean, rstd), exact, bounds)
    careless = 1 / np.sqrt(np.abs((x * x).mean((1, 2), keepdims=True) - mean**2) + np.float32(1e-5))
    far(careless, exact[2], bounds[2])
    far((x - mean) * careless * gamma + beta, exact[0], bounds[0])
    far(mean * np.float32(1 + 1e-6), exact[1], bounds[1])

    exact = reference.layer_norm_backward(dy, x, (7, 11), mean, rstd, gamma)
    bounds = layer_backward(dy, x, (7, 11), mean, rstd, gamma, "float32")
    xhat, dxhat = (x - mean) * rstd, dy * gamma
    a, b = (each.mean((1, 2), keepdims=True) for each in (dxhat, dxhat * xhat))
    check((rstd * (dxhat - a - xhat * b), (dy * xhat).sum(0), dy.sum(0)), exact, bounds)
    far((dy * (x * rstd)).sum(0) - (dy * (mean * rstd)).sum(0), exact[1], bounds[1])
    far(rstd * (dxhat - a - (x * (rstd * b) - mean * (rstd * b))), exact[0], bounds[0])
    far(dy.astype(np.float16).astype(np.float32).sum(0), exact[2], bounds[2])


def test_batch_norm_bounds() -> None:
    dy, x, gamma, beta = make_narrow((60, 5, 9), 5)
    g, b = gamma[:, None], beta[:, None]
    m, r = moments(x, (0, 2))
    mean, invstd = m.reshape(5), r.reshape(5)
    exact = reference.batch_norm_stats(x)
    bounds = batch_stats(x, *exact, "float32")
    check((mean, invstd), exact, bounds)
    far(1 / np.sqrt(np.abs((x * x).mean((0, 2)) - mean**2) + np.float32(1e-5)), exact[1], bounds[1])
    far(mean * np.float32(1 + 1e-6), exact[0], bounds[0])

    y = reference.batch_norm_elemt(x, mean, invstd, gamma, beta)
    bound = batch_elemt(x, mean, invstd, gamma, beta, "float32")
    check(((x - m) * (r * g) + b, (x - m) * r * g + b), (y, y), (bound, bound))
    far(x * (r * g) + (b - m * (r * g)), y, bound)

    exact_sums = reference.batch_norm_backward_reduce(dy, x, mean, invstd)
    bounds = batch_reduce(dy, x, mean, invstd, "float32")
    sum_dy, sum_dy_xmu = (each.sum(2).sum(0) for each in (dy, dy * (x - m)))
    check((sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy), exact_sums, bounds)
    uncentred = (dy * x).sum(2).sum(0) - mean * sum_dy
    far(uncentred, exact_sums[1], bounds[1])
    far(uncentred * invstd, exact_sums[2], bounds[2])
    for i in (0, 3):
        far(dy.astype(np.float16).astype(np.float32).sum(2).sum(0), exact_sums[i], bounds[i])

    given = (dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, 540)
    dx, bound = reference.batch_norm_backward_elemt(*given), batch_input(*given, "float32")
    count = np.float32(540)
    a, s = sum_dy[:, None] / count, r[0] ** 2 * sum_dy_xmu[:, None] / count
    check(((dy - a - (x - m) * s) * r * g, (dy - a - (x - m) * s) * (r * g)), (dx, dx), (bound, bound))
    far((dy - a - (x * s - m * s)) * r * g, dx, bound)
    far((dy - sum_dy[:, None] / np.float32(539) - (x - m) * s) * r * g, dx, bound)


@pytest.mark.parametrize("gamma", [None, np.ones(3)], ids=["plain", "gamma"])
def test_bounds_of_empty_tensors_have_the_shapes_of_the_results(gamma: Any) -> None:
    for shape in ((0, 3), (2, 3, 0)):
        x = np.zeros(shape)
        stats = reference.batch_norm_stats(x)
        assert [each.shape for each in batch_stats(x, *stats, "float64")] == [(3,), (3,)]
        assert batch_elemt(x, *stats, gamma, gamma, "float64").shape == shape
        sums = batch_reduce(x, x, *stats, "float64")
        np.testing.assert_array_equal(sums, np.zeros((4, 3)))
        assert batch_input(x, x, *stats, gamma, *sums[:2], 0, "float64").shape == shape
    x = np.zeros((0, 3))
    y, *saved = reference.layer_norm(x, 3)
    assert [each.shape for each in layer_forward(x, 3, gamma, gamma, *saved, "float64")] == [(0, 3), (0, 1), (0, 1)]
    dx, dgamma, dbeta = layer_backward(x, y, 3, *saved, gamma, "float64")
    assert (dx.shape, dgamma.tolist(), dbeta.tolist()) == ((0, 3), [0] * 3, [0] * 3)
