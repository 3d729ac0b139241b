"""Float64 oracle of GroupNorm, and the tolerances of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.core.opspec import Exact
from cunorm.core.problem import Problem, accumulator
from cunorm.ops.common.oracles import channels_second, looked_at
from cunorm.ops.common.tolerance import UNIT, backward, forward
from cunorm.reference import before


def _normalised(x: Any, mean: Any, rstd: Any, gamma: Any, beta: Any, groups: int, data_format: str) -> np.ndarray:
    """Return |gamma * xhat| + |beta|. The rounding error of z = gamma * xhat + beta is proportional to it."""
    g, b = (None if one is None else np.abs(np.asarray(one, np.float64)) for one in (gamma, beta))
    zero = np.zeros_like(np.asarray(mean, np.float64))
    deviation = np.abs(before(x, mean, rstd, None, None, groups, data_format))
    found: np.ndarray = before(deviation, zero, zero + 1, g, b, groups, data_format)
    return found


def silu_forward(
    x: Any, groups: int, gamma: Any, beta: Any, mean: np.ndarray, rstd: np.ndarray, dtype: str, data_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of y, mean and rstd.

    The slope of silu is below 1.1. Its exponential and its division add their own rounding errors.
    """
    z, *statistics = forward(x, groups, gamma, beta, mean, rstd, dtype, data_format)
    own = 8 * UNIT[accumulator(dtype)] * _normalised(x, mean, rstd, gamma, beta, groups, data_format)
    return 1.1 * z + own, statistics[0], statistics[1]


def silu_backward(  # noqa: PLR0913  # the oracle's arguments
    dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any, beta: Any, groups: int, dtype: str, data_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of dx, dgamma and dbeta.

    silu' is below 1.1, and the slope of silu' is at most 1/2. So the gradient with respect to z has an error of some
    u |dy|, and of half the error of z times |dy|.
    """
    weight = 2 + _normalised(x, mean, rstd, gamma, beta, groups, data_format)
    return backward(np.asarray(dy, np.float64) * weight, x, mean, rstd, gamma, groups, dtype, data_format)


def expected(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    """Yield the exact results of whole groups. The results of a group do not depend on other groups."""
    groups, channels = looked_at(problem)
    whole, statistics = (problem.N, problem.C, problem.HxW), (problem.N, problem.group)
    x = channels_second(problem, given["x"])[:, channels]
    gamma, beta = (given[name][channels] if name in given else None for name in ("gamma", "beta"))
    of_tensor, of_groups, of_channels = (slice(None), channels), (slice(None), groups), (channels,)
    dtype, plain = problem.dtype, problem.activation is None
    options: dict[str, Any] = {"activation": problem.activation}
    if not problem.is_backward:
        exact = reference.group_norm(x, len(groups), gamma, beta, eps=numbers["eps"], **options)
        bounded = forward if plain else silu_forward
        bounds = bounded(x, len(groups), gamma, beta, *exact[1:], dtype, "NCHW")
        yield Exact("y", whole, of_tensor, exact[0], bounds[0])
        for index, name in ((1, "mean"), (2, "rstd")):
            yield Exact(name, statistics, of_groups, exact[index], bounds[index])
        return
    dy = channels_second(problem, given["dy"])[:, channels]
    mean, rstd = (given[name].reshape(statistics)[:, groups] for name in ("mean", "rstd"))
    exact = reference.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=len(groups), beta=beta, **options)
    if plain:
        bounds = backward(dy, x, mean, rstd, gamma, len(groups), dtype, "NCHW")
    else:
        bounds = silu_backward(dy, x, mean, rstd, gamma, beta, len(groups), dtype, "NCHW")
    yield Exact("dx", whole, of_tensor, exact[0], bounds[0])
    for index, name in ((1, "dgamma"), (2, "dbeta")):
        yield Exact(name, (problem.C,), of_channels, exact[index], bounds[index])
