"""Float64 oracle of InstanceNorm. The tolerances are those of GroupNorm with one channel per group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cunorm import reference
from cunorm.core.opspec import Exact
from cunorm.core.problem import Problem
from cunorm.ops.common.oracles import channels_second, looked_at
from cunorm.ops.common.tolerance import backward, forward


def expected(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    """Yield the exact results of some channels, or of all. The results of a channel do not depend on other channels."""
    _, channels = looked_at(problem)
    whole, saved, C = (problem.N, problem.C, problem.HxW), (problem.N, problem.C), len(channels)
    inside = (slice(None), channels)
    x = channels_second(problem, given["x"])[inside]
    gamma, beta = (given[name][channels] if name in given else None for name in ("gamma", "beta"))
    if not problem.is_backward:
        exact = reference.instance_norm(x, gamma, beta, eps=numbers["eps"])
        bounds = forward(x, C, gamma, beta, *exact[1:], problem.dtype, "NCHW")
        yield from map(Exact, ("y", "mean", "rstd"), (whole, saved, saved), [inside] * 3, exact, bounds)
        return
    dy = channels_second(problem, given["dy"])[inside]
    mean, rstd = (given[name].reshape(saved)[inside] for name in ("mean", "rstd"))
    exact = reference.instance_norm_backward(dy, x, mean, rstd, gamma)
    bounds = backward(dy, x, mean, rstd, gamma, C, problem.dtype, "NCHW")
    shapes, parts = (whole, *[(problem.C,)] * 2), (inside, (channels,), (channels,))
    yield from map(Exact, ("dx", "dgamma", "dbeta"), shapes, parts, exact, bounds)
