"""RMSNorm's two ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

import math
from typing import Any

from cunorm.core.arrays import dtype_name, epsilon, mask, number, sized
from cunorm.core.opspec import Number, oracle_of
from cunorm.core.problem import LAYOUTS, Problem, accumulator
from cunorm.ops.common.array_specs import (
    DH,
    DY,
    GAMMA,
    PARAMETER_GRADIENT,
    RESIDUAL,
    RSTD,
    TENSOR,
    Y_TYPES,
    H,
    X,
    Y,
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
from cunorm.runtime.checks import NAN, OutputSpec, chosen, like, parameter, parameter_named, vector, y_of, y_types
from cunorm.runtime.op import EVERY, Checked, Op, Request

from .strategies import BACKWARD, FORWARD

#: The results of the gradients, which are also the flags of their output mask.
GRADIENTS = ("dx", "dgamma")


def offset(value: object) -> float:
    """gamma_offset as a float; it is finite (TypeError, ValueError)."""
    found = number("gamma_offset", value)
    if not math.isfinite(found):
        raise ValueError(f"gamma_offset: {found}, expected a finite number")
    return found


def _check_forward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    x, gamma, residual = arrays
    dtype = dtype_name("x", x)
    normalized_shape, y_dtype = options
    outer, row = row_sizes(x.shape, normalized_shape)
    gamma_dtype = parameter("gamma", gamma, row, dtype, ", normalized_shape")
    extras = residual_given(residual, x)
    sums, axes, types = accumulator(dtype), axes_of(x), y_types(y_dtype, dtype)
    results = (
        y_of(x, axes, types),
        vector("rstd", (*outer, *(1,) * len(row)), sums, NAN),
        OutputSpec("h", x.shape, x.dtype, axes) if extras else None,
    )
    problem = _forward(outer, row, dtype=dtype, gamma_dtype=gamma_dtype, others=types, extras=extras)
    return Checked(problem, [axes_of(array) for array in arrays], results)


def _forward(outer: tuple[int, ...], row: tuple[int, ...], **facts: Any) -> Problem:
    outputs, sums = RMS_NORM.results_with(facts["extras"]), accumulator(facts["dtype"])
    return row_problem(outer, row, op=RMS_NORM.name, beta_dtype=None, stats_dtype=sums, outputs=outputs, **facts)


def _check_backward(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    dy, x, rstd, gamma, dh = arrays
    normalized_shape, output_mask = options
    wanted = mask("output_mask", output_mask, GRADIENTS)
    dtype = dtype_name("x", x)
    outer, row = row_sizes(x.shape, normalized_shape)
    like("dy", dy, x)
    stats_dtype = dtype_name("rstd", rstd, (accumulator(dtype), dtype), f" for {dtype} x")
    rows = math.prod(outer)
    sized("rstd", rstd, rows, f"{(*outer, *(1,) * len(row))}, or any shape of {rows} elements")
    gamma_dtype = parameter("gamma", gamma, row, dtype, ", normalized_shape")
    made = OutputSpec("dx", x.shape, x.dtype, axes_of(x)), vector("dgamma", row, gamma_dtype or stats_dtype)
    results = [result if flag else None for result, flag in zip(made, wanted, strict=True)]
    outputs = chosen(GRADIENTS, wanted)
    extras = dh_given(dh, x, outputs)
    facts = {"dtype": dtype, "gamma_dtype": gamma_dtype, "stats_dtype": stats_dtype}
    problem = _backward(outer, row, outputs=outputs, extras=extras, **facts)
    return Checked(problem, [axes_of(array) for array in arrays], results)


def _backward(outer: tuple[int, ...], row: tuple[int, ...], **facts: Any) -> Problem:
    return row_problem(outer, row, op=RMS_NORM_BACKWARD.name, beta_dtype=None, **facts)


def _request_forward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    outer, row = row_sizes(asked.shape, asked.normalized_shape)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    facts = {"dtype": asked.dtype, "gamma_dtype": gamma, "extras": residual_asked(asked.residual)}
    problem = _forward(outer, row, others=y_types(asked.y_dtype, asked.dtype), **facts)
    return problem, (asked.normalized_shape, asked.y_dtype)


def _request_backward(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    outer, row = row_sizes(asked.shape, asked.normalized_shape)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    # The default mask has three flags, for dx, dgamma and dbeta.
    given = (True, True) if asked.output_mask is EVERY else asked.output_mask
    outputs = chosen(GRADIENTS, mask("output_mask", given, GRADIENTS))
    facts = {"dtype": asked.dtype, "gamma_dtype": gamma, "stats_dtype": accumulator(asked.dtype)}
    problem = _backward(outer, row, outputs=outputs, extras=dh_asked(asked.dh, outputs), **facts)
    return problem, (asked.normalized_shape, given)


_FAMILY = "rms_norm"
_SIZES = {"rows": "N", "length": "C"}
_GAMMA_OFFSET = Number(0.0, offset)

RMS_NORM = Op(
    name="rms_norm",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=of_rows({"x": X, "gamma": GAMMA, **RESIDUAL}),
    results=of_rows({"y": Y, "rstd": RSTD, **H}),
    optional=("gamma", "residual"),
    extras={"residual": ("h",)},
    numbers={"eps": Number(1e-6, epsilon), "gamma_offset": _GAMMA_OFFSET},
    layouts=LAYOUTS[:1],
    types=Y_TYPES,
    optional_types=tuple(Y_TYPES),
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=FORWARD,
    check=_check_forward,
    request=_request_forward,
    in_place={"y": "x", "h": "residual"},
    options=("normalized_shape", "gamma_dtype", "residual", "y_dtype"),
)
RMS_NORM_BACKWARD = Op(
    name="rms_norm_backward",
    family=_FAMILY,
    sizes=_SIZES,
    inputs=of_rows({"dy": DY, "x": X, "rstd": RSTD, "gamma": GAMMA, **DH}),
    results=of_rows({"dx": TENSOR, "dgamma": PARAMETER_GRADIENT}),
    optional=("gamma", "dh"),
    extras={"dh": ()},
    numbers={"gamma_offset": _GAMMA_OFFSET},
    layouts=LAYOUTS[:1],
    flags={name: (name,) for name in GRADIENTS},
    holds_parameters=True,
    oracle=oracle_of(__package__),
    strategies=BACKWARD,
    check=_check_backward,
    request=_request_backward,
    in_place={"dx": "dy"},
    options=("normalized_shape", "gamma_dtype", "dh"),
)
