"""The public contract of group_norm and group_norm_backward, as a hostile and tired user would try it.

Wrong arguments first: each is refused with its name in front, before anything is allocated or launched, whether the
same shapes were called before or not, and `out` arrays keep what they held. Then what must work.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.ops.registry import OPS
from tests.conftest import Executor
from tests.support.contract import (
    EITHER,
    Arguments,
    Tensor,
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
from tests.support.problems import LAYOUTS, SENTINEL, TILES, GroupArrays, forget_calls, group_arrays, laid_out

FORWARD, BACKWARD = "group_norm", "group_norm_backward"
#: Bytes of workspace of the right arguments.
NEEDED = {FORWARD: 256, BACKWARD: 128}
MASKS = list(itertools.product((True, False), repeat=3))
NAMED = {FORWARD: ("y", "mean", "rstd"), BACKWARD: ("dx", "dgamma", "dbeta")}


def right_arguments(op: str) -> Arguments:
    """A correct call that needs nothing allocated: every argument is given."""
    a = group_arrays()
    shapes = [a.x.shape, (8,), (8,)] if op == BACKWARD else [a.x.shape, (2, 2), (2, 2)]
    return {
        **{name: getattr(a, name) for name in ("dy", "x", "mean", "rstd", "gamma", "beta")},
        "num_groups": 2,
        "eps": 1e-5,
        "output_mask": (True, True, True),
        "data_format": "NCHW",
        "activation": None,
        "out": tuple(np.full(shape, SENTINEL, np.float32) for shape in shapes),
        "tile": TILES["block" if op == BACKWARD else "split"],
        "workspace": np.full(NEEDED[op], 0xFF, np.uint8),
    }


# ---- wrong arguments ------------------------------------------------------------------------------------------------


SHARED: list[Wrong] = [
    *array_cases("x"),
    *wrong("x", TypeError, none=None),
    *both("0-d", ValueError, lambda x: x.ravel()[0:1].reshape(())),
    *both("rank 1", ValueError, lambda x: x.ravel()[:8]),
    *both("rank 9", ValueError, lambda x: x.reshape(2, 8, 3, 3, 1, 1, 1, 1, 1)),
    *wrong("num_groups", ValueError, zero=0, negative=-1, not_a_divisor=3, more_than_channels=16),
    *wrong("num_groups", TypeError, float=2.0, bool=True, string="2", none=None, list=[2], numpy_float=np.float64(2)),
    *wrong("num_groups", TypeError, numpy_bool=np.True_, array=lambda _: np.array([2, 2])),
    *wrong("data_format", EITHER, lower="nchw", short="NC", other="NHCW", none=None, number=0, list=["NCHW"]),
    *wrong("activation", EITHER, relu="relu", empty="", false=False, zero=0, function=lambda _: np.tanh),
    *parameter_cases("gamma"),
    *parameter_cases("beta"),
    *wrong("gamma", ValueError, per_group=lambda _: np.ones(2, np.float32)),
    *wrong("beta", ValueError, per_group=lambda _: np.ones(2, np.float32)),
    *tile_cases(TILES["block"]),
    *wrong(
        "tile",
        cunorm.UnsupportedTile,
        groups={"strategy": "block", **TILES["block"].as_dict(), "groups": 3},
    ),
    *wrong("tile", cunorm.UnsupportedTile, chunk={"strategy": "split", "threads": 128, "chunk": 2**40}),
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
WRONG = {
    FORWARD: [
        *SHARED,
        *epsilon_cases(),
        *output(1, "is mean of x", ValueError, lambda o, a: a["x"][:, 0, 0, :2]),
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
                *wrong(name, ValueError, long=lambda _: np.ones((2, 3), np.float32)),
                *wrong(name, ValueError, short=lambda _: np.ones(2, np.float32)),
                *wrong(name, ValueError, empty=lambda _: np.ones(0, np.float32)),
                *wrong(name, ValueError, per_channel=lambda _: np.ones((2, 8), np.float32)),
            ]
        ],
        *mask_cases(),
        *output(0, "is x", ValueError, lambda _, a: a["x"]),
        *output(0, "view of x", ValueError, lambda _, a: a["x"][...]),
        *[(f"out 0 {shift} past dy", "out", ValueError, neighbours("dy", shift)) for shift in (1, 4, 143)],
        ("out 0 is dy and x", "out", ValueError, lambda a: {"dy": a["x"], "out": (a["x"], *a["out"][1:])}),
        *output(0, "dy reversed", ValueError, lambda _, a: a["dy"][::-1]),
        *output(0, "dy swapped", ValueError, lambda _, a: a["dy"].swapaxes(2, 3)),
        *output(1, "in dy", ValueError, lambda o, a: a["dy"].reshape(-1)[4:12]),
        *output(1, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "is gamma", ValueError, lambda _, a: a["gamma"]),
        *output(2, "is beta", ValueError, lambda _, a: a["beta"]),
        *[
            (f"out 1 holds {name}", "out", ValueError, lambda a, name=name: _statistics_in_output(a, name))
            for name in ("mean", "rstd")
        ],
        *workspace_on("dy"),
    ],
}


def _statistics_in_output(a: Arguments, name: str) -> Arguments:
    dgamma = np.zeros(8, np.float32)
    dgamma[4:] = a[name].ravel()
    return {name: dgamma[4:].reshape(2, 2), "out": (a["out"][0], dgamma, a["out"][2])}


def test_the_right_arguments_are_right() -> None:
    for op in (FORWARD, BACKWARD):
        given = right_arguments(op)
        found = invoke(op, given)
        assert all(came is array for came, array in zip(found, given["out"], strict=True))
        a = group_arrays()
        (a.check_backward if op == BACKWARD else a.check_forward)(*found)
        assert cunorm.plan(op, **_plan_options(op)).workspace_nbytes == NEEDED[op]  # what the workspace cases count on


def _plan_options(op: str) -> dict[str, Any]:
    tile = TILES["block" if op == BACKWARD else "split"]
    return {"shape": (2, 8, 3, 3), "dtype": "float32", "num_groups": 2, "device": "cpu", "tile": tile}


def check(op: str, found: Any) -> None:
    (group_arrays().check_backward if op == BACKWARD else group_arrays().check_forward)(*found)


@pytest.mark.parametrize(("op", "case", "state"), parameters(WRONG))
def test_wrong_arguments(op: str, case: Any, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refusal(op, right_arguments, check, case, state, monkeypatch)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_an_output_that_turns_read_only_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_read_only(op, right_arguments, [f"out[{name}]" for name in NAMED[op]], monkeypatch)


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_an_iterator_as_out(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = right_arguments(BACKWARD)
    forget_calls()
    if state == "warm":
        invoke(BACKWARD, given)
    kept = given["out"]
    for array in kept:
        array.fill(SENTINEL)
    refused(monkeypatch, BACKWARD, {**given, "out": (array for array in kept)}, "out")
    assert all((array == SENTINEL).all() for array in kept)


def test_tile_refusal_is_the_sentence_of_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from cunorm.core.devices import known
    from cunorm.ops.group_norm.strategies import BACKWARD as STRATEGIES

    tile = cunorm.Tile("warp", threads=128, lanes=1, packs_per_thread=1, samples_per_team=1)
    problem = cunorm.plan(BACKWARD, **_plan_options(BACKWARD)).problem
    sentence = STRATEGIES["warp"].refuses(problem, tile, known("H200"))
    assert sentence is not None
    given = {**right_arguments(BACKWARD), "tile": tile}
    assert sentence in refused(monkeypatch, BACKWARD, given, "tile", cunorm.UnsupportedTile)


def test_dtype_errors_say_what_came_and_what_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    given = right_arguments(FORWARD)
    sentence = refused(monkeypatch, FORWARD, {**given, "x": np.zeros((2, 8), np.int64)}, "x", TypeError)
    assert all(word in sentence for word in ("int64", "float16", "bfloat16", "float32", "float64"))
    sentence = refused(monkeypatch, FORWARD, {**given, "x": [[1.0, 2.0]]}, "x", TypeError)
    assert all(word in sentence for word in ("list", "cupy.ndarray", "numpy.ndarray"))
    sentence = refused(monkeypatch, FORWARD, {**given, "gamma": Tensor()}, "gamma", TypeError)
    assert "cupy.from_dlpack(gamma)" in sentence


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("name", ["x", "dy", "mean", "rstd", "gamma", "beta", "out[dx]", "workspace"])
def test_torch_tensors_are_refused_with_advice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    given = right_arguments(BACKWARD)
    if name == "out[dx]":
        given["out"] = (torch.from_numpy(given["out"][0]), *given["out"][1:])
    else:
        given[name] = torch.from_numpy(given[name])
    sentence = refused(monkeypatch, BACKWARD, given, name, TypeError)
    assert "torch" in sentence
    assert "cupy.from_dlpack" in sentence


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("name", ["x", "dy", "mean", "rstd", "gamma", "beta", "out", "workspace"])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_numpy_and_cupy_arrays_do_not_mix(name: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mixed(BACKWARD, right_arguments, name, state, monkeypatch)


# ---- memory layouts -------------------------------------------------------------------------------------------------


def run_backward(a: GroupArrays, dy: Any, x: Any, executor: Executor, **options: Any) -> tuple[Any, ...]:
    put = executor.put
    options = {"num_groups": a.groups, "data_format": a.data_format, "tile": TILES["block"], **options}
    return cunorm.group_norm_backward(dy, x, put(a.mean), put(a.rstd), put(a.gamma), **options)


def run_forward(a: GroupArrays, x: Any, executor: Executor, **options: Any) -> tuple[Any, ...]:
    options = {"data_format": a.data_format, "tile": TILES["block"], **options}
    return cunorm.group_norm(x, a.groups, executor.put(a.gamma), executor.put(a.beta), **options)


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(layout: str, data_format: str, executor: Executor) -> None:
    a, xp, get = group_arrays((3, 8, 5, 7), data_format="NCHW"), executor.xp, executor.get
    if data_format == "NHWC":
        a = group_arrays((3, 5, 7, 8), data_format="NHWC")
    plain_x, plain_dy = executor.put(a.x), executor.put(a.dy)
    x, dy = laid_out(xp, a.x, layout), laid_out(xp, a.dy, layout)
    for given_dy, given_x in ((dy, x), (plain_dy, x), (dy, plain_x)):
        a.check_backward(*map(get, run_backward(a, given_dy, given_x, executor)))
    a.check_forward(*map(get, run_forward(a, x, executor)))
    assert np.array_equal(get(x), a.x)  # inputs are only read
    assert np.array_equal(get(dy), a.dy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_outputs(layout: str, executor: Executor) -> None:
    a, xp, get = group_arrays((3, 8, 5, 7)), executor.xp, executor.get
    for of_x in ("as x", "contiguous"):
        x = laid_out(xp, a.x, layout) if of_x == "as x" else executor.put(a.x)
        base, view = LAYOUTS[layout](xp, a.x.shape, a.x.dtype)
        vectors = xp.full((4, 8, 2), SENTINEL, np.float32)
        for forward in (True, False):
            base.fill(SENTINEL)
            vectors.fill(SENTINEL)
            if forward:
                out = (view, vectors[0, :6:2].T[:, ::-1].T[:, :2], vectors[1, ::3, ::-1])
                found = run_forward(a, x, executor, out=out)
                a.check_forward(*map(get, found))
            else:
                out = (view, vectors[0, ::-1, 0], vectors[2, :, 1])
                found = run_backward(a, executor.put(a.dy), x, executor, out=out)
                a.check_backward(*map(get, found))
            assert all(came is given for came, given in zip(found, out, strict=True))
            for array in out:
                array.fill(SENTINEL)
            assert bool((base == SENTINEL).all())  # nothing was written between the elements
            assert bool((vectors == SENTINEL).all())


def test_broadcast_inputs(executor: Executor) -> None:
    a, xp, get = group_arrays((2, 8, 3, 3)), executor.xp, executor.get
    for source in (a.dy[:, :, :1, :1], a.dy[:1, :1, :1, :1], a.dy[:1], a.dy[..., :1]):
        a.dy = np.broadcast_to(source, a.x.shape)
        dy = xp.broadcast_to(executor.put(np.ascontiguousarray(source)), a.x.shape)
        assert 0 in dy.strides
        a.check_backward(*map(get, run_backward(a, dy, executor.put(a.x), executor)))
    a = group_arrays((2, 8, 3, 3))
    a.x = np.broadcast_to(a.x[:, :, :1], a.x.shape)
    x = xp.broadcast_to(executor.put(a.x[:, :, :1].copy()), a.x.shape)
    a.check_forward(*map(get, run_forward(a, x, executor)))


def test_small_arrays_of_any_strides(executor: Executor) -> None:
    a, xp = group_arrays((2, 8, 3, 3)), executor.xp

    def spread(values: np.ndarray) -> Any:
        return laid_out(xp, values, "every other")[..., ::-1][..., ::-1]

    dy, x = executor.put(a.dy), executor.put(a.x)
    for shape in ((2, 2), (4,), (2, 2, 1, 1), (1, 4), (1, 2, 1, 2, 1)):
        mean, rstd = spread(a.mean.reshape(shape)), spread(a.rstd.reshape(shape))
        found = cunorm.group_norm_backward(dy, x, mean, rstd, spread(a.gamma), num_groups=2, tile=TILES["block"])
        a.check_backward(*map(executor.get, found))
    turned = [laid_out(xp, s, "Fortran") for s in (a.mean, a.rstd)]
    found = cunorm.group_norm_backward(dy, x, *turned, spread(a.gamma), num_groups=2, tile=TILES["block"])
    a.check_backward(*map(executor.get, found))
    a.check_forward(*map(executor.get, cunorm.group_norm(x, 2, spread(a.gamma), spread(a.beta), tile=TILES["block"])))


@pytest.mark.parametrize("where", ["x", "dy", "gamma", "mean", "dx", "dgamma"])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_arrays_off_their_elements_boundary(where: str, state: str) -> None:
    """Unaligned NumPy arrays (of packed records, of file formats) give right results, or a sentence that names them."""
    given = {**right_arguments(BACKWARD), "workspace": None}
    forget_calls()
    if state == "warm":
        invoke(BACKWARD, given)
    if where in ("dx", "dgamma"):
        index = NAMED[BACKWARD].index(where)
        given["out"] = tuple(unaligned(o) if i == index else o for i, o in enumerate(given["out"]))
    else:
        given[where] = unaligned(given[where])
    found, sentence = None, ""
    try:
        found = invoke(BACKWARD, given)
    except EITHER as error:
        sentence = str(error)
    if found is None:
        assert re.match(rf"(out\[)?{where}\b", sentence), sentence
    else:
        group_arrays().check_backward(*found)


@pytest.mark.parametrize("rank", range(2, 9))
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_ranks(rank: int, data_format: str, executor: Executor) -> None:
    spatial = (3, 1, 2, 1, 2, 3)[: rank - 2]
    shape = (2, 8, *spatial) if data_format == "NCHW" else (2, *spatial, 8)
    a = group_arrays(shape, 4, data_format=data_format)
    dx, *others = map(executor.get, run_backward(a, executor.put(a.dy), executor.put(a.x), executor))
    a.check_backward(dx, *others)
    a.check_forward(*map(executor.get, run_forward(a, executor.put(a.x), executor)))


def test_results_lie_in_memory_as_x_does(executor: Executor) -> None:
    a, xp = group_arrays((2, 8, 3, 5)), executor.xp
    last = laid_out(xp, a.x, "channels last")
    for dy in (executor.put(a.dy), laid_out(xp, a.dy, "channels last")):
        for result in (run_forward(a, last, executor)[0], run_backward(a, dy, last, executor)[0]):
            assert result.strides == last.strides
    b = group_arrays((2, 3, 5, 8), data_format="NHWC")
    first = laid_out(xp, b.x, "channels first")
    assert run_forward(b, first, executor)[0].strides == first.strides
    for layout in ("reversed", "every other", "padded rows", "inner channels"):
        assert run_forward(a, laid_out(xp, a.x, layout), executor)[0].flags.c_contiguous


class Sub(np.ndarray):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_subclasses_of_numpy_arrays(dtype: str, tmp_path: Any) -> None:
    """They are read and written where they lie, and a later call with them is a remembered one."""
    a = group_arrays(dtype=dtype)
    mapped = np.memmap(tmp_path / "x", DTYPES[dtype], "w+", shape=a.x.shape)
    mapped[...] = a.x
    forget_calls()
    for x in (mapped, a.x.view(Sub)):
        expected = cunorm.group_norm(a.x, 2, a.gamma, a.beta, tile=TILES["block"])
        known = len(OPS[FORWARD].calls)
        for _ in range(2):
            y = np.memmap(tmp_path / "y", DTYPES[dtype], "w+", shape=a.x.shape)
            found = cunorm.group_norm(x, 2, a.gamma, a.beta, out=(y, None, None), tile=TILES["block"])
            assert found[0] is y
            assert all(map(np.array_equal, found, expected))
        assert len(OPS[FORWARD].calls) == known + 1
        read_only(x)
        assert all(map(np.array_equal, cunorm.group_norm(x, 2, a.gamma, a.beta, tile=TILES["block"]), expected))


@pytest.mark.parametrize("device", ["A100", "H100"])
def test_a_subclass_follows_the_device_that_the_cpu_executor_poses_as(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remembered call of another device is another call."""
    x = group_arrays().x.view(Sub)
    cunorm.group_norm(x, 2)
    monkeypatch.setenv("CUNORM_CPU_DEVICE", device)
    known = len(OPS[FORWARD].calls)
    cunorm.group_norm(x, 2)
    assert len(OPS[FORWARD].calls) == known + 1


