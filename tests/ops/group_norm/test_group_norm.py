"""Every strategy of GroupNorm against the float64 oracle, on hostile shapes and values, on both executors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.core.problem import LAYOUTS
from cunorm.ops.common import limits
from cunorm.runtime import plans
from tests.conftest import Executor
from tests.support.covering import every, pairwise
from tests.support.problems import GroupArrays, forget_calls, group_arrays, shifted

DTYPE_NAMES = tuple(DTYPES)

# (N, C, spatial, groups). HxW of 1, 2, 3, 7, 49, 63, 65, 127 and 130 cover every tail of a 16-byte access. C / G of 1,
# 2, 3, 5, 10 and 33 misalign the groups. N is 1, 2 or 129, among others. Some have one group, some one per channel.
SHAPES = [
    (1, 1, (), 1),
    (2, 5, (), 5),
    (129, 6, (), 2),
    (3, 66, (), 2),
    (17, 64, (), 8),
    (2, 6, (2,), 3),
    (129, 3, (3,), 1),
    (1, 20, (7,), 2),
    (2, 10, (7, 7), 2),
    (2, 64, (7, 7), 4),
    (1, 6, (7, 9), 2),
    (2, 4, (5, 13), 4),
    (2, 3, (127,), 1),
    (3, 2, (127,), 2),
    (1, 33, (2, 5), 1),
    (2, 33, (1, 1), 1),
    (2, 32, (8, 8), 4),
    (1, 8, (130,), 8),
    (2, 16, (3, 3, 3), 2),
    (1, 7, (1030,), 7),
    (1, 6, (1030,), 2),
]
IDS = ["x".join(map(str, (N, C, *spatial))) + f"g{groups}" for N, C, spatial, groups in SHAPES]

# One tile per strategy keeps the number of builds low. chunk = 16 cuts small shapes into many chunks. "registers" is
# `block` with load=registers.
TILES: dict[str, dict[str, Any]] = {
    "warp": {"threads": 128, "lanes": 32, "packs_per_thread": 8, "samples_per_team": 1},
    "block": {"threads": 64, "groups": 1, "stages": 2, "load": "cp_async", "packs_per_thread": 1},
    "registers": {"threads": 128, "groups": 1, "stages": 1, "load": "registers", "packs_per_thread": 8},
    "cluster": {"threads": 64, "groups": 1, "stages": 2, "load": "cp_async", "cluster": 2},
    "grid": {"threads": 128, "chunk": 16, "groups": 1, "prefetch_tiles": 1, "keep": "l2"},
    "split": {"threads": 128, "chunk": 16},
}
#: Fields of the tiles of one direction.
OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("cluster", "backward"): {"samples": 1},
}
#: Strategies that refuse some problems.
PARTIAL = ("warp", "registers", "cluster", "grid")


def tile_of(strategy: str, direction: str = "forward") -> dict[str, Any]:
    own = OWN.get((strategy, direction), {})
    return {"strategy": "block" if strategy == "registers" else strategy, **TILES[strategy], **own}


class Case(GroupArrays):
    """Arrays of one problem."""

    def __init__(
        self,
        N: int,
        C: int,
        spatial: tuple[int, ...],
        groups: int,
        dtype: str,
        data_format: str = "NCHW",
        gamma_dtype: str | None = "same",
        offset: float = 0.0,
    ) -> None:
        shape = (N, C, *spatial) if data_format == "NCHW" else (N, *spatial, C)
        made = group_arrays(shape, groups, dtype, gamma_dtype=gamma_dtype, data_format=data_format, offset=offset)
        super().__init__(**vars(made))

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and rstd of the present x."""
        self.settle()
        return self.mean, self.rstd

    def forward(self, executor: Executor, **options: Any) -> None:
        """Run the forward and compare."""
        self.checked("group_norm", executor, **options)

    def backward(self, executor: Executor, mask: tuple[bool, bool, bool] = (True,) * 3, **options: Any) -> None:
        """Run the backward and compare. It needs no beta, because there is no activation."""
        self.settle()
        self.checked("group_norm_backward", executor, beta=None, output_mask=mask, **options)


