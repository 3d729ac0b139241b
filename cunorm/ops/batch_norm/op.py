"""BatchNorm's ops: check the arguments of a call or a plan, and derive its problem and results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cunorm.core.arrays import (
    LARGEST_SIZE,
    Array,
    dtype_name,
    epsilon,
    flag,
    is_array,
    kind_of,
    mask,
    namespace,
    number,
    one_dtype,
    said,
    same_place,
    shape_of,
)
from cunorm.core.opspec import ArraySpec, Measure, Number, oracle_of
from cunorm.core.problem import ITEMSIZE, LAYOUTS, Problem, accumulator, laid_out
from cunorm.executors.choose import executor
from cunorm.ops.common.array_specs import BETA, DY, GAMMA, MEAN, RSTD, TENSOR, Y_TYPES, X, Y
from cunorm.runtime.checks import (
    NAN,
    OutputSpec,
    check_tuple,
    chosen,
    direct_layout,
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
from cunorm.runtime.op import Checked, Op, Request, call_planned
from cunorm.runtime.plans import Plan

from .strategies import BACKWARD_ELEMT, BACKWARD_REDUCE, ELEMT, GATHER_STATS, STATS, SUMS

FLAGS = ("input_g", "gamma_g", "beta_g")
#: Dtypes that counts may have.
COUNTS = ("int32", "int64", "float32", "float64")


def element_count(value: object) -> float:
    """Return count as a float, which must be finite and not negative."""
    if (value.__class__ is int or value.__class__ is float) and 0 <= value <= LARGEST_SIZE:
        return float(value)  # fast path, taken in every call
    found = number("count", value)
    if not 0 <= found < float("inf"):
        raise ValueError(f"count: {found}, expected a finite number of at least 0")
    return found


def batch_count(count: Any, x: Array) -> tuple[Array | None, float]:
    """Return the counts of the ranks as an array for the kernel, or None and their total.

    Counts in host memory must be finite and not negative. Counts in GPU memory are not checked, because this would wait
    for the GPU.
    """
    if count.__class__ is int or count.__class__ is float:
        return None, element_count(count)  # fast path, taken in every call
    counts = sequence_counts("count", count)
    if isinstance(counts, np.ndarray):
        kind_of("count", counts)
        count_dtype("count", counts)
        check_counts("count", counts)
        return (counts, 0.0) if isinstance(x, np.ndarray) else (None, element_count(counts.sum()))
    on_device = is_array(counts) and not isinstance(counts, memoryview)
    return (counts, 0.0) if on_device else (None, element_count(counts))


def _tensor(x: Array) -> tuple[str, str, tuple[int, ...], tuple[int, int, int]]:
    """Return dtype, layout, axes in memory order, and (N, C, HxW) of x with shape (N, C, *)."""
    dtype = dtype_name("x", x)
    sizes = split_axes(x.shape, "NCHW")
    layout = direct_layout(x, "NCHW")
    return dtype, layout, memory_order(x.ndim, "NCHW", layout), sizes


def _saved(mean: Array, invstd: Array, dtype: str, C: int) -> str:
    """Check mean and invstd of shape (C,), and return their dtype."""
    found = statistics(("mean", mean), ("invstd", invstd), dtype, C, f"({C},)")
    for name, array in (("mean", mean), ("invstd", invstd)):
        shape_of(name, array, (C,), ", one element per channel")
    return found


def _problem(op: str, sizes: tuple[str, int, int, int], dtype: str, **facts: Any) -> Problem:
    """Problem with sizes (layout, N, C, HxW): a group per channel, by default without gamma and beta."""
    plain = {"gamma_dtype": None, "beta_dtype": None, "stats_dtype": accumulator(dtype)}
    return Problem(op=op, dtype=dtype, **laid_out(*sizes, max(1, sizes[2])), **{**plain, **facts})


def _asked_sizes(asked: Request) -> tuple[str, int, int, int]:
    """Layout, N, C and HxW of a request."""
    return asked.data_format, *split_axes(asked.shape, asked.data_format)


# ---- stats ----------------------------------------------------------------------------------------------------------


def _check_stats(arrays: tuple[Any, ...], _: tuple[Any, ...], __: object) -> Checked:
    (x,) = arrays
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    sums = accumulator(dtype)
    problem = _problem("batch_norm_stats", (layout, N, C, HxW), dtype, outputs=("mean", "invstd"))
    return Checked(problem, (axes,), (vector("mean", (C,), sums, NAN), vector("invstd", (C,), sums, NAN)))


def _request_stats(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    return _problem("batch_norm_stats", _asked_sizes(asked), asked.dtype, outputs=("mean", "invstd")), ()


# ---- elemt ----------------------------------------------------------------------------------------------------------


def _check_elemt(arrays: tuple[Any, ...], options: tuple[Any, ...], _: object) -> Checked:
    x, mean, invstd, gamma, beta = arrays
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    stats_dtype = _saved(mean, invstd, dtype, C)
    gamma_dtype, beta_dtype = parameter("gamma", gamma, (C,), dtype), parameter("beta", beta, (C,), dtype)
    types = y_types(options[0], dtype)
    facts = {"gamma_dtype": gamma_dtype, "beta_dtype": beta_dtype, "stats_dtype": stats_dtype}
    problem = _problem("batch_norm_elemt", (layout, N, C, HxW), dtype, outputs=("y",), others=types, **facts)
    return Checked(problem, (axes, *[(0,)] * 4), (y_of(x, axes, types),))


def _request_elemt(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes, types = _asked_sizes(asked), y_types(asked.y_dtype, asked.dtype)
    names = ("gamma_dtype", "beta_dtype")
    facts = {name: parameter_named(name, getattr(asked, name), asked.dtype) for name in names}
    problem = _problem("batch_norm_elemt", sizes, asked.dtype, outputs=("y",), others=types, **facts)
    return problem, (asked.y_dtype,)


# ---- backward_reduce ------------------------------------------------------------------------------------------------


def _wanted_sums(flags: object) -> tuple[bool, ...]:
    """Return which of SUMS are wanted. input_g selects the first two."""
    inputs, *parameters = mask("output_mask", flags, FLAGS)
    return inputs, inputs, *parameters


def _check_reduce(arrays: tuple[Any, ...], flags: tuple[Any, ...], out: Any) -> Checked:
    dy, x, mean, invstd, gamma = arrays
    wanted = _wanted_sums([flag(name, value) for name, value in zip(FLAGS, flags, strict=True)])
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    like("dy", dy, x)
    stats_dtype = _saved(mean, invstd, dtype, C)
    gamma_dtype = parameter("gamma", gamma, (C,), dtype)
    # An output array may have any supported dtype. The sums are rounded to it once.
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
    # gamma is not read. Its dtype is the dtype of dgamma and dbeta.
    facts = {"gamma_dtype": gamma_dtype, "stats_dtype": stats_dtype, "outputs": outputs, "others": others}
    problem = _problem("batch_norm_backward_reduce", (layout, N, C, HxW), dtype, **facts)
    return Checked(problem, (axes, axes, (0,), (0,), (0,)), results)


def _request_reduce(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = _asked_sizes(asked)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    sums = accumulator(asked.dtype)
    wanted = _wanted_sums(asked.output_mask)
    outputs = chosen(SUMS, wanted)
    plain = (sums, sums, gamma or sums, gamma or sums)
    others = tuple((f"{name}_t", dtype) for name, dtype in zip(SUMS, plain, strict=True))
    facts = {"gamma_dtype": gamma, "outputs": outputs, "others": others}
    problem = _problem("batch_norm_backward_reduce", sizes, asked.dtype, **facts)
    return problem, mask("output_mask", asked.output_mask, FLAGS)


# ---- backward_elemt -------------------------------------------------------------------------------------------------


def _check_backward_elemt(arrays: tuple[Any, ...], _: tuple[Any, ...], __: object) -> Checked:
    dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, counts = arrays
    dtype, layout, axes, (N, C, HxW) = _tensor(x)
    like("dy", dy, x)
    stats_dtype = _saved(mean, invstd, dtype, C)
    gamma_dtype = parameter("gamma", gamma, (C,), dtype)
    sum_dtype = dtype_name("sum_dy", sum_dy)
    one_dtype(("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu))
    for name, array in (("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu)):
        shape_of(name, array, (C,), ", one element per channel")
    others = [("sum_t", sum_dtype)]
    if counts is not None:
        if counts.ndim > 1:
            raise ValueError(f"count: shape {counts.shape}, expected a number or an array of shape (world,)")
        others.append(("count_t", count_dtype("count", counts)))
    facts = {"gamma_dtype": gamma_dtype, "stats_dtype": stats_dtype, "others": tuple(others)}
    problem = _problem("batch_norm_backward_elemt", (layout, N, C, HxW), dtype, outputs=("dx",), **facts)
    result = OutputSpec("dx", x.shape, x.dtype, axes)
    ranks = tuple(range(counts.ndim)) if counts is not None else ()
    return Checked(problem, (axes, axes, *[(0,)] * 5, ranks), (result,))


def _request_backward_elemt(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    sizes = _asked_sizes(asked)
    gamma = parameter_named("gamma_dtype", asked.gamma_dtype, asked.dtype)
    facts = {"gamma_dtype": gamma, "others": (("sum_t", accumulator(asked.dtype)),)}
    return _problem("batch_norm_backward_elemt", sizes, asked.dtype, outputs=("dx",), **facts), ()


def _call_backward_elemt(  # noqa: PLR0913  # the public function's arguments
    options: tuple[Any, ...],
    plan: Plan,
    dy: Array,
    x: Array,
    mean: Array,
    invstd: Array,
    gamma: Array | None,
    sum_dy: Array,
    sum_dy_xmu: Array,
    count: Any,
    *,
    out: Any = None,
    workspace: Array | None = None,
) -> Any:
    """Call a plan of batch_norm_backward_elemt."""
    counts, total = batch_count(count, x)
    arrays = (dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, counts)
    op = BATCH_NORM_BACKWARD_ELEMT
    return call_planned(op, options, plan, arrays, out, workspace, {"count": total})


# ---- the ops --------------------------------------------------------------------------------------------------------


_FAMILY = "batch_norm"
_SIZES = {"N": "N", "C": "C", "HxW": "HxW"}
#: Statistics: one element per channel.
_MEAN, _INVSTD = replace(MEAN, sizes=("C",)), replace(RSTD, sizes=("C",))

BATCH_NORM_STATS = Op(
    name="batch_norm_stats",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={"x": X},
    results={"mean": _MEAN, "invstd": _INVSTD},
    numbers={"eps": Number(1e-5, epsilon)},
    layouts=LAYOUTS,
    channelwise=True,
    oracle=oracle_of(__package__),
    strategies=STATS,
    check=_check_stats,
    request=_request_stats,
    options=("data_format",),
)
BATCH_NORM_ELEMT = Op(
    name="batch_norm_elemt",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={"x": X, "mean": _MEAN, "invstd": _INVSTD, "gamma": GAMMA, "beta": BETA},
    results={"y": Y},
    optional=("gamma", "beta"),
    layouts=LAYOUTS,
    types=Y_TYPES,
    optional_types=tuple(Y_TYPES),
    channelwise=True,
    oracle=oracle_of(__package__),
    strategies=ELEMT,
    check=_check_elemt,
    request=_request_elemt,
    in_place={"y": "x"},
    options=("gamma_dtype", "beta_dtype", "data_format", "y_dtype"),
)
BATCH_NORM_BACKWARD_REDUCE = Op(
    name="batch_norm_backward_reduce",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={"dy": DY, "x": X, "mean": _MEAN, "invstd": _INVSTD, "gamma": GAMMA},
    results={name: ArraySpec(("C",), (f"{name}_t",)) for name in SUMS},
    optional=("gamma",),
    layouts=LAYOUTS,
    flags=dict(zip(FLAGS, (SUMS[:2], SUMS[2:3], SUMS[3:]), strict=True)),
    types={f"{name}_t": tuple(ITEMSIZE) for name in SUMS},
    channelwise=True,
    oracle=oracle_of(__package__),
    strategies=BACKWARD_REDUCE,
    check=_check_reduce,
    request=_request_reduce,
    options=("gamma_dtype", "data_format"),
)
BATCH_NORM_BACKWARD_ELEMT = Op(
    name="batch_norm_backward_elemt",
    family=_FAMILY,
    sizes=_SIZES,
    inputs={
        **{"dy": DY, "x": X, "mean": _MEAN, "invstd": _INVSTD, "gamma": GAMMA},
        **{name: ArraySpec(("C",), ("sum_t",), values="sum") for name in SUMS[:2]},
        "counts": ArraySpec((), ("count_t",), values="total"),
    },
    results={"dx": TENSOR},
    optional=("gamma", "counts"),
    numbers={"count": Number(None, element_count, lambda problem: float(problem.N * problem.HxW))},
    measures={"ranks": Measure("counts", False), "counts_stride": Measure("counts", True)},
    layouts=LAYOUTS,
    types={"sum_t": tuple(ITEMSIZE), "count_t": COUNTS},
    optional_types=("count_t",),
    channelwise=True,
    oracle=oracle_of(__package__),
    strategies=BACKWARD_ELEMT,
    check=_check_backward_elemt,
    request=_request_backward_elemt,
    in_place={"dx": "dy"},
    options=("gamma_dtype", "data_format"),
    caller=_call_backward_elemt,
)


RUNNING = ("running_mean", "running_var")


def sequence_counts(name: str, counts: Any) -> Any:
    """Return a list, a tuple or a range of counts as an array of int64 or float64; anything else as it is."""
    if not isinstance(counts, (list, tuple, range)):
        return counts
    if not all(isinstance(c, (int, float, np.integer, np.floating)) and not isinstance(c, bool) for c in counts):
        raise TypeError(f"{name}: {said(counts)}, expected numbers")
    whole = all(isinstance(count, (int, np.integer)) for count in counts)
    try:
        return np.array(counts, np.int64 if whole else np.float64)
    except OverflowError:
        raise ValueError(f"{name}: {said(counts)}, expected numbers that fit 64 bits") from None


def check_counts(name: str, counts: Array) -> None:
    """Check counts in host memory, which must be finite and not negative (ValueError)."""
    if counts.dtype.kind in "iuf" and not np.all(np.isfinite(counts) & (counts >= 0)):
        raise ValueError(f"{name}: {counts}, expected finite numbers of at least 0")


def count_dtype(name: str, counts: Array) -> str:
    """Return the name of the counts' dtype (TypeError)."""
    found = next((one for one in COUNTS if counts.dtype == one), None)
    if found is None:
        raise TypeError(f"{name}: dtype {counts.dtype}, expected {' or '.join(COUNTS)}")
    return found


