"""Every strategy of RMSNorm against the float64 oracle, and the tensors that RMSNorm and LayerNorm add."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES
from tests.conftest import Executor
from tests.ops.layer_norm.test_layer_norm import IDS, SHAPES
from tests.ops.layer_norm.test_layer_norm import tile_of as layer_tile
from tests.support.covering import every, pairwise
from tests.support.problems import RmsArrays, layer_arrays, rms_arrays, shifted

#: One tile per strategy, as for LayerNorm.
TILES: dict[str, dict[str, dict[str, int]]] = {
    "warp": {
        "forward": {"threads": 128, "lanes": 32, "packs_per_thread": 8, "rows_per_team": 4},
        "backward": {"stages": 1, "packs_per_thread": 6},
    },
    "block": {
        "forward": {"threads": 96, "packs_per_thread": 3, "rows_per_team": 4, "teams_per_block": 1},
        "backward": {"cluster": 1, "stages": 1},
    },
    "cluster": {
        "forward": {"threads": 64, "packs_per_thread": 3, "cluster": 2, "rows_per_team": 4, "teams_per_block": 1},
        "backward": {},
    },
    "split": {"forward": {"threads": 128, "packs_per_thread": 1, "rows_per_team": 4}, "backward": {}},
}
STRATEGIES = list(TILES)
EACH = pytest.mark.parametrize("strategy", STRATEGIES)


def tile_of(strategy: str, direction: str) -> dict[str, Any]:
    own = TILES[strategy]["backward"] if direction == "backward" else {}
    return {"strategy": strategy, **TILES[strategy]["forward"], **own}


def op_of(direction: str) -> str:
    return "rms_norm" if direction == "forward" else "rms_norm_backward"


def run(case: Any, strategy: str, direction: str, executor: Executor, **changes: Any) -> bool:
    """Check one direction with one strategy. Return whether the strategy accepted the problem."""
    try:
        case.checked(op_of(direction), executor, tile=tile_of(strategy, direction), **changes)
    except cunorm.UnsupportedTile as refusal:
        refused = str(refusal)
    else:
        return True
    assert strategy != "split", refused  # split accepts every length
    return False


def arrays(rows: int, length: int, dtype: str, *, added: bool = False, **named: Any) -> Any:
    made = rms_arrays((rows, length), length, dtype, seed=0, **named)
    return made.with_extras() if added else made


@pytest.mark.parametrize(
    ("dtype", "strategy", "direction", "added"),
    pairwise(list(DTYPES), STRATEGIES, ["forward", "backward"], [False, True]),
)
def test_matches_the_oracle_on_hostile_shapes(
    dtype: str, strategy: str, direction: str, added: bool, executor: Executor
) -> None:
    taken = 0
    for shape, name in zip(SHAPES, IDS, strict=True):
        case = replace(arrays(*shape, dtype, added=added), gamma_offset=0.5)
        try:
            taken += run(case, strategy, direction, executor)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    assert taken >= {"warp": 10, "block": 10, "cluster": 7, "split": len(SHAPES)}[strategy]


@pytest.mark.parametrize(
    ("dtype", "gamma_dtype", "strategy"),
    pairwise(
        ["bfloat16", "float16", "float32"], ["float32", None], STRATEGIES, legal=lambda row: row[:2] != ("float32",) * 2
    ),
)
def test_mixed_and_missing_gamma(dtype: str, gamma_dtype: str | None, strategy: str, executor: Executor) -> None:
    case = arrays(11, 70, dtype, gamma_dtype=gamma_dtype)
    for direction in ("forward", "backward"):
        assert run(case, strategy, direction, executor)
        assert run(replace(case, gamma_offset=1.0), strategy, direction, executor)


@EACH
def test_an_offset_of_gamma_is_added_in_the_precision_of_the_sums(strategy: str, executor: Executor) -> None:
    """1 + gamma with gamma of 2^-9 would be 1 if bfloat16 stored it."""
    case = arrays(5, 64, "bfloat16")
    case.gamma[...] = 2.0**-9
    case.x = np.ones_like(case.x)
    case.settle()
    y, rstd = cunorm.rms_norm(
        executor.put(case.x.astype(np.float32)),
        64,
        executor.put(case.gamma.astype(np.float32)),
        gamma_offset=1,
        eps=0,
        tile=tile_of(strategy, "forward"),
    )
    assert np.all(executor.get(rstd) == 1)
    assert np.all(executor.get(y) == np.float32(1 + 2.0**-9))
    y, _ = cunorm.rms_norm(executor.put(case.x), 64, None, gamma_offset=1, eps=0, tile=tile_of(strategy, "forward"))
    assert np.all(executor.get(y).astype(np.float32) == 1)  # without gamma the factor is 1


@pytest.mark.parametrize(("dtype", "strategy"), every(2, itertools.product(DTYPES, STRATEGIES)))
def test_h_is_the_sum_rounded_once(dtype: str, strategy: str, executor: Executor) -> None:
    """Bit for bit, also where a sum lies halfway between two values, or next to halfway."""
    random = np.random.default_rng(1)
    x = (random.standard_normal((7, 200)) * 2.0 ** random.integers(-12, 12, (7, 200))).astype(DTYPES[dtype])
    residual = (random.standard_normal((7, 200)) * 2.0 ** random.integers(-12, 12, (7, 200))).astype(DTYPES[dtype])
    exact = x.astype(np.longdouble) + residual.astype(np.longdouble)
    want = _nearest(exact, dtype)
    for op, tile in ((cunorm.rms_norm, tile_of), (cunorm.layer_norm, layer_tile)):
        *_, h = op(executor.put(x), 200, residual=executor.put(residual), tile=tile(strategy, "forward"))
        assert h.dtype == x.dtype
        assert np.array_equal(executor.get(h).astype(np.float64), want)
    assert np.array_equal(reference.joined(x, residual), want)


def _nearest(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the nearest value of the dtype, ties to the even significand, by integers."""
    digits = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}[dtype]
    _, exponent = np.frexp(exact)
    unit = np.ldexp(np.longdouble(1), exponent - digits)
    if dtype == "float16":
        unit = np.maximum(unit, np.longdouble(2.0**-24))
    return (np.rint(exact / unit) * unit).astype(np.float64)