def run(case: Case, strategy: str, direction: str, executor: Executor, **options: Any) -> None:
    """Check one direction with one strategy. Skip with the error message if the strategy refuses the problem."""
    check = case.forward if direction == "forward" else case.backward
    tile = tile_of(strategy, direction)
    if (strategy, case.dtype, direction) == ("registers", "float64", "backward"):
        tile["packs_per_thread"] = 4  # eight packs need too many registers
    try:
        check(executor, tile=tile, **options)
    except cunorm.UnsupportedTile as refusal:
        pytest.skip(f"refused: {refusal}")


#: (strategy, layout). warp accepts NHWC shapes only if NHWC is the same order as NCHW.
PLACES = [
    ("warp", "NCHW"),
    ("registers", "NCHW"),
    *((strategy, layout) for strategy in ("block", "cluster", "grid", "split") for layout in LAYOUTS),
]


#: (layout, direction). As one parameter, each strategy runs in each layout and direction in the quick suite.
WAYS = [(layout, direction) for layout in LAYOUTS for direction in ("forward", "backward")]


@pytest.mark.parametrize(
    ("dtype", "strategy", "way"),
    pairwise(DTYPE_NAMES, list(TILES), WAYS, legal=lambda row: (row[1], row[2][0]) in PLACES),
)
def test_matches_the_oracle_on_hostile_shapes(
    dtype: str, strategy: str, way: tuple[str, str], executor: Executor
) -> None:
    data_format, direction = way
    # split has the most kernels. There, float16 uses float32 parameters, whose builds another test needs too.
    gamma_dtype = "float32" if (dtype, strategy) == ("float16", "split") else "same"
    checked = 0
    for shape, name in zip(SHAPES, IDS, strict=True):
        case = Case(*shape, dtype, data_format, gamma_dtype)
        try:
            run(case, strategy, direction, executor)
            checked += 1
        except pytest.skip.Exception:
            continue
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    # with NHWC, grid refuses groups that are too narrow
    least = {"warp": 15, "registers": 16, "block": 20, "cluster": 9, "split": 20}
    assert checked >= (least | {"grid": 14 if data_format == "NCHW" else 3})[strategy], checked


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "gamma_dtype"), [("float16", "same"), ("bfloat16", "float32")])
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_parameters_of_split_whose_builds_the_quick_tests_omit(
    direction: str, data_format: str, dtype: str, gamma_dtype: str, executor: Executor
) -> None:
    for shape in SHAPES:
        run(Case(*shape, dtype, data_format, gamma_dtype), "split", direction, executor)


@pytest.mark.parametrize("mask", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
@pytest.mark.parametrize("strategy", list(TILES))
def test_every_mask(strategy: str, mask: tuple[bool, bool, bool], executor: Executor) -> None:
    for shape, data_format in (((5, 32, (), 4), "NCHW"), ((2, 10, (7, 7), 2), "NCHW"), ((2, 10, (7, 7), 2), "NHWC")):
        try:
            run(Case(*shape, "float32", data_format), strategy, "backward", executor, mask=mask)
        except pytest.skip.Exception:
            assert strategy in PARTIAL


@pytest.mark.parametrize("strategy", list(TILES))
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "float16"])
def test_mixed_and_missing_parameters(dtype: str, strategy: str, executor: Executor) -> None:
    """float32 parameters or none, which share builds. split needs other builds for HxW = 1, only run for float16.

    The battery runs each strategy with bfloat16 and float32 parameters in the quick suite.
    """
    shapes = [(9, 64, (), 8), (2, 6, (5, 7), 3)]
    for shape in shapes[1:] if (dtype, strategy) == ("bfloat16", "split") else shapes:
        for gamma_dtype in ("float32", None):
            case = Case(*shape, dtype, gamma_dtype=gamma_dtype)
            try:
                run(case, strategy, "forward", executor)
                run(case, strategy, "backward", executor)
            except pytest.skip.Exception:
                assert strategy in PARTIAL


