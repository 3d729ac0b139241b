"""InstanceNorm beside GroupNorm, whose kernels it launches, and against the oracle on hostile shapes and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cunorm.tuning.verify.inputs import inputs_of
from cunorm.tuning.verify.verifier import Verifier, _cuts

import cunorm
from cunorm import reference
from cunorm.cli.main import main
from cunorm.core.devices import known
from cunorm.core.problem import LAYOUTS
from cunorm.core.strategy import Tile
from cunorm.ops.group_norm import oracle as group_oracle
from cunorm.ops.instance_norm import oracle
from cunorm.ops.instance_norm.op import INSTANCE_NORM, INSTANCE_NORM_BACKWARD
from cunorm.ops.instance_norm.strategies import as_op
from cunorm.ops.registry import OPS, fault_of, problem_of
from cunorm.tiling import costmodel, problem_trace, table
from tests.conftest import Executor
from tests.ops.group_norm.test_group_norm import PARTIAL, TILES, tile_of
from tests.support.problems import forget_calls, instance_arrays, invoke, laid_out, shifted, tupled

FORWARD, BACKWARD = "instance_norm", "instance_norm_backward"
#: The op of GroupNorm whose kernels an op launches.
OF_GROUPS = {FORWARD: "group_norm", BACKWARD: "group_norm_backward"}
#: (N, C, spatial). HxW is 1, odd, a whole number of packs, and longer than a chunk.
SHAPES = ((2, 5, ()), (129, 3, (3,)), (3, 8, (2, 2, 2)), (2, 16, (7, 7)), (1, 32, (4, 4, 4)), (2, 3, (127,)))


def shape_in(layout: str, N: int, C: int, spatial: tuple[int, ...]) -> tuple[int, ...]:
    return (N, C, *spatial) if layout == "NCHW" else (N, *spatial, C)


def direction(op: str) -> str:
    return "backward" if op == BACKWARD else "forward"


def bits(found: Any) -> list[bytes | None]:
    return [None if array is None else np.ascontiguousarray(array).tobytes() for array in tupled(found)]


def outcome(op: str, given: dict[str, Any]) -> list[bytes | None] | str:
    """The bits of the results of a call, or the message with which its tile is refused."""
    try:
        return bits(invoke(op, given))
    except cunorm.UnsupportedTile as refusal:
        return str(refusal)


def tile_for(strategy: str, op: str, layout: str = "NCHW", C: int = 1) -> dict[str, Any]:
    """The tile of GroupNorm's tests. Channels-last, a slab of `grid` has all channels: one is too narrow."""
    slab = {"groups": C} if (strategy, layout) == ("grid", "NHWC") else {}
    return tile_of(strategy, direction(op)) | slab


# ---- beside GroupNorm -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", TILES)
@pytest.mark.parametrize("op", OF_GROUPS)
def test_the_bits_are_those_of_group_norm_with_one_channel_per_group(op: str, strategy: str, layout: str) -> None:
    """For the same tile: results, launches, workspace and refusals."""
    refused = 0
    for turn, (N, C, spatial) in enumerate(SHAPES):
        dtype = "bfloat16" if turn == 3 else "float32"
        mask = ((True, True, True), (True, False, True), (False, True, False))[turn % 3]
        a = instance_arrays(shape_in(layout, N, C, spatial), dtype, data_format=layout, offset=3.0)
        given = {**a.given(op), "num_groups": C, "tile": tile_for(strategy, op, layout, C), "output_mask": mask}
        plans = {name: {"tile": given["tile"], "shape": a.x.shape, "dtype": dtype} for name in (op, OF_GROUPS[op])}
        plans[OF_GROUPS[op]]["num_groups"] = C
        came, expected = (outcome(name, given) for name in plans)
        if isinstance(expected, str):
            refused += 1
            assert came == expected.replace(OF_GROUPS[op], op).replace(f" group={C}", "")
            continue
        assert came == expected
        made, other = (cunorm.plan(n, **p, data_format=layout, device="H200") for n, p in plans.items())
        assert made.launches == other.launches
        assert [one.arguments for one in made.launches] == [one.arguments for one in other.launches]
        assert made.workspace_nbytes == other.workspace_nbytes
    held = strategy in ("warp", "registers") and layout == "NHWC"  # only if HxW = 1 is it the same order
    assert refused == 5 if held else refused <= (4 if strategy in ("grid", "cluster") else 0)


