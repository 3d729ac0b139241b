"""Tiles with little traffic besides the tensors: shared loads, legality, and when the cost model chooses them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from cunorm.tuning.problems.workloads import problems

import cunorm
from cunorm.core.devices import known
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS
from cunorm.tiling import costmodel

H200 = known("H200")


def plan_of(op: str, shape: tuple[int, ...], tile: dict[str, Any], **options: Any) -> Any:
    return cunorm.plan(op, shape=shape, dtype="bfloat16", device="cpu", tile=tile, gamma_dtype="bfloat16", **options)


def saved(plans: list[Any]) -> list[int]:
    """Bytes of gamma, beta, mean, rstd and their gradients that each plan saves over the plan before it."""
    asked = [plan.traffic().of("parameter").nbytes for plan in plans]
    return [before - after for before, after in itertools.pairwise(asked)]


# ---- shared loads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["layer_norm", "layer_norm_backward"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_the_teams_of_a_block_load_parameters_once(op: str, cluster: int) -> None:
    rows, length = 32, 1024
    beta = {} if op.endswith("backward") else {"beta_dtype": "bfloat16"}
    plans = []
    for teams in (1, 2, 4):
        tile = {
            "strategy": "cluster" if cluster > 1 else "block",
            "threads": 64 * teams,
            "packs_per_thread": 2,
            "rows_per_team": 4,
        }
        tile |= {"teams_per_block": teams, **({"cluster": cluster} if cluster > 1 or op.endswith("backward") else {})}
        tile |= {"stages": 1} if cluster == 1 and op.endswith("backward") else {}
        plans.append(plan_of(op, (rows, length), tile, normalized_shape=length, **beta))
    once = (1 + len(beta)) * length * 2
    assert saved(plans) == [(8 - 4) * once, (4 - 2) * once]  # 8, 4 and 2 blocks or clusters


def test_the_teams_of_a_block_write_one_row_of_sums() -> None:
    tile = {"strategy": "block", "packs_per_thread": 2, "rows_per_team": 2, "cluster": 1, "stages": 1}
    plans = [
        plan_of(
            "layer_norm_backward",
            (64, 512),
            tile | {"threads": 64 * teams, "teams_per_block": teams},
            normalized_shape=512,
        )
        for teams in (1, 2, 4)
    ]
    assert [plan.workspace_nbytes for plan in plans] == [rows * 512 * 8 for rows in (32, 16, 8)]


@pytest.mark.parametrize("op", ["group_norm", "group_norm_backward"])
def test_a_team_loads_parameters_once_for_all_its_samples(op: str) -> None:
    N, C, groups = 64, 256, 16
    beta = {} if op.endswith("backward") else {"beta_dtype": "bfloat16"}
    plans = []
    for samples in (1, 4, 16):
        tile = {"strategy": "warp", "threads": 64, "lanes": 2, "packs_per_thread": 1, "samples_per_team": samples}
        plans.append(plan_of(op, (N, C), tile, num_groups=groups, **beta))
    once = (1 + len(beta)) * C * 2
    assert saved(plans) == [(64 - 16) * once, (16 - 4) * once]


@pytest.mark.parametrize(
    ("N", "groups", "rows"), [(64, 4, 4), (64, 8, 8), (64, 16, 16), (64, 32, 16), (64, 5, 16), (3, 5, 3), (10, 4, 1)]
)
def test_the_number_of_rows_of_sums_that_group_norm_writes(N: int, groups: int, rows: int) -> None:
    """Each block of 16 teams writes one row if the number of groups divides 16: the teams of a group add their sums.

    Otherwise there is one row per team of a group. A team without a sample writes no row.
    """
    tile = {"strategy": "warp", "threads": 64, "lanes": 4, "packs_per_thread": 1, "samples_per_team": 4}
    plan = plan_of("group_norm_backward", (N, 32 * groups), tile, num_groups=groups)
    assert plan.workspace_nbytes == (rows * 32 * groups * 8 if rows > 1 else 0)


# ---- legality -------------------------------------------------------------------------------------------------------


def rows_of(strategy: str, threads: int, packs: int = 1, teams: int = 2, **more: int) -> dict[str, Any]:
    """A tile of the `block` or `cluster` strategy of LayerNorm."""
    fields = {"packs_per_thread": packs, "rows_per_team": 1, "teams_per_block": teams, **more}
    return {"strategy": strategy, "threads": threads, **fields}


def kept(**more: int | str) -> dict[str, Any]:
    """A tile of GroupNorm's `grid` that keeps its inputs in shared memory."""
    return {"strategy": "grid", "threads": 64, "chunk": 16, "groups": 1, "prefetch_tiles": 1, "keep": "shared", **more}


def group_of(threads: int) -> dict[str, Any]:
    """A tile of the `warp` strategy of GroupNorm."""
    return {"strategy": "warp", "threads": threads, "lanes": 8, "packs_per_thread": 2, "samples_per_team": 2}


