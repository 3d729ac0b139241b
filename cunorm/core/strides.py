"""Where an array's elements lie, told from its address, shape and strides: spans, overlaps, views in other shapes."""

from __future__ import annotations

import numpy as np

from .arrays import Array, namespace, pointer

__all__ = ["elements_apart", "extent", "in_one_piece", "overlap", "plain", "same_elements", "span", "view_as"]

#: Candidates that NumPy may try to tell whether two strided arrays share an element; after that they count as sharing.
SHARING_WORK = 10**6


def elements_apart(array: Array) -> bool:
    """Whether no two elements of an array share memory, told from its strides: each steps over all smaller ones."""
    reach = array.dtype.itemsize
    steps = sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1)
    for stride, size in steps:
        if stride < reach and array.size:
            return False
        reach += stride * (size - 1)
    return True


class _Shadow:
    """An array's address, shape and strides without its memory: NumPy computes with it, and never reads there."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "data": (pointer(array), False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "version": 3,
        }


def _shadow(array: Array) -> np.ndarray:
    """A NumPy array that lies as this one does, on a GPU too: to compute with its strides, never to be read."""
    return np.asarray(_Shadow(array))


def share_elements(a: Array, b: Array) -> bool:
    """Whether two arrays of either kind have a byte in common; two halves of one tensor have none."""
    try:
        return np.shares_memory(_shadow(a), _shadow(b), max_work=SHARING_WORK)  # type: ignore[arg-type]  # the stubs know two of its values
    except np.exceptions.TooHardError:
        return True


def overlap(a: Array, a_span: tuple[int, int], b: Array, b_span: tuple[int, int]) -> bool:
    """Whether two arrays of these spans have a byte in common; asked of their strides only where the spans meet."""
    return a_span[0] < b_span[1] and b_span[0] < a_span[1] and share_elements(a, b)


def same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays of one shape and dtype have each element in the same place; one of size 1 takes no step."""
    steps = [[stride for stride, size in zip(array.strides, array.shape, strict=True) if size > 1] for array in (a, b)]
    return bool(a.shape == b.shape and steps[0] == steps[1] and pointer(a) == pointer(b))


def span(array: Array) -> tuple[int, int]:
    """The addresses that an array's elements lie between: [low, high)."""
    start, (before, behind) = pointer(array), extent(array)
    return start - before, start + behind


def extent(array: Array) -> tuple[int, int]:
    """The bytes before and behind the first element that an array's elements reach: [pointer - low, pointer + high)."""
    if array.size == 0:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + array.dtype.itemsize


def plain(array: Array) -> Array:
    """The array; of a subclass of NumPy's its memory, for a matrix has ideas of its own about shapes."""
    return np.asarray(array) if isinstance(array, np.ndarray) else array


def view_as(array: Array, shape: tuple[int, ...]) -> Array | None:
    """The same elements, in C order, in another shape of as many, without a copy; None where it would take one."""
    if isinstance(array, np.ndarray):
        try:
            return np.asarray(array).reshape(shape, copy=False)
        except ValueError:
            return None
    if array.size == 0:
        return array.reshape(shape)
    try:
        strides = _shadow(array).reshape(shape, copy=False).strides
    except ValueError:
        return None
    return namespace("gpu").ndarray(shape, array.dtype, array.data, strides)


def in_one_piece(array: Array) -> Array | None:
    """The memory of an array as bytes, in a row; None where there are gaps in it, or elements share it."""
    flat = plain(array)
    flat = flat.reshape(1) if flat.ndim == 0 else flat
    flat = flat[tuple([slice(None, None, -1 if stride < 0 else 1) for stride in flat.strides])]
    flat = flat.transpose(sorted(range(flat.ndim), key=lambda axis: -flat.strides[axis]))
    return flat.reshape(-1).view(np.uint8) if flat.flags.c_contiguous else None
