"""The public contract of LayerNorm alone. tests/ops/test_contract.py tests the contract that all ops share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import Executor
from tests.ops.layer_norm.contract import BACKWARD, FORWARD, tile_of
from tests.support.contract import Arguments, refused
from tests.support.problems import invoke, layer_arrays


@pytest.mark.parametrize("shape", [(4, 0), (0, 0), (3, 0, 5)])
def test_a_row_of_no_elements_is_an_error(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, row = np.zeros(shape, np.float32), shape[1:]
    given = {"x": x, "normalized_shape": row, "gamma": None, "beta": None, "out": None, "tile": None, "workspace": None}
    refused(monkeypatch, FORWARD, given, "normalized_shape", ValueError)
    statistics = np.zeros(math.prod(shape[:1]), np.float32)
    refused(monkeypatch, BACKWARD, {**given, "dy": x, "mean": statistics, "rstd": statistics}, "normalized_shape")


def test_the_cache_of_calls_distinguishes_normalized_shapes(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alternate calls of the same tensors with different normalized_shape, and with equal values of a wrong type."""
    a = layer_arrays((4, 1, 4), 4)
    x, dy = executor.put(a.x), executor.put(a.dy)
    for _ in range(2):
        for row in (4, (4,), (1, 4), [1, 4], (4, 1, 4)):
            b = layer_arrays((4, 1, 4), row)
            for op in (FORWARD, BACKWARD):
                b.checked(op, executor, x=x, dy=dy, tile=tile_of(op, None))
    ones, tile = np.ones((4, 1), np.float32), tile_of(FORWARD, None)
    for right, mistaken in ((1, True), ((1,), (True,)), ((1, 1), (1, True)), (1, 1.0)):
        shape = (4, 1, 1) if right == (1, 1) else (4, 1)
        given: Arguments = {"x": ones.reshape(shape), "gamma": None, "beta": None, "out": None, "tile": tile}
        for _ in range(2):
            invoke(FORWARD, {**given, "normalized_shape": right})
            refused(monkeypatch, FORWARD, {**given, "normalized_shape": mistaken}, "normalized_shape", TypeError)
