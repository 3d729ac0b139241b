"""GroupNorm's two ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cunorm.core.arrays import choice, dtype_name, epsilon, integer, mask
from cunorm.core.opspec import Number, oracle_of
from cunorm.core.problem import ACTIVATIONS, LAYOUTS, Problem, accumulator, laid_out
from cunorm.ops.common.array_specs import (
    BETA,
    FLAGS,
    FORWARD_RESULTS,
    GAMMA,
    GRADIENT_INPUTS,
    GRADIENT_RESULTS,
    Y_TYPES,
    X,
)
from cunorm.runtime.checks import (
    GRADIENTS,
    NAN,
    chosen,
    direct_layout,
    gradients,
    like,
    memory_order,
    parameter,
    parameter_named,
    split_axes,
    statistics,
    vector,
    y_of,
    y_types,
)
from cunorm.runtime.op import Checked, Op, Request

from .strategies import BACKWARD, FORWARD

#: The results of a forward.
OUTPUTS = ("y", "mean", "rstd")


def _sizes(
    shape: tuple[int, ...], num_groups: object, data_format: object, activation: object
) -> tuple[int, int, int, int]:
    """Run the checks that calls and plans share, and return N, C, HxW and groups."""
    N, C, HxW = split_axes(shape, data_format)
    choice("activation", activation, (None, *ACTIVATIONS))
    groups = integer("num_groups", num_groups)
    if C % groups:
        raise ValueError(f"num_groups: {groups}, expected a divisor of the {C} channels of x with shape {shape}")
    return N, C, HxW, groups


def group_problem(
    op: str,
    dtype: str,
    parameters: tuple[str | None, str | None],
    stats_dtype: str,
    layout: str,
    sizes: tuple[int, int, int, int],
    outputs: tuple[str, ...],
    **facts: Any,
) -> Problem:
    """Problem with N, C, HxW and groups in ``sizes``. ``parameters`` are the dtypes of gamma and beta."""
    return Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=parameters[0],
        beta_dtype=parameters[1],
        stats_dtype=stats_dtype,
        **laid_out(layout, *sizes),
        outputs=outputs,
        **facts,
    )


def checked_forward(
    op: str,
    dtype: str,
    arrays: tuple[Any, ...],
    data_format: str,
    sizes: tuple[int, int, int, int],
    saved: tuple[int, int],
    y_dtype: object,
    activation: str | None = None,
) -> Checked:
    """Check gamma, beta and y_dtype of a forward. ``saved`` is the shape of the statistics."""
    x, gamma, beta = arrays
    shape = (sizes[1],)
    parameters = parameter("gamma", gamma, shape, dtype), parameter("beta", beta, shape, dtype)
    sums, layout = accumulator(dtype), direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    types = y_types(y_dtype, dtype)
    results = (
        y_of(x, axes, types),
        vector("mean", saved, sums, NAN),
        vector("rstd", saved, sums, NAN),
    )
    problem = group_problem(op, dtype, parameters, sums, layout, sizes, OUTPUTS, others=types, activation=activation)
    return Checked(problem, (axes, (0,), (0,)), results)


def checked_backward(
    op: str,
    dtype: str,
    arrays: tuple[Any, ...],
    wanted: Sequence[bool],
    data_format: str,
    sizes: tuple[int, int, int, int],
    saved: tuple[int, int],
) -> Checked:
    """Check dy, the statistics and gamma of a backward without an activation."""
    dy, x, mean, rstd, gamma = arrays
    shape = (sizes[1],)
    like("dy", dy, x)
    count = math.prod(saved)
    stats_dtype = statistics(("mean", mean), ("rstd", rstd), dtype, count, f"{saved}, or any shape of {count} elements")
    gamma_dtype = parameter("gamma", gamma, shape, dtype)
    layout = direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    results = gradients(x, axes, shape, gamma_dtype or stats_dtype, wanted)
    problem = group_problem(op, dtype, (gamma_dtype, None), stats_dtype, layout, sizes, chosen(GRADIENTS, wanted))
    return Checked(problem, (axes, axes, tuple(range(mean.ndim)), tuple(range(rstd.ndim)), (0,)), results)


def _check_forward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    num_groups, data_format, activation, y_dtype = options
    dtype = dtype_name("x", arrays[0])
    sizes = _sizes(arrays[0].shape, num_groups, data_format, activation)
    return checked_forward("group_norm", dtype, arrays, data_format, sizes, (sizes[0], sizes[3]), y_dtype, activation)


def _check_backward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    *five, beta = arrays
    num_groups, output_mask, data_format, activation = options
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", arrays[1])
    sizes = _sizes(arrays[1].shape, num_groups, data_format, activation)
    made = checked_backward("group_norm_backward", dtype, tuple(five), wanted, data_format, sizes, (sizes[0], sizes[3]))
    beta_dtype = parameter("beta", beta, (sizes[1],), dtype)  # checked but not read without an activation
    problem = made.problem
    if activation is not None:
        problem = replace(problem, beta_dtype=beta_dtype, activation=activation)
    return Checked(problem, (*made.orders, (0,)), made.results)


def parameters_asked(asked: Request) -> tuple[str | None, str | None]:
    """The dtypes of gamma and beta of a request."""
    gamma, beta = (parameter_named(name, getattr(asked, name), asked.dtype) for name in ("gamma_dtype", "beta_dtype"))
    return gamma, beta


def _request_forward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = _sizes(asked.shape, asked.num_groups, asked.data_format, asked.activation)
    types = y_types(asked.y_dtype, asked.dtype)
    facts = (parameters_asked(asked), accumulator(asked.dtype), asked.data_format, sizes, OUTPUTS)
    options = (asked.num_groups, asked.data_format, asked.activation, asked.y_dtype)
    return group_problem("group_norm", asked.dtype, *facts, others=types, activation=asked.activation), options


def _request_backward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = _sizes(asked.shape, asked.num_groups, asked.data_format, asked.activation)
    gamma, beta = parameters_asked(asked)
    outputs = chosen(GRADIENTS, mask("output_mask", asked.output_mask, GRADIENTS))
    parameters = (gamma, beta if asked.activation else None)
    facts = (parameters, accumulator(asked.dtype), asked.data_format, sizes, outputs)
    options = (asked.num_groups, asked.output_mask, asked.data_format, asked.activation)
    return group_problem("group_norm_backward", asked.dtype, *facts, activation=asked.activation), options


_FAMILY = "group_norm"
_SIZES = {"N": "N", "C": "C", "HxW": "HxW", "group": "group"}

GROUP_NORM = Op(
    name="group_norm",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={"x": X, "gamma": GAMMA, "beta": BETA},
    results=FORWARD_RESULTS,
    optional=("gamma", "beta"),
    numbers={"eps": Number(1e-5, epsilon)},
    layouts=LAYOUTS,
    activations=ACTIVATIONS,
    types=Y_TYPES,
    optional_types=tuple(Y_TYPES),
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=FORWARD,
    check=_check_forward,
    request=_request_forward,
    in_place={"y": "x"},
    options=("num_groups", "gamma_dtype", "beta_dtype", "data_format", "activation", "y_dtype"),
)
GROUP_NORM_BACKWARD = Op(
    name="group_norm_backward",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={**GRADIENT_INPUTS, "beta": BETA},
    results=GRADIENT_RESULTS,
    optional=("gamma", "beta"),
    layouts=LAYOUTS,
    activations=ACTIVATIONS,
    flags=FLAGS,
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=BACKWARD,
    check=_check_backward,
    request=_request_backward,
    in_place={"dx": "dy"},
    options=("num_groups", "gamma_dtype", "beta_dtype", "data_format", "activation"),
)