@EACH
@pytest.mark.parametrize("family", ["rms_norm", "layer_norm"])
def test_results_may_take_the_place_of_the_inputs(family: str, strategy: str, executor: Executor) -> None:
    """y in the place of x, h in that of the residual, dx in that of dy: the same bits as in separate arrays."""
    make, tile = (rms_arrays, tile_of) if family == "rms_norm" else (layer_arrays, layer_tile)
    for dtype, rows, length in (("bfloat16", 33, 130), ("float32", 9, 256)):
        a = make((rows, length), length, dtype).with_extras()
        first = tile(strategy, "forward")
        apart = [executor.get(one) for one in a.checked(family, executor, tile=first)]
        x, residual = executor.put(a.x), executor.put(a.residual)
        out = (x, *(None,) * (len(apart) - 2), residual)
        found = a.call(family, executor, x=x, residual=residual, out=out, tile=first)
        assert found[0] is x
        assert found[-1] is residual
        assert [executor.get(one).tobytes() for one in found] == [one.tobytes() for one in apart]
        second, name = tile(strategy, "backward"), f"{family}_backward"
        apart = [executor.get(one) for one in a.checked(name, executor, tile=second)]
        dy = executor.put(a.dy)
        found = a.call(name, executor, dy=dy, out=(dy, *(None,) * (len(apart) - 1)), tile=second)
        assert found[0] is dy
        assert [executor.get(one).tobytes() for one in found] == [one.tobytes() for one in apart]


@pytest.mark.parametrize("family", ["rms_norm", "layer_norm"])
def test_results_with_a_residual_are_those_of_h(family: str, executor: Executor) -> None:
    """The statistics and y are those of the rounded h, bit for bit, and dh is added to dx before it is rounded."""
    make, tile = (rms_arrays, tile_of) if family == "rms_norm" else (layer_arrays, layer_tile)
    a = make((21, 96), 96, "bfloat16").with_extras()
    one_tile = tile("warp", "forward")  # another tile is another order of summation
    found = a.call(family, executor, tile=one_tile)
    h = found[-1]
    alone = a.call(family, executor, x=h, residual=None, tile=one_tile)
    assert len(alone) == len(found) - 1
    for one, other in zip(found, alone, strict=False):
        assert executor.get(one).tobytes() == executor.get(other).tobytes()
    dx, *_ = a.call(f"{family}_backward", executor)
    plain, *_ = a.call(f"{family}_backward", executor, dh=None)
    twice = executor.get(plain).astype(np.float32) + a.dh.astype(np.float32)
    assert not np.array_equal(executor.get(dx), twice.astype(a.x.dtype))  # one rounding less
    np.testing.assert_allclose(executor.get(dx).astype(np.float32), twice, rtol=0.01, atol=0.02)


