"""The public contract that all ops share.

First, wrong arguments: each call raises an error that starts with the argument's name, before anything is allocated or
launched, whether or not the same shapes were called before. The arrays of the call are unchanged. Then, calls that must
work. The contract.py in an op's folder describes the op for these tests. The tests beside it test the op's own
contract.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from cunorm.ops.registry import OPS
from cunorm.runtime.checks import parameter_dtypes
from tests.conftest import Executor
from tests.ops.batch_norm import contract as batch
from tests.ops.group_norm import contract as group
from tests.ops.instance_norm import contract as instance
from tests.ops.layer_norm import contract as layer
from tests.ops.rms_norm import contract as rms
from tests.support.contract import (
    EITHER,
    Arguments,
    Contract,
    Tensor,
    Wrong,
    cases_of,
    contents,
    flat,
    nothing_may_happen,
    peak_of,
    read_only,
    refused,
    unaligned,
    warmed,
)
from tests.support.problems import (
    LAYOUTS,
    SENTINEL,
    LayerArrays,
    fake_cupy,
    flagged,
    forget_calls,
    invoke,
    laid_out,
    taken,
    tupled,
    wanted,
)

CONTRACTS = [*group.CONTRACTS, *instance.CONTRACTS, *layer.CONTRACTS, *rms.CONTRACTS, *batch.CONTRACTS]
#: batch_norm_gather_stats has no x. test_batch_norm_gather_calls.py tests its valid calls.
WORKING = [one for one in CONTRACTS if one.strided]
MASKED = [one for one in WORKING if OPS[one.op].flags]
#: Ops that return a tensor.
STREAMING = [one for one in WORKING if one.names[0] in ("y", "dx")]
TENSORS = ("x", "dy")
SMALL = ("mean", "rstd", "invstd", "gamma", "beta", "sum_dy", "sum_dy_xmu")
STATISTICS = ("mean", "rstd", "invstd")
CPU = Executor("cpu")


def named(value: Any) -> Any:
    """The op of a contract, for the id of a test."""
    return getattr(value, "op", value)


def of(contracts: Iterable[Contract]) -> Any:
    """Parametrise by contract."""
    return pytest.mark.parametrize("one", [*contracts], ids=named)


def test_every_op_has_a_contract() -> None:
    assert {one.op for one in CONTRACTS} == set(OPS)
    assert {one.op for one in CONTRACTS} - {one.op for one in WORKING} == {batch.GATHER}


def names_of(one: Contract, among: Iterable[str]) -> list[str]:
    """Those names in `among` that are input arrays of the op."""
    return [name for name in among if name in OPS[one.op].inputs]


FORWARDS = [one for one in WORKING if "eps" in OPS[one.op].numbers]


@of(FORWARDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_message_for_an_eps_outside_float32_names_its_range(one: Contract, dtype: str) -> None:
    """A plan's call is refused as a call of the function is, also after a right call."""
    x, options = one.right()["x"].astype(DTYPES[dtype]), one.made().options
    call = partial(getattr(cunorm, one.op), x, **{k: v for k, v in options.items() if k in taken(one.op)})
    said = rf"^eps: 1e\+39, expected 0 or .* 1.2e-38 to 3.4e\+38, the range of float32, in which {dtype} is computed$"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            call(eps=1e39)
        call(eps=0.0)
    asked = {name: value for name, value in options.items() if name in OPS[one.op].options}
    planned = cunorm.plan(one.op, shape=x.shape, dtype=dtype, device="cpu", **asked)
    with pytest.raises(ValueError, match=said):
        planned(x, eps=1e39)
    call(eps=3.4e38)
    call(eps=1.2e-38)


@of(FORWARDS)
def test_float64_takes_an_eps_outside_the_range_of_float32(one: Contract) -> None:
    x, options = one.right()["x"].astype(np.float64), one.made().options
    call = partial(getattr(cunorm, one.op), x, **{k: v for k, v in options.items() if k in taken(one.op)})
    np.testing.assert_allclose(call(eps=1e40)[-1], 1e-20, rtol=1e-9)
    assert np.isfinite(call(eps=1e-46)[0]).all()


