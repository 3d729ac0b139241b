"""How far a result may lie from the float64 oracle: the tuner's bounds, as assertions."""

from __future__ import annotations

from typing import Any

import numpy as np
from cunorm.tuning.verify.tolerance import *  # noqa: F403  # the table, by the names of its functions
from cunorm.tuning.verify.tolerance import fault


def assert_within(name: str, came: Any, exact: np.ndarray, bound: np.ndarray, dtype: str) -> None:
    """Every element within its bound; NaN and infinity exactly where the oracle has them."""
    sentence = fault(name, came, exact, bound, dtype)
    assert sentence is None, sentence
