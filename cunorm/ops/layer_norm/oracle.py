"""Float64 oracle of LayerNorm, and the tolerances of its results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.core.opspec import Exact
from cunorm.core.problem import Problem, accumulator
from cunorm.ops.common.row_oracles import expected_of_rows
from cunorm.ops.common.tolerance import UNIT, backward, forward


def layer_forward(
    x: Any, normalized_shape: int | tuple[int, ...], gamma: Any, beta: Any, mean: Any, rstd: Any, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of y, mean and rstd from `forward`. A row is a sample with one group, and its elements are channels."""
    x, mean, rstd = (np.asarray(each, np.float64) for each in (x, mean, rstd))
    length = math.prod(np.atleast_1d(normalized_shape).tolist())
    gamma, beta = (None if each is None else np.reshape(each, length) for each in (gamma, beta))
    rows = x.reshape(x.size // length, length)
    bounds = forward(rows, 1, gamma, beta, mean.reshape(-1, 1), rstd.reshape(-1, 1), dtype, "NCHW")
    return bounds[0].reshape(x.shape), bounds[1].reshape(mean.shape), bounds[2].reshape(mean.shape)


def layer_backward(
    dy: Any,
    x: Any,
    normalized_shape: int | tuple[int, ...],
    mean: Any,
    rstd: Any,
    gamma: Any,
    dtype: str,
    dh: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of dx, dgamma and dbeta from `backward`, with rows as in `layer_forward`. The sum with dh rounds once."""
    dy, x = (np.asarray(each, np.float64) for each in (dy, x))
    shape = tuple(np.atleast_1d(normalized_shape).tolist())
    length = math.prod(shape)
    rows = (x.size // length, length)
    gamma = None if gamma is None else np.reshape(gamma, length)
    dx, dgamma, dbeta = backward(dy.reshape(rows), x.reshape(rows), mean, rstd, gamma, 1, dtype, "NCHW")
    if dh is not None:
        dx = dx + 2 * UNIT[accumulator(dtype)] * np.abs(np.asarray(dh, np.float64)).reshape(rows)
    return dx.reshape(x.shape), dgamma.reshape(shape), dbeta.reshape(shape)


def expected(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    """Yield the exact results: y, dx, h and statistics of some rows, and sums over all rows."""
    length, dtype = problem.C, problem.dtype

    def forward(rows: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, gamma, beta, residual = rows["x"], rows.get("gamma"), rows.get("beta"), rows.get("residual")
        exact = reference.layer_norm(x, length, gamma, beta, eps=numbers["eps"], residual=residual)
        h = x if residual is None else exact[3]
        bounds = layer_forward(h, length, gamma, beta, exact[1], exact[2], dtype)
        return exact, bounds if residual is None else (*bounds, np.zeros_like(h))

    def backward(rows: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        dy, x, mean, rstd = (rows[name] for name in ("dy", "x", "mean", "rstd"))
        gamma, dh = rows.get("gamma"), rows.get("dh")
        exact = reference.layer_norm_backward(dy, x, length, mean, rstd, gamma, dh=dh)
        return exact, layer_backward(dy, x, length, mean, rstd, gamma, dtype, dh)

    return expected_of_rows(problem, given, backward if problem.is_backward else forward)