def test_a_masked_array_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = right_arguments(FORWARD)
    given["x"] = np.ma.masked_greater(given["x"], 0)
    sentence = refused(monkeypatch, FORWARD, given, "x", TypeError)
    assert sentence == (
        "x: a numpy.ma.MaskedArray, expected an array without a mask, which would be lost; pass x.filled(value), or "
        "x.data if masked elements are to count"
    )


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [None, "channels last", "reversed", "misaligned"])
@pytest.mark.parametrize("strategy", TILES)
def test_in_place(strategy: str, layout: str | None, executor: Executor) -> None:
    if (strategy, layout) == ("warp", "channels last"):
        pytest.skip("warp takes no channels-last data")
    a, xp, tile = group_arrays(), executor.xp, TILES[strategy]
    mask = (True, False, False) if strategy == "warp" else (True, True, True)

    def lie(values: np.ndarray) -> Any:
        return executor.put(values) if layout is None else laid_out(xp, values, layout)

    x = lie(a.x)
    y, *statistics = run_forward(a, x, executor, tile=tile, out=(x, None, None))
    assert y is x
    a.check_forward(executor.get(y), *map(executor.get, statistics))
    for alias in (lambda array: array, lambda array: array[...]):
        dy = lie(a.dy)
        out = (alias(dy), None, None)
        found = run_backward(a, dy, lie(a.x), executor, tile=tile, out=out, output_mask=mask)
        assert found[0] is out[0]
        a.check_backward(*map(executor.get, found))


