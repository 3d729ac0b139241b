"""LayerNorm's two ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

import math
from typing import Any

from cunorm.core.arrays import dtype_name, epsilon, mask
from cunorm.core.opspec import Number, oracle_of
from cunorm.core.problem import LAYOUTS, Problem, accumulator
from cunorm.ops.common.array_specs import (
    BETA,
    DH,
    FLAGS,
    FORWARD_RESULTS,
    GAMMA,
    GRADIENT_INPUTS,
    GRADIENT_RESULTS,
    RESIDUAL,
    Y_TYPES,
    H,
    X,
    of_rows,
)
from cunorm.ops.common.row_checks import (
    axes_of,
    dh_asked,
    dh_given,
    residual_asked,
    residual_given,
    row_problem,
    row_sizes,
)
from cunorm.runtime.checks import (
    GRADIENTS,
    NAN,
    OutputSpec,
    chosen,
    gradients,
    like,
    parameter,
    parameter_named,
    statistics,
    vector,
    y_of,
    y_types,
)
from cunorm.runtime.op import Checked, Op, Request

from .strategies import BACKWARD, FORWARD


def _check_forward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    x, gamma, beta, residual = arrays
    dtype = dtype_name("x", x)
    normalized_shape, y_dtype = options
    outer, row = row_sizes(x.shape, normalized_shape)
    gamma_dtype, beta_dtype = (
        parameter(name, array, row, dtype, ", normalized_shape") for name, array in (("gamma", gamma), ("beta", beta))
    )
    extras = residual_given(residual, x)
    sums, axes, types = accumulator(dtype), axes_of(x), y_types(y_dtype, dtype)
    saved = (*outer, *(1,) * len(row))
    results = (
        y_of(x, axes, types),
        vector("mean", saved, sums, NAN),
        vector("rstd", saved, sums, NAN),
        OutputSpec("h", x.shape, x.dtype, axes) if extras else None,
    )
    problem = row_problem(
        outer,
        row,
        op="layer_norm",
        dtype=dtype,
        gamma_dtype=gamma_dtype,
        beta_dtype=beta_dtype,
        stats_dtype=sums,
        outputs=LAYER_NORM.results_with(extras),
        others=types,
        extras=extras,
    )
    return Checked(problem, [axes_of(array) for array in arrays], results)


def _check_backward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    dy, x, mean, rstd, gamma, dh = arrays
    normalized_shape, output_mask = options
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", x)
    outer, row = row_sizes(x.shape, normalized_shape)
    like("dy", dy, x)
    rows = math.prod(outer)
    expected = f"{(*outer, *(1,) * len(row))}, or any shape of {rows} elements"
    stats_dtype = statistics(("mean", mean), ("rstd", rstd), dtype, rows, expected)
    gamma_dtype = parameter("gamma", gamma, row, dtype, ", normalized_shape")
    results = gradients(x, axes_of(x), row, gamma_dtype or stats_dtype, wanted)
    outputs = chosen(GRADIENTS, wanted)
    problem = row_problem(
        outer,
        row,
        op="layer_norm_backward",
        dtype=dtype,
        gamma_dtype=gamma_dtype,
        beta_dtype=None,
        stats_dtype=stats_dtype,
        outputs=outputs,
        extras=dh_given(dh, x, outputs),
    )
    return Checked(problem, [axes_of(array) for array in arrays], results)


def _request_forward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    outer, row = row_sizes(asked.shape, asked.normalized_shape)
    gamma, beta = (parameter_named(name, getattr(asked, name), asked.dtype) for name in ("gamma_dtype", "beta_dtype"))
    extras = residual_asked(asked.residual)
    problem = row_problem(
        outer,
        row,
        op="layer_norm",
        dtype=asked.dtype,
        gamma_dtype=gamma,
        beta_dtype=beta,
        stats_dtype=accumulator(asked.dtype),
        outputs=LAYER_NORM.results_with(extras),
        others=y_types(asked.y_dtype, asked.dtype),
        extras=extras,
    )
    return problem, (asked.normalized_shape, asked.y_dtype)


def _request_backward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    outer, row = row_sizes(asked.shape, asked.normalized_shape)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    wanted = mask("output_mask", asked.output_mask, GRADIENTS)
    outputs = chosen(GRADIENTS, wanted)
    problem = row_problem(
        outer,
        row,
        op="layer_norm_backward",
        dtype=asked.dtype,
        gamma_dtype=gamma,
        beta_dtype=None,
        stats_dtype=accumulator(asked.dtype),
        outputs=outputs,
        extras=dh_asked(asked.dh, outputs),
    )
    return problem, (asked.normalized_shape, asked.output_mask)


_FAMILY = "layer_norm"
_SIZES = {"rows": "N", "length": "C"}

LAYER_NORM = Op(
    name="layer_norm",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=of_rows({"x": X, "gamma": GAMMA, "beta": BETA, **RESIDUAL}),
    results=of_rows({**FORWARD_RESULTS, **H}),
    optional=("gamma", "beta", "residual"),
    extras={"residual": ("h",)},
    numbers={"eps": Number(1e-5, epsilon)},
    layouts=LAYOUTS[:1],
    types=Y_TYPES,
    optional_types=tuple(Y_TYPES),
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=FORWARD,
    check=_check_forward,
    request=_request_forward,
    in_place={"y": "x", "h": "residual"},
    options=("normalized_shape", "gamma_dtype", "beta_dtype", "residual", "y_dtype"),
)
LAYER_NORM_BACKWARD = Op(
    name="layer_norm_backward",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=of_rows({**GRADIENT_INPUTS, **DH}),
    results=of_rows(GRADIENT_RESULTS),
    optional=("gamma", "dh"),
    extras={"dh": ()},
    layouts=LAYOUTS[:1],
    flags=FLAGS,
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=BACKWARD,
    check=_check_backward,
    request=_request_backward,
    in_place={"dx": "dy"},
    options=("normalized_shape", "gamma_dtype", "dh"),
)
