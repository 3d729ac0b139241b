"""Hostile tests of BatchNorm: long sums of equal terms, values near overflow and underflow, tiles beyond the space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES
from tests.conftest import Executor
from tests.ops.batch_norm.test_batch_norm import GATHER, REDUCING
from tests.support.tolerance import assert_within, batch_reduce, batch_stats

#: Shapes and tiles whose threads add up thousands of terms sequentially: the longest chains of each tile space.
LONG = [
    ((8192, 256), {"strategy": "column", "threads": 128, "columns": 64, "chunk": 4096}),
    ((2, 2, 131072), {"strategy": "split", "threads": 128, "chunk": 65536}),
    ((256, 4, 49), {"strategy": "block", "threads": 64, "channels": 4, "samples_per_block": 64}),
]


@pytest.mark.parametrize(
    ("shape", "tile"), LONG, ids=lambda value: value["strategy"] if isinstance(value, dict) else ""
)
def test_long_sums_of_equal_terms(shape: tuple[int, ...], tile: dict[str, Any], executor: Executor) -> None:
    """dy = 0.1 everywhere, like the gradient of a mean: every addition of a long chain rounds in the same direction."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    dy = np.full(shape, 0.1, np.float32)
    exact = reference.batch_norm_stats(x)
    found = cunorm.batch_norm_stats(executor.put(x), tile=tile)
    mean, invstd = (a.astype(np.float32) for a in exact)
    for name, came, want, bound in zip(
        ("mean", "invstd"), found, exact, batch_stats(x, *exact, "float32"), strict=True
    ):
        assert_within(name, executor.get(came), want, bound, "float32")
    given = [executor.put(a) for a in (dy, x, mean, invstd)]
    sums = cunorm.batch_norm_backward_reduce(*given, tile=tile)
    exact_sums = reference.batch_norm_backward_reduce(dy, x, mean, invstd)
    for came, want, bound in zip(sums, exact_sums, batch_reduce(dy, x, mean, invstd, "float32"), strict=True):
        assert_within("sum", executor.get(came), want, bound, "float32")


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ((6, 2, 40), "block"),
        ((6, 2, 40), "cluster"),
        ((6, 2, 40), "split"),
        ((40, 2), "column"),
    ],
)
def test_a_variance_that_overflows_is_nan_and_the_mean_is_correct(
    shape: tuple[int, ...], strategy: str, executor: Executor
) -> None:
    """If a channel's sum of squared deviations exceeds float32, the mean is correct and invstd is NaN."""
    x = (np.random.default_rng(0).standard_normal(shape) * 1e19).astype(np.float32)
    with np.errstate(over="ignore"):
        mean, invstd = map(executor.get, cunorm.batch_norm_stats(executor.put(x), tile=REDUCING[strategy]))
    assert np.allclose(mean, reference.batch_norm_stats(x)[0], rtol=1e-5, atol=1e14)
    assert np.isnan(invstd).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tiny", [-1e-45, 1e-45, -1e-30])
def test_tiny_running_statistics(tiny: float, dtype: str, executor: Executor) -> None:
    """A value below the smallest number of the storage type becomes zero, not NaN."""
    running = executor.xp.zeros(1, DTYPES[dtype])
    means = executor.put(np.array([[tiny], [0]], np.float32))
    invstds = executor.put(np.ones((2, 1), np.float32))
    cunorm.batch_norm_gather_stats(means, invstds, [1, 100], running_mean=running, tile=GATHER)
    assert np.all(np.abs(executor.get(running).astype(np.float64)) <= 1e-30)


@pytest.mark.parametrize("field", ["samples_per_block", "channels"])
def test_a_tile_of_more_samples_or_channels_than_the_tensor(field: str, executor: Executor) -> None:
    """Such a tile is legal, up to 2^63 - 1."""
    x = np.random.default_rng(0).standard_normal((9, 5, 7)).astype(np.float32)
    tile = {"strategy": "block", "threads": 64, "channels": 2, "samples_per_block": 2} | {field: 2**63 - 1}
    exact = reference.batch_norm_stats(x)
    found = cunorm.batch_norm_stats(executor.put(x), tile=tile)
    for came, want, bound in zip(found, exact, batch_stats(x, *exact, "float32"), strict=True):
        assert_within("statistic", executor.get(came), want, bound, "float32")
