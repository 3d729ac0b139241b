"""What must work of the public contract of BatchNorm's functions: layouts, in place, masks, empties, dtypes, memory.

What must be refused is in test_batch_norm_contract.py, batch_norm_gather_stats in test_batch_norm_gather_calls.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm.core.arrays import DTYPES
from tests.conftest import Executor
from tests.ops.batch_norm.test_batch_norm import tile_of as tile_fields
from tests.support.contract import peak_of, read_only, unaligned
from tests.support.problems import BATCH_OPS, LAYOUTS, SENTINEL, BatchArrays, batch_arrays, laid_out

STATS, ELEMT, REDUCE, INPUT = BATCH_OPS
KINDS = {STATS: "stats", ELEMT: "elemt", REDUCE: "reduce", INPUT: "input"}
COUNT = {STATS: 2, ELEMT: 1, REDUCE: 4, INPUT: 1}
FLAGS = ("input_g", "gamma_g", "beta_g")
TENSORS = ("x", "dy")
MASKS = list(itertools.product((True, False), repeat=3))


def tile_of(kind: str, strategy: str) -> cunorm.Tile:
    """A tile proper: a dictionary is checked in every call, and its call not remembered."""
    return cunorm.Tile.of(tile_fields(kind, strategy))


def strategy_of(x: Any) -> str:
    """The one that takes x as it lies: rows of channels, or planes."""
    return "column" if x.ndim == 2 or x.transpose(0, *range(2, x.ndim), 1).flags.c_contiguous else "block"


def run(op: str, a: BatchArrays, executor: Executor, out: Any = None, tile: Any = None, **changes: Any) -> Any:
    """Call an op on these arrays, some of them lying elsewhere; flags and numbers are changes too."""
    given = dict(zip(BATCH_OPS[op], a.given(op), strict=True))
    given = {name: changes.pop(name, value) for name, value in given.items()}
    there = {
        name: value if value is not getattr(a, name) or name == "count" else executor.put(value)
        for name, value in given.items()
    }
    # What a test does not vary of x, dy, sums ... stays out of the way: only flags, eps and workspace are left.
    options = {name: value for name, value in changes.items() if name in ("eps", "workspace", *FLAGS)}
    tile = tile or tile_of(KINDS[op], strategy_of(there["x"]))
    return getattr(cunorm, op)(**there, out=out, tile=tile, **options)


def check(op: str, a: BatchArrays, found: Any, executor: Executor) -> None:
    a.check(op, tuple(map(executor.get, found)) if isinstance(found, tuple) else executor.get(found))


def vectors_of(op: str, executor: Executor, C: int = 8, dtype: Any = np.float32) -> tuple[Any, ...]:
    return tuple(executor.xp.full(C, SENTINEL, dtype) for _ in range(COUNT[op]))


# ---- memory layouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", BATCH_OPS)
def test_strided_inputs(op: str, layout: str, executor: Executor) -> None:
    a, xp = batch_arrays((3, 8, 5, 7)), executor.xp
    x, dy = laid_out(xp, a.x, layout), laid_out(xp, a.dy, layout)
    for changes in ({"x": x, "dy": dy}, {"x": x}, {"dy": dy}):
        check(op, a, run(op, a, executor, **changes), executor)
    assert np.array_equal(executor.get(x), a.x)  # inputs are only read
    assert np.array_equal(executor.get(dy), a.dy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [ELEMT, INPUT])
def test_strided_outputs(op: str, layout: str, executor: Executor) -> None:
    a, xp = batch_arrays((3, 8, 5, 7)), executor.xp
    for x in (executor.put(a.x), laid_out(xp, a.x, layout)):
        base, out = LAYOUTS[layout](xp, a.x.shape, a.x.dtype)
        base.fill(SENTINEL)
        assert run(op, a, executor, x=x, out=out) is out
        check(op, a, out, executor)
        out.fill(SENTINEL)
        assert bool((base == SENTINEL).all())  # nothing was written between the elements


@pytest.mark.parametrize("op", [STATS, REDUCE])
def test_strided_outputs_of_channels(op: str, executor: Executor) -> None:
    a = batch_arrays()
    base = executor.xp.full((8, 2, 16), SENTINEL, np.float32)
    out = (base[:, 0, 3], base[::-1, 1, 1], base[2, 0, ::2][::-1], base[4, 1, 5:13])[: COUNT[op]]
    found = run(op, a, executor, out=out)
    assert all(came is given for came, given in zip(found, out, strict=True))
    check(op, a, found, executor)
    for array in out:
        array.fill(SENTINEL)
    assert bool((base == SENTINEL).all())


@pytest.mark.parametrize("op", BATCH_OPS)
def test_broadcast_inputs(op: str, executor: Executor) -> None:
    xp = executor.xp
    for name, cut in itertools.product(
        TENSORS, (np.s_[:, :, :1, :1], np.s_[:1], np.s_[..., :1], np.s_[:1, :1, :1, :1])
    ):
        a = batch_arrays()
        source = np.ascontiguousarray(getattr(a, name)[cut])
        setattr(a, name, np.broadcast_to(source, a.x.shape))
        there = xp.broadcast_to(executor.put(source), a.x.shape)
        assert 0 in there.strides
        tile = tile_of(KINDS[op], "block")
        check(op, a, run(op, a, executor, tile=tile, **{name: there}), executor)
    a, small = batch_arrays(), {}
    for name in ("mean", "invstd", "gamma", "beta", "sum_dy", "sum_dy_xmu"):
        setattr(a, name, np.broadcast_to(getattr(a, name)[3:4].copy(), (8,)))
        small[name] = xp.broadcast_to(executor.put(getattr(a, name)[:1].copy()), (8,))
    check(op, a, run(op, a, executor, **small), executor)


@pytest.mark.parametrize("layout", ["reversed", "every other", "misaligned"])
@pytest.mark.parametrize("op", [ELEMT, REDUCE, INPUT])
def test_small_arrays_of_any_strides(op: str, layout: str, executor: Executor) -> None:
    a = batch_arrays()
    names = ("mean", "invstd", "gamma", "beta", "sum_dy", "sum_dy_xmu")
    small = {name: laid_out(executor.xp, getattr(a, name), layout) for name in names}
    check(op, a, run(op, a, executor, **small), executor)


@pytest.mark.parametrize("op", BATCH_OPS)
def test_arrays_off_their_elements_boundary(op: str) -> None:
    a, executor = batch_arrays(), Executor("cpu")
    for name in set(BATCH_OPS[op]) - {"count"}:
        for _ in range(2):
            check(op, a, run(op, a, executor, **{name: unaligned(getattr(a, name))}), executor)
    out = unaligned(np.zeros_like(a.x)) if COUNT[op] == 1 else tuple(map(unaligned, vectors_of(op, executor)))
    check(op, a, run(op, a, executor, out=out), executor)


@pytest.mark.parametrize("rank", range(2, 9))
@pytest.mark.parametrize("op", BATCH_OPS)
def test_ranks(op: str, rank: int, executor: Executor) -> None:
    a = batch_arrays((2, 8, *(3, 1, 2, 1, 2, 3)[: rank - 2]))
    check(op, a, run(op, a, executor), executor)
    if rank > 2:
        last = {name: laid_out(executor.xp, getattr(a, name), "channels last") for name in TENSORS}
        check(op, a, run(op, a, executor, **last), executor)


@pytest.mark.parametrize("op", [ELEMT, INPUT])
def test_results_lie_in_memory_as_x_does(op: str, executor: Executor) -> None:
    a, xp = batch_arrays((2, 8, 3, 5)), executor.xp
    last = laid_out(xp, a.x, "channels last")
    for dy in (executor.put(a.dy), laid_out(xp, a.dy, "channels last")):
        assert run(op, a, executor, x=last, dy=dy).strides == last.strides
        assert run(op, a, executor, dy=dy).flags.c_contiguous
    for layout in ("reversed", "every other", "padded rows", "inner channels", "Fortran"):
        assert run(op, a, executor, x=laid_out(xp, a.x, layout)).flags.c_contiguous


def test_subclasses_of_numpy_arrays(tmp_path: Any) -> None:
    a, executor = batch_arrays(), Executor("cpu")
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=a.x.shape)
    mapped[...] = a.x
    for op in (*BATCH_OPS, *BATCH_OPS):
        check(op, a, run(op, a, executor, x=mapped), executor)
    read_only(mapped)
    for op in BATCH_OPS:
        check(op, a, run(op, a, executor, x=mapped), executor)


@pytest.mark.parametrize("op", BATCH_OPS)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_no_hidden_copies(op: str, layout: str) -> None:
    a, slack = batch_arrays((2, 8, 64, 64)), 16384
    tensors = {name: getattr(a, name) for name in TENSORS}
    if layout == "channels last":
        tensors = {name: laid_out(np, value, layout) for name, value in tensors.items()}
    tile = tile_of(KINDS[op], "column" if layout == "channels last" else "block")
    planned = {"shape": (2, 64, 64, 8), "data_format": "NHWC"} if layout == "channels last" else {"shape": a.x.shape}
    needs = cunorm.plan(op, dtype="float32", device="cpu", tile=tile, **planned).workspace_nbytes
    arguments = {name: tensors.get(name, getattr(a, name)) for name in BATCH_OPS[op]}
    call = functools.partial(getattr(cunorm, op), **arguments, tile=tile)
    peak, found = peak_of(call)
    made = sum(array.nbytes for array in (found if isinstance(found, tuple) else (found,)))
    assert made <= peak <= made + needs + slack
    peak, _ = peak_of(functools.partial(call, out=found, workspace=np.empty(needs, np.uint8)))
    assert peak <= slack


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [None, "channels last", "reversed", "misaligned", "misaligned channels last"])
@pytest.mark.parametrize(("op", "name"), [(ELEMT, "x"), (INPUT, "dy")])
def test_in_place(op: str, name: str, layout: str | None, executor: Executor) -> None:
    a = batch_arrays()

    def lie(values: np.ndarray) -> Any:
        return executor.put(values) if layout is None else laid_out(executor.xp, values, layout)

    for alias in (lambda array: array, lambda array: array[...]):
        tensors = {each: lie(getattr(a, each)) for each in TENSORS}
        out = alias(tensors[name])
        assert run(op, a, executor, **tensors, out=out) is out
        check(op, a, out, executor)


def test_inputs_may_be_one_array(executor: Executor) -> None:
    a = batch_arrays()
    a.dy, a.invstd, a.beta, a.sum_dy_xmu = a.x, a.mean, a.gamma, a.sum_dy
    x, mean, gamma, total = (executor.put(each) for each in (a.x, a.mean, a.gamma, a.sum_dy))
    same = {"x": x, "dy": x, "mean": mean, "invstd": mean, "gamma": gamma, "beta": gamma}
    same |= {"sum_dy": total, "sum_dy_xmu": total}
    for op in (ELEMT, REDUCE, INPUT):
        for out in (None, executor.xp.zeros_like(x) if COUNT[op] == 1 else vectors_of(op, executor)):
            check(op, a, run(op, a, executor, **same, out=out), executor)


@pytest.mark.parametrize("strategy", ["block", "column"])
def test_the_sums_may_be_rows_of_one_array(strategy: str, executor: Executor) -> None:
    a, xp = batch_arrays(), executor.xp
    tensors = (
        {each: laid_out(xp, getattr(a, each), "channels last") for each in TENSORS} if strategy == "column" else {}
    )
    for packed in (xp.zeros((2, 8), np.float32), xp.zeros((8, 2), np.float32).T, xp.zeros((2, 16), np.float32)[:, ::2]):
        for rest in ((None, None), vectors_of(REDUCE, executor)[2:]):
            packed.fill(SENTINEL)
            found = run(REDUCE, a, executor, out=(packed[0], packed[1], *rest), **tensors)
            check(REDUCE, a, found, executor)
            check(REDUCE, a, (packed[0], packed[1], None, None), executor)


def test_sums_of_any_dtype_are_rounded_once(executor: Executor) -> None:
    """What comes in a wide dtype, rounded to the narrow one: the same bits, but for a sum that lies between two."""
    a = batch_arrays()
    wide = tuple(map(executor.get, run(REDUCE, a, executor)))
    dtypes = [DTYPES[name] for name in ("float16", "float64", "bfloat16", "float32")]
    out = tuple(executor.xp.full(8, SENTINEL, dtype) for dtype in dtypes)
    for given in (out, (out[0], None, *out[2:])):
        found = run(REDUCE, a, executor, out=given)
        check(REDUCE, a, found, executor)
        for came, plain, array in zip(found, wide, given, strict=True):
            assert came.dtype == (plain.dtype if array is None else array.dtype)
            if array is None or array.dtype != np.float64:
                assert executor.get(came).tobytes() == plain.astype(came.dtype).tobytes()


@pytest.mark.parametrize("flags", MASKS)
@pytest.mark.parametrize("given", [True, False])
def test_masks(flags: tuple[bool, ...], given: bool, executor: Executor) -> None:
    a = batch_arrays()
    out = vectors_of(REDUCE, executor) if given else None
    if flags == (False, False, True):  # only dbeta: x is not read
        a.x = np.full_like(a.x, np.nan)
    wanted = [flags[0], *flags]
    for kind in (bool, np.bool_):
        found = run(REDUCE, a, executor, out=out, **dict(zip(FLAGS, map(kind, flags), strict=True)))
        assert [came is not None for came in found] == wanted
        check(REDUCE, a, found, executor)
    for array, flag in zip(out or (), wanted, strict=False):
        assert flag or bool((array == SENTINEL).all())


def test_masked_off_outputs_may_be_any_array(executor: Executor) -> None:
    a = batch_arrays()
    x, mean = executor.put(a.x), executor.put(a.mean)
    for other in (mean, executor.xp.zeros((2, 3), np.int32)):
        out = (x, other, *vectors_of(REDUCE, executor)[2:])
        check(REDUCE, a, run(REDUCE, a, executor, x=x, mean=mean, input_g=False, out=out), executor)
    assert np.array_equal(executor.get(x), a.x)
    assert np.array_equal(executor.get(mean), a.mean)


@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3), (0, 8), (2, 0, 3), (0, 0), (2, 8, 3, 0, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("given", [True, False])
def test_empty(shape: tuple[int, ...], dtype: str, given: bool, executor: Executor) -> None:
    xp, C, sums = executor.xp, shape[1], DTYPES["float64" if dtype == "float64" else "float32"]
    x, gamma = xp.zeros(shape, DTYPES[dtype]), xp.ones((C,), DTYPES[dtype])
    mean, invstd = cunorm.batch_norm_stats(x, out=vectors_of(STATS, executor, C, sums) if given else None)
    for statistic in (mean, invstd):
        assert (statistic.shape, statistic.dtype) == ((C,), sums)
        assert bool(xp.isnan(statistic).all())
    for flags in MASKS:
        out = vectors_of(REDUCE, executor, C, x.dtype) if given else None
        found = cunorm.batch_norm_backward_reduce(
            x, x, mean, invstd, gamma, out=out, **dict(zip(FLAGS, flags, strict=True))
        )
        assert [came is not None for came in found] == [flags[0], *flags]
        expected = [x.dtype] * 4 if given else [sums, sums, x.dtype, x.dtype]
        for index, came in enumerate(found):
            if came is not None:
                assert (came.shape, came.dtype) == ((C,), expected[index])
                assert bool((came == 0).all())
            elif out is not None:
                assert bool((out[index] == SENTINEL).all())
    out = xp.empty(shape, x.dtype) if given else None
    for y in (
        cunorm.batch_norm_elemt(x, mean, invstd, gamma, out=out),
        cunorm.batch_norm_backward_elemt(x, x, mean, invstd, gamma, mean, invstd, 1, out=out),
    ):
        assert (y.shape, y.dtype) == (shape, x.dtype)


def test_dtypes_of_results(executor: Executor) -> None:
    """The whole product of dtypes, on arrays without samples: nothing has to be built for it."""
    xp, accepted = executor.xp, 0
    for x_type, stats, gamma, other in itertools.product(DTYPES, DTYPES, (None, *DTYPES), (None, *DTYPES)):
        sums = "float64" if x_type == "float64" else "float32"
        x, mean = xp.zeros((0, 4, 3), DTYPES[x_type]), xp.zeros((4,), DTYPES[stats])
        g, b = (None if name is None else xp.zeros((4,), DTYPES[name]) for name in (gamma, other))
        if stats not in (sums, x_type) or gamma not in (None, sums, x_type):
            for op, rest in ((ELEMT, ()), (REDUCE, ()), (INPUT, (mean, mean, 1))):
                arrays = (x, mean, mean, g) if op == ELEMT else (x, x, mean, mean, g)
                with pytest.raises(TypeError, match=r"^(mean|gamma): dtype"):
                    getattr(cunorm, op)(*arrays, *rest)
            continue
        if other not in (None, sums, x_type):
            with pytest.raises(TypeError, match=r"^beta: dtype"):
                cunorm.batch_norm_elemt(x, mean, mean, g, b)
        else:
            accepted += 1
            assert cunorm.batch_norm_elemt(x, mean, mean, g, b).dtype == x.dtype
            assert [r.dtype for r in cunorm.batch_norm_stats(x)] == [DTYPES[sums]] * 2
        found = cunorm.batch_norm_backward_reduce(x, x, mean, mean, g)
        assert [r.dtype for r in found] == [DTYPES[stats]] * 2 + [DTYPES[gamma or stats]] * 2
        totals = mean if other is None else b  # of any supported dtype
        assert cunorm.batch_norm_backward_elemt(x, x, mean, mean, g, totals, totals, 2).dtype == x.dtype
    assert accepted == 4 + 4 + 18 + 18


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("op", [STATS, REDUCE])
def test_workspace_of_any_content(op: str, layout: str, executor: Executor) -> None:
    a = batch_arrays((5, 8, 9, 9))
    planned, tensors, strategy = {"shape": a.x.shape}, {}, "block"
    if layout == "channels last":
        planned, strategy = {"shape": (5, 9, 9, 8), "data_format": "NHWC"}, "column"
        tensors = {name: laid_out(executor.xp, getattr(a, name), layout) for name in TENSORS}
    plan = cunorm.plan(op, dtype="float32", device="cpu", tile=tile_of(KINDS[op], strategy), **planned)
    assert plan.workspace_nbytes > 0

    def call(workspace: Any) -> list[bytes]:
        return [executor.get(array).tobytes() for array in run(op, a, executor, workspace=workspace, **tensors)]

    alone = call(None)
    dirty = executor.xp.full(plan.workspace_nbytes + 32, 0xFF, np.uint8)
    for workspace in (dirty, dirty, dirty[16:], dirty[: plan.workspace_nbytes], dirty.view(np.int64)):
        assert call(workspace) == alone
    dirty.fill(0xFF)
    call(dirty)
    assert bool((dirty[plan.workspace_nbytes :] == 0xFF).all())  # nothing is written behind what the plan asks for


def test_one_call_is_not_taken_for_another(executor: Executor) -> None:
    """Calls that differ in one thing only, in turn, so that a cache that forgets that thing answers wrongly."""
    a = batch_arrays((2, 2, 2, 2))
    last = {name: laid_out(executor.xp, getattr(a, name), "channels last") for name in TENSORS}
    for _ in range(2):
        for flags in MASKS:
            found = run(REDUCE, a, executor, **dict(zip(FLAGS, flags, strict=True)))
            assert [each is not None for each in found] == [flags[0], *flags]
            check(REDUCE, a, found, executor)
        for op, tensors in itertools.product(BATCH_OPS, ({}, last)):
            for gamma, beta in ((a.gamma, a.beta), (None, a.beta), (a.gamma, None), (None, None)):
                b = BatchArrays(a.dy, a.x, a.mean, a.invstd, gamma, beta, a.sum_dy, a.sum_dy_xmu, a.count)
                check(op, b, run(op, b, executor, **tensors), executor)
        for eps in (1e-5, 0.0, 1, np.float32(0.5)):
            a.check(STATS, tuple(map(executor.get, run(STATS, a, executor, eps=eps))), eps=float(eps))
        for count in (8, 2.5, np.int64(3), np.float32(8), 2**40, 1e-3):
            a.count = count
            check(INPUT, a, run(INPUT, a, executor), executor)
        for strategy in ("block", "split"):
            check(REDUCE, a, run(REDUCE, a, executor, tile=tile_of("reduce", strategy)), executor)


def test_the_parts_are_a_whole(executor: Executor) -> None:
    """The four functions and gather_stats of a world of one are BatchNorm, forward and backward."""
    a = batch_arrays((4, 8, 3, 3))
    x, dy, gamma, beta = (executor.put(each) for each in (a.x, a.dy, a.gamma, a.beta))
    mean, invstd = cunorm.batch_norm_stats(x)
    mean, invstd = cunorm.batch_norm_gather_stats(mean[None], invstd[None], [a.count])
    y = cunorm.batch_norm_elemt(x, mean, invstd, gamma, beta)
    sum_dy, sum_dy_xmu, dgamma, dbeta = cunorm.batch_norm_backward_reduce(dy, x, mean, invstd, gamma)
    dx = cunorm.batch_norm_backward_elemt(dy, x, mean, invstd, gamma, sum_dy, sum_dy_xmu, a.count)
    values, grads = (np.moveaxis(each.astype(float), 1, 0).reshape(8, -1) for each in (a.x, a.dy))
    xhat = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5)
    exact_y = xhat * a.gamma[:, None] + a.beta[:, None]
    scale = a.gamma[:, None] / np.sqrt(values.var(1, keepdims=True) + 1e-5)
    exact_dx = scale * (grads - grads.mean(1, keepdims=True) - xhat * (grads * xhat).mean(1, keepdims=True))
    for came, exact in ((y, exact_y), (dx, exact_dx)):
        flat = np.moveaxis(executor.get(came), 1, 0).reshape(8, math.prod((4, 3, 3)))
        np.testing.assert_allclose(flat, exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(executor.get(dgamma), (grads * xhat).sum(1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(executor.get(dbeta), grads.sum(1), rtol=0, atol=2e-5)
