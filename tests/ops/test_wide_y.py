"""y_dtype: the forwards write y in float32 from x of 16 bits. The values of y are tested by the battery too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cunorm.tuning.bench import arrays as bench_arrays
from cunorm.tuning.verify.verifier import Verifier

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.core.devices import known
from cunorm.core.problem import Problem
from cunorm.core.strategy import Tile
from cunorm.ops.registry import OPS, fault_of, problem_of
from cunorm.tiling import costmodel, problem_trace, table
from tests.conftest import Executor
from tests.ops.test_contract import CONTRACTS, CPU
from tests.support.contract import Contract, refused
from tests.support.covering import every
from tests.support.problems import LAYOUTS, SENTINEL, forget_calls, group_arrays, invoke, laid_out, tupled

FORWARDS = [one for one in CONTRACTS if "y_t" in OPS[one.op].types]
WIDE = {"y_dtype": "float32"}
of = pytest.mark.parametrize("one", FORWARDS, ids=[one.op for one in FORWARDS])


def asked(one: Contract, dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    """Options of `cunorm.plan` for the arrays of a contract."""
    a = one.made(dtype)
    own = {name: value for name, value in a.options.items() if name in OPS[one.op].takes}
    added = {name: True for name in OPS[one.op].extras if getattr(a, name) is not None}
    return {"shape": a.x.shape, "dtype": dtype, **own, **added, **options}


def y_of(found: Any) -> Any:
    """The first result of a call."""
    return tupled(found)[0]


def problem(one: Contract, **options: Any) -> Problem:
    return problem_of(one.op, **asked(one, **options))


def at(memory: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An array at the start of some memory."""
    count = int(np.prod(shape))
    return memory.view(np.uint8)[: count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


# ---- the argument ---------------------------------------------------------------------------------------------------


def test_every_forward_takes_it() -> None:
    with_y = {name for name, op in OPS.items() if "y" in op.results}
    assert {one.op for one in FORWARDS} == with_y == {name for name, op in OPS.items() if "y_dtype" in op.takes}
    assert all(OPS[name].optional_types == OPS[name].tensor_types == ("y_t",) for name in with_y)


@of
@pytest.mark.parametrize("dtype", every(2, ["bfloat16", "float16"]))
def test_names_and_dtypes_of_float32(one: Contract, dtype: str) -> None:
    a, named = one.made(dtype), ("float32", np.float32, np.dtype("float32"))
    for given in named:
        y = y_of(a.checked(one.op, CPU, y_dtype=given))
        assert y.dtype == np.float32
        assert problem(one, dtype=dtype, y_dtype=given).others == (("y_t", "float32"),)


@of
@pytest.mark.parametrize("dtype", every(2, DTYPES))
def test_the_dtype_of_x_means_the_default(one: Contract, dtype: str) -> None:
    a = one.made(dtype)
    assert problem(one, dtype=dtype, y_dtype=DTYPES[dtype]) == problem(one, dtype=dtype)
    assert problem(one, dtype=dtype).others == ()
    (y, *_), (same, *_) = (tupled(a.checked(one.op, CPU, **options)) for options in ({}, {"y_dtype": dtype}))
    assert y.dtype == same.dtype == a.x.dtype
    assert y.tobytes() == same.tobytes()


@of
@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("bfloat16", "float16", "bfloat16 or float32"),
        ("float16", "bfloat16", "float16 or float32"),
        ("bfloat16", np.float64, "bfloat16 or float32"),
        ("float32", "bfloat16", "float32"),
        ("float64", "float32", "float64"),
        ("bfloat16", "single-ish", "bfloat16 or float32"),
        ("bfloat16", 4, "bfloat16 or float32"),
        ("bfloat16", ["float32"], "bfloat16 or float32"),
    ],
)
def test_other_dtypes_are_errors(
    one: Contract, dtype: str, given: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what came and what may be. Nothing is allocated, and the call before does not matter."""
    a = one.made(dtype)
    for state in ("cold", "warm"):
        forget_calls()
        if state == "warm":
            invoke(one.op, a.given(one.op))
        sentence = refused(monkeypatch, one.op, {**a.given(one.op), "y_dtype": given}, "y_dtype", TypeError)
        assert sentence == f"y_dtype: {given!r}, expected {expected}"
    with pytest.raises(TypeError, match=r"^y_dtype: "):
        problem(one, dtype=dtype, y_dtype=given)


def test_gradients_do_not_take_it() -> None:
    with pytest.raises(ValueError, match=r"^y_dtype: 'float32', expected None for layer_norm_backward"):
        cunorm.plan("layer_norm_backward", shape=(4, 8), normalized_shape=8, dtype="bfloat16", **WIDE)


# ---- arrays ---------------------------------------------------------------------------------------------------------


@of
def test_out_has_the_dtype_of_y(one: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    a = one.made("bfloat16")
    kept = {np.dtype(dtype): np.full(a.x.shape, 7, dtype) for dtype in (a.x.dtype, np.float32)}
    rest = (None,) * (len(one.names) - 1)
    for options, right, wrong in (({}, a.x.dtype, np.float32), (WIDE, np.float32, a.x.dtype)):
        given = {**a.given(one.op), **options}
        for dtype in (right, wrong, right):  # the wrong one also after a right call
            y = kept[np.dtype(dtype)]
            out = (y, *rest) if rest else y
            if dtype == wrong:
                label = OPS[one.op].labels[0]
                sentence = refused(monkeypatch, one.op, {**given, "out": out}, label, TypeError)
                assert sentence == f"{label}: dtype {np.dtype(wrong)}, expected {np.dtype(right)}"
            else:
                found = invoke(one.op, {**given, "out": out})
                assert y_of(found) is y
                a.check(one.op, tupled(found))


@of
@pytest.mark.parametrize("shift", [0, 2, 16], ids="{} bytes".format)
def test_a_wide_y_is_never_x_in_place(one: Contract, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the address of x, whose elements would be overwritten before they are read."""
    a = one.made("bfloat16")
    memory = np.zeros(16 * a.x.size + 64, np.float32)
    x = at(memory.view(np.uint8)[shift:], a.x.dtype, a.x.shape)
    x[...] = a.x
    y, narrow = at(memory, np.float32, a.x.shape), x
    saved = [np.empty(*a.result(one.op, name)) for name in one.names[1:]]
    label = OPS[one.op].labels[0]
    for state in ("cold", "warm"):
        forget_calls()
        if state == "warm":  # the same signature, without an overlap
            other = np.empty_like(y)
            invoke(one.op, {**a.given(one.op), "x": x, **WIDE, "out": (other, *saved) if saved else other})
        given = {**a.given(one.op), "x": x, **WIDE, "out": (y, *saved) if saved else y}
        assert "overlaps x" in refused(monkeypatch, one.op, given, label, ValueError)
    found = invoke(one.op, {**a.given(one.op), "x": x, "out": (narrow, *saved) if saved else narrow})
    assert y_of(found) is narrow
    a.check(one.op, tupled(found))


def test_a_single_element_is_not_x_in_place() -> None:
    """Arrays of one element have the same strides in every dtype."""
    memory = np.zeros(1, np.float32)
    x, y = at(memory, DTYPES["bfloat16"], (1, 1)), memory.reshape(1, 1)
    saved = np.empty((1, 1), np.float32)
    for out in ((y, None), (y, saved)):
        with pytest.raises(ValueError, match=r"^out\[y\]: overlaps x"):
            cunorm.rms_norm(x, 1, out=out, **WIDE)


def test_h_may_be_the_residual_beside_a_wide_y() -> None:
    a = next(one for one in FORWARDS if one.op == "layer_norm").made("bfloat16").with_extras()
    residual = a.residual.copy()
    y, mean, rstd, h = cunorm.layer_norm(
        a.x, a.normalized_shape, a.gamma, a.beta, residual=residual, out=(None, None, None, residual), **WIDE
    )
    assert h is residual
    assert y.dtype == np.float32
    a.check("layer_norm", (y, mean, rstd, h))


@of
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_x_and_y(one: Contract, layout: str, executor: Executor) -> None:
    xp = executor.xp
    a = one.made("bfloat16")
    if a.x.ndim != 4:
        pytest.skip("the layouts are those of four axes")
    base, y = LAYOUTS[layout](xp, a.x.shape, np.float32)
    base.fill(SENTINEL)
    out = (y, *(None,) * (len(one.names) - 1))
    found = a.checked(one.op, executor, x=laid_out(xp, a.x, layout), out=out if len(out) > 1 else y, **WIDE)
    assert y_of(found) is y
    a.checked(one.op, executor, x=laid_out(xp, a.x, layout), **WIDE)
    y.fill(SENTINEL)
    assert bool((base == SENTINEL).all())  # no memory between the elements was written


@of
def test_y_has_the_memory_order_of_x(one: Contract) -> None:
    a = one.made("float16")
    if not one.alike or a.x.ndim != 4:
        pytest.skip("y is contiguous")
    y = y_of(a.checked(one.op, CPU, x=laid_out(np, a.x, "channels last"), **WIDE))
    assert np.moveaxis(y, 1, -1).flags.c_contiguous


@of
def test_empty_arrays(one: Contract) -> None:
    for made in one.empty:
        a = made("bfloat16")
        y = y_of(invoke(one.op, {**a.given(one.op), **WIDE}))
        assert (y.shape, y.dtype) == (a.x.shape, np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_an_activation_before_y(dtype: str, data_format: str, executor: Executor) -> None:
    """Its approximations for 16-bit data are accurate enough for y in float32."""
    shape = (3, 8, 5, 7) if data_format == "NCHW" else (3, 5, 7, 8)
    a = replace(group_arrays(shape, 4, dtype, data_format=data_format), activation="silu")
    a.gamma, a.beta = 10 * a.gamma, 10 * a.beta
    y = a.checked("group_norm", executor, **WIDE)[0]
    assert y.dtype == np.float32
    rounded = executor.get(a.call("group_norm", executor)[0])
    assert executor.get(y).astype(rounded.dtype).tobytes() == rounded.tobytes()


@of
def test_an_error_that_rounding_to_16_bits_would_hide_is_found(one: Contract) -> None:
    """The oracle allows y in float32 the error of float32."""
    a = one.made("bfloat16")
    found = list(tupled(a.checked(one.op, CPU, **WIDE)))
    rounded = found[0].astype(a.x.dtype).astype(np.float32)
    with pytest.raises(AssertionError, match="too far off"):
        a.check(one.op, (rounded, *found[1:]))


# ---- plans, keys, tables --------------------------------------------------------------------------------------------


@of
def test_a_plan_returns_y_in_float32(one: Contract) -> None:
    a = one.made("bfloat16")
    plan = cunorm.plan(one.op, device="cpu", **asked(one, **WIDE))
    assert "y float32" in plan.problem.describe()
    given = [getattr(a, name) for name in OPS[one.op].inputs]
    found = plan(*given)
    assert y_of(found).dtype == np.float32
    a.check(one.op, tupled(found))
    plain = cunorm.plan(one.op, device="cpu", **asked(one))
    assert y_of(plain(*given)).dtype == a.x.dtype
    assert Verifier(plan.problem, "cpu").fault(plan) is None


@of
def test_the_key_names_it_only_if_it_differs(one: Contract, tmp_path: Path) -> None:
    plain, wide = problem(one), problem(one, **WIDE)
    assert "types" not in table.key_of(plain)
    assert table.key_of(wide) == {**table.key_of(plain), "types": {"y": "float32"}} | table.key_of(wide)
    assert [table.problem_of(json.loads(json.dumps(table.key_of(each)))) for each in (plain, wide)] == [plain, wide]
    assert fault_of(wide) is None
    path, a = tmp_path / "t", one.made("bfloat16")
    with cunorm.trace(path):
        invoke(one.op, {**a.given(one.op), **WIDE})
    assert [each.others for each in problem_trace.read(path, fault_of)] == [(("y_t", "float32"),)]


@of
def test_an_entry_is_for_its_dtype_of_y(one: Contract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """y in float32 moves other bytes, so it has entries of its own."""
    plain, wide = problem(one), problem(one, **WIDE)
    assert table.place_of(plain) != table.place_of(wide)
    for each in (plain, wide):
        assert table.raw_place(table.key_of(each)) == table.place_of(each)
    for types in ({"y": 4}, {"y": ["float32"]}):
        with pytest.raises(TypeError):
            table.raw_place({**table.key_of(wide), "types": types})
    first, *_ = costmodel.ranked(plain, OPS[one.op].strategies.values(), known("H200"))
    path = tmp_path / "t.json"
    tile = Tile(first.strategy.name, **first.tile.as_dict())
    table.update(path, known("H200"), {}, [table.Entry(plain, tile, "measured", "0" * 16, {"time_us": 1.0})])
    monkeypatch.setenv("CUNORM_TILING_TABLE", str(path))
    said = [cunorm.plan(one.op, device="H200", **asked(one, **options)).explain() for options in ({}, WIDE)]
    assert [str(path) in text for text in said] == [True, False]


# ---- bytes ----------------------------------------------------------------------------------------------------------


@of
def test_the_byte_floor_counts_four_bytes_per_element_of_y(one: Contract) -> None:
    plain, wide = problem(one), problem(one, **WIDE)
    assert wide.written - plain.written == plain.nbytes == 2 * np.prod(asked(one)["shape"])
    found = cunorm.plan(one.op, device="cpu", **asked(one, **WIDE)).traffic()
    assert found.floor_bytes == plain.read * plain.nbytes + wide.written
    assert wide.nbytes_of("y") == 2 * plain.nbytes_of("y")


@of
def test_the_cost_model_counts_them(one: Contract) -> None:
    device = known("H200")
    for strategy in OPS[one.op].strategies.values():
        for layout in OPS[one.op].layouts:
            N, C, HxW, group = strategy.example(next(strategy.tiles()), 8)
            made = replace(problem(one), N=N, C=C, HxW=HxW, group=group, layout=layout)
            wide = replace(made, others=(("y_t", "float32"),))
            for tile in strategy.tiles():
                if strategy.refuses(made, tile, device) is None and strategy.refuses(wide, tile, device) is None:
                    moved = [sum(launch.traffic for launch in strategy.launches(each, tile)) for each in (made, wide)]
                    assert moved[1] >= wide.nbytes + wide.nbytes_of("y")
                    assert moved[1] - moved[0] >= made.nbytes or layout == "NHWC"  # narrow rows share sectors
                    break
    assert costmodel.least_seconds(wide, strategy.launches(wide, tile), device) > costmodel.least_seconds(
        made, strategy.launches(made, tile), device
    )


@of
def test_the_bench_calls_the_function_with_it(one: Contract) -> None:
    a, made = one.made("bfloat16"), problem(one, **WIDE)
    given = {name: getattr(a, name) for name in OPS[one.op].inputs}
    if "normalized_shape" in OPS[one.op].takes:  # the bench has rows of one axis
        given = {name: None if each is None else each.reshape(-1, made.C) for name, each in given.items()}
        given |= {name: given[name].reshape(-1) for name in ("gamma", "beta") if given.get(name) is not None}
    assert y_of(bench_arrays.public_call(made, given, None, into=False)()).dtype == np.float32