def momentum_number(value: object) -> float:
    """Return momentum as a float, which must be from 0 to 1."""
    found = number("momentum", value)
    if not 0 <= found <= 1:
        raise ValueError(f"momentum: {found}, expected a number from 0 to 1")
    return found


def rank_counts(means: Array, invstds: Array, counts: Any, out: Any) -> Any:
    """Return the counts as an array on the device of the means.

    Counts in host memory must be finite and not negative. Counts in GPU memory are not checked, because this would wait
    for the GPU.
    """
    counts = sequence_counts("counts", counts)
    if not is_array(counts):
        raise TypeError(f"counts: {said(counts)}, expected an array or a sequence with one number per rank")
    if not isinstance(counts, np.ndarray):
        return counts
    kind_of("counts", counts)
    on_gpu = kind_of("means", means) == "gpu"
    if on_gpu:  # report errors before allocating GPU memory
        kind_of("invstds", invstds)
        written = zip(BATCH_NORM_GATHER_STATS.labels, out or (), strict=False)
        same_place([("means", means), ("invstds", invstds), *written])
        _check_gather((means, invstds, counts), (), out)
    check_counts("counts", counts)
    if not on_gpu:
        return counts
    ordinal = int(means.data.device_id)
    if executor("gpu").allocation_forbidden(ordinal):
        raise ValueError("counts: the stream is being captured into a graph; pass a cupy.ndarray and keep it alive")
    with executor("gpu").on(ordinal):
        return namespace("gpu").asarray(counts)