def test_outputs_between_the_elements_of_inputs(executor: Executor) -> None:
    """Two halves of one concatenated tensor share a span of addresses and no element."""
    a, xp = group_arrays(), executor.xp
    buffer = xp.full((2, 16, 3, 3), SENTINEL, np.float32)
    buffer[:, :8] = executor.put(a.x)
    y, *statistics = run_forward(a, buffer[:, :8], executor, out=(buffer[:, 8:], None, None))
    a.check_forward(executor.get(y), *map(executor.get, statistics))
    assert np.array_equal(executor.get(buffer[:, :8]), a.x)
    pair = xp.zeros((8, 2), np.float32)
    out = (None, pair[:, 0], pair[:, 1])
    a.check_backward(*map(executor.get, run_backward(a, executor.put(a.dy), executor.put(a.x), executor, out=out)))


def test_inputs_may_be_one_array(executor: Executor) -> None:
    a = group_arrays()
    a.dy, a.rstd, out = a.x, a.mean, tuple(executor.xp.zeros(s, np.float32) for s in (a.x.shape, (8,), (8,)))
    x, mean, gamma = executor.put(a.x), executor.put(a.mean), executor.put(a.gamma)
    for given in (None, out):
        found = cunorm.group_norm_backward(x, x, mean, mean, gamma, num_groups=2, tile=TILES["block"], out=given)
        a.check_backward(*map(executor.get, found))
    a.beta = a.gamma
    a.check_forward(*map(executor.get, cunorm.group_norm(x, 2, gamma, gamma, tile=TILES["block"])))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("strategy", ["block", "split"])
