"""LayerNorm's `grid`: when the cost model selects it, its sums, its traffic, its second reads, its refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import cunorm
from cunorm.core.devices import KNOWN, known
from cunorm.ops.layer_norm.grid import LayerGrid
from cunorm.tiling import costmodel
from tests.conftest import Executor
from tests.ops.layer_norm.test_layer_norm import Case
from tests.support.covering import every

H200 = known("H200")
OPTIONS: dict[str, dict[str, Any]] = {
    "layer_norm": {"gamma_dtype": "bfloat16", "beta_dtype": "bfloat16"},
    "layer_norm_backward": {"gamma_dtype": "bfloat16"},
}


def plan_of(op: str, rows: int, length: int, device: str = "H200", **options: Any) -> Any:
    options = {"dtype": "bfloat16", **OPTIONS[op], **options}
    return cunorm.plan(op, shape=(rows, length), normalized_shape=length, device=device, **options)


# ---- the cost model -------------------------------------------------------------------------------------------------


FEW, MORE = ((8, 123480), (16, 123480)), ((67, 123479), (32, 2**18), (4, 2**20))  # MORE: only with large caches


@pytest.mark.parametrize(("device", "rows", "length"), [
    *((device, *sizes) for device in KNOWN for sizes in FEW),
    *((device, *sizes) for device in ("H100", "H200", "B200") for sizes in MORE),
])  # fmt: skip
def test_the_model_selects_grid_for_few_long_rows(rows: int, length: int, device: str) -> None:
    """Other strategies would leave multiprocessors idle, or load all parameters many times."""
    place = known(device)
    plan = plan_of("layer_norm_backward", rows, length, device)
    assert plan.strategy.name == "grid"
    assert costmodel.busy(plan.launches, place) >= int(costmodel.BUSY_ENOUGH * place.multiprocessors)


def test_the_model_selects_other_strategies_for_short_or_many_rows() -> None:
    for rows, length in ((4096, 4096), (1024, 12288), (2048, 33333), (1, 4096), (8, 8192)):
        for op in OPTIONS:
            assert plan_of(op, rows, length).strategy.name != "grid", (op, rows, length)


# ---- gradients of the parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "lanes", "length", "at_once"), [
    ("bfloat16", 32, 1000, True),
    ("float32", 64, 1036, True),
    ("bfloat16", 32, 1001, False),  # rows begin at different places of a pack
    ("float64", 64, 998, True),
    ("float16", 128, 1000, False),  # four teams
])  # fmt: skip
def test_teams_add_their_columns(dtype: str, lanes: int, length: int, at_once: bool, executor: Executor) -> None:
    """The last slab is shorter than the others, and not all teams have a row in the last round."""
    tile = {"strategy": "grid", "threads": 512, "lanes": lanes, "packs_per_thread": 2, "slabs": 8, "smem_kib": 64}
    case = Case(37, length, dtype)
    case.backward(executor, tile=tile)
    plan = plan_of("layer_norm_backward", 37, length, tile=tile, dtype=dtype, gamma_dtype=dtype)
    assert (LayerGrid(plan.problem, plan.tile).of_teams > 0) is at_once


# ---- traffic --------------------------------------------------------------------------------------------------------


def test_grid_stores_no_partial_sums_of_columns() -> None:
    """One block computes dgamma and dbeta of a slab. The workspace has only sums of rows. No kernel sums columns."""
    plan = plan_of("layer_norm_backward", 67, 123479)
    assert [launch.entry for launch in plan.launches] == ["clear_counters", "layer_norm_backward_grid"]
    assert plan.workspace_nbytes < 67 * 8 * H200.multiprocessors + 1024 < 123479 * 8


@pytest.mark.parametrize("op", OPTIONS)
def test_parameters_are_loaded_and_stored_once(op: str) -> None:
    rows, length = 24, 1000
    tile = {"strategy": "grid", "threads": 256, "lanes": 32, "packs_per_thread": 1, "slabs": 5, "smem_kib": 64}
    plan = plan_of(op, rows, length, tile=tile)
    assert plan.launches[-1].grid == 5
    parameters = len(OPTIONS[op]) * length * 2 + (2 * length * 2 if op.endswith("backward") else 0)
    # Every slab reads mean and rstd. A forward also writes them once.
    statistics = 2 * rows * 4 * (5 + (op == "layer_norm"))
    assert plan.traffic().of("parameter").nbytes == parameters + statistics


@pytest.mark.parametrize(("rows", "keeps", "again"), every(3, [(48, 200, 0), (72, 200, 3), (72, 136, 5), (72, 72, 7)]))
def test_rows_that_are_not_kept_are_read_again_from_the_cache(
    rows: int, keeps: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with an eighth of H200's multiprocessors and L2 cache, 19 of 20 second reads are within `reach`."""
    small = dataclasses.replace(H200, multiprocessors=16, l2_bytes=H200.l2_bytes // 8)
    monkeypatch.setitem(KNOWN, "H200", small)
    tile = {"strategy": "grid", "threads": 512, "lanes": 64, "packs_per_thread": 2, "slabs": 8, "smem_kib": keeps}
    plan = plan_of("layer_norm_backward", rows, 8 * 960, device="cpu", tile=tile)  # eight rows per round
    found = plan.traffic()
    assert found.tensor_ratio == pytest.approx(1 + again * 8 / rows * 2 / 3)
    between = LayerGrid(found.problem, plan.tile).reach
    assert (between == 0) == (again == 0)
    if again:
        assert 0.5 * between <= found.reuse.at(0.95) <= 1.1 * between and between <= small.l2_bytes // 2


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "fields", "sentence"), [
    ((8, 4000), {"lanes": 48}, "lanes is 48, expected a multiple of 32 that divides 512 threads"),
    ((8, 4000), {"lanes": 1024}, "lanes is 1024, expected a multiple of 32 that divides 512 threads"),
    ((8, 4000), {"slabs": 4}, "4 slabs have 1008 columns each, but 64 lanes with packs_per_thread=1 hold 512"),
    ((8, 40000), {"slabs": 200}, "193 slabs, expected at most 256, and one for each of NVIDIA H200's 132 "),
    ((8, 10**7), {"slabs": 64}, "64 slabs have 156256 columns each"),
    ((200, 4000), {"slabs": 128, "smem_kib": 230}, "bytes of shared memory"),
    ((4000, 4000), {"slabs": 128, "smem_kib": 8}, "smem_kib is 8, too small for the rows of 4 rounds in flight"),
    ((1000, 40000), {"slabs": 128}, "between two reads of a sector, half the L2 cache of NVIDIA H200 is 31457280"),
], ids=lambda value: "" if isinstance(value, dict) else str(value)[:20])  # fmt: skip
def test_refusals(shape: tuple[int, int], fields: dict[str, int], sentence: str) -> None:
    tile = {
        "strategy": "grid",
        "threads": 512,
        "lanes": 64,
        "packs_per_thread": 1,
        "slabs": 8,
        "smem_kib": 128,
        **fields,
    }
    with pytest.raises(cunorm.UnsupportedTile, match=sentence):
        plan_of("layer_norm_backward", *shape, tile=tile)


def test_grid_refuses_a_mask_without_dx() -> None:
    tile = {"strategy": "grid", "threads": 512, "lanes": 64, "packs_per_thread": 1, "slabs": 8, "smem_kib": 128}
    with pytest.raises(cunorm.UnsupportedTile, match="without dx no block waits for the sums of whole rows"):
        plan_of("layer_norm_backward", 8, 4000, tile=tile, output_mask=(False, True, True))