@EACH
def test_misaligned_slices(strategy: str, executor: Executor) -> None:
    for length in (37 if strategy == "cluster" else 16, 75, 200):
        a = arrays(23, length, "bfloat16", added=True)
        for shifts in ((1, 1, 1, 1), (1, 2, 3, 5), (0, 3, 0, 7)):
            x, residual, gamma, dy = (
                shifted(executor, one, by) for one, by in zip((a.x, a.residual, a.gamma, a.dy), shifts, strict=True)
            )
            dh, rstd = shifted(executor, a.dh, shifts[1]), executor.put(a.rstd)
            out = (shifted(executor, a.x, 3), None, shifted(executor, a.x, 2))
            found = cunorm.rms_norm(x, length, gamma, residual=residual, out=out, tile=tile_of(strategy, "forward"))
            a.compare("rms_norm", executor, found, out=out)
            found = cunorm.rms_norm_backward(dy, x, length, rstd, gamma, dh=dh, tile=tile_of(strategy, "backward"))
            a.compare("rms_norm_backward", executor, found)


@EACH
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 129])
def test_nan_and_infinity_affect_only_their_row_and_column(
    where: int, value: float, strategy: str, executor: Executor
) -> None:
    with np.errstate(all="ignore"):
        case = arrays(11, 130, "float32")
        case.x[7, where] = value
        y, rstd = case.checked("rms_norm", executor, tile=tile_of(strategy, "forward"))
        assert np.isnan(executor.get(rstd)).ravel().tolist() == [row == 7 for row in range(11)]
        assert np.isnan(executor.get(y)).all(axis=1).tolist() == [row == 7 for row in range(11)]
        case = arrays(11, 130, "float32")
        case.dy[7, where] = value
        dx, dgamma = case.call("rms_norm_backward", executor, tile=tile_of(strategy, "backward"))
        lost = ~np.isfinite(executor.get(dx))
        assert lost.any(axis=1).tolist() == [row == 7 for row in range(11)]
        assert (~np.isfinite(executor.get(dgamma))).nonzero()[0].tolist() == [where]


@EACH
def test_values_that_break_careless_formulas(strategy: str, executor: Executor) -> None:
    """A large offset, an outlier, rows of zeros, and a mean square that overflows."""
    tile = tile_of(strategy, "forward")
    for offset in (1e3, -1e3):
        for direction in ("forward", "backward"):
            assert run(arrays(9, 257, "float32", offset=offset), strategy, direction, executor)
    case = arrays(2, 1000, "float32")
    case.x[0, 777] = 1e6
    assert run(case, strategy, "forward", executor)
    zeros = executor.put(np.zeros((3, 100), np.float32))
    y, rstd = cunorm.rms_norm(zeros, 100, eps=1e-6, tile=tile)
    assert np.all(executor.get(y) == 0)
    np.testing.assert_allclose(executor.get(rstd), 1e3, rtol=1e-6)
    with np.errstate(all="ignore"):
        large = executor.put(np.full((3, 100), 1e25, np.float32))
        y, rstd = cunorm.rms_norm(large, 100, tile=tile)
    assert np.isnan(executor.get(rstd)).all()  # 1 / infinity would make y a plausible 0
    assert np.isnan(executor.get(y)).all()


@EACH
def test_float64_keeps_its_digits(strategy: str, executor: Executor) -> None:
    case = replace(arrays(9, 257, "float64", added=True), gamma_offset=1 / 3)
    y, rstd, h = case.call("rms_norm", executor, tile=tile_of(strategy, "forward"))
    exact = reference.rms_norm(case.x, 257, case.gamma, residual=case.residual, gamma_offset=1 / 3)
    for came, want in zip((y, rstd, h), exact, strict=True):
        np.testing.assert_allclose(executor.get(came), want, rtol=1e-13)


