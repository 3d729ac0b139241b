"""GroupNorm's two ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cunorm.core.arrays import choice, dtype_name, epsilon, integer, mask
from cunorm.core.opspec import Exact, Number
from cunorm.core.problem import ACTIVATIONS, LAYOUTS, Problem, accumulator, laid_out
from cunorm.ops.common.array_specs import BETA, FLAGS, FORWARD_RESULTS, GAMMA, GRADIENT_INPUTS, GRADIENT_RESULTS, X
from cunorm.runtime.checks import (
    GRADIENTS,
    NAN,
    OutputSpec,
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
)
from cunorm.runtime.op import Checked, Op, Request

from .strategies import BACKWARD, FORWARD


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


def _check_forward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    x, gamma, beta = arrays
    num_groups, data_format, activation = options
    dtype = dtype_name("x", x)
    N, C, HxW, groups = _sizes(x.shape, num_groups, data_format, activation)
    gamma_dtype, beta_dtype = parameter("gamma", gamma, (C,), dtype), parameter("beta", beta, (C,), dtype)
    sums = accumulator(dtype)
    layout = direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    results = (
        OutputSpec("y", x.shape, x.dtype, axes),
        vector("mean", (N, groups), sums, NAN),
        vector("rstd", (N, groups), sums, NAN),
    )
    sizes = (layout, N, C, HxW, groups)
    outputs = ("y", "mean", "rstd")
    problem = Problem(
        op="group_norm",
        dtype=dtype,
        gamma_dtype=gamma_dtype,
        beta_dtype=beta_dtype,
        stats_dtype=sums,
        **laid_out(*sizes),
        outputs=outputs,
        activation=activation,
    )
    return Checked(problem, (axes, (0,), (0,)), results)


def _check_backward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    dy, x, mean, rstd, gamma, beta = arrays
    num_groups, output_mask, data_format, activation = options
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", x)
    N, C, HxW, groups = _sizes(x.shape, num_groups, data_format, activation)
    like("dy", dy, x)
    expected = f"({N}, {groups}), or any shape of {N * groups} elements"
    stats_dtype = statistics(("mean", mean), ("rstd", rstd), dtype, N * groups, expected)
    gamma_dtype = parameter("gamma", gamma, (C,), dtype)
    beta_dtype = parameter("beta", beta, (C,), dtype)  # checked but not read without an activation
    layout = direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    results = gradients(x, axes, (C,), gamma_dtype or stats_dtype, wanted)
    outputs = chosen(GRADIENTS, wanted)
    sizes = (layout, N, C, HxW, groups)
    problem = Problem(
        op="group_norm_backward",
        dtype=dtype,
        gamma_dtype=gamma_dtype,
        beta_dtype=None,
        stats_dtype=stats_dtype,
        **laid_out(*sizes),
        outputs=outputs,
    )
    if activation is not None:
        problem = replace(problem, beta_dtype=beta_dtype, activation=activation)
    return Checked(problem, (axes, axes, tuple(range(mean.ndim)), tuple(range(rstd.ndim)), (0,), (0,)), results)


def _request_forward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = _sizes(asked.shape, asked.num_groups, asked.data_format, asked.activation)
    gamma, beta = (parameter_named(name, getattr(asked, name), asked.dtype) for name in ("gamma_dtype", "beta_dtype"))
    sums = accumulator(asked.dtype)
    outputs = ("y", "mean", "rstd")
    facts = laid_out(asked.data_format, *sizes)
    problem = Problem(
        op="group_norm",
        dtype=asked.dtype,
        gamma_dtype=gamma,
        beta_dtype=beta,
        stats_dtype=sums,
        **facts,
        outputs=outputs,
        activation=asked.activation,
    )
    return problem, (asked.num_groups, asked.data_format, asked.activation)


def _request_backward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = _sizes(asked.shape, asked.num_groups, asked.data_format, asked.activation)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    beta = parameter_named("beta_dtype", asked.beta_dtype, asked.dtype)
    wanted = mask("output_mask", asked.output_mask, GRADIENTS)
    outputs = chosen(GRADIENTS, wanted)
    sums = accumulator(asked.dtype)
    facts = laid_out(asked.data_format, *sizes)
    problem = Problem(
        op="group_norm_backward",
        dtype=asked.dtype,
        gamma_dtype=gamma,
        beta_dtype=beta if asked.activation else None,
        stats_dtype=sums,
        **facts,
        outputs=outputs,
        activation=asked.activation,
    )
    return problem, (asked.num_groups, asked.output_mask, asked.data_format, asked.activation)


def _oracle(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterable[Exact]:
    from . import oracle  # imported late: no call needs it

    return oracle.expected(problem, given, numbers)


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
    holds_parameters=True,
    oracle=_oracle,
    strategies=FORWARD,
    check=_check_forward,
    request=_request_forward,
    in_place={"y": "x"},
    options=("num_groups", "gamma_dtype", "beta_dtype", "data_format", "activation"),
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
    oracle=_oracle,
    strategies=BACKWARD,
    check=_check_backward,
    request=_request_backward,
    in_place={"dx": "dy"},
    options=("num_groups", "gamma_dtype", "beta_dtype", "data_format", "activation"),
)