@pytest.mark.parametrize("given", [True, False])
def test_masks(mask: tuple[bool, ...], strategy: str, given: bool, executor: Executor) -> None:
    a, xp = group_arrays(), executor.xp
    out = tuple(xp.full(shape, SENTINEL, np.float32) for shape in (a.x.shape, (8,), (8,))) if given else None
    x = a.x
    if mask == (False, False, True):  # only dbeta: x is not read
        a.x = np.full_like(x, np.nan)
    for kind in (mask, list(mask), tuple(map(np.bool_, mask))):
        found = run_backward(
            a, executor.put(a.dy), executor.put(a.x), executor, output_mask=kind, out=out, tile=TILES[strategy]
        )
        assert [came is not None for came in found] == list(mask)
        if mask == (False, False, True):
            np.testing.assert_allclose(executor.get(found[2]), a.dy.sum((0, 2, 3), dtype=float), rtol=0, atol=1e-5)
        else:
            a.check_backward(*map(executor.get, found))
    for array, flag in zip(out or (), mask, strict=False):
        assert flag or bool((array == SENTINEL).all())


def test_masked_off_outputs_may_be_anything_that_is_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    given = right_arguments(BACKWARD)
    given.update(output_mask=(False, True, True), out=(given["x"], *given["out"][1:]))
    before = given["x"].tobytes()
    group_arrays().check_backward(*invoke(BACKWARD, given))
    assert given["x"].tobytes() == before


