"""Description of InstanceNorm for the shared contract tests: right calls, and the wrong calls of InstanceNorm alone."""

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
from tests.support.problems import TILES, Arrays, instance_arrays

FORWARD, BACKWARD = "instance_norm", "instance_norm_backward"


def _tile(x: Any, strategy: str | None) -> cunorm.Tile:
    return TILES[strategy or "block"]


def _ranks(rank: int) -> list[Arrays]:
    if rank < 2:
        return []
    spatial = (3, 1, 2, 1, 2, 3)[: rank - 2]
    return [instance_arrays((2, 8, *spatial)), instance_arrays((2, *spatial, 8), data_format="NHWC")]


def _statistics_in_output(a: Arguments, name: str) -> Arguments:
    whole = np.zeros(24, np.float32)
    whole[4:20] = a[name].ravel()
    return {name: whole[4:20].reshape(2, 8), "out": (a["out"][0], whole[:8], a["out"][2])}


_BLOCK = TILES["block"].as_dict()
OWN: list[Wrong] = [
    *x_cases(),
    *wrong("data_format", EITHER, lower="nchw", short="NC", other="NHCW", none=None, number=0, list=["NCHW"]),
    *parameter_cases("gamma"),
    *wrong("gamma", ValueError, per_sample=lambda _: np.ones((2, 8), np.float32)),
    *wrong("tile", cunorm.UnsupportedTile, groups={"strategy": "block", **_BLOCK, "groups": 3}),
    *wrong("tile", cunorm.UnsupportedTile, chunk={"strategy": "split", "threads": 128, "chunk": 2**40}),
    *workspace_on("x"),
    *inside(1, "x"),
]
WRONG = {
    FORWARD: [
        *OWN,
        *parameter_cases("beta"),
        *wrong("beta", ValueError, per_sample=lambda _: np.ones((2, 8), np.float32)),
        *epsilon_cases(),
        *result_cases(("y", "mean", "rstd"), TILES["split"]),
        *overlap_cases("x", in_place=True),
        *output(1, "is mean of x", ValueError, lambda o, a: a["x"][:, :, 0, 0]),
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
                per_channel=lambda _: np.ones(8, np.float32),
                per_group=lambda _: np.ones((2, 4), np.float32),
                per_sample=lambda _: np.ones(2, np.float32),
            )
        ],
        *mask_cases(),
        *result_cases(("dx", "dgamma", "dbeta"), TILES["block"]),
        *gradient_overlap_cases(),
        *inside(1, "dy"),
        *output(1, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "is gamma", ValueError, lambda _, a: a["gamma"]),
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
        lambda dtype="float32": instance_arrays(dtype=dtype),
        TILES["split" if op == FORWARD else "block"],
        WRONG[op],
        _tile,
        strided=(
            lambda: instance_arrays((3, 8, 5, 7)),
            lambda: instance_arrays((3, 5, 7, 8), data_format="NHWC"),
        ),
        ranks=_ranks,
        square=lambda: instance_arrays((4, 4, 4, 4)),
        saved=((2, 8), (16,), (2, 8, 1, 1), (1, 16), (4, 2, 2)),
        empty=tuple(
            partial(lambda dtype, shape: instance_arrays(shape, dtype=dtype), shape=shape)
            for shape in ((0, 8, 3, 3), (2, 8, 0, 3), (0, 8), (0, 8, 0), (2, 0, 3), (0, 0))
        ),
        in_place=(
            ("warp", None, NO_SUMS),
            ("block", "channels last", {}),
            ("split", "misaligned channels last", {}),
            ("split", "reversed", {}),
        ),
        large={
            f"{strategy}, {layout or data_format}": (
                partial(instance_arrays, (2, 16, 32, 32) if data_format == "NCHW" else (2, 32, 32, 16),
                        data_format=data_format),
                cunorm.Tile("split", threads=128, chunk=256) if strategy == "split" else strategy,
                layout,
            )
            for strategy in ("block", "split")
            for layout, data_format in ((None, "NCHW"), ("channels last", "NCHW"), (None, "NHWC"))
        },
        dirty={"split, NHWC": (partial(instance_arrays, (3, 9, 9, 8), data_format="NHWC"), "split", None)},
        masked=("block",),
    )
    for op in (FORWARD, BACKWARD)
]  # fmt: skip
