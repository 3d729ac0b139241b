"""GroupNorm with a fused SiLU: every strategy, both directions, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES
from cunorm.core.errors import UnsupportedTile
from cunorm.tiling.table import key_of, problem_of
from tests.conftest import Executor
from tests.ops.group_norm.test_group_norm import PARTIAL, PLACES, tile_of
from tests.support.problems import GroupArrays, group_arrays

#: (N, C, spatial, groups).
SHAPES = [(2, 6, (35,), 2), (3, 64, (7, 7), 4), (1, 8, (130,), 8), (17, 64, (), 8), (2, 4, (600,), 1)]
DTYPE_NAMES = tuple(DTYPES)


def gradients_of(dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any = None, beta: Any = None, **options: Any) -> Any:
    """The oracle's gradients of GroupNorm followed by SiLU."""
    return reference.group_norm_backward(dy, x, mean, rstd, gamma, beta=beta, activation="silu", **options)


def arrays_of(shape: tuple[Any, ...], dtype: str, data_format: str = "NCHW", spread: float = 1.0) -> GroupArrays:
    """Arrays of a problem with an activation. gamma and beta are multiplied by `spread`."""
    N, C, spatial, groups = shape
    sizes = (N, C, *spatial) if data_format == "NCHW" else (N, *spatial, C)
    made = group_arrays(sizes, groups, dtype, data_format=data_format)
    gamma, beta = (one * np.asarray(spread, one.dtype) for one in (made.gamma, made.beta))
    return replace(made, gamma=gamma, beta=beta, activation="silu")


def check(a: GroupArrays, executor: Executor, forward: Any = None, backward: Any = None) -> None:
    """Run both directions, each with its own tile, and compare."""
    a.checked("group_norm", executor, tile=forward)
    a.checked("group_norm_backward", executor, tile=backward)


def test_the_oracle_is_the_derivative() -> None:
    """dx, dgamma and dbeta against central differences of the forward."""
    a = arrays_of((2, 6, (5,), 2), "float64")
    exact = gradients_of(a.dy, a.x, a.mean, a.rstd, a.gamma, a.beta, num_groups=2)
    for array, gradient in zip((a.x, a.gamma, a.beta), exact, strict=True):
        for index in np.ndindex(array.shape):
            kept, ends = array[index], []
            for step in (1e-6, -1e-6):
                array[index] = kept + step
                ends.append((reference.group_norm(a.x, 2, a.gamma, a.beta, activation="silu")[0] * a.dy).sum())
            array[index] = kept
            # The statistics are the forward's. eps changes the derivative for x by its share of the variance.
            assert gradient[index] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


#: The quick suite runs each strategy and layout with one dtype. The rest of the product is marked long.
COVERED = [(DTYPE_NAMES[number % len(DTYPE_NAMES)], place) for number, place in enumerate(PLACES)]
PRODUCT = [
    pytest.param(dtype, place, marks=[] if (dtype, place) in COVERED else [pytest.mark.long])
    for dtype in DTYPE_NAMES
    for place in PLACES
]


@pytest.mark.parametrize(("dtype", "place"), PRODUCT)
def test_matches_the_oracle(dtype: str, place: tuple[str, str], executor: Executor) -> None:
    strategy, data_format = place
    checked = 0
    for shape in SHAPES:
        tiles = {direction: tile_of(strategy, direction) for direction in ("forward", "backward")}
        if strategy == "registers":  # a gradient with an activation and eight 16-bit packs needs too many registers
            tiles["backward"] |= {"packs_per_thread": 4}
        try:
            check(arrays_of(shape, dtype, data_format), executor, **tiles)
            checked += 1
        except UnsupportedTile:
            assert strategy in PARTIAL
    assert checked >= 1


def test_eight_packs_of_16_bits_are_refused_with_an_activation() -> None:
    options: dict[str, Any] = {"shape": (2, 64, 64), "num_groups": 2, "activation": "silu", "device": "cpu"}
    tile = tile_of("registers")
    cunorm.plan("group_norm_backward", dtype="float32", beta_dtype="float32", tile=tile, **options)
    with pytest.raises(UnsupportedTile, match="registers"):
        cunorm.plan("group_norm_backward", dtype="float16", beta_dtype="float16", tile=tile, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("lanes", "packs"), [(8, 2), (2, 16)])
