"""Checks of arrays that the ops share (sizes, dtypes, outputs), and the memory layouts of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm.core import settings
from cunorm.core.arrays import (
    DTYPES,
    Array,
    choice,
    dtype_name,
    dtype_named,
    elements_apart,
    one_dtype,
    pointer,
    shape_of,
    sized,
)
from cunorm.core.devices import known
from cunorm.core.problem import LAYOUTS, MOST_AXES, MOST_ELEMENTS, accumulator
from cunorm.executors.choose import executor

from .plans import Target


def memory_order(rank: int, data_format: str, layout: str) -> tuple[int, ...]:
    """The axes of a (N, C, *) or (N, *, C) tensor in the memory order of ``layout``."""
    if data_format == layout:
        return tuple(range(rank))
    return (0, *range(2, rank), 1) if layout == "NHWC" else (0, rank - 1, *range(1, rank - 1))


def is_direct(array: Array, axes: tuple[int, ...]) -> bool:
    """Whether kernels can access the array without a copy: dense in that order, and aligned to the element size."""
    return bool(array.transpose(axes).flags.c_contiguous) and pointer(array) % array.dtype.itemsize == 0


@dataclass(frozen=True)
class OutputSpec:
    """An output of a call.

    Attributes
    ----------
    name : str
        Name of the output in launches.
    shape : tuple of int
    dtype : numpy.dtype
    axes : tuple of int
        The axes of the output in memory order.
    when_empty : float
        Fill value for a problem without elements.
    updated : bool
        Whether kernels read the old contents.
    label : str
        User-facing name of the array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[int, ...]
    when_empty: float = 0.0
    updated: bool = False
    label: str = ""

    def allocate(self, xp: Any) -> Array:
        """A new array whose memory is dense in the order of ``axes``."""
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return xp.empty([self.shape[axis] for axis in self.axes], self.dtype).transpose(inverse)

    def check(self, array: Array) -> None:
        """Check an ``out`` array: TypeError for the dtype, ValueError for the shape or if it is not writable."""
        if array.dtype != self.dtype:
            raise TypeError(f"{self.label}: dtype {array.dtype}, expected {self.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"{self.label}: shape {array.shape}, expected {self.shape}")
        writable(self.label, array)


def writable(name: str, array: Array) -> None:
    """Check that an array can be written and that its elements do not share memory (ValueError)."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: read-only, expected an array that can be written")
    if not elements_apart(array):
        raise ValueError(f"{name}: strides {array.strides}, expected elements that do not share memory")


def dense_copy(array: Array, axes: tuple[int, ...], xp: Any) -> Array:
    """A copy of an array that is dense in the order of ``axes`` and aligned to the element size."""
    copy = xp.ascontiguousarray(array.transpose(axes))
    return copy if pointer(copy) % copy.dtype.itemsize == 0 else copy.copy()


GRADIENTS = ("dx", "dgamma", "dbeta")
NAN = float("nan")


def place_for(kind: str, ordinal: int) -> Target:
    """The `Target` of arrays of that kind."""
    if kind == "cpu":
        return Target("cpu", 0, known(settings.cpu_device(), "CUNORM_CPU_DEVICE"))
    return Target("gpu", ordinal, executor("gpu").limits(ordinal))


def check_rank(shape: tuple[int, ...], least: int = 2, name: str = "x") -> None:
    """Check an array's number of dimensions (ValueError)."""
    if not least <= len(shape) <= MOST_AXES:
        raise ValueError(f"{name}: shape {shape}, expected {least} to {MOST_AXES} dimensions")


def check_size(shape: tuple[int, ...], name: str = "shape") -> None:
    """Check that x has at most `MOST_ELEMENTS` elements, where empty axes count as 1 (ValueError)."""
    if math.prod(max(1, size) for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"{name}: {shape}, expected at most 2**60 elements, where a size of 0 counts as 1")


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
    """The memory order in which kernels can read x without a copy; ``data_format`` if x has to be copied."""
    for layout in (data_format, *LAYOUTS):
        if x.transpose(memory_order(x.ndim, data_format, layout)).flags.c_contiguous:
            return layout
    return data_format


def like(name: str, array: Array, x: Array) -> None:
    """Check that an array has the dtype (TypeError) and the shape (ValueError) of x."""
    one_dtype(("x", x), (name, array))
    shape_of(name, array, x.shape, ", the shape of x")


def parameter_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes that gamma and beta may have: x's, the accumulator's, and for float32 x also those of 16 bits."""
    narrow = ("float16", "bfloat16") if dtype == "float32" else ()
    return tuple(dict.fromkeys((dtype, accumulator(dtype), *narrow)))


def parameter(
    name: str, array: Array | None, shape: tuple[int, ...], dtype: str, why: str = ", one element per channel"
) -> str | None:
    """The dtype of gamma or beta, None if absent.

    It must be one of `parameter_dtypes` (TypeError), and the shape must be ``shape`` (ValueError).
    """
    if array is None:
        return None
    found = dtype_name(name, array, parameter_dtypes(dtype), f" for {dtype} x")
    shape_of(name, array, shape, why)
    return found


def parameter_named(name: str, given: object, dtype: str) -> str | None:
    """The dtype of gamma or beta from its name or dtype object (TypeError); None if absent."""
    return None if given is None else dtype_named(name, given, parameter_dtypes(dtype))


def y_types(given: object, dtype: str) -> tuple[tuple[str, str], ...]:
    """`Problem.others` of a forward for its argument y_dtype (TypeError). It is empty if y has x's dtype."""
    if given is None:
        return ()
    found = dtype_named("y_dtype", given, (dtype, accumulator(dtype)))
    return () if found == dtype else (("y_t", found),)


def y_of(x: Array, axes: tuple[int, ...], types: tuple[tuple[str, str], ...]) -> OutputSpec:
    """The output y in the memory order ``axes`` of x. ``types`` are those of `y_types`."""
    return OutputSpec("y", x.shape, DTYPES[dict(types)["y_t"]] if types else x.dtype, axes)


def statistics(first: tuple[str, Array], second: tuple[str, Array], dtype: str, size: int, expected: str) -> str:
    """The common dtype of mean and rstd.

    It must be the accumulator's dtype or x's (TypeError), and both must have ``size`` elements (ValueError).
    """
    found = dtype_name(*first, (accumulator(dtype), dtype), f" for {dtype} x")
    one_dtype(first, second)
    for name, array in (first, second):
        sized(name, array, size, expected)
    return found


def vector(name: str, shape: tuple[int, ...], dtype: str, when_empty: float = 0.0) -> OutputSpec:
    """The output of a C-contiguous result: statistics, or the gradient of a parameter."""
    return OutputSpec(name, shape, DTYPES[dtype], tuple(range(len(shape))), when_empty)


def chosen(names: Sequence[str], flags: Sequence[bool]) -> tuple[str, ...]:
    """The names whose flag is set."""
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def gradients(
    x: Array, axes: tuple[int, ...], shape: tuple[int, ...], dtype: str, wanted: Sequence[bool]
) -> list[OutputSpec | None]:
    """The outputs dx, in the memory order ``axes`` of x, and dgamma and dbeta with that shape and dtype."""
    results = [OutputSpec("dx", x.shape, x.dtype, axes), vector("dgamma", shape, dtype), vector("dbeta", shape, dtype)]
    return [result if flag else None for result, flag in zip(results, wanted, strict=True)]


def check_tuple(out: object, names: Sequence[str]) -> tuple[Any, ...]:
    """Return ``out`` if it is a tuple with an element for each of these results. TypeError if not."""
    if isinstance(out, tuple) and len(out) == len(names):
        return out
    came = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
    raise TypeError(f"out: {came}, expected a tuple of {len(names)}: {', '.join(names)} (None: allocate)")


def check_out(out: object, results: Sequence[OutputSpec | None], names: Sequence[str]) -> None:
    """Check the outputs that the user passed: TypeError for container or dtype, ValueError for shape or strides."""
    if out is None:
        return
    for result, array in zip(results, check_tuple(out, names), strict=True):
        if result is not None and array is not None:
            result.check(array)
