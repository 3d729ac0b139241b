"""What the float64 oracle says of a problem's inputs: what a candidate has to get right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm import reference
from cunorm.core import settings
from cunorm.core.problem import Problem
from cunorm.traffic.sampling import array_facts

from . import tolerance
from .inputs import EPS, MOMENTUM, Inputs, Values, channels_second, numbers_of

#: Elements of x up to which the oracle looks at all groups, channels or rows; of a larger problem, at some of them.
WHOLE = 2**24
BLOCKS = 8  # in which it is worked on where sums go over all of it, side by side


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

    def looked_at(self, came: Values) -> Values:
        """The part of a result, flat as it lies in memory, that the oracle looks at."""
        if self.moved:  # channels last in memory, the oracle has them second
            N, C, HxW = self.shape
            came = np.moveaxis(came.reshape(N, HxW, C), -1, 1)
        return came.reshape(self.shape)[self.part]  # type: ignore[no-any-return]

    def fault(self, came: Values) -> str | None:
        """What is wrong with a result, flat as it lies in memory; None if nothing is."""
        return tolerance.fault(self.name, self.looked_at(came), self.exact, self.bound, self.dtype)

    def off(self, came: Values) -> float:
        """The share of the largest exact value that a result, flat as it lies in memory, is off by; it may be NaN."""
        largest = float(np.max(np.abs(self.exact), initial=0.0))
        away = float(np.max(np.abs(self.looked_at(came).astype(np.float64) - self.exact), initial=0.0))
        return away / largest if largest else away


def _looked_at(problem: Problem) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The groups that the oracle looks at, evenly spread, first and last among them; and their channels."""
    most = WHOLE // max(1, problem.N * problem.group_length)
    count = min(problem.group, max(1, most))
    groups = np.unique(np.linspace(0, problem.group - 1, count).round().astype(np.intp))
    if count == 1:
        groups = np.array([problem.group - 1])
    inside = np.arange(problem.group_channels)
    return groups, (groups[:, None] * problem.group_channels + inside).reshape(-1)


def _rows_looked_at(problem: Problem) -> NDArray[np.intp]:
    """The rows whose y, dx, mean and rstd the oracle looks at, evenly spread, first and last among them."""
    count = min(problem.N, max(2, WHOLE // problem.C))
    return np.unique(np.linspace(0, problem.N - 1, count).round().astype(np.intp))


def _layer(problem: Problem, given: Inputs, dtype: str) -> Iterator[tuple[str, tuple[int, ...], Any, Values, Values]]:
    rows, length = problem.N, problem.C
    chosen, gamma = _rows_looked_at(problem), given.get("gamma")
    part, whole = (chosen,), (rows, length)
    x = given["x"].reshape(whole)
    if problem.op == "layer_norm":
        exact = reference.layer_norm(x[chosen], length, gamma, given.get("beta"), eps=EPS)
        bounds = tolerance.layer_forward(x[chosen], length, gamma, given.get("beta"), *exact[1:], dtype)
        shapes = (whole, (rows, 1), (rows, 1))
        yield from zip(("y", "mean", "rstd"), shapes, [part] * 3, exact, bounds, strict=True)
        return
    dy, mean, rstd = given["dy"].reshape(whole), given["mean"].reshape(rows), given["rstd"].reshape(rows)
    arrays = (dy[chosen], x[chosen], length, mean[chosen], rstd[chosen], gamma)
    exact, bounds = reference.layer_norm_backward(*arrays), tolerance.layer_backward(*arrays, dtype)
    yield "dx", whole, part, exact[0], bounds[0]
    if len(chosen) < rows:  # dgamma and dbeta are sums over all rows: block by block
        step = max(1, WHOLE // BLOCKS // length)

        def block(start: int) -> tuple[Any, Any]:
            part = slice(start, start + step)
            arrays = (dy[part], x[part], length, mean[part], rstd[part], gamma)
            return reference.layer_norm_backward(*arrays)[1:], tolerance.layer_backward(*arrays, dtype)[1:]

        sums = [[np.zeros(length), np.zeros(length)] for _ in range(2)]
        with ThreadPoolExecutor(min(BLOCKS, settings.cores())) as pool:  # NumPy lets go of the interpreter
            for found in pool.map(block, range(0, rows, step)):  # in the order of the blocks, whoever is first
                for kept, parameters in zip(sums, found, strict=True):
                    for total, values in zip(kept, parameters, strict=True):
                        total += values
        exact, bounds = (exact[0], sums[0][0], sums[0][1]), (bounds[0], sums[1][0], sums[1][1])
    for index, name in ((1, "dgamma"), (2, "dbeta")):
        yield name, (length,), (), exact[index], bounds[index]


def _group(problem: Problem, given: Inputs, dtype: str) -> Iterator[tuple[str, tuple[int, ...], Any, Values, Values]]:
    groups, channels = _looked_at(problem)
    whole, statistics = (problem.N, problem.C, problem.HxW), (problem.N, problem.group)
    x = channels_second(problem, given["x"])[:, channels]
    gamma, beta = (given[name][channels] if name in given else None for name in ("gamma", "beta"))
    of_tensor, of_groups, of_channels = (slice(None), channels), (slice(None), groups), (channels,)
    if problem.op == "group_norm":
        plain = problem.activation is None
        exact = reference.group_norm(x, len(groups), gamma, beta, eps=EPS, activation=problem.activation)
        bounded = tolerance.forward if plain else tolerance.silu_forward
        bounds = bounded(x, len(groups), gamma, beta, *exact[1:], dtype, "NCHW")
        yield "y", whole, of_tensor, exact[0], bounds[0]
        for index, name in ((1, "mean"), (2, "rstd")):
            yield name, statistics, of_groups, exact[index], bounds[index]
        return
    dy = channels_second(problem, given["dy"])[:, channels]
    mean, rstd = (given[name].reshape(statistics)[:, groups] for name in ("mean", "rstd"))
    options: dict[str, Any] = {"num_groups": len(groups), "beta": beta, "activation": problem.activation}
    exact = reference.group_norm_backward(dy, x, mean, rstd, gamma, **options)
    if problem.activation is None:
        bounds = tolerance.backward(dy, x, mean, rstd, gamma, len(groups), dtype, "NCHW")
    else:
        bounds = tolerance.silu_backward(dy, x, mean, rstd, gamma, beta, len(groups), dtype, "NCHW")
    yield "dx", whole, of_tensor, exact[0], bounds[0]
    for index, name in ((1, "dgamma"), (2, "dbeta")):
        yield name, (problem.C,), of_channels, exact[index], bounds[index]


def _batch(problem: Problem, given: Inputs, dtype: str) -> Iterator[tuple[str, tuple[int, ...], Any, Values, Values]]:
    _, channels = _looked_at(problem)
    whole, part = (problem.N, problem.C, problem.HxW), (slice(None), channels)
    tensors = {name: channels_second(problem, given[name])[part] for name in ("dy", "x") if name in given}
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