@pytest.mark.parametrize(("op", "shape", "tile", "sentence"), [
    ("layer_norm", (8, 64), rows_of("block", 192, teams=3), "teams_per_block is 3, expected 1, 2, 4 or 8"),
    ("layer_norm", (8, 64), rows_of("block", 64), "threads is 64, expected a multiple of 64 from 128 up"),
    ("layer_norm", (8, 64), rows_of("block", 96), "threads is 96, expected a multiple of 64 from 128 up"),
    ("layer_norm", (8, 1025), rows_of("block", 256),
     "a row has 1025 elements, but 128 threads with packs_per_thread=1 hold 1024"),
    ("layer_norm", (8, 1025), rows_of("cluster", 256, 4, cluster=2),
     "rows of 1025 elements differ in misalignment"),
    ("layer_norm", (8, 4096), rows_of("block", 256, 6),
     "packs_per_thread is 6, expected at most 4 if teams_per_block is 2: teams wait for each other"),
    ("layer_norm_backward", (8, 4096), rows_of("cluster", 256, 3, 4, cluster=4),
     "packs_per_thread is 3, expected at most 2 if teams_per_block is 4"),
    ("float64", (8, 64), rows_of("block", 128),
     "teams_per_block is 2, expected 1: float64 leaves no registers for more"),
    ("group_norm", (8, 64, 2), group_of(64), "samples_per_team is 2, expected 1 unless HxW = 1"),
    ("group_norm_backward", (8, 64), group_of(96), "threads is 96, expected a power of two"),
    ("group_norm", (2, 64, 32), kept(), "keep=shared: NCHW data, expected NHWC; for NCHW, use keep=l2"),
    ("NHWC", (2, 64, 64), kept(prefetch_tiles=2), "prefetch_tiles is 2, expected 1: keep=shared does not use it"),
    ("NHWC", (2, 64, 64), kept(groups=3), "groups is 3, expected a divisor of the number of groups, 4"),
    ("NHWC", (2, 64, 36), kept(groups=1), "rows of 9 channels do not begin on 16-byte boundaries"),
    ("NHWC", (2, 64, 64), kept(), "rows of a slab have 32 bytes, expected at least 64"),
    ("NHWC", (2, 64, 1024), kept(groups=4), "rows of 1024 channels have more packs than a block has threads, 64"),
    ("NHWC", (2, 4096, 256), kept(groups=4, chunk=512), "needs .* bytes of shared memory per block"),
    ("NHWC", (2, 4096, 256), kept(groups=4, chunk=1), "8192 pieces, but NVIDIA H200 holds at most 4224 blocks"),
    ("NHWC", (2, 4096, 256), kept(groups=4, chunk=7), "1172 pieces, but NVIDIA H200 holds 1056 blocks of this tile"),
    ("NHWC", (2, 1, 256), kept(groups=4), "HxW is 1, expected more"),
    ("NHWC", (2, 64, 64), kept(groups=4, chunk=2**63), "chunk is 9223372036854775808, expected at most"),
    ("NHWC", (2, 64, 64), kept(groups=4, keep="l3"), "keep is l3, expected l2 or shared"),
], ids=lambda value: "" if isinstance(value, (dict, str)) else str(value))  # fmt: skip
def test_illegal_tiles_are_refused(op: str, shape: tuple[int, ...], tile: dict[str, Any], sentence: str) -> None:
    dtype = op if op == "float64" else "bfloat16"
    own: dict[str, Any] = {"normalized_shape": shape[-1]}
    if op == "NHWC" or op.startswith("group"):
        own = {"num_groups": 4, "data_format": "NHWC" if op == "NHWC" else "NCHW"}
    name = {"float64": "layer_norm", "NHWC": "group_norm"}.get(op, op)
    with pytest.raises(cunorm.UnsupportedTile, match=sentence):
        cunorm.plan(name, shape=shape, dtype=dtype, device="cpu", tile=tile, **own)


# ---- the model ------------------------------------------------------------------------------------------------------


def test_among_near_ties_the_model_chooses_a_tile_that_moves_few_bytes(pytestconfig: pytest.Config) -> None:
    """For some problems the default moves fewer bytes than the fastest tile, and takes hardly longer.

    The quick suite takes each third problem.
    """
    leaner, step = 0, 1 if pytestconfig.getoption("--long") else 3
    of_op = [*dict.fromkeys(one for _, one in problems("bfloat16") if one.op == "group_norm_backward")]
    for problem in of_op[::step]:
        found = [*costmodel.legal(problem, OPS[problem.op].strategies.values(), H200)]
        default, fastest = costmodel.default_of(found, H200), min(found, key=lambda choice: choice.seconds)
        assert fastest.seconds <= default.seconds <= costmodel.NEAR_TIE * fastest.seconds
        at_work = costmodel.busy(default.launches, H200) - costmodel.busy(fastest.launches, H200)
        assert at_work > 0 or costmodel.moved(default) <= 1.1 * costmodel.moved(fastest), problem.describe()
        leaner += costmodel.moved(fastest) > 1.05 * costmodel.moved(default)
    assert leaner > 0


def test_the_fastest_tile_is_the_default_if_bytes_take_little_time() -> None:
    problem = Problem(
        op="layer_norm_backward",
        dtype="bfloat16",
        gamma_dtype="bfloat16",
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=64,
        C=8,
        HxW=1,
        group=1,
        outputs=("dx", "dgamma", "dbeta"),
    )
    default, *others = costmodel.ranked(problem, OPS[problem.op].strategies.values(), H200)
    assert default.seconds <= min(choice.seconds for choice in others)
    assert costmodel.moved(default) >= min(costmodel.moved(choice) for choice in others)


@pytest.mark.parametrize(("C", "groups", "slab"), [(320, 32, 4), (960, 32, 2), (320, 32, 8), (36, 4, 1), (33, 3, 1)])
def test_the_model_counts_the_sectors_of_short_rows(C: int, groups: int, slab: int) -> None:
    tile = Tile("block", threads=64, groups=slab, stages=2, load="cp_async", packs_per_thread=1)
    plan = cunorm.plan(
        "group_norm", shape=(2, 48, C), dtype="bfloat16", num_groups=groups, data_format="NHWC", device="cpu", tile=tile
    )
    assert plan.launches[0].traffic == pytest.approx(plan.traffic().fetched_ratio * 2 * plan.problem.nbytes, rel=1e-3)
