"""How far a result may lie from the float64 oracle, with the reasons, once.

u is the unit roundoff of the accumulator (2^-24, or 2^-53 for float64). A sum of n terms that is folded in packs,
lanes, warps and chunks has a depth of some tens; 16 u of the sum of |terms| (1e-6 in float32) covers it and the handful
of roundings of each term. The storage rounding on top is half a unit in the last place of the result; one unit is
allowed, because a result that lies near the middle of two may fall on the other side. A float32 denormal may be flushed
to zero on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cunorm.core.problem import accumulator
from cunorm.reference import before

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
FOLD = 16.0


def _grouped(x: np.ndarray, groups: int, data_format: str) -> np.ndarray:
    """float64 (N, groups, channels of a group, HxW)."""
    x = np.asarray(x, np.float64)
    if data_format == "NHWC":
        x = np.moveaxis(x, -1, 1)
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))


def _by_channel(x: Any) -> np.ndarray:
    """float64 (C, N*HxW)."""
    values: np.ndarray = np.asarray(x, np.float64)
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], values.size // max(values.shape[1], 1))


def _column(parameter: Any, like: np.ndarray) -> np.ndarray:
    """float64 (1, C, 1..1), to stand beside `like`; None stands for ones."""
    C = like.shape[1]
    values = np.ones(C) if parameter is None else np.asarray(parameter, np.float64)
    return values.reshape(1, C, *[1] * (like.ndim - 2))


def _shaped(grouped: np.ndarray, like: np.ndarray, data_format: str) -> np.ndarray:
    if data_format == "NHWC":
        return np.moveaxis(grouped.reshape(like.shape[0], like.shape[-1], *like.shape[1:-1]), 1, -1)
    return grouped.reshape(like.shape)


def stored(bound: np.ndarray, exact: np.ndarray, dtype: str) -> np.ndarray:
    """A bound for the computation, and one unit in the last place of the stored result."""
    found: np.ndarray = bound + 2 * UNIT[dtype] * np.abs(exact) + SMALLEST[dtype]
    return found


def forward(
    x: Any, groups: int, gamma: Any, beta: Any, mean: np.ndarray, rstd: np.ndarray, dtype: str, data_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of y, mean and rstd before storage rounding, from the oracle's mean and rstd."""
    u = UNIT[accumulator(dtype)]
    xg = _grouped(x, groups, data_format)
    m, r = mean[:, :, None, None], rstd[:, :, None, None]
    channels = xg.shape[1] * xg.shape[2]
    g = (np.ones(channels) if gamma is None else np.abs(np.asarray(gamma, np.float64))).reshape(groups, -1, 1)
    b = (np.zeros(channels) if beta is None else np.abs(np.asarray(beta, np.float64))).reshape(groups, -1, 1)
    deviation = np.abs(xg - m)
    # The mean is rounded where it is stored (u |mean|), and summed from deviations.
    mean_bound = u * (2 * np.abs(mean) + FOLD * deviation.mean(axis=(2, 3)))
    y_bound = g * r * (FOLD * u * deviation + mean_bound[:, :, None, None] + 2 * u * np.abs(m)) + 2 * u * b
    return _shaped(y_bound, np.asarray(x), data_format), mean_bound, FOLD * u * rstd