# ---- wrong arguments ------------------------------------------------------------------------------------------------


@of(CONTRACTS)
def test_the_right_arguments_are_right(one: Contract) -> None:
    given = one.right()
    found = invoke(one.op, given)
    assert all(came is array for came, array in zip(flat(found), flat(given["out"]), strict=True))
    one.check(found)
    assert (one.workspace_nbytes >= 64) == one.needed  # the cases of wrong workspaces rely on it
    assert given["workspace"].nbytes == (one.workspace_nbytes or 64)


@pytest.mark.parametrize(("one", "cases", "state"), cases_of(CONTRACTS))
def test_wrong_arguments(one: Contract, cases: list[Wrong], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call raises. In state "cold" it raises a second time too, and the right call works afterwards."""
    for label, name, errors, change in cases:
        print(label)  # pytest shows it if the test fails: the last one is the case that failed
        given = one.right()
        if state == "allocating":  # the most common form of a call
            given.update(out=None, workspace=None)
        forget_calls()
        if state != "cold":
            warmed(one.op, given)
        for array in flat(given["out"]):
            array.fill(SENTINEL)
        changed = {**given, **change(given)}
        refused(monkeypatch, one.op, changed, name, errors)
        if state == "cold":
            refused(monkeypatch, one.op, changed, name, errors)
            one.check(invoke(one.op, one.right()))


@of(CONTRACTS)
def test_an_output_that_becomes_read_only_is_refused(one: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    given = one.right()
    arrays = [*flat(given["out"]), *(given[name] for name in OPS[one.op].updated)]
    for label, array in zip(OPS[one.op].labels, arrays, strict=False):  # without a residual there is no h
        invoke(one.op, given)
        array.fill(SENTINEL)
        array.flags.writeable = False
        assert refused(monkeypatch, one.op, given, label, ValueError).startswith(f"{label}: read-only")
        array.flags.writeable = True


@of(CONTRACTS)
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_an_iterator_as_out_is_refused(one: Contract, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = one.right()
    forget_calls()
    if state == "warm":
        invoke(one.op, given)
    kept = [*flat(given["out"])]
    for array in kept:
        array.fill(SENTINEL)
    refused(monkeypatch, one.op, {**given, "out": (array for array in kept)}, "out")
    assert all((array == SENTINEL).all() for array in kept)


@of(CONTRACTS)
def test_errors_name_the_received_and_the_expected(one: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    given, name = one.right(), next(iter(OPS[one.op].inputs))
    if name == "dy":  # its dtype must equal that of x, so x is tested
        given["dy"], name = given["dy"].astype(np.int64), "x"
    sentence = refused(monkeypatch, one.op, {**given, name: given[name].astype(np.int64)}, name, TypeError)
    assert all(word in sentence for word in ("int64", "float16", "bfloat16", "float32", "float64"))
    sentence = refused(monkeypatch, one.op, {**given, name: [[1.0, 2.0]]}, name, TypeError)
    assert all(word in sentence for word in ("list", "cupy.ndarray", "numpy.ndarray"))
    for name in names_of(one, ("gamma", "beta", "invstds")):
        sentence = refused(monkeypatch, one.op, {**one.right(), name: Tensor()}, name, TypeError)
        assert f"cupy.from_dlpack({name})" in sentence


def arrays_of(one: Contract, given: Arguments) -> list[str]:
    """Names of the arguments of a call that are arrays, including out and workspace."""
    inputs = [name for name in (*OPS[one.op].inputs, *OPS[one.op].updated) if isinstance(given[name], np.ndarray)]
    return [*inputs, "out", "workspace"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@of(CONTRACTS)
def test_torch_tensors_are_refused_with_advice(one: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in arrays_of(one, one.right()):
        if name == "counts":  # host numbers are allowed here, so the message differs
            continue
        given = one.right()
        if name == "out":
            tensor = torch.from_numpy(next(flat(given["out"])))
            given["out"] = (tensor, *given["out"][1:]) if isinstance(given["out"], tuple) else tensor
        else:
            given[name] = torch.from_numpy(given[name])
        label = OPS[one.op].labels[0] if name == "out" else name
        sentence = refused(monkeypatch, one.op, given, label, TypeError)
        assert f"{label}: torch.Tensor, expected" in sentence
        assert sentence.endswith(f"use numpy.from_dlpack({label})")  # it is in host memory


@of(CONTRACTS)
def test_a_masked_array_is_refused_with_advice(one: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names_of(one, (*TENSORS, *SMALL, "means", "invstds")):
        given = one.right()
        given[name] = np.ma.masked_greater(given[name], 0)
        assert refused(monkeypatch, one.op, given, name, TypeError) == (
            f"{name}: a numpy.ma.MaskedArray, expected an array without a mask, which kernels ignore; pass "
            f"{name}.filled(value), or {name}.data to include the masked elements"
        )


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@of(CONTRACTS)
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_numpy_and_cupy_arrays_do_not_mix(one: Contract, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One CuPy array among NumPy arrays: the error names both kinds and starts with the name of an argument."""
    for name in arrays_of(one, one.right()):
        given = one.right()
        forget_calls()
        if state == "warm":
            warmed(one.op, given)
        if isinstance(given[name], tuple):
            given[name] = (*given[name][:-1], fake_cupy(given[name][-1].shape, np.float32))
        else:
            given[name] = fake_cupy(given[name].shape, given[name].dtype)
        before = contents(given)
        with nothing_may_happen(monkeypatch), pytest.raises(EITHER) as caught:
            invoke(one.op, given)
        sentence = str(caught.value)
        names = "|".join(re.escape(label) for label in (*taken(one.op), *OPS[one.op].labels))
        assert re.match(rf"({names}):", sentence), sentence
        if name != "workspace":
            assert caught.type is TypeError
            assert "cupy.ndarray" in sentence
            assert "numpy.ndarray" in sentence
        assert contents(given) == before


@of(WORKING)
def test_the_comparison_with_the_oracle_detects_wrong_results(one: Contract) -> None:
    """All elements slightly off, the last element off, a NaN, or a wrong shape."""
    a = one.made()
    found = tupled(a.checked(one.op, CPU, tile=one.tile(a.x, None)))
    for index in range(len(found)):
        for spoil in (
            lambda r: r + 1e-3 * np.abs(r).max(),
            lambda r: np.where(np.arange(r.size).reshape(r.shape) == r.size - 1, r + np.float32(1e-2), r),
            lambda r: np.where(np.arange(r.size).reshape(r.shape) == 0, np.float32(np.nan), r),
            lambda r: r[None],
        ):
            with pytest.raises(AssertionError):
                a.check(one.op, tuple(spoil(r) if i == index else r for i, r in enumerate(found)))


# ---- memory layouts -------------------------------------------------------------------------------------------------


@of(WORKING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(one: Contract, layout: str, executor: Executor) -> None:
    for made in one.strided:
        a, tensors = made(), names_of(one, TENSORS)
        lying = {name: laid_out(executor.xp, getattr(a, name), layout) for name in tensors}
        for names in dict.fromkeys([tuple(tensors), ("x",), *((name,) for name in tensors)]):
            changes = {name: lying[name] for name in names}
            tile = one.tile(changes.get("x", a.x), None)
            found = a.checked(one.op, executor, **changes, tile=tile)
            if one in STREAMING and not one.alike:
                assert tupled(found)[0].flags.c_contiguous
        for name, array in lying.items():  # inputs are only read
            assert np.array_equal(executor.get(array), getattr(a, name))


@of(WORKING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_outputs(one: Contract, layout: str, executor: Executor) -> None:
    """Tensors have that layout. Small results are interleaved in one buffer, and every second one is reversed."""
    if one not in STREAMING and layout != "reversed":
        pytest.skip("the layout of small results does not depend on the layout of a tensor")
    xp = executor.xp
    for made, lies in itertools.product(one.strided[:1], (False, True)):
        a = made()
        x = laid_out(xp, a.x, layout) if lies else executor.put(a.x)
        small = [name for name in one.names if name not in OPS[one.op].tensors]
        bases, out = [], []
        if small:
            shape = a.result(one.op, small[0])[0]
            bases.append(xp.full((*(2 * size for size in shape), len(small)), SENTINEL, np.float32))
        for name in one.names:
            shape = a.result(one.op, name)[0]
            if name in small:
                index = small.index(name)
                steps = tuple(slice(None, None, -2 if index % 2 else 2) for _ in shape)
                out.append(bases[0][(*steps, index)])
            else:
                base, view = LAYOUTS[layout](xp, shape, a.x.dtype)
                bases.append(base)
                out.append(view)
        for base in bases:
            base.fill(SENTINEL)
        given = tuple(out) if len(out) > 1 else out[0]
        found = a.checked(one.op, executor, x=x, out=given, tile=one.tile(x, None))
        assert all(came is array for came, array in zip(tupled(found), out, strict=True))
        for array in out:
            array.fill(SENTINEL)
        assert all(bool((base == SENTINEL).all()) for base in bases)  # no memory between the elements was written


@of(WORKING)
def test_broadcast_inputs(one: Contract, executor: Executor) -> None:
    xp, tile = executor.xp, one.tile(one.made().x, None)
    cuts = (np.s_[:, :, :1, :1], np.s_[:1], np.s_[..., :1], np.s_[:, :, :1], np.s_[:1, :1, :1, :1])
    for name, cut in itertools.product(names_of(one, TENSORS), cuts):
        a = one.made()
        source = np.ascontiguousarray(getattr(a, name)[cut])
        setattr(a, name, np.broadcast_to(source, a.x.shape))
        there = xp.broadcast_to(executor.put(source), a.x.shape)
        assert 0 in there.strides
        a.checked(one.op, executor, **{name: there}, tile=tile)
    a, small = one.made(), {}
    for name in names_of(one, SMALL):
        values = getattr(a, name)
        source = values.reshape(-1)[3:4].reshape((1,) * values.ndim).copy()
        setattr(a, name, np.broadcast_to(source, values.shape))
        small[name] = xp.broadcast_to(executor.put(source), values.shape)
    a.checked(one.op, executor, **small, tile=tile)


@of(one for one in WORKING if names_of(one, SMALL))
@pytest.mark.parametrize("layout", ["every other", "Fortran", "reversed", "misaligned"])
def test_small_arrays_of_any_strides(one: Contract, layout: str, executor: Executor) -> None:
    a = one.made()
    for shape in one.saved if names_of(one, STATISTICS) else one.saved[:1]:
        small = {
            name: laid_out(
                executor.xp, getattr(a, name).reshape(shape) if name in STATISTICS else getattr(a, name), layout
            )
            for name in names_of(one, SMALL)
        }
        a.checked(one.op, executor, **small, tile=one.tile(a.x, None))


@of(WORKING)
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_unaligned_arrays(one: Contract, state: str) -> None:
    """NumPy arrays that are not aligned to their element size, as in packed records and file formats."""
    a = one.made()
    forget_calls()
    call = partial(a.checked, one.op, CPU, tile=one.tile(a.x, None))
    if state == "warm":
        call(out=one.out(a))
    for name, given in itertools.product(names_of(one, (*TENSORS, *SMALL)), (False, True)):
        for _ in range(2):
            call(out=one.out(a) if given else None, **{name: unaligned(getattr(a, name))})
    for index in range(len(one.names)):
        out = tupled(one.out(a))
        out = tuple(unaligned(array) if i == index else array for i, array in enumerate(out))
        for _ in range(2):
            call(out=out if len(out) > 1 else out[0])


@of([one for one in WORKING if len(one.names) > 1])
def test_an_out_of_another_length(one: Contract) -> None:
    a = one.made()
    with pytest.raises(TypeError, match=rf"^out: a tuple of 1, expected a tuple of \d: {one.names[0]}, "):
        a.call(one.op, CPU, out=one.out(a)[:1])


@of(WORKING)
@pytest.mark.parametrize("rank", range(1, 9))
def test_ranks(one: Contract, rank: int, executor: Executor) -> None:
    if rank == 1 and not one.ranks(rank):
        pytest.skip("x needs at least two dimensions")
    for a in one.ranks(rank):
        a.checked(one.op, executor, tile=one.tile(a.x, None))
        if rank > 2 and one.alike and a.sizes[0] == "NCHW":
            last = {name: laid_out(executor.xp, getattr(a, name), "channels last") for name in names_of(one, TENSORS)}
            a.checked(one.op, executor, **last, tile=one.tile(last["x"], None))


@of(STREAMING)
def test_results_have_the_memory_layout_of_x(one: Contract, executor: Executor) -> None:
    """If the op accepts channels-last strides (`alike`). Otherwise results are contiguous."""
    for made in one.strided:
        a = made()
        turned = "channels last" if a.sizes[0] == "NCHW" else "channels first"
        x = laid_out(executor.xp, a.x, turned)
        for dy in (executor.put(a.dy), laid_out(executor.xp, a.dy, turned)):
            for given in (x, executor.put(a.x)):
                result = tupled(a.call(one.op, executor, x=given, dy=dy, tile=one.tile(given, None)))[0]
                assert result.flags.c_contiguous if not one.alike else result.strides == given.strides
        for layout in ("reversed", "every other", "padded rows", "inner channels", "Fortran"):
            x = laid_out(executor.xp, a.x, layout)
            assert tupled(a.call(one.op, executor, x=x, tile=one.tile(x, None)))[0].flags.c_contiguous


class Sub(np.ndarray):
    """A subclass that changes nothing."""


OTHER_DTYPES = [(one, name) for one in group.CONTRACTS[:1] for name in DTYPES if name != "float32"]


@pytest.mark.parametrize(
    ("one", "dtype"),
    [*((one, "float32") for one in WORKING), *OTHER_DTYPES],
    ids=named,
)
def test_subclasses_of_numpy_arrays(one: Contract, dtype: str, tmp_path: Any) -> None:
    """They are read and written without a copy, and a repeated call with them is found in the cache of calls."""
    a = one.made(dtype)
    mapped = np.memmap(tmp_path / "x", DTYPES[dtype], "w+", shape=a.x.shape)
    mapped[...] = a.x
    forget_calls()
    call = partial(a.checked, one.op, CPU, tile=one.tile(a.x, None))
    for x in (mapped, a.x.view(Sub)):
        expected = tupled(call())
        known = len(OPS[one.op].calls)
        for _ in range(2):
            shape, result = a.result(one.op, one.names[0])
            y = np.memmap(tmp_path / "y", result, "w+", shape=shape)
            found = tupled(call(x=x, out=one.first(y)))
            assert found[0] is y
            assert all(map(np.array_equal, found, expected))
        assert len(OPS[one.op].calls) == known + 1
        read_only(x)
        assert all(map(np.array_equal, tupled(call(x=x)), expected))


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "strategy", "layout", "changes"),
    [
        pytest.param(one, *case, id=f"{one.op}-{case[0] or 'fitting'}-{case[1] or 'contiguous'}")
        for one in WORKING
        for case in one.in_place
    ],
)
def test_in_place(
    one: Contract, strategy: str | None, layout: str | None, changes: Arguments, executor: Executor
) -> None:
    a, name = one.made(), OPS[one.op].in_place[one.names[0]]
    assert one.names[0] in ("y", "dx")

    def lie(values: np.ndarray) -> Any:
        return executor.put(values) if layout is None else laid_out(executor.xp, values, layout)

    if "backward" not in one.op:
        changes = {}
    for alias in (lambda array: array, lambda array: array[...]):
        tensors = {each: lie(getattr(a, each)) for each in names_of(one, TENSORS)}
        out = one.first(alias(tensors[name]))
        tile = one.tile(tensors["x"], strategy)
        found = a.checked(one.op, executor, **tensors, **changes, out=out, tile=tile)
        assert tupled(found)[0] is tupled(out)[0]


@of(STREAMING)
def test_outputs_between_the_elements_of_inputs(one: Contract, executor: Executor) -> None:
    """Two halves of one concatenated tensor share a span of addresses and no element."""
    a, name = one.made(), OPS[one.op].in_place[one.names[0]]
    N, C, *spatial = a.x.shape
    buffer = executor.xp.full((N, 2 * C, *spatial), SENTINEL, np.float32)
    buffer[:, :C] = executor.put(getattr(a, name))
    a.checked(one.op, executor, **{name: buffer[:, :C]}, out=one.first(buffer[:, C:]), tile=one.tile(a.x, None))
    assert np.array_equal(executor.get(buffer[:, :C]), getattr(a, name))


@of(WORKING)
def test_inputs_may_be_one_array(one: Contract, executor: Executor) -> None:
    a, there = one.made(), {}
    for names in (TENSORS, STATISTICS, ("gamma", "beta"), ("sum_dy", "sum_dy_xmu")):
        given = names_of(one, names)
        for name in given:
            setattr(a, name, getattr(a, given[0]))
        there |= dict.fromkeys(given, executor.put(getattr(a, given[0])) if given else None)
    for out in (None, one.out(a, executor.xp)):
        a.checked(one.op, executor, **there, out=out, tile=one.tile(a.x, None))


@pytest.mark.parametrize(
    ("one", "strategy"),
    [(one, strategy) for one in MASKED for strategy in one.masked],
    ids=named,
)
@pytest.mark.parametrize("given", [True, False])
def test_masks(one: Contract, strategy: str | None, given: bool, executor: Executor) -> None:
    for mask in one.masks:
        check_mask(one, strategy, mask, given, executor)


def check_mask(one: Contract, strategy: str | None, mask: tuple[bool, ...], given: bool, executor: Executor) -> None:
    """Call the op with that mask, in every form that is accepted."""
    a = one.made()
    out = one.out(a, executor.xp) if given else None
    if mask == (False, False, True):  # x is not read for dbeta alone
        a.x = np.full_like(a.x, np.nan)
    kinds = [flagged(one.op, mask), flagged(one.op, [*map(np.bool_, mask)])]
    if "output_mask" in taken(one.op):
        kinds.append({"output_mask": list(mask)})
    for kind in kinds:
        found = a.checked(one.op, executor, **kind, out=out, tile=one.tile(a.x, strategy))
        if mask == (False, False, True):
            axes = (0, 1) if isinstance(a, LayerArrays) else (0, 2, 3)
            np.testing.assert_allclose(executor.get(found[-1]), a.dy.sum(axes, dtype=float), rtol=0, atol=1e-5)
    for array, flag in zip(out or (), wanted(one.op, flagged(one.op, mask)), strict=False):
        assert flag or bool((array == SENTINEL).all())


@of(MASKED)
def test_masked_off_outputs_may_be_any_array(one: Contract, executor: Executor) -> None:
    a, xp = one.made(), executor.xp
    mask = flagged(one.op, (False, True, True))
    saved = next(name for name in STATISTICS if name in OPS[one.op].inputs)
    x, mean = executor.put(a.x), executor.put(getattr(a, saved))
    for others in ((x, mean), (xp.zeros((2, 3), np.int32), x)):
        out = tuple(
            array if flag else others[index]
            for index, (array, flag) in enumerate(zip(one.out(a, xp), wanted(one.op, mask), strict=True))
        )
        a.checked(one.op, executor, **{"x": x, saved: mean}, **mask, out=out, tile=one.tile(a.x, None))
    assert np.array_equal(executor.get(x), a.x)
    assert np.array_equal(executor.get(mean), getattr(a, saved))


@pytest.mark.parametrize(
    ("one", "index"),
    [(one, index) for one in WORKING for index in range(len(one.empty))],
    ids=named,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("given", [True, False])
def test_empty_arrays(one: Contract, index: int, dtype: str, given: bool, executor: Executor) -> None:
    """Without elements, statistics are NaN and sums are 0."""
    with np.errstate(all="ignore"):
        a, xp = one.empty[index](dtype), executor.xp
    assert a.x.size == 0
    for mask in one.masks:
        flags = flagged(one.op, mask) if one in MASKED else {}
        out = one.out(a, xp) if given else None
        found = tupled(a.call(one.op, executor, **flags, out=out))
        assert [came is not None for came in found] == wanted(one.op, a.given(one.op) | flags)
        arrays = tupled(out) if given else (None,) * len(found)
        for name, came, array in zip(one.names, found, arrays, strict=True):
            shape, usual = a.result(one.op, name)
            if came is None:
                assert array is None or bool((array == SENTINEL).all())
                continue
            assert (came.shape, came.dtype) == (shape, usual if array is None else array.dtype)
            assert bool((xp.isnan(came) if name in STATISTICS else came == 0).all())


@of(WORKING)
def test_dtypes_of_results(one: Contract, executor: Executor) -> None:
    """All combinations of dtypes. The arrays have no samples, so no kernel has to be built."""
    statistics, parameters = names_of(one, STATISTICS), names_of(one, ("gamma", "beta"))
    accepted = 0
    for x_type in DTYPES:
        with np.errstate(all="ignore"):
            a = one.empty[0](x_type)
        sums = "float64" if x_type == "float64" else "float32"
        kinds = [[*DTYPES]] * bool(statistics) + [[None, *DTYPES]] * len(parameters)
        for types in itertools.product(*kinds):
            given = dict(zip([*statistics[:1], *parameters], types, strict=True))
            allowed = {name: parameter_dtypes(x_type) if name in parameters else (sums, x_type) for name in given}
            wrong = [name for name, dtype in given.items() if dtype is not None and dtype not in allowed[name]]
            b = replace(a)  # type: ignore[type-var]
            for name, dtype in given.items():
                old = getattr(a, name)
                made = None if dtype is None else np.zeros(old.shape, DTYPES[dtype])
                for each in statistics if name in STATISTICS else [name]:
                    setattr(b, each, made)
            if wrong:
                with pytest.raises(TypeError, match=rf"^({'|'.join(wrong)}): dtype"):
                    b.call(one.op, executor)
                continue
            accepted += 1
            found = tupled(b.call(one.op, executor))
            assert [r.dtype for r in found] == [b.result(one.op, name)[1] for name in one.names]
    # Parameters are absent or have x's dtype. If that has 16 bits, float32 is accepted too, and if it is float32, both
    # dtypes of 16 bits. Statistics are never absent, and have x's dtype or, if that has 16 bits, float32.
    several = len(parameters)
    assert accepted == 2**several + 4**several + 2 * 2 ** bool(statistics) * 3**several


GAMMA = [one for one in WORKING if names_of(one, ("gamma",))]


@pytest.mark.parametrize(
    ("one", "dtype"),
    [*((one, "float32") for one in GAMMA), *((one, "float64") for one in group.CONTRACTS)],
    ids=named,
)
def test_without_gamma_or_beta(one: Contract, dtype: str, executor: Executor) -> None:
    for names in (("gamma", "beta"), ("beta",), ("gamma",)):
        a = replace(one.made(dtype), **dict.fromkeys(names))  # type: ignore[type-var]
        a.checked(one.op, executor, tile=one.tile(a.x, None))


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(kind: str) -> Any:
    """Parametrise by contract and by its calls of that kind: "large" or "dirty"."""
    return pytest.mark.parametrize(
        ("one", "case"),
        [
            pytest.param(one, case, id=f"{one.op}, {label}")
            for one in WORKING
            for label, case in getattr(one, kind).items()
        ],
    )


def lying(one: Contract, case: Any, executor: Executor) -> tuple[Any, dict[str, Any], cunorm.Tile, int]:
    """The arrays, the tensors in their memory layout, the tile, and the bytes of workspace of such a call."""
    made, strategy, layout = case
    a = made()
    tensors = {name: executor.put(getattr(a, name)) for name in names_of(one, TENSORS)}
    if layout is not None:
        tensors = {name: laid_out(executor.xp, getattr(a, name), layout) for name in tensors}
    tile = strategy if isinstance(strategy, cunorm.Tile) else one.tile(tensors["x"], strategy)
    return a, tensors, tile, a.plan(one.op, tile, layout is not None).workspace_nbytes


@memory("large")
def test_no_hidden_copies(one: Contract, case: Any) -> None:
    a, tensors, tile, needed = lying(one, case, CPU)
    arguments = {**a.given(one.op), **tensors, "tile": tile}
    slack = 16384

    def call(**more: Any) -> Any:
        return invoke(one.op, {**arguments, **more})

    call()  # a first call fills caches, whose dictionaries may grow by more than the slack
    peak, found = peak_of(call)
    made = sum(array.nbytes for array in tupled(found))
    assert made <= peak <= made + needed + slack
    again = partial(call, out=found, workspace=np.empty(needed, np.uint8))
    again()
    peak, _ = peak_of(again)
    assert peak <= slack


@memory("dirty")
def test_workspace_of_any_content(one: Contract, case: Any, executor: Executor) -> None:
    a, tensors, tile, needed = lying(one, case, executor)

    def call(workspace: Any) -> list[bytes]:
        found = a.call(one.op, executor, **tensors, tile=tile, workspace=workspace)
        return [executor.get(array).tobytes() for array in tupled(found)]

    alone = call(None)
    dirty = executor.xp.full(-(-needed // 8) * 8 + 32, 0xFF, np.uint8)  # also as whole int64
    for workspace in (dirty, dirty, dirty[16:], dirty[:needed], dirty.view(np.int64)):
        assert call(workspace) == alone
    dirty.fill(0xFF)
    call(dirty)
    assert bool((dirty[needed:] == 0xFF).all())  # nothing is written after the workspace of the plan


@of(WORKING)
def test_the_cache_distinguishes_calls_that_differ_in_one_argument(one: Contract, executor: Executor) -> None:
    """Alternate such calls, so that a cache key that lacks an argument gives a wrong result."""
    a: Any = (one.square or one.made)()
    checked: Callable[..., Any] = partial(a.checked, one.op, executor)
    tile = one.tile(a.x, None)
    names = names_of(one, TENSORS)
    lie = ["reversed", *["channels last"] * one.alike]
    lying = [{name: laid_out(executor.xp, getattr(a, name), layout) for name in names} for layout in lie]
    for _ in range(2):
        for gamma, beta in ((a.gamma, a.beta), (None, a.beta), (a.gamma, None), (None, None)):
            for tensors in ({}, *lying):
                fitting = one.tile(tensors.get("x", a.x), None)
                replace(a, gamma=gamma, beta=beta).checked(one.op, executor, **tensors, tile=fitting)
        for eps in (1e-5, 0.0, 1, np.float32(0.5)) if "eps" in taken(one.op) else ():
            checked(eps=eps, tile=tile)
        for mask in one.masks if one in MASKED else ():
            checked(**flagged(one.op, mask), tile=tile)
        for chosen in (tile, one.right_tile):
            checked(tile=chosen)
