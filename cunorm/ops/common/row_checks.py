"""Checks of ops on rows: the sizes of a row, the tensors that a call may add, and the problem of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cunorm.core.arrays import Array, flag, integer, said
from cunorm.core.problem import Problem, laid_out
from cunorm.runtime.checks import check_rank, check_size, like


def row_sizes(shape: tuple[int, ...], normalized_shape: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Run the checks that calls and plans share, and return the shape of the rows [A1..Ai] and of one row [R1..Rj]."""
    check_rank(shape, 1)
    check_size(shape)
    if isinstance(normalized_shape, Sequence) and not isinstance(normalized_shape, (str, bytes)):
        row = tuple(integer("normalized_shape", size, 0) for size in normalized_shape)
    else:
        try:
            row = (integer("normalized_shape", normalized_shape, 0),)
        except TypeError as error:
            raise TypeError(f"{error} or a tuple of ints") from None
    if not row or 0 in row:
        raise ValueError(f"normalized_shape: {said(normalized_shape)}, expected at least one size, and no size of 0")
    if shape[-len(row) :] != row:
        raise ValueError(f"normalized_shape: {row}, expected the last sizes of x with shape {shape}")
    return shape[: -len(row)], row


def axes_of(array: Array | None) -> tuple[int, ...]:
    """The axes of a C-contiguous array."""
    return () if array is None else tuple(range(array.ndim))


def row_problem(outer: tuple[int, ...], row: tuple[int, ...], **facts: Any) -> Problem:
    """Problem in which a row is a sample with one group, and its elements are channels with one position."""
    return Problem(**laid_out("NCHW", math.prod(outer), math.prod(row), 1, 1), **facts)


def residual_given(residual: Array | None, x: Array) -> tuple[str, ...]:
    """Check a residual, and return the optional tensors of the problem."""
    if residual is None:
        return ()
    like("residual", residual, x)
    return ("residual",)


def dh_given(dh: Array | None, x: Array, outputs: Sequence[str]) -> tuple[str, ...]:
    """Check dh, and return the optional tensors of the problem. Only dx depends on dh."""
    if dh is None:
        return ()
    like("dh", dh, x)
    return ("dh",) if "dx" in outputs else ()


def residual_asked(residual: object) -> tuple[str, ...]:
    """The same as `residual_given` for an option of `cunorm.plan`."""
    return ("residual",) if flag("residual", residual) else ()


def dh_asked(dh: object, outputs: Sequence[str]) -> tuple[str, ...]:
    """The same as `dh_given` for an option of `cunorm.plan`."""
    return ("dh",) if flag("dh", dh) and "dx" in outputs else ()
