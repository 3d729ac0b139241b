"""BatchNorm's ops on tensors: from the arguments of a call, or of a plan, to a problem and results, or a sentence."""

from __future__ import annotations

from typing import Any

from cunorm.core.arrays import Array, dtype_name, epsilon, flag, mask, number, one_dtype, shape_of
from cunorm.core.problem import Problem, accumulator
from cunorm.runtime.checks import (
    NAN,
    chosen,
    direct_layout,
    like,
    parameter,
    parameter_named,
    split_axes,
    statistics,
    vector,
)
from cunorm.runtime.op import Checked, Op, Request
from cunorm.runtime.results import Result, memory_order

from .strategies import BACKWARD_ELEMT, BACKWARD_REDUCE, ELEMT, STATS, SUMS

__all__ = [
    "BATCH_NORM_BACKWARD_ELEMT",
    "BATCH_NORM_BACKWARD_REDUCE",
    "BATCH_NORM_ELEMT",
    "BATCH_NORM_STATS",
    "SUMS",
]

FLAGS = ("input_g", "gamma_g", "beta_g")


def element_count(value: object) -> float:
    """count as a float: finite and more than 0."""
    found = number("count", value)
    if not 0 < found < float("inf"):
        raise ValueError(f"count: {found}, expected a finite number of more than 0")
    return found


def _tensor(x: Array) -> tuple[str, str, tuple[int, ...], tuple[int, int, int]]:
    """dtype, layout, axes and N, C, HxW of x (N, C, *)."""
    dtype = dtype_name("x", x)
    sizes = split_axes(x.shape, "NCHW")
    layout = direct_layout(x, "NCHW")
    return dtype, layout, memory_order(x.ndim, "NCHW", layout), sizes


def _saved(mean: Array, invstd: Array, dtype: str, C: int) -> str:
    """The dtype of mean and invstd (C,)."""
    found = statistics(("mean", mean), ("invstd", invstd), dtype, C, f"({C},)")
    for name, array in (("mean", mean), ("invstd", invstd)):
        shape_of(name, array, (C,), ", one element a channel")
    return found


# ---- stats ----------------------------------------------------------------------------------------------------------


def _check_stats(arrays: tuple[Any, ...], _: tuple[Any, ...], __: object) -> Checked:
    (x,) = arrays
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    sums = accumulator(dtype)
    problem = Problem("batch_norm_stats", dtype, None, None, sums, layout, N, C, HxW, max(1, C), ("mean", "invstd"))
    return Checked(problem, (axes,), (vector("mean", (C,), sums, NAN), vector("invstd", (C,), sums, NAN)))


