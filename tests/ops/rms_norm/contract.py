"""Description of RMSNorm for the shared contract tests, and of the tensors that RMSNorm and LayerNorm add."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import cunorm
from tests.ops.layer_norm import contract as layer
from tests.ops.rms_norm.test_rms_norm import STRATEGIES
from tests.ops.rms_norm.test_rms_norm import tile_of as tile_fields
from tests.support.contract import (
    EITHER,
    Contract,
    Wrong,
    array_cases,
    epsilon_cases,
    gradient_cases,
    gradient_overlap_cases,
    inside,
    output,
    overlap_cases,
    parameter_cases,
    result_cases,
    saved_cases,
    workspace_on,
    wrong,
    x_cases,
)
from tests.support.problems import Arrays, rms_arrays

FORWARD, BACKWARD = "rms_norm", "rms_norm_backward"
DIRECTIONS = {FORWARD: "forward", BACKWARD: "backward"}


def tile_of(op: str, strategy: str | None) -> cunorm.Tile:
    """The tile as a Tile. The default strategy is `block`."""
    return cunorm.Tile.of(tile_fields(strategy or "block", DIRECTIONS[op]))


#: `split` is the only strategy that needs a workspace in both directions.
SPLIT = {op: tile_of(op, "split") for op in DIRECTIONS}


def ranks(rank: int) -> list[Arrays]:
    """Normalise one axis, all but one and all."""
    shape = (3, 1, 2, 1, 2, 3, 2, 5)[-rank:]
    return [rms_arrays(shape, shape[-trailing:]) for trailing in {1, rank - 1, rank} - {0}]


def offset_cases() -> list[Wrong]:
    """Wrong values for gamma_offset."""
    return [
        *wrong("gamma_offset", ValueError, nan=float("nan"), inf=float("inf"), huge=10**400),
        *wrong("gamma_offset", ValueError, over=1e39, negative_over=-1e39, under=1e-46, negative_under=-1e-46),
        *wrong("gamma_offset", TypeError, string="1", none=None, bool=True, list=[1.0], point=lambda _: np.array(1.0)),
    ]


def mask_cases() -> list[Wrong]:
    """Wrong masks of two flags."""
    return [
        *wrong("output_mask", ValueError, short=(True,), long=(True, True, True), empty=()),
        *wrong("output_mask", TypeError, ints=(1, 1), none=None, flag=True, text="11", mixed=(True, 1), set={True}),
    ]


def added_cases(name: str) -> list[Wrong]:
    """Wrong values for the tensor that an op adds."""
    return [
        *array_cases(name),
        *wrong(name, TypeError, float64=lambda a: a[name].astype(np.float64), half=lambda a: a[name].astype("f2")),
        *wrong(name, ValueError, flat=lambda a: a[name].reshape(*a[name].shape[:2], -1), short=lambda a: a[name][:1]),
        *wrong(name, ValueError, transposed=lambda a: a[name].swapaxes(0, 1)),
    ]


_SHORT = {"strategy": "block", "threads": 64, "packs_per_thread": 1024, "rows_per_team": 4, "teams_per_block": 1}
OWN: list[Wrong] = [
    *x_cases(1),
    *layer.SHAPES,
    *parameter_cases("gamma"),
    *offset_cases(),
    *wrong("gamma", ValueError, flat=lambda a: a["gamma"].reshape(9), as_x=lambda a: a["x"]),
    *wrong("tile", cunorm.UnsupportedTile, short=_SHORT),
    *workspace_on("x"),
    *inside(1, "x"),
]
WRONG: dict[str, list[Wrong]] = {
    FORWARD: [
        *OWN,
        *epsilon_cases(),
        *result_cases(("y", "rstd"), SPLIT[FORWARD]),
        *overlap_cases("x", in_place=True),
        # a third output without a residual
        *wrong("out", EITHER, with_h=lambda a: (*a["out"], np.empty_like(a["x"]))),
    ],
    BACKWARD: [
        *OWN,
        *gradient_cases(),
        *saved_cases("rstd"),
        *mask_cases(),
        *result_cases(("dx", "dgamma"), SPLIT[BACKWARD]),
        *gradient_overlap_cases(),
        *output(1, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(1, "in rstd", ValueError, lambda _, a: a["rstd"].reshape(16)[:9].reshape(3, 3)),
        *workspace_on("dy"),
    ],
}


def _tile(x: Any, strategy: str | None, op: str) -> cunorm.Tile:
    return tile_of(op, strategy)


PLAIN = [
    Contract(
        op,
        lambda dtype="float32": rms_arrays(dtype=dtype),
        SPLIT[op],
        WRONG[op],
        partial(_tile, op=op),
        strided=(lambda: rms_arrays((3, 8, 5, 7), (5, 7)),),
        ranks=ranks,
        square=lambda: rms_arrays((4, 1, 4), 4),
        saved=((2, 8, 1, 1), (2, 8), (16,), (16, 1), (4, 4)),  # any shape with one element per row
        empty=tuple(
            partial(lambda dtype, shape, row: rms_arrays(shape, row, dtype), shape=shape, row=row)
            for shape, row in (((0, 8), 8), ((2, 0, 3, 3), (3, 3)))
        ),
        in_place=tuple((strategy, layout, {}) for strategy in STRATEGIES for layout in (None, "reversed")),
        large={name: (lambda: rms_arrays((64, 512), 512), name, None) for name in STRATEGIES},
        dirty={name: (lambda: rms_arrays((23, 33), 33), name, None) for name in STRATEGIES},
        alike=False,
    )
    for op in DIRECTIONS
]
#: The wrong calls of the ops that add a tensor, besides those of their calls without one.
WRONG_ADDED: dict[str, list[Wrong]] = {
    "residual": [
        *added_cases("residual"),
        *output(0, "is residual", ValueError, lambda _, a: a["residual"]),
        *output(2, "is x", ValueError, lambda _, a: a["x"]),
        *output(2, "is y", ValueError, lambda _, a: a["out"][0]),
        *output(2, "residual reversed", ValueError, lambda _, a: a["residual"][::-1]),
        *wrong("out", EITHER, without_h=lambda a: a["out"][:-1], long=lambda a: (*a["out"], None)),
    ],
    "dh": [
        *added_cases("dh"),
        *output(0, "is dh", ValueError, lambda _, a: a["dh"]),
        *workspace_on("dh"),
    ],
}


def added(one: Contract) -> Contract:
    """The contract of the op's calls that add a tensor."""
    name = "dh" if one.op.endswith("backward") else "residual"
    # In LayerNorm h is the fourth result.
    cases = (
        WRONG_ADDED[name] if one.op != "layer_norm" else [case for case in WRONG_ADDED[name] if "out 2" not in case[0]]
    )
    return Contract(
        one.op,
        lambda dtype="float32": one.made(dtype).with_extras(),  # type: ignore[attr-defined]
        one.right_tile,
        cases,
        one.tile,
        strided=tuple(lambda made=made: made().with_extras() for made in one.strided),
        saved=one.saved,
        empty=tuple(lambda dtype, made=made: made(dtype).with_extras() for made in one.empty[:1]),
        in_place=tuple((strategy, None, {}) for strategy in STRATEGIES),
        large={
            name: (lambda made=case[0]: made().with_extras(), *case[1:])
            for name, case in one.large.items()
            if name != "grid"
        },
        dirty={
            name: (lambda made=case[0]: made().with_extras(), *case[1:])
            for name, case in one.dirty.items()
            if name != "grid"
        },
        alike=False,
    )


CONTRACTS = [*PLAIN, *map(added, (*PLAIN, *layer.CONTRACTS))]
