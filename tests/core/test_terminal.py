"""Columns, as a terminal gets them."""

from __future__ import annotations

import pytest

from cunorm.core.terminal import columns


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("kernel", "of", "bytes", ""), ("k", "tensor", "1,024", "")]
    assert columns(rows, 2) == ["kernel  of      bytes", "k       tensor  1,024"]
    assert columns(rows, 0) == ["kernel      of  bytes", "     k  tensor  1,024"]
    assert columns([], 1) == []
    with pytest.raises(ValueError, match="zip"):
        columns([("a", "b"), ("c",)], 1)