def with_running(out: Any, running_mean: Array | None, running_var: Array | None) -> Any:
    """Return the arrays that are written, in result order: those of ``out``, then the running statistics."""
    if out is not None:
        check_tuple(out, ("mean", "invstd"))
    if out is None and running_mean is None and running_var is None:
        return None
    return (*(out or (None, None)), running_mean, running_var)


def _check_gather(arrays: tuple[Any, ...], _: tuple[Any, ...], out: Any) -> Checked:
    means, invstds, counts = arrays
    dtype = dtype_name("means", means)
    if means.ndim != 2:
        raise ValueError(f"means: shape {means.shape}, expected (world, C)")
    world, C = means.shape
    like_means = ", the shape of means"
    one_dtype(("means", means), ("invstds", invstds))
    shape_of("invstds", invstds, means.shape, like_means)
    sums = accumulator(dtype)
    others = [("count_t", count_dtype("counts", counts))]
    shape_of("counts", counts, (world,), ", one count per rank")
    kept: list[OutputSpec | None] = []
    for name, array in zip(RUNNING, out[2:] if out is not None else (None, None), strict=True):
        found = sums if array is None else dtype_name(name, array)
        others.append((f"{name}_t", found))
        kept.append(None if array is None else vector(name, (C,), found))
    results = (vector("mean", (C,), sums, NAN), vector("invstd", (C,), sums, NAN), *kept)
    return Checked(_gathered(dtype, world, C, tuple(others)), ((0, 1), (0, 1), (0,)), results)


