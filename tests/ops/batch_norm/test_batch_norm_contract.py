"""The public contract of BatchNorm's functions on tensors and of batch_norm_gather_stats: wrong arguments.

As test_group_norm_contract does for GroupNorm, with the machinery of contract.py. What must work is in
test_batch_norm_calls.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.core.arrays import DTYPES
from cunorm.ops.registry import OPS
from tests.ops.batch_norm.test_batch_norm import tile_of
from tests.support.contract import (
    Arguments,
    Wrong,
    array_cases,
    backwards,
    both,
    check_mixed,
    check_read_only,
    check_refusal,
    container_cases,
    epsilon_cases,
    flat,
    gradient_cases,
    invoke,
    neighbours,
    output,
    output_cases,
    parameter_cases,
    parameters,
    read_only,
    tile_cases,
    workspace_cases,
    workspace_on,
    wrong,
)
from tests.support.problems import BATCH_OPS, SENTINEL, batch_arrays

STATS, ELEMT, REDUCE, INPUT = BATCH_OPS
GATHER = "batch_norm_gather_stats"
KINDS = {STATS: "stats", ELEMT: "elemt", REDUCE: "reduce", INPUT: "input"}
RESULTS = {STATS: ("mean", "invstd"), ELEMT: ("y",), INPUT: ("dx",), GATHER: ("mean", "invstd")}
RESULTS[REDUCE] = ("sum_dy", "sum_dy_xmu", "dgamma", "dbeta")
FLAGS = ("input_g", "gamma_g", "beta_g")
#: The results of batch_norm_backward_reduce that a flag asks for.
ASKED = {"input_g": (0, 1), "gamma_g": (2,), "beta_g": (3,)}


def tile(op: str, strategy: str = "block") -> cunorm.Tile:
    """A tile proper: a dictionary is checked in every call, and its call not remembered."""
    return cunorm.Tile("column", threads=64) if op == GATHER else cunorm.Tile.of(tile_of(KINDS[op], strategy))


def empty_results(op: str, xp: Any = np, C: int = 8, shape: tuple[int, ...] = (4, 8, 3, 3), dtype: Any = "f4") -> Any:
    """Arrays for out."""
    if op in (ELEMT, INPUT):
        return xp.full(shape, SENTINEL, dtype)
    return tuple(xp.full((C,), SENTINEL, dtype) for _ in RESULTS[op])


def right_arguments(op: str) -> Arguments:
    """A correct call that needs nothing allocated: every argument is given."""
    a = batch_arrays()
    shape = (3, 8) if op == GATHER else a.x.shape
    needed = cunorm.plan(op, shape=shape, dtype="float32", tile=tile(op), device="cpu").workspace_nbytes
    assert (needed > 64) == (op in (STATS, REDUCE))
    return {
        **vars(a),
        **dict.fromkeys(FLAGS, True),
        "means": np.stack([a.mean, a.mean + 1, a.mean - 1]),
        "invstds": np.stack([a.invstd, a.invstd, a.invstd / 2]),
        "counts": np.array([4, 0, 9]),
        "running_mean": np.ones(8, np.float32),
        "running_var": np.full(8, 2, np.float32),
        "momentum": 0.25,
        "eps": 1e-5,
        "out": empty_results(op),
        "tile": tile(op),
        "workspace": np.full(needed or 64, 0xFF, np.uint8),
    }


def check(op: str, found: Any) -> None:
    if op != GATHER:
        batch_arrays().check(op, found)
        return
    a = right_arguments(op)
    exact = reference.batch_norm_gather_stats(a["means"], a["invstds"], a["counts"])
    for came, want in zip(found, exact, strict=False):
        np.testing.assert_allclose(came, want, rtol=1e-6)


# ---- wrong arguments ------------------------------------------------------------------------------------------------


def of_results(op: str) -> list[Wrong]:
    """Wrong outputs and workspaces, and outputs that lie on other arrays."""
    count = len(RESULTS[op])
    cases = [*container_cases(count), *workspace_cases(needed=op in (STATS, REDUCE)), *tile_cases(tile(op))]
    for index in range(count):
        cases += output_cases(index, any_dtype=op == REDUCE)
    if count > 1:
        cases += output(1, "is out 0", ValueError, lambda _, a: a["out"][0])
        cases += output(1, "reversed out 0", ValueError, lambda _, a: a["out"][0][::-1])
        cases += [("out 1 half on out 0", "out", ValueError, _half_on_each_other)]
    return cases


def _half_on_each_other(a: Arguments) -> Arguments:
    pair = np.zeros(12, np.float32)
    return {"out": (pair[:8], pair[4:], *a["out"][2:])}


def of_tensor(name: str, in_place: bool) -> list[Wrong]:
    """An output of x's shape on an input."""
    whole = () if in_place else output(0, f"is {name}", ValueError, lambda _, a: a[name])
    return [
        *whole,
        *[(f"out {shift} past {name}", "out", ValueError, neighbours(name, shift)) for shift in (1, 4, 8, 143)],
        (f"out before {name} that runs backwards", "out", ValueError, backwards(name)),
        *output(0, f"{name} reversed", ValueError, lambda _, a: a[name][::-1]),
        *output(0, f"{name} swapped", ValueError, lambda _, a: a[name].swapaxes(2, 3)),
    ]


