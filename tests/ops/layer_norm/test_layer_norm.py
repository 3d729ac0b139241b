"""Every strategy of LayerNorm against the float64 oracle, on hostile shapes and schedules, on both executors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.ops.common import limits
from cunorm.runtime import plans
from tests.conftest import Executor
from tests.support.covering import every, pairwise
from tests.support.problems import LayerArrays, forget_calls, layer_arrays, shifted

# (rows, length): one row, one column, and lengths with every tail of a 16-byte access. Some have more rows than the
# teams of a tile process at a time, so that teams accumulate the sums of columns over several rows.
SHAPES = [
    (1, 1),
    (129, 1),
    (1, 7),
    (9, 2),
    (40, 31),
    (17, 33),
    (70, 64),
    (5, 127),
    (67, 130),
    (2, 500),
    (1, 1023),
    (3, 1025),
]
IDS = [f"{rows}x{length}" for rows, length in SHAPES]

# One tile per strategy keeps the number of builds low. With packs_per_thread = 8, a warp keeps the sums of its columns
# in registers for float32 and float64, and in shared memory for the 16-bit types.
TILES: dict[str, dict[str, dict[str, int]]] = {
    "warp": {
        "forward": {"threads": 128, "lanes": 32, "packs_per_thread": 8, "rows_per_team": 4},
        "backward": {"stages": 1},
    },
    "block": {
        "forward": {"threads": 96, "packs_per_thread": 3, "rows_per_team": 4, "teams_per_block": 1},
        "backward": {"cluster": 1, "stages": 1},
    },
    "cluster": {
        "forward": {"threads": 64, "packs_per_thread": 3, "cluster": 2, "rows_per_team": 4, "teams_per_block": 1},
        "backward": {},
    },
    "grid": {
        "forward": {"threads": 128, "lanes": 64, "packs_per_thread": 2, "slabs": 3, "smem_kib": 64},
        "backward": {},
    },
    "split": {"forward": {"threads": 128, "packs_per_thread": 1, "rows_per_team": 4, "chunk": 64}, "backward": {}},
}
STRATEGIES = list(TILES)


def tile_of(strategy: str, direction: str) -> dict[str, Any]:
    fields = dict(TILES[strategy]["forward"])
    if direction == "backward":
        fields = {name: value for name, value in fields.items() if name != "chunk"} | TILES[strategy]["backward"]
    return {"strategy": strategy, **fields}


class Case(LayerArrays):
    """Arrays of one problem. The last axis is normalised."""

    def __init__(
        self, rows: int, length: int, dtype: str, gamma_dtype: str | None = "same", offset: float = 0.0
    ) -> None:
        made = layer_arrays((rows, length), length, dtype, gamma_dtype=gamma_dtype, seed=0, offset=offset)
        super().__init__(**vars(made))

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and rstd of the present x."""
        self.settle()
        return self.mean, self.rstd

    def forward(self, executor: Executor, **options: Any) -> None:
        """Run the forward and compare."""
        self.checked("layer_norm", executor, **options)

    def backward(self, executor: Executor, mask: tuple[bool, ...] = (True,) * 3, **options: Any) -> None:
        """Run the backward and compare."""
        self.settle()
        self.checked("layer_norm_backward", executor, output_mask=mask, **options)

    def check_gradients(self, executor: Executor, found: Any) -> None:
        """Compare the results of a backward call that a test has made itself."""
        self.settle()
        self.compare("layer_norm_backward", executor, found)


def run(case: Case, strategy: str, direction: str, executor: Executor, **options: Any) -> bool:
    """Check one direction with one strategy. Return whether the strategy accepted the problem."""
    check = case.forward if direction == "forward" else case.backward
    try:
        check(executor, tile=tile_of(strategy, direction), **options)
    except cunorm.UnsupportedTile as refusal:
        refused = str(refusal)
    else:
        return True
    assert strategy != "split", refused  # split accepts every length
    return False


