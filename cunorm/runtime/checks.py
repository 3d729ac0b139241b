"""The checks that the ops share, from arrays to the sizes, dtypes and layouts of a problem."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cunorm.core import settings
from cunorm.core.arrays import DTYPES, Array, choice, dtype_name, dtype_named, one_dtype, shape_of, sized
from cunorm.core.devices import known
from cunorm.core.problem import LAYOUTS, accumulator

from .plans import Place, executor
from .results import Result, memory_order

__all__ = [
    "GRADIENTS",
    "NAN",
    "check_out",
    "check_rank",
    "check_size",
    "chosen",
    "direct_layout",
    "gradients",
    "like",
    "parameter",
    "parameter_named",
    "place_for",
    "split_axes",
    "statistics",
    "vector",
]

GRADIENTS = ("dx", "dgamma", "dbeta")
NAN = float("nan")
#: Sizes and byte counts pass to kernels in 64 bits.
MOST_ELEMENTS = 2**60


def place_for(kind: str, ordinal: int) -> Place:
    """The place of arrays of that kind."""
    if kind == "cpu":
        return Place("cpu", 0, known(settings.cpu_device(), "CUNORM_CPU_DEVICE"))
    return Place("gpu", ordinal, executor("gpu").limits(ordinal))


def check_rank(shape: tuple[int, ...], least: int = 2, name: str = "x") -> None:
    """Check an array's number of dimensions (ValueError)."""
    if not least <= len(shape) <= 8:
        raise ValueError(f"{name}: shape {shape}, expected {least} to 8 dimensions")


def check_size(shape: tuple[int, ...], name: str = "shape") -> None:
    """Check that x has no more elements than kernels can count, nor would have without its empty axes (ValueError)."""
    if math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"{name}: {shape}, expected at most 2**60 elements, sizes of 0 left out")


def split_axes(shape: tuple[int, ...], data_format: object) -> tuple[int, int, int]:
    """N, C, HxW of a shape (N, C, *) or (N, *, C).

    Raises
    ------
    ValueError
        For an unknown format, a rank outside 2 to 8, or more than 2**60 elements.
    """
    choice("data_format", data_format, LAYOUTS)
    check_rank(shape)
    check_size(shape)
    axis = 1 if data_format == "NCHW" else len(shape) - 1
    return shape[0], shape[axis], math.prod(shape[1:axis] + shape[axis + 1 :])


def direct_layout(x: Array, data_format: str) -> str:
    """The memory order in which x can be read where it lies; its own logical order where it has to be copied."""
    for layout in (data_format, *LAYOUTS):
        if x.transpose(memory_order(x.ndim, data_format, layout)).flags.c_contiguous:
            return layout
    return data_format


def like(name: str, array: Array, x: Array) -> None:
    """Check that an array has the dtype (TypeError) and the shape (ValueError) of x."""
    one_dtype(("x", x), (name, array))
    shape_of(name, array, x.shape, ", the shape of x")


def parameter(
    name: str, array: Array | None, shape: tuple[int, ...], dtype: str, why: str = ", one element a channel"
) -> str | None:
    """The dtype of gamma or beta: x's or the statistics' (TypeError), of that shape (ValueError); None if absent."""
    if array is None:
        return None
    found = dtype_name(name, array, (dtype, accumulator(dtype)), f" for {dtype} x")
    shape_of(name, array, shape, why)
    return found


def parameter_named(name: str, given: object, dtype: str) -> str | None:
    """The dtype of gamma or beta from its name or dtype object (TypeError); None if absent."""
    return None if given is None else dtype_named(name, given, (dtype, accumulator(dtype)))


def statistics(first: tuple[str, Array], second: tuple[str, Array], dtype: str, size: int, expected: str) -> str:
    """The one dtype of mean and rstd: the accumulator's or x's (TypeError). Both have that size (ValueError)."""
    found = dtype_name(*first, (accumulator(dtype), dtype), f" for {dtype} x")
    one_dtype(first, second)
    for name, array in (first, second):
        sized(name, array, size, expected)
    return found


def vector(name: str, shape: tuple[int, ...], dtype: str, when_empty: float = 0.0) -> Result:
    """A result that is dense in its own order: statistics, and gradients of parameters."""
    return Result(name, shape, DTYPES[dtype], tuple(range(len(shape))), when_empty)


def chosen(names: Sequence[str], flags: Sequence[bool]) -> tuple[str, ...]:
    """The names whose flag is set."""
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def gradients(
    x: Array, axes: tuple[int, ...], shape: tuple[int, ...], dtype: str, wanted: Sequence[bool]
) -> list[Result | None]:
    """The results dx, as x lies in the memory order ``axes``, and dgamma and dbeta of that shape and dtype."""
    results = [Result("dx", x.shape, x.dtype, axes), vector("dgamma", shape, dtype), vector("dbeta", shape, dtype)]
    return [result if flag else None for result, flag in zip(results, wanted, strict=True)]


def check_out(out: object, results: Sequence[Result | None], names: Sequence[str]) -> None:
    """Check the given outputs: TypeError for a wrong container or dtype, ValueError for shapes and strides."""
    if out is None:
        return
    if not isinstance(out, tuple) or len(out) != len(results):
        raise TypeError(f"out: {type(out).__name__}, expected a tuple of {', '.join(names)} (None: allocate)")
    for result, array in zip(results, out, strict=True):
        if result is not None and array is not None:
            result.check(array)