def of_channels(name: str) -> list[Wrong]:
    """Wrong arrays of a number a channel."""
    return [
        *array_cases(name),
        *wrong(name, TypeError, none=None),
        *wrong(name, ValueError, long=lambda _: np.ones(9, "f4"), short=lambda _: np.ones(7, "f4")),
        *wrong(name, ValueError, row=lambda _: np.ones((1, 8), "f4"), column=lambda _: np.ones((8, 1), "f4")),
        *wrong(name, ValueError, square=lambda _: np.ones((2, 4), "f4"), empty=lambda _: np.ones(0, "f4")),
    ]


SAVED = [
    case
    for name in ("mean", "invstd")
    for case in [
        *of_channels(name),
        *wrong(name, TypeError, bfloat16=lambda a, name=name: a[name].astype(DTYPES["bfloat16"])),
        *wrong(name, TypeError, float64=lambda a, name=name: a[name].astype(np.float64)),
    ]
]
X = [
    *array_cases("x"),
    *wrong("x", TypeError, none=None),
    *both("0-d", ValueError, lambda x: x.ravel()[:1].reshape(())),
    *both("rank 1", ValueError, lambda x: x.ravel()[:8]),
    *both("rank 9", ValueError, lambda x: x.reshape(4, 8, 3, 3, 1, 1, 1, 1, 1)),
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
    *wrong("counts", ValueError, zeros=[0, 0, 0], zero_floats=(0.0, -0.0, 0.0), zero_array=lambda _: np.zeros(3, "i4")),
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
        *X,
        *epsilon_cases(),
        *of_results(STATS),
        *workspace_on("x"),
        *output(0, "in x", ValueError, lambda _, a: a["x"].reshape(-1)[4:12]),
    ],
    ELEMT: [
        *X,
        *SAVED,
        *parameter_cases("gamma"),
        *parameter_cases("beta"),
        *of_results(ELEMT),
        *of_tensor("x", in_place=True),
        *workspace_on("x"),
        *output(
            0, "over beta", ValueError, lambda o, a: np.broadcast_to(a["beta"], (4, 3, 3, 8)).transpose(0, 3, 1, 2)
        ),
    ],
    REDUCE: [
        *X,
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
        *of_results(REDUCE),
        *workspace_on("dy"),
        *output(0, "in dy", ValueError, lambda _, a: a["dy"].reshape(-1)[4:12]),
        *output(1, "in x", ValueError, lambda _, a: a["x"].reshape(-1)[4:12]),
        *output(2, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(3, "is mean", ValueError, lambda _, a: a["mean"]),
        *output(3, "is invstd, reversed", ValueError, lambda _, a: a["invstd"][::-1]),
    ],
    INPUT: [
        *X,
        *gradient_cases(),
        *SAVED,
        *parameter_cases("gamma"),
        *of_channels("sum_dy"),
        *of_channels("sum_dy_xmu"),
        *wrong("sum_dy_xmu", TypeError, float64=lambda a: a["sum_dy_xmu"].astype(np.float64)),
        *wrong("count", ValueError, zero=0, minus=-1, nan=float("nan"), inf=float("inf"), huge=10**400, small=-1e-9),
        *wrong(
            "count", TypeError, flag=True, text="3", none=None, list=[3], complex=3j, numpy_flag=np.True_, bytes=b"3"
        ),
        *wrong("count", TypeError, array=lambda _: np.array([36.0]), point=lambda _: np.array(36.0)),
        *of_results(INPUT),
        *of_tensor("dy", in_place=True),
        *of_tensor("x", in_place=False),
        ("out is dy and x", "out", ValueError, lambda a: {"dy": a["x"], "out": a["x"]}),
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
        *epsilon_cases(),
        *MOMENTUM,
        *RUNNING,
        *wrong("running_var", ValueError, is_running_mean=lambda a: a["running_mean"]),
        *of_results(GATHER),
        *output(0, "in means", ValueError, lambda _, a: a["means"][2]),
        *output(1, "in invstds", ValueError, lambda _, a: a["invstds"][0]),
        *workspace_on("means"),
    ],
}


@pytest.mark.parametrize("op", WRONG)
def test_the_right_arguments_are_right(op: str) -> None:
    given = right_arguments(op)
    found = invoke(op, given)
    assert all(came is array for came, array in zip(flat(found), flat(given["out"]), strict=True))
    check(op, found)


@pytest.mark.parametrize(("op", "case", "state"), parameters(WRONG))
def test_wrong_arguments(op: str, case: Any, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refusal(op, right_arguments, check, case, state, monkeypatch)


@pytest.mark.parametrize("op", WRONG)
def test_an_array_to_write_that_turns_read_only_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ["out"] if len(RESULTS[op]) == 1 else [f"out[{name}]" for name in RESULTS[op]]
    labels += ["running_mean", "running_var"] * (op == GATHER)
    check_read_only(op, right_arguments, labels, monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("op", WRONG)
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_numpy_and_cupy_arrays_do_not_mix(op: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OPS[op].inputs, *OPS[op].updated, "out", "workspace"):
        check_mixed(op, right_arguments, name, state, monkeypatch)