@pytest.mark.parametrize(
    ("dtype", "strategy", "direction"), pairwise(list(DTYPES), STRATEGIES, ["forward", "backward"])
)
def test_matches_the_oracle_on_hostile_shapes(dtype: str, strategy: str, direction: str, executor: Executor) -> None:
    # split has the most kernels. There, float16 uses float32 parameters, whose builds another test needs too.
    gamma_dtype = "float32" if (dtype, strategy) == ("float16", "split") else "same"
    taken = 0
    for shape, name in zip(SHAPES, IDS, strict=True):
        try:
            taken += run(Case(*shape, dtype, gamma_dtype), strategy, direction, executor)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    assert taken >= {"warp": 10, "block": 10, "cluster": 7, "grid": 10, "split": len(SHAPES)}[strategy]


@pytest.mark.long
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_float16_parameters_of_split(direction: str, executor: Executor) -> None:
    """The quick tests omit these builds."""
    for shape in SHAPES:
        assert run(Case(*shape, "float16"), "split", direction, executor)


@pytest.mark.parametrize("mask", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_mask(strategy: str, mask: tuple[bool, ...], executor: Executor) -> None:
    taken = strategy != "grid" or mask[0]  # grid keeps rows for dx only, so it refuses masks without dx
    for shape, dtype in (((1, 33), "float32"), ((21, 33), "float32"), ((21, 33), "bfloat16")):
        assert run(Case(*shape, dtype), strategy, "backward", executor, mask=mask) == taken


@pytest.mark.parametrize(
    ("dtype", "gamma_dtype", "strategy"),
    pairwise(
        ["bfloat16", "float16", "float32"], ["float32", None], STRATEGIES, legal=lambda row: row[:2] != ("float32",) * 2
    ),
)
def test_mixed_and_missing_parameters(dtype: str, gamma_dtype: str | None, strategy: str, executor: Executor) -> None:
    case = Case(11, 70, dtype, gamma_dtype)
    assert run(case, strategy, "forward", executor)
    assert run(case, strategy, "backward", executor)


@pytest.mark.parametrize("tile", every(2, [
    {"strategy": "warp", "threads": 128, "lanes": 4, "packs_per_thread": 2, "rows_per_team": 1, "stages": 1},
    {"strategy": "warp", "threads": 256, "lanes": 1, "packs_per_thread": 8, "rows_per_team": 3, "stages": 1},
    # one team per block
    {"strategy": "warp", "threads": 32, "lanes": 32, "packs_per_thread": 1, "rows_per_team": 100, "stages": 1},
    # sums in shared memory
    {"strategy": "warp", "threads": 128, "lanes": 8, "packs_per_thread": 16, "rows_per_team": 2, "stages": 1},
    {"strategy": "block", "threads": 64, "packs_per_thread": 2, "rows_per_team": 1, "cluster": 1, "teams_per_block": 1,
        "stages": 1},
    # blocks of a cluster add up their sums
    {"strategy": "block", "threads": 64, "packs_per_thread": 2, "rows_per_team": 1, "cluster": 8, "teams_per_block": 1,
        "stages": 1},
    # one block processes all rows
    {"strategy": "block", "threads": 512, "packs_per_thread": 1, "rows_per_team": 1000, "cluster": 1,
        "teams_per_block": 1, "stages": 1},
    # teams of two warps
    {"strategy": "block", "threads": 512, "packs_per_thread": 1, "rows_per_team": 2, "cluster": 2,
        "teams_per_block": 8, "stages": 1},
    # one team, one slab
    {"strategy": "grid", "threads": 256, "lanes": 256, "packs_per_thread": 2, "slabs": 1, "smem_kib": 80},
    # one sector per slab
    {"strategy": "grid", "threads": 512, "lanes": 32, "packs_per_thread": 1, "slabs": 130, "smem_kib": 64},
    {"strategy": "split", "threads": 128, "packs_per_thread": 1, "rows_per_team": 1, "chunk": 1},
    # one band, one chunk
    {"strategy": "split", "threads": 128, "packs_per_thread": 4, "rows_per_team": 1000, "chunk": 100000},
]), ids=str)  # fmt: skip
def test_other_tiles(tile: dict[str, Any], executor: Executor) -> None:
    for rows, length in ((19, 8), (19, 15), (45, 16), (100, 9)):
        case = Case(rows, length, "float32")
        case.backward(executor, tile={name: value for name, value in tile.items() if name != "chunk"})
        case.forward(executor, tile={name: value for name, value in tile.items() if name not in ("cluster", "stages")})


@pytest.mark.parametrize(("rows", "length", "strategy"), every(2, [
    (1024, 12288, "block"),  # few rows, wide
    (2048, 4096, "block"),
    (802816, 96, "warp"),  # many rows, narrow
    (1, 1000, "warp"),  # one row
    (65536, 1, "warp"),  # one column
    (4096, 1023, "warp"),  # odd
    (4096, 4097, "block"),
    (512, 33333, "cluster"),  # longer than a block holds
    (67, 123479, "grid"),  # too few rows to amortise the loads of the parameters
    (64, 300000, "split"),  # longer than a cluster holds
]))  # fmt: skip
def test_the_cost_model_s_strategy_of_named_shapes(rows: int, length: int, strategy: str, executor: Executor) -> None:
    """The cost model selects this strategy, and the selected tile gives correct results for a few of the rows."""
    options: dict[str, Any] = {"shape": (rows, length), "dtype": "bfloat16", "normalized_shape": length}
    plan = cunorm.plan("layer_norm_backward", gamma_dtype="bfloat16", device="H200", **options)
    assert plan.strategy is not None
    assert plan.tile is not None
    assert plan.strategy.name == strategy
    few = Case(min(rows, 5 if length > 1000 else 100), length, "bfloat16")
    few.backward(executor, tile=plan.tile)
    forward = cunorm.plan("layer_norm", device="H200", **options).tile
    few.forward(executor, tile=forward)


@pytest.mark.parametrize("device", ["H200", "A100"])
def test_parameter_sums_are_spread_over_many_blocks(device: str) -> None:
    """The fold of the [partials, length] workspace never uses a single block if there are many partial rows."""
    for rows, length in (
        (802816, 96),
        (1024, 12288),
        (16384, 4096),
        (200704, 128),
        (10**6, 1),
        (10**6, 7),
        (67, 123479),
    ):
        plan = cunorm.plan(
            "layer_norm_backward", shape=(rows, length), dtype="bfloat16", normalized_shape=length, device=device
        )
        sums = [plans for plans in plan.launches if plans.entry == "parameter_sums"]
        # One block, or none, is enough for few partial rows.
        many = plan.launches[0].grid // plan.launches[0].cluster > 128
        assert not many or sums[0].grid >= 8, (rows, length, sums)


def test_the_variance_of_long_rows_far_from_zero(executor: Executor) -> None:
    """1024 x 32768 values 100 + 0.01 N(0, 1) in float32, eps 0: the relative error of the variance is below 1e-3."""
    random = np.random.default_rng(0)
    x = (100 + 0.01 * random.standard_normal((1024, 32768), np.float32)).astype(np.float32)
    exact = x.astype(np.float64).var(axis=1)
    for tile, rows in (
        (None, 1024),
        ({"strategy": "split", "threads": 128, "packs_per_thread": 1, "rows_per_team": 4, "chunk": 4096}, 64),
    ):
        _, _, rstd = cunorm.layer_norm(executor.put(x[:rows]), 32768, eps=0, tile=tile)
        variance = executor.get(rstd).astype(np.float64).reshape(-1) ** -2
        assert np.max(np.abs(variance / exact[:rows] - 1)) < 1e-3
    careless = np.mean(x[:8] * x[:8], axis=1, dtype=np.float32) - np.mean(x[:8], axis=1, dtype=np.float32) ** 2
    assert np.max(np.abs(careless / exact[:8] - 1)) > 1e-3, "the test would not notice a careless variance"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_misaligned_slices(dtype: str, strategy: str, executor: Executor) -> None:
    """Arrays, including gamma and beta, start 1, 2, ... elements past a 16-byte boundary, each differently."""
    for rows, length in ((23, 37 if strategy == "cluster" else 16), (23, 75), (9, 200)):
        case = Case(rows, length, dtype)
        mean, rstd = map(executor.put, case.statistics())
        for shifts in ((1, 1, 1, 1), (1, 2, 3, 5), (0, 3, 0, 7)):
            dy, x, gamma, out = (
                shifted(executor, a, s) for a, s in zip((case.dy, case.x, case.gamma, case.x * 0), shifts, strict=True)
            )
            found = cunorm.layer_norm_backward(
                dy, x, length, mean, rstd, gamma, out=(out, None, None), tile=tile_of(strategy, "backward")
            )
            assert found[0] is out
            case.check_gradients(executor, found)
            y, saved_mean, saved_rstd = cunorm.layer_norm(
                x, length, gamma, shifted(executor, case.beta, 3), out=(out, None, None),
                tile=tile_of(strategy, "forward"),
            )  # fmt: skip
            case.compare("layer_norm", executor, (y, saved_mean, saved_rstd))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_repeated_calls_are_bitwise_equal(strategy: str, executor: Executor) -> None:
    case = Case(41, 67, "bfloat16")
    dy, x, mean, rstd, gamma, beta = map(executor.put, (case.dy, case.x, *case.statistics(), case.gamma, case.beta))

    def results() -> list[bytes]:
        backward = cunorm.layer_norm_backward(dy, x, 67, mean, rstd, gamma, tile=tile_of(strategy, "backward"))
        forward = cunorm.layer_norm(x, 67, gamma, beta, tile=tile_of(strategy, "forward"))
        return [executor.get(a).tobytes() for a in (*backward, *forward)]

    assert results() == results()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_do_not_depend_on_the_order_of_threads(
    strategy: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(41, 167, dtype)
    mean, rstd = case.statistics()
    seen = {}
    for order in ("ascending", "descending", "random:1", "random:2"):
        monkeypatch.setenv("CUNORM_CPU_ORDER", order)
        tile = tile_of(strategy, "backward")
        gradients = cunorm.layer_norm_backward(case.dy, case.x, 167, mean, rstd, case.gamma, tile=tile)
        case.check_gradients(Executor("cpu"), gradients)
        values = cunorm.layer_norm(case.x, 167, case.gamma, case.beta, tile=tile_of(strategy, "forward"))
        seen[order] = [np.asarray(a).tobytes() for a in (*gradients, *values)]
    assert all(bits == seen["ascending"] for bits in seen.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_grid_smaller_than_the_work(
    strategy: str, dtype: str, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only three blocks: each processes several items and reuses its shared memory for the next item."""
    monkeypatch.setattr(limits, "MAX_GRID", 3)
    plans._plans.clear()
    forget_calls()
    try:
        for rows, length in ((90, 130), (90, 33), (7, 257)):
            case = Case(rows, length, dtype)
            for direction in ("forward", "backward"):
                for order in ("ascending", "descending", "random:1"):
                    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
                    assert run(case, strategy, direction, executor)
        assert plans._plans
        assert all(one.grid <= 3 for plan in plans._plans.values() for one in plan.launches)
    finally:
        plans._plans.clear()
        forget_calls()


def test_parameter_sums_in_slices(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many partial rows of few columns: a launch sums slices of the rows, and a second launch adds up the slices."""
    case = Case(700, 3, "float32")
    tile = {
        "strategy": "block",
        "threads": 64,
        "packs_per_thread": 1,
        "rows_per_team": 1,
        "cluster": 1,
        "teams_per_block": 1,
        "stages": 1,
    }
    plan = cunorm.plan(
        "layer_norm_backward", shape=(700, 3), dtype="float32", normalized_shape=3, tile=tile, device="cpu"
    )
    assert [plans.entry for plans in plan.launches].count("parameter_sums") == 2
    assert plan.launches[1].grid > 1
    for order in ("ascending", "descending", "random:1"):
        monkeypatch.setenv("CUNORM_CPU_ORDER", order)
        workspace = executor.xp.full(plan.workspace_nbytes, 0xFF, np.uint8)
        case.backward(executor, tile=tile, workspace=workspace)