@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3), (0, 8), (2, 8, 3, 0, 5), (0, 8, 0), (2, 0, 3), (0, 0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("given", [True, False])
def test_empty(shape: tuple[int, ...], dtype: str, given: bool, executor: Executor) -> None:
    xp, N, C = executor.xp, shape[0], shape[1]
    x, sums = xp.zeros(shape, DTYPES[dtype]), DTYPES["float64" if dtype == "float64" else "float32"]
    gamma = xp.ones((C,), x.dtype)
    out = (xp.empty(shape, x.dtype), *(xp.full((N, 2), SENTINEL, sums) for _ in range(2))) if given else None
    y, mean, rstd = cunorm.group_norm(x, 2, gamma, out=out)
    assert (y.shape, y.dtype) == (shape, x.dtype)
    for statistic in (mean, rstd):
        assert (statistic.shape, statistic.dtype) == ((N, 2), sums)
        assert bool(xp.isnan(statistic).all())
    for mask in MASKS:
        out = (xp.empty(shape, x.dtype), *(xp.full((C,), SENTINEL, x.dtype) for _ in range(2))) if given else None
        found = cunorm.group_norm_backward(x, x, mean, rstd, gamma, num_groups=2, output_mask=mask, out=out)
        assert [came is not None for came in found] == list(mask)
        if mask[0]:
            assert (found[0].shape, found[0].dtype) == (shape, x.dtype)
        for came, flag, array in zip(found[1:], mask[1:], (out or (None,) * 3)[1:], strict=True):
            if flag:
                assert (came.shape, came.dtype) == ((C,), x.dtype)
                assert bool((came == 0).all())
            elif array is not None:
                assert bool((array == SENTINEL).all())


def test_wrong_arguments_of_empty_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    x, statistics = np.zeros((0, 8, 3), np.float32), np.zeros((0, 2), np.float32)
    right = {"dy": x, "x": x, "mean": statistics, "rstd": statistics, "gamma": np.ones(8, np.float32)}
    right.update(num_groups=2, beta=None)
    invoke(BACKWARD, right)
    changes: list[tuple[str, Any]] = [("num_groups", 3), ("data_format", "NC"), ("gamma", np.ones(7, np.float32))]
    changes += [("mean", np.zeros((1, 2), np.float32)), ("dy", x.astype(np.float64)), ("dy", x[:, :4])]
    changes += [
        ("tile", cunorm.Tile("nope")),
        (
            "tile",
            {"strategy": "block", "threads": 33, "groups": 1, "stages": 2, "load": "cp_async", "packs_per_thread": 1},
        ),
    ]
    changes += [("out", (None, None)), ("out", (None, np.ones(3, np.float32), None)), ("workspace", [1])]
    for name, value in changes:
        refused(monkeypatch, BACKWARD, {**right, name: value}, name)


def test_dtypes_of_results(executor: Executor) -> None:
    """The whole product of dtypes, on arrays without samples: nothing has to be built for it."""
    xp, accepted = executor.xp, 0
    for x_type, stats, gamma, beta in itertools.product(DTYPES, DTYPES, (None, *DTYPES), (None, *DTYPES)):
        sums = "float64" if x_type == "float64" else "float32"
        legal = stats in (sums, x_type) and gamma in (None, sums, x_type) and beta in (None, sums, x_type)
        x = xp.zeros((0, 4, 3), DTYPES[x_type])
        mean = xp.zeros((0, 2), DTYPES[stats])
        g, b = (None if name is None else xp.zeros((4,), DTYPES[name]) for name in (gamma, beta))
        if not legal:
            with pytest.raises(TypeError, match=r"^(mean|gamma|beta): dtype"):
                cunorm.group_norm_backward(x, x, mean, mean, g, num_groups=2, beta=b)
            continue
        accepted += 1
        found = cunorm.group_norm_backward(x, x, mean, mean, g, num_groups=2, beta=b)
        assert [r.dtype for r in found] == [x.dtype] + [DTYPES[gamma or stats]] * 2
        assert [r.dtype for r in cunorm.group_norm(x, 2, g, b)] == [x.dtype, DTYPES[sums], DTYPES[sums]]
    assert accepted == 4 + 4 + 18 + 18  # float64, float32; the 16-bit types with two of statistics, three of parameters


def test_without_gamma_or_beta(executor: Executor) -> None:
    for dtype in ("float32", "float64"):
        a = group_arrays(dtype=dtype)
        x, dy = executor.put(a.x), executor.put(a.dy)
        for gamma, beta in ((None, None), (a.gamma, None), (None, a.beta)):
            b = GroupArrays(a.dy, a.x, a.mean, a.rstd, gamma, beta, 2, "NCHW")
            b.check_forward(*map(executor.get, run_forward(b, x, executor)))
            b.check_backward(*map(executor.get, run_backward(b, dy, x, executor)))


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["block", "split"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "NHWC"])
def test_no_hidden_copies(strategy: str, layout: str) -> None:
    shape = (2, 16, 32, 32) if layout != "NHWC" else (2, 32, 32, 16)
    a = group_arrays(shape, 4, data_format="NHWC" if layout == "NHWC" else "NCHW")
    if layout == "channels last":
        a.x, a.dy = laid_out(np, a.x, layout), laid_out(np, a.dy, layout)
    tile = cunorm.Tile("split", threads=128, chunk=256) if strategy == "split" else TILES["block"]
    slack, on_cpu = 16384, Executor("cpu")

    planned = "NHWC" if layout == "channels last" else a.data_format
    options = {"shape": (2, 32, 32, 16) if planned == "NHWC" else shape, "data_format": planned, "tile": tile}
    for op in (FORWARD, BACKWARD):
        plan = cunorm.plan(op, dtype="float32", num_groups=4, device="cpu", **options)
        most = 8 if op == FORWARD else 4  # moments of chunks, or pairs of sums
        assert plan.workspace_nbytes <= 2 * 4 * 2 * 16 * (most if strategy == "split" else 1)

        def call(out: Any = None, workspace: Any = None, op: str = op) -> Any:
            if op == FORWARD:
                return run_forward(a, a.x, on_cpu, tile=tile, out=out, workspace=workspace)
            return run_backward(a, a.dy, a.x, on_cpu, tile=tile, out=out, workspace=workspace)

        peak, found = peak_of(call)
        made = sum(array.nbytes for array in found)
        assert made <= peak <= made + plan.workspace_nbytes + slack
        workspace = np.empty(plan.workspace_nbytes, np.uint8)
        peak, _ = peak_of(functools.partial(call, found, workspace))
        assert peak <= slack


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
@pytest.mark.parametrize("strategy", ["block", "split"])
def test_workspace_of_any_content(strategy: str, data_format: str, executor: Executor) -> None:
    a = group_arrays((3, 8, 9, 9) if data_format == "NCHW" else (3, 9, 9, 8), data_format=data_format)
    tile, x, dy = TILES[strategy], executor.put(a.x), executor.put(a.dy)
    for op in (FORWARD, BACKWARD):
        plan = cunorm.plan(
            op, shape=a.x.shape, dtype="float32", num_groups=2, data_format=data_format, device="cpu", tile=tile
        )

        def call(workspace: Any, op: str = op) -> list[bytes]:
            options = {"tile": tile, "workspace": workspace}
            found = (
                run_forward(a, x, executor, **options) if op == FORWARD else run_backward(a, dy, x, executor, **options)
            )
            return [executor.get(array).tobytes() for array in found]

        alone = call(None)
        dirty = executor.xp.full(plan.workspace_nbytes + 32, 0xFF, np.uint8)
        for workspace in (dirty, dirty, dirty[16:], dirty.view(np.int64)):
            assert call(workspace) == alone
        # Nothing is written behind the bytes that the plan asks for.
        dirty.fill(0xFF)
        call(dirty)
        assert bool((dirty[plan.workspace_nbytes :] == 0xFF).all())


