"""Float64 oracle of LayerNorm, and the tolerances of its results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm import reference
from cunorm.core import settings
from cunorm.core.opspec import Exact
from cunorm.core.problem import Problem
from cunorm.ops.common import oracles
from cunorm.ops.common.tolerance import backward, forward

BLOCKS = 8  # most blocks of rows that are summed in parallel


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
    dy: Any, x: Any, normalized_shape: int | tuple[int, ...], mean: Any, rstd: Any, gamma: Any, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of dx, dgamma and dbeta from `backward`, with rows as in `layer_forward`."""
    dy, x = (np.asarray(each, np.float64) for each in (dy, x))
    shape = tuple(np.atleast_1d(normalized_shape).tolist())
    length = math.prod(shape)
    rows = (x.size // length, length)
    gamma = None if gamma is None else np.reshape(gamma, length)
    dx, dgamma, dbeta = backward(dy.reshape(rows), x.reshape(rows), mean, rstd, gamma, 1, dtype, "NCHW")
    return dx.reshape(x.shape), dgamma.reshape(shape), dbeta.reshape(shape)


def _rows_looked_at(problem: Problem) -> NDArray[np.intp]:
    """Return the rows whose y, dx, mean and rstd the oracle checks: evenly spread, with the first and the last."""
    count = min(problem.N, max(2, oracles.WHOLE // problem.C))
    return np.unique(np.linspace(0, problem.N - 1, count).round().astype(np.intp))


def expected(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    """Yield the exact results: y, dx and statistics of some rows, and sums over all rows."""
    rows, length = problem.N, problem.C
    chosen, gamma = _rows_looked_at(problem), given.get("gamma")
    part, whole = (chosen,), (rows, length)
    x = given["x"].reshape(whole)
    if not problem.is_backward:
        exact = reference.layer_norm(x[chosen], length, gamma, given.get("beta"), eps=numbers["eps"])
        bounds = layer_forward(x[chosen], length, gamma, given.get("beta"), *exact[1:], problem.dtype)
        shapes = (whole, (rows, 1), (rows, 1))
        yield from map(Exact, ("y", "mean", "rstd"), shapes, [part] * 3, exact, bounds)
        return
    dy, mean, rstd = given["dy"].reshape(whole), given["mean"].reshape(rows), given["rstd"].reshape(rows)
    arrays = (dy[chosen], x[chosen], length, mean[chosen], rstd[chosen], gamma)
    exact, bounds = reference.layer_norm_backward(*arrays), layer_backward(*arrays, problem.dtype)
    yield Exact("dx", whole, part, exact[0], bounds[0])
    if len(chosen) < rows:  # dgamma and dbeta are sums over all rows, computed block by block
        step = max(1, oracles.WHOLE // BLOCKS // length)

        def block(start: int) -> tuple[Any, Any]:
            part = slice(start, start + step)
            arrays = (dy[part], x[part], length, mean[part], rstd[part], gamma)
            return reference.layer_norm_backward(*arrays)[1:], layer_backward(*arrays, problem.dtype)[1:]

        sums = [[np.zeros(length), np.zeros(length)] for _ in range(2)]
        with ThreadPoolExecutor(min(BLOCKS, settings.cores())) as pool:  # NumPy releases the interpreter lock
            for found in pool.map(block, range(0, rows, step)):  # in the order of the blocks, whichever ends first
                for kept, parameters in zip(sums, found, strict=True):
                    for total, values in zip(kept, parameters, strict=True):
                        total += values
        exact, bounds = (exact[0], sums[0][0], sums[0][1]), (bounds[0], sums[1][0], sums[1][1])
    for index, name in ((1, "dgamma"), (2, "dbeta")):
        yield Exact(name, (length,), (), exact[index], bounds[index])
