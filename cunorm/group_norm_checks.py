"""The checks of GroupNorm: from the arguments of a call to its plan and its results, or to a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import settings
from .arrays import (
    DTYPES,
    Array,
    choice,
    dtype_name,
    integer,
    kind_of,
    mask,
    one_dtype,
    place_of,
    same_place,
    shape_of,
    sized,
)
from .call import Call
from .devices import known
from .group_norm_strategies import BACKWARD, FORWARD
from .launch import Place, Plan, executor, plan_for
from .problem import LAYOUTS, Problem, accumulator
from .results import Result, memory_order
from .strategy import Strategy, Tile

__all__ = ["BACKWARD_NAMES", "FORWARD_NAMES", "GRADIENTS", "check_backward", "check_forward", "place_for", "sizes"]

FORWARD_NAMES = ("x", "gamma", "beta", "y", "mean", "rstd", "workspace", "eps")
BACKWARD_NAMES = ("dy", "x", "mean", "rstd", "gamma", "beta", "dx", "dgamma", "dbeta", "workspace")
GRADIENTS = ("dx", "dgamma", "dbeta")
NAN = float("nan")
#: Sizes and byte counts pass to kernels in 64 bits.
MOST_ELEMENTS = 2**60


def place_for(kind: str, ordinal: int) -> Place:
    """The place of arrays of that kind."""
    if kind == "cpu":
        return Place("cpu", 0, known(settings.cpu_device()))
    return Place("gpu", ordinal, executor("gpu").limits(ordinal))


def sizes(
    shape: tuple[int, ...], num_groups: object, data_format: object, activation: object
) -> tuple[int, int, int, int]:
    """The checks that calls and plans share -> N, C, HxW, groups."""
    choice("data_format", data_format, LAYOUTS)
    if activation is not None:
        raise ValueError(f"activation: {activation!r}, expected None: no fused activation exists in this version")
    if not 2 <= len(shape) <= 8:
        raise ValueError(f"x: shape {shape}, expected 2 to 8 dimensions")
    groups = integer("num_groups", num_groups)
    channel_axis = 1 if data_format == "NCHW" else len(shape) - 1
    N, C = shape[0], shape[channel_axis]
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"shape: {shape}, expected at most 2**60 elements")
    if C % groups:
        raise ValueError(f"num_groups: {groups}, expected a divisor of the {C} channels of x with shape {shape}")
    return N, C, math.prod(shape[1:channel_axis] + shape[channel_axis + 1 :]), groups


def _check_parameter(name: str, array: Array | None, C: int, dtype: str) -> str | None:
    if array is None:
        return None
    found = dtype_name(name, array, (dtype, accumulator(dtype)), f" for {dtype} x")
    shape_of(name, array, (C,), ", one element a channel")
    return found


def _direct_layout(x: Array, data_format: str) -> str:
    """The memory order in which x can be read where it lies; its own logical order where it has to be copied."""
    for layout in (data_format, *LAYOUTS):
        if x.transpose(memory_order(x.ndim, data_format, layout)).flags.c_contiguous:
            return layout
    return data_format


def _check_out(out: object, results: Sequence[Result | None], names: Sequence[str]) -> None:
    if out is None:
        return
    if not isinstance(out, tuple) or len(out) != len(results):
        raise TypeError(f"out: {type(out).__name__}, expected a tuple of {', '.join(names)} (None: allocate)")
    for result, array in zip(results, out, strict=True):
        if result is not None and array is not None:
            result.check(array)


def _as_tile(tile: object) -> Tile | None:
    return None if tile is None else Tile.of(tile)  # type: ignore[arg-type]


def _plan_of(
    problem: Problem,
    strategies: Mapping[str, Strategy],
    names: tuple[str, ...],
    x: Array,
    tile: object,
    plan: Plan | None,
) -> Plan:
    """The plan of a problem; where a plan was made before, that one, if the arrays are of its problem and place."""
    kind, ordinal = place_of(x)
    if plan is None:
        return plan_for(problem, strategies, names, place_for(kind, ordinal), _as_tile(tile))
    if (kind, ordinal) != (plan.place.kind, plan.place.ordinal):
        raise ValueError(f"x: on {kind} {ordinal}, but the plan is for {plan.place.kind} {plan.place.ordinal}")
    # A plan that was made without saying what gamma and beta are takes what comes, and any statistics that the op
    # takes: none of them changes the tile.
    loose = {
        name: getattr(problem, name) for name in ("gamma_dtype", "beta_dtype") if getattr(plan.problem, name) is None
    }
    expected = replace(plan.problem, stats_dtype=problem.stats_dtype, **loose)
    if problem.canonical() != expected:
        raise ValueError(f"x: the plan is for {expected.describe()}, the arrays are {problem.canonical().describe()}")
    return plan if expected == plan.problem else plan_for(expected, strategies, names, plan.place, plan.tile)


def _named_out(names: Sequence[str], out: object) -> list[tuple[str, Array]]:
    return list(zip((f"out[{name}]" for name in names), out, strict=False)) if isinstance(out, tuple) else []


def check_forward(
    x: Array,
    num_groups: object,
    gamma: Array | None,
    beta: Array | None,
    data_format: str,
    activation: object,
    out: Any,
    tile: object,
    plan: Plan | None = None,
    workspace: Any = None,
) -> Call:
    """The checked call of these arguments; ``plan`` if it has to be of that plan."""
    names = ("y", "mean", "rstd")
    kind_of("x", x)
    same_place([("x", x), ("gamma", gamma), ("beta", beta), *_named_out(names, out)])
    dtype = dtype_name("x", x)
    N, C, HxW, groups = sizes(x.shape, num_groups, data_format, activation)
    gamma_dtype, beta_dtype = _check_parameter("gamma", gamma, C, dtype), _check_parameter("beta", beta, C, dtype)
    sums = accumulator(dtype)
    layout = _direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    results = (
        Result("y", x.shape, x.dtype, axes),
        Result("mean", (N, groups), DTYPES[sums], (0, 1), NAN),
        Result("rstd", (N, groups), DTYPES[sums], (0, 1), NAN),
    )
    _check_out(out, results, names)
    problem = Problem("group_norm", dtype, gamma_dtype, beta_dtype, sums, layout, N, C, HxW, groups, names)
    plan = _plan_of(problem, FORWARD, FORWARD_NAMES, x, tile, plan)
    return Call(
        plan, [("x", x, axes), ("gamma", gamma, (0,)), ("beta", beta, (0,))], results, out, ("y", "x"), workspace
    )


def check_backward(
    arrays: tuple[Array, Array, Array, Array, Array | None, Array | None],
    num_groups: object,
    output_mask: object,
    data_format: str,
    activation: object,
    out: Any,
    tile: object,
    plan: Plan | None = None,
    workspace: Any = None,
) -> Call:
    """The checked call of these arguments; ``plan`` if it has to be of that plan."""
    dy, x, mean, rstd, gamma, beta = arrays
    given = [("dy", dy), ("x", x), ("mean", mean), ("rstd", rstd), ("gamma", gamma), ("beta", beta)]
    for name, array in given[:4]:
        kind_of(name, array)
    same_place([("x", x), *given, *_named_out(GRADIENTS, out)])
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", x)
    N, C, HxW, groups = sizes(x.shape, num_groups, data_format, activation)
    one_dtype(("x", x), ("dy", dy))
    shape_of("dy", dy, x.shape, ", the shape of x")
    sums = accumulator(dtype)
    stats_dtype = dtype_name("mean", mean, (sums, dtype), f" for {dtype} x")
    one_dtype(("mean", mean), ("rstd", rstd))
    for name, array in given[2:4]:
        sized(name, array, N * groups, f"({N}, {groups}), or any shape of {N * groups} elements")
    gamma_dtype = _check_parameter("gamma", gamma, C, dtype)
    _check_parameter("beta", beta, C, dtype)
    layout = _direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    parameter = DTYPES[gamma_dtype or stats_dtype]
    results = [
        Result("dx", x.shape, x.dtype, axes) if wanted[0] else None,
        Result("dgamma", (C,), parameter, (0,)) if wanted[1] else None,
        Result("dbeta", (C,), parameter, (0,)) if wanted[2] else None,
    ]
    _check_out(out, results, GRADIENTS)
    outputs = tuple(name for name, flag in zip(GRADIENTS, wanted, strict=True) if flag)
    problem = Problem("group_norm_backward", dtype, gamma_dtype, None, stats_dtype, layout, N, C, HxW, groups, outputs)
    plan = _plan_of(problem, BACKWARD, BACKWARD_NAMES, x, tile, plan)
    orders = [axes, axes, tuple(range(mean.ndim)), tuple(range(rstd.ndim)), (0,), (0,)]
    inputs = [(name, array, order) for (name, array), order in zip(given, orders, strict=True)]
    return Call(plan, inputs, results, out, ("dx", "dy"), workspace)
