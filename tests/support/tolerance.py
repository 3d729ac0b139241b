"""Tolerances of results against the float64 oracle: the ops' bounds, and an assertion."""

from __future__ import annotations

from typing import Any

import numpy as np

from cunorm.ops.batch_norm.oracle import batch_elemt, batch_input, batch_reduce, batch_stats
from cunorm.ops.common.tolerance import UNIT, backward, fault, forward
from cunorm.ops.group_norm.oracle import silu_backward, silu_forward
from cunorm.ops.layer_norm.oracle import layer_backward, layer_forward

__all__ = [
    "UNIT",
    "assert_within",
    "backward",
    "batch_elemt",
    "batch_input",
    "batch_reduce",
    "batch_stats",
    "forward",
    "layer_backward",
    "layer_forward",
    "silu_backward",
    "silu_forward",
]


def assert_within(name: str, came: Any, exact: np.ndarray, bound: np.ndarray, dtype: str) -> None:
    """Assert that each element is within its bound, and that NaN and infinity are exactly where the oracle has them."""
    sentence = fault(name, came, exact, bound, dtype)
    assert sentence is None, sentence
