"""LayerNorm's two ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cunorm.core.arrays import dtype_name, epsilon, integer, mask
from cunorm.core.opspec import Exact, Number
from cunorm.core.problem import LAYOUTS, Problem, accumulator, laid_out
from cunorm.ops.common.array_specs import (
    BETA,
    FLAGS,
    FORWARD_RESULTS,
    GAMMA,
    GRADIENT_INPUTS,
    GRADIENT_RESULTS,
    X,
    of_rows,
)
from cunorm.runtime.checks import (
    GRADIENTS,
    NAN,
    OutputSpec,
    check_rank,
    check_size,
    chosen,
    gradients,
    like,
    parameter,
    parameter_named,
    statistics,
    vector,
)
from cunorm.runtime.op import Checked, Op, Request

from .strategies import BACKWARD, FORWARD


def _sizes(shape: tuple[int, ...], normalized_shape: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Run the checks that calls and plans share, and return the shape of the rows [A1..Ai] and of one row [R1..Rj]."""
    check_rank(shape, 1)
    check_size(shape)
    if isinstance(normalized_shape, Sequence) and not isinstance(normalized_shape, (str, bytes)):
        row = tuple(integer("normalized_shape", size, 0) for size in normalized_shape)
    else:
        row = (integer("normalized_shape", normalized_shape, 0),)
    if not row or 0 in row:
        raise ValueError(f"normalized_shape: {normalized_shape!r}, expected at least one size, and no size of 0")
    if shape[-len(row) :] != row:
        raise ValueError(f"normalized_shape: {row}, expected the last sizes of x with shape {shape}")
    return shape[: -len(row)], row


def _problem(
    op: str,
    dtype: str,
    gamma_dtype: str | None,
    beta_dtype: str | None,
    stats_dtype: str,
    outer: tuple[int, ...],
    row: tuple[int, ...],
    outputs: tuple[str, ...],
) -> Problem:
    """Problem in which a row is a sample with one group, and its elements are channels with one position."""
    sizes = ("NCHW", math.prod(outer), math.prod(row), 1, 1)
    return Problem(
        op=op,
        dtype=dtype,
        gamma_dtype=gamma_dtype,
        beta_dtype=beta_dtype,
        stats_dtype=stats_dtype,
        **laid_out(*sizes),
        outputs=outputs,
    )


def _axes(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def _check_forward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    x, gamma, beta = arrays
    dtype = dtype_name("x", x)
    outer, row = _sizes(x.shape, options[0])
    gamma_dtype, beta_dtype = (
        parameter(name, array, row, dtype, ", normalized_shape") for name, array in (("gamma", gamma), ("beta", beta))
    )
    sums = accumulator(dtype)
    saved = (*outer, *(1,) * len(row))
    results = (
        OutputSpec("y", x.shape, x.dtype, _axes(x.ndim)),
        vector("mean", saved, sums, NAN),
        vector("rstd", saved, sums, NAN),
    )
    problem = _problem("layer_norm", dtype, gamma_dtype, beta_dtype, sums, outer, row, ("y", "mean", "rstd"))
    return Checked(problem, (_axes(x.ndim), _axes(len(row)), _axes(len(row))), results)


def _check_backward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    dy, x, mean, rstd, gamma = arrays
    normalized_shape, output_mask = options
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", x)
    outer, row = _sizes(x.shape, normalized_shape)
    like("dy", dy, x)
    rows = math.prod(outer)
    expected = f"{(*outer, *(1,) * len(row))}, or any shape of {rows} elements"
    stats_dtype = statistics(("mean", mean), ("rstd", rstd), dtype, rows, expected)
    gamma_dtype = parameter("gamma", gamma, row, dtype, ", normalized_shape")
    results = gradients(x, _axes(x.ndim), row, gamma_dtype or stats_dtype, wanted)
    outputs = chosen(GRADIENTS, wanted)
    problem = _problem("layer_norm_backward", dtype, gamma_dtype, None, stats_dtype, outer, row, outputs)
    orders = [_axes(array.ndim) for array in (dy, x, mean, rstd)]
    return Checked(problem, (*orders, _axes(len(row))), results)


def _request_forward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    outer, row = _sizes(asked.shape, asked.normalized_shape)
    gamma, beta = (parameter_named(name, getattr(asked, name), asked.dtype) for name in ("gamma_dtype", "beta_dtype"))
    sums = accumulator(asked.dtype)
    problem = _problem("layer_norm", asked.dtype, gamma, beta, sums, outer, row, ("y", "mean", "rstd"))
    return problem, (asked.normalized_shape,)


def _request_backward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    outer, row = _sizes(asked.shape, asked.normalized_shape)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    wanted = mask("output_mask", asked.output_mask, GRADIENTS)
    outputs = chosen(GRADIENTS, wanted)
    sums = accumulator(asked.dtype)
    problem = _problem("layer_norm_backward", asked.dtype, gamma, None, sums, outer, row, outputs)
    return problem, (asked.normalized_shape, asked.output_mask)


def _oracle(problem: Problem, given: Mapping[str, Any], numbers: Mapping[str, float]) -> Iterable[Exact]:
    from . import oracle  # imported late: no call needs it

    return oracle.expected(problem, given, numbers)


_FAMILY = "layer_norm"
_SIZES = {"rows": "N", "length": "C"}

LAYER_NORM = Op(
    name="layer_norm",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=of_rows({"x": X, "gamma": GAMMA, "beta": BETA}),
    results=of_rows(FORWARD_RESULTS),
    optional=("gamma", "beta"),
    numbers={"eps": Number(1e-5, epsilon)},
    layouts=LAYOUTS[:1],
    holds_parameters=True,
    oracle=_oracle,
    strategies=FORWARD,
    check=_check_forward,
    request=_request_forward,
    in_place=("y", "x"),
    options=("normalized_shape", "gamma_dtype", "beta_dtype"),
)
LAYER_NORM_BACKWARD = Op(
    name="layer_norm_backward",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=of_rows(GRADIENT_INPUTS),
    results=of_rows(GRADIENT_RESULTS),
    optional=("gamma",),
    layouts=LAYOUTS[:1],
    flags=FLAGS,
    holds_parameters=True,
    oracle=_oracle,
    strategies=BACKWARD,
    check=_check_backward,
    request=_request_backward,
    in_place=("dx", "dy"),
    options=("normalized_shape", "gamma_dtype"),
)
