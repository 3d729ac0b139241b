"""Description of BatchNorm for the shared contract tests: right calls, and the wrong calls of BatchNorm alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import cunorm
from cunorm.core.arrays import DTYPES
from tests.ops.batch_norm.test_batch_norm import tile_of as tile_fields
from tests.support.contract import (
    Arguments,
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
    read_only,
    result_cases,
    saved_cases,
    workspace_on,
    wrong,
    x_cases,
)
from tests.support.problems import BATCH_OPS, FLAGS, Arrays, batch_arrays

STATS, ELEMT, REDUCE, INPUT = BATCH_OPS
GATHER = "batch_norm_gather_stats"
KINDS = {STATS: "stats", ELEMT: "elemt", REDUCE: "reduce", INPUT: "input"}
RESULTS = {STATS: ("mean", "invstd"), ELEMT: ("y",), INPUT: ("dx",), GATHER: ("mean", "invstd")}
RESULTS[REDUCE] = ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")


def tile_of(op: str, strategy: str = "block") -> cunorm.Tile:
    """The tile as a Tile."""
    return cunorm.Tile("column", threads=64) if op == GATHER else cunorm.Tile.of(tile_fields(KINDS[op], strategy))


def strategy_of(x: Any) -> str:
    """The strategy for the memory layout of x: `column` for rows of channels, `block` for planes."""
    last = x.ndim == 2 or x.transpose(0, *range(2, x.ndim), 1).flags.c_contiguous
    return "column" if last else "block"


def _tile(x: Any, strategy: str | None, op: str) -> cunorm.Tile:
    return tile_of(op, strategy or strategy_of(x))


@dataclass
class GatherArrays(Arrays):
    """Arrays of batch_norm_gather_stats: three ranks, one of them absent."""

    family = "batch_norm"

    means: Any
    invstds: Any
    counts: Any
    running_mean: Any
    running_var: Any

    @property
    def x(self) -> Any:  # type: ignore[override]
        return self.means

    @property
    def options(self) -> dict[str, Any]:
        return {}

    @property
    def sizes(self) -> tuple[str, int, int, int, int]:
        return "NCHW", *self.means.shape, 1, self.means.shape[1]

    @property
    def saved(self) -> tuple[int, ...]:
        return self.parameters

    def check(self, op: str, results: Any, **numbers: float) -> None:
        """Check the two returned results. test_batch_norm_gather_calls.py checks the running statistics."""
        super().check(op, (*results, None, None), **numbers)


def gather_arrays(dtype: str = "float32") -> GatherArrays:
    a = batch_arrays(dtype=dtype)
    means, invstds = np.stack([a.mean, a.mean + 1, a.mean - 1]), np.stack([a.invstd, a.invstd, a.invstd / 2])
    return GatherArrays(means, invstds, np.array([4, 0, 9]), np.ones(8, np.float32), np.full(8, 2, np.float32))


# ---- wrong arguments ------------------------------------------------------------------------------------------------


def of_channels(name: str) -> list[Wrong]:
    """Wrong values for an array of one number per channel."""
    return [
        *array_cases(name),
        *wrong(name, TypeError, none=None),
        *wrong(name, ValueError, long=lambda _: np.ones(9, "f4"), short=lambda _: np.ones(7, "f4")),
        *wrong(name, ValueError, row=lambda _: np.ones((1, 8), "f4"), column=lambda _: np.ones((8, 1), "f4")),
        *wrong(name, ValueError, square=lambda _: np.ones((2, 4), "f4"), empty=lambda _: np.ones(0, "f4")),
    ]


SAVED = [
    *saved_cases("mean", "invstd"),
    *[
        case
        for name in ("mean", "invstd")
        for case in [
            *wrong(name, ValueError, row=lambda _: np.ones((1, 8), "f4"), column=lambda _: np.ones((8, 1), "f4")),
            *wrong(name, ValueError, square=lambda _: np.ones((2, 4), "f4")),
        ]
    ],
]
COUNTS: list[Wrong] = [
    *wrong("counts", TypeError, none=None, number=3, float=3.0, text="123", bytes=b"123", flag=True, set={4, 0, 9}),
    *wrong("counts", TypeError, scalar=lambda _: np.float64(3), generator=lambda _: (c for c in (4, 0, 9))),
    *wrong(
        "counts", TypeError, texts=["4", "0", "9"], flags=[True, False, True], one_flag=(4, 0, True), hole=[4, None, 9]
    ),
    *wrong("counts", TypeError, nested=[[4], [0], [9]], numpy_flag=[4, 0, np.True_], complex=[4, 0, 9j]),
    *[
        case
        for dtype in ("bool", "uint8", "int16", "float16", "longdouble", "complex64", "object", ">i8", ">f4", "U1")
        for case in wrong("counts", TypeError, **{f"of {dtype}": lambda a, dtype=dtype: a["counts"].astype(dtype)})
    ],
    *wrong("counts", TypeError, masked=lambda _: np.ma.masked_array([4, -1, 9], [False, True, False])),
    *wrong("counts", TypeError, bfloat16=lambda a: a["counts"].astype(DTYPES["bfloat16"])),
    *wrong(
        "counts", ValueError, minus=[4, -1, 9], minus_array=lambda _: np.array([4, -1, 9]), nan=[4, float("nan"), 9]
    ),
    *wrong("counts", ValueError, inf=[4, float("inf"), 9], nan_array=lambda _: np.array([4, np.nan, 9])),
    *wrong(
        "counts", ValueError, short=[4, 9], long=[4, 0, 9, 1], empty=(), huge=[2**70, 0, 1], larger=[0.5, 10**400, 1]
    ),
    *wrong("counts", ValueError, column=lambda a: a["counts"][:, None], row=lambda a: a["counts"][None]),
    *wrong("counts", ValueError, point=lambda _: np.array(3), of_channels=lambda _: np.ones(8, np.int64)),
]
MOMENTUM: list[Wrong] = [
    *wrong("momentum", TypeError, flag=True, text="0.1", none=None, list=[0.1], complex=0.1j, numpy_flag=np.False_),
    *wrong("momentum", TypeError, array=lambda _: np.array([0.1]), point=lambda _: np.array(0.1)),
    *wrong("momentum", ValueError, nan=float("nan"), minus=-1, two=2, inf=float("inf"), below=-1e-9, above=1.0000001),
]


def _on_out(name: str, step: int) -> Arguments:
    buffer = np.ones(8, np.float32)
    return {name: buffer[::step], "out": (buffer, np.zeros(8, np.float32))}


RUNNING: list[Wrong] = [
    case
    for name in ("running_mean", "running_var")
    for case in [
        *array_cases(name),
        *wrong(name, ValueError, long=lambda _: np.ones(9, "f4"), row=lambda _: np.ones((1, 8), "f4")),
        *wrong(name, ValueError, short=lambda _: np.ones(7, "f4"), point=lambda _: np.ones((), "f4")),
        *wrong(name, ValueError, read_only=lambda a, name=name: read_only(a[name])),
        *wrong(name, ValueError, spread=lambda a, name=name: np.broadcast_to(a[name][:1], 8)),
        *wrong(name, ValueError, of_means=lambda a: a["means"][1], across_invstds=lambda a: a["invstds"].ravel()[3:11]),
        (f"{name} is out", name, ValueError, lambda _, name=name: _on_out(name, 1)),
        (f"{name} is out, reversed", name, ValueError, lambda _, name=name: _on_out(name, -1)),
    ]
]
WRONG: dict[str, list[Wrong]] = {
    STATS: [
        *x_cases(),
        *epsilon_cases(),
        *result_cases(RESULTS[STATS], tile_of(STATS)),
        *workspace_on("x"),
        *inside(0, "x"),
    ],
    ELEMT: [
        *x_cases(),
        *SAVED,
        *parameter_cases("gamma"),
        *parameter_cases("beta"),
        *result_cases(RESULTS[ELEMT], tile_of(ELEMT), needed=False),
        *overlap_cases("x", in_place=True),
        *workspace_on("x"),
        *output(
            0, "over beta", ValueError, lambda o, a: np.broadcast_to(a["beta"], (4, 3, 3, 8)).transpose(0, 3, 1, 2)
        ),
    ],
    REDUCE: [
        *x_cases(),
        *gradient_cases(),
        *SAVED,
        *parameter_cases("gamma"),
        *[
            case
            for name in FLAGS
            for case in [
                *wrong(name, TypeError, one=1, zero=0, none=None, text="yes", float=1.0, list=[True], tuple=()),
                *wrong(
                    name, TypeError, point=lambda _: np.array(True), array=lambda _: np.ones(3, bool), numpy=np.int8(1)
                ),
            ]
        ],
        *result_cases(RESULTS[REDUCE], tile_of(REDUCE), any_dtype=True),
        *workspace_on("dy"),
        *inside(0, "dy"),
        *inside(1, "x"),
        *output(2, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(3, "is mean", ValueError, lambda _, a: a["mean"]),
        *output(3, "is invstd, reversed", ValueError, lambda _, a: a["invstd"][::-1]),
    ],
    INPUT: [
        *x_cases(),
        *gradient_cases(),
        *SAVED,
        *parameter_cases("gamma"),
        *of_channels("sum_dy"),
        *of_channels("sum_dy_xmu"),
        *wrong("sum_dy_xmu", TypeError, float64=lambda a: a["sum_dy_xmu"].astype(np.float64)),
        *wrong("count", ValueError, minus=-1, nan=float("nan"), inf=float("inf"), huge=10**400, small=-1e-9),
        *wrong("count", ValueError, minus_list=[4, -1], nan_tuple=(4, float("nan")), huge_list=[2**70, 1]),
        *wrong("count", ValueError, minus_array=lambda _: np.array([4, -1]), inf_array=lambda _: np.array([np.inf])),
        *wrong("count", ValueError, square=lambda _: np.ones((2, 2), int), column=lambda _: np.ones((3, 1))),
        *wrong("count", TypeError, flag=True, text="3", none=None, complex=3j, numpy_flag=np.True_, bytes=b"3"),
        *wrong("count", TypeError, texts=["3"], flags=[True], nested=[[3]], set={3}, hole=[3, None]),
        *[
            case
            for dtype in ("bool", "uint8", "int16", "float16", "longdouble", "complex64", "object", ">i8", "U1")
            for case in wrong("count", TypeError, **{f"of {dtype}": lambda _, dtype=dtype: np.array([3]).astype(dtype)})
        ],
        *wrong("count", TypeError, masked=lambda _: np.ma.masked_array([4, 9], [False, True])),
        *result_cases(RESULTS[INPUT], tile_of(INPUT), needed=False),
        *gradient_overlap_cases(),
        *workspace_on("sum_dy"),
    ],
    GATHER: [
        *array_cases("means"),
        *wrong("means", TypeError, none=None),
        *wrong("means", ValueError, flat=lambda a: a["means"][0], deep=lambda a: a["means"][..., None]),
        *array_cases("invstds"),
        *wrong("invstds", TypeError, none=None, float64=lambda a: a["invstds"].astype(float)),
        *wrong("invstds", ValueError, short=lambda a: a["invstds"][:2], narrow=lambda a: a["invstds"][:, :7]),
        *wrong("invstds", ValueError, turned=lambda a: a["invstds"].T, flat=lambda a: a["invstds"].reshape(-1)),
        *COUNTS,
        *epsilon_cases(rounded=False),
        *MOMENTUM,
        *RUNNING,
        *wrong("running_var", ValueError, is_running_mean=lambda a: a["running_mean"]),
        *result_cases(RESULTS[GATHER], tile_of(GATHER), needed=False),
        *output(0, "in means", ValueError, lambda _, a: a["means"][2]),
        *output(1, "in invstds", ValueError, lambda _, a: a["invstds"][0]),
        *workspace_on("means"),
    ],
}


LAYOUTS_IN_PLACE = (None, "channels last", "reversed", "misaligned", "misaligned channels last")
CONTRACTS = [
    *[
        Contract(
            op,
            lambda dtype="float32": batch_arrays(dtype=dtype),
            tile_of(op),
            WRONG[op],
            partial(_tile, op=op),
            strided=(lambda: batch_arrays((3, 8, 5, 7)),),
            ranks=lambda rank: [batch_arrays((2, 8, *(3, 1, 2, 1, 2, 3)[: rank - 2]))] if rank > 1 else [],
            square=lambda: batch_arrays((2, 2, 2, 2)),
            saved=((8,),),
            empty=tuple(
                partial(lambda dtype, shape: replace(batch_arrays(shape, dtype), count=1), shape=shape)
                for shape in ((0, 8, 3, 3), (2, 8, 0, 3), (0, 8), (2, 0, 3), (0, 0), (2, 8, 3, 0, 5))
            ),
            in_place=tuple((None, layout, {}) for layout in LAYOUTS_IN_PLACE if op in (ELEMT, INPUT)),
            large={
                layout or "contiguous": (lambda: batch_arrays((2, 8, 64, 64)), None, layout)
                for layout in (None, "channels last")
            },
            dirty={
                layout or "contiguous": (lambda: batch_arrays((5, 8, 9, 9)), None, layout)
                for layout in (None, "channels last")
                if op in (STATS, REDUCE)
            },
            any_dtype=op == REDUCE,
            needed=op in (STATS, REDUCE),
        )
        for op in BATCH_OPS
    ],
    Contract(GATHER, gather_arrays, tile_of(GATHER), WRONG[GATHER], partial(_tile, op=GATHER), needed=False),
]