def test_a_problem_of_the_other_op_is_kept() -> None:
    """Its cached sizes serve all tilings of a ranking."""
    made = problem_of(FORWARD, shape=(2, 8, 9), dtype="float32")
    assert as_op(made, "group_norm") is as_op(made, "group_norm")
    assert replace(as_op(made, "group_norm"), op=FORWARD) == made


@pytest.mark.parametrize("op", OF_GROUPS)
def test_the_oracle_is_that_of_group_norm_with_one_channel_per_group(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large problem both check the same channels."""
    monkeypatch.setattr("cunorm.ops.common.oracles.WHOLE", 200)
    for layout in LAYOUTS:
        shape = shape_in(layout, 2, 6, (5, 7))
        problem = problem_of(op, shape=shape, dtype="float32", data_format=layout, gamma_dtype="float32")
        given = {name: array.astype(np.float64) for name, array in inputs_of(problem, 0).items()}
        numbers = {"eps": 1e-5}
        pairs = zip(
            oracle.expected(problem, given, numbers),
            group_oracle.expected(as_op(problem, OF_GROUPS[op]), given, numbers),
            strict=True,
        )
        for own, other in pairs:
            assert (own.name, own.shape) == (other.name, other.shape)
            for ours, theirs in zip(own.part, other.part, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_allclose(own.values, other.values, rtol=1e-12, atol=1e-12)
            np.testing.assert_array_equal(own.bound, other.bound)
        assert own.values.size < 6  # not all channels


# ---- shapes and values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", TILES)
def test_matches_the_oracle_on_hostile_shapes(strategy: str, executor: Executor) -> None:
    checked = 0
    for N, C, spatial in SHAPES:
        for layout in LAYOUTS:
            a = instance_arrays(shape_in(layout, N, C, spatial), data_format=layout, offset=1e3)
            for op in OF_GROUPS:
                try:
                    a.checked(op, executor, tile=tile_for(strategy, op, layout, C))
                    checked += 1
                except cunorm.UnsupportedTile:
                    assert strategy in PARTIAL
    assert checked >= {"grid": 20, "cluster": 16, "block": 24, "split": 24}.get(strategy, 14)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", TILES)
def test_equal_elements_have_no_variance(strategy: str, layout: str, executor: Executor) -> None:
    """A constant channel, and HxW = 1: mean is the element, rstd = 1 / sqrt(eps), y = beta, dgamma = 0."""
    met = 0
    for constant, spatial in ((1e4 + 0.1, (7, 7)), (0.1, (64,)), (None, ())):
        a = instance_arrays(shape_in(layout, 3, 8, spatial), data_format=layout)
        if constant is not None:
            a.x[...] = constant
        a.settle()
        try:
            y, mean, rstd = a.checked(FORWARD, executor, tile=tile_for(strategy, FORWARD, layout, 8))
            _, dgamma, _ = a.checked(BACKWARD, executor, tile=tile_for(strategy, BACKWARD, layout, 8))
        except cunorm.UnsupportedTile:
            assert strategy in PARTIAL
            continue
        met += 1
        want = 1 / np.sqrt(np.float64(np.float32(1e-5)))
        assert np.all(np.abs(executor.get(rstd) / want - 1) <= 2e-7)
        assert np.all(executor.get(mean) == (a.x.reshape(3, 8) if constant is None else np.float32(constant)))
        beta = a.beta if layout == "NHWC" else a.beta.reshape(8, *[1] * len(spatial))
        np.testing.assert_array_equal(executor.get(y), np.broadcast_to(beta, a.x.shape))
        assert not executor.get(dgamma).any()
    assert met > 0


@pytest.mark.parametrize("strategy", ["warp", "registers", "block", "split"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_that_are_not_finite_stay_in_their_channel(value: float, strategy: str, executor: Executor) -> None:
    a = instance_arrays((2, 4, 5, 5))
    clean = [executor.get(array) for array in a.call(FORWARD, executor, tile=tile_for(strategy, FORWARD))]
    a.x[1, 2, 0, 3] = value
    with np.errstate(all="ignore"):
        found = [executor.get(array) for array in a.checked(FORWARD, executor, tile=tile_for(strategy, FORWARD))]
        a.settle()
        a.checked(BACKWARD, executor, tile=tile_for(strategy, BACKWARD))
    for ours, before in zip(found, clean, strict=True):
        changed = (ours != before).reshape(2, 4, -1).any(axis=-1)
        assert [*zip(*np.nonzero(changed), strict=True)] == [(1, 2)]


@pytest.mark.parametrize("strategy", TILES)
def test_misaligned_slices(strategy: str, executor: Executor) -> None:
    """x, dy and dx start 1, 2 and 3 elements past a 16-byte boundary; channels are 9 and 16 elements long."""
    for layout in LAYOUTS:
        for spatial in ((9,), (16,)):
            a = instance_arrays(shape_in(layout, 2, 8, spatial), "bfloat16", data_format=layout)
            x, dy, out = (shifted(executor, one, shift) for one, shift in ((a.x, 1), (a.dy, 2), (a.x * 0, 3)))
            try:
                tile = tile_for(strategy, BACKWARD, layout, 8)
                found = a.checked(BACKWARD, executor, x=x, dy=dy, out=(out, None, None), tile=tile)
            except cunorm.UnsupportedTile:
                assert strategy in PARTIAL
                continue
            assert found[0] is out


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (0, 4), (2, 0, 3), (0, 0)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    """Statistics of channels without positions are NaN, and sums over nothing are zero. A tile makes no difference."""
    x = np.zeros(shape, np.float32)
    for tile in (None, tile_of("split"), tile_of("block")):
        y, mean, rstd = cunorm.instance_norm(x, tile=tile)
        assert (y.shape, mean.shape, rstd.shape) == (shape, shape[:2], shape[:2])
        assert np.isnan(mean).all() and np.isnan(rstd).all()
        dx, dgamma, dbeta = cunorm.instance_norm_backward(x, x, mean, rstd, tile=tile)
        assert dx is not None and dx.shape == shape
        for sums in (dgamma, dbeta):
            assert sums is not None and sums.shape == shape[1:2] and not sums.any()


def test_channels_last_volumes_are_read_without_a_copy() -> None:
    """A tensor of rank 5 with channels-last strides gets the plan of its NHWC shape, and y has its strides."""
    a = instance_arrays((2, 8, 2, 3, 4))
    x = laid_out(np, a.x, "channels last")
    forget_calls()
    y, *_ = cunorm.instance_norm(x, a.gamma, a.beta, tile=Tile.of(tile_of("block")))
    assert y.strides == x.strides
    (call,) = INSTANCE_NORM.calls.values()
    assert call.copied == () and call.plan.problem.layout == "NHWC"
    np.testing.assert_allclose(y, reference.instance_norm(a.x, a.gamma, a.beta)[0], rtol=1e-5, atol=1e-5)


# ---- plans, tables, traces and commands ------------------------------------------------------------------------------


def test_a_plan_names_no_groups() -> None:
    plan = cunorm.plan(BACKWARD, shape=(2, 320, 8, 8, 8), dtype="bfloat16", device="H200")
    assert plan.problem.describe() == (
        "instance_norm_backward bfloat16 NCHW N=2 C=320 HxW=512 (statistics float32) -> dx, dgamma, dbeta"
    )
    assert plan.problem.group == 320
    assert plan.strategy is INSTANCE_NORM_BACKWARD.strategies[plan.tile.strategy]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="num_groups: 320, expected None for instance_norm"):
        cunorm.plan(FORWARD, shape=(2, 320, 4), dtype="float32", num_groups=320)
    with pytest.raises(ValueError, match="activation: 'silu', expected None for instance_norm"):
        cunorm.plan(FORWARD, shape=(2, 320, 4), dtype="float32", activation="silu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OF_GROUPS)
def test_a_table_entry_has_no_groups_and_is_found_again(op: str, layout: str) -> None:
    problem = problem_of(op, shape=shape_in(layout, 2, 6, (5,)), dtype="bfloat16", data_format=layout)
    key = table.key_of(problem)
    assert "group" not in key
    assert table.problem_of(key) == problem
    assert table.raw_place(key) == table.place_of(problem)
    assert fault_of(problem) is None
    assert fault_of(replace(problem, group=2)) == f"{op}: group 2, expected 6"


def test_a_trace_records_the_op(tmp_path: Path) -> None:
    a, path = instance_arrays((2, 3, 5)), tmp_path / "t"
    forget_calls()
    with cunorm.trace(path):
        cunorm.instance_norm(a.x, a.gamma, a.beta)
        cunorm.instance_norm_backward(a.dy, a.x, a.mean, a.rstd, a.gamma, output_mask=(True, False, False))
    forget_calls()
    found = problem_trace.read(path, fault_of)
    assert [(one.op, one.N, one.C, one.HxW, one.outputs) for one in found] == [
        (FORWARD, 2, 3, 5, ("y", "mean", "rstd")),
        (BACKWARD, 2, 3, 5, ("dx",)),
    ]


def test_show_takes_three_sizes(capsys: Any) -> None:
    arguments = ["show", FORWARD, "--shape", "2,32,4x4x4", "--layout", "NHWC", "--dtype", "bfloat16"]
    assert main([*arguments, "--strategy", "all"]) == 0
    out = capsys.readouterr().out
    assert "instance_norm bfloat16 NHWC N=2 C=32 HxW=64" in out
    assert "group_norm_" in out  # the kernels
    assert main(["show", FORWARD, "--shape", "2,32,64,32"]) == 2
    assert "for instance_norm expected N,C,HxW" in capsys.readouterr().err


def test_the_verifier_detects_a_wrong_channel() -> None:
    made = cunorm.plan(FORWARD, shape=(2, 5, 7), dtype="float32", device="cpu")
    verifier = Verifier(made.problem, "cpu")
    assert verifier.fault(made) is None
    exact = verifier.cases[0][1][1].exact
    exact[1, 4] += 1
    assert "mean[1, 4]" in str(verifier.fault(made))


def test_a_large_problem_is_verified_with_fewer_channels() -> None:
    """Not only with fewer samples: two samples of nnU-Net's first stage are too large for the CPU executor."""
    problem = problem_of(BACKWARD, shape=(2, 32, 128**3), dtype="bfloat16")
    found = [*_cuts(problem, 2**20)]
    assert found and all(one.group == one.C for one in found)
    assert {one.C for one in found} != {32}


# ---- the default tiles of nnU-Net's volumes --------------------------------------------------------------------------

ONE_SWEEP = ("warp", "block", "cluster")
#: (channels, side, layout) -> whether every byte is read once.
STAGES = {
    (32, 128, "NCHW"): False,
    (64, 64, "NCHW"): True,
    (128, 32, "NCHW"): True,
    (256, 16, "NCHW"): True,
    (320, 8, "NCHW"): True,
    (320, 4, "NCHW"): True,
    (32, 128, "NHWC"): False,
    (64, 64, "NHWC"): False,
    (128, 32, "NHWC"): False,
    (256, 16, "NHWC"): True,
    (320, 8, "NHWC"): True,
    (320, 4, "NHWC"): True,
}


@pytest.mark.parametrize("op", OF_GROUPS)
def test_stages_of_nnunet_whose_channels_fit_a_cluster_are_read_once(op: str) -> None:
    for (C, side, layout), once in STAGES.items():
        problem = problem_of(op, shape=shape_in(layout, 2, C, (side**3,)), dtype="bfloat16", data_format=layout)
        chosen = costmodel.choose(problem, OPS[op].strategies.values(), known("H200"))
        assert (chosen.strategy.name in ONE_SWEEP) == once, (C, side, layout, chosen.tile)


@pytest.mark.parametrize("op", OF_GROUPS)
def test_the_tile_that_is_chosen_for_short_planes_moves_the_byte_floor(op: str) -> None:
    """4^3 positions per channel, on the CPU executor with the limits of an H200."""
    plan = cunorm.plan(op, shape=(2, 320, 64), dtype="bfloat16", device="H200")
    assert plan.tile is not None and plan.tile.strategy == "warp"
    assert plan.traffic().tensor_ratio == 1


def test_a_tile_may_be_passed_as_a_mapping_or_a_tile() -> None:
    a = instance_arrays()
    fields = {"threads": 128, "chunk": 16}
    results = [
        bits(cunorm.instance_norm(a.x, tile=one)) for one in ({"strategy": "split", **fields}, Tile("split", **fields))
    ]
    assert results[0] == results[1]
