"""InstanceNorm's two ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cunorm.core.arrays import dtype_name, epsilon, mask
from cunorm.core.opspec import Exact, Number
from cunorm.core.problem import LAYOUTS, Problem, accumulator, laid_out
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


def _problem(
    op: str,
    dtype: str,
    gamma_dtype: str | None,
    beta_dtype: str | None,
    stats_dtype: str,
    layout: str,
    sizes: tuple[int, int, int],
    outputs: tuple[str, ...],
) -> Problem:
    """Problem with one channel per group. Without channels it has one group, so that a group has a size."""
    N, C, HxW = sizes
    return Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=gamma_dtype,
        beta_dtype=beta_dtype,
        stats_dtype=stats_dtype,
        **laid_out(layout, N, C, HxW, C or 1),
        outputs=outputs,
    )


def _check_forward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    x, gamma, beta = arrays
    (data_format,) = options
    dtype = dtype_name("x", x)
    N, C, HxW = split_axes(x.shape, data_format)
    gamma_dtype, beta_dtype = (parameter(name, one, (C,), dtype) for name, one in (("gamma", gamma), ("beta", beta)))
    sums = accumulator(dtype)
    layout = direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    saved = (vector("mean", (N, C), sums, NAN), vector("rstd", (N, C), sums, NAN))
    outputs = ("y", "mean", "rstd")
    problem = _problem("instance_norm", dtype, gamma_dtype, beta_dtype, sums, layout, (N, C, HxW), outputs)
    return Checked(problem, (axes, (0,), (0,)), (OutputSpec("y", x.shape, x.dtype, axes), *saved))


def _check_backward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    dy, x, mean, rstd, gamma = arrays
    output_mask, data_format = options
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", x)
    N, C, HxW = split_axes(x.shape, data_format)
    like("dy", dy, x)
    expected = f"({N}, {C}), or any shape of {N * C} elements"
    stats_dtype = statistics(("mean", mean), ("rstd", rstd), dtype, N * C, expected)
    gamma_dtype = parameter("gamma", gamma, (C,), dtype)
    layout = direct_layout(x, data_format)
    axes = memory_order(x.ndim, data_format, layout)
    results = gradients(x, axes, (C,), gamma_dtype or stats_dtype, wanted)
    outputs = chosen(GRADIENTS, wanted)
    problem = _problem("instance_norm_backward", dtype, gamma_dtype, None, stats_dtype, layout, (N, C, HxW), outputs)
    return Checked(problem, (axes, axes, tuple(range(mean.ndim)), tuple(range(rstd.ndim)), (0,)), results)


def _request_forward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = split_axes(asked.shape, asked.data_format)
    gamma, beta = (parameter_named(name, getattr(asked, name), asked.dtype) for name in ("gamma_dtype", "beta_dtype"))
    sums, outputs = accumulator(asked.dtype), ("y", "mean", "rstd")
    problem = _problem("instance_norm", asked.dtype, gamma, beta, sums, asked.data_format, sizes, outputs)
    return problem, (asked.data_format,)


def _request_backward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = split_axes(asked.shape, asked.data_format)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    outputs = chosen(GRADIENTS, mask("output_mask", asked.output_mask, GRADIENTS))
    sums = accumulator(asked.dtype)
    problem = _problem("instance_norm_backward", asked.dtype, gamma, None, sums, asked.data_format, sizes, outputs)
    return problem, (asked.output_mask, asked.data_format)


def _oracle(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterable[Exact]:
    from . import oracle  # imported late: no call needs it

    return oracle.expected(problem, given, numbers)


_FAMILY = "instance_norm"
_SIZES = {"N": "N", "C": "C", "HxW": "HxW"}

INSTANCE_NORM = Op(
    name="instance_norm",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={"x": X, "gamma": GAMMA, "beta": BETA},
    results=FORWARD_RESULTS,
    optional=("gamma", "beta"),
    numbers={"eps": Number(1e-5, epsilon)},
    layouts=LAYOUTS,
    group_per_channel=True,
    holds_parameters=True,
    oracle=_oracle,
    strategies=FORWARD,
    check=_check_forward,
    request=_request_forward,
    in_place=("y", "x"),
    options=("gamma_dtype", "beta_dtype", "data_format"),
)
INSTANCE_NORM_BACKWARD = Op(
    name="instance_norm_backward",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=GRADIENT_INPUTS,
    results=GRADIENT_RESULTS,
    optional=("gamma",),
    layouts=LAYOUTS,
    flags=FLAGS,
    group_per_channel=True,
    holds_parameters=True,
    oracle=_oracle,
    strategies=BACKWARD,
    check=_check_backward,
    request=_request_backward,
    in_place=("dx", "dy"),
    options=("gamma_dtype", "data_format"),
)
