"""Problems on which the tuner verifies a winner: at most 4 million elements, chains of full length, hostile slices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cunorm.tuning.problems import workloads
from cunorm.tuning.verify import verifier
from cunorm.tuning.verify.inputs import HOSTILE, OUTLIER

from cunorm.core.devices import known
from cunorm.core.problem import Problem, laid_out
from cunorm.core.strategy import Tile, main_launch
from cunorm.ops.registry import OPS
from cunorm.tiling import costmodel

DEVICE = known("H200")


def cut_of(problem: Problem, tile: Tile) -> Problem:
    return verifier.cut_down(problem, OPS[problem.op].strategies[tile.strategy], tile, DEVICE)


def work(problem: Problem, tile: Tile) -> float:
    """Bytes that a thread of the main launch moves."""
    main = main_launch(OPS[problem.op].strategies[tile.strategy].launches(problem, tile))
    return (main.traffic + main.cached) / (main.grid * main.threads)


def defaults(every: int) -> Iterator[tuple[Problem, Tile]]:
    """Each problem of the workloads whose position is a multiple of `every`, with its default tile."""
    for problem in list(dict.fromkeys(one for _, one in workloads.problems("float32")))[::every]:
        yield problem, costmodel.choose(problem, OPS[problem.op].strategies.values(), DEVICE).tile


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_no_winner_of_a_workload_is_verified_on_more_than_4_million_elements(every: int) -> None:
    """The tile is legal for the smaller problem, which has the same layout and no larger size in any dimension."""
    met = 0
    for problem, tile in defaults(every):
        cut = cut_of(problem, tile)
        assert cut.N * cut.C * cut.HxW <= 2**22, problem
        assert OPS[cut.op].strategies[tile.strategy].refuses(cut, tile, DEVICE) is None
        assert cut == cut.canonical()
        assert (cut.op, cut.dtype, cut.layout, cut.outputs) == (
            problem.op, problem.dtype, problem.layout, problem.outputs,
        )  # fmt: skip
        assert cut.N <= problem.N and cut.C <= problem.C and cut.HxW <= problem.HxW
        met += cut != problem
    assert met > 20


def test_a_small_problem_is_verified_at_its_own_size() -> None:
    problem = Problem(
        op="layer_norm",
        dtype="float32",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=1000,
        C=1000,
        HxW=1,
        group=1,
        outputs=("y", "mean", "rstd"),
    )
    tile = costmodel.choose(problem, OPS["layer_norm"].strategies.values(), DEVICE).tile
    assert cut_of(problem, tile) == problem


@pytest.mark.parametrize(("sizes", "tile"), [
    (("NHWC", 256, 256, 3136, 256), Tile("column", threads=128, columns=32, chunk=2048)),
    (("NHWC", 256, 64, 12544, 64), Tile("column", threads=128, columns=8, chunk=2048)),
    (("NCHW", 256, 64, 12544, 64), Tile("split", threads=128, chunk=16384)),
    (("NCHW", 256, 512, 784, 512), Tile("block", threads=64, channels=4, samples_per_block=64)),
], ids=str)  # fmt: skip
def test_a_smaller_problem_keeps_the_work_per_thread(sizes: tuple[str, int, int, int, int], tile: Tile) -> None:
    """A thread sums as many values as before. Shorter chains of additions would hide the errors of long chains."""
    problem = Problem(
        op="batch_norm_stats",
        dtype="float32",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        **laid_out(*sizes),
        outputs=("mean", "invstd"),
    )
    cut = cut_of(problem, tile)
    assert cut.N * cut.C * cut.HxW <= 2**22
    assert work(cut, tile) >= 0.95 * work(problem, tile)


def test_channels_are_cut_if_a_thread_sums_over_samples() -> None:
    problem = Problem(
        op="batch_norm_stats",
        dtype="float32",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=256,
        C=512,
        HxW=784,
        group=512,
        outputs=("mean", "invstd"),
    )
    cut = cut_of(problem, Tile("block", threads=64, channels=4, samples_per_block=64))
    assert cut.N >= 64 and cut.C < 512


@pytest.mark.parametrize(("rows", "cases"), [(1, 5), (2, 3), (4, 2), (5, 1), (40, 1)])
def test_every_kind_of_slice_is_verified(rows: int, cases: int) -> None:
    outputs = ("y", "mean", "rstd")
    problem = Problem(
        op="layer_norm",
        dtype="float32",
        gamma_dtype=None,
        beta_dtype=None,
        stats_dtype="float32",
        layout="NCHW",
        N=rows,
        C=600,
        HxW=1,
        group=1,
        outputs=outputs,
    )
    made = verifier.Verifier(problem, "cpu").cases
    assert len(made) == cases
    slices = np.concatenate([given["x"].reshape(rows, 600) for given, _ in made])
    far, wide = np.abs(slices.mean(axis=1)) > 900, slices.std(axis=1) > 900
    constant, outlier = slices.std(axis=1) < 1e-4, slices[:, 0] == OUTLIER
    plain = ~(far | wide | constant | outlier)
    assert all(kind.any() for kind in (plain, far, constant, wide, outlier))
    assert len(HOSTILE) == 5