def _gathered(dtype: str, world: int, C: int, others: tuple[tuple[str, str], ...]) -> Problem:
    """Problem of batch_norm_gather_stats. Absent running statistics are null in its kernel."""
    outputs = ("mean", "invstd", *RUNNING)
    return _problem("batch_norm_gather_stats", ("NCHW", world, C, 1), dtype, outputs=outputs, others=others)


def _request_gather(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    if len(asked.shape) != 2:
        raise ValueError(f"shape: {asked.shape}, expected (world, C)")
    world, C, _ = split_axes(asked.shape, "NCHW")
    others = [("count_t", "int64"), *((f"{name}_t", accumulator(asked.dtype)) for name in RUNNING)]
    return _gathered(asked.dtype, world, C, tuple(others)), ()


def _call_gather(  # noqa: PLR0913  # the public function's arguments
    options: tuple[Any, ...],
    plan: Plan,
    means: Array,
    invstds: Array,
    counts: Any,
    *,
    eps: float = 1e-5,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.1,
    out: Any = None,
    workspace: Array | None = None,
) -> Any:
    """Call a plan of batch_norm_gather_stats."""
    numbers = {"eps": epsilon(eps), "momentum": momentum_number(momentum)}
    written = with_running(out, running_mean, running_var)
    arrays = (means, invstds, rank_counts(means, invstds, counts, written))
    op = BATCH_NORM_GATHER_STATS
    return call_planned(op, options, plan, arrays, written, workspace, numbers)[:2]


_RANKS = ArraySpec(("N", "C"), ("dtype",), tensor=True)

BATCH_NORM_GATHER_STATS = Op(
    name="batch_norm_gather_stats",
    family=_FAMILY,
    sizes={"world": "N", "C": "C"},
    inputs={
        "means": replace(_RANKS, values="means"),
        "invstds": replace(_RANKS, values="invstds"),
        "counts": ArraySpec(("N",), ("count_t",), values="counts"),
    },
    results={
        **{"mean": _MEAN, "invstd": _INVSTD},
        **{name: ArraySpec(("C",), (f"{name}_t",), values="running") for name in RUNNING},
    },
    numbers={  # the kernel computes with them in float64
        "eps": Number(1e-5, epsilon, rounded=False),
        "momentum": Number(0.1, momentum_number, rounded=False),
    },
    measures={f"{name}_stride": Measure(name, True) for name in ("means", "invstds", "counts")},
    layouts=LAYOUTS[:1],
    types={"count_t": COUNTS, **{f"{name}_t": tuple(ITEMSIZE) for name in RUNNING}},
    channelwise=True,
    oracle=oracle_of(__package__),
    strategies=GATHER_STATS,
    check=_check_gather,
    request=_request_gather,
    updated=RUNNING,
    caller=_call_gather,
)
