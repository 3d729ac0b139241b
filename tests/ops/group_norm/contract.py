"""Description of GroupNorm for the shared contract tests: right calls, and the wrong calls of GroupNorm alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import cunorm
from tests.support.contract import (
    EITHER,
    Arguments,
    Contract,
    Wrong,
    epsilon_cases,
    gradient_cases,
    gradient_overlap_cases,
    inside,
    mask_cases,
    output,
    overlap_cases,
    parameter_cases,
    result_cases,
    saved_cases,
    workspace_on,
    wrong,
    x_cases,
)
from tests.support.problems import TILES, Arrays, group_arrays

FORWARD, BACKWARD = "group_norm", "group_norm_backward"


def _tile(x: Any, strategy: str | None) -> cunorm.Tile:
    return TILES[strategy or "block"]


def _ranks(rank: int) -> list[Arrays]:
    if rank < 2:
        return []
    spatial = (3, 1, 2, 1, 2, 3)[: rank - 2]
    return [group_arrays((2, 8, *spatial), 4), group_arrays((2, *spatial, 8), 4, data_format="NHWC")]


def _statistics_in_output(a: Arguments, name: str) -> Arguments:
    dgamma = np.zeros(8, np.float32)
    dgamma[4:] = a[name].ravel()
    return {name: dgamma[4:].reshape(2, 2), "out": (a["out"][0], dgamma, a["out"][2])}


def _large(shape: tuple[int, ...] = (2, 16, 32, 32), data_format: str = "NCHW") -> Arrays:
    return group_arrays(shape, 4, data_format=data_format)


_BLOCK = TILES["block"].as_dict()
OWN: list[Wrong] = [
    *x_cases(),
    *wrong("num_groups", ValueError, zero=0, negative=-1, not_a_divisor=3, more_than_channels=16),
    *wrong("num_groups", TypeError, float=2.0, bool=True, string="2", none=None, list=[2], numpy_float=np.float64(2)),
    *wrong("num_groups", TypeError, numpy_bool=np.True_, array=lambda _: np.array([2, 2])),
    *wrong("data_format", EITHER, lower="nchw", short="NC", other="NHCW", none=None, number=0, list=["NCHW"]),
    *wrong("activation", EITHER, relu="relu", empty="", false=False, zero=0, function=lambda _: np.tanh),
    *parameter_cases("gamma"),
    *parameter_cases("beta"),
    *wrong("gamma", ValueError, per_group=lambda _: np.ones(2, np.float32)),
    *wrong("beta", ValueError, per_group=lambda _: np.ones(2, np.float32)),
    *wrong("tile", cunorm.UnsupportedTile, groups={"strategy": "block", **_BLOCK, "groups": 3}),
    *wrong("tile", cunorm.UnsupportedTile, chunk={"strategy": "split", "threads": 128, "chunk": 2**40}),
    *workspace_on("x"),
    *inside(1, "x"),
]
WRONG = {
    FORWARD: [
        *OWN,
        *epsilon_cases(),
        *result_cases(("y", "mean", "rstd"), TILES["split"]),
        *overlap_cases("x", in_place=True),
        *output(1, "is mean of x", ValueError, lambda o, a: a["x"][:, 0, 0, :2]),
    ],
    BACKWARD: [
        *OWN,
        *gradient_cases(),
        *saved_cases("mean", "rstd"),
        *[
            case
            for name in ("mean", "rstd")
            for case in wrong(
                name,
                ValueError,
                per_channel=lambda _: np.ones((2, 8), np.float32),
                long_groups=lambda _: np.ones((2, 3), np.float32),
                per_sample=lambda _: np.ones(2, np.float32),
            )
        ],
        *mask_cases(),
        *result_cases(("dx", "dgamma", "dbeta"), TILES["block"]),
        *gradient_overlap_cases(),
        *inside(1, "dy"),
        *output(1, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "is beta", ValueError, lambda _, a: a["beta"]),
        *[
            (f"out 1 holds {name}", "out", ValueError, partial(_statistics_in_output, name=name))
            for name in ("mean", "rstd")
        ],
        *workspace_on("dy"),
    ],
}
#: The in-place calls of `warp` want only dx.
NO_SUMS = {"output_mask": (True, False, False)}
CONTRACTS = [
    Contract(
        op,
        lambda dtype="float32": group_arrays(dtype=dtype),
        TILES["split" if op == FORWARD else "block"],
        WRONG[op],
        _tile,
        strided=(
            lambda: group_arrays((3, 8, 5, 7)),
            lambda: group_arrays((3, 5, 7, 8), data_format="NHWC"),
        ),
        ranks=_ranks,
        square=lambda: group_arrays((4, 4, 4, 4)),
        saved=((2, 2), (4,), (2, 2, 1, 1), (1, 4), (1, 2, 1, 2, 1)),
        empty=tuple(
            partial(lambda dtype, shape: group_arrays(shape, dtype=dtype), shape=shape)
            for shape in ((0, 8, 3, 3), (2, 8, 0, 3), (0, 8), (2, 8, 3, 0, 5), (0, 8, 0), (2, 0, 3), (0, 0))
        ),
        in_place=tuple(
            (strategy, layout, NO_SUMS if strategy == "warp" else {})
            for strategy in TILES
            for layout in (None, "channels last", "reversed", "misaligned", "misaligned channels last")
            if strategy != "warp" or "last" not in (layout or "")  # warp refuses channels-last data
        ),
        large={
            f"{strategy}, {layout or data_format}": (
                partial(_large, (2, 16, 32, 32) if data_format == "NCHW" else (2, 32, 32, 16), data_format),
                cunorm.Tile("split", threads=128, chunk=256) if strategy == "split" else strategy,
                layout,
            )
            for strategy in ("block", "split")
            for layout, data_format in ((None, "NCHW"), ("channels last", "NCHW"), (None, "NHWC"))
        },
        dirty={
            f"{strategy}, {data_format}": (
                partial(group_arrays, shape, data_format=data_format),
                strategy,
                None,
            )
            for strategy in ("block", "split")
            for shape, data_format in (((3, 8, 9, 9), "NCHW"), ((3, 9, 9, 8), "NHWC"))
        },
        masked=("block", "split"),
    )
    for op in (FORWARD, BACKWARD)
]
