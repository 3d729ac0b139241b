"""Float64 oracle of BatchNorm's ops, and the tolerances of their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.core.opspec import Exact, Oracle
from cunorm.core.problem import Problem, accumulator
from cunorm.ops.common.oracles import channels_second, looked_at
from cunorm.ops.common.tolerance import FOLD, UNIT


def by_channel(x: Any) -> np.ndarray:
    """Return x in float64 as (C, N*HxW)."""
    values: np.ndarray = np.asarray(x, np.float64)
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], values.size // max(values.shape[1], 1))


def column(parameter: Any, like: np.ndarray) -> np.ndarray:
    """Return a parameter in float64 as (1, C, 1..1), to broadcast with `like`. None means ones."""
    C = like.shape[1]
    values = np.ones(C) if parameter is None else np.asarray(parameter, np.float64)
    return values.reshape(1, C, *[1] * (like.ndim - 2))


def either(dtype: str) -> float:
    """Return u of the computation plus u of the oracle, which rounds as often. This matters if both are float64."""
    return UNIT[accumulator(dtype)] + UNIT["float64"]


def batch_stats(x: Any, mean: Any, invstd: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of mean and invstd, as in `forward`, over a channel. ``mean`` and ``invstd`` are the oracle's."""
    u = UNIT[accumulator(dtype)]
    mean, invstd = (np.asarray(each, np.float64) for each in (mean, invstd))
    xc = by_channel(x)
    # numpy's mean warns if a channel has no elements. Its statistics are then NaN, and need no bound.
    deviation = np.abs(xc - mean[:, None]).sum(axis=1) / max(xc.shape[1], 1)
    return u * (2 * np.abs(mean) + FOLD * deviation), FOLD * u * invstd


def batch_elemt(x: Any, mean: Any, invstd: Any, gamma: Any, beta: Any, dtype: str) -> np.ndarray:
    """Bound of y. The statistics are inputs, so nothing is summed, and the roundings can be counted."""
    u = either(dtype)
    x = np.asarray(x, np.float64)
    b = np.zeros(1) if beta is None else np.abs(column(beta, x))
    scaled = np.abs((x - column(mean, x)) * column(invstd, x) * column(gamma, x))
    # x - mean, invstd * gamma, their product and the last addition round once each. beta is only in the last.
    bound: np.ndarray = 4 * u * scaled + u * b
    return bound