def backward(
    dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any, groups: int, dtype: str, data_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of dx, dgamma and dbeta before storage rounding."""
    u = UNIT[accumulator(dtype)]
    dyg, xg = _grouped(dy, groups, data_format), _grouped(x, groups, data_format)
    m = np.asarray(mean, np.float64).reshape(dyg.shape[0], groups, 1, 1)
    r = np.asarray(rstd, np.float64).reshape(dyg.shape[0], groups, 1, 1)
    g = (np.ones(dyg.shape[1] * dyg.shape[2]) if gamma is None else np.abs(np.asarray(gamma, np.float64))).reshape(
        groups, -1, 1
    )
    xhat, dyg = np.abs((xg - m) * r), np.abs(dyg)
    a, b = ((g * term).mean(axis=(2, 3), keepdims=True) for term in (dyg, dyg * xhat))
    dx = FOLD * u * np.abs(r) * (g * dyg + a + xhat * b)
    return (
        _shaped(dx, np.asarray(x), data_format),
        FOLD * u * (dyg * xhat).sum(axis=(0, 3)).reshape(-1),
        FOLD * u * dyg.sum(axis=(0, 3)).reshape(-1),
    )


def _normalised(x: Any, mean: Any, rstd: Any, gamma: Any, beta: Any, groups: int, data_format: str) -> np.ndarray:
    """|gamma * xhat| + |beta|: what z = gamma * xhat + beta is made of, and so what its rounding goes with."""
    g, b = (None if one is None else np.abs(np.asarray(one, np.float64)) for one in (gamma, beta))
    zero = np.zeros_like(np.asarray(mean, np.float64))
    deviation = np.abs(before(x, mean, rstd, None, None, groups, data_format))
    found: np.ndarray = before(deviation, zero, zero + 1, g, b, groups, data_format)
    return found


def silu_forward(
    x: Any, groups: int, gamma: Any, beta: Any, mean: np.ndarray, rstd: np.ndarray, dtype: str, data_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of y, mean and rstd: silu's slope is below 1.1, and silu itself takes an exponential and a division."""
    z, *statistics = forward(x, groups, gamma, beta, mean, rstd, dtype, data_format)
    own = 8 * UNIT[accumulator(dtype)] * _normalised(x, mean, rstd, gamma, beta, groups, data_format)
    return 1.1 * z + own, statistics[0], statistics[1]


def silu_backward(  # noqa: PLR0913  # the oracle's arguments
    dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any, beta: Any, groups: int, dtype: str, data_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of dx, dgamma and dbeta: silu' is below 1.1 and its slope at most 1/2, so that the gradient in front of it
    is off by some u of |dy|, and by half of what z is off.
    """
    weight = 2 + _normalised(x, mean, rstd, gamma, beta, groups, data_format)
    return backward(np.asarray(dy, np.float64) * weight, x, mean, rstd, gamma, groups, dtype, data_format)


def _either(dtype: str) -> float:
    """u of the computation and of the oracle, which rounds as often: that matters where both are float64."""
    return UNIT[accumulator(dtype)] + UNIT["float64"]


def layer_forward(
    x: Any, normalized_shape: int | tuple[int, ...], gamma: Any, beta: Any, mean: Any, rstd: Any, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of y, mean and rstd: those of `forward`; a row is a sample of one group, an element a channel."""
    x, mean, rstd = (np.asarray(each, np.float64) for each in (x, mean, rstd))
    length = math.prod(np.atleast_1d(normalized_shape).tolist())
    gamma, beta = (None if each is None else np.reshape(each, length) for each in (gamma, beta))
    rows = x.reshape(x.size // length, length)
    bounds = forward(rows, 1, gamma, beta, mean.reshape(-1, 1), rstd.reshape(-1, 1), dtype, "NCHW")
    return bounds[0].reshape(x.shape), bounds[1].reshape(mean.shape), bounds[2].reshape(mean.shape)


def layer_backward(
    dy: Any, x: Any, normalized_shape: int | tuple[int, ...], mean: Any, rstd: Any, gamma: Any, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of dx, dgamma and dbeta: those of `backward`, with rows as above."""
    dy, x = (np.asarray(each, np.float64) for each in (dy, x))
    shape = tuple(np.atleast_1d(normalized_shape).tolist())
    length = math.prod(shape)
    rows = (x.size // length, length)
    gamma = None if gamma is None else np.reshape(gamma, length)
    dx, dgamma, dbeta = backward(dy.reshape(rows), x.reshape(rows), mean, rstd, gamma, 1, dtype, "NCHW")
    return dx.reshape(x.shape), dgamma.reshape(shape), dbeta.reshape(shape)


def batch_stats(x: Any, mean: Any, invstd: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of mean and invstd, from the oracle's: those of `forward`, over a channel."""
    u = UNIT[accumulator(dtype)]
    mean, invstd = (np.asarray(each, np.float64) for each in (mean, invstd))
    xc = _by_channel(x)
    # Not numpy's mean, which warns where a channel has no elements; its statistics are NaN, and need no bound.
    deviation = np.abs(xc - mean[:, None]).sum(axis=1) / max(xc.shape[1], 1)
    return u * (2 * np.abs(mean) + FOLD * deviation), FOLD * u * invstd


def batch_elemt(x: Any, mean: Any, invstd: Any, gamma: Any, beta: Any, dtype: str) -> np.ndarray:
    """Bound of y. The statistics are given: nothing is summed, and the roundings can be counted."""
    u = _either(dtype)
    x = np.asarray(x, np.float64)
    b = np.zeros(1) if beta is None else np.abs(_column(beta, x))
    scaled = np.abs((x - _column(mean, x)) * _column(invstd, x) * _column(gamma, x))
    # x - mean, invstd * gamma, their product and the last addition round once each; beta meets only the last.
    bound: np.ndarray = 4 * u * scaled + u * b
    return bound


def batch_reduce(
    dy: Any, x: Any, mean: Any, invstd: Any, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of sum_dy, sum_dy_xmu, dgamma and dbeta."""
    u = UNIT[accumulator(dtype)]
    dyc, xc = np.abs(_by_channel(dy)), _by_channel(x)
    m, r = (np.asarray(each, np.float64).reshape(-1) for each in (mean, invstd))
    plain = FOLD * u * dyc.sum(axis=1)
    centred = FOLD * u * (dyc * np.abs(xc - m[:, None])).sum(axis=1)
    # dgamma of no elements is 0, and the invstd of none NaN.
    return plain, centred, np.abs(r) * centred if xc.shape[1] else centred, plain.copy()


def batch_input(  # noqa: PLR0913  # the oracle's arguments
    dy: Any, x: Any, mean: Any, invstd: Any, gamma: Any, sum_dy: Any, sum_dy_xmu: Any, count: float, dtype: str
) -> np.ndarray:
    """Bound of dx. The sums are given: the roundings can be counted."""
    u = _either(dtype)
    dy, x = (np.asarray(each, np.float64) for each in (dy, x))
    r = _column(invstd, x)
    a, b = (np.abs(_column(each, x)) / (count or 1) for each in (sum_dy, sum_dy_xmu))
    xmu = np.abs(x - _column(mean, x))
    # dy meets two subtractions, the scale invstd * gamma and the product with it: 4. Before that, sum_dy / count has
    # count as a floating-point number, its reciprocal and a product, and meets one subtraction or both: 7. The third
    # term has those three, x - mean, invstd^2, two products and one subtraction: 10.
    bound: np.ndarray = u * np.abs(r * _column(gamma, x)) * (4 * np.abs(dy) + 7 * a + 10 * xmu * r * r * b)
    return bound


def fault(name: str, came: Any, exact: np.ndarray, bound: np.ndarray, dtype: str) -> str | None:
    """What is wrong with a result; None if every element is within its bound, NaN and infinity where the oracle's are.

    Parameters
    ----------
    name : str
        Of the result, for the sentence.
    came : array_like
    exact, bound : ndarray
        The oracle, and the bound before storage rounding.
    dtype : str
        That the result is stored in.
    """
    came = np.asarray(came, np.float64)
    if came.shape != exact.shape:
        return f"{name}: shape {came.shape}, oracle {exact.shape}"
    finite = np.isfinite(exact)
    if not np.array_equal(np.isnan(came), np.isnan(exact)):
        missing = np.count_nonzero(np.isnan(came) & ~np.isnan(exact))
        return f"{name}: NaN elsewhere than in the oracle, {missing} of {exact.size} too many"
    if not np.array_equal(came[~finite], exact[~finite], equal_nan=True):
        return f"{name}: infinities differ from the oracle's"
    error = np.abs(np.where(finite, came, 0) - np.where(finite, exact, 0))
    allowed = stored(np.where(finite, bound, 0), np.where(finite, exact, 0), dtype)
    if not np.any(error > allowed):
        return None
    worst = np.unravel_index(np.argmax(error / allowed), exact.shape)
    return (
        f"{name}{list(map(int, worst))}: {came[worst]!r}, oracle {exact[worst]!r}; error {error[worst]:.3e}, "
        f"allowed {allowed[worst]:.3e}; {np.count_nonzero(error > allowed)} of {exact.size} are too far"
    )
