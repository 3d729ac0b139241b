"""The memory that an array's elements occupy, compared with NumPy's results."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cunorm.core.arrays import in_one_piece, same_elements, span, view_as

BASE = np.zeros((3, 4, 5), np.float32)
#: Name -> an array, and whether its memory is one contiguous range without shared elements.
PIECES = {
    "contiguous": (BASE, True),
    "transposed": (BASE.transpose(2, 0, 1), True),
    "backwards": (BASE[::-1, :, ::-1], True),
    "transposed backwards": (BASE.T[:, ::-1], True),
    "one element": (BASE[1:2, 1:2, 1:2], True),
    "no dimensions": (np.zeros((), "V64"), True),
    "no elements": (BASE[:0], True),
    "a slab": (BASE[1:], True),
    "every other": (BASE[..., ::2], False),
    "a window": (BASE[:, 1:3], False),
    "repeated": (np.broadcast_to(BASE, (2, 3, 4, 5)), False),
    "overlapping": (np.lib.stride_tricks.sliding_window_view(BASE[0, 0], 2), False),
}


@pytest.mark.parametrize(("array", "whole"), PIECES.values(), ids=PIECES)
def test_memory_as_one_contiguous_array(array: Any, whole: bool) -> None:
    """`in_one_piece` returns exactly the array's own memory, as contiguous bytes."""
    found = in_one_piece(array)
    assert (found is not None) is whole
    if found is not None:
        assert found.dtype == np.uint8
        assert found.shape == (array.nbytes,)
        assert found.flags.c_contiguous
        assert span(found) == span(array) or not array.size
        assert np.shares_memory(found, array) or not array.size


@pytest.mark.parametrize("shape", [(60,), (12, 5), (3, 20), (3, 2, 2, 5), (1, 3, 4, 5, 1), (2, 30)])
def test_views_in_other_shapes_without_a_copy(shape: tuple[int, ...]) -> None:
    """`view_as` returns a view of the same memory if NumPy can reshape without a copy, else None."""
    for axes in itertools.permutations(range(3)):
        for array in (
            BASE.transpose(axes),
            BASE.transpose(axes)[::-1],
            np.zeros((3, 4, 6), "f4")[..., 1:].transpose(axes),
        ):
            copied = array.reshape(shape)
            found = view_as(array, shape)
            assert (found is None) is not np.shares_memory(copied, array)
            if found is not None:
                assert found.shape == shape
                assert (found.strides, span(found)) == (copied.strides, span(array))


def test_same_elements_compares_addresses_shapes_and_strides() -> None:
    assert same_elements(BASE, BASE[:])
    assert same_elements(BASE[:1], BASE[::3])  # the stride of an axis of size 1 is ignored
    assert not same_elements(BASE, BASE.copy())
    assert not same_elements(BASE, BASE[::-1])
    assert not same_elements(BASE[:2], BASE[1:])
    assert not same_elements(BASE[:2], BASE)
    assert not same_elements(BASE, BASE.reshape(12, 5))
    square = np.zeros((3, 3))
    assert not same_elements(square, square.T)