@pytest.mark.parametrize("tile", every(2, [
    {"strategy": "warp", "threads": 128, "lanes": 4, "packs_per_thread": 2, "samples_per_team": 1},
    {"strategy": "warp", "threads": 128, "lanes": 8, "packs_per_thread": 1, "samples_per_team": 8},
    {"strategy": "warp", "threads": 256, "lanes": 1, "packs_per_thread": 8, "samples_per_team": 1},
    {"strategy": "block", "threads": 512, "groups": 8, "stages": 2, "load": "cp_async", "packs_per_thread": 1},
    {"strategy": "block", "threads": 96, "groups": 1, "stages": 1, "load": "registers", "packs_per_thread": 1},
    {"strategy": "block", "threads": 32, "groups": 1, "stages": 1, "load": "registers", "packs_per_thread": 2},
    {"strategy": "block", "threads": 32, "groups": 2, "stages": 2, "load": "cp_async", "packs_per_thread": 1},
    {"strategy": "split", "threads": 128, "chunk": 1},
    {"strategy": "split", "threads": 128, "chunk": 100000},
]), ids=str)  # fmt: skip
def test_other_tiles(tile: dict[str, Any], executor: Executor) -> None:
    """Part of a warp, several samples per team, several groups per block, one position per chunk, one chunk for all."""
    for shape in ((19, 64, (), 8), (19, 24, (), 8), (3, 16, (5,), 8), (130, 63, (), 21)):
        for data_format in ("NCHW", "NHWC"):
            case = Case(*shape, "float32", data_format)
            mean = case.statistics()[0]
            plan = cunorm.plan(
                "group_norm_backward",
                shape=case.x.shape,
                dtype="float32",
                num_groups=case.groups,
                data_format=data_format,
                device="cpu",
            )
            assert plan.problem.N * plan.problem.group == mean.size
            try:
                case.backward(executor, tile=tile)
            except cunorm.UnsupportedTile:
                continue
            case.forward(executor, tile=tile)


SLAB = {"threads": 256, "groups": 2, "stages": 1, "load": "registers"}


@pytest.mark.parametrize(("device", "tile", "sentence"), [
    ("H100", {"strategy": "block", **SLAB, "packs_per_thread": 8}, None),
    ("H100", {"strategy": "block", **SLAB, "packs_per_thread": 12}, "12 packs of dy and .* expected at most 8"),
    ("H100", {"strategy": "block", **SLAB, "threads": 512, "packs_per_thread": 8}, "expected at most 6 each"),
    ("A100", {"strategy": "block", **SLAB, "threads": 512, "packs_per_thread": 6}, "expected at most 4 each"),
    ("H100", {"strategy": "block", **SLAB, "threads": 1024, "packs_per_thread": 6}, "blocks of 1024 threads allow 64"),
    ("H100", {"strategy": "block", **SLAB, "packs_per_thread": 3}, "200 rows of 5 packs, but .* hold 153"),
    ("H100", {"strategy": "block", **SLAB, "groups": 1, "packs_per_thread": 8}, "have 20 channels, .* a multiple of 8"),
    ("H100", {"strategy": "block", **SLAB, "groups": 8, "packs_per_thread": 8}, "groups is 8, expected one of 1, 2, 4"),
    ("H100", {"strategy": "block", **SLAB, "groups": 3, "packs_per_thread": 8}, "groups is 3, expected one of 1, 2, 4"),
    ("H100", {"strategy": "cluster", **SLAB, "groups": 3, "cluster": 4, "samples": 1}, "groups is 3, expected one of"),
    ("H100", {"strategy": "block", **SLAB, "stages": 4, "packs_per_thread": 8}, "stages is 4, expected 1"),
    ("H100", {"strategy": "cluster", **SLAB, "cluster": 4, "samples": 2}, None),
    ("H100", {"strategy": "cluster", **SLAB, "cluster": 4, "samples": 4}, "expected 1 or the number of samples, 2"),
    ("A100", {"strategy": "cluster", **SLAB, "cluster": 4, "samples": 2}, "cluster"),
])  # fmt: skip
def test_channels_last_slabs_of_a_backward_in_registers_are_refused_with_a_reason(
    device: str, tile: dict[str, Any], sentence: str | None
) -> None:
    def planned() -> cunorm.Plan:
        return cunorm.plan(
            "group_norm_backward", shape=(2, 200, 640), dtype="bfloat16", num_groups=32, data_format="NHWC",
            device=device, tile=tile,
        )  # fmt: skip

    if sentence is None:
        planned()
        return
    with pytest.raises(cunorm.UnsupportedTile, match=sentence):
        planned()


