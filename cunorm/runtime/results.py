"""How tensors lie in memory: the order that kernels read, what has to be copied into it, and a call's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cunorm.core.arrays import Array, pointer
from cunorm.core.strides import elements_apart

__all__ = ["Result", "dense_copy", "is_direct", "memory_order", "writable"]


def memory_order(rank: int, data_format: str, layout: str) -> tuple[int, ...]:
    """The axes of a (N, C, *) or (N, *, C) tensor in the order in which ``layout`` has them in memory."""
    if data_format == layout:
        return tuple(range(rank))
    return (0, *range(2, rank), 1) if layout == "NHWC" else (0, rank - 1, *range(1, rank - 1))


def is_direct(array: Array, axes: tuple[int, ...]) -> bool:
    """Whether a kernel can access the array where it lies: dense in that order, each element on its own boundary."""
    return bool(array.transpose(axes).flags.c_contiguous) and pointer(array) % array.dtype.itemsize == 0


@dataclass(frozen=True)
class Result:
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