def _request_stats(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    N, C, HxW = split_axes(asked.shape, asked.data_format)
    sizes = (asked.data_format, N, C, HxW, max(1, C))
    sums = accumulator(asked.dtype)
    return Problem("batch_norm_stats", asked.dtype, None, None, sums, *sizes, ("mean", "invstd")), ()


# ---- elemt ----------------------------------------------------------------------------------------------------------


def _check_elemt(arrays: tuple[Any, ...], _: tuple[Any, ...], __: object) -> Checked:
    x, mean, invstd, gamma, beta = arrays
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    stats_dtype = _saved(mean, invstd, dtype, C)
    gamma_dtype, beta_dtype = parameter("gamma", gamma, (C,), dtype), parameter("beta", beta, (C,), dtype)
    sizes = (layout, N, C, HxW, max(1, C))
    problem = Problem("batch_norm_elemt", dtype, gamma_dtype, beta_dtype, stats_dtype, *sizes, ("y",))
    return Checked(problem, (axes, *[(0,)] * 4), (Result("y", x.shape, x.dtype, axes),))


def _request_elemt(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    N, C, HxW = split_axes(asked.shape, asked.data_format)
    gamma, beta = (parameter_named(name, getattr(asked, name), asked.dtype) for name in ("gamma_dtype", "beta_dtype"))
    sizes = (asked.data_format, N, C, HxW, max(1, C))
    sums = accumulator(asked.dtype)
    return Problem("batch_norm_elemt", asked.dtype, gamma, beta, sums, *sizes, ("y",)), ()


# ---- backward_reduce ------------------------------------------------------------------------------------------------


def _wanted_sums(flags: object) -> tuple[bool, ...]:
    """Which of SUMS are wanted; input_g stands for the first two."""
    inputs, *parameters = mask("output_mask", flags, FLAGS)
    return inputs, inputs, *parameters


def _check_reduce(arrays: tuple[Any, ...], flags: tuple[Any, ...], out: Any) -> Checked:
    dy, x, mean, invstd, gamma = arrays
    wanted = _wanted_sums([flag(name, value) for name, value in zip(FLAGS, flags, strict=True)])
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    like("dy", dy, x)
    stats_dtype = _saved(mean, invstd, dtype, C)
    gamma_dtype = parameter("gamma", gamma, (C,), dtype)
    # A given output may have any supported dtype: its sums are rounded to it once.
    plain = (stats_dtype, stats_dtype, gamma_dtype or stats_dtype, gamma_dtype or stats_dtype)
    given = out if isinstance(out, tuple) and len(out) == len(SUMS) else (None,) * len(SUMS)
    dtypes = [
        default if array is None or not kept else dtype_name(f"out[{name}]", array)
        for name, default, array, kept in zip(SUMS, plain, given, wanted, strict=True)
    ]
    results = [
        vector(name, (C,), dtype) if kept else None for name, dtype, kept in zip(SUMS, dtypes, wanted, strict=True)
    ]
    outputs = chosen(SUMS, wanted)
    others = tuple((f"{name}_t", dtype) for name, dtype in zip(SUMS, dtypes, strict=True))
    # gamma is not read: only its dtype counts, as that of dgamma and dbeta.
    problem = Problem(
        "batch_norm_backward_reduce", dtype, gamma_dtype, None, stats_dtype, layout, N, C, HxW, max(1, C), outputs,
        others,
    )  # fmt: skip
    return Checked(problem, (axes, axes, (0,), (0,), (0,)), results)


def _request_reduce(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    N, C, HxW = split_axes(asked.shape, asked.data_format)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    sums = accumulator(asked.dtype)
    wanted = _wanted_sums(asked.output_mask)
    outputs = chosen(SUMS, wanted)
    plain = (sums, sums, gamma or sums, gamma or sums)
    others = tuple((f"{name}_t", dtype) for name, dtype in zip(SUMS, plain, strict=True))
    sizes = (asked.data_format, N, C, HxW, max(1, C))
    problem = Problem("batch_norm_backward_reduce", asked.dtype, gamma, None, sums, *sizes, outputs, others)
    return problem, mask("output_mask", asked.output_mask, FLAGS)


# ---- backward_elemt -------------------------------------------------------------------------------------------------


def _check_backward_elemt(arrays: tuple[Any, ...], _: tuple[Any, ...], __: object) -> Checked:
    dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu = arrays
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    like("dy", dy, x)
    stats_dtype = _saved(mean, invstd, dtype, C)
    gamma_dtype = parameter("gamma", gamma, (C,), dtype)
    sum_dtype = dtype_name("sum_dy", sum_dy)
    one_dtype(("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu))
    for name, array in (("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu)):
        shape_of(name, array, (C,), ", one element a channel")
    problem = Problem(
        "batch_norm_backward_elemt", dtype, gamma_dtype, None, stats_dtype, layout, N, C, HxW, max(1, C), ("dx",),
        (("sum_t", sum_dtype),),
    )  # fmt: skip
    result = Result("dx", x.shape, x.dtype, axes)
    return Checked(problem, (axes, axes, *[(0,)] * 5), (result,))


def _request_backward_elemt(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    N, C, HxW = split_axes(asked.shape, asked.data_format)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    sums = accumulator(asked.dtype)
    sizes = (asked.data_format, N, C, HxW, max(1, C))
    others = (("sum_t", sums),)
    return Problem("batch_norm_backward_elemt", asked.dtype, gamma, None, sums, *sizes, ("dx",), others), ()


# ---- the ops --------------------------------------------------------------------------------------------------------

BATCH_NORM_STATS = Op(
    name="batch_norm_stats",
    inputs=("x",),
    optional=(),
    results=("mean", "invstd"),
    strategies=STATS,
    check=_check_stats,
    request=_request_stats,
    numbers={"eps": (1e-5, epsilon)},
    takes=("data_format",),
)
BATCH_NORM_ELEMT = Op(
    name="batch_norm_elemt",
    inputs=("x", "mean", "invstd", "gamma", "beta"),
    optional=("gamma", "beta"),
    results=("y",),
    strategies=ELEMT,
    check=_check_elemt,
    request=_request_elemt,
    in_place=("y", "x"),
    takes=("gamma_dtype", "beta_dtype", "data_format"),
)
BATCH_NORM_BACKWARD_REDUCE = Op(
    name="batch_norm_backward_reduce",
    inputs=("dy", "x", "mean", "invstd", "gamma"),
    optional=("gamma",),
    results=SUMS,
    strategies=BACKWARD_REDUCE,
    check=_check_reduce,
    request=_request_reduce,
    takes=("gamma_dtype", "output_mask", "data_format"),
    types=tuple(f"{name}_t" for name in SUMS),
)
BATCH_NORM_BACKWARD_ELEMT = Op(
    name="batch_norm_backward_elemt",
    inputs=("dy", "x", "mean", "invstd", "gamma", "sum_dy", "sum_dy_xmu"),
    optional=("gamma",),
    results=("dx",),
    strategies=BACKWARD_ELEMT,
    check=_check_backward_elemt,
    request=_request_backward_elemt,
    numbers={"count": (None, element_count)},
    in_place=("dx", "dy"),
    takes=("gamma_dtype", "data_format"),
    types=("sum_t",),
)
