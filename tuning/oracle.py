"""Hostile inputs of a problem, and what the float64 oracle says of them: what a candidate has to get right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm import reference
from cunorm.arrays import DTYPES
from cunorm.problem import Problem
from cunorm.traffic_problem import array_facts

from . import tolerance

__all__ = ["EPS", "Expected", "expected", "inputs_of", "numbers_of"]

EPS, MOMENTUM = 1e-5, 0.1
#: Elements of x up to which the oracle looks at all groups or channels; of a larger problem, at some of them.
WHOLE = 2**24
#: Slices of statistics take turns: plain, far from zero, constant, wide, with an outlier in front.
KINDS = 5
OFFSET, CONSTANT, WIDTH, OUTLIER = 1e3, 100.1, 1e3, 1e4

Values = NDArray[Any]
Inputs = dict[str, Values]


@dataclass(frozen=True)
class Expected:
    """A result of the oracle.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Of the whole result as the oracle has it.
    part : tuple
        The index of what was looked at.
    axes : tuple of int
        That take the result as it lies in memory to that shape.
    exact, bound : ndarray
        The oracle's values of the part, and how far from them a result may lie before it is rounded.
    dtype : str
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[Any, ...]
    exact: Values
    bound: Values
    dtype: str
    moved: bool = False

    def fault(self, came: Values) -> str | None:
        """What is wrong with a result, flat as it lies in memory; None if nothing is."""
        if self.moved:  # channels last in memory, the oracle has them second
            N, C, HxW = self.shape
            came = np.moveaxis(came.reshape(N, HxW, C), -1, 1)
        return tolerance.fault(self.name, came.reshape(self.shape)[self.part], self.exact, self.bound, self.dtype)


def numbers_of(problem: Problem) -> dict[str, float]:
    """The numbers that a launch may name."""
    return {"eps": EPS, "momentum": MOMENTUM, "count": float(problem.N * problem.HxW)}


# ---- inputs ---------------------------------------------------------------------------------------------------------