@pytest.mark.parametrize("count", [2, 4])
def test_a_cluster_of_warps_with_a_sample_each(count: int, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums take no barrier, so the sums of channels need one of their own: the checked build finds the race."""
    monkeypatch.setenv("CUNORM_CPU_BUILD", "checked")
    tile = {"strategy": "cluster", "threads": 32, "cluster": count, "samples": count, "groups": 1, "stages": 1}
    Case(count, 6, (20,), 2, "float32", "NCHW").backward(executor, tile={**tile, "load": "registers"})


@pytest.mark.parametrize("strategy", list(TILES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_misaligned_slices(dtype: str, strategy: str, executor: Executor) -> None:
    """x, dy and out start 1, 2, ... elements past a 16-byte boundary, each differently."""
    for N, C, spatial, groups in ((3, 16, (), 2), (2, 8, (16,), 8), (2, 4, (9,), 2)):
        for data_format in ("NCHW", "NHWC"):
            case = Case(N, C, spatial, groups, dtype, data_format)
            mean, rstd = case.statistics()
            for shifts in ((1, 1, 1), (1, 2, 3), (0, 3, 0)):
                dy, x, out = (
                    shifted(executor, a, s) for a, s in zip((case.dy, case.x, case.x * 0), shifts, strict=True)
                )
                m, r, gamma = map(executor.put, (mean, rstd, case.gamma))
                try:
                    dx, dgamma, dbeta = cunorm.group_norm_backward(
                        dy, x, m, r, gamma, num_groups=groups, data_format=data_format, out=(out, None, None),
                        tile=tile_of(strategy, "backward"),
                    )  # fmt: skip
                except cunorm.UnsupportedTile:
                    continue
                assert dx is out
                case.compare("group_norm_backward", executor, (dx, dgamma, dbeta))


@pytest.mark.parametrize("strategy", list(TILES))
def test_repeated_calls_are_bitwise_equal(strategy: str, executor: Executor) -> None:
    case = Case(9, 64, (), 8, "bfloat16") if strategy == "warp" else Case(2, 64, (7, 7), 4, "bfloat16")
    arrays = [executor.put(a) for a in (case.dy, case.x, *case.statistics(), case.gamma)]
    beta = executor.put(case.beta)

    def results() -> list[bytes]:
        gradients = cunorm.group_norm_backward(*arrays, num_groups=case.groups, tile=tile_of(strategy, "backward"))
        values = cunorm.group_norm(arrays[1], case.groups, arrays[4], beta, tile=tile_of(strategy))
        return [executor.get(a).tobytes() for a in (*gradients, *values)]

    assert results() == results()


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("shape", "tile"), [
    ((9, 64, (), 8), {"strategy": "warp", **TILES["warp"]}),
    ((2, 20, (7, 9), 4), {"strategy": "block", **TILES["block"]}),
    ((2, 20, (7, 9), 4), {"strategy": "block", **TILES["registers"]}),
    ((2, 8, (7, 9), 4), {"strategy": "block", **TILES["block"], "threads": 512, "groups": 2}),  # several parts
    ((2, 20, (7, 9), 4), {"strategy": "cluster", **TILES["cluster"]}),
    ((2, 32, (7, 9), 2), {"strategy": "grid", **TILES["grid"]}),
    ((2, 20, (7, 9), 4), {"strategy": "split", **TILES["split"]}),
], ids=lambda value: value["strategy"] if isinstance(value, dict) else "x".join(map(str, value)))  # fmt: skip
def test_results_do_not_depend_on_the_order_of_threads(
    shape: tuple[Any, ...], tile: dict[str, Any], data_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (tile.get("load"), data_format) == ("registers", "NHWC"):
        tile = tile | {"groups": 4}  # rows of one group are no whole packs
    case = Case(*shape, "float32", data_format)
    mean, rstd = case.statistics()
    seen = {}
    for order in ("ascending", "descending", "random:1", "random:2"):
        monkeypatch.setenv("CUNORM_CPU_ORDER", order)
        gradients = cunorm.group_norm_backward(
            case.dy, case.x, mean, rstd, case.gamma, num_groups=case.groups, data_format=data_format,
            tile=tile | OWN.get((tile["strategy"], "backward"), {}),
        )  # fmt: skip
        values = cunorm.group_norm(
            case.x, case.groups, case.gamma, case.beta, data_format=data_format,
            tile=tile | OWN.get((tile["strategy"], "forward"), {}),
        )  # fmt: skip
        seen[order] = [np.asarray(a).tobytes() for a in (*gradients, *values)]
    assert all(bits == seen["ascending"] for bits in seen.values())


def test_pieces_are_read_once_and_any_number_of_resident_blocks_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are bitwise equal. With fewer blocks than pieces, a block reads the pieces before its last one again."""
    case = Case(3, 20, (50,), 2, "bfloat16", "NHWC")
    tile = {"strategy": "grid", "threads": 64, "chunk": 16, "groups": 2, "prefetch_tiles": 1, "keep": "shared"}
    given = (case.dy, case.x, *case.statistics(), case.gamma)
    seen = set()
    for resident in (1, 2, 5, 12, 100):
        monkeypatch.setattr("cunorm.executors.cpu.executor.WAITING_CLUSTERS", resident)
        for order in ("ascending", "descending", "random:1"):
            monkeypatch.setenv("CUNORM_CPU_ORDER", order)
            gradients = cunorm.group_norm_backward(*given, num_groups=2, data_format="NHWC", tile=tile)
            values = cunorm.group_norm(case.x, 2, case.gamma, case.beta, data_format="NHWC", tile=tile)
            seen.add(tuple(np.asarray(a).tobytes() for a in (*gradients, *values)))
    assert len(seen) == 1


def test_grid_works_with_any_number_of_resident_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are bitwise equal, although blocks draw different tickets."""
    case = Case(2, 12, (150,), 3, "float32")
    tile = {"strategy": "grid", "threads": 128, "chunk": 16, "groups": 1, "prefetch_tiles": 3, "keep": "l2"}
    given = (case.dy, case.x, *case.statistics(), case.gamma)
    seen = set()
    for resident in (1, 2, 3, 7, 100):
        monkeypatch.setattr("cunorm.executors.cpu.executor.WAITING_CLUSTERS", resident)
        for order in ("ascending", "descending", "random:1"):
            monkeypatch.setenv("CUNORM_CPU_ORDER", order)
            gradients = cunorm.group_norm_backward(*given, num_groups=3, tile=tile)
            values = cunorm.group_norm(case.x, 3, case.gamma, case.beta, tile=tile)
            seen.add(tuple(np.asarray(a).tobytes() for a in (*gradients, *values)))
    assert len(seen) == 1


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("strategy", list(TILES))
def test_a_grid_smaller_than_the_work(
    strategy: str, data_format: str, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only three blocks: each processes several items and reuses its shared memory for the next item."""

    def forget() -> None:
        plans._plans.clear()
        forget_calls()

    monkeypatch.setattr(limits, "MAX_GRID", 3)
    forget()
    try:
        for shape in ((40, 256, (), 2), (5, 256, (3, 5), 2)):
            case = Case(*shape, "float32", data_format)
            for direction in ("forward", "backward"):
                for order in ("ascending", "descending", "random:1"):
                    monkeypatch.setenv("CUNORM_CPU_ORDER", order)
                    try:
                        run(case, strategy, direction, executor)
                    except pytest.skip.Exception:
                        assert strategy in PARTIAL
        assert plans._plans
        assert all(one.grid <= 3 for plan in plans._plans.values() for one in plan.launches)
    finally:
        forget()
