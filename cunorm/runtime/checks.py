"""What the ops check of arrays, and how tensors lie in memory: sizes, dtypes, layouts, outputs."""

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
from cunorm.core.problem import LAYOUTS, accumulator
from cunorm.executors.choose import executor

from .plans import Target


def memory_order(rank: int, data_format: str, layout: str) -> tuple[int, ...]:
    """The axes of a (N, C, *) or (N, *, C) tensor in the order in which ``layout`` has them in memory."""
    if data_format == layout:
        return tuple(range(rank))
    return (0, *range(2, rank), 1) if layout == "NHWC" else (0, rank - 1, *range(1, rank - 1))


def is_direct(array: Array, axes: tuple[int, ...]) -> bool:
    """Whether a kernel can access the array where it lies: dense in that order, each element on its own boundary."""
    return bool(array.transpose(axes).flags.c_contiguous) and pointer(array) % array.dtype.itemsize == 0


@dataclass(frozen=True)
class OutputSpec:
    """An output of a call.

    Attributes
    ----------
    name : str
        What launches call it.
    shape : tuple of int
    dtype : numpy.dtype
    axes : tuple of int
        Its axes in memory order.
    when_empty : float
        What it holds where there are no elements.
    updated : bool
        Whether kernels read what it held.
    label : str
        What a user calls the array to write.
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
        """Check an ``out`` array: TypeError for its dtype, ValueError for its shape or if it cannot be written."""
        if array.dtype != self.dtype:
            raise TypeError(f"{self.label}: dtype {array.dtype}, expected {self.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"{self.label}: shape {array.shape}, expected {self.shape}")
        writable(self.label, array)


def writable(name: str, array: Array) -> None:
    """Check that an array can be written, each element on its own (ValueError)."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: read-only, expected an array that can be written")
    if not elements_apart(array):
        raise ValueError(f"{name}: strides {array.strides}, expected elements that are apart in memory")


def dense_copy(array: Array, axes: tuple[int, ...], xp: Any) -> Array:
    """A copy of an array that is dense in the order of ``axes``, each element on its own boundary."""
    copy = xp.ascontiguousarray(array.transpose(axes))
    return copy if pointer(copy) % copy.dtype.itemsize == 0 else copy.copy()


GRADIENTS = ("dx", "dgamma", "dbeta")
NAN = float("nan")
#: Sizes and byte counts pass to kernels in 64 bits.
MOST_ELEMENTS = 2**60


def place_for(kind: str, ordinal: int) -> Target:
    """The place of arrays of that kind."""
    if kind == "cpu":
        return Target("cpu", 0, known(settings.cpu_device(), "CUNORM_CPU_DEVICE"))
    return Target("gpu", ordinal, executor("gpu").limits(ordinal))


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


def vector(name: str, shape: tuple[int, ...], dtype: str, when_empty: float = 0.0) -> OutputSpec:
    """A result that is dense in its own order: statistics, and gradients of parameters."""
    return OutputSpec(name, shape, DTYPES[dtype], tuple(range(len(shape))), when_empty)


def chosen(names: Sequence[str], flags: Sequence[bool]) -> tuple[str, ...]:
    """The names whose flag is set."""
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def gradients(
    x: Array, axes: tuple[int, ...], shape: tuple[int, ...], dtype: str, wanted: Sequence[bool]
) -> list[OutputSpec | None]:
    """The results dx, as x lies in the memory order ``axes``, and dgamma and dbeta of that shape and dtype."""
    results = [OutputSpec("dx", x.shape, x.dtype, axes), vector("dgamma", shape, dtype), vector("dbeta", shape, dtype)]
    return [result if flag else None for result, flag in zip(results, wanted, strict=True)]


def check_out(out: object, results: Sequence[OutputSpec | None], names: Sequence[str]) -> None:
    """Check the given outputs: TypeError for a wrong container or dtype, ValueError for shapes and strides."""
    if out is None:
        return
    if not isinstance(out, tuple) or len(out) != len(results):
        raise TypeError(f"out: {type(out).__name__}, expected a tuple of {', '.join(names)} (None: allocate)")
    for result, array in zip(results, out, strict=True):
        if result is not None and array is not None:
            result.check(array)
