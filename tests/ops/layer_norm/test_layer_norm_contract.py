"""The public contract of layer_norm and layer_norm_backward, as a hostile and tired user would try it.

As test_group_norm_contract does for GroupNorm: wrong arguments first, then what must work. The machinery: contract.py.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from tests.conftest import Executor
from tests.ops.layer_norm.test_layer_norm import STRATEGIES
from tests.ops.layer_norm.test_layer_norm import tile_of as tile_fields
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
    gradient_cases,
    invoke,
    mask_cases,
    neighbours,
    output,
    output_cases,
    parameter_cases,
    parameters,
    peak_of,
    read_only,
    refused,
    tile_cases,
    unaligned,
    workspace_cases,
    workspace_on,
    wrong,
)
from tests.support.problems import LAYOUTS, SENTINEL, LayerArrays, laid_out, layer_arrays

FORWARD, BACKWARD = "layer_norm", "layer_norm_backward"
NAMED = {FORWARD: ("y", "mean", "rstd"), BACKWARD: ("dx", "dgamma", "dbeta")}
MASKS = list(itertools.product((True, False), repeat=3))


def tile_of(strategy: str, direction: str) -> cunorm.Tile:
    """A tile proper: a dictionary is checked in every call, and its call not remembered."""
    return cunorm.Tile.of(tile_fields(strategy, direction))


#: Forward and backward of the one strategy that needs a workspace for both.
SPLIT = {FORWARD: tile_of("split", "forward"), BACKWARD: tile_of("split", "backward")}
BLOCK = {FORWARD: tile_of("block", "forward"), BACKWARD: tile_of("block", "backward")}


def right_arguments(op: str) -> Arguments:
    """A correct call that needs nothing allocated: every argument is given."""
    a = layer_arrays()
    shapes = [a.x.shape, (3, 3), (3, 3)] if op == BACKWARD else [a.x.shape, (2, 8, 1, 1), (2, 8, 1, 1)]
    needed = cunorm.plan(
        op, shape=a.x.shape, dtype="float32", normalized_shape=(3, 3), tile=SPLIT[op], device="cpu"
    ).workspace_nbytes
    assert needed > 64
    return {
        **{name: getattr(a, name) for name in ("dy", "x", "mean", "rstd", "gamma", "beta")},
        "normalized_shape": (3, 3),
        "eps": 1e-5,
        "output_mask": (True, True, True),
        "out": tuple(np.full(shape, SENTINEL, np.float32) for shape in shapes),
        "tile": SPLIT[op],
        "workspace": np.full(needed, 0xFF, np.uint8),
    }


# ---- wrong arguments ------------------------------------------------------------------------------------------------

SHAPES: list[Wrong] = [
    *wrong("normalized_shape", TypeError, flag=True, float=3.0, text="33", none=None, nested=((3, 3),), flags=(True,)),
    *wrong("normalized_shape", TypeError, floats=(3.0, 3.0), texts=("3", "3"), hole=(3, None), bytes=b"33"),
    *wrong("normalized_shape", TypeError, numpy_bool=np.True_, numpy_float=np.float32(3), set={3}, type=int),
    *wrong("normalized_shape", TypeError, array=lambda _: np.array([3, 3]), one_flag=(3, True), dict={3: 3}),
    *wrong("normalized_shape", ValueError, empty=(), none_in_list=[], zero=0, zeros=(0, 3), negative=-3, minus=(3, -3)),
    *wrong("normalized_shape", ValueError, number=9, first=(2, 8), not_trailing=(8, 3), short=8, swapped=(3, 8, 3)),
    *wrong("normalized_shape", ValueError, longer=(1, 2, 8, 3, 3), other=(3, 4), in_list=[3, 4], huge=2**70),
]
SHARED: list[Wrong] = [
    *array_cases("x"),
    *wrong("x", TypeError, none=None),
    *both("0-d", ValueError, lambda x: x.ravel()[:1].reshape(())),
    *both("rank 9", ValueError, lambda x: x.reshape(2, 8, 1, 1, 1, 1, 1, 3, 3)),
    *SHAPES,
    *parameter_cases("gamma"),
    *parameter_cases("beta"),
    *wrong("gamma", ValueError, flat=lambda a: a["gamma"].reshape(9), as_x=lambda a: a["x"]),
    *wrong("beta", ValueError, flat=lambda a: a["beta"].reshape(9), as_x=lambda a: a["x"]),
    *tile_cases(SPLIT[BACKWARD]),
    *wrong(
        "tile",
        cunorm.UnsupportedTile,
        short={"strategy": "block", "threads": 64, "packs_per_thread": 1024, "rows_per_team": 4, "teams_per_block": 1},
    ),
    *workspace_cases(),
    *workspace_on("x"),
    *container_cases(3),
    *[case for index in range(3) for case in output_cases(index)],
    *output(1, "in out 0", ValueError, lambda o, a: a["out"][0].reshape(-1)[: o.size].reshape(o.shape)),
    *output(2, "is out 1", ValueError, lambda _, a: a["out"][1]),
    *output(2, "reversed out 1", ValueError, lambda _, a: a["out"][1][::-1]),
    *output(1, "in x", ValueError, lambda o, a: a["x"].reshape(-1)[4 : 4 + o.size].reshape(o.shape)),
    *[(f"out 0 {shift} past x", "out", ValueError, neighbours("x", shift)) for shift in (1, 4, 8, 143)],
    ("out 0 before x that runs backwards", "out", ValueError, backwards("x")),
    *output(0, "x reversed", ValueError, lambda _, a: a["x"][::-1]),
    *output(0, "x swapped", ValueError, lambda _, a: a["x"].swapaxes(2, 3)),
]
WRONG: dict[str, list[Wrong]] = {
    FORWARD: [
        *SHARED,
        *epsilon_cases(),
        *output(1, "is mean of x", ValueError, lambda o, a: a["x"][:, :, :1, :1]),
        *output(0, "is gamma, spread", ValueError, lambda o, a: np.broadcast_to(a["gamma"], o.shape)),
    ],
    BACKWARD: [
        *SHARED,
        *gradient_cases(),
        *[
            case
            for name in ("mean", "rstd")
            for case in [
                *array_cases(name),
                *wrong(name, TypeError, none=None, float64=lambda a, name=name: a[name].astype(np.float64)),
                *wrong(name, TypeError, float16=lambda a, name=name: a[name].astype(np.float16)),
                *wrong(name, ValueError, long=lambda _: np.ones(17, np.float32), empty=lambda _: np.ones(0, "f4")),
                *wrong(name, ValueError, short=lambda _: np.ones(2, np.float32), as_x=lambda a: a["x"]),
            ]
        ],
        *mask_cases(),
        *output(0, "is x", ValueError, lambda _, a: a["x"]),
        *output(0, "view of x", ValueError, lambda _, a: a["x"][...]),
        *[(f"out 0 {shift} past dy", "out", ValueError, neighbours("dy", shift)) for shift in (1, 4, 143)],
        ("out 0 is dy and x", "out", ValueError, lambda a: {"dy": a["x"], "out": (a["x"], *a["out"][1:])}),
        *output(0, "dy reversed", ValueError, lambda _, a: a["dy"][::-1]),
        *output(1, "in dy", ValueError, lambda o, a: a["dy"][1, 2]),
        *output(1, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "in mean", ValueError, lambda _, a: a["mean"].reshape(16)[:9].reshape(3, 3)),
        *workspace_on("dy"),
    ],
}
WRONG[BACKWARD] = [case for case in WRONG[BACKWARD] if case[1] != "beta"]


def check(op: str, found: Any) -> None:
    (layer_arrays().check_backward if op == BACKWARD else layer_arrays().check_forward)(*found)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_the_right_arguments_are_right(op: str) -> None:
    given = right_arguments(op)
    found = invoke(op, given)
    assert all(came is array for came, array in zip(found, given["out"], strict=True))
    check(op, found)


@pytest.mark.parametrize(("op", "case", "state"), parameters(WRONG))
def test_wrong_arguments(op: str, case: Any, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refusal(op, right_arguments, check, case, state, monkeypatch)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_an_output_that_turns_read_only_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_read_only(op, right_arguments, [f"out[{name}]" for name in NAMED[op]], monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("name", ["x", "dy", "mean", "rstd", "gamma", "out", "workspace"])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_numpy_and_cupy_arrays_do_not_mix(name: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mixed(BACKWARD, right_arguments, name, state, monkeypatch)


# ---- memory layouts -------------------------------------------------------------------------------------------------


def run_backward(a: LayerArrays, dy: Any, x: Any, executor: Executor, **options: Any) -> tuple[Any, ...]:
    put = executor.put
    options = {"tile": BLOCK[BACKWARD], **options}
    return cunorm.layer_norm_backward(dy, x, a.normalized_shape, put(a.mean), put(a.rstd), put(a.gamma), **options)


def run_forward(a: LayerArrays, x: Any, executor: Executor, **options: Any) -> tuple[Any, ...]:
    options = {"tile": BLOCK[FORWARD], **options}
    return cunorm.layer_norm(x, a.normalized_shape, executor.put(a.gamma), executor.put(a.beta), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(layout: str, executor: Executor) -> None:
    a, xp, get = layer_arrays((3, 8, 5, 7), (5, 7)), executor.xp, executor.get
    plain_x, plain_dy = executor.put(a.x), executor.put(a.dy)
    x, dy = laid_out(xp, a.x, layout), laid_out(xp, a.dy, layout)
    for given_dy, given_x in ((dy, x), (plain_dy, x), (dy, plain_x)):
        a.check_backward(*map(get, run_backward(a, given_dy, given_x, executor)))
    found = run_forward(a, x, executor)
    a.check_forward(*map(get, found))
    assert found[0].flags.c_contiguous
    assert np.array_equal(get(x), a.x)  # inputs are only read
    assert np.array_equal(get(dy), a.dy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_outputs(layout: str, executor: Executor) -> None:
    a, xp, get = layer_arrays((3, 8, 5, 7), (5, 7)), executor.xp, executor.get
    base, view = LAYOUTS[layout](xp, a.x.shape, a.x.dtype)
    vectors = xp.full((4, 24, 10, 14), SENTINEL, np.float32)
    for op in (FORWARD, BACKWARD):
        base.fill(SENTINEL)
        if op == FORWARD:
            statistics = vectors[0, :3, ::-1][:, :8, :2], vectors[1, ::8, :8, 3:5]
            out = (view, *(each[..., :1, None] for each in statistics))
            found = run_forward(a, executor.put(a.x), executor, out=out)
            a.check_forward(*map(get, found))
        else:
            out = (view, vectors[2, 0, ::-2, ::2], vectors[3, :10:2, 3, :7])
            found = run_backward(a, executor.put(a.dy), executor.put(a.x), executor, out=out)
            a.check_backward(*map(get, found))
        assert all(came is given for came, given in zip(found, out, strict=True))
        for array in out:
            array.fill(SENTINEL)
        assert bool((base == SENTINEL).all())  # nothing was written between the elements
        assert bool((vectors == SENTINEL).all())


def test_broadcast_inputs(executor: Executor) -> None:
    a, xp, get = layer_arrays(), executor.xp, executor.get
    for source in (a.dy[:, :, :1, :1], a.dy[:1, :1, :1, :1], a.dy[:1], a.dy[..., :1]):
        a.dy = np.broadcast_to(source, a.x.shape)
        dy = xp.broadcast_to(executor.put(np.ascontiguousarray(source)), a.x.shape)
        assert 0 in dy.strides
        a.check_backward(*map(get, run_backward(a, dy, executor.put(a.x), executor)))
    a.gamma = a.beta = np.broadcast_to(a.gamma[:, :1], (3, 3))
    gamma = xp.broadcast_to(executor.put(a.gamma[:, :1].copy()), (3, 3))
    x, dy = executor.put(a.x), executor.put(a.dy)
    a.check_forward(*map(get, cunorm.layer_norm(x, (3, 3), gamma, gamma, tile=BLOCK[FORWARD])))
    given = (executor.put(a.mean), executor.put(a.rstd), gamma)
    a.check_backward(*map(get, cunorm.layer_norm_backward(dy, x, (3, 3), *given, tile=BLOCK[BACKWARD])))


def test_small_arrays_of_any_strides(executor: Executor) -> None:
    a, xp = layer_arrays(), executor.xp
    dy, x = executor.put(a.dy), executor.put(a.x)
    gamma, beta = (laid_out(xp, each, "Fortran") for each in (a.gamma, a.beta))
    assert not gamma.flags.c_contiguous
    for shape in ((2, 8, 1, 1), (2, 8), (16,), (16, 1), (4, 4)):  # any shape with an element a row
        for layout in ("every other", "Fortran", "reversed"):
            mean, rstd = (laid_out(xp, each.reshape(shape), layout) for each in (a.mean, a.rstd))
            found = cunorm.layer_norm_backward(dy, x, (3, 3), mean, rstd, gamma, tile=BLOCK[BACKWARD])
            a.check_backward(*map(executor.get, found))
    a.check_forward(*map(executor.get, cunorm.layer_norm(x, (3, 3), gamma, beta, tile=BLOCK[FORWARD])))


@pytest.mark.parametrize("where", ["x", "dy", "gamma", "mean", "dx", "dgamma"])
def test_arrays_off_their_elements_boundary(where: str) -> None:
    given = {**right_arguments(BACKWARD), "workspace": None}
    if where in ("dx", "dgamma"):
        index = NAMED[BACKWARD].index(where)
        given["out"] = tuple(unaligned(o) if i == index else o for i, o in enumerate(given["out"]))
    else:
        given[where] = unaligned(given[where])
    for _ in range(2):
        layer_arrays().check_backward(*invoke(BACKWARD, given))


@pytest.mark.parametrize("rank", range(1, 9))
def test_ranks(rank: int, executor: Executor) -> None:
    shape = (3, 1, 2, 1, 2, 3, 2, 5)[-rank:]
    for trailing in {1, rank - 1, rank} - {0}:
        row = shape[-trailing:]
        for normalized_shape in (
            row,
            list(row),
            tuple(map(np.int64, row)),
            *((row[0], np.int32(row[0])) * (trailing == 1)),
        ):
            a = layer_arrays(shape, normalized_shape)
            y, mean, rstd = run_forward(a, executor.put(a.x), executor)
            assert mean.shape == rstd.shape == (*shape[: rank - trailing], *(1,) * trailing)
            a.check_forward(*map(executor.get, (y, mean, rstd)))
            found = run_backward(a, executor.put(a.dy), executor.put(a.x), executor)
            assert found[1].shape == found[2].shape == row
            a.check_backward(*map(executor.get, found))


def test_subclasses_of_numpy_arrays(tmp_path: Any) -> None:
    a = layer_arrays()
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=a.x.shape)
    mapped[...] = a.x
    for _ in range(2):
        a.check_forward(*cunorm.layer_norm(mapped, (3, 3), a.gamma, a.beta, tile=BLOCK[FORWARD]))
    read_only(mapped)
    a.check_forward(*cunorm.layer_norm(mapped, (3, 3), a.gamma, a.beta, tile=BLOCK[FORWARD]))


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [None, "channels last", "reversed", "misaligned"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_place(strategy: str, layout: str | None, executor: Executor) -> None:
    a, xp = layer_arrays(), executor.xp

    def lie(values: np.ndarray) -> Any:
        return executor.put(values) if layout is None else laid_out(xp, values, layout)

    x = lie(a.x)
    y, *statistics = run_forward(a, x, executor, tile=tile_of(strategy, "forward"), out=(x, None, None))
    assert y is x
    a.check_forward(executor.get(y), *map(executor.get, statistics))
    for alias in (lambda array: array, lambda array: array[...]):
        dy = lie(a.dy)
        out = (alias(dy), None, None)
        found = run_backward(a, dy, lie(a.x), executor, tile=tile_of(strategy, "backward"), out=out)
        assert found[0] is out[0]
        a.check_backward(*map(executor.get, found))


def test_inputs_may_be_one_array(executor: Executor) -> None:
    a = layer_arrays()
    a.dy, a.rstd, a.beta = a.x, a.mean, a.gamma
    x, mean, gamma = executor.put(a.x), executor.put(a.mean), executor.put(a.gamma)
    for out in (None, tuple(executor.xp.zeros(s, np.float32) for s in (a.x.shape, (3, 3), (3, 3)))):
        found = cunorm.layer_norm_backward(x, x, (3, 3), mean, mean, gamma, tile=BLOCK[BACKWARD], out=out)
        a.check_backward(*map(executor.get, found))
    a.check_forward(*map(executor.get, cunorm.layer_norm(x, (3, 3), gamma, gamma, tile=BLOCK[FORWARD])))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("given", [True, False])
def test_masks(mask: tuple[bool, ...], given: bool, executor: Executor) -> None:
    a, xp = layer_arrays(), executor.xp
    out = tuple(xp.full(shape, SENTINEL, np.float32) for shape in (a.x.shape, (3, 3), (3, 3))) if given else None
    if mask == (False, False, True):  # only dbeta: x is not read
        a.x = np.full_like(a.x, np.nan)
    for kind in (mask, list(mask), tuple(map(np.bool_, mask))):
        found = run_backward(a, executor.put(a.dy), executor.put(a.x), executor, output_mask=kind, out=out)
        assert [came is not None for came in found] == list(mask)
        if mask == (False, False, True):
            np.testing.assert_allclose(executor.get(found[2]), a.dy.sum((0, 1), dtype=float), rtol=0, atol=1e-5)
        else:
            a.check_backward(*map(executor.get, found))
    for array, flag in zip(out or (), mask, strict=False):
        assert flag or bool((array == SENTINEL).all())


def test_masked_off_outputs_may_be_any_array() -> None:
    given = right_arguments(BACKWARD)
    given.update(output_mask=(False, True, True), out=(given["x"], *given["out"][1:]))
    before = given["x"].tobytes()
    layer_arrays().check_backward(*invoke(BACKWARD, given))
    assert given["x"].tobytes() == before


@pytest.mark.parametrize(("shape", "row"), [((0, 8), 8), ((2, 0, 3, 3), (3, 3)), ((0, 0, 5), (5,))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("given", [True, False])
def test_no_rows(shape: tuple[int, ...], row: Any, dtype: str, given: bool, executor: Executor) -> None:
    xp = executor.xp
    x, sums = xp.zeros(shape, DTYPES[dtype]), DTYPES["float64" if dtype == "float64" else "float32"]
    size = row if isinstance(row, tuple) else (row,)
    saved = (*shape[: -len(size)], *(1,) * len(size))
    gamma = xp.ones(size, x.dtype)
    out = (xp.empty(shape, x.dtype), *(xp.empty(saved, sums) for _ in range(2))) if given else None
    found = cunorm.layer_norm(x, row, gamma, out=out)
    assert [(each.shape, each.dtype) for each in found] == [(shape, x.dtype), (saved, sums), (saved, sums)]
    for mask in MASKS:
        out = (xp.empty(shape, x.dtype), *(xp.full(size, SENTINEL, x.dtype) for _ in range(2))) if given else None
        gradients = cunorm.layer_norm_backward(x, x, row, *found[1:], gamma, output_mask=mask, out=out)
        assert [came is not None for came in gradients] == list(mask)
        assert not mask[0] or (gradients[0].shape, gradients[0].dtype) == (shape, x.dtype)
        for came, flag, array in zip(gradients[1:], mask[1:], (out or (None,) * 3)[1:], strict=True):
            if flag:
                assert (came.shape, came.dtype) == (size, x.dtype)
                assert bool((came == 0).all())
            elif array is not None:
                assert bool((array == SENTINEL).all())


@pytest.mark.parametrize("shape", [(4, 0), (0, 0), (3, 0, 5)])
def test_a_row_of_no_elements_is_an_error(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, row = np.zeros(shape, np.float32), shape[1:]
    given = {"x": x, "normalized_shape": row, "gamma": None, "beta": None, "out": None, "tile": None, "workspace": None}
    refused(monkeypatch, FORWARD, given, "normalized_shape", ValueError)
    statistics = np.zeros(math.prod(shape[:1]), np.float32)
    refused(monkeypatch, BACKWARD, {**given, "dy": x, "mean": statistics, "rstd": statistics}, "normalized_shape")


def test_dtypes_of_results(executor: Executor) -> None:
    """The whole product of dtypes, on arrays without rows: nothing has to be built for it."""
    xp, accepted = executor.xp, 0
    for x_type, stats, gamma, beta in itertools.product(DTYPES, DTYPES, (None, *DTYPES), (None, *DTYPES)):
        sums = "float64" if x_type == "float64" else "float32"
        x, mean = xp.zeros((0, 4), DTYPES[x_type]), xp.zeros((0, 1), DTYPES[stats])
        g, b = (None if name is None else xp.zeros((4,), DTYPES[name]) for name in (gamma, beta))
        if stats not in (sums, x_type) or gamma not in (None, sums, x_type):
            with pytest.raises(TypeError, match=r"^(mean|gamma): dtype"):
                cunorm.layer_norm_backward(x, x, 4, mean, mean, g)
        elif beta not in (None, sums, x_type):
            with pytest.raises(TypeError, match=r"^beta: dtype"):
                cunorm.layer_norm(x, 4, g, b)
        else:
            accepted += 1
            found = cunorm.layer_norm_backward(x, x, 4, mean, mean, g)
            assert [r.dtype for r in found] == [x.dtype] + [DTYPES[gamma or stats]] * 2
            assert [r.dtype for r in cunorm.layer_norm(x, 4, g, b)] == [x.dtype, DTYPES[sums], DTYPES[sums]]
    assert accepted == 4 + 4 + 18 + 18


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_hidden_copies(strategy: str) -> None:
    a, slack, on_cpu = layer_arrays((64, 512), 512), 16384, Executor("cpu")
    for op, direction in ((FORWARD, "forward"), (BACKWARD, "backward")):
        tile = tile_of(strategy, direction)
        plan = cunorm.plan(op, shape=(64, 512), dtype="float32", normalized_shape=512, device="cpu", tile=tile)

        def call(out: Any = None, workspace: Any = None, op: str = op, tile: Any = tile) -> Any:
            options = {"tile": tile, "out": out, "workspace": workspace}
            return (
                run_forward(a, a.x, on_cpu, **options)
                if op == FORWARD
                else run_backward(a, a.dy, a.x, on_cpu, **options)
            )

        peak, found = peak_of(call)
        made = sum(array.nbytes for array in found)
        assert made <= peak <= made + plan.workspace_nbytes + slack
        workspace = np.empty(plan.workspace_nbytes, np.uint8)
        peak, _ = peak_of(functools.partial(call, found, workspace))
        assert peak <= slack


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_workspace_of_any_content(op: str, strategy: str, executor: Executor) -> None:
    a, tile = layer_arrays((23, 33), 33), tile_of(strategy, "forward" if op == FORWARD else "backward")
    x, dy = executor.put(a.x), executor.put(a.dy)
    plan = cunorm.plan(op, shape=a.x.shape, dtype="float32", normalized_shape=33, device="cpu", tile=tile)

    def call(workspace: Any) -> list[bytes]:
        options = {"tile": tile, "workspace": workspace}
        found = run_forward(a, x, executor, **options) if op == FORWARD else run_backward(a, dy, x, executor, **options)
        return [executor.get(array).tobytes() for array in found]

    alone = call(None)
    dirty = executor.xp.full(plan.workspace_nbytes + 32, 0xFF, np.uint8)
    for workspace in (dirty, dirty, dirty[16:], dirty[: plan.workspace_nbytes], dirty.view(np.int64)):
        assert call(workspace) == alone
    dirty.fill(0xFF)
    call(dirty)
    assert bool((dirty[plan.workspace_nbytes :] == 0xFF).all())  # nothing is written behind what the plan asks for


def test_one_call_is_not_taken_for_another(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that differ in one thing only, in turn, so that a cache that forgets that thing answers wrongly."""
    x, dy = (executor.put(each) for each in (layer_arrays((4, 1, 4), 4).x, layer_arrays((4, 1, 4), 4).dy))
    for _ in range(2):
        for row in (4, (4,), (1, 4), [1, 4], (4, 1, 4)):
            a = layer_arrays((4, 1, 4), row)
            y, mean, rstd = run_forward(a, x, executor)
            assert mean.shape == (4, 1, 4)[: 3 - len(a.row)] + (1,) * len(a.row)
            a.check_forward(*map(executor.get, (y, mean, rstd)))
            a.check_backward(*map(executor.get, run_backward(a, dy, x, executor)))
            for gamma, beta in ((None, a.beta), (a.gamma, None), (None, None)):
                b = LayerArrays(a.dy, a.x, row, a.mean, a.rstd, gamma, beta)
                b.check_forward(*map(executor.get, run_forward(b, x, executor)))
                b.check_backward(*map(executor.get, run_backward(b, dy, x, executor)))
        a = layer_arrays((4, 1, 4), 4)
        for eps in (1e-5, 0.0, 1, np.float32(0.5)):
            a.check_forward(*map(executor.get, run_forward(a, x, executor, eps=eps)), eps=float(eps))
        for mask in MASKS:
            assert [r is not None for r in run_backward(a, dy, x, executor, output_mask=mask)] == list(mask)
        for tile in (BLOCK, SPLIT):
            a.check_forward(*map(executor.get, run_forward(a, x, executor, tile=tile[FORWARD])))
    ones = np.ones((4, 1), np.float32)
    for right, mistaken in ((1, True), ((1,), (True,)), ((1, 1), (1, True)), (1, 1.0)):
        shape = (4, 1, 1) if right == (1, 1) else (4, 1)
        given: Arguments = {"x": ones.reshape(shape), "gamma": None, "beta": None, "out": None, "tile": BLOCK[FORWARD]}
        for _ in range(2):
            invoke(FORWARD, {**given, "normalized_shape": right})
            refused(monkeypatch, FORWARD, {**given, "normalized_shape": mistaken}, "normalized_shape", TypeError)
