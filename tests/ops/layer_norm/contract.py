"""Description of LayerNorm for the shared contract tests: right calls, and the wrong calls of LayerNorm alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import cunorm
from tests.ops.layer_norm.test_layer_norm import STRATEGIES
from tests.ops.layer_norm.test_layer_norm import tile_of as tile_fields
from tests.support.contract import (
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
from tests.support.problems import Arrays, layer_arrays

FORWARD, BACKWARD = "layer_norm", "layer_norm_backward"
DIRECTIONS = {FORWARD: "forward", BACKWARD: "backward"}


def tile_of(op: str, strategy: str | None) -> cunorm.Tile:
    """The tile as a Tile. The default strategy is `block`."""
    return cunorm.Tile.of(tile_fields(strategy or "block", DIRECTIONS[op]))


#: `split` is the only strategy that needs a workspace in both directions.
SPLIT = {op: tile_of(op, "split") for op in DIRECTIONS}


def ranks(rank: int) -> list[Arrays]:
    """Normalise one axis, all but one and all, with normalized_shape in every accepted form."""
    shape, found = (3, 1, 2, 1, 2, 3, 2, 5)[-rank:], []
    for trailing in {1, rank - 1, rank} - {0}:
        row = shape[-trailing:]
        single = (row[0], np.int32(row[0])) * (trailing == 1)
        found += [layer_arrays(shape, said) for said in (row, list(row), tuple(map(np.int64, row)), *single)]
    return found


SHAPES: list[Wrong] = [
    *wrong("normalized_shape", TypeError, flag=True, float=3.0, text="33", none=None, nested=((3, 3),), flags=(True,)),
    *wrong("normalized_shape", TypeError, floats=(3.0, 3.0), texts=("3", "3"), hole=(3, None), bytes=b"33"),
    *wrong("normalized_shape", TypeError, numpy_bool=np.True_, numpy_float=np.float32(3), set={3}, type=int),
    *wrong("normalized_shape", TypeError, array=lambda _: np.array([3, 3]), one_flag=(3, True), dict={3: 3}),
    *wrong("normalized_shape", ValueError, empty=(), none_in_list=[], zero=0, zeros=(0, 3), negative=-3, minus=(3, -3)),
    *wrong("normalized_shape", ValueError, number=9, first=(2, 8), not_trailing=(8, 3), short=8, swapped=(3, 8, 3)),
    *wrong("normalized_shape", ValueError, longer=(1, 2, 8, 3, 3), other=(3, 4), in_list=[3, 4], huge=2**70),
]
_SHORT = {"strategy": "block", "threads": 64, "packs_per_thread": 1024, "rows_per_team": 4, "teams_per_block": 1}
OWN: list[Wrong] = [
    *x_cases(1),
    *SHAPES,
    *parameter_cases("gamma"),
    *wrong("gamma", ValueError, flat=lambda a: a["gamma"].reshape(9), as_x=lambda a: a["x"]),
    *wrong("tile", cunorm.UnsupportedTile, short=_SHORT),
    *workspace_on("x"),
    *inside(1, "x"),
]
WRONG: dict[str, list[Wrong]] = {
    FORWARD: [
        *OWN,
        *parameter_cases("beta"),
        *wrong("beta", ValueError, flat=lambda a: a["beta"].reshape(9), as_x=lambda a: a["x"]),
        *epsilon_cases(),
        *result_cases(("y", "mean", "rstd"), SPLIT[FORWARD]),
        *overlap_cases("x", in_place=True),
        *output(1, "is mean of x", ValueError, lambda o, a: a["x"][:, :, :1, :1]),
        *output(0, "is gamma, spread", ValueError, lambda o, a: np.broadcast_to(a["gamma"], o.shape)),
    ],
    BACKWARD: [
        *OWN,
        *gradient_cases(),
        *saved_cases("mean", "rstd"),
        *mask_cases(),
        *result_cases(("dx", "dgamma", "dbeta"), SPLIT[BACKWARD]),
        *gradient_overlap_cases(),
        *output(1, "in dy", ValueError, lambda o, a: a["dy"][1, 2]),
        *output(1, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "in mean", ValueError, lambda _, a: a["mean"].reshape(16)[:9].reshape(3, 3)),
        *workspace_on("dy"),
    ],
}


def _tile(x: Any, strategy: str | None, op: str) -> cunorm.Tile:
    return tile_of(op, strategy)


CONTRACTS = [
    Contract(
        op,
        lambda dtype="float32": layer_arrays(dtype=dtype),
        SPLIT[op],
        WRONG[op],
        partial(_tile, op=op),
        strided=(lambda: layer_arrays((3, 8, 5, 7), (5, 7)),),
        ranks=ranks,
        square=lambda: layer_arrays((4, 1, 4), 4),
        saved=((2, 8, 1, 1), (2, 8), (16,), (16, 1), (4, 4)),  # any shape with one element per row
        empty=tuple(
            partial(lambda dtype, shape, row: layer_arrays(shape, row, dtype), shape=shape, row=row)
            for shape, row in (((0, 8), 8), ((2, 0, 3, 3), (3, 3)), ((0, 0, 5), (5,)))
        ),
        in_place=tuple(
            (strategy, layout, {})
            for strategy in STRATEGIES
            for layout in (None, "channels last", "reversed", "misaligned", "misaligned channels last")
        ),
        large={name: (lambda: layer_arrays((64, 512), 512), name, None) for name in STRATEGIES},
        dirty={name: (lambda: layer_arrays((23, 33), 33), name, None) for name in STRATEGIES},
        alike=False,
    )
    for op in DIRECTIONS
]