def batch_reduce(
    dy: Any, x: Any, mean: Any, invstd: Any, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of sum_dy, sum_dy_xmu, dgamma and dbeta."""
    u = UNIT[accumulator(dtype)]
    dyc, xc = np.abs(by_channel(dy)), by_channel(x)
    m, r = (np.asarray(each, np.float64).reshape(-1) for each in (mean, invstd))
    plain = FOLD * u * dyc.sum(axis=1)
    centred = FOLD * u * (dyc * np.abs(xc - m[:, None])).sum(axis=1)
    # Without elements, dgamma is 0 and invstd is NaN.
    return plain, centred, np.abs(r) * centred if xc.shape[1] else centred, plain.copy()


def batch_input(  # noqa: PLR0913  # the oracle's arguments
    dy: Any, x: Any, mean: Any, invstd: Any, gamma: Any, sum_dy: Any, sum_dy_xmu: Any, count: float, dtype: str
) -> np.ndarray:
    """Bound of dx. The sums are inputs, so the roundings can be counted."""
    u = either(dtype)
    dy, x = (np.asarray(each, np.float64) for each in (dy, x))
    r = column(invstd, x)
    a, b = (np.abs(column(each, x)) / (count or 1) for each in (sum_dy, sum_dy_xmu))
    xmu = np.abs(x - column(mean, x))
    # Roundings of the term with dy: two subtractions, the scale invstd * gamma, the product with it: 4. Roundings of
    # the term with sum_dy / count: count as a floating-point number, its reciprocal, a product, at most both
    # subtractions, the scale, the product with it: 7. Roundings of the third term: the first three of the second term,
    # x - mean, invstd^2, two products, one subtraction, the scale, the product with it: 10.
    bound: np.ndarray = u * np.abs(r * column(gamma, x)) * (4 * np.abs(dy) + 7 * a + 10 * xmu * r * r * b)
    return bound


def _channels(problem: Problem, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the channels that the oracle checks, and the inputs of these channels. Tensors have channels second."""
    _, channels = looked_at(problem)
    part = (slice(None), channels)
    tensors = problem.spec.tensors
    found = {
        name: channels_second(problem, values)[part] if name in tensors else values[channels]
        for name, values in given.items()
    }
    return channels, found


def _of_channels(problem: Problem, channels: Any, exact: Any, bounds: Any) -> Iterator[Exact]:
    """Yield the results with one element per channel, in result order."""
    for name, values, bound in zip(problem.spec.results, exact, bounds, strict=True):
        yield Exact(name, (problem.C,), (channels,), values, bound)


def _of_tensor(problem: Problem, channels: Any, exact: Any, bound: Any) -> Iterator[Exact]:
    """Yield the single tensor that the op returns."""
    (name,) = problem.spec.results
    yield Exact(name, (problem.N, problem.C, problem.HxW), (slice(None), channels), exact, bound)


def _stats(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    channels, found = _channels(problem, given)
    exact = reference.batch_norm_stats(found["x"], eps=numbers["eps"])
    return _of_channels(problem, channels, exact, batch_stats(found["x"], *exact, problem.dtype))


def _elemt(problem: Problem, given: Mapping[str, Any], _: Mapping[str, float]) -> Iterator[Exact]:
    channels, found = _channels(problem, given)
    x, mean, invstd = (found[name] for name in ("x", "mean", "invstd"))
    gamma, beta = found.get("gamma"), found.get("beta")
    exact = reference.batch_norm_elemt(x, mean, invstd, gamma, beta)
    return _of_tensor(problem, channels, exact, batch_elemt(x, mean, invstd, gamma, beta, problem.dtype))


def _reduce(problem: Problem, given: Mapping[str, Any], _: Mapping[str, float]) -> Iterator[Exact]:
    channels, found = _channels(problem, given)
    dy, x, mean, invstd = (found[name] for name in ("dy", "x", "mean", "invstd"))
    exact = reference.batch_norm_backward_reduce(dy, x, mean, invstd)
    return _of_channels(problem, channels, exact, batch_reduce(dy, x, mean, invstd, problem.dtype))


def _input(problem: Problem, arrays: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    channels, found = _channels(problem, {name: values for name, values in arrays.items() if name != "counts"})
    dy, x, mean, invstd = (found[name] for name in ("dy", "x", "mean", "invstd"))
    total = float(np.sum(arrays["counts"])) if problem.has("counts") else numbers["count"]
    given = (found.get("gamma"), found["sum_dy"], found["sum_dy_xmu"], total)
    exact = reference.batch_norm_backward_elemt(dy, x, mean, invstd, *given)
    bound = batch_input(dy, x, mean, invstd, *given, problem.dtype)
    return _of_tensor(problem, channels, exact, bound)


def _gather(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterator[Exact]:
    running = {name: given[name].astype(np.float64) for name in ("running_mean", "running_var")}
    ranks = [given[name] for name in problem.spec.inputs]
    exact = reference.batch_norm_gather_stats(*ranks, eps=numbers["eps"], momentum=numbers["momentum"], **running)
    # The sums are in float64 for every dtype.
    bounds = [1e-13 * np.abs(values) + 1e-13 for values in exact if values is not None]
    return _of_channels(problem, slice(None), exact, bounds)


#: Oracle of each op.
_ORACLES: Mapping[str, Oracle] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats": _gather,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _input,
}


def expected(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterable[Exact]:
    """Return the exact results of whole channels. The results of a channel do not depend on other channels."""
    return _ORACLES[problem.op](problem, given, numbers)