def _blocks(x: Values) -> Iterator[tuple[slice, Values]]:
    """Parts of an array along its first axis, in float64, of some million elements."""
    rows = max(1, (1 << 22) // max(1, x[0].size))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        yield part, x[part].astype(np.float64)


def _slices(problem: Problem, seed: int) -> Values:
    """x or dy with its slices of statistics in a row: (slices, length), or (N, C, HxW) for BatchNorm's channels."""
    random = np.random.default_rng(seed)
    if problem.op.startswith("batch_norm"):
        return random.standard_normal((problem.N, problem.C, problem.HxW), np.float32)
    return random.standard_normal((problem.N * problem.group, problem.group_length), np.float32)


def _hostile(problem: Problem, seed: int) -> Values:
    """x as (N, C, HxW), in float32, with every kind of slice in turn."""
    x = _slices(problem, seed)
    channels = problem.op.startswith("batch_norm")
    count = problem.C if channels else len(x)
    for kind in range(KINDS):
        own: Any = np.arange((kind - seed) % KINDS, count, KINDS)
        own = (slice(None), own) if channels else (own,)
        if kind == 1:
            x[own] += OFFSET
        elif kind == 2:
            x[own] = CONSTANT
        elif kind == 3:
            x[own] *= WIDTH
        elif kind == 4:
            first = (0, own[1], 0) if channels else (own[0], 0)
            x[first] = OUTLIER
    return x.reshape(problem.N, problem.C, problem.HxW)


def _moments(problem: Problem, x: Values) -> tuple[Values, Values]:
    """Mean and rstd of every slice of (N, C, HxW)."""
    if problem.op.startswith("batch_norm"):
        size = problem.N * problem.HxW
        mean = np.sum([part.sum(axis=(0, 2)) for _, part in _blocks(x)], axis=0) / size
        squares = [((part - mean[:, None]) ** 2).sum(axis=(0, 2)) for _, part in _blocks(x)]
        return mean, 1 / np.sqrt(np.sum(squares, axis=0) / size + EPS)
    grouped = x.reshape(problem.N, problem.group, problem.group_length)
    mean, rstd = np.empty(grouped.shape[:2]), np.empty(grouped.shape[:2])
    for part, values in _blocks(grouped):
        mean[part] = values.mean(axis=2)
        rstd[part] = 1 / np.sqrt(((values - mean[part][:, :, None]) ** 2).mean(axis=2) + EPS)
    return mean, rstd


def _in_memory(problem: Problem, values: Values) -> Values:
    """(N, C, HxW) in the problem's layout and dtype."""
    stored = values.astype(DTYPES[problem.dtype])
    return np.ascontiguousarray(np.moveaxis(stored, 1, -1)) if problem.layout == "NHWC" else stored


def inputs_of(problem: Problem, seed: int) -> Inputs:
    """The inputs of a problem by the names that launches know, each as it lies in memory.

    Parameters
    ----------
    problem : Problem
    seed : int
        Another one gives other values, and other kinds of slices their turn.
    """
    random = np.random.default_rng((seed, 1))
    if problem.op == "batch_norm_gather_stats":
        return _gathered(problem, random)
    found: Inputs = {"x": _in_memory(problem, _hostile(problem, seed))}
    if "backward" in problem.op:
        shape = (problem.N, problem.C, problem.HxW)
        found["dy"] = _in_memory(problem, _slices(problem, seed + 1000).reshape(shape))
    for name in ("gamma", "beta"):
        if getattr(problem, f"{name}_dtype") is not None:
            found[name] = random.standard_normal(problem.C).astype(DTYPES[array_facts(problem, name)[1]])
    # Statistics of x as it is stored, rounded as a forward would have saved them.
    stored = _channels_second(problem, found["x"])
    for name, values in zip(("mean", "rstd"), _moments(problem, stored), strict=True):
        saved = values.astype(DTYPES[problem.stats_dtype])
        found["invstd" if name == "rstd" and problem.op.startswith("batch_norm") else name] = saved
    if problem.op == "batch_norm_backward_elemt":
        count = numbers_of(problem)["count"]
        for name in ("sum_dy", "sum_dy_xmu"):
            found[name] = (count * random.standard_normal(problem.C)).astype(DTYPES[array_facts(problem, name)[1]])
    return {name: values for name, values in found.items() if name not in problem.outputs}


def _gathered(problem: Problem, random: np.random.Generator) -> Inputs:
    shape, dtype = (problem.N, problem.C), DTYPES[problem.dtype]
    counts = random.integers(1, 1000, problem.N).astype(array_facts(problem, "counts")[1])
    found = {
        "means": (random.standard_normal(shape) + OFFSET).astype(dtype),
        "invstds": (0.1 + random.random(shape)).astype(dtype),
        "counts": counts,
    }
    if problem.N > 1:
        counts[1], found["means"][1] = 0, np.nan  # a rank that is absent, whatever it holds
    for name in ("running_mean", "running_var"):  # which are read and written
        found[name] = random.random(problem.C).astype(DTYPES[array_facts(problem, name)[1]])
    return found


# ---- the oracle -----------------------------------------------------------------------------------------------------


def _channels_second(problem: Problem, values: Values) -> Values:
    """(N, C, HxW) from an array as it lies in memory."""
    if problem.layout == "NHWC":
        return np.moveaxis(values.reshape(problem.N, problem.HxW, problem.C), -1, 1)
    return values.reshape(problem.N, problem.C, problem.HxW)


def _looked_at(problem: Problem) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The groups that the oracle looks at, evenly spread, first and last among them; and their channels."""
    most = WHOLE // max(1, problem.N * problem.group_length)
    count = min(problem.group, max(1, most))
    groups = np.unique(np.linspace(0, problem.group - 1, count).round().astype(np.intp))
    if count == 1:
        groups = np.array([problem.group - 1])
    inside = np.arange(problem.group_channels)
    return groups, (groups[:, None] * problem.group_channels + inside).reshape(-1)


def _layer(problem: Problem, given: Inputs, dtype: str) -> Iterator[tuple[str, tuple[int, ...], Any, Values, Values]]:
    rows, length = problem.N, problem.C
    x, gamma = given["x"].reshape(rows, length), given.get("gamma")
    shapes: tuple[tuple[int, ...], ...]
    if problem.op == "layer_norm":
        exact = reference.layer_norm(x, length, gamma, given.get("beta"), eps=EPS)
        bounds = tolerance.layer_forward(x, length, gamma, given.get("beta"), *exact[1:], dtype)
        names, shapes = ("y", "mean", "rstd"), ((rows, length), (rows, 1), (rows, 1))
    else:
        arrays = (given["dy"].reshape(rows, length), x, length, given["mean"], given["rstd"], gamma)
        exact, bounds = reference.layer_norm_backward(*arrays), tolerance.layer_backward(*arrays, dtype)
        names, shapes = ("dx", "dgamma", "dbeta"), ((rows, length), (length,), (length,))
    yield from zip(names, shapes, [()] * len(names), exact, bounds, strict=True)


def _group(problem: Problem, given: Inputs, dtype: str) -> Iterator[tuple[str, tuple[int, ...], Any, Values, Values]]:
    groups, channels = _looked_at(problem)
    whole, statistics = (problem.N, problem.C, problem.HxW), (problem.N, problem.group)
    x = _channels_second(problem, given["x"])[:, channels]
    gamma, beta = (given[name][channels] if name in given else None for name in ("gamma", "beta"))
    of_tensor, of_groups, of_channels = (slice(None), channels), (slice(None), groups), (channels,)
    if problem.op == "group_norm":
        exact = reference.group_norm(x, len(groups), gamma, beta, eps=EPS)
        bounds = tolerance.forward(x, len(groups), gamma, beta, *exact[1:], dtype, "NCHW")
        yield "y", whole, of_tensor, exact[0], bounds[0]
        for index, name in ((1, "mean"), (2, "rstd")):
            yield name, statistics, of_groups, exact[index], bounds[index]
        return
    dy = _channels_second(problem, given["dy"])[:, channels]
    mean, rstd = (given[name].reshape(statistics)[:, groups] for name in ("mean", "rstd"))
    exact = reference.group_norm_backward(dy, x, mean, rstd, gamma, num_groups=len(groups))
    bounds = tolerance.backward(dy, x, mean, rstd, gamma, len(groups), dtype, "NCHW")
    yield "dx", whole, of_tensor, exact[0], bounds[0]
    for index, name in ((1, "dgamma"), (2, "dbeta")):
        yield name, (problem.C,), of_channels, exact[index], bounds[index]


def _batch(problem: Problem, given: Inputs, dtype: str) -> Iterator[tuple[str, tuple[int, ...], Any, Values, Values]]:
    _, channels = _looked_at(problem)
    whole, part = (problem.N, problem.C, problem.HxW), (slice(None), channels)
    tensors = {name: _channels_second(problem, given[name])[part] for name in ("dy", "x") if name in given}
    one = {name: values[channels] for name, values in given.items() if name not in tensors}
    x, gamma = tensors["x"], one.get("gamma")
    if problem.op == "batch_norm_stats":
        mean, invstd = reference.batch_norm_stats(x, eps=EPS)
        exact: Any = mean, invstd
        bounds: Any = tolerance.batch_stats(x, mean, invstd, dtype)
        names: tuple[str, ...] = ("mean", "invstd")
    elif problem.op == "batch_norm_elemt":
        five = (x, one["mean"], one["invstd"], gamma, one.get("beta"))
        yield "y", whole, part, reference.batch_norm_elemt(*five), tolerance.batch_elemt(*five, dtype)
        return
    elif problem.op == "batch_norm_backward_elemt":
        seven = (tensors["dy"], x, one["mean"], one["invstd"], gamma, one["sum_dy"], one["sum_dy_xmu"])
        count = numbers_of(problem)["count"]
        exact = reference.batch_norm_backward_elemt(*seven, count)
        yield "dx", whole, part, exact, tolerance.batch_input(*seven, count, dtype)
        return
    else:
        four = (tensors["dy"], x, one["mean"], one["invstd"])
        exact, bounds = reference.batch_norm_backward_reduce(*four), tolerance.batch_reduce(*four, dtype)
        names = ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")
    for name, value, bound in zip(names, exact, bounds, strict=True):
        yield name, (problem.C,), (channels,), value, bound


def _gather(problem: Problem, given: Inputs, _: str) -> Iterator[tuple[str, tuple[int, ...], Any, Values, Values]]:
    running = {name: given[name].astype(np.float64) for name in ("running_mean", "running_var")}
    exact = reference.batch_norm_gather_stats(
        given["means"], given["invstds"], given["counts"], eps=EPS, momentum=MOMENTUM, **running
    )
    for name, value in zip(("mean", "invstd", "running_mean", "running_var"), exact, strict=True):
        assert value is not None
        yield name, (problem.C,), (), value, 1e-13 * np.abs(value) + 1e-13  # sums in float64 whatever the dtype


def expected(problem: Problem, given: Inputs) -> list[Expected]:
    """What the results of a problem have to be; of a large one of GroupNorm or BatchNorm, for some of its groups.

    Whole groups and whole channels: no result of theirs depends on another group.

    Parameters
    ----------
    problem : Problem
    given : dict of str to ndarray
        From `inputs_of`.
    """
    by_op: dict[str, Callable[..., Any]] = {"layer": _layer, "group": _group, "batch": _batch}
    oracle = _gather if problem.op == "batch_norm_gather_stats" else by_op[problem.op.split("_")[0]]
    found = []
    for name, shape, part, exact, bound in oracle(problem, given, problem.dtype):
        if name in problem.outputs:
            moved = problem.layout == "NHWC" and len(shape) == 3
            dtype = array_facts(problem, name)[1]
            found.append(Expected(name, shape, part, np.asarray(exact), np.asarray(bound), dtype, moved))
    return found