def test_one_call_is_not_taken_for_another(executor: Executor) -> None:
    """Calls that differ in one thing only, in turn, so that a cache that forgets that thing answers wrongly."""
    a, b = group_arrays((4, 4, 4, 4)), group_arrays((4, 4, 4, 4), data_format="NHWC")
    x, dy = executor.put(a.x), executor.put(a.dy)
    for _ in range(2):
        for groups in (2, 4, 1):
            for same in (a, b):
                c = GroupArrays(same.dy, same.x, same.mean, same.rstd, same.gamma, same.beta, groups, same.data_format)
                c.check_forward(*map(executor.get, run_forward(c, x, executor)))
        for gamma, beta in ((a.gamma, a.beta), (None, a.beta), (a.gamma, None), (None, None)):
            c = GroupArrays(a.dy, a.x, a.mean, a.rstd, gamma, beta, 2, "NCHW")
            c.check_forward(*map(executor.get, run_forward(c, x, executor)))
            c.check_backward(*map(executor.get, run_backward(c, dy, x, executor)))
        for eps in (1e-5, 0.0, 1, np.float32(0.5)):
            _, _, rstd = run_forward(a, x, executor, eps=eps)
            exact = 1 / np.sqrt(a.x.reshape(4, 2, -1).astype(float).var(-1) + float(eps))
            np.testing.assert_allclose(executor.get(rstd), exact, rtol=1e-6)
        for mask in MASKS:
            assert [r is not None for r in run_backward(a, dy, x, executor, output_mask=mask)] == list(mask)


@pytest.mark.parametrize("strategy", [5, None, []])
def test_a_tile_is_named_by_a_string(strategy: Any) -> None:
    with pytest.raises(TypeError, match=r"^tile: strategy"):
        cunorm.Tile(strategy)
