"""BatchNorm's gather_stats: statistics of ranks with uneven counts become one, and running statistics follow."""

from __future__ import annotations

from typing import Any

import numpy as np

from cunorm.core.arrays import Array, dtype_name, epsilon, kind_of, namespace, number, one_dtype, same_place, shape_of
from cunorm.core.problem import Problem, accumulator
from cunorm.runtime.checks import NAN, split_axes, vector
from cunorm.runtime.op import Checked, Op, Request, call_planned
from cunorm.runtime.plans import Plan, executor
from cunorm.runtime.results import Result

from .strategies import GATHER_STATS

__all__ = ["BATCH_NORM_GATHER_STATS", "COUNTS", "momentum_number", "rank_counts", "with_running"]

RUNNING = ("running_mean", "running_var")
#: Dtypes that counts may have.
COUNTS = ("int32", "int64", "float32", "float64")


def momentum_number(value: object) -> float:
    """momentum as a float from 0 to 1."""
    found = number("momentum", value)
    if not 0 <= found <= 1:
        raise ValueError(f"momentum: {found}, expected a number from 0 to 1")
    return found


def rank_counts(means: Array, invstds: Array, counts: Any, out: Any) -> Any:
    """The counts as an array where the means are. Host numbers are looked at: finite, not negative, not all 0.

    Counts that live on a GPU are not: that would have to wait for it.
    """
    if isinstance(counts, (list, tuple)):
        if not all(isinstance(c, (int, float, np.integer, np.floating)) and not isinstance(c, bool) for c in counts):
            raise TypeError(f"counts: {counts!r}, expected numbers")
        whole = all(isinstance(count, (int, np.integer)) for count in counts)
        try:
            counts = np.array(counts, np.int64 if whole else np.float64)
        except OverflowError:
            raise ValueError(f"counts: {counts!r}, expected numbers that fit 64 bits") from None
    if not isinstance(counts, np.ndarray):
        return counts
    kind_of("counts", counts)
    on_gpu = kind_of("means", means) == "gpu"
    if on_gpu:  # what is wrong is said before anything is allocated there
        kind_of("invstds", invstds)
        written = zip(BATCH_NORM_GATHER_STATS.labels, out or (), strict=False)
        same_place([("means", means), ("invstds", invstds), *written])
        _check_gather((means, invstds, counts), (), out)
    if counts.dtype.kind in "iuf":
        if not np.all(np.isfinite(counts) & (counts >= 0)):
            raise ValueError(f"counts: {counts}, expected finite numbers of at least 0")
        if not np.any(counts > 0):
            raise ValueError(f"counts: {counts}, expected at least one count of more than 0")
    if not on_gpu:
        return counts
    ordinal = int(means.data.device_id)
    if executor("gpu").allocation_forbidden(ordinal):
        raise ValueError("counts: the stream is being captured into a graph; pass a cupy.ndarray and keep it alive")
    with executor("gpu").on(ordinal):
        return namespace("gpu").asarray(counts)


def with_running(out: Any, running_mean: Array | None, running_var: Array | None) -> Any:
    """The arrays that are written, result by result: those of ``out``, and the running statistics."""
    if out is not None and (not isinstance(out, tuple) or len(out) != 2):
        raise TypeError(f"out: {type(out).__name__}, expected a tuple of mean, invstd (None: allocate)")
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
    if str(counts.dtype) not in COUNTS:
        raise TypeError(f"counts: dtype {counts.dtype}, expected {' or '.join(COUNTS)}")
    shape_of("counts", counts, (world,), ", one count a rank")
    sums = accumulator(dtype)
    others = [("count_t", str(counts.dtype))]
    kept: list[Result | None] = []
    for name, array in zip(RUNNING, out[2:] if out is not None else (None, None), strict=True):
        found = sums if array is None else dtype_name(name, array)
        others.append((f"{name}_t", found))
        kept.append(None if array is None else vector(name, (C,), found))
    results = (vector("mean", (C,), sums, NAN), vector("invstd", (C,), sums, NAN), *kept)
    return Checked(_gathered(dtype, world, C, tuple(others)), ((0, 1), (0, 1), (0,)), results)


def _gathered(dtype: str, world: int, C: int, others: tuple[tuple[str, str], ...]) -> Problem:
    """The problem of a gather; running statistics that are not there are null in it."""
    sizes = ("NCHW", world, C, 1, max(1, C))
    outputs = ("mean", "invstd", *RUNNING)
    return Problem("batch_norm_gather_stats", dtype, None, None, accumulator(dtype), *sizes, outputs, others)


def _request_gather(asked: Request) -> tuple[Problem, tuple[Any, ...]]:
    if len(asked.shape) != 2:
        raise ValueError(f"shape: {asked.shape}, expected (world, C)")
    world, C, _ = split_axes(asked.shape, "NCHW")
    others = [("count_t", "int64"), *((f"{name}_t", accumulator(asked.dtype)) for name in RUNNING)]
    return _gathered(asked.dtype, world, C, tuple(others)), ()


def _call_gather(
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
    """What a plan of batch_norm_gather_stats does when it is called."""
    numbers = {"eps": epsilon(eps), "momentum": momentum_number(momentum)}
    written = with_running(out, running_mean, running_var)
    arrays = (means, invstds, rank_counts(means, invstds, counts, written))
    op = BATCH_NORM_GATHER_STATS
    return call_planned(op, options, plan, *arrays, out=written, workspace=workspace, **numbers)[:2]


BATCH_NORM_GATHER_STATS = Op(
    name="batch_norm_gather_stats",
    inputs=("means", "invstds", "counts"),
    optional=(),
    results=("mean", "invstd", *RUNNING),
    strategies=GATHER_STATS,
    check=_check_gather,
    request=_request_gather,
    numbers={"eps": (1e-5, epsilon), "momentum": (0.1, momentum_number)},
    updated=RUNNING,
    types=("count_t", *(f"{name}_t" for name in RUNNING)),
    caller=_call_gather,
)