@EACH
def test_results_do_not_depend_on_the_order_of_threads(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, seen = arrays(41, 168, "bfloat16", added=True), {}
    for order in ("ascending", "descending", "random:1"):
        monkeypatch.setenv("CUNORM_CPU_ORDER", order)
        found = [
            *a.call("rms_norm", Executor("cpu"), tile=tile_of(strategy, "forward")),
            *a.call("rms_norm_backward", Executor("cpu"), tile=tile_of(strategy, "backward")),
        ]
        seen[order] = [np.asarray(one).tobytes() for one in found]
    assert all(bits == seen["ascending"] for bits in seen.values())


@pytest.mark.parametrize(("rows", "length", "strategies"), [
    (589824, 64, ("warp",)),  # heads
    (131072, 128, ("warp",)),
    (16384, 4096, ("warp", "block")),
    (512, 16384, ("block", "cluster")),
    (64, 300000, ("split",)),  # longer than a cluster holds
])  # fmt: skip
def test_the_cost_model_s_strategy_of_named_shapes(
    rows: int, length: int, strategies: tuple[str, ...], executor: Executor, pytestconfig: pytest.Config
) -> None:
    """The cost model selects such a strategy, and the tile gives correct results for a few of the rows.

    The tile of the call without a residual or dh runs with `--long`: it has a build of its own.
    """
    for extra in (False, True):
        for direction, name in (("forward", "residual"), ("backward", "dh")):
            options: dict[str, Any] = {"shape": (rows, length), "dtype": "bfloat16", "normalized_shape": length}
            plan = cunorm.plan(op_of(direction), gamma_dtype="bfloat16", device="H200", **options, **{name: extra})
            assert plan.strategy is not None
            assert plan.strategy.name in strategies, plan.explain()
            if extra or pytestconfig.getoption("--long"):
                few = arrays(min(rows, 5 if length > 1000 else 100), length, "bfloat16", added=extra)
                few.checked(op_of(direction), executor, tile=plan.tile)


@pytest.mark.parametrize("length", [64, 128])
def test_heads_are_read_in_packs_by_many_rows_per_warp(length: int) -> None:
    """A head of 64 or 128 elements of 16 bits has 8 or 16 packs: a warp reads several rows, 16 bytes per lane."""
    for op in ("rms_norm", "rms_norm_backward"):
        plan = cunorm.plan(op, shape=(131072, length), dtype="bfloat16", normalized_shape=length, device="H200")
        assert plan.tile is not None
        assert plan.tile.strategy == "warp"
        assert plan.tile.lanes * plan.tile.packs_per_thread * 8 == length  # no idle lanes
        assert plan.tile.lanes <= 16
        counted = cunorm.plan(op, shape=(512, length), dtype="bfloat16", normalized_shape=length, tile=plan.tile)
        tensors = counted.traffic().of("tensor")
        assert tensors.wide_bytes == tensors.nbytes
        assert tensors.wide_efficiency == 1.0


def test_plans_name_the_tensors_of_a_call() -> None:
    plan = cunorm.plan("rms_norm", shape=(4, 64), dtype="float32", normalized_shape=64, residual=True, device="cpu")
    assert plan.problem.outputs == ("y", "rstd", "h")
    assert "with residual" in plan.explain()
    a = RmsArrays(**vars(arrays(4, 64, "float32", added=True)))
    y, rstd, h = plan(a.x, a.gamma, a.residual)
    a.check("rms_norm", (y, rstd, h))
    with pytest.raises(ValueError, match=r"^x: the plan is for rms_norm .* with residual"):
        plan(a.x, a.gamma)
    plain = cunorm.plan("rms_norm", shape=(4, 64), dtype="float32", normalized_shape=64, device="cpu")
    assert len(plain(a.x, a.gamma)) == 2
    with pytest.raises(ValueError, match=r"^x: the plan is for rms_norm"):
        plain(a.x, a.gamma, a.residual)
    with pytest.raises(TypeError, match=r"^residual: 1, expected a bool"):
        cunorm.plan("rms_norm", shape=(4, 64), dtype="float32", normalized_shape=64, residual=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dh: True, expected False for rms_norm, which does not take one"):
        cunorm.plan("rms_norm", shape=(4, 64), dtype="float32", normalized_shape=64, dh=True)


def test_dh_without_dx_changes_nothing(executor: Executor) -> None:
    """Only dx depends on dh: the plan has no third tensor then."""
    options: dict[str, Any] = {
        "shape": (4, 64),
        "dtype": "float32",
        "normalized_shape": 64,
        "output_mask": (False, True),
    }
    assert cunorm.plan("rms_norm_backward", dh=True, **options).problem.extras == ()
    a = arrays(4, 64, "float32", added=True)
    _, alone = a.checked("rms_norm_backward", executor, output_mask=(False, True))
    a.dh[...] = np.nan
    _, again = a.call("rms_norm_backward", executor, output_mask=(False, True))
    assert np.array_equal(executor.get(alone), executor.get(again))