def test_several_samples_per_team_with_ragged_groups(lanes: int, packs: int, dtype: str, executor: Executor) -> None:
    """HxW = 1. With few packs, parameters stay in registers. With many packs they are reloaded; sums are in memory."""
    tile = {"strategy": "warp", "threads": 64, "lanes": lanes, "packs_per_thread": packs, "samples_per_team": 4}
    for shape in ((9, 33, (), 3), (19, 62, (), 2)):
        check(arrays_of(shape, dtype), executor, tile, tile)


@pytest.mark.parametrize("samples", [1, 2])
def test_lanes_outside_a_group_stay_out_of_its_sums(samples: int, executor: Executor) -> None:
    """mean * rstd is infinite, so a zero outside the group would give a NaN term. The group's own terms are finite."""
    tile = {"strategy": "warp", "threads": 64, "lanes": 8, "packs_per_thread": 2, "samples_per_team": samples}
    x = executor.put(np.full((4, 12), 2e36, np.float32))
    options: dict[str, Any] = {"activation": "silu", "tile": tile}
    _, mean, rstd = cunorm.group_norm(x, 2, **options)
    beta = executor.put(np.zeros(12, np.float32))
    gradients = cunorm.group_norm_backward(x, x, mean, rstd, num_groups=2, beta=beta, **options)
    assert all(np.isfinite(executor.get(one)).all() for one in gradients)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("strategy", ["warp", "block", "split"])
def test_masks(strategy: str, mask: tuple[bool, ...], executor: Executor) -> None:
    """dbeta alone needs x as well, because the derivative of the activation depends on x."""
    a = arrays_of((5, 32, (), 4) if strategy == "warp" else (2, 6, (35,), 2), "float32")
    a.checked("group_norm_backward", executor, output_mask=mask, tile=tile_of(strategy))


def test_large_z_neither_overflows_nor_loses_its_sign(executor: Executor) -> None:
    """exp(-z) is infinite for z below -89, and y is then -0."""
    check(arrays_of((2, 4, (600,), 1), "float32", spread=300.0), executor)


def test_without_parameters(executor: Executor) -> None:
    a = arrays_of((2, 6, (35,), 2), "float32")
    y, *_ = cunorm.group_norm(executor.put(a.x), 2, activation="silu")
    exact = reference.group_norm(a.x, 2, activation="silu")
    assert np.abs(executor.get(y) - exact[0]).max() < 1e-5
    given = [executor.put(one) for one in (a.dy, a.x, a.mean, a.rstd)]
    dx, dgamma, dbeta = cunorm.group_norm_backward(*given, num_groups=2, activation="silu")
    want = gradients_of(a.dy, a.x, a.mean, a.rstd, num_groups=2)
    for came, expected in zip((dx, dgamma, dbeta), want, strict=True):
        assert np.abs(executor.get(came) - expected).max() < 1e-4


def test_an_activation_is_part_of_the_problem() -> None:
    options: dict[str, Any] = {"shape": (2, 64, 49), "dtype": "float32", "num_groups": 4, "device": "cpu"}
    plain, fused = (
        cunorm.plan("group_norm_backward", beta_dtype="float32", activation=one, **options) for one in (None, "silu")
    )
    assert plain.problem != fused.problem
    assert fused.problem.beta_dtype == "float32" and plain.problem.beta_dtype is None
    assert "activation=silu" in fused.explain() and "activation" not in plain.explain()
    for plan in (plain, fused):
        assert problem_of(key_of(plan.problem)) == plan.problem
    assert key_of(fused.problem)["activation"] == "silu"
    with pytest.raises(ValueError, match="activation is 'silu', which layer_norm does not have"):
        problem_of(
            {"op": "layer_norm", "dtype": "float32", "outputs": "y", "rows": 1, "length": 2, "activation": "silu"}
        )


def test_a_fused_activation_moves_no_additional_bytes() -> None:
    options: dict[str, Any] = {"shape": (4, 16, 256), "dtype": "float32", "num_groups": 4, "device": "cpu"}
    for op in ("group_norm", "group_norm_backward"):
        moved = [
            cunorm.plan(op, activation=one, tile=tile_of("block"), **options).traffic().of("tensor").nbytes
            for one in (None, "silu")
        ]
        assert moved[0] == moved[1]
