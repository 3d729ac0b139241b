"""Tolerances of results against the float64 oracle, with the reasons. Those of a single op are in its ``oracle.py``.

u is the unit roundoff of the accumulator (2^-24, or 2^-53 for float64). A sum of n terms that is folded in packs,
lanes, warps and chunks has a depth of some tens. 16 u times the sum of |terms| (1e-6 in float32) covers this depth and
the few roundings of each term. Rounding the result for storage adds half a unit in the last place. The tolerance is one
unit, because a result near the midpoint of two stored values may be rounded to either value. A float32 denormal may be
flushed to zero on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cunorm.core.problem import accumulator

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
FOLD = 16.0


def _grouped(x: np.ndarray, groups: int, data_format: str) -> np.ndarray:
    """Return x in float64 as (N, groups, channels per group, HxW)."""
    x = np.asarray(x, np.float64)
    if data_format == "NHWC":
        x = np.moveaxis(x, -1, 1)
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))


def _shaped(values: np.ndarray, like: np.ndarray, data_format: str) -> np.ndarray:
    if data_format == "NHWC":
        return np.moveaxis(values.reshape(like.shape[0], like.shape[-1], *like.shape[1:-1]), 1, -1)
    return values.reshape(like.shape)


def stored(bound: np.ndarray, exact: np.ndarray, dtype: str) -> np.ndarray:
    """Add the storage tolerance to a bound: one unit in the last place of the result, and `SMALLEST`."""
    found: np.ndarray = bound + 2 * UNIT[dtype] * np.abs(exact) + SMALLEST[dtype]
    return found


def forward(
    x: Any, groups: int, gamma: Any, beta: Any, mean: np.ndarray, rstd: np.ndarray, dtype: str, data_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of y, mean and rstd before storage rounding. ``mean`` and ``rstd`` are the oracle's."""
    u = UNIT[accumulator(dtype)]
    xg = _grouped(x, groups, data_format)
    m, r = mean[:, :, None, None], rstd[:, :, None, None]
    channels = xg.shape[1] * xg.shape[2]
    g = (np.ones(channels) if gamma is None else np.abs(np.asarray(gamma, np.float64))).reshape(groups, -1, 1)
    b = (np.zeros(channels) if beta is None else np.abs(np.asarray(beta, np.float64))).reshape(groups, -1, 1)
    deviation = np.abs(xg - m)
    # Twice the rounding of the mean when it is stored (u |mean|), and the error of the sum of deviations that it is
    # computed from.
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


def fault(name: str, came: Any, exact: np.ndarray, bound: np.ndarray, dtype: str) -> str | None:
    """Return the error message for a wrong result, or None.

    A result is correct if every element is within its bound, and NaN and infinity are where the oracle has them.

    Parameters
    ----------
    name : str
        Name of the result, for the message.
    came : array_like
        The result.
    exact, bound : ndarray
        The oracle's values, and their bounds before storage rounding.
    dtype : str
        Dtype in which the result is stored.
    """
    came = np.asarray(came, np.float64)
    if came.shape != exact.shape:
        return f"{name}: shape {came.shape}, expected {exact.shape}"
    finite = np.isfinite(exact)
    if not np.array_equal(np.isnan(came), np.isnan(exact)):
        missing = np.count_nonzero(np.isnan(came) & ~np.isnan(exact))
        return f"{name}: NaN elsewhere than in the oracle, {missing} of {exact.size} are NaN only in the result"
    if not np.array_equal(came[~finite], exact[~finite], equal_nan=True):
        return f"{name}: infinities differ from the oracle's"
    error = np.abs(np.where(finite, came, 0) - np.where(finite, exact, 0))
    allowed = stored(np.where(finite, bound, 0), np.where(finite, exact, 0), dtype)
    if not np.any(error > allowed):
        return None
    worst = np.unravel_index(np.argmax(error / allowed), exact.shape)
    return (
        f"{name}{list(map(int, worst))}: {came[worst]!r}, oracle {exact[worst]!r}; error {error[worst]:.3e}, "
        f"allowed {allowed[worst]:.3e}; {np.count_nonzero(error > allowed)} of {exact.size} elements are too far off"
    )
